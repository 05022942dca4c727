"""A whole step over micro-batches, and a forward-only evaluation, on the functions of this package.

    for each micro-batch: embed -> forward -> head and loss -> backward (-> embedding scatter)
    then once:            update

Nothing here waits for the device. `Trainer.read` does, on purpose and once: it brings loss, norm and counters to the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.data.batches import Batch
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.ops.adam import AdamState
from cortiq_kernels.step.backward import backward, embed_backward
from cortiq_kernels.step.buffers import Buffers, Policy
from cortiq_kernels.step.forward import Sequences, embed, forward, rope_for
from cortiq_kernels.step.loss import Targets, head_loss
from cortiq_kernels.step.update import AdamOptions, update


class Micro(NamedTuple):
    """One micro-batch on the device: a batch, its targets, and (frozen prefix) the residual stream that enters the
    first layer."""

    batch: Batch
    targets: Targets
    x: Tensor | None = None


class StepStats(NamedTuple):
    """What the last step did, on the host. `steps` and `skipped` count from the start of training."""

    loss: float
    norm: float
    ok: bool
    steps: int
    skipped: int
    in_row: int
    scale: float


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
    """Mean loss over `micros` (0-d float64), and `scale` times its gradients (`=`): of what `w` trains in the layers
    from `stop` on, and of the gates in `dmasks` (`backward`). ValueError when no row is scored."""
    weight_sum = sum(m.batch.weight_sum for m in micros)
    if not weight_sum > 0:
        raise ValueError(
            f"step: the weights of the {len(micros)} micro-batches must sum to more than 0; got {weight_sum}; "
            "leave out steps without scored rows"
        )
    total = torch.zeros((), dtype=torch.float64, device=w.device)
    grad_scale = scale.double() / weight_sum
    for j, m in enumerate(micros):
        seqs = Sequences.build(w.geometry, m.batch.cu_seqlens, m.batch.max_seqlen, buf.n, rope)
        x = embed(w, buf, m.batch.tokens) if m.x is None else m.x
        forward(w, buf, x, seqs, masks=masks)
        total += head_loss(w, buf, m.batch, m.targets, grad_scale=grad_scale, accumulate=j > 0)
        dx = backward(w, buf, buf.dhidden, seqs, stop=stop, accumulate=j > 0, masks=masks, dmasks=dmasks)
        if stop == 0:
            embed_backward(w, dx, m.batch.tokens, accumulate=j > 0)
    return total / weight_sum


def read_stats(state: AdamState, loss: Tensor) -> StepStats:
    """Waits for the device; a step's loss and the counters, on the host."""
    s = state.read()
    return StepStats(float(loss), s.norm, s.ok, s.step, s.skipped, s.in_row, s.scale)


@dataclass
class Trainer:
    """Owns the optimizer state and the buffers of `n` = batch * window tokens; `weights.trained` says what trains.
    `masks`: as of `Evaluator`; `policy`: what is kept for the backward (`Buffers`)."""

    weights: Weights
    n: int
    max_seqlen: int
    options: AdamOptions = field(default_factory=AdamOptions)
    loss_scale: float = 1.0
    masks: Mapping[int, Tensor] | None = None
    policy: Policy = "cheap"

    def __post_init__(self) -> None:
        w = self.weights
        if w.trained is None:
            raise ValueError(
                "Trainer: weights train nothing; got train=None; load them with train='layers' | 'mlp' | 'all'"
            )
        self.buffers = Buffers(
            w.geometry, self.n, w.dtype, w.device, first=w.first_layer, save_from=w.train_from, policy=self.policy,
            train=w.train,
        )  # fmt: skip
        self.state = AdamState.new(w.device, scale=self.loss_scale)
        self.rope = rope_for(w, self.max_seqlen)
        self.loss = torch.zeros((), dtype=torch.float64, device=w.device)

    def gradients(self, micros: Sequence[Micro], *, from_layer: int | None = None) -> Tensor:
        """Gradients of the mean loss over `micros`, times the loss scale, into `weights.trained.grad`; returns the
        loss (0-d). `from_layer` is `weights.train_from` or above. ValueError when no row is scored."""
        w, buf = self.weights, self.buffers
        stop = w.train_from if from_layer is None else from_layer
        if not w.train_from <= stop <= w.geometry.n_layers:
            raise ValueError(
                f"Trainer: from_layer must be between train_from {w.train_from} and the {w.geometry.n_layers} layers; "
                f"got {stop}; load the weights with a lower train_from="
            )
        self.loss = mean_loss_and_gradients(
            w, buf, micros, self.rope, self.state.scale, stop=stop, masks=self.masks
        )  # fmt: skip
        return self.loss

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
        update(
            self.weights,
            self.state,
            self.loss,
            rate,
            self.options,
            from_layer=self.weights.first_layer if from_layer is None else from_layer,
            factor=factor,
        )

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
        """Waits for the device: accepted and skipped steps, skipped in a row, loss scale. JSON keeps them exactly."""
        s = self.state.read()
        return {"step": s.step, "skipped": s.skipped, "in_row": s.in_row, "scale": s.scale}

    def restore(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int | float]) -> None:
        """Go on where `tensors` and `counters` of another trainer of the same settings were taken, bit for bit.
        ValueError for tensors of another length or dtype."""
        t = self.weights.trained
        assert t is not None
        for name, mine in self.tensors().items():
            given = tensors[name]
            if given.shape != mine.shape or given.dtype != mine.dtype:
                raise ValueError(
                    f"Trainer.restore: {name}: got {list(given.shape)} {given.dtype}; "
                    f"expected {list(mine.shape)} {mine.dtype}; restore into a trainer of the same settings"
                )
        self.weights.load_state(tensors["master"])
        t.m.copy_(tensors["m"])
        t.v.copy_(tensors["v"])
        for name in ("step", "skipped", "in_row", "scale"):
            getattr(self.state, name).fill_(counters[name])


@dataclass
class Evaluator:
    """Forward-only passes over batches of `n` tokens; lends a trainer's buffers when given them. `masks` maps a layer
    to its per-neuron gate [F] in the accumulation dtype (absent: 1), and may be set between passes."""

    weights: Weights
    n: int
    max_seqlen: int
    buffers: Buffers | None = None
    masks: Mapping[int, Tensor] | None = None

    def __post_init__(self) -> None:
        w = self.weights
        if self.buffers is None:
            self.buffers = Buffers(w.geometry, self.n, w.dtype, w.device, first=w.first_layer)
        self.rope = rope_for(w, self.max_seqlen)

    def hidden(self, batch: Batch, x: Tensor | None = None) -> Tensor:
        """Hidden states [N, H] of a batch on the device (valid until the next call)."""
        w, buf = self.weights, self.buffers
        assert buf is not None
        seqs = Sequences.build(w.geometry, batch.cu_seqlens, batch.max_seqlen, self.n, self.rope)
        return forward(w, buf, embed(w, buf, batch.tokens) if x is None else x, seqs, save=False, masks=self.masks)

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
