"""Heal: knowledge distillation of a teacher's next-token distribution into a (folded) student.

    plan      refuse early: inputs, destination, device                           heal_plan.py
    targets   the teacher's top-k on every scored row, once; the teacher is freed    heal_targets.py, targets.py
    prefix    frozen layers, once per batch                                        prefix.py
    train     T accepted steps; held-out loss before, every eval_every, at the end   this file
    write     the best weights, as a directory like the student's

The held-out loss of the untouched student is a candidate (step 0), so the result is never worse than the start on val.
A step with a non-finite loss or gradient changes nothing, counts as skipped and is not one of the T; the next batch
follows.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cortiq_kernels import backend
from cortiq_kernels.data.order import HEAL_SEED, Shuffler
from cortiq_kernels.model.hf import write_model
from cortiq_kernels.model.weights import Weights, check_values
from cortiq_kernels.recipes.checkpoint import Best
from cortiq_kernels.recipes.errors import TrainingFailed
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.heal_plan import HealPlan, plan_heal, trained_parameters
from cortiq_kernels.recipes.heal_targets import HealTargets, obtain_targets
from cortiq_kernels.recipes.inputs import Progress, Ticks, silent
from cortiq_kernels.recipes.prefix import PrefixCache, run_prefix
from cortiq_kernels.recipes.provenance import provenance
from cortiq_kernels.recipes.schedule import cosine_rate, genesis_factor, genesis_from, genesis_rate
from cortiq_kernels.recipes.target_dir import discard_targets
from cortiq_kernels.step import Evaluator, Micro, StepStats, Trainer
from cortiq_kernels.step.loss import pad_rows
from cortiq_kernels.step.update import AdamOptions

F16_LOSS_SCALE = 4096.0
MAX_SKIPS_IN_ROW = 20
ROW_MULTIPLE = 512  # scored rows of a batch on a GPU are padded to this


@dataclasses.dataclass(frozen=True)
class HealReport:
    """What a heal did. Losses are held-out means per weighted token, called `loss_name` (NLL, KL or mixed)."""

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


class Feed:
    """`feed[i]`: batch i of the plan (train, then val) with its targets and prefix stream, on the device."""

    def __init__(self, plan: HealPlan, targets: HealTargets, prefix: PrefixCache | None):
        self.batches, self.targets, self.prefix = plan.batches, targets, prefix
        self.device, self.dtype = plan.device.device, plan.dtype.dtype

    def __getitem__(self, i: int) -> Micro:
        x = None
        if self.prefix is not None:
            x = self.prefix[i].to(self.device, non_blocking=True).to(self.dtype)
        batch, targets = self.batches[i], self.targets[i]
        if self.device.type == "cuda":
            batch, targets = pad_rows(batch, targets, ROW_MULTIPLE)
        return Micro(batch.to(self.device, non_blocking=True), targets.to(self.device), x)


def run(cfg: HealConfig, progress: Progress = silent) -> HealReport:
    """Heal `cfg.student` and write `cfg.out`; see the module docstring and spec of `HealConfig`.

    Events: "plan", "tick" (phases teacher and prefix), "note", "eval", "step", "skip", "write". Raises ValueError
    (InputError, ModelError, DataError) before any work for input that cannot be used, TrainingFailed when training
    does not recover; no output is written in either case (OUT.targets stays, for the next try).
    """
    began = time.perf_counter()
    plan = plan_heal(cfg)
    if plan.teacher is not None:  # the student is loaded only after the teacher has worked, perhaps for hours
        check_values(plan.student, plan.dtype.dtype)
    progress({"event": "plan", **plan.describe()})
    for note in plan.notes:
        progress({"event": "note", "text": note})
    device = plan.device.device
    backend.reset_peak(device)
    with backend.deterministic(cfg.deterministic):
        targets, teacher_seconds = obtain_targets(plan, progress)
        prefix = _prefix(plan, progress)
        weights = Weights.load(
            plan.student, dtype=plan.dtype.dtype, device=device, train=cfg.train, train_from=cfg.train_from,
            first_layer=plan.first_layer,
        )  # fmt: skip
        loop = _Loop(plan, weights, Feed(plan, targets, prefix), progress)
        loop.train()
    if loop.best.loss == math.inf:
        raise TrainingFailed(
            "heal: got no finite held-out loss, before or after training; expected one. Nothing written. "
            "Check the student (cortiq score), or use --dtype f32."
        )
    loop.best.restore(weights)
    report = HealReport(
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
        seconds=time.perf_counter() - began,
        evaluations=loop.evaluations,
        device=backend.describe(device),
        dtype=backend.dtype_name(plan.dtype.dtype),
        peak_device_bytes=backend.peak_bytes(device),
        notes=plan.notes,
    )
    progress({"event": "write", "out": str(cfg.out)})
    written = write_model(plan.student, cfg.out, replace=weights.export(), provenance=_provenance(plan, report))
    discard_targets(cfg)
    for note in written.notes:  # such as what became of declared MTP layers
        progress({"event": "note", "text": note})
    return dataclasses.replace(report, out=str(written.path), notes=[*plan.notes, *written.notes])


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


class _Loop:
    """Training: the state that its steps and evaluations share."""

    def __init__(self, plan: HealPlan, weights: Weights, feed: Feed, progress: Progress):
        cfg = plan.cfg
        self.plan, self.cfg, self.weights, self.feed, self.progress = plan, cfg, weights, feed, progress
        scale = F16_LOSS_SCALE if plan.dtype.dtype == torch.float16 else 1.0
        options = AdamOptions(clip=cfg.clip, weight_decay=cfg.weight_decay)
        self.trainer = Trainer(weights, plan.n, cfg.window, options, loss_scale=scale)
        self.evaluator = Evaluator(weights, plan.n, cfg.window, self.trainer.buffers)
        self.best = Best()
        self.evaluations: list[tuple[int, float]] = []
        self.step_seconds = 0.0
        self.tokens = 0
        self.skipped = 0

    def train(self) -> None:
        """T accepted steps, with evaluations; the best weights are in `best` afterwards."""
        steps, every = self.plan.steps, self.cfg.eval_every
        self.evaluate(0)
        groups = self.groups()
        d = 1
        while d <= steps:
            began = time.perf_counter()
            micros = [self.feed[i] for i in next(groups)]
            rate = self.step(d, micros)
            stats = self.trainer.read()
            seconds = time.perf_counter() - began
            self.step_seconds += seconds
            self.tokens += len(micros) * self.plan.n
            self.skipped = stats.skipped
            if not stats.ok:
                self.skip(d, stats)
                continue
            self.progress(
                {
                    "event": "step",
                    "step": d,
                    "of": steps,
                    "loss": stats.loss,
                    "loss_name": self.cfg.loss_name,
                    "norm": stats.norm,
                    "rate": rate,
                    "seconds": seconds,
                    "tokens_per_s": len(micros) * self.plan.n / seconds,
                    "left_s": (steps - d) * self.step_seconds / d,
                    "skipped": stats.skipped,
                }
            )
            if d % every == 0 or d == steps:
                self.evaluate(d)
            d += 1

    def groups(self) -> Iterator[list[int]]:
        """Train batches of one step after another: each pass in its own order, its last step with what is left."""
        order = Shuffler(len(self.plan.train), HEAL_SEED ^ self.cfg.seed)
        while True:
            batches = order.next_pass()
            for a in range(0, len(batches), self.cfg.accumulate):
                yield batches[a : a + self.cfg.accumulate]

    def step(self, d: int, micros: list[Micro]) -> float:
        """Launch step d; returns its rate."""
        cfg = self.cfg
        if not cfg.genesis:
            rate = cosine_rate(cfg.lr, d, self.plan.steps, cfg.warm)
            self.trainer.step(micros, rate)
            return rate
        epoch = (d - 1) // self.plan.per_epoch
        start = genesis_from(epoch, self.weights.geometry.n_layers, cfg.train_from)
        rate = genesis_rate(cfg.lr, d, self.plan.steps)
        self.trainer.step(micros, rate, from_layer=start, factor=_factor(epoch, start))
        return rate

    def evaluate(self, d: int) -> None:
        """Held-out loss after step d; keeps the weights when it is the best."""
        n_train, n_val = len(self.plan.train), len(self.plan.val)
        loss = self.evaluator.loss(self.feed[n_train + j] for j in range(n_val))
        self.evaluations.append((d, loss))
        improved = self.best.offer(d, loss, self.weights)
        self.progress({
            "event": "eval", "step": d, "of": self.plan.steps, "loss": loss, "loss_name": self.cfg.loss_name,
            "best": self.best.loss, "best_step": self.best.step, "improved": improved,
        })  # fmt: skip

    def skip(self, d: int, stats: StepStats) -> None:
        """Report a skipped step, and give up when training does not recover."""
        self.progress({
            "event": "skip", "step": d, "loss": stats.loss, "norm": stats.norm, "skipped": stats.skipped,
            "in_row": stats.in_row, "scale": stats.scale,
        })  # fmt: skip
        in_all = max(MAX_SKIPS_IN_ROW, 0.05 * self.plan.steps)
        if stats.in_row >= MAX_SKIPS_IN_ROW or stats.skipped > in_all:
            raise TrainingFailed(
                f"heal: got {stats.in_row} steps in a row ({stats.skipped} in all) with a loss or gradient that is not "
                f"finite; expected fewer than {MAX_SKIPS_IN_ROW} in a row and at most {in_all:g} in all. Nothing was "
                "written. Check the student's weights (cortiq score), lower --lr, or use --dtype bf16 or f32."
            )


def _factor(epoch: int, start: int) -> Callable[[int], float]:
    return lambda layer: genesis_factor(epoch, layer, start)


def _provenance(plan: HealPlan, report: HealReport) -> dict[str, Any]:
    teacher = plan.teacher
    return provenance(
        "heal",
        plan.cfg,
        model=plan.student,
        data_hash=plan.dataset.data_hash,
        teacher=str(teacher.path) if teacher else None,
        loss_name=report.loss_name,
        steps=report.steps,
        best_step=report.best_step,
        losses=report.evaluations,
        skipped=report.skipped,
        device=report.device,
        dtype=report.dtype,
    )
