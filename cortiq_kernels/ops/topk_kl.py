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

Options: temperature T and softcap c bend the logits, z = c·tanh(h·head_weightᵀ/(T·c)) (c = 0: h·head_weightᵀ/T), and
dz above is the gradient of the bent ones, times dz_bent/dz = (1 − (z/c)²)/T. No factor T² is applied. tail adds a
bucket for what the slots leave out, with p_t = max(0, 1 − P) and Q = Σ q over the distinct slots:
    loss_r += p_t·(log p_t − log(1 − Q));  dz = w_r·grad_scale·(q·(P − p_t·Q/(1 − Q))) outside the slots and
    w_r·grad_scale·(q·(P + p_t) − t) in them. A row whose slots hold no probability has loss 0 and no gradient.

Precision: logits are a slab [chunk_rows, V] in the working dtype (GEMM sums in f32); softmax, loss and dz are f32 (f64
for f64), and dz is rounded once to the working dtype for the two GEMMs. (On a GPU in bf16 what is rounded is dz/r, r a
factor a row: dhidden gets r in f32 after its GEMM, dhead through h, so r·h is rounded too; `topk_kl_slab.py`.) dhead
is summed in f32 over chunks, so chunk_rows changes it in the last bits only; dhidden and loss do not depend on other
rows. Same inputs, same bits: no atomics. With K = 1 and p = 1 this is cross entropy. Source: Hinton, Vinyals and Dean,
"Distilling the Knowledge in a Neural Network", 2015.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.ops import checks
from cortiq_kernels.ops.topk_kl_torch import LossOptions, bend_logits, head_topk_kl_torch
from cortiq_kernels.ops.triton_gate import launching_on, use_triton

CHUNK_ROWS = 4096
_ALIGN = 64  # elements: every row of the slab starts on 128 bytes


def rows_for(budget_bytes: int, vocab: int, itemsize: int = 2) -> int:
    """Rows of a slab of at most `budget_bytes`: the largest power of two that fits (at least 128), up to CHUNK_ROWS.

    The dh GEMM has few output tiles, so rows between powers of two leave a wave of the GPU partly idle. With 248,320
    columns and H 2560 on an H200, slabs of 1024 rows (512 MB) took 2.6 % longer than slabs of 4096
    (bench/results/h200/head.json).
    """
    rows = 128
    while rows < CHUNK_ROWS and 2 * rows * slab_stride(vocab) * itemsize <= budget_bytes:
        rows *= 2
    return rows


def slab_stride(vocab: int) -> int:
    """Elements from one row of the slab to the next."""
    return -(-vocab // _ALIGN) * _ALIGN


def new_slab(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for `rows` rows of logits [rows, slab_stride(vocab)]; may hold anything."""
    return torch.empty((rows, slab_stride(vocab)), dtype=dtype, device=device)


class HeadLoss(NamedTuple):
    """loss [R] per row, unweighted, 0 where the row does not count; total 0-d f64 = Σ row_weight·loss."""

    loss: Tensor
    total: Tensor


def head_topk_kl_ref(
    hidden: Tensor,
    head: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    row_weight: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float = 0.0,
    tail: bool = False,
) -> tuple[Tensor, Tensor]:
    """(loss [R], total 0-d), with a dense [R, V] target, in the dtype of hidden; R == N, ids -1 are empty slots."""
    z = bend_logits(hidden @ head.to(hidden.dtype).transpose(0, 1), LossOptions(temperature, softcap))
    empty = topk_ids < 0
    p = topk_probs.to(z.dtype).masked_fill(empty, 0)
    target = torch.zeros_like(z).scatter_add(1, topk_ids.long().masked_fill(empty, 0), p)
    entropy = torch.special.entr(target).sum(-1)  # Σ −t·log t
    log_q = torch.log_softmax(z, dim=-1)
    loss = -(target * log_q).sum(-1) - entropy
    if tail:
        slot = torch.zeros_like(z).scatter_add(1, topk_ids.long().masked_fill(empty, 0), (~empty).to(z.dtype)) > 0
        rest = (1 - p.sum(-1)).clamp(min=0)
        missed = torch.log(torch.where(slot, 0.0, log_q.exp()).sum(-1))  # log(1 − Q)
        loss = loss + torch.where((rest > 0) & (rest < 1), torch.xlogy(rest, rest) - rest * missed, 0.0)
    return loss, (row_weight.to(z.dtype) * loss).sum()


def mix_targets(
    topk_ids: Tensor, topk_probs: Tensor, true_ids: Tensor, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Targets of α·CE(true token) + (1 − α)·KL(b‖q), b the given ones: ids and probs [R, K+1], and const [R].

    The true token gets a slot of its own (merged with its duplicate by the loss) of probability α, the others are
    scaled by 1 − α. The loss of these targets is the mix less const = H(t) − (1 − α)·H(b), t the mixed targets: add
    it, it has no gradient. (The loss of the mixed target alone is not the mix: its constant is Σ t·log t, not (1 −
    α)·Σ b·log b.)
    """
    if not 0 <= alpha <= 1:
        checks.fail("mix_targets", "alpha", "between 0 and 1", alpha, "it is the true token's share")
    ids = torch.cat((topk_ids, true_ids.to(topk_ids.dtype).unsqueeze(1)), dim=1)
    b = torch.where(topk_ids < 0, 0.0, topk_probs)
    probs = torch.cat((b * (1 - alpha), torch.full_like(b[:, :1], alpha)), dim=1)
    return ids, probs, merged_entropy(ids, probs) - (1 - alpha) * merged_entropy(topk_ids, b)


def merged_entropy(ids: Tensor, probs: Tensor) -> Tensor:
    """Σ_v −t_v·log t_v of every row's targets [R], slots with the same id merged, empty slots (id < 0) left out."""
    p = torch.where(ids < 0, 0.0, probs)
    total = torch.zeros_like(p)
    for j in range(ids.shape[1]):
        total += torch.where(ids == ids[:, j : j + 1], p[:, j : j + 1], 0.0)
    return -torch.where(p > 0, p * torch.log(torch.where(p > 0, total, 1.0)), 0.0).sum(-1)


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
    temperature: float = 1.0,
    softcap: float = 0.0,
    tail: bool = False,
    slab: Tensor | None = None,
    slab_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> HeadLoss:
    """Loss of every row, and with `need_grad` its gradients into `dhidden` and `dhead` (either may be None: skipped).

    row_index None means R == N, row r reads hidden[r]. n_active (host int, default R): only the first n_active rows
    count. grad_scale: a number or a 0-d tensor on the device, usually loss_scale/Σw. dhidden [N, H] is always `=`,
    dhead [V, H] is `=`, or `+=` with `accumulate`. chunk_rows bounds the logits slab (None: 4096 on a GPU, by size
    elsewhere); `slab` is the caller's own memory for it (`new_slab`, whose rows for a budget `rows_for`
    picks), so that a call allocates nothing of that size; slab_dtype float32 keeps 16-bit runs' logits unrounded.
    backend: "auto" (Triton for CUDA tensors below float64), "triton" or "torch".
    """
    op = "head_topk_kl_fwd_bwd"
    acc = checks.acc_dtype(hidden.dtype)
    vocab = _check(op, hidden, head_weight, topk_ids, topk_probs, row_weight, row_index, valid_vocab)
    rows = topk_ids.shape[0]
    active = rows if n_active is None else n_active
    if not 0 <= active <= rows:
        checks.fail(op, "n_active", f"between 0 and R = {rows}", n_active, "it counts leading rows")
    if hidden.shape[0] == 0:
        active = 0  # without hidden rows every scored row is padding
    if chunk_rows is not None and chunk_rows < 1:
        checks.fail(op, "chunk_rows", "at least 1", chunk_rows, "leave it out to have it chosen")
    if need_grad and dhidden is None and dhead is None:
        checks.fail(op, "dhidden or dhead", "given", None, "pass where the gradient goes, or need_grad=False")
    if isinstance(grad_scale, Tensor) and grad_scale.dim() != 0:
        checks.fail(
            op, "grad_scale", "a number or a 0-d tensor", tuple(grad_scale.shape), "fold row factors in row_weight"
        )
    if not (temperature > 0 and softcap >= 0):
        checks.fail(
            op, "temperature and softcap", "above 0, and at least 0", (temperature, softcap), "softcap 0 is none"
        )
    logits_dtype = slab_dtype or (hidden.dtype if slab is None else slab.dtype)
    if logits_dtype not in (hidden.dtype, torch.float32):
        checks.fail(op, "slab_dtype", f"{hidden.dtype} or torch.float32", logits_dtype, "leave it out")
    if slab is not None:
        fits = slab.dim() == 2 and slab.shape[0] > 0 and slab.shape[1] >= vocab and slab.stride(1) == 1
        if not fits or slab.dtype != logits_dtype:
            shape = f"{logits_dtype} [rows, at least {vocab}], unit column stride"
            checks.fail(op, "slab", shape, (slab.dtype, *slab.shape), "use new_slab")
        checks.same_device(op, "slab", slab, "hidden", hidden)
    if not need_grad:
        dhidden = dhead = None
    if dhidden is not None:
        checks.output(op, "dhidden", dhidden, hidden.shape, hidden.dtype, hidden)
        checks.apart(op, "dhidden", dhidden, (("hidden", hidden),))
    if dhead is not None:
        checks.output(op, "dhead", dhead, head_weight.shape, acc, hidden)
        if not accumulate:
            dhead[0 if active == 0 else vocab :].zero_()

    head = head_weight[:vocab]
    loss = hidden.new_zeros((rows,), dtype=acc)
    weight = row_weight.to(acc)
    if row_index is not None:
        weight = weight.masked_fill(row_index < 0, 0)
    shared: dict[str, Any] = dict(
        active=active, loss=loss, dhead=dhead if dhead is None else dhead[:vocab], accumulate=accumulate,
        need_grad=need_grad, options=LossOptions(temperature, softcap, tail),
    )  # fmt: skip
    if use_triton(op, hidden, backend):
        from cortiq_kernels.ops.topk_kl_slab import head_topk_kl_slab

        topk_ids, topk_probs = (t if t.stride(-1) == 1 else t.contiguous() for t in (topk_ids, topk_probs))
        weight = weight.contiguous()  # an expanded one too
        row_index = row_index if row_index is None else row_index.contiguous()
        if slab is None:
            wanted = chunk_rows or min(CHUNK_ROWS, max(active, 1))
            slab = new_slab(wanted, vocab, logits_dtype, hidden.device)
        if not isinstance(grad_scale, Tensor):
            grad_scale = torch.full((), grad_scale, dtype=torch.float64, device=hidden.device)
        with launching_on(hidden):
            head_topk_kl_slab(
                hidden, head, topk_ids, topk_probs, weight, row_index, grad_scale=grad_scale, slab=slab,
                dhidden=dhidden, **shared,
            )  # fmt: skip
    else:
        drows = dhidden
        if dhidden is not None and row_index is not None:  # collected, and placed once at the end
            drows = hidden.new_empty((active, hidden.shape[1]))
        head_topk_kl_torch(
            hidden, head, topk_ids, topk_probs, weight, row_index, grad_scale=grad_scale, chunk_rows=chunk_rows,
            logits_dtype=logits_dtype, drows=drows, **shared,
        )  # fmt: skip
        if dhidden is not None and drows is not None:
            if row_index is None:
                dhidden[active:].zero_()
            else:
                _place_rows(dhidden, drows, row_index[:active])
    # A row that does not count has loss 0, but its weight may be anything.
    counted = torch.where(loss == 0, 0.0, row_weight.to(torch.float64) * loss.to(torch.float64))
    return HeadLoss(loss, counted.sum())


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
