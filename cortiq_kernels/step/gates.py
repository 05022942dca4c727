"""Steps that train a gate per MLP neuron while every weight stays as it is (DTG-MA).

    gate       s = sigmoid(m), m the logit; the MLP's activation is silu(gate)·up·s
    dL/ds      sum over rows of dact·act (dact of the gated activation, act before the gate), L the mean loss
    dL/dm      (dL/ds + l1 / n_all)·s·(1 − s), n_all the number of all gates: the mean of the gates, times l1, is added
               to the loss
    update     Adam on m, without clipping unless `clip` says so, at one rate; a step that is not finite changes nothing
               (`update.py`)

Logits, gates and gradient lie in one flat buffer each, in the accumulation dtype; the Adam moments are float64, for a
gradient of l1 / n_all alone is about 1e-8 on a model of 0.8B parameters, and 1e-9 on one of 27B. That is also the size
of Adam's epsilon, which then slows such gates down.

`gradient="full"` differentiates the whole model. "ffn" lets the gradient pass along the residual stream and through the
MLPs only, with each mixer's output taken for a constant: cheaper, and no mixer keeps anything. No weight has a
gradient, nor memory for one, and layer 0's mixer, below which there is no gate, has no backward either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.ops.adam import AdamRange, AdamRanges, AdamState, adam_step_
from cortiq_kernels.step.buffers import Buffers, Policy
from cortiq_kernels.step.forward import rope_for
from cortiq_kernels.step.graph import Capture, Programs
from cortiq_kernels.step.inputs import Micro
from cortiq_kernels.step.train import (
    StepParts,
    StepStats,
    check_state,
    micro_gradients,
    read_counters,
    read_stats,
    restore_counters,
)


def mixers_from(g: Geometry, gradient: str) -> int:
    """First layer whose mixer carries a gradient of the gates: 1, or none with "ffn"."""
    return g.n_virtual if gradient == "ffn" else 1


def by_layer(flat: Tensor, g: Geometry) -> dict[int, Tensor]:
    """(Virtual) layer -> its part [F] of a flat buffer of all gates: views."""
    return dict(enumerate(flat.split(gate_widths(g))))


def gate_widths(g: Geometry) -> list[int]:
    """Gates of each layer as it runs: every visit of a looped stack has its own."""
    return [g.intermediate[g.physical(i)] for i in range(g.n_virtual)]


@dataclass
class GateTrainer:
    """Owns the gates of `weights` (which must not train), their optimizer state, and the buffers of `n` tokens.

    `init`: the logit that every gate starts with; `rate`: of every step; `policy`: what is kept for the backward
    (`Buffers`); `graph`, `capture`: see `Trainer`.
    """

    weights: Weights
    n: int
    max_seqlen: int
    init: float = 2.0
    rate: float = 0.1
    gradient: Literal["full", "ffn"] = "full"
    eps: float = 1e-8
    loss_scale: float = 1.0
    policy: Policy = "cheap"
    graph: bool = True
    capture: Callable[[], Capture] | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        w, g = self.weights, self.weights.geometry
        if w.trained is not None or w.first_layer:
            raise ValueError(
                "GateTrainer: got weights that train, or that lack layers; expected the whole model, frozen; "
                "load them with train=None"
            )
        self.buffers = Buffers(
            g, self.n, w.dtype, w.device, save_from=0, mixers_from=mixers_from(g, self.gradient), policy=self.policy,
            train=None,
        )  # fmt: skip
        n_all = sum(gate_widths(g))
        self.logits = torch.full((n_all,), self.init, dtype=w.acc_dtype, device=w.device)
        self.gates, self.grad = torch.zeros_like(self.logits), torch.zeros_like(self.logits)
        self.m = torch.zeros(n_all, dtype=torch.float64, device=w.device)
        self.v = torch.zeros_like(self.m)
        self.ranges = AdamRanges([AdamRange(0, n_all)])
        self.state = AdamState.new(w.device, scale=self.loss_scale)
        self.rope = rope_for(w, self.max_seqlen)
        self.programs = Programs(w.device, enabled=self.graph, capture=self.capture)
        self.parts = StepParts.on(w.device, self.programs)

    @property
    def loss(self) -> Tensor:
        """Mean loss of the last step, without the l1 term: 0-d, the same memory in every step."""
        return self.parts.loss

    def gradients(self, micros: Sequence[Micro], l1: float) -> Tensor:
        """The mean loss over `micros` (0-d, without the l1 term), and dL/dm times the loss scale into `grad`.
        ValueError when no row is scored."""
        w, g = self.weights, self.weights.geometry
        torch.sigmoid(self.logits, out=self.gates)
        masks, dmasks = by_layer(self.gates, g), by_layer(self.grad, g)

        def one(micro: Micro, accumulate: bool) -> None:
            micro_gradients(
                w, self.buffers, micro, self.rope, self.parts.total, self.parts.weight_sum, self.state.scale, stop=0,
                accumulate=accumulate, masks=masks, dmasks=dmasks,
            )  # fmt: skip

        self.parts.run("gates", micros, 0, one, self.buffers)
        pressure = self.state.scale.to(self.grad.dtype) * (l1 / self.grad.numel())
        self.grad.add_(pressure).mul_(self.gates).mul_(1 - self.gates)
        return self.loss

    def apply(self) -> None:
        """Adam, from the gradient and the loss that `gradients` left; accepts or skips on the device."""
        adam_step_(
            self.state, self.logits, self.grad, self.m, self.v, ranges=self.ranges, loss=self.loss, rate=self.rate,
            clip=self.clip, eps=self.eps,
        )  # fmt: skip

    def step(self, micros: Sequence[Micro], l1: float) -> None:
        """Gradients, then the update."""
        self.gradients(micros, l1)
        self.apply()

    def kept(self, tau: float) -> Tensor:
        """[n_all] bool: gates that are open, sigmoid(m) > tau."""
        return open_gates(self.logits, tau)

    def tensors(self) -> dict[str, Tensor]:
        """What the next step depends on, besides `counters`: as it lies on the device, not copies."""
        return {"logits": self.logits, "m": self.m, "v": self.v}

    def counters(self) -> dict[str, int | float]:
        """`read_counters`."""
        return read_counters(self.state)

    def restore(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int | float]) -> None:
        """Go on where `tensors` and `counters` of another trainer of the same settings were taken, bit for bit.
        ValueError for tensors of another length or dtype."""
        check_state("GateTrainer", self.tensors(), tensors)
        for name, mine in self.tensors().items():
            mine.copy_(tensors[name])
        restore_counters(self.state, counters)

    def read(self) -> StepStats:
        """Waits for the device; the loss of the last step and the counters."""
        return read_stats(self.state, self.loss)


def open_gates(logits: Tensor, tau: float) -> Tensor:
    """sigmoid(logits) > tau, strictly, the gates in the logits' dtype: those that the step multiplies with."""
    return torch.sigmoid(logits).double() > tau
