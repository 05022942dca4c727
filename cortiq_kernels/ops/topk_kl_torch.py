"""`head_topk_kl_fwd_bwd` in plain torch operations, a chunk of rows at a time: for CPUs, and for float64 anywhere."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.ops import checks
from cortiq_kernels.ops.linear import linear_bwd_w, linear_bwd_x, linear_fwd

# Elements of one f32 slab: 128 MiB on a CPU, 512 MiB on a GPU.
_SLAB = {"cpu": 1 << 25, "cuda": 1 << 27}
_PAIRS = 1 << 24  # elements of the slot-by-slot comparison at a time


class LossOptions(NamedTuple):
    """What shapes the loss besides its targets; see `topk_kl.py`."""

    temperature: float = 1.0
    softcap: float = 0.0
    tail: bool = False


def bend_logits(z: Tensor, options: LossOptions) -> Tensor:
    """Logits after temperature and soft cap, in the dtype of z."""
    if options.temperature != 1.0:
        z = z / options.temperature
    return torch.tanh(z / options.softcap) * options.softcap if options.softcap > 0 else z


def head_topk_kl_torch(
    hidden: Tensor,
    head: Tensor,
    ids: Tensor,
    probs: Tensor,
    weight: Tensor,
    row_index: Tensor | None,
    *,
    active: int,
    grad_scale: float | Tensor,
    loss: Tensor,
    drows: Tensor | None,
    dhead: Tensor | None,
    accumulate: bool,
    need_grad: bool,
    chunk_rows: int | None,
    logits_dtype: torch.dtype,
    options: LossOptions,
) -> None:
    """Loss of rows 0 .. active-1 into `loss` [R] acc; gradient rows into `drows` [active, H]; dhead `=`/`+=` acc.

    `head` [V, H] holds the valid columns only; `weight` [R] acc is 0 where a row does not count.
    """
    vocab, acc = head.shape[0], checks.acc_dtype(hidden.dtype)
    step = chunk_rows or max(1, _SLAB.get(hidden.device.type, _SLAB["cpu"]) // vocab)
    for a in range(0, active, step):
        b = min(a + step, active)
        x = hidden[a:b] if row_index is None else hidden.index_select(0, row_index[a:b].clamp(min=0))
        dead = (weight[a:b] == 0).unsqueeze(1)  # [rows, 1]
        x = x.masked_fill(dead, 0)  # a dead row may hold NaN, and 0·NaN would reach dhead
        z = linear_fwd(x, head) if logits_dtype == x.dtype else x.to(logits_dtype) @ head.to(logits_dtype).t()
        z = bend_logits(z.to(acc), options)  # [rows, V]
        bend = None
        if need_grad and options.softcap > 0:
            bend = 1 - (z / options.softcap).square()
        slot_id, p, merged, share = _slots(ids[a:b], probs[a:b].to(acc), vocab)

        lse = torch.logsumexp(z, dim=-1, keepdim=True)
        if options.tail:  # log(1 − Q) by its own sum: 1 − Σ q of a sure student is a rounding error, of either sign
            log_missed = torch.logsumexp(z.scatter(1, slot_id, float("-inf")), dim=-1, keepdim=True) - lse
        z.sub_(lse)  # log q
        log_q = z.gather(1, slot_id)
        term = p * (merged.log() - log_q)
        # p, not merged: summing the slots counts every duplicate's share once. p == 0 keeps NaN visible elsewhere.
        kl = term.masked_fill(p == 0, 0).sum(-1, keepdim=True)
        mass = p.sum(-1, keepdim=True)
        inside = mass  # factor of q in the slots
        if options.tail:
            rest = (1 - mass).clamp(min=0).masked_fill(mass == 0, 0)
            kl = kl + torch.where(rest > 0, rest * (rest.log() - log_missed), 0.0)
            inside = mass + rest
        loss[a:b] = kl.masked_fill(dead, 0).squeeze(1)
        if not need_grad:
            continue

        scale = (weight[a:b] * grad_scale).unsqueeze(1) / options.temperature
        in_slots = log_q.exp() * (scale * inside) - scale * merged
        if options.tail:
            covered = (log_q.exp() * share).sum(-1, keepdim=True)  # Q
            pull = torch.exp(z - log_missed).mul_(scale * rest * covered)  # q/(1 − Q) is at most 1 outside the slots
            dz = z.exp_().mul_(scale * mass).sub_(pull)
            del pull
        else:
            dz = z.exp_().mul_(scale * mass)
        # Duplicate slots write the same value, so a plain overwrite is deterministic where atomics would not be.
        dz.scatter_(1, slot_id, in_slots)
        if bend is not None:
            dz.mul_(bend)
        dz = dz.masked_fill_(dead, 0).to(hidden.dtype)
        if drows is not None:
            linear_bwd_x(dz, head, out=drows[a:b])
        if dhead is not None:
            linear_bwd_w(dz, x, out=dhead, accumulate=accumulate or a > 0)


def _slots(ids: Tensor, probs: Tensor, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(ids int64 in range, probs, their sum over all slots with a slot's id, one over how many those are), [rows, K].

    An empty slot becomes a duplicate, with probability 0, of a real slot of its row (of id 0 when there is none), so
    that gathers stay in range and an overwrite through it writes what the real slot writes. Its share is 0.
    """
    real = (ids >= 0) & (ids < vocab)
    ids = ids.long().masked_fill(~real, -1)
    if ids.shape[1] > 0:
        ids = torch.where(real, ids, ids.amax(-1, keepdim=True).clamp(min=0))
    p = probs.masked_fill(~real, 0)
    k = ids.shape[1]
    if k == 1:
        return ids, p, p, real.to(p.dtype)
    step = max(1, _PAIRS // max(1, k * k))
    merged, share = torch.empty_like(p), torch.empty_like(p)
    for a in range(0, ids.shape[0], step):
        mine = ids[a : a + step]
        same = mine.unsqueeze(2) == mine.unsqueeze(1)  # [rows, K, K]
        merged[a : a + step] = torch.where(same, p[a : a + step].unsqueeze(1), 0.0).sum(-1)
        held = real[a : a + step]
        share[a : a + step] = held.to(p.dtype) / (same & held.unsqueeze(1)).sum(-1).clamp(min=1)
    return ids, p, merged, share
