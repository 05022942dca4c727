"""The floor of a step: all of its matrix products, called in the step's order on the step's own memory, nothing between
them.

    forward     every layer: in, out, gate/up, down
    head        by slabs: the logits, and the gradient of the rows
    backward    every layer from the last on: dx, and dW in f32, of down, gate/up, out and in

They leave buffers and gradients as garbage, which the next step writes anew; weights and optimizer stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench.timing import Timing, measure
from cortiq_kernels.ops.linear import linear_bwd_w, linear_bwd_x, linear_fwd
from cortiq_kernels.ops.topk_kl import CHUNK_ROWS, new_slab
from cortiq_kernels.step import Trainer
from cortiq_kernels.step.buffers import cut, mixer_widths
from cortiq_kernels.step.forward import mixer_in, mixer_out


def measure_products(trainer: Trainer, rows: int, device: torch.device) -> tuple[Timing, bool]:
    """Time of all products of a step with `rows` scored rows, and whether they are finite (products of NaN take less
    power, and so less time). After a step, so that they multiply its values."""
    calls, buf = gemm_calls(trainer, rows), trainer.buffers

    def once() -> None:
        for call in calls:
            call()

    return measure([once], device), bool(torch.isfinite(buf.dn).all() & torch.isfinite(buf.r).all())


def gemm_calls(trainer: Trainer, rows: int) -> list[Callable[[], object]]:
    """The products, in order; the head frozen."""
    w, buf, g = trainer.weights, trainer.buffers, trainer.weights.geometry
    calls: list[Callable[[], object]] = []
    for i in range(g.n_layers):
        s, at = buf.slots(i, True), f"layers.{i}."
        calls += [
            partial(linear_fwd, s.n_mix, w[at + mixer_in(g, i)], out=s.proj),
            partial(linear_fwd, s.mix, w[at + mixer_out(g, i)], out=buf.r),
            partial(linear_fwd, s.n_mlp, w[at + "gate_up"], out=s.gate_up),
            partial(linear_fwd, cut(buf.act, g.intermediate[i]), w[at + "down"], out=buf.r),
        ]
    slab = new_slab(min(CHUNK_ROWS, rows), g.vocab, w.dtype, w.device)
    for a in range(0, rows, CHUNK_ROWS):
        b = min(a + CHUNK_ROWS, rows)
        z = slab[: b - a, : g.vocab]
        calls += [
            partial(linear_fwd, buf.hidden[a:b], w["head"], out=z),
            partial(linear_bwd_x, z, w["head"], out=buf.dhidden[a:b]),
        ]
    for i in reversed(range(g.n_layers)):
        s, at, f = buf.slots(i, True), f"layers.{i}.", g.intermediate[i]
        p, o = mixer_widths(g, i)
        products: list[tuple[str, Tensor, Tensor, Tensor]] = [  # dy, x, dx
            (at + "down", buf.dx, cut(buf.act, f), cut(buf.act, f)),
            (at + "gate_up", s.gate_up, s.n_mlp, buf.dn),
            (at + mixer_out(g, i), buf.dx, s.mix, cut(buf.act, o)),
            (at + mixer_in(g, i), cut(buf.dproj, p), s.n_mix, buf.dn),
        ]
        for name, dy, x, dx in products:
            calls.append(partial(linear_bwd_x, dy, w[name], out=dx))
            grad = w.grad(name)
            if grad is not None:
                calls.append(partial(linear_bwd_w, dy, x, out=grad))
    return calls
