"""What every neuron of a model does on a set of records: its activity, and the loss that it carries.

`measure` runs the stack and sums, over real rows (no padding), act² and |act| of every neuron. `first_order` also runs
the whole backward, for the gradient of a gate s = 1 on every neuron (its activation times s):

    sum over batches of |s dL/ds|,     L the batch's mean next-token loss on its scored tokens

the first-order change of the loss when a neuron goes (Molchanov et al., "Importance Estimation for Neural Network
Pruning", 2019, a group of weights at a time), taken batch by batch so that signs do not cancel between them.
In a looped stack the visits of a layer add up: a neuron goes from all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.data.batches import Batch
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes.capture_pass import real_rows
from cortiq_kernels.step import Buffers, Micro
from cortiq_kernels.step.buffers import cut
from cortiq_kernels.step.forward import Sequences, embed, layers_forward, rope_for
from cortiq_kernels.step.gates import by_layer, gate_widths, mixers_from
from cortiq_kernels.step.loss import next_token_targets
from cortiq_kernels.step.train import mean_loss_and_gradients


class Activity(NamedTuple):
    """Sums over `rows` real rows, of every layer [F] in float64 on the host."""

    square: list[Tensor]  # of act^2
    absolute: list[Tensor]  # of |act|
    rows: int


def measure(w: Weights, batches: Sequence[Batch], *, done: Callable[[int], None] = lambda n: None) -> Activity:
    """Activity over the batches. Squares are float32 (float64 for float64) a batch, summed in float64; `done(n)` after
    batch n."""
    g, first = w.geometry, batches[0]
    n, t = first.tokens.shape[0], first.max_seqlen
    buf, rope = Buffers(g, n, w.dtype, w.device), rope_for(w, t)
    square = [torch.zeros(f, dtype=torch.float64, device=w.device) for f in g.intermediate]
    absolute = [torch.zeros_like(s) for s in square]
    rows = 0
    for k, host in enumerate(batches):
        batch = host.to(w.device)
        real = real_rows(host).to(w.device)
        seqs = Sequences.build(g, batch.cu_seqlens, t, n, rope)

        def add(layer: int, real: Tensor = real) -> None:
            at = g.physical(layer)
            act = cut(buf.act, g.intermediate[at]).index_select(0, real).to(w.acc_dtype)
            absolute[at] += act.abs().sum(0, dtype=torch.float64)
            square[at] += act.square_().sum(0, dtype=torch.float64)

        layers_forward(w, buf, embed(w, buf, batch.tokens), seqs, 0, g.n_virtual, after_layer=add)
        rows += len(real)
        done(k + 1)
    return Activity([s.cpu() for s in square], [a.cpu() for a in absolute], rows)


def first_order(
    w: Weights, batches: Sequence[Batch], *, scale: float = 1.0, done: Callable[[int], None] = lambda n: None
) -> list[Tensor]:
    """Sum over the batches of |s dL/ds| at s = 1, of every layer [F] in float64 on the host.

    `w` trains nothing. Batches without a scored row add nothing. `scale`: the loss scale of the backward, which the
    result does not carry; `done(n)` after batch n.
    """
    g, first = w.geometry, batches[0]
    n, t = first.tokens.shape[0], first.max_seqlen
    buf, rope = Buffers(g, n, w.dtype, w.device, save_from=0, mixers_from=mixers_from(g, "full")), rope_for(w, t)
    total = torch.zeros(sum(g.intermediate), dtype=torch.float64, device=w.device)
    grad = torch.zeros(sum(gate_widths(g)), dtype=w.acc_dtype, device=w.device)
    gates, factor = torch.ones_like(grad), torch.full((), scale, dtype=torch.float32, device=w.device)
    for k, host in enumerate(batches):
        if host.weight_sum > 0:
            batch = host.to(w.device)
            micro = Micro(batch, next_token_targets(batch))
            mean_loss_and_gradients(
                w, buf, [micro], rope, factor, stop=0, masks=by_layer(gates, g), dmasks=by_layer(grad, g)
            )
            total += grad.view(g.num_loops, -1).sum(0).abs()
        done(k + 1)
    return [part.cpu() / scale for part in total.split(g.intermediate)]
