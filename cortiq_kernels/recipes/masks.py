"""Masks (DTG-MA): a sigmoid gate on every MLP neuron, trained under L1 pressure that grows until enough of them close.

    plan      refuse early                                                             masks_plan.py
    targets   loss kl: the teacher's top-k on every scored row, once                   heal_targets.py
    train     steps on the gates alone (step/gates.py); evaluations with hard gates    this file
    write     logits, gates and what is kept                                           mask_file.py

An evaluation closes the gates that are not above tau and opens the others; `pruned` is the share that is closed. While
it is below the target, 1 - keep_frac, the pressure becomes l1 * l1_grow + l1_step. The result is the mask with the
lowest held-out loss (the earliest of equals) of those at the target; training ends `settle` evaluations after the
target was first reached, or at max_steps, whose last step is evaluated too. When it is never reached, the mask with the
most closed gates (of equals the one with the lowest loss) is written, with a warning.

Why the pressure grows by a factor: linear growth stalls. On Qwen3.5-0.8B it is reported to stand at 15 % pruned from
step 700 on, and with a factor of 1.5 to reach 25 % in 325 steps; here that was not run.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cortiq_kernels import backend
from cortiq_kernels.data.order import MASKS_SEED
from cortiq_kernels.model.weights import Weights, check_values
from cortiq_kernels.recipes.errors import TrainingFailed
from cortiq_kernels.recipes.heal_loop import F16_LOSS_SCALE, Feed, Groups
from cortiq_kernels.recipes.heal_targets import obtain_targets
from cortiq_kernels.recipes.inputs import Progress, silent
from cortiq_kernels.recipes.lock import check_unlocked, locked
from cortiq_kernels.recipes.mask_file import write_masks
from cortiq_kernels.recipes.masks_config import MasksConfig
from cortiq_kernels.recipes.masks_plan import MasksPlan, plan_masks
from cortiq_kernels.recipes.outputs import check_files
from cortiq_kernels.recipes.provenance import provenance
from cortiq_kernels.recipes.skips import report_skip
from cortiq_kernels.recipes.stopping import check, shielded, stop_on_signals
from cortiq_kernels.recipes.target_dir import discard_targets
from cortiq_kernels.step import Evaluator, GateTrainer
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


class Found(NamedTuple):
    """The gates at one evaluation, on the host: `closed` of all."""

    step: int
    closed: int
    loss: float
    logits: Tensor
    kept: Tensor


def better(new: Found, old: Found | None, enough: Fraction) -> bool:
    """Whether `new` takes the place of `old`: at least `enough` closed gates (a number) come first, then the loss;
    below that the number of closed gates, then the loss. Of equals the earlier stays; a loss that is not finite never
    wins.
    """
    if not math.isfinite(new.loss):
        return False
    if old is None:
        return True
    if new.closed >= enough and old.closed >= enough:
        return new.loss < old.loss
    return (new.closed, -new.loss) > (old.closed, -old.loss)


def run(cfg: MasksConfig, progress: Progress = silent) -> MasksReport:
    """Learn masks and write `cfg.out`; see the module docstring and the fields of `MasksConfig`.

    Events: "plan", "note", "tick" (phase teacher), "eval", "step", "skip", "write". Raises ValueError (InputError,
    ModelError, DataError) before any work for input that cannot be used; TrainingFailed when no gate was ever closed,
    when no evaluation was finite, and when training does not recover. Nothing is written in either case (OUT.targets
    stays, for the next try). A signal raises `Stopped`.
    """
    with stop_on_signals():
        cfg.check()
        check_unlocked("masks", cfg.out)
        plan = plan_masks(cfg)
        if plan.teacher is not None:  # the model is loaded only after the teacher has worked
            check_values(plan.model, plan.step_dtype.dtype)
        with locked("masks", cfg.out):
            check_files("masks", cfg)  # another run may have written it since the plan was made
            return _run(plan, progress)


def _run(plan: MasksPlan, progress: Progress) -> MasksReport:
    """The work, with the output's lock held."""
    began, cfg, device = time.perf_counter(), plan.cfg, plan.device.device
    progress({"event": "plan", **plan.describe()})
    for note in plan.notes:
        progress({"event": "note", "text": note})
    backend.reset_peak(device)
    with backend.deterministic(cfg.deterministic):
        targets, teacher_seconds = obtain_targets(plan, progress)
        loop = Loop(plan, Feed(plan, targets), progress)
        loop.train()
    best, notes = loop.result(), []
    reached = best.closed >= loop.enough
    if not reached:
        notes.append(
            f"the target of {float(cfg.target):.1%} closed gates was not reached in {loop.done} steps: the mask with "
            f"the most, {best.closed / plan.n_gates:.1%}, is written. Raise --max-steps, --l1-grow or --l1-init"
        )
        progress({"event": "note", "text": notes[0]})
    g = plan.model.geometry
    kept = list(by_layer(best.kept, g).values())
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
    progress({"event": "write", "out": str(cfg.out)})
    with shielded():
        write_masks(cfg.out, list(by_layer(best.logits, g).values()), kept, _provenance(plan, report))
        if plan.teacher is not None:
            discard_targets(cfg)
    return dataclasses.replace(report, seconds=time.perf_counter() - began)


class Loop:
    """Training and what it has found: `done` accepted steps, the pressure `l1`, the `best` mask, the `trace`."""

    def __init__(self, plan: MasksPlan, feed: Feed, progress: Progress):
        cfg, device = plan.cfg, plan.device.device
        self.plan, self.cfg, self.feed, self.progress = plan, cfg, feed, progress
        weights = Weights.load(plan.model, dtype=plan.step_dtype.dtype, device=device, train=None)
        scale = F16_LOSS_SCALE if weights.dtype == torch.float16 else 1.0
        self.trainer = GateTrainer(
            weights, plan.n, cfg.window, init=cfg.mask_init, rate=cfg.lr, gradient=cfg.backward, eps=cfg.eps,
            loss_scale=scale, policy=plan.activations.policy,
        )  # fmt: skip
        if plan.eval_dtype == weights.dtype:
            self.evaluator = Evaluator(
                weights, plan.n, cfg.window, self.trainer.buffers, programs=self.trainer.programs
            )  # fmt: skip
        else:
            copy = Weights.load(plan.model, dtype=plan.eval_dtype, device=device, train=None)
            self.evaluator = Evaluator(copy, plan.n, cfg.window)
        self.groups = Groups(len(plan.train), 1, cfg.seed, MASKS_SEED)
        self.enough = cfg.target * plan.n_gates
        self.l1, self.done, self.skipped, self.stop = cfg.l1_init, 0, 0, cfg.max_steps
        self.open_loss = math.nan
        self.best: Found | None = None
        self.reached = False
        self.closed_ever = False
        self.trace: list[dict[str, float]] = []
        self.step_seconds = 0.0

    def train(self) -> None:
        """Steps until the target has settled or `max_steps`, evaluations on the way and at the end."""
        self.open_loss = self._held_out()
        self.progress(self._event(self.open_loss, 0, improved=False))
        while self.done < self.stop:
            check()
            if self.step() and (self.done % self.cfg.eval_every == 0 or self.done == self.stop):
                self.evaluate()

    def step(self) -> bool:
        """One step; whether it was accepted."""
        began = time.perf_counter()
        self.trainer.gradients([self.feed[i] for i in self.groups.next()], self.l1)
        self.feed.ahead(self.groups.after_next())
        with shielded():
            self.trainer.apply()
            stats = self.trainer.read()
            seconds = time.perf_counter() - began
            self.groups.advance()
            self.step_seconds += seconds
            self.skipped = stats.skipped
            if not stats.ok:
                fix = "Check the model's weights (cortiq score), lower --lr, or use --precision strict."
                report_skip("masks", self.progress, stats, done=self.done, of=self.cfg.max_steps, fix=fix)
                return False
            self.done += 1
            self.progress({
                "event": "step", "step": self.done, "of": self.stop, "loss": stats.loss,
                "loss_name": self.cfg.loss_name, "norm": stats.norm, "rate": self.cfg.lr, "l1": self.l1,
                "seconds": seconds, "tokens_per_s": self.plan.n / seconds,
                "left_s": (self.stop - self.done) * self.step_seconds / self.done, "skipped": stats.skipped,
            })  # fmt: skip
        return True

    def evaluate(self) -> None:
        """Hard gates: their held-out loss, whether they are the best so far, and the pressure that follows."""
        kept = self.trainer.kept(self.cfg.tau)
        loss = self._held_out(kept)
        closed = int((~kept).sum())
        at_target = closed >= self.enough
        new = Found(self.done, closed, loss, self.trainer.logits.cpu(), kept.cpu())
        improved = better(new, self.best, self.enough)
        self.best = new._replace(logits=new.logits.clone()) if improved else self.best
        self.closed_ever |= closed > 0
        self.trace.append({"step": self.done, "l1": self.l1, "pruned": closed / self.plan.n_gates, "loss": loss})
        self.progress(self._event(loss, closed, improved=improved))
        if at_target and not self.reached:
            self.reached = True
            self.stop = min(self.cfg.max_steps, self.done + self.cfg.settle * self.cfg.eval_every)
        if not at_target:
            self.l1 = self.l1 * self.cfg.l1_grow + self.cfg.l1_step

    def result(self) -> Found:
        """The best mask; TrainingFailed when there is none."""
        if not self.closed_ever:
            raise TrainingFailed(
                f"masks: got no closed gate in any of {len(self.trace)} evaluations ({self.done} steps, pressure up to "
                f"{self.trace[-1]['l1']:.4g}); expected some. Nothing was written. Raise --max-steps, --l1-init or "
                "--lr."
            )
        if self.best is None:
            raise TrainingFailed(
                f"masks: got no finite held-out loss in {len(self.trace)} evaluations; expected one. Nothing was "
                "written. Check the model (cortiq score), or use --dtype f32."
            )
        return self.best

    def _held_out(self, kept: Tensor | None = None) -> float:
        """Mean loss on the val batches with the gates `kept` open and the others closed (None: all open)."""
        g, acc, n = self.plan.model.geometry, self.evaluator.weights.acc_dtype, len(self.plan.train)
        self.evaluator.masks = None if kept is None else by_layer(kept.to(acc), g)
        return self.evaluator.loss(self.feed.each(range(n, n + len(self.plan.val))))

    def _event(self, loss: float, closed: int, *, improved: bool) -> dict[str, Any]:
        best = self.best
        return {
            "event": "eval", "step": self.done, "of": self.stop, "loss": loss, "loss_name": self.cfg.loss_name,
            "l1": self.l1, "pruned": closed / self.plan.n_gates, "improved": improved,
            "best": best.loss if best else None, "best_step": best.step if best else None,
        }  # fmt: skip


def _provenance(plan: MasksPlan, report: MasksReport) -> dict[str, Any]:
    return provenance(
        "masks",
        plan.cfg,
        model=plan.model,
        data_hash=plan.dataset.data_hash,
        teacher=str(plan.teacher.path) if plan.teacher else None,
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
