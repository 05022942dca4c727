"""Causal softmax attention on Triton: the backward, without atomics.

    P = exp(S - lse)   dP = do v^T   dS = P (dP - delta)      delta = rowsum(do o)
    dq~ = scale dS k~   dk~ = scale dS^T q~   dv = P^T do      dk~ and dv summed over the heads of a group

One launch of three kinds of programs, so that the long ones of one kind overlap the short ones of another: a block of
keys walks the queries that see it, and makes dk~, dv or (heads up to 128, whose two sums fit into registers) both; a
block of queries walks its keys and makes dq~. S is made again by each. The order of every sum is fixed by the
sequence alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..jit import kernel
from .tiles_triton import LOG2E, block_at, load_heads, store_heads


@triton.jit
def _keys(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, n, scale,
    tok, place, rows, length, kv, qk_stride, v_stride, do_stride, dk_stride, dv_stride,
    GROUP: tl.constexpr, HD: tl.constexpr, PAD: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, STAGES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """dk~ and dv of one block of keys and one key head."""
    r = tl.arange(0, ROWS)
    mask, none = r < rows, tl.zeros([ROWS], tl.int32)
    k = load_heads(k_ptr + kv * HD, tok, r, none, mask, qk_stride, HD, HD, PAD)
    dk = tl.zeros([ROWS, PAD], tl.float32)
    dv = tl.zeros([ROWS, PAD], tl.float32)
    if DK:
        v = load_heads(v_ptr + kv * HD, tok, r, none, mask, v_stride, HD, HD, PAD)
    c = tl.arange(0, COLS)
    t, g = c // PACK, c % PACK
    left = length - place  # tokens from the block's first to the sequence's end
    TOKENS: tl.constexpr = COLS // PACK
    steps = tl.cdiv(left, TOKENS)
    for i in tl.range(0, steps * (GROUP // PACK), num_stages=STAGES):
        j = (i // (GROUP // PACK)) * TOKENS
        h0 = kv * GROUP + (i % (GROUP // PACK)) * PACK
        seen = j + t < left
        q = load_heads(q_ptr + h0 * HD, tok + j, t, g, seen, qk_stride, HD, HD, PAD)
        do = load_heads(do_ptr + h0 * HD, tok + j, t, g, seen, do_stride, HD, HD, PAD)
        row = h0.to(tl.int64) * n + tok + j + (g.to(tl.int64) * n + t)
        lse = tl.load(lse_ptr + row, mask=seen, other=float("inf")) * LOG2E
        s = tl.dot(k, tl.trans(q), input_precision="ieee")
        p = tl.exp2(s * (scale * LOG2E) - lse[None, :])
        p = tl.where(r[:, None] <= (j + t)[None, :], p, 0.0)
        if DV:
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        if DK:
            delta = tl.load(delta_ptr + row, mask=seen, other=0)
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    if DK:
        store_heads(dk_ptr + kv * HD, dk * scale, tok, r, none, mask, dk_stride, HD, HD, PAD)
    if DV:
        store_heads(dv_ptr + kv * HD, dv, tok, r, none, mask, dv_stride, HD, HD, PAD)


@triton.jit
def _queries(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, n, scale,
    tok, place, rows, h0, qk_stride, v_stride, do_stride, dq_stride,
    GROUP: tl.constexpr, HD: tl.constexpr, PAD: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq~ of one block of queries and PACK heads."""
    kv = h0 // GROUP
    r = tl.arange(0, ROWS)
    t, g = r // PACK, r % PACK
    mask = t < rows
    q = load_heads(q_ptr + h0 * HD, tok, t, g, mask, qk_stride, HD, HD, PAD)
    do = load_heads(do_ptr + h0 * HD, tok, t, g, mask, do_stride, HD, HD, PAD)
    row = h0.to(tl.int64) * n + tok + (g.to(tl.int64) * n + t)
    lse = tl.load(lse_ptr + row, mask=mask, other=float("inf")) * LOG2E
    delta = tl.load(delta_ptr + row, mask=mask, other=0)
    first, stop = tok - place, place + rows
    c = tl.arange(0, COLS)
    none = tl.zeros([COLS], tl.int32)
    k_ptr += kv * HD
    v_ptr += kv * HD
    dq = tl.zeros([ROWS, PAD], tl.float32)
    for j in tl.range(0, stop, COLS, num_stages=STAGES):
        seen = j + c < stop
        k = load_heads(k_ptr, first + j, c, none, seen, qk_stride, HD, HD, PAD)
        v = load_heads(v_ptr, first + j, c, none, seen, v_stride, HD, HD, PAD)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        p = tl.exp2(s * (scale * LOG2E) - lse[:, None])
        p = tl.where((j + c)[None, :] <= (place + t)[:, None], p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    store_heads(dq_ptr + h0 * HD, dq * scale, tok, t, g, mask, dq_stride, HD, HD, PAD)


@kernel(do_not_specialize=["n", "key_programs"])
def attn_bwd_kernel(
    q_ptr,  # [N, NKV*GROUP, HD] q~
    k_ptr,  # [N, NKV, HD] k~, the row stride of q
    v_ptr,  # [N, NKV, HD]
    do_ptr,  # [N, NKV*GROUP, HD]
    lse_ptr,  # [NKV*GROUP, N] f32
    delta_ptr,  # [NKV*GROUP, N] f32
    keys_ptr,  # [cap, 4] int32 blocks of ROWS tokens
    queries_ptr,  # [cap, 4] int32 blocks of ROWS // PACK tokens
    dq_ptr,  # [N, NKV*GROUP, HD] out
    dk_ptr,  # [N, NKV, HD] out
    dv_ptr,  # [N, NKV, HD] out
    n,
    scale,
    key_programs,
    qk_stride,
    v_stride,
    do_stride,
    dq_stride,
    dk_stride,
    dv_stride,
    NKV: tl.constexpr,
    GROUP: tl.constexpr,
    HD: tl.constexpr,
    PAD: tl.constexpr,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    BOTH: tl.constexpr,  # dk~ and dv in one program
):
    """Programs below key_programs are of keys, the rest of queries; of either, those with most to do come first."""
    pid = tl.program_id(0)
    if pid < key_programs:
        if BOTH:
            tok, place, rows, length = block_at(keys_ptr, pid // NKV)
            if rows > 0:
                _keys(
                    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, n, scale,
                    tok, place, rows, length, pid % NKV, qk_stride, v_stride, do_stride, dk_stride, dv_stride,
                    GROUP, HD, PAD, PACK, ROWS, COLS, STAGES, True, True,
                )  # fmt: skip
        else:
            tok, place, rows, length = block_at(keys_ptr, pid // (2 * NKV))
            if rows > 0:
                if pid % 2 == 0:
                    _keys(
                        q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, n, scale,
                        tok, place, rows, length, pid // 2 % NKV, qk_stride, v_stride, do_stride, dk_stride, dv_stride,
                        GROUP, HD, PAD, PACK, ROWS, COLS, STAGES, True, False,
                    )  # fmt: skip
                else:  # without v in shared memory there is room for one stage more
                    _keys(
                        q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, n, scale,
                        tok, place, rows, length, pid // 2 % NKV, qk_stride, v_stride, do_stride, dk_stride, dv_stride,
                        GROUP, HD, PAD, PACK, ROWS, COLS, STAGES + 1, False, True,
                    )  # fmt: skip
    else:
        PARTS: tl.constexpr = NKV * GROUP // PACK
        i = pid - key_programs
        tok, place, rows, _ = block_at(queries_ptr, i // PARTS)
        if rows > 0:
            _queries(
                q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, n, scale,
                tok, place, rows, (i % PARTS) * PACK, qk_stride, v_stride, do_stride, dq_stride,
                GROUP, HD, PAD, PACK, ROWS, COLS, STAGES,
            )  # fmt: skip
