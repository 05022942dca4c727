"""Hidden states and targets -> loss, and the gradient that the backward starts from.

A row of weight w costs w * KL(target || softmax(z)) over the whole vocabulary; a step's loss is the sum over all its
rows divided by the sum of w over the whole step (all micro-batches), so windows with few scored rows weigh what their
rows weigh. `Targets.const` is sum_rows w * (H(target) - (1 - alpha) * H(b)), the constant that turns the KL into the
reported alpha * CE + (1 - alpha) * KL(b || q); it has no gradient, and is 0 for pure distillation and for pure
next-token loss.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.data.batches import Batch
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.ops.topk_kl import head_topk_kl_fwd_bwd
from cortiq_kernels.step.buffers import Buffers


class Targets(NamedTuple):
    """What a batch's scored rows should predict, aligned with `Batch.row_index`."""

    ids: Tensor  # [R, K] int32, -1 in an empty slot
    probs: Tensor  # [R, K] float32, sum to 1 (or less, where the mass is meant to be missing)
    const: float | Tensor = 0.0

    def to(self, device: torch.device) -> Targets:
        return Targets(self.ids.to(device, non_blocking=True), self.probs.to(device, non_blocking=True), self.const)


def pad_rows(batch: Batch, targets: Targets, multiple: int) -> tuple[Batch, Targets]:
    """The same with the scored rows rounded up to a multiple: padding slots are row -1, weight 0, ids -1.

    They cost the head a little and change nothing. In exchange its products come in few sizes, known to the host
    without asking the device, so a few captured graphs serve all batches.
    """
    extra = -len(batch.row_index) % multiple
    if extra == 0:
        return batch, targets
    pad = torch.nn.functional.pad
    batch = dataclasses.replace(
        batch, row_index=pad(batch.row_index, (0, extra), value=-1), row_weight=pad(batch.row_weight, (0, extra))
    )
    ids = pad(targets.ids, (0, 0, 0, extra), value=-1)
    return batch, Targets(ids, pad(targets.probs, (0, 0, 0, extra)), targets.const)


def next_token_targets(batch: Batch) -> Targets:
    """One-hot targets: the true next token of every scored row (alpha = 1, K = 1)."""
    ids = batch.next_ids[batch.row_index.long()].to(torch.int32).unsqueeze(1)
    return Targets(ids, torch.ones(ids.shape, dtype=torch.float32, device=ids.device))


def head_loss(
    w: Weights,
    buf: Buffers,
    batch: Batch,
    targets: Targets,
    *,
    grad_scale: Tensor | float = 1.0,
    need_grad: bool = True,
    accumulate: bool = False,
) -> Tensor:
    """Sum over rows of w * KL + const, 0-d float64, not yet divided by the sum of weights.

    With `need_grad`, buf.dhidden [N, H] `=` d(grad_scale * sum)/dhidden, and the head's gradient `=`/`+=` when it
    trains. The slab of logits lies in gradients that the backward has not written yet, unless `accumulate`.
    """
    result = head_topk_kl_fwd_bwd(
        buf.hidden,
        w["head"],
        targets.ids,
        targets.probs,
        batch.row_weight,
        row_index=batch.row_index,
        grad_scale=grad_scale,
        dhidden=buf.dhidden if need_grad else None,
        dhead=w.grad("head") if need_grad else None,
        accumulate=accumulate,
        need_grad=need_grad,
        slab=buf.logits_slab(w.geometry.vocab, own=need_grad and accumulate),
    )
    return result.total + targets.const
