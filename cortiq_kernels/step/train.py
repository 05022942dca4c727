"""A whole step over micro-batches, and a forward-only evaluation, on the functions of this package.

    for each micro-batch: embed -> forward -> head and loss -> backward (-> embedding scatter)
    then once:            update

Nothing here waits for the device. `Trainer.read` does, on purpose and once: it brings loss, norm and counters to the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.data.batches import Batch
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.ops.adam import AdamRanges, AdamState
from cortiq_kernels.step.backward import backward, embed_backward
from cortiq_kernels.step.buffers import Buffers, Policy
from cortiq_kernels.step.forward import Sequences, embed, forward, rope_for
from cortiq_kernels.step.graph import Capture, Programs
from cortiq_kernels.step.inputs import Micro, StaticInputs, shape_of
from cortiq_kernels.step.loss import head_loss
from cortiq_kernels.step.spare import spare_run
from cortiq_kernels.step.update import AdamOptions, update, update_ranges


class StepStats(NamedTuple):
    """What the last step did, on the host. `steps` and `skipped` count from the start of training."""

    loss: float
    norm: float
    ok: bool
    steps: int
    skipped: int
    in_row: int
    scale: float


def sum_of_weights(micros: Sequence[Micro]) -> float:
    """Of all rows of a step. ValueError when no row is scored."""
    weight_sum = sum(m.batch.weight_sum for m in micros)
    if not weight_sum > 0:
        raise ValueError(
            f"step: the weights of the {len(micros)} micro-batches must sum to more than 0; got {weight_sum}; "
            "leave out steps without scored rows"
        )
    return weight_sum


def micro_gradients(
    w: Weights,
    buf: Buffers,
    micro: Micro,
    rope: tuple[Tensor, Tensor],
    total: Tensor,
    weight_sum: Tensor,
    scale: Tensor,
    *,
    stop: int,
    accumulate: bool,
    masks: Mapping[int, Tensor] | None = None,
    dmasks: Mapping[int, Tensor] | None = None,
) -> None:
    """One micro-batch of a step. `total` (0-d f64) `=`, or `+=` with `accumulate`, its rows' weighted losses;
    likewise the gradients, times `scale` / `weight_sum` (0-d, of the whole step), of what `w` trains in the layers from
    `stop` on, and of the gates in `dmasks` (`backward`). Of the batch's host numbers only max_seqlen is read."""
    batch = micro.batch
    seqs = Sequences.build(w.geometry, batch.cu_seqlens, batch.max_seqlen, buf.n, rope)
    x = embed(w, buf, batch.tokens) if micro.x is None else micro.x
    forward(w, buf, x, seqs, masks=masks)
    grad_scale = scale.double() / weight_sum
    loss = head_loss(w, buf, batch, micro.targets, grad_scale=grad_scale, accumulate=accumulate)
    if accumulate:
        total.add_(loss)
    else:
        total.copy_(loss)
    dx = backward(w, buf, buf.dhidden, seqs, stop=stop, accumulate=accumulate, masks=masks, dmasks=dmasks)
    if stop == 0:
        embed_backward(w, dx, batch.tokens, accumulate=accumulate)


def mean_loss_and_gradients(
    w: Weights,
    buf: Buffers,
    micros: Sequence[Micro],
    rope: tuple[Tensor, Tensor],
    scale: Tensor,
    *,
    stop: int,
    masks: Mapping[int, Tensor] | None = None,
    dmasks: Mapping[int, Tensor] | None = None,
) -> Tensor:
    """Mean loss over `micros` (0-d float64), and `scale` times its gradients (`=`); see `micro_gradients`. ValueError
    when no row is scored. For what is no training step; `StepParts` is the same, recorded."""
    weight_sum = torch.full((), sum_of_weights(micros), dtype=torch.float64, device=w.device)
    total = torch.zeros_like(weight_sum)
    for j, m in enumerate(micros):
        micro_gradients(
            w, buf, m, rope, total, weight_sum, scale, stop=stop, accumulate=j > 0, masks=masks, dmasks=dmasks
        )  # fmt: skip
    return total / weight_sum


@dataclass
class StepParts:
    """The micro-batches of a step, one recorded part each (`graph.py`), with what they share in memory that stays.

    `loss` (0-d f64): the mean loss of the last step. `weight_sum`, `total`: of it.
    """

    programs: Programs
    inputs: StaticInputs
    loss: Tensor
    weight_sum: Tensor
    total: Tensor

    @classmethod
    def on(cls, device: torch.device, programs: Programs) -> StepParts:
        loss, weight_sum, total = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(3))
        return cls(programs, StaticInputs(device), loss, weight_sum, total)

    def run(
        self, what: str, micros: Sequence[Micro], stop: int, work: Callable[[Micro, bool], None], buffers: Buffers,
        masks: Mapping[int, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """`work(micro, accumulate)` for every micro-batch; -> the mean loss. Parts called `what` that another `stop` or
        the memory of other `masks` was recorded for are dropped. ValueError when no row is scored."""
        trains = (stop, tuple((i, t.data_ptr(), t.numel()) for i, t in sorted((masks or {}).items())))
        self.weight_sum.fill_(sum_of_weights(micros))
        if self.programs.enabled:
            self.programs.forget(lambda key: key[0] == what and key[1] != trains)
        for j, micro in enumerate(micros):
            if self.programs.enabled:
                micro = self.inputs.load(micro)
            key = (what, trains, j > 0, shape_of(micro))
            self.programs.run(key, partial(work, micro, j > 0), release=buffers.forget, ahead=j == 0)
        torch.div(self.total, self.weight_sum, out=self.loss)
        return self.loss


def read_stats(state: AdamState, loss: Tensor) -> StepStats:
    """Waits for the device; a step's loss and the counters, on the host."""
    s = state.read()
    return StepStats(float(loss), s.norm, s.ok, s.step, s.skipped, s.in_row, s.scale)


def read_counters(state: AdamState) -> dict[str, int | float]:
    """Waits for the device: accepted and skipped steps, skipped in a row, loss scale. JSON keeps them exactly."""
    s = state.read()
    return {"step": s.step, "skipped": s.skipped, "in_row": s.in_row, "scale": s.scale}


def check_state(who: str, mine: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """ValueError unless every tensor of a trainer's own is `given` with its length and dtype."""
    for name, own in mine.items():
        t = given[name]
        if t.shape != own.shape or t.dtype != own.dtype:
            raise ValueError(
                f"{who}.restore: {name}: got {list(t.shape)} {t.dtype}; expected {list(own.shape)} {own.dtype}; "
                "restore into a trainer of the same settings"
            )


def restore_counters(state: AdamState, counters: Mapping[str, int | float]) -> None:
    """The inverse of `read_counters`."""
    for name in ("step", "skipped", "in_row", "scale"):
        getattr(state, name).fill_(counters[name])


@dataclass
class Trainer:
    """Owns the optimizer state and the buffers of `n` = batch * window tokens; `weights.trained` says what trains.
    Gradients hold until the next step or evaluation on these buffers, whose logits take their memory (`spare.py`).

    On a GPU a step is recorded in its second run and replayed from then on, unless `graph` is False: the same bits, and
    the host is not what limits it. `programs.reason` says why one is not. `capture`: what records, for tests. `masks`:
    gates [F] of (virtual) layers, which do not train; `mixers_from`, `policy` (what is kept for the backward): those
    of `Buffers`.
    """

    weights: Weights
    n: int
    max_seqlen: int
    options: AdamOptions = field(default_factory=AdamOptions)
    loss_scale: float = 1.0
    masks: Mapping[int, Tensor] | None = None
    policy: Policy = "cheap"
    mixers_from: int = 0
    graph: bool = True
    capture: Callable[[], Capture] | None = None

    def __post_init__(self) -> None:
        w = self.weights
        if w.trained is None:
            raise ValueError(
                "Trainer: weights train nothing; got train=None; load them with train='layers' | 'mlp' | 'all'"
            )
        self.buffers = Buffers(
            w.geometry, self.n, w.dtype, w.device, first=w.first_layer, save_from=w.train_from, policy=self.policy,
            train=w.train, mixers_from=self.mixers_from,
        )  # fmt: skip
        start, stop = spare_run(w.layout, train=w.train, train_from=w.train_from, mixers_from=self.mixers_from)
        self.buffers.spare = w.trained.grad[start:stop]
        self.state = AdamState.new(w.device, scale=self.loss_scale)
        self.rope = rope_for(w, self.max_seqlen)
        self.programs = Programs(w.device, enabled=self.graph, capture=self.capture)
        self.parts = StepParts.on(w.device, self.programs)
        self.rate = torch.zeros((), dtype=torch.float64, device=w.device)
        self._ranges = AdamRanges([])

    @property
    def loss(self) -> Tensor:
        """Mean loss of the last step: 0-d, the same memory in every step."""
        return self.parts.loss

    def gradients(self, micros: Sequence[Micro], *, from_layer: int | None = None) -> Tensor:
        """Gradients of the mean loss over `micros`, times the loss scale, into `weights.trained.grad`; returns the
        loss (0-d, valid until the next call). `from_layer` is `weights.train_from` or above. ValueError when no row is
        scored."""
        w, buf = self.weights, self.buffers
        stop = w.train_from if from_layer is None else from_layer
        if not w.train_from <= stop <= w.geometry.n_layers:
            raise ValueError(
                f"Trainer: from_layer must be between train_from {w.train_from} and the {w.geometry.n_layers} layers; "
                f"got {stop}; load the weights with a lower train_from="
            )

        def one(micro: Micro, accumulate: bool) -> None:
            micro_gradients(
                w, buf, micro, self.rope, self.parts.total, self.parts.weight_sum, self.state.scale, stop=stop,
                accumulate=accumulate, masks=masks,
            )  # fmt: skip

        masks = self.masks
        return self.parts.run("step", micros, stop, one, buf, masks)

    def step(
        self,
        micros: Sequence[Micro],
        rate: float,
        *,
        from_layer: int | None = None,
        factor: Callable[[int], float] | None = None,
    ) -> None:
        """Gradients, then the update. `from_layer` and `factor` are the trained window and per-layer rates
        (genesis)."""
        self.gradients(micros, from_layer=from_layer)
        self.apply(rate, from_layer=from_layer, factor=factor)

    def apply(
        self, rate: float, *, from_layer: int | None = None, factor: Callable[[int], float] | None = None
    ) -> None:
        """The update alone, from the gradients and the loss that `gradients` left."""
        w = self.weights
        ranges = update_ranges(w, w.first_layer if from_layer is None else from_layer, factor)
        if ranges != self._ranges.ranges:  # the trained window has moved, or its rates have
            self._ranges = AdamRanges(ranges)
            self.programs.forget(lambda key: key[0] == "update")
        self.rate.fill_(rate)
        work = partial(update, w, self.state, self.loss, self.rate, self.options, self._ranges)
        self.programs.run(("update",), work)

    def sequences(self, batch: Batch) -> Sequences:
        return Sequences.build(self.weights.geometry, batch.cu_seqlens, batch.max_seqlen, self.n, self.rope)

    def read(self) -> StepStats:
        """Waits for the device; the loss of the last step and the counters."""
        return read_stats(self.state, self.loss)

    def tensors(self) -> dict[str, Tensor]:
        """What the next step depends on, besides `counters`: the flat masters and moments, as they lie on the device
        (not copies). The working copies follow from the masters; gradients are written anew by every step."""
        t = self.weights.trained
        assert t is not None
        return {"master": t.master, "m": t.m, "v": t.v}

    def counters(self) -> dict[str, int | float]:
        """`read_counters`."""
        return read_counters(self.state)

    def restore(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int | float]) -> None:
        """Go on where `tensors` and `counters` of another trainer of the same settings were taken, bit for bit.
        ValueError for tensors of another length or dtype."""
        t = self.weights.trained
        assert t is not None
        check_state("Trainer", self.tensors(), tensors)
        self.weights.load_state(tensors["master"])
        t.m.copy_(tensors["m"])
        t.v.copy_(tensors["v"])
        restore_counters(self.state, counters)


@dataclass
class Evaluator:
    """Forward-only passes over batches of `n` tokens; lends a trainer's buffers when given them, and then its
    `programs`, whose graphs share memory. `masks` maps a layer to its per-neuron gate [F] in the accumulation dtype
    (absent: 1), and may be set between passes; passes with masks are not recorded."""

    weights: Weights
    n: int
    max_seqlen: int
    buffers: Buffers | None = None
    masks: Mapping[int, Tensor] | None = None
    programs: Programs | None = None

    def __post_init__(self) -> None:
        w = self.weights
        if self.buffers is None:
            self.buffers = Buffers(w.geometry, self.n, w.dtype, w.device, first=w.first_layer)
        if self.programs is None:
            self.programs = Programs(w.device)
        self.rope = rope_for(w, self.max_seqlen)
        self._inputs = StaticInputs(w.device)

    def hidden(self, batch: Batch, x: Tensor | None = None) -> Tensor:
        """Hidden states [N, H] of a batch on the device (valid until the next call)."""
        buf, programs = self.buffers, self.programs
        assert buf is not None and programs is not None
        if self.masks or not programs.enabled:
            self._forward(batch.tokens, batch.cu_seqlens, batch.max_seqlen, x)
            return buf.hidden
        tensors = [batch.tokens, batch.cu_seqlens] + ([] if x is None else [x])
        static = [self._inputs.keep(i, t) for i, t in enumerate(tensors)]
        key = ("hidden", batch.max_seqlen, *(tuple(t.shape) for t in static))
        work = partial(self._forward, static[0], static[1], batch.max_seqlen, None if x is None else static[2])
        programs.run(key, work, release=buf.forget)
        return buf.hidden

    def _forward(self, tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, x: Tensor | None) -> None:
        w, buf = self.weights, self.buffers
        assert buf is not None
        seqs = Sequences.build(w.geometry, cu_seqlens, max_seqlen, self.n, self.rope)
        forward(w, buf, embed(w, buf, tokens) if x is None else x, seqs, save=False, masks=self.masks)

    def loss(self, micros: Iterable[Micro]) -> float:
        """Mean loss over all rows of all micro-batches: sum of w * loss / sum of w. Waits for the device once, at the
        end."""
        w, buf = self.weights, self.buffers
        assert buf is not None
        total = torch.zeros((), dtype=torch.float64, device=w.device)
        weight_sum = 0.0
        for m in micros:
            self.hidden(m.batch, m.x)
            total += head_loss(w, buf, m.batch, m.targets, need_grad=False)
            weight_sum += m.batch.weight_sum
        if weight_sum <= 0:
            raise ValueError("evaluation: no scored row; got a weight sum of 0; give records with scored tokens")
        return float(total) / weight_sum
