"""The training of masks: steps on the gates, evaluations with hard gates, and which mask is the result.

An evaluation closes the gates that are not above tau and opens the others; `pruned` is the share that is closed. While
it is below the target, 1 - keep_frac, the pressure becomes l1 * l1_grow + l1_step. The result is the mask with the
lowest held-out loss (the earliest of equals) of those at the target; training ends `settle` evaluations after the
target was first reached, or at max_steps, whose last step is evaluated too. When it is never reached, the mask with the
most closed gates (of equals the one with the lowest loss) is written, with a warning.

Why the pressure grows by a factor: linear growth stalls. On Qwen3.5-0.8B it is reported to stand at 15 % pruned from
step 700 on, and with a factor of 1.5 to reach 25 % in 325 steps; that was not run here, but the small model that ships
here does the same in kind (docs/results.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cortiq_kernels import backend
from cortiq_kernels.data.order import MASKS_SEED
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes.errors import TrainingFailed
from cortiq_kernels.recipes.heal_loop import F16_LOSS_SCALE, Feed, Groups
from cortiq_kernels.recipes.logged import Logged
from cortiq_kernels.recipes.masks_plan import MasksPlan
from cortiq_kernels.recipes.saver import Saver
from cortiq_kernels.recipes.skips import report_skip
from cortiq_kernels.recipes.training import Training, exact
from cortiq_kernels.step import Evaluator, GateTrainer
from cortiq_kernels.step.gates import by_layer, open_gates


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


class Loop(Training):
    """Training and what it has found: the pressure `l1`, the `best` mask, the `trace`. Without a `feed` there are no
    more steps.
    """

    def __init__(self, plan: MasksPlan, feed: Feed | None, progress: Logged, saver: Saver):
        super().__init__(progress, saver)
        cfg, device = plan.cfg, plan.device.device
        self.plan, self.cfg, self.feed = plan, cfg, feed
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
        self.l1, self.stop = cfg.l1_init, cfg.max_steps
        self.opened: float | None = None
        self.best: Found | None = None
        self.reached = False
        self.closed_ever = False
        self.trace: list[dict[str, float]] = []

    @property
    def over(self) -> bool:
        return self.done == self.stop

    @property
    def evaluation_is_due(self) -> bool:
        """Before the first step, every `eval_every`, and after the last one, which may be the first to settle."""
        if self.done == 0:
            return self.opened is None
        last = self.trace[-1]["step"] if self.trace else 0
        return last != self.done and (self.done % self.cfg.eval_every == 0 or self.over)

    def step(self) -> None:
        assert self.feed is not None
        began = time.perf_counter()
        self.trainer.gradients([self.feed[i] for i in self.groups.next()], self.l1)
        self.feed.ahead(self.groups.after_next())
        with self.changing():
            self.trainer.apply()
            stats = self.trainer.read()
            seconds = time.perf_counter() - began
            self.groups.advance()
            self.step_seconds += seconds
            self.skipped = stats.skipped
            if not stats.ok:
                fix = "Check the model's weights (cortiq score), lower --lr, or use --precision strict."
                report_skip("masks", self.progress, stats, done=self.done, of=self.cfg.max_steps, fix=fix)
                return
            self.done += 1
            self.progress({
                "event": "step", "step": self.done, "of": self.stop, "loss": stats.loss,
                "loss_name": self.cfg.loss_name, "norm": stats.norm, "rate": self.cfg.lr, "l1": self.l1,
                "seconds": seconds, "tokens_per_s": self.plan.n / seconds,
                "left_s": (self.stop - self.done) * self.step_seconds / self.done, "skipped": stats.skipped,
            })  # fmt: skip

    def evaluate(self) -> None:
        """Hard gates: their held-out loss, whether they are the best so far, and the pressure that follows. Before the
        first step with all gates open, which is no candidate.
        """
        if self.done == 0:
            loss = self._held_out()
            with self.changing():
                self.opened = loss
                self.progress(self._event(loss, 0, improved=False))
            return
        kept = self.trainer.kept(self.cfg.tau)
        loss = self._held_out(kept)
        closed = int((~kept).sum())
        at_target = closed >= self.enough
        new = Found(self.done, closed, loss, self.trainer.logits.cpu(), kept.cpu())
        with self.changing():
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

    def state(self) -> dict[str, Any]:
        best = self.best
        return {
            "step": self.done,
            "of": self.stop,
            "counters": self.trainer.counters(),
            "groups": self.groups.state(),
            "best": {"step": best.step, "closed": best.closed, "loss": exact(best.loss)} if best else None,
            "l1": exact(self.l1),
            "open_loss": exact(self.open_loss),
            "reached": self.reached,
            "closed_ever": self.closed_ever,
            "trace": [{k: exact(v) for k, v in t.items()} for t in self.trace],
            "step_seconds": self.step_seconds,
            "lines": self.progress.lines,
            "device": backend.describe(self.plan.device.device),
        }

    def tensors(self, over: bool = False) -> dict[str, Tensor]:
        """The best logits are left out where they are the step's own."""
        best = {"best": self.best.logits} if self.best else {}
        if over:
            return best
        return self.trainer.tensors() | ({} if self.best is None or self.best.step == self.done else best)

    def resume(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.done, self.stop = int(state["step"]), int(state["of"])
        if "logits" in tensors:
            self.trainer.restore(tensors, state["counters"])
        if (found := state["best"]) is not None:
            logits = tensors["best" if "best" in tensors else "logits"]
            kept = open_gates(logits.to(self.plan.device.device), self.cfg.tau).cpu()
            self.best = Found(int(found["step"]), int(found["closed"]), float(found["loss"]), logits, kept)
        self.groups = Groups.resumed(state["groups"], 1)
        self.l1, self.opened = float(state["l1"]), float(state["open_loss"])
        self.reached, self.closed_ever = bool(state["reached"]), bool(state["closed_ever"])
        whole = ("step",)
        self.trace = [{k: int(v) if k in whole else float(v) for k, v in t.items()} for t in state["trace"]]
        self.step_seconds, self.skipped = float(state["step_seconds"]), int(state["counters"]["skipped"])

    @property
    def open_loss(self) -> float:
        """The held-out loss with every gate open."""
        return math.nan if self.opened is None else self.opened

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
        assert self.feed is not None
        feed = self.feed
        g, acc, n = self.plan.model.geometry, self.evaluator.weights.acc_dtype, len(self.plan.train)
        self.evaluator.masks = None if kept is None else by_layer(kept.to(acc), g)
        return self.evaluator.loss(feed.each(range(n, n + len(self.plan.val))))

    def _event(self, loss: float, closed: int, *, improved: bool) -> dict[str, Any]:
        best = self.best
        return {
            "event": "eval", "step": self.done, "of": self.stop, "loss": loss, "loss_name": self.cfg.loss_name,
            "l1": self.l1, "pruned": closed / self.plan.n_gates, "improved": improved,
            "best": best.loss if best else None, "best_step": best.step if best else None,
        }  # fmt: skip
