"""Heal: knowledge distillation of a teacher's next-token distribution into a (folded) student.

    plan      refuse early: inputs, destination, device, checkpoint                    heal_plan.py, resume.py
    targets   the teacher's top-k on every scored row, once; the teacher is freed      heal_targets.py, targets.py
    prefix    frozen layers, once per batch                                            prefix.py
    train     T accepted steps; held-out loss before, every eval_every, at the end     heal_loop.py
    write     the best weights, as a directory like the student's                      this file

The held-out loss of the untouched student is a candidate (step 0), so the result is never worse than the start on val.
A step with a non-finite loss or gradient changes nothing, counts as skipped and is not one of the T; the next batch
follows. Checkpoints (checkpoint_dir.py, saver.py) let a run that ended early go on with the same bits;
docs/long_runs.md says what that means for a user.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import shutil
from typing import Any

from cortiq_kernels import backend
from cortiq_kernels.model.hf import check_destination, write_model
from cortiq_kernels.model.weights import Weights, check_values
from cortiq_kernels.recipes.checkpoint_dir import CheckpointDir
from cortiq_kernels.recipes.errors import TrainingFailed
from cortiq_kernels.recipes.finished import inputs_of
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.heal_loop import Feed, Loop
from cortiq_kernels.recipes.heal_plan import HealPlan, plan_heal, trained_parameters
from cortiq_kernels.recipes.heal_targets import obtain_targets
from cortiq_kernels.recipes.inputs import Progress, Ticks, silent
from cortiq_kernels.recipes.opening import known, nothing_left, opened, run_locked
from cortiq_kernels.recipes.prefix import PrefixCache, run_prefix
from cortiq_kernels.recipes.provenance import provenance
from cortiq_kernels.recipes.resume import rounding
from cortiq_kernels.recipes.saver import Saver
from cortiq_kernels.recipes.stopping import shielded
from cortiq_kernels.recipes.target_dir import discard_targets


@dataclasses.dataclass(frozen=True)
class HealReport:
    """What a heal did, the parts before it was resumed included. Losses are held-out means per weighted token, called
    `loss_name` (NLL, KL or mixed).
    """

    out: str
    loss_name: str
    loss_start: float
    loss_best: float
    best_step: int
    steps: int
    skipped: int
    trained_parameters: int
    seconds_per_step: float
    tokens_per_second: float
    teacher_seconds: float
    seconds: float
    evaluations: list[tuple[int, float]]
    device: str
    dtype: str
    peak_device_bytes: int | None
    notes: list[str]
    already_done: bool = False
    """the output was there, made by this run, and nothing was done: figures are those of its cortiq.json, times 0"""


def run(cfg: HealConfig, progress: Progress = silent) -> HealReport:
    """Heal `cfg.student` and write `cfg.out`; see the module docstring and spec of `HealConfig`. With `cfg.resume` and
    an output that this run has made already there is nothing to do, and the report says so.

    Events: "plan", "resume", "tick" (phases teacher and prefix), "note", "eval", "step", "skip", "checkpoint", "write".
    Raises ValueError (InputError, ModelError, DataError) before any work for input that cannot be used (a checkpoint of
    another run, and an output that another process writes, included); TrainingFailed when training does not recover; no
    output is written in either case (OUT.targets stays, for the next try). A signal raises `Stopped` (a
    KeyboardInterrupt), with a checkpoint in OUT.resume once a step was done.
    """

    def check_models(plan: HealPlan) -> None:
        if plan.teacher is not None:  # the student is loaded only after the teacher has worked, perhaps for hours
            check_values(plan.student, plan.dtype.dtype)

    return run_locked(
        cfg,
        plan_heal,
        already=lambda plan: _already(plan, progress),
        check_output=lambda plan, done: done or check_destination(plan.student.path, cfg.out, 0),
        work=lambda plan, done: _run(plan, progress, done),
        check_models=check_models,
    )


def _already(plan: HealPlan, progress: Progress) -> HealReport:
    """Nothing to do but to remove what a kill left beside the output. The run log is that of the run that made it."""
    cfg, made = plan.cfg, plan.made
    assert made is not None
    text = nothing_left(plan, progress, made["steps"])
    _tidy(cfg)
    losses = [(int(d), math.nan if loss is None else float(loss)) for d, loss in made["losses"]]
    return HealReport(
        out=os.path.realpath(cfg.out),
        loss_name=made["loss_name"],
        loss_start=losses[0][1],
        loss_best=dict(losses)[made["best_step"]],
        best_step=made["best_step"],
        steps=made["steps"],
        skipped=made["skipped"],
        trained_parameters=trained_parameters(plan.student.geometry, cfg.train, cfg.train_from),
        seconds_per_step=0.0,
        tokens_per_second=0.0,
        teacher_seconds=0.0,
        seconds=0.0,
        evaluations=losses,
        device=made["device"],
        dtype=made["dtype"],
        peak_device_bytes=None,
        notes=[text],
        already_done=True,
    )


def _tidy(cfg: HealConfig) -> None:
    """The output is written: checkpoint and targets beside it go."""
    with shielded():
        CheckpointDir(cfg.out).remove()
        discard_targets(cfg)


def _run(plan: HealPlan, listener: Progress, output_done: bool) -> HealReport:
    """The work, with the output's lock held."""
    cfg, state, folder = plan.cfg, plan.checkpoint, CheckpointDir(plan.cfg.out)
    progress, notes = opened(plan, listener)
    device = plan.device.device
    backend.reset_peak(device)
    with backend.deterministic(cfg.deterministic):
        feed, teacher_seconds = None, 0.0
        if state is None or state["provenance"] is None:  # there are steps to do
            targets, teacher_seconds = obtain_targets(plan, progress)
            feed = Feed(plan, targets, _prefix(plan, progress))
        if state is not None:
            teacher_seconds = max(teacher_seconds, state["teacher_seconds"])
        weights = Weights.load(
            plan.student, dtype=plan.dtype.dtype, device=device, train=cfg.train, train_from=cfg.train_from,
            first_layer=plan.first_layer,
        )  # fmt: skip
        said = known(plan, prefix=rounding(plan.prefix, plan.dtype.dtype), teacher_seconds=teacher_seconds)
        saver = Saver(folder, cfg.checkpoint_every, said, progress, state["seconds"] if state else 0.0)
        loop = Loop(plan, weights, feed, progress, saver)
        if state is not None:
            loop.resume(state, folder.tensors(state))
        progress.again = False
        if feed is not None:
            loop.train()
    if loop.best.loss == math.inf:
        raise TrainingFailed(
            "heal: got no finite held-out loss, before or after training; expected one. Nothing written. "
            "Check the student (cortiq score), or use --dtype f32."
        )
    report = _report(loop, teacher_seconds)
    if state is not None and feed is None:
        origin = state["provenance"]
    else:
        origin = _provenance(plan, report)
        loop.save(origin)
    loop.best.restore(weights)
    progress({"event": "write", "out": str(cfg.out)})
    written = [] if output_done else _write(plan, weights, origin)
    _tidy(cfg)
    for note in written:  # such as what became of declared MTP layers
        progress({"event": "note", "text": note})
    return dataclasses.replace(
        report, out=os.path.realpath(cfg.out), seconds=saver.seconds, notes=[*plan.notes, *notes, *written]
    )


def _prefix(plan: HealPlan, progress: Progress) -> PrefixCache | None:
    """The frozen layers' output for all batches, or None where there are none or it does not fit."""
    if plan.prefix is None:
        return None
    progress({"event": "note", "text": plan.prefix.reason})
    if plan.prefix.dtype is None:
        return None
    device = plan.device.device
    cache = PrefixCache(plan.prefix.dtype, pin=device.type == "cuda")
    weights = Weights.load(plan.student, dtype=plan.dtype.dtype, device=device, train=None)
    run_prefix(weights, plan.batches, plan.cfg.train_from, cache, done=Ticks(progress, "prefix", len(plan.batches)))
    if cache.dtype != plan.prefix.dtype:
        progress({"event": "note", "text": "the residual stream does not fit float16: kept in bfloat16"})
    del weights
    backend.release(device)
    return cache


def _write(plan: HealPlan, weights: Weights, origin: dict[str, Any]) -> list[str]:
    """The output directory; sentences on what else changed. A full disk says what is needed."""
    cfg = plan.cfg
    try:
        return write_model(plan.student, cfg.out, replace=weights.export(), provenance=origin).notes
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(next(p for p in cfg.out.absolute().parents if p.exists())).free
        raise OSError(
            e.errno, f"{os.strerror(e.errno)}: writing {str(cfg.out)!r} takes {plan.student.total_bytes() / 2**20:.1f} "
            f"MiB, {free / 2**20:.1f} MiB are free; free some space and type the same command with --resume"
        ) from e  # fmt: skip


def _report(loop: Loop, teacher_seconds: float) -> HealReport:
    """What training did; paths, times of the whole and the notes of writing come last."""
    plan, cfg = loop.plan, loop.plan.cfg
    return HealReport(
        out=str(cfg.out),
        loss_name=cfg.loss_name,
        loss_start=loop.evaluations[0][1],
        loss_best=loop.best.loss,
        best_step=loop.best.step,
        steps=plan.steps,
        skipped=loop.skipped,
        trained_parameters=trained_parameters(plan.student.geometry, cfg.train, cfg.train_from),
        seconds_per_step=loop.step_seconds / plan.steps,
        tokens_per_second=loop.tokens / max(loop.step_seconds, 1e-9),
        teacher_seconds=teacher_seconds,
        seconds=0.0,
        evaluations=loop.evaluations,
        device=backend.describe(plan.device.device),
        dtype=backend.dtype_name(plan.dtype.dtype),
        peak_device_bytes=backend.peak_bytes(plan.device.device),
        notes=plan.notes,
    )


def _provenance(plan: HealPlan, report: HealReport) -> dict[str, Any]:
    teacher = plan.teacher
    return provenance(
        "heal",
        plan.cfg,
        model=plan.student,
        data_hash=plan.dataset.data_hash,
        teacher=str(teacher.path) if teacher else None,
        inputs=inputs_of(plan),
        loss_name=report.loss_name,
        steps=report.steps,
        best_step=report.best_step,
        losses=report.evaluations,
        skipped=report.skipped,
        device=report.device,
        dtype=report.dtype,
    )
