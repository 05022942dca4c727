"""Causal softmax attention on Triton: the forward, with the output gate as its epilogue.

One program a block of queries and PACK heads; it walks the keys of its sequence from the first to the block's last
token, COLS at a time, with the running maximum and sum of the online softmax. lse = ln sum exp(s), in units of 1 (not
of log 2).
"""

from __future__ import annotations

import triton.language as tl

from ..jit import kernel
from .tiles_triton import LN2, block_at, load_heads, store_heads


@kernel(do_not_specialize=["n"])
def attn_fwd_kernel(
    q_ptr,  # [N, NKV*GROUP, HD] q~
    k_ptr,  # [N, NKV, HD] k~, the row stride of q
    v_ptr,  # [N, NKV, HD]
    gate_ptr,  # [N, NKV*GROUP, HD], GATE only
    blocks_ptr,  # [cap, 4] int32
    o_ptr,  # [N, NKV*GROUP*HD] contiguous, out: before the gate; SAVE and GATE only
    out_ptr,  # [N, NKV*GROUP*HD] out
    lse_ptr,  # [NKV*GROUP, N] f32 out, SAVE only
    n,
    scale,  # HD^-1/2, in units of log 2
    qk_stride,
    v_stride,
    gate_stride,
    gate_head,
    out_stride,
    NKV: tl.constexpr,
    GROUP: tl.constexpr,
    HD: tl.constexpr,
    PAD: tl.constexpr,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    GATE: tl.constexpr,
    SAVE: tl.constexpr,
):
    """One program a block of ROWS // PACK tokens and PACK heads, the blocks with most keys first."""
    PARTS: tl.constexpr = NKV * GROUP // PACK
    pid = tl.program_id(0)
    tok, place, rows, _ = block_at(blocks_ptr, pid // PARTS)
    if rows == 0:
        return
    h0 = (pid % PARTS) * PACK
    kv = h0 // GROUP
    r = tl.arange(0, ROWS)
    t, g = r // PACK, r % PACK
    mask = t < rows
    q = load_heads(q_ptr + h0 * HD, tok, t, g, mask, qk_stride, HD, HD, PAD)
    first, stop = tok - place, place + rows
    c = tl.arange(0, COLS)
    none = tl.zeros([COLS], tl.int32)
    k_ptr += kv * HD
    v_ptr += kv * HD
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, PAD], tl.float32)
    for j in tl.range(0, stop, COLS, num_stages=STAGES):
        seen = j + c < stop
        k = load_heads(k_ptr, first + j, c, none, seen, qk_stride, HD, HD, PAD)
        v = load_heads(v_ptr, first + j, c, none, seen, v_stride, HD, HD, PAD)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where((j + c)[None, :] <= (place + t)[:, None], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        o = o * shrink[:, None]
        o = tl.dot(p.to(v.dtype), v, o, input_precision="ieee")
        top = higher
    o = o / total[:, None]
    if SAVE:
        at = lse_ptr + h0.to(tl.int64) * n + tok + (g.to(tl.int64) * n + t)
        tl.store(at, (top + tl.log2(total)) * LN2, mask=mask)
    if GATE:
        if SAVE:
            store_heads(o_ptr + h0 * HD, o, tok, t, g, mask, NKV * GROUP * HD, HD, HD, PAD)
        gate = load_heads(gate_ptr + h0 * gate_head, tok, t, g, mask, gate_stride, gate_head, HD, PAD)
        o = o * tl.sigmoid(gate.to(tl.float32))
    store_heads(out_ptr + h0 * HD, o, tok, t, g, mask, out_stride, HD, HD, PAD)
