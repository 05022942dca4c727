"""Exact top-k of logits with their renormalised probabilities: the teacher's targets.

Maths (per row z of the first valid_vocab columns)
    ids   = the k largest, by (value descending, id ascending)
    probs = softmax(z[ids])              renormalised over the k
    lse   = log Σ_v exp(z_v),  mass = Σ_{v in ids} exp(z_v − lse)

| tensor | shape | dtype |
|---|---|---|
| logits | [n, V] | bf16, f16, f32, f64; any strides |
| ids | [n, k] | int32 |
| probs | [n, k] | f32 |
| lse, mass | [n] | f32, or None |

Ties go to the lowest id and −0 equals +0, so the answer depends on the values alone: not on the device, the batch or
the run. NaN ranks below −inf and has probability 0, like −inf. A row without a single finite logit has probs 0, lse
−inf and mass 0; a row that holds +inf has NaN probs, as softmax has. No gradients, no host synchronisation.

How: each value maps to an integer of the same order, with the reversed id in the low 32 bits. These keys are distinct,
so any top-k of them is the same. Rows are taken a bounded number at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.ops import checks

_LOW = 0xFFFFFFFF
# Elements in flight. A key is 8 bytes and there are three temporaries of that size.
_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}


class TopK(NamedTuple):
    """The k most likely tokens of each row, sorted; lse and mass of the whole row when asked for."""

    ids: Tensor  # [n, k] int32
    probs: Tensor  # [n, k] f32
    lse: Tensor | None  # [n] f32
    mass: Tensor | None  # [n] f32: share of the full softmax that the k hold


def topk_softmax_ref(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(ids int64, probs) by a full stable sort, in the dtype of logits; no NaN. [n, V] -> [n, k] twice."""
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    return ids[:, :k], torch.softmax(values[:, :k], dim=-1)


def topk_softmax(logits: Tensor, k: int, *, valid_vocab: int | None = None, return_lse: bool = False) -> TopK:
    """Top-k ids and probabilities of every row of logits [n, V].

    Only columns below `valid_vocab` (default V) exist: the rest is padding and never read. 1 ≤ k ≤ valid_vocab.
    lse and mass are None unless `return_lse`.
    """
    op = "topk_softmax"
    checks.shape(op, "logits", logits, (None, None), "[n, V]", "flatten batch and time into rows first")
    checks.dtype(op, "logits", logits, checks.FLOATS, "convert them with .to()")
    n, width = logits.shape
    vocab = width if valid_vocab is None else valid_vocab
    if not 1 <= vocab <= width:
        checks.fail(op, "valid_vocab", f"between 1 and V = {width}", valid_vocab, "pass the tokenizer's size")
    if not 1 <= k <= vocab:
        checks.fail(op, "k", f"between 1 and the vocabulary, {vocab}", k, "ask for fewer tokens")

    ids = logits.new_empty((n, k), dtype=torch.int32)
    probs = logits.new_empty((n, k), dtype=torch.float32)
    lse = logits.new_empty((n,), dtype=torch.float32) if return_lse else None
    mass = logits.new_empty((n,), dtype=torch.float32) if return_lse else None
    rows = max(1, _ELEMENTS.get(logits.device.type, _ELEMENTS["cpu"]) // vocab)
    for a in range(0, n, rows):
        z = logits[a : a + rows, :vocab]
        chosen = _select(z, k)  # [rows, k]
        ids[a : a + rows] = chosen
        values = _nan_to_lowest(z.gather(1, chosen).to(checks.acc_dtype(z.dtype)))
        top = values[:, :1]
        # A row of -inf alone would be exp(-inf + inf).
        e = torch.exp(values - torch.where(top == float("-inf"), 0.0, top))
        total = e.sum(-1, keepdim=True)
        probs[a : a + rows] = e / torch.where(total == 0, 1.0, total)
        if lse is not None and mass is not None:
            full = torch.logsumexp(_nan_to_lowest(z.to(values.dtype)), dim=-1)
            lse[a : a + rows] = full
            share = torch.exp(torch.logsumexp(values, dim=-1) - full)
            mass[a : a + rows] = torch.where(full == float("-inf"), 0.0, share)
    return TopK(ids, probs, lse, mass)


def _nan_to_lowest(z: Tensor) -> Tensor:
    return z.masked_fill(z.isnan(), float("-inf"))


def _select(z: Tensor, k: int) -> Tensor:
    """Column ids of the k largest by (value descending, id ascending), int64 [rows, k]."""
    if z.dtype == torch.float64:
        # 64 bits of value leave no room for the id; only tests come here, so a stable sort will do.
        return torch.sort(_ordered(z, torch.int64), dim=-1, descending=True, stable=True).indices[:, :k]
    vocab = z.shape[1]
    key = _ordered(z.to(torch.float32), torch.int32).to(torch.int64)
    key = (key << 32).add_(torch.arange(vocab - 1, -1, -1, device=z.device))
    best = torch.topk(key, k, dim=-1, largest=True, sorted=True).values
    return (vocab - 1) - (best & _LOW)


def _ordered(z: Tensor, integer: torch.dtype) -> Tensor:
    """Integers in the order of the floats: −0 as +0, NaN as the lowest of all."""
    info = torch.iinfo(integer)
    bits = (z + 0.0).view(integer)
    return torch.where(bits < 0, bits ^ info.max, bits).masked_fill_(z.isnan(), info.min)
