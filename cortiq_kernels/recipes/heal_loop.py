"""The training of a heal: T accepted steps, held-out losses, and checkpoints that it goes on from bit for bit
(training.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from cortiq_kernels import backend
from cortiq_kernels.data.batches import Batch
from cortiq_kernels.data.order import HEAL_SEED, Shuffler
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes.checkpoint import Best
from cortiq_kernels.recipes.heal_plan import HealPlan
from cortiq_kernels.recipes.heal_targets import HealTargets
from cortiq_kernels.recipes.logged import Logged
from cortiq_kernels.recipes.prefix import PrefixCache
from cortiq_kernels.recipes.saver import Saver
from cortiq_kernels.recipes.schedule import cosine_rate, genesis_factor, genesis_from, genesis_rate
from cortiq_kernels.recipes.skips import report_skip
from cortiq_kernels.recipes.training import Training, exact
from cortiq_kernels.step import Evaluator, Micro, StepStats, Trainer
from cortiq_kernels.step.inputs import Ahead
from cortiq_kernels.step.loss import pad_rows
from cortiq_kernels.step.update import AdamOptions

F16_LOSS_SCALE = 4096.0
ROW_MULTIPLE = 512  # scored rows of a batch on a GPU are padded to this, or to what makes 16 sizes at most


def row_multiple(n: int) -> int:
    """What the scored rows of batches of `n` tokens are padded to a multiple of: every size is a graph of its own."""
    return max(ROW_MULTIPLE, -(-n // (16 * ROW_MULTIPLE)) * ROW_MULTIPLE)


class Fed(Protocol):
    """What a plan says of its batches."""

    @property
    def batches(self) -> Sequence[Batch]: ...
    @property
    def device(self) -> backend.DeviceChoice: ...
    @property
    def dtype(self) -> backend.DtypeChoice: ...
    @property
    def n(self) -> int: ...


class Feed:
    """`feed[i]`: batch i of the plan (train, then val) with its targets and prefix stream, on the device.

    What will be asked for next is copied there while the device works on something else: `ahead`, `each`.
    """

    def __init__(self, plan: Fed, targets: HealTargets, prefix: PrefixCache | None = None):
        self.batches, self.targets, self.prefix = plan.batches, targets, prefix
        self.device, self.dtype = plan.device.device, plan.dtype.dtype
        self.multiple = row_multiple(plan.n)
        self._ahead = Ahead(self.device, self._host, backend.copy_lane(self.device))

    def __getitem__(self, i: int) -> Micro:
        micro = self._ahead[i]
        return micro if micro.x is None else micro._replace(x=micro.x.to(self.dtype))

    def ahead(self, indices: Iterable[int]) -> None:
        """Start copying these; the work on those taken so far is queued."""
        self._ahead.prepare(indices)

    def each(self, indices: Sequence[int]) -> Iterator[Micro]:
        """One after another: the next is copied while the device works on the last."""
        for at, i in enumerate(indices):
            yield self[i]
            self.ahead(indices[at + 1 : at + 2])

    def _host(self, i: int) -> Micro:
        batch, targets = self.batches[i], self.targets[i]
        if self.device.type == "cuda":
            batch, targets = pad_rows(batch, targets, self.multiple)
        return Micro(batch, targets, None if self.prefix is None else self.prefix[i])


class Groups:
    """Train batches of one step after another: each pass in its own order, its last step with what is left.

    `next` looks, `advance` moves on; `state` is JSON-able, and `Groups.resumed` continues from it inside a pass.
    """

    def __init__(self, n: int, accumulate: int, seed: int, base: int = HEAL_SEED):
        self._order, self._accumulate = Shuffler(n, base ^ seed), accumulate
        self._pass, self._at = self._order.next_pass(), 0

    def next(self) -> list[int]:
        """The batches of the coming step."""
        return self._pass[self._at : self._at + self._accumulate]

    def after_next(self) -> list[int]:
        """The batches of the step after it, as far as its pass is drawn."""
        return self._pass[self._at + self._accumulate : self._at + 2 * self._accumulate]

    def advance(self) -> None:
        """The coming step is done, whether it was accepted or not."""
        self._at += self._accumulate
        if self._at >= len(self._pass):
            self._pass, self._at = self._order.next_pass(), 0

    def state(self) -> dict[str, Any]:
        """Where it stands."""
        return {"order": self._order.state(), "at": self._at}

    @classmethod
    def resumed(cls, state: Mapping[str, Any], accumulate: int) -> Groups:
        """Goes on where `state` was taken."""
        groups = cls.__new__(cls)
        groups._order, groups._accumulate = Shuffler.from_state(state["order"]), accumulate
        groups._pass, groups._at = groups._order.order, int(state["at"])
        return groups


class Loop(Training):
    """What steps and evaluations share, and how far they are: `best` weights so far; `evaluations` (step, loss)."""

    def __init__(self, plan: HealPlan, weights: Weights, feed: Feed | None, progress: Logged, saver: Saver):
        super().__init__(progress, saver)
        cfg = plan.cfg
        self.plan, self.cfg, self.weights, self.feed = plan, cfg, weights, feed
        scale = F16_LOSS_SCALE if plan.dtype.dtype == torch.float16 else 1.0
        options = AdamOptions(clip=cfg.clip, weight_decay=cfg.weight_decay)
        self.trainer = Trainer(weights, plan.n, cfg.window, options, loss_scale=scale, policy=plan.activations.policy)
        self.evaluator = Evaluator(
            weights, plan.n, cfg.window, self.trainer.buffers, programs=self.trainer.programs
        )  # fmt: skip
        self.groups = Groups(len(plan.train), cfg.accumulate, cfg.seed)
        self.best = Best()
        self.evaluations: list[tuple[int, float]] = []
        self.tokens = 0

    @property
    def over(self) -> bool:
        return self.done == self.plan.steps

    @property
    def evaluation_is_due(self) -> bool:
        if self.evaluations and self.evaluations[-1][0] == self.done:
            return False
        return self.done % self.cfg.eval_every == 0 or self.over

    def step(self) -> None:
        assert self.feed is not None
        began = time.perf_counter()
        micros = [self.feed[i] for i in self.groups.next()]
        rate, start, factor = self._rates(self.done + 1)
        self.trainer.gradients(micros, from_layer=start)
        self.feed.ahead(self.groups.after_next())
        with self.changing():
            self.trainer.apply(rate, from_layer=start, factor=factor)
            stats = self.trainer.read()
            seconds = time.perf_counter() - began
            self.groups.advance()
            self.step_seconds += seconds
            self.tokens += len(micros) * self.plan.n
            self.skipped = stats.skipped
            if stats.ok:
                self.done += 1
                self._report(stats, rate, seconds, len(micros) * self.plan.n)
            else:
                fix = "Check the student's weights (cortiq score), lower --lr, or use --dtype bf16 or f32."
                report_skip("heal", self.progress, stats, done=self.done, of=self.plan.steps, fix=fix)

    def _rates(self, d: int) -> tuple[float, int | None, Callable[[int], float] | None]:
        """Of accepted step d: its rate, and where layers train at their own, the first of them and their factors."""
        cfg = self.cfg
        if not cfg.genesis:
            return cosine_rate(cfg.lr, d, self.plan.steps, cfg.warm), None, None
        epoch = (d - 1) // self.plan.per_epoch
        start = genesis_from(epoch, self.weights.geometry.n_layers, cfg.train_from)
        return genesis_rate(cfg.lr, d, self.plan.steps), start, lambda layer: genesis_factor(epoch, layer, start)

    def evaluate(self) -> None:
        """Held-out loss after the steps so far; keeps the weights when it is the best."""
        assert self.feed is not None
        feed, n_train, n_val = self.feed, len(self.plan.train), len(self.plan.val)
        loss = self.evaluator.loss(feed.each(range(n_train, n_train + n_val)))
        with self.changing():
            self.evaluations.append((self.done, loss))
            improved = self.best.offer(self.done, loss, self.weights)
            self.progress({
                "event": "eval", "step": self.done, "of": self.plan.steps, "loss": loss,
                "loss_name": self.cfg.loss_name, "best": self.best.loss, "best_step": self.best.step,
                "improved": improved,
            })  # fmt: skip

    def _report(self, stats: StepStats, rate: float, seconds: float, tokens: int) -> None:
        self.progress({
            "event": "step", "step": self.done, "of": self.plan.steps, "loss": stats.loss,
            "loss_name": self.cfg.loss_name, "norm": stats.norm, "rate": rate, "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "left_s": (self.plan.steps - self.done) * self.step_seconds / self.done, "skipped": stats.skipped,
        })  # fmt: skip

    def state(self) -> dict[str, Any]:
        return {
            "step": self.done,
            "of": self.plan.steps,
            "counters": self.trainer.counters(),
            "groups": self.groups.state(),
            "best": {"step": self.best.step, "loss": exact(self.best.loss)},
            "evaluations": [[d, exact(loss)] for d, loss in self.evaluations],
            "step_seconds": self.step_seconds,
            "tokens": self.tokens,
            "lines": self.progress.lines,
            "device": backend.describe(self.plan.device.device),
        }

    def tensors(self, over: bool = False) -> dict[str, Tensor]:
        """The best weights are left out where they are in it anyway (the step's own), or are the student's (step 0)."""
        best = {} if self.best.step in (0, -1) else {"best": self.best.state}
        if over:
            return best
        return self.trainer.tensors() | ({} if self.best.step == self.done else best)

    def resume(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint; `weights` hold the student's until now."""
        step, loss = int(state["best"]["step"]), float(state["best"]["loss"])
        if step >= 0:
            kept = tensors["best" if "best" in tensors else "master"] if step else self.weights.state()
            self.best = Best.kept(step, loss, kept)
        self.done = int(state["step"])
        if "master" in tensors:
            self.trainer.restore(tensors, state["counters"])
        self.groups = Groups.resumed(state["groups"], self.cfg.accumulate)
        self.evaluations = [(int(d), float(loss)) for d, loss in state["evaluations"]]
        self.step_seconds, self.tokens = float(state["step_seconds"]), int(state["tokens"])
        self.skipped = int(state["counters"]["skipped"])

