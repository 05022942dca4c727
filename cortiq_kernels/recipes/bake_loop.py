"""The two phases of a bake, and what they choose.

    A   a gate per neuron of every visit of every MLP, on the loss of one chunk a step; all weights frozen. The gradient
        passes along the residual stream and through the MLPs only. The pressure grows by l1_step at each evaluation
    B   the MLPs of the last layers, narrowed to the neurons that stay, on the same loss, the same way

An evaluation measures the held-out chunks under hard gates. In phase A it does so twice: with the gates that are above
tau (raw), and with those that would be exported, rounded up to a multiple of `align` (keep.py), which decide. Without a
target the lowest loss wins, and the untouched backbone is a candidate, as step 0; with one, the lowest of those that
close enough, or, where none does, the mask that closes most (`masks_loop.better`). In phase B the lowest loss wins, and
the weights as they are without it are a candidate: they stay when no step improves on them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cortiq_kernels import backend
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes.bake_plan import BakePlan
from cortiq_kernels.recipes.checkpoint import Best
from cortiq_kernels.recipes.errors import TrainingFailed
from cortiq_kernels.recipes.heal_loop import F16_LOSS_SCALE, Feed
from cortiq_kernels.recipes.keep import keep_masks, keep_neurons, mask_init_logit
from cortiq_kernels.recipes.logged import Logged
from cortiq_kernels.recipes.masks_loop import Found, better
from cortiq_kernels.recipes.narrow import load_narrowed, visit_masks
from cortiq_kernels.recipes.saver import Saver
from cortiq_kernels.recipes.skips import report_skip
from cortiq_kernels.recipes.training import Training, exact
from cortiq_kernels.step import Evaluator, GateTrainer, Micro, StepStats, Trainer
from cortiq_kernels.step.gates import by_layer, open_gates
from cortiq_kernels.step.update import AdamOptions

CLIP = 1.0
SHOWN = 32  # newly closed neurons that an evaluation names


class Raw(NamedTuple):
    """The gates above tau at the chosen step, before they are aligned: closed ones, and their loss."""

    closed: int
    loss: float


class GatePhase:
    """Phase A: the trainer of the gates, and evaluations with hard ones."""

    def __init__(self, plan: BakePlan):
        cfg, g = plan.cfg, plan.model.geometry
        self.plan, self.cfg, self.geometry = plan, cfg, g
        weights = Weights.load(plan.model, dtype=plan.step_dtype.dtype, device=plan.device.device, train=None)
        self.trainer = GateTrainer(
            weights, cfg.chunk, cfg.chunk, init=mask_init_logit(g.num_loops), rate=cfg.lr_a, gradient="ffn", clip=CLIP
        )
        if plan.eval_dtype != weights.dtype:
            weights = Weights.load(plan.model, dtype=plan.eval_dtype, device=plan.device.device, train=None)
        self.evaluator = Evaluator(weights, plan.held.batch * cfg.chunk, cfg.chunk)
        self.l1 = cfg.l1_init * cfg.l1_mult
        self.seen = torch.ones(plan.n_gates, dtype=torch.bool)  # open at the evaluation before

    def gradients(self, micro: Micro) -> None:
        """The pressure is l1 / (F * L) on a gate, whatever the passes."""
        self.trainer.gradients([micro], self.l1 * self.geometry.num_loops)

    def kept(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(raw, aligned) open gates of flat logits, on the host."""
        cfg, parts = self.cfg, list(by_layer(logits, self.geometry).values())
        aligned = torch.cat(keep_masks(parts, cfg.tau, cfg.align, cfg.uniform))
        return open_gates(logits, cfg.tau).cpu(), aligned.cpu()

    def held_out(self, kept: Tensor | None, micro: Micro) -> float:
        """Held-out loss with these gates open (None: all)."""
        w = self.evaluator.weights
        gates = None if kept is None else by_layer(kept.to(w.device, w.acc_dtype), self.geometry)
        self.evaluator.masks = gates
        return self.evaluator.loss([micro])

    def newly_closed(self, raw: Tensor) -> list[str]:
        """Names `L{virtual layer}:{neuron}` of the gates that closed since the evaluation before."""
        parts = by_layer(self.seen & ~raw, self.geometry)
        return [f"L{i}:{int(j)}" for i, part in parts.items() for j in part.nonzero().flatten()]


class TunePhase:
    """Phase B on the narrowed model; `keep` are its neurons, `kept` those of each visit."""

    def __init__(self, plan: BakePlan, keep: list[Tensor], kept: list[Tensor]):
        assert plan.train_from is not None
        cfg, dtype, device = plan.cfg, plan.dtype.dtype, plan.device.device
        self.weights = load_narrowed(
            plan.model, keep, dtype=dtype, device=device, train="mlp", train_from=plan.train_from
        )
        masks = {i: m.to(device) for i, m in visit_masks(kept, keep, self.weights.acc_dtype).items()} or None
        self.trainer = Trainer(
            self.weights, cfg.chunk, cfg.chunk, AdamOptions(clip=CLIP),
            loss_scale=F16_LOSS_SCALE if dtype == torch.float16 else 1.0, masks=masks,
            mixers_from=plan.model.geometry.n_virtual,
        )  # fmt: skip
        self.evaluator = Evaluator(self.weights, plan.held.batch * cfg.chunk, cfg.chunk, masks=masks)
        self.best = Best()


class Loop(Training):
    """Both phases. `backbone` is the held-out loss of the untouched model, `best` the mask that is kept so far, `trace`
    every evaluation of phase A, `tuned` (step of phase B, loss) those of B. Without a `feed` there are no more steps.

    While `gates` is there phase A goes on; `tune` is there from the start of phase B; in between neither is.
    """

    def __init__(self, plan: BakePlan, feed: Feed | None, progress: Logged, saver: Saver):
        super().__init__(progress, saver)
        self.plan, self.cfg, self.feed = plan, plan.cfg, feed
        self.gates: GatePhase | None = None
        self.tune: TunePhase | None = None
        self.chosen = False  # phase A is over, and `best` its result
        self.backbone: float | None = None
        self.best: Found | None = None
        self.raw = Raw(0, math.nan)
        self.trace: list[dict[str, float]] = []
        self.tuned: list[tuple[int, float]] = []
        self.bottom = math.inf  # lowest held-out loss so far
        self.seconds_b = 0.0
        self._earlier = 0  # skipped steps of phase A

    def start(self) -> None:
        """Phase A from the beginning."""
        self.gates = GatePhase(self.plan)

    @property
    def over(self) -> bool:
        return self.chosen and self.done == self.plan.steps

    @property
    def evaluation_is_due(self) -> bool:
        cfg = self.cfg
        if self.gates is not None:
            if self.done == 0:
                return self.backbone is None
            last = self.trace[-1]["step"] if self.trace else 0
            return last != self.done and (self.done % cfg.eval_every == 0 or self.done == cfg.steps_a)
        if self.tune is None:
            return self.plan.steps_b > 0  # what phase B starts from
        step = self.done - cfg.steps_a
        last_b = self.tuned[-1][0] if self.tuned else -1
        return last_b != step and (step % cfg.eval_every == 0 or step == cfg.steps_b)

    def _micro(self, i: int) -> Micro:
        """Chunk i of the calibration set (cyclic); the held-out batch is -1."""
        assert self.feed is not None
        n = len(self.plan.calib)
        return self.feed[n if i < 0 else i % n]

    def step(self) -> None:
        began = time.perf_counter()
        trainer: GateTrainer | Trainer
        if self.gates is not None:
            trainer, rate, phase = self.gates.trainer, self.cfg.lr_a, "A"
            self.gates.gradients(self._micro(self.done + self.skipped))
        else:
            assert self.tune is not None
            trainer, i, phase = self.tune.trainer, self.done - self.cfg.steps_a, "B"
            loops = self.plan.model.geometry.num_loops
            rate = self.cfg.lr_b * 0.5 * (1 + math.cos(math.pi * i / self.cfg.steps_b)) / loops
            trainer.gradients([self._micro(i + self.skipped - self._earlier)])
        with self.changing():
            if isinstance(trainer, Trainer):
                trainer.apply(rate)
            else:
                trainer.apply()
            stats = trainer.read()
            seconds = time.perf_counter() - began
            self.step_seconds += seconds
            self.seconds_b += seconds if phase == "B" else 0.0
            self.skipped = self._earlier + stats.skipped
            if not stats.ok:
                self._skip(stats)
                return
            self.done += 1
            self.progress({
                "event": "step", "phase": phase, "step": self.done, "of": self.plan.steps, "loss": stats.loss,
                "loss_name": "NLL", "norm": stats.norm, "rate": rate, "seconds": seconds,
                "tokens_per_s": self.cfg.chunk / seconds,
                "left_s": (self.plan.steps - self.done) * self.step_seconds / self.done, "skipped": self.skipped,
                **({"l1": self.gates.l1} if self.gates else {}),
            })  # fmt: skip

    def _skip(self, stats: StepStats) -> None:
        fix = "Check the model's weights (cortiq score), lower --lr-a or --lr-b, or use --dtype f32."
        stats = stats._replace(skipped=self.skipped)
        report_skip("bake", self.progress, stats, done=self.done, of=self.plan.steps, fix=fix)

    def evaluate(self) -> None:
        """What is due: the backbone, the hard gates, or phase B, which is set up first when it begins."""
        if self.gates is not None:
            return self._evaluate_backbone(self.gates) if self.done == 0 else self._evaluate_gates(self.gates)
        assert self.best is not None
        if self.tune is None:
            self.tune = TunePhase(self.plan, self.neurons(), self.visits())
        tune, step = self.tune, self.done - self.cfg.steps_a
        loss = tune.evaluator.loss([self._micro(-1)])
        with self.changing():
            improved = tune.best.offer(step, loss, tune.weights)
            self.tuned.append((step, loss))
            self.bottom = min(self.bottom, loss) if math.isfinite(loss) else self.bottom
            self.progress({
                **self._event(loss, self.best.closed, improved=improved), "phase": "B", "l1": 0.0,
                "best": tune.best.loss, "best_step": self.cfg.steps_a + tune.best.step,
            })  # fmt: skip

    def _evaluate_backbone(self, gates: GatePhase) -> None:
        loss = gates.held_out(None, self._micro(-1))
        with self.changing():
            self.backbone = loss
            self.bottom = loss if math.isfinite(loss) else math.inf
            if not self.plan.enough:  # a candidate
                everything = torch.ones(self.plan.n_gates, dtype=torch.bool)
                first = Found(0, 0, loss, gates.trainer.logits.cpu().clone(), everything)
                self.best = first if better(first, None, self.plan.enough) else None
                self.raw = Raw(0, loss)
            self.progress({**self._event(loss, 0, improved=self.best is not None), "phase": "A", "l1": gates.l1})

    def _evaluate_gates(self, gates: GatePhase) -> None:
        logits = gates.trainer.logits
        raw, kept = gates.kept(logits)
        held = self._micro(-1)
        raw_loss = gates.held_out(raw, held)
        loss = raw_loss if torch.equal(raw, kept) else gates.held_out(kept, held)
        closed, raw_closed = int((~kept).sum()), int((~raw).sum())
        newly = gates.newly_closed(raw)
        with self.changing():
            new = Found(self.done, closed, loss, logits.cpu().clone(), kept)
            improved = better(new, self.best, self.plan.enough)
            if improved:
                self.best, self.raw = new, Raw(raw_closed, raw_loss)
            self.bottom = min(self.bottom, loss) if math.isfinite(loss) else self.bottom
            n, back = self.plan.n_gates, raw_closed - closed
            said = {"raw_pruned": raw_closed / n, "raw_loss": raw_loss, "resurrected": back}
            self.trace.append({"step": self.done, "l1": gates.l1, "pruned": closed / n, "loss": loss, **said})
            self.progress({
                **self._event(loss, closed, improved=improved), "phase": "A", "l1": gates.l1, **said,
                "newly": len(newly), "closed": newly[:SHOWN],
            })  # fmt: skip
            gates.seen = raw
            gates.l1 += self.cfg.l1_step * self.cfg.l1_mult
            if self.done == self.cfg.steps_a:
                if self.best is None:
                    raise TrainingFailed(
                        f"bake: got no finite held-out loss in {len(self.trace) + 1} evaluations; expected one. "
                        "Nothing was written. Check the model (cortiq score), or use --dtype f32."
                    )
                self.chosen, self.gates, self._earlier = True, None, self.skipped

    def _event(self, loss: float, closed: int, *, improved: bool) -> dict[str, Any]:
        best = self.best
        return {
            "event": "eval", "step": self.done, "of": self.plan.steps, "loss": loss, "loss_name": "NLL",
            "perplexity": perplexity(loss), "bottom": perplexity(self.bottom), "pruned": closed / self.plan.n_gates,
            "improved": improved, "best": best.loss if best else None, "best_step": best.step if best else None,
        }  # fmt: skip

    def visits(self) -> list[Tensor]:
        """[F] bool of each virtual layer: the neurons that the chosen mask keeps."""
        assert self.best is not None
        return list(by_layer(self.best.kept, self.plan.model.geometry).values())

    def neurons(self) -> list[Tensor]:
        """The neurons of each (physical) layer that the narrowed model holds, ascending."""
        assert self.best is not None
        g = self.plan.model.geometry
        logits = list(by_layer(self.best.logits, g).values())
        return keep_neurons(self.visits(), logits, g.n_layers, self.cfg.align, self.cfg.uniform)

    def trained(self) -> tuple[Weights | None, dict[str, Tensor]]:
        """(the narrowed weights at the best of phase B, published tensors that it changed); without phase B, or when
        nothing in it improved: (None, {}).
        """
        if self.tune is None or self.tune.best.step <= 0:
            return None, {}
        self.tune.best.restore(self.tune.weights)
        return self.tune.weights, self.tune.weights.export()

    def state(self) -> dict[str, Any]:
        best, tune, gates = self.best, self.tune, self.gates
        trainer = gates.trainer if gates else tune.trainer if tune else None
        return {
            "step": self.done,
            "of": self.plan.steps,
            "phase": "A" if gates else "B" if tune else "chosen",
            "counters": {**(trainer.counters() if trainer else {}), "skipped": self.skipped},
            "earlier": self._earlier,
            "best": {"step": best.step, "closed": best.closed, "loss": exact(best.loss)} if best else None,
            "raw": [self.raw.closed, exact(self.raw.loss)],
            "best_b": {"step": tune.best.step, "loss": exact(tune.best.loss)} if tune else None,
            "l1": exact(gates.l1) if gates else None,
            "backbone": None if self.backbone is None else exact(self.backbone),
            "bottom": exact(self.bottom),
            "trace": [{k: exact(v) for k, v in t.items()} for t in self.trace],
            "tuned": [[d, exact(loss)] for d, loss in self.tuned],
            "step_seconds": self.step_seconds,
            "seconds_b": self.seconds_b,
            "lines": self.progress.lines,
            "device": backend.describe(self.plan.device.device),
        }

    def tensors(self, over: bool = False) -> dict[str, Tensor]:
        """`mask` are the logits and `kept` the gates of the best mask; `best` the weights of phase B, where they are
        not the step's own or those that it started from.
        """
        out = {}
        if self.best is not None:
            out = {"mask": self.best.logits, "kept": self.best.kept.float()}
        if self.gates is not None:
            return out | self.gates.trainer.tensors() | {"seen": self.gates.seen.float()}
        tune = self.tune
        if tune is None:
            return out
        own = {} if over else tune.trainer.tensors()
        stays = tune.best.step > 0 and (over or tune.best.step != self.done - self.cfg.steps_a)
        return out | own | ({"best": tune.best.state} if stays else {})

    def resume(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        if (found := state["best"]) is not None:
            kept = tensors["kept"].bool()
            self.best = Found(int(found["step"]), int(found["closed"]), float(found["loss"]), tensors["mask"], kept)
        self.raw = Raw(int(state["raw"][0]), float(state["raw"][1]))
        self.done, self.skipped, self._earlier = int(state["step"]), state["counters"]["skipped"], int(state["earlier"])
        self.backbone = None if state["backbone"] is None else float(state["backbone"])
        self.bottom = float(state["bottom"])
        whole = ("step", "resurrected")
        self.trace = [{k: int(v) if k in whole else float(v) for k, v in t.items()} for t in state["trace"]]
        self.tuned = [(int(d), float(loss)) for d, loss in state["tuned"]]
        self.step_seconds, self.seconds_b = float(state["step_seconds"]), float(state["seconds_b"])
        counters = {**state["counters"], "skipped": self.skipped - self._earlier}
        self.chosen = state["phase"] != "A"
        if state["phase"] == "A":
            self.start()
            assert self.gates is not None
            self.gates.trainer.restore(tensors, counters)
            self.gates.l1, self.gates.seen = float(state["l1"]), tensors["seen"].bool()
        elif state["phase"] == "B":
            tune = self.tune = TunePhase(self.plan, self.neurons(), self.visits())
            step, loss = int(state["best_b"]["step"]), float(state["best_b"]["loss"])
            if step >= 0:
                first = None if step else tune.weights.state()
                saved = first if first is not None else tensors["best" if "best" in tensors else "master"]
                tune.best = Best.kept(step, loss, saved)
            if "master" in tensors:
                tune.trainer.restore(tensors, counters)


def perplexity(loss: float) -> float:
    """exp of a mean loss; infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan
