"""Masks (DTG-MA): a sigmoid gate on every MLP neuron, trained under L1 pressure that grows until enough of them close.

    plan      refuse early: inputs, destination, device, checkpoint                    masks_plan.py, resume.py
    targets   loss kl: the teacher's top-k on every scored row, once                   heal_targets.py
    train     steps on the gates alone (step/gates.py); evaluations with hard gates    masks_loop.py
    write     logits, gates and what is kept                                           mask_file.py

Checkpoints (training.py) let a run that ended early go on with the same bits.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from cortiq_kernels import backend
from cortiq_kernels.model.weights import check_values
from cortiq_kernels.recipes.checkpoint_dir import CheckpointDir
from cortiq_kernels.recipes.finished import inputs_of
from cortiq_kernels.recipes.heal_loop import Feed
from cortiq_kernels.recipes.heal_targets import obtain_targets
from cortiq_kernels.recipes.inputs import Progress, silent
from cortiq_kernels.recipes.mask_file import write_masks
from cortiq_kernels.recipes.masks_config import MasksConfig
from cortiq_kernels.recipes.masks_loop import Loop
from cortiq_kernels.recipes.masks_plan import MasksPlan, plan_masks
from cortiq_kernels.recipes.opening import known, nothing_left, opened, run_locked
from cortiq_kernels.recipes.outputs import check_files
from cortiq_kernels.recipes.provenance import provenance
from cortiq_kernels.recipes.saver import Saver
from cortiq_kernels.recipes.stopping import shielded
from cortiq_kernels.recipes.target_dir import discard_targets
from cortiq_kernels.step.gates import by_layer


@dataclasses.dataclass(frozen=True)
class MasksReport:
    """What a run learned; the logits are in the file `out`. Losses are held-out means per weighted token, called
    `loss_name`: `loss_open` with every neuron, `loss_best` with the mask that was written. `trace` has the pressure,
    the share of closed gates and the held-out loss of every evaluation.
    """

    out: str
    loss_name: str
    loss_open: float
    loss_best: float
    pruned: float
    target: float
    reached: bool
    best_step: int
    steps: int
    skipped: int
    gates: int
    kept: list[int]
    """open gates of each layer"""
    seconds_per_step: float
    tokens_per_second: float
    teacher_seconds: float
    seconds: float
    trace: list[dict[str, float]]
    """step, l1, pruned, loss"""
    device: str
    dtype: str
    """of the steps"""
    peak_device_bytes: int | None
    notes: list[str]
    already_done: bool = False
    """the output was there, made by this run, and nothing was done: figures are those of its metadata, times 0"""


def run(cfg: MasksConfig, progress: Progress = silent) -> MasksReport:
    """Learn masks and write `cfg.out`; see the module docstring and the fields of `MasksConfig`.

    With `cfg.resume` and an output that this run has made already there is nothing to do, and the report says so.

    Events: "plan", "resume", "note", "tick" (phase teacher), "eval", "step", "skip", "checkpoint", "write". Raises
    ValueError (InputError, ModelError, DataError) before any work for input that cannot be used (a checkpoint of
    another run included); TrainingFailed when no gate was ever closed, when no evaluation was finite, and when training
    does not recover. No output is written in either case (OUT.targets stays, for the next try). A signal raises
    `Stopped`, with a checkpoint in OUT.resume once a step was done.
    """

    def check_models(plan: MasksPlan) -> None:
        if plan.teacher is not None:  # the model is loaded only after the teacher has worked
            check_values(plan.model, plan.step_dtype.dtype)

    return run_locked(
        cfg,
        plan_masks,
        already=lambda plan: _already(plan, progress),
        check_output=lambda plan, done: check_files("masks", cfg, done=done),
        work=lambda plan, done: _run(plan, progress, done),
        check_models=check_models,
    )


def _already(plan: MasksPlan, progress: Progress) -> MasksReport:
    """Nothing to do but to remove what a kill left beside the output. The run log is that of the run that made it."""
    cfg, made = plan.cfg, plan.made
    assert made is not None
    text = nothing_left(plan, progress, made["steps"])
    _tidy(cfg)
    same = {k: made[k] for k in ("loss_name", "pruned", "reached", "best_step", "steps", "skipped", "kept", "trace")}
    return MasksReport(
        out=os.path.realpath(cfg.out), loss_open=number(made["loss_open"]), loss_best=number(made["loss_best"]),
        target=float(cfg.target), gates=plan.n_gates, seconds_per_step=0.0, tokens_per_second=0.0, teacher_seconds=0.0,
        seconds=0.0, device=made["device"], dtype=made["dtype"], peak_device_bytes=None, notes=[text],
        already_done=True, **same,
    )  # fmt: skip


def number(x: float | None) -> float:
    """A number of a provenance, where null was not finite."""
    return math.nan if x is None else float(x)


def _tidy(cfg: MasksConfig) -> None:
    """The output is written: checkpoint and targets beside it go."""
    with shielded():
        CheckpointDir(cfg.out).remove()
        discard_targets(cfg)


def _run(plan: MasksPlan, listener: Progress, output_done: bool) -> MasksReport:
    """The work, with the output's lock held."""
    cfg, device, state, folder = plan.cfg, plan.device.device, plan.checkpoint, CheckpointDir(plan.cfg.out)
    progress, notes = opened(plan, listener)
    backend.reset_peak(device)
    with backend.deterministic(cfg.deterministic):
        feed, teacher_seconds = None, 0.0
        if state is None or state["provenance"] is None:  # there are steps to do
            targets, teacher_seconds = obtain_targets(plan, progress)
            feed = Feed(plan, targets)
        if state is not None:
            teacher_seconds = max(teacher_seconds, state["teacher_seconds"])
        said = known(plan, two_copies=plan.two_copies, teacher_seconds=teacher_seconds)
        saver = Saver(folder, cfg.checkpoint_every, said, progress, state["seconds"] if state else 0.0)
        loop = Loop(plan, feed, progress, saver)
        if state is not None:
            loop.resume(state, folder.tensors(state))
        progress.again = False
        if feed is not None:
            loop.train()
    best = loop.result()
    reached = best.closed >= loop.enough
    if not reached:
        notes.append(
            f"the target of {float(cfg.target):.1%} closed gates was not reached in {loop.done} steps: the mask with "
            f"the most, {best.closed / plan.n_gates:.1%}, is written. Raise --max-steps, --l1-grow or --l1-init"
        )
        progress({"event": "note", "text": notes[-1]})
    kept = list(by_layer(best.kept, plan.model.geometry).values())
    report = MasksReport(
        out=os.path.realpath(cfg.out), loss_name=cfg.loss_name, loss_open=loop.open_loss, loss_best=best.loss,
        pruned=best.closed / plan.n_gates, target=float(cfg.target), reached=reached, best_step=best.step,
        steps=loop.done, skipped=loop.skipped, gates=plan.n_gates, kept=[int(k.sum()) for k in kept],
        seconds_per_step=loop.step_seconds / loop.done,
        tokens_per_second=loop.done * plan.n / max(loop.step_seconds, 1e-9), teacher_seconds=teacher_seconds,
        seconds=0.0, trace=loop.trace, device=backend.describe(device),
        dtype=backend.dtype_name(plan.step_dtype.dtype), peak_device_bytes=backend.peak_bytes(device),
        notes=[*plan.notes, *notes],
    )  # fmt: skip
    if state is not None and feed is None:
        origin = state["provenance"]
    else:
        origin = _provenance(plan, report)
        loop.save(origin)
    progress({"event": "write", "out": str(cfg.out)})
    if not output_done:
        with shielded():
            write_masks(cfg.out, list(by_layer(best.logits, plan.model.geometry).values()), kept, origin)
    _tidy(cfg)
    return dataclasses.replace(report, seconds=saver.seconds)


def _provenance(plan: MasksPlan, report: MasksReport) -> dict[str, Any]:
    return provenance(
        "masks",
        plan.cfg,
        model=plan.model,
        data_hash=plan.dataset.data_hash,
        teacher=str(plan.teacher.path) if plan.teacher else None,
        inputs=inputs_of(plan),
        loss_name=report.loss_name,
        loss_open=report.loss_open,
        loss_best=report.loss_best,
        pruned=report.pruned,
        reached=report.reached,
        kept=report.kept,
        steps=report.steps,
        best_step=report.best_step,
        trace=report.trace,
        skipped=report.skipped,
        device=report.device,
        dtype=report.dtype,
        evaluated_in=backend.dtype_name(plan.eval_dtype),
    )
