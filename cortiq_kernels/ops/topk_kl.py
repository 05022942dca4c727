"""LM head and knowledge distillation loss on sparse top-k targets, loss and gradients in one call.

Row r of R reads hidden row h = hidden[row_index[r]] (or hidden[r]) and has a weight w_r.

Maths (t_v = Σ of topk_probs over the slots whose id is v;  P = Σ_v t_v, which need not be 1;  0·log 0 = 0)
    z       = h·head_weightᵀ,  q = softmax(z) over the first valid_vocab columns
    loss_r  = Σ_v t_v·(log t_v − log q_v)                 unweighted
    total   = Σ_r w_r·loss_r
    dz      = w_r·grad_scale·(P·q − t)
    dhidden = dz·head_weight                              (`=`; 0 in rows that no scored r reads)
    dhead   = Σ_r dzᵀ·h                                   (`=` or `+=`)

| tensor | shape | dtype |
|---|---|---|
| hidden, dhidden | [N, H] | working: bf16, f16, f32, f64 |
| head_weight | [V, H] | working |
| topk_ids | [R, K] | int32 or int64 |
| topk_probs | [R, K] | f32 (or f64) |
| row_weight | [R] | f32 (or f64) |
| row_index | [R] | int32 or int64, distinct where ≥ 0 |
| loss | [R] | f32 (f64 for f64) |
| total | 0-d | f64 |
| dhead | [V, H] | f32 (f64 for f64) |

What does not count: a slot whose id lies outside [0, valid_vocab) (−1 is the usual empty slot) is dropped with its
probability; a row with row_index −1, with row_weight 0, or at or past n_active has loss 0 and adds exactly 0 to every
output, whatever it holds, NaN included. Duplicate ids add up, and P < 1 leaves the missing mass out of the loss:
nothing is renormalised. Columns of head_weight at and past valid_vocab do not exist: q is 0 there, and so is dhead.

Precision: logits are a slab [chunk_rows, V] in the working dtype (GEMM sums in f32); softmax, loss and dz are f32 (f64
for f64), dz is rounded once to the working dtype for the two GEMMs. dhead is summed in f32 over chunks, so chunk_rows
changes it in the last bits only; dhidden and loss do not depend on other rows. Same inputs, same bits: no atomics.
With K = 1 and p = 1 this is cross entropy. Source: Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural
Network", 2015; temperature is 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.ops import checks
from cortiq_kernels.ops.linear import linear_bwd_w, linear_bwd_x, linear_fwd

# Elements of one f32 slab: 128 MiB on a CPU, 512 MiB on a GPU.
_SLAB = {"cpu": 1 << 25, "cuda": 1 << 27}
_PAIRS = 1 << 24  # elements of the slot-by-slot comparison at a time


class HeadLoss(NamedTuple):
    """loss [R] per row, unweighted, 0 where the row does not count; total 0-d f64 = Σ row_weight·loss."""

    loss: Tensor
    total: Tensor


def head_topk_kl_ref(
    hidden: Tensor, head: Tensor, topk_ids: Tensor, topk_probs: Tensor, row_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """(loss [R], total 0-d), with a dense [R, V] target, in the dtype of hidden; R == N, ids -1 are empty slots."""
    z = hidden @ head.to(hidden.dtype).transpose(0, 1)
    empty = topk_ids < 0
    p = topk_probs.to(z.dtype).masked_fill(empty, 0)
    target = torch.zeros_like(z).scatter_add(1, topk_ids.long().masked_fill(empty, 0), p)
    entropy = torch.special.entr(target).sum(-1)  # Σ −t·log t
    loss = -(target * torch.log_softmax(z, dim=-1)).sum(-1) - entropy
    return loss, (row_weight.to(z.dtype) * loss).sum()


def head_topk_kl_fwd_bwd(
    hidden: Tensor,
    head_weight: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    row_weight: Tensor,
    n_active: int | None = None,
    *,
    row_index: Tensor | None = None,
    grad_scale: float | Tensor = 1.0,
    dhidden: Tensor | None = None,
    dhead: Tensor | None = None,
    accumulate: bool = False,
    chunk_rows: int | None = None,
    valid_vocab: int | None = None,
    need_grad: bool = True,
) -> HeadLoss:
    """Loss of every row, and with `need_grad` its gradients into `dhidden` and `dhead` (either may be None: skipped).

    row_index None means R == N, row r reads hidden[r]. n_active (host int, default R): only the first n_active rows
    count. grad_scale: a number or a 0-d tensor on the device, usually loss_scale/Σw. dhidden [N, H] is always `=`,
    dhead [V, H] is `=`, or `+=` with `accumulate`. chunk_rows bounds the logits slab; None picks by size.
    """
    op = "head_topk_kl_fwd_bwd"
    acc = checks.acc_dtype(hidden.dtype)
    vocab = _check(op, hidden, head_weight, topk_ids, topk_probs, row_weight, row_index, valid_vocab)
    rows = topk_ids.shape[0]
    active = rows if n_active is None else n_active
    if not 0 <= active <= rows:
        checks.fail(op, "n_active", f"between 0 and R = {rows}", n_active, "it counts leading rows")
    if chunk_rows is not None and chunk_rows < 1:
        checks.fail(op, "chunk_rows", "at least 1", chunk_rows, "leave it out to have it chosen")
    if need_grad and dhidden is None and dhead is None:
        checks.fail(op, "dhidden or dhead", "given", None, "pass where the gradient goes, or need_grad=False")
    if isinstance(grad_scale, Tensor) and grad_scale.dim() != 0:
        checks.fail(
            op, "grad_scale", "a number or a 0-d tensor", tuple(grad_scale.shape), "fold row factors in row_weight"
        )
    if not need_grad:
        dhidden = dhead = None
    if dhidden is not None:
        checks.output(op, "dhidden", dhidden, hidden.shape, hidden.dtype, hidden)
    if dhead is not None:
        checks.output(op, "dhead", dhead, head_weight.shape, acc, hidden)
        if not accumulate:
            dhead[0 if active == 0 else vocab :].zero_()

    head = head_weight[:vocab]
    step = chunk_rows or max(1, _SLAB.get(hidden.device.type, _SLAB["cpu"]) // vocab)
    loss = hidden.new_zeros((rows,), dtype=acc)
    # With row_index the gradient rows are collected here and placed once at the end.
    drows = dhidden
    if dhidden is not None and row_index is not None:
        drows = hidden.new_empty((active, hidden.shape[1]))
    for a in range(0, active, step):
        b = min(a + step, active)
        weight = row_weight[a:b].to(acc)
        if row_index is not None:
            place = row_index[a:b]
            weight = weight.masked_fill(place < 0, 0)
            x = hidden.index_select(0, place.clamp(min=0))
        else:
            x = hidden[a:b]
        dead = (weight == 0).unsqueeze(1)  # [rows, 1]
        x = x.masked_fill(dead, 0)  # a dead row may hold NaN, and 0·NaN would reach dhead
        z = linear_fwd(x, head).to(acc)  # [rows, V]
        slot_id, p, merged = _slots(topk_ids[a:b], topk_probs[a:b].to(acc), vocab)

        z.sub_(torch.logsumexp(z, dim=-1, keepdim=True))  # log q
        term = p * (merged.log() - z.gather(1, slot_id))
        # p, not merged: summing the slots counts every duplicate's share once. p == 0 keeps NaN visible elsewhere.
        kl = term.masked_fill(p == 0, 0).sum(-1)
        loss[a:b] = kl.masked_fill(dead.squeeze(1), 0)
        if not need_grad:
            continue

        scale = (weight * grad_scale).unsqueeze(1)
        dz = z.exp_().mul_(scale * p.sum(-1, keepdim=True))
        # Duplicate slots write the same value, so a plain overwrite is deterministic where atomics would not be.
        dz.scatter_(1, slot_id, dz.gather(1, slot_id) - scale * merged)
        dz = dz.masked_fill_(dead, 0).to(hidden.dtype)
        if drows is not None:
            linear_bwd_x(dz, head, out=drows[a:b])
        if dhead is not None:
            linear_bwd_w(dz, x, out=dhead[:vocab], accumulate=accumulate or a > 0)

    if dhidden is not None and drows is not None:
        if row_index is None:
            dhidden[active:].zero_()
        else:
            _place_rows(dhidden, drows, row_index[:active])
    # A row that does not count has loss 0, but its weight may be anything.
    counted = torch.where(loss == 0, 0.0, row_weight.to(torch.float64) * loss.to(torch.float64))
    return HeadLoss(loss, counted.sum())


def _slots(ids: Tensor, probs: Tensor, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids int64 in range, probs, and for every slot the sum of probs over all slots with its id), each [rows, K].

    An empty slot becomes a duplicate, with probability 0, of a real slot of its row (of id 0 when there is none), so
    that gathers stay in range and an overwrite through it writes what the real slot writes.
    """
    real = (ids >= 0) & (ids < vocab)
    ids = ids.long().masked_fill(~real, -1)
    if ids.shape[1] > 0:
        ids = torch.where(real, ids, ids.amax(-1, keepdim=True).clamp(min=0))
    p = probs.masked_fill(~real, 0)
    k = ids.shape[1]
    if k == 1:
        return ids, p, p
    step = max(1, _PAIRS // max(1, k * k))
    merged = torch.empty_like(p)
    for a in range(0, ids.shape[0], step):
        mine = ids[a : a + step]
        same = mine.unsqueeze(2) == mine.unsqueeze(1)  # [rows, K, K]
        merged[a : a + step] = torch.where(same, p[a : a + step].unsqueeze(1), 0.0).sum(-1)
    return ids, p, merged


def _place_rows(out: Tensor, rows: Tensor, row_index: Tensor) -> None:
    """out[row_index[r]] = rows[r] and 0 elsewhere, every row with one writer: padding goes to a row past the end."""
    n, active = out.shape[0], rows.shape[0]
    if active == 0:
        out.zero_()
        return
    source = torch.full((n + 1,), -1, dtype=torch.int64, device=out.device)
    target = row_index.long()
    source[torch.where(target < 0, n, target)] = torch.arange(active, device=out.device)
    source = source[:n]
    out.copy_(rows.index_select(0, source.clamp(min=0)).masked_fill_((source < 0).unsqueeze(1), 0))


def _check(
    op: str,
    hidden: Tensor,
    head_weight: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    row_weight: Tensor,
    row_index: Tensor | None,
    valid_vocab: int | None,
) -> int:
    checks.shape(op, "hidden", hidden, (None, None), "[N, H]", "flatten batch and time into rows first")
    checks.dtype(op, "hidden", hidden, checks.FLOATS, "convert it with .to()")
    h = hidden.shape[1]
    checks.shape(op, "head_weight", head_weight, (None, h), f"[V, {h}]", "the head is stored [vocabulary, hidden]")
    checks.alike(op, "head_weight", head_weight, "hidden", hidden)
    checks.shape(op, "topk_ids", topk_ids, (None, None), "[R, K]", "one row of K slots for every scored row")
    checks.dtype(op, "topk_ids", topk_ids, checks.INTS, "convert them with .to(torch.int32)")
    checks.same_shape(op, "topk_probs", topk_probs, "topk_ids", topk_ids, "one probability a slot")
    checks.dtype(op, "topk_probs", topk_probs, (torch.float32, torch.float64), "convert them with .float()")
    rows = topk_ids.shape[0]
    checks.shape(op, "row_weight", row_weight, (rows,), f"[{rows}]", "one weight a scored row")
    checks.dtype(op, "row_weight", row_weight, (torch.float32, torch.float64), "convert it with .float()")
    named = [("topk_ids", topk_ids), ("topk_probs", topk_probs), ("row_weight", row_weight)]
    if row_index is None:
        if rows != hidden.shape[0]:
            fix = "pass row_index= to score a part of hidden"
            checks.fail(op, "topk_ids", f"[N, K] with N = {hidden.shape[0]}", tuple(topk_ids.shape), fix)
    else:
        checks.shape(op, "row_index", row_index, (rows,), f"[{rows}]", "one hidden row a scored row, -1 for none")
        checks.dtype(op, "row_index", row_index, checks.INTS, "convert it with .to(torch.int32)")
        named.append(("row_index", row_index))
    for name, t in named:
        checks.same_device(op, name, t, "hidden", hidden)
    width = head_weight.shape[0]
    vocab = width if valid_vocab is None else valid_vocab
    if not 1 <= vocab <= width:
        checks.fail(op, "valid_vocab", f"between 1 and V = {width}", valid_vocab, "pass the tokenizer's size")
    return vocab
