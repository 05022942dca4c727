"""Forward of the gated delta rule on Triton: one pass over the states, then every output at once.

    R = v - exp(G) k S       V' = T (beta R)                            S: the state that enters the chunk
    S <- exp(G_C) S + k^T (exp(G_C - G) V')                             state_kernel, one chunk after another
    o = scale (exp(G) q S + tril(exp(G_i - G_j) q k^T) V')              output_kernel, all chunks side by side

Splitting the two leaves three dependent products a chunk in the sequential part, and the parallel part has all value
channels of a head in one program, so that the mixer's gated norm is its epilogue:

    out = o rsqrt(mean o^2 + eps) norm_weight SiLU(z)                   o rounded to the working dtype, which is kept

States are float32 in registers and rounded to the working dtype where they are multiplied and where they are kept.
They lie value channels first, S^T [DV, DK]: the sequential part computes the transposes of its products, so that what
one product gives enters the next from registers, and nothing on its chain passes through shared memory.

Entering states of even and odd chunks of a sequence are kept apart (chunks.py says where): the mixer drops the odd
ones, and makes them again before its backward from the even ones (advance_kernel).
"""

from __future__ import annotations

import triton
import triton.language as tl

from cortiq_kernels.ops import jit

from .triton_tiles import (
    chunk_at,
    gated,
    load_decay,
    load_gates,
    load_rows,
    load_state,
    sigmoid,
    state_at,
    store_rows,
    store_state,
)


@jit.kernel(do_not_specialize=["n"])
def state_kernel(
    k_ptr,  # [N, HK, DK]
    v_ptr,  # [N, HV, DV]
    t_ptr,  # [HV, N, C]
    g_ptr,  # [HV, N] f32
    beta_ptr,  # [HV, N] f32
    cu_ptr,  # [S+1] int32
    offsets_ptr,  # [S+1] int32
    h0_ptr,  # [S, HV, DK, DV] f32, HAS_H0 only
    even_ptr,  # [half, HV, DV, DK] out: the states that enter even chunks
    odd_ptr,  # and odd ones
    vn_ptr,  # [HV, N, DV] out: V'
    ht_ptr,  # [S, HV, DK, DV] f32 out, HAS_HT only
    n,
    k_stride,
    k_head,
    v_stride,
    v_head,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KPAD: tl.constexpr,
    BV: tl.constexpr,
    HAS_H0: tl.constexpr,
    HAS_HT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program a sequence, value head and BV value channels."""
    C: tl.constexpr = 64
    BLOCKS: tl.constexpr = (DV + BV - 1) // BV
    p = tl.program_id(0)
    v0, h, s = (p % BLOCKS) * BV, (p // BLOCKS) % HV, p // (BLOCKS * HV)
    start, end = tl.load(cu_ptr + s).to(tl.int64), tl.load(cu_ptr + s + 1).to(tl.int64)
    first, last = tl.load(offsets_ptr + s), tl.load(offsets_ptr + s + 1)
    wide_h = h.to(tl.int64)
    at_state = (s.to(tl.int64) * HV + h) * DK * DV
    if HAS_H0:
        state = tl.trans(load_state(h0_ptr + at_state, DK, DV, 0, KPAD, v0, BV).to(tl.float32))
    else:
        state = tl.zeros([BV, KPAD], tl.float32)
    k_ptr += (h // GROUP).to(tl.int64) * k_head
    v_ptr += wide_h * v_head + v0
    vn_ptr += wide_h * n * DV + v0
    t_ptr += wide_h * n * C
    g_ptr += wide_h * n
    beta_ptr += wide_h * n
    VW: tl.constexpr = DV if BLOCKS == 1 else BV  # a width that divides DV needs no column mask
    dt = k_ptr.dtype.element_ty
    r = tl.arange(0, C)
    for c in tl.range(first, last, num_stages=STAGES):
        past = (c - first).to(tl.int64)
        tok = start + past * C
        mask = r < end - tok
        k = load_rows(k_ptr, tok, r, mask, k_stride, DK, KPAD)
        t = load_rows(t_ptr, tok, r, mask, C, C, C)
        v = load_rows(v_ptr, tok, r, mask, v_stride, VW, BV)
        final = tl.minimum(tok + C, end) - 1
        g_last = tl.load(g_ptr + final)
        g, beta = load_gates(g_ptr, beta_ptr, tok, end - tok, g_last)
        low = state.to(dt)
        place = (first + s) // 2 * 2 + past
        store_state(state_at(even_ptr, odd_ptr, place, h, HV, DK * DV), low, DV, DK, v0, BV, 0, KPAD)
        ks = tl.dot(low, tl.trans(k), input_precision="ieee")
        rhs = (tl.trans(v) - ks * tl.exp2(g)[None, :]) * beta[None, :]
        vn = tl.dot(rhs.to(dt), tl.trans(t), input_precision="ieee")
        store_rows(vn_ptr, tl.trans(vn.to(dt)), tok, r, mask, DV, VW, BV)
        tail = tl.exp2(g_last - g)
        state = state * tl.exp2(g_last)
        state = tl.dot((vn * tail[None, :]).to(dt), k, state, input_precision="ieee")
    if HAS_HT:
        store_state(ht_ptr + at_state, tl.trans(state), DK, DV, 0, KPAD, v0, BV)


@jit.kernel(do_not_specialize=["n"])
def advance_kernel(
    k_ptr,  # [N, HK, DK]
    vn_ptr,  # [HV, N, DV] V'
    g_ptr,  # [HV, N] f32
    even_ptr,  # [half, HV, DV, DK] states that enter even chunks
    odd_ptr,  # [half, HV, DV, DK] out: and odd ones
    table_ptr,  # [cap, 3] int32
    n,
    k_stride,
    k_head,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KPAD: tl.constexpr,
    BV: tl.constexpr,
):
    """One program a chunk, value head and BV value channels: an odd one's entering state, from the chunk before it."""
    C: tl.constexpr = 64
    BLOCKS: tl.constexpr = (DV + BV - 1) // BV
    p = tl.program_id(0)
    v0, h, i = (p % BLOCKS) * BV, (p // BLOCKS) % HV, p // (BLOCKS * HV)
    tok, rows = chunk_at(table_ptr, i)
    place = tl.load(table_ptr + 3 * i + 2)
    if (rows == 0) | (place % 2 == 0):
        return
    at = ((place // 2).to(tl.int64) * HV + h) * DK * DV
    tok -= C  # of one sequence, so whole
    wide_h = h.to(tl.int64)
    VW: tl.constexpr = DV if BLOCKS == 1 else BV
    r = tl.arange(0, C)
    k = load_rows(k_ptr + (h // GROUP).to(tl.int64) * k_head, tok, r, r < C, k_stride, DK, KPAD)
    vn = load_rows(vn_ptr + wide_h * n * DV + v0, tok, r, r < C, DV, VW, BV)
    state = load_state(even_ptr + at, DV, DK, v0, BV, 0, KPAD)
    g_ptr += wide_h * n + tok
    g_last = tl.load(g_ptr + C - 1)
    tail = tl.exp2(g_last - tl.load(g_ptr + r))
    state = state * tl.exp2(g_last) + tl.dot(tl.trans((vn * tail[:, None]).to(k.dtype)), k, input_precision="ieee")
    store_state(odd_ptr + at, state, DV, DK, v0, BV, 0, KPAD)


@triton.jit
def scores(q, k, g, scale):
    """scale exp2(G_i - G_j) q_i.k_j for i >= j, else 0; float32."""
    seen = tl.arange(0, 64)[:, None] >= tl.arange(0, 64)[None, :]
    p = tl.dot(q, tl.trans(k), input_precision="ieee")
    return tl.where(seen, p * tl.exp2(tl.where(seen, g[:, None] - g[None, :], 0.0)) * scale, 0.0)


@jit.kernel(do_not_specialize=["n"])
def output_kernel(
    q_ptr,  # [N, HK, DK]
    k_ptr,  # [N, HK, DK]
    vn_ptr,  # [HV, N, DV]
    g_ptr,  # [HV, N] f32
    even_ptr,  # [half, HV, DV, DK]
    odd_ptr,  # [half, HV, DV, DK]
    z_ptr,  # [N, HV, DV], NORM only; row stride z_stride
    norm_ptr,  # [DV] f32, NORM only
    table_ptr,  # [cap, 3] int32
    o_ptr,  # [HV, N, DV] out: o, with NORM where KEEP; without NORM [N, HV, DV], row stride out_stride
    rstd_ptr,  # [HV, N] f32 out, KEEP only
    out_ptr,  # [N, HV, DV] out, NORM only: the mixer's output; row stride out_stride
    n,
    scale,
    eps,
    q_stride,
    q_head,
    k_stride,
    k_head,
    z_stride,
    out_stride,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KPAD: tl.constexpr,
    VPAD: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
):
    """One program a chunk and value head."""
    C: tl.constexpr = 64
    i, h = tl.program_id(0) // HV, tl.program_id(0) % HV
    tok, rows = chunk_at(table_ptr, i)
    if rows == 0:
        return
    r = tl.arange(0, C)
    mask = r < rows
    wide_h = h.to(tl.int64)
    q = load_rows(q_ptr + (h // GROUP).to(tl.int64) * q_head, tok, r, mask, q_stride, DK, KPAD)
    k = load_rows(k_ptr + (h // GROUP).to(tl.int64) * k_head, tok, r, mask, k_stride, DK, KPAD)
    g = load_decay(g_ptr + wide_h * n, tok, r, mask, tok + rows - 1)
    place = tl.load(table_ptr + 3 * i + 2)
    state = load_state(state_at(even_ptr, odd_ptr, place, h, HV, DK * DV), DV, DK, 0, VPAD, 0, KPAD)
    vn = load_rows(vn_ptr + wide_h * n * DV, tok, r, mask, DV, DV, VPAD)
    if NORM:
        z = load_rows(z_ptr + h * DV, tok, r, mask, z_stride, DV, VPAD)
    p = scores(q, k, g, scale).to(q.dtype)
    o = tl.dot(p, vn, input_precision="ieee")
    o = o - tl.dot(q, tl.trans(state), input_precision="ieee") * (tl.exp2(g) * -scale)[:, None]
    if NORM:
        col = tl.arange(0, VPAD)
        w = tl.load(norm_ptr + col, mask=col < DV, other=0)
        o = o.to(out_ptr.dtype.element_ty).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(o * o, 1) / DV + eps)
        if KEEP:
            store_rows(o_ptr + wide_h * n * DV, o, tok, r, mask, DV, DV, VPAD)
            tl.store(rstd_ptr + wide_h * n + tok + r, rstd, mask=mask)
        z = z.to(tl.float32)
        out = gated(o * rstd[:, None], z, sigmoid(z), w[None, :])
        store_rows(out_ptr + h * DV, out, tok, r, mask, out_stride, DV, VPAD)
    else:
        store_rows(o_ptr + h * DV, o, tok, r, mask, out_stride, DV, VPAD)
