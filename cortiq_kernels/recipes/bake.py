"""Bake: a skill from a text. Masks on every MLP neuron, then the last MLPs tuned under them; a narrower model.

    plan      refuse early: inputs, destination, device, checkpoint                    bake_plan.py, resume.py
    A, B      gates, then weights under hard masks; what is kept of each               bake_loop.py
    write     masks and overlay beside the output, then the narrowed directory         this file

The first chunks of the train records are held out and choose in both phases, so what is written is no better founded
than they are: score it on test records. Checkpoints (training.py) let a run that ended early go on with the same bits.
docs/bake.md says what that means for a user.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from cortiq_kernels import backend
from cortiq_kernels.model import names
from cortiq_kernels.model.hf import check_destination, width_changed_updates, write_model
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes.bake_config import BakeConfig
from cortiq_kernels.recipes.bake_loop import Loop, perplexity
from cortiq_kernels.recipes.bake_plan import MASKS, OVERLAY, BakePlan, beside, plan_bake
from cortiq_kernels.recipes.checkpoint_dir import CheckpointDir
from cortiq_kernels.recipes.finished import inputs_of
from cortiq_kernels.recipes.heal_loop import Feed
from cortiq_kernels.recipes.inputs import Progress, silent
from cortiq_kernels.recipes.mask_file import write_masks
from cortiq_kernels.recipes.narrow import load_narrowed, narrowed_tensors, overlay_tensors
from cortiq_kernels.recipes.opening import known, nothing_left, opened, run_locked
from cortiq_kernels.recipes.outputs import write_file
from cortiq_kernels.recipes.provenance import provenance
from cortiq_kernels.recipes.saver import Saver
from cortiq_kernels.recipes.stopping import shielded
from cortiq_kernels.recipes.targets import TrueTokens
from cortiq_kernels.step import Evaluator


@dataclasses.dataclass(frozen=True)
class BakeReport:
    """What a bake came to. Perplexities are those of the held-out chunks: of the untouched `backbone`, `masked` by the
    exported masks (`masked_raw`: by the gates above tau), `overlaid` with the weights of phase B besides, and of the
    written `directory` alone, which in a looped stack keeps what any visit keeps in all of them.
    """

    out: str
    masks: str
    overlay: str | None
    backbone: float
    masked: float
    masked_raw: float
    overlaid: float
    directory: float
    pruned: float
    """share of closed neurons, aligned, over all visits"""
    pruned_raw: float
    target: float
    reached: bool
    kept: list[int]
    """neurons of each layer that the directory holds"""
    kept_by_visit: list[int]
    width_before: int
    best_step_a: int
    """0: the backbone, nothing is closed"""
    best_step_b: int
    """steps of phase B in the weights that were kept; 0: none, they are the backbone's own"""
    steps_a: int
    steps_b: int
    trained_layers: list[int]
    """layers whose weights phase B changed"""
    skipped: int
    parameters_before: int
    parameters_after: int
    seconds_per_step_a: float
    seconds_per_step_b: float
    seconds: float
    trace: list[dict[str, float]]
    """of phase A: step, l1, pruned, loss, raw_pruned, raw_loss, resurrected"""
    tuned: list[list[float]]
    """of phase B: step, held-out loss"""
    device: str
    dtype: str
    peak_device_bytes: int | None
    notes: list[str]
    already_done: bool = False
    """the output was there, made by this run, and nothing was done: figures are those of its cortiq.json, times 0"""


def run(cfg: BakeConfig, progress: Progress = silent) -> BakeReport:
    """Bake `cfg.model` and write `cfg.out` with its masks beside it; see the module docstring and `BakeConfig`. With
    `cfg.resume` and an output that this run has made already there is nothing to do, and the report says so.

    Events: "plan", "resume", "note", "eval", "step" (with phase), "skip", "checkpoint", "write". Raises ValueError
    (InputError, ModelError, DataError) before any work for input that cannot be used; TrainingFailed when no evaluation
    of phase A was finite, and when training does not recover; nothing is written in either case. A signal raises
    `Stopped`, with a checkpoint in OUT.resume once a step was done.
    """

    def already(plan: BakePlan) -> BakeReport:
        assert plan.made is not None
        text = nothing_left(plan, progress, plan.made["steps"])
        CheckpointDir(cfg.out).remove()
        return dataclasses.replace(_report(plan, plan.made, [text]), already_done=True)

    return run_locked(
        cfg,
        plan_bake,
        already=already,
        check_output=lambda plan, done: done or check_destination(plan.model.path, cfg.out, 0),
        work=lambda plan, done: _run(plan, progress, done),
    )


def _run(plan: BakePlan, listener: Progress, output_done: bool) -> BakeReport:
    """The work, with the output's lock held."""
    cfg, device, state, folder = plan.cfg, plan.device.device, plan.checkpoint, CheckpointDir(plan.cfg.out)
    progress, notes = opened(plan, listener)
    backend.reset_peak(device)
    with backend.deterministic(cfg.deterministic):
        training = state is None or state["provenance"] is None  # there are steps to do
        feed = Feed(plan, TrueTokens(plan.batches)) if training else None
        saver = Saver(
            folder, cfg.checkpoint_every, known(plan, two_copies=plan.two_copies), progress,
            state["seconds"] if state else 0.0,
        )  # fmt: skip
        loop = Loop(plan, feed, progress, saver)
        if state is not None:
            loop.resume(state, folder.tensors(state))
        else:
            loop.start()
        progress.again = False
        if feed is not None:
            loop.train()
        weights, trained = loop.trained()
        if state is not None and not training:
            origin = state["provenance"]
        else:
            origin = _provenance(loop, _directory_loss(loop, weights))
            loop.save(origin)
    told = findings(origin)
    for note in told:
        progress({"event": "note", "text": note})
    progress({"event": "write", "out": str(cfg.out)})
    written = [] if output_done else _write(loop, trained, origin)
    with shielded():
        folder.remove()
    for note in written:
        progress({"event": "note", "text": note})
    made = _report(plan, origin, [*plan.notes, *notes, *told, *written])
    steps_a, steps_b = max(cfg.steps_a, 1), max(plan.steps_b, 1)
    return dataclasses.replace(
        made, seconds=saver.seconds, seconds_per_step_a=(loop.step_seconds - loop.seconds_b) / steps_a,
        seconds_per_step_b=loop.seconds_b / steps_b, peak_device_bytes=backend.peak_bytes(device),
    )  # fmt: skip


def findings(made: dict[str, Any]) -> list[str]:
    """What a reader of the report must not miss."""
    notes, nan = [], math.nan

    def at(key: str) -> float:
        return nan if made[key] is None else float(made[key])

    if made["best_step_a"] == 0:
        notes.append("no mask improved the held-out perplexity of the backbone: all gates stay open, nothing is pruned")
    if not made["reached"]:
        target = made["settings"]["target_sparsity"]
        notes.append(
            f"the target of {target:.1%} closed neurons was not reached: the sparsest mask, {at('pruned'):.1%}, is "
            "written. Raise --steps-a or --l1-mult, or lower --align"
        )
    if made["steps_b"] and not made["best_step_b"]:
        notes.append("phase B did not improve the held-out perplexity: the weights are those of phase A, untouched")
    for key, words in (("masked", "masked model"), ("overlaid", "baked model")):
        if not at(key) <= at("backbone"):
            notes.append(
                f"the {words} is worse than the backbone: held-out perplexity {at(key):.3f}, was {at('backbone'):.3f}"
            )
    if at("directory") != at("overlaid"):
        notes.append(
            f"the directory alone runs what any visit keeps in every pass: perplexity {at('directory'):.3f}; the masks "
            "of each visit are in the mask file"
        )
    return notes


def _directory_loss(loop: Loop, weights: Weights | None) -> float:
    """Held-out loss of what is written, run without masks. In one pass that is the masked or tuned model itself."""
    plan = loop.plan
    if plan.model.geometry.num_loops == 1 or loop.best is None or loop.best.closed == 0:
        return _overlaid(loop)
    if weights is None:
        weights = load_narrowed(plan.model, loop.neurons(), dtype=plan.dtype.dtype, device=plan.device.device)
    n = plan.held.batch * plan.cfg.chunk
    assert loop.feed is not None
    return Evaluator(weights, n, plan.cfg.chunk).loss([loop.feed[len(plan.calib)]])


def _overlaid(loop: Loop) -> float:
    """Held-out loss under the masks of each visit, with what phase B improved."""
    assert loop.best is not None
    return loop.tune.best.loss if loop.tune and loop.tune.best.step > 0 else loop.best.loss


def _provenance(loop: Loop, directory: float) -> dict[str, Any]:
    """What the run came to: cortiq.json, the metadata of the mask file, and the report are made of it."""
    plan, best, tune = loop.plan, loop.best, loop.tune
    assert best is not None and loop.backbone is not None
    step_b = max(tune.best.step, 0) if tune else 0
    last = plan.model.geometry.n_layers
    keep = loop.neurons()
    return provenance(
        "bake",
        plan.cfg,
        model=plan.model,
        data_hash=plan.dataset.data_hash,
        inputs=inputs_of(plan),
        loss_name="NLL",
        backbone=perplexity(loop.backbone),
        masked=perplexity(best.loss),
        masked_raw=perplexity(loop.raw.loss),
        overlaid=perplexity(_overlaid(loop)),
        directory=perplexity(directory),
        pruned=best.closed / plan.n_gates,
        pruned_raw=loop.raw.closed / plan.n_gates,
        reached=best.closed >= plan.enough,
        kept=[len(k) for k in keep],
        kept_by_visit=[int(k.sum()) for k in loop.visits()],
        best_step_a=best.step,
        best_step_b=step_b,
        steps=plan.steps,
        steps_b=plan.steps_b,
        trained_layers=list(range(plan.train_from or 0, last)) if step_b else [],
        skipped=loop.skipped,
        trace=loop.trace,
        tuned=loop.tuned,
        device=backend.describe(plan.device.device),
        dtype=backend.dtype_name(plan.dtype.dtype),
        evaluated_in=backend.dtype_name(plan.eval_dtype),
    )


def _report(plan: BakePlan, made: dict[str, Any], notes: list[str]) -> BakeReport:
    """The report of a provenance; times come last."""
    cfg, g = plan.cfg, plan.model.geometry
    numbers = ("backbone", "masked", "masked_raw", "overlaid", "directory", "pruned", "pruned_raw")
    values: dict[str, Any] = {k: math.nan if made[k] is None else float(made[k]) for k in numbers}
    same = ("reached", "kept", "kept_by_visit", "best_step_a", "best_step_b", "steps_b", "trained_layers", "skipped",
            "trace", "tuned", "device", "dtype")  # fmt: skip
    return BakeReport(
        out=os.path.realpath(cfg.out), masks=str(beside(cfg.out, MASKS)),
        overlay=str(beside(cfg.out, OVERLAY)) if cfg.overlay else None, target=float(cfg.target),
        width_before=g.intermediate[0], steps_a=cfg.steps_a, parameters_before=names.parameter_count(g),
        parameters_after=names.parameter_count(g.with_widths(made["kept"])), seconds_per_step_a=0.0,
        seconds_per_step_b=0.0, seconds=0.0, peak_device_bytes=None, notes=notes,
        **values, **{k: made[k] for k in same},
    )  # fmt: skip


def _write(loop: Loop, trained: dict[str, Tensor], origin: dict[str, Any]) -> list[str]:
    """Masks, overlay and, last, the directory: what lies beside it counts once it is there. Sentences on what changed.
    """
    plan, best = loop.plan, loop.best
    assert best is not None
    cfg, g, keep, visits = plan.cfg, plan.model.geometry, loop.neurons(), loop.visits()
    logits = best.logits.split([len(v) for v in visits])
    f = g.intermediate[0]
    physical = [torch.zeros(f, dtype=torch.bool).index_fill_(0, k, True) for k in keep]
    write_masks(beside(cfg.out, MASKS), list(logits), visits, origin, physical)
    if cfg.overlay:
        write_file(beside(cfg.out, OVERLAY), save(overlay_tensors(plan.model, keep, trained), {"format": "pt"}))
    change = width_changed_updates(plan.model, [len(k) for k in keep])
    written = write_model(
        plan.model, cfg.out, replace=narrowed_tensors(plan.model, keep, trained), drop=change.drop,
        config_updates=change.config_updates, provenance=origin,
    )  # fmt: skip
    return [*change.notes, *written.notes]
