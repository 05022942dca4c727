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
the run. NaN counts as −inf, the lowest there is. A row without a single finite logit has probs 0, lse −inf and mass 0;
a row that holds +inf has NaN probs, as softmax has. No gradients, no host synchronisation.

Without Triton: a library top-k is exact in its values but picks any id among equals. So it is asked for the k-th value
τ; what lies above τ is certain, and a second top-k, over the reversed ids of the entries equal to τ, fills up from the
lowest id. The at most 2k candidates are then sorted. Rows are taken a bounded number at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.ops import checks
from cortiq_kernels.ops.triton_gate import launching_on, use_triton

# Elements in flight; the temporaries take about 12 bytes for each.
_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}


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


def topk_softmax(
    logits: Tensor, k: int, *, valid_vocab: int | None = None, return_lse: bool = False, backend: str = "auto"
) -> TopK:
    """Top-k ids and probabilities of every row of logits [n, V].

    Only columns below `valid_vocab` (default V) exist: the rest is padding and never read. 1 ≤ k ≤ valid_vocab.
    lse and mass are None unless `return_lse`. backend: "auto" (Triton for CUDA tensors below float64), "triton" or
    "torch".
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
    if use_triton(op, logits, backend):
        from cortiq_kernels.ops import topk_triton

        z = logits[:, :vocab]
        with launching_on(logits):
            topk_triton.launch(z if z.stride(1) == 1 else z.contiguous(), k, ids, probs, lse, mass)
        return TopK(ids, probs, lse, mass)
    rows = max(1, _ELEMENTS.get(logits.device.type, _ELEMENTS["cpu"]) // vocab)
    for a in range(0, n, rows):
        z = logits[a : a + rows, :vocab]
        z = z.masked_fill(z.isnan(), float("-inf"))
        chosen, values = _select(z, k)  # [rows, k]
        ids[a : a + rows] = chosen
        values = values.to(checks.acc_dtype(z.dtype))
        top = values[:, :1]
        base = torch.where(top == float("-inf"), 0.0, top)  # a row of -inf alone would be exp(-inf + inf)
        e = torch.exp(values - base)
        total = e.sum(-1, keepdim=True)
        probs[a : a + rows] = e / torch.where(total == 0, 1.0, total)
        if lse is not None and mass is not None:
            lse[a : a + rows] = torch.logsumexp(z.to(values.dtype), dim=-1)
            # Of sums below the same maximum: a difference of two lse is off by the spacing of floats at their size.
            whole = torch.exp(z.to(values.dtype) - base).sum(-1, keepdim=True)
            share = (total / torch.where(whole == 0, 1.0, whole)).clamp(max=1.0)
            mass[a : a + rows] = share.squeeze(-1)
    return TopK(ids, probs, lse, mass)


def _select(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(column ids int64, values) [rows, k] of the k largest by (value descending, id ascending). z has no NaN."""
    vocab = z.shape[1]
    values, ids = torch.topk(z, k, dim=-1)
    least = values.amin(-1, keepdim=True)  # τ
    above = torch.where(values > least, ids, vocab)  # vocab marks a candidate that is none
    reverse = torch.arange(vocab, 0, -1, dtype=torch.int32, device=z.device)
    equal = vocab - torch.topk(torch.where(z == least, reverse, 0), k, dim=-1).values.long()
    # Sorted by id, then stably by value. There are k real candidates or more, and none of value -inf comes before them.
    candidates = torch.cat((above, equal), dim=-1).sort(dim=-1).values
    values = z.gather(1, candidates.clamp(max=vocab - 1)).masked_fill(candidates == vocab, float("-inf"))
    values, order = torch.sort(values, dim=-1, descending=True, stable=True)
    return candidates.gather(1, order[:, :k]), values[:, :k]
