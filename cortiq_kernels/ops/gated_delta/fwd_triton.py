"""Forward of the gated delta rule on Triton: one pass over the states, then every output at once.

    R = v - exp(G) k S       V' = T (beta R)                            S: the state that enters the chunk
    S <- exp(G_C) S + k^T (exp(G_C - G) V')                             state_kernel, one chunk after another
    o = scale (exp(G) q S + tril(exp(G_i - G_j) q k^T) V')              output_kernel, all chunks side by side

Splitting the two leaves three dependent products a chunk in the sequential part, and the parallel part has all value
channels of a head in one program, so that the mixer's gated norm is its epilogue:

    out = o rsqrt(mean o^2 + eps) norm_weight SiLU(z)

States are float32 in registers and rounded to the working dtype where they are multiplied and where they are kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cortiq_kernels.ops import jit

from .triton_tiles import chunk_at, load_decay, load_rows, load_state, store_rows, store_state


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
    h_ptr,  # [cap, HV, DK, DV] out: the state that enters each chunk
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
    STORE_H: tl.constexpr,
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
        state = load_state(h0_ptr + at_state, DK, DV, 0, KPAD, v0, BV).to(tl.float32)
    else:
        state = tl.zeros([KPAD, BV], tl.float32)
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
        g, g_last = load_decay(g_ptr, tok, r, mask, final), tl.load(g_ptr + final)
        beta = tl.load(beta_ptr + tok + r, mask=mask, other=0)
        low = state.to(dt)
        if STORE_H:
            store_state(h_ptr + ((past + first) * HV + h) * DK * DV, low, DK, DV, 0, KPAD, v0, BV)
        ks = tl.dot(k, low, input_precision="ieee")
        rhs = (v - ks * tl.exp2(g)[:, None]) * beta[:, None]
        vn = tl.dot(t, rhs.to(dt), input_precision="ieee")
        store_rows(vn_ptr, vn, tok, r, mask, DV, VW, BV)
        tail = tl.exp2(g_last - g)
        state = state * tl.exp2(g_last) + tl.dot(tl.trans(k), (vn * tail[:, None]).to(dt), input_precision="ieee")
    if HAS_HT:
        store_state(ht_ptr + at_state, state, DK, DV, 0, KPAD, v0, BV)


@triton.jit
def scores(q, k, g, scale, UPPER: tl.constexpr):
    """scale exp2(G_i - G_j) q_i.k_j for i >= j (UPPER: its transpose, from q and k swapped), else 0; float32."""
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    if UPPER:
        seen, d = i <= j, g[None, :] - g[:, None]
        p = tl.dot(k, tl.trans(q), input_precision="ieee")
    else:
        seen, d = i >= j, g[:, None] - g[None, :]
        p = tl.dot(q, tl.trans(k), input_precision="ieee")
    return tl.where(seen, p * tl.exp2(tl.where(seen, d, 0.0)) * scale, 0.0)


@jit.kernel(do_not_specialize=["n"])
def output_kernel(
    q_ptr,  # [N, HK, DK]
    k_ptr,  # [N, HK, DK]
    vn_ptr,  # [HV, N, DV]
    g_ptr,  # [HV, N] f32
    h_ptr,  # [cap, HV, DK, DV]
    z_ptr,  # [N, HV, DV], NORM only; row stride z_stride
    norm_ptr,  # [DV] f32, NORM only
    table_ptr,  # [cap, 2] int32
    o_ptr,  # [N, HV, DV] out; row stride o_stride
    n,
    scale,
    eps,
    q_stride,
    q_head,
    k_stride,
    k_head,
    z_stride,
    o_stride,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KPAD: tl.constexpr,
    VPAD: tl.constexpr,
    NORM: tl.constexpr,
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
    state = load_state(h_ptr + (i.to(tl.int64) * HV + h) * DK * DV, DK, DV, 0, KPAD, 0, VPAD)
    vn = load_rows(vn_ptr + wide_h * n * DV, tok, r, mask, DV, DV, VPAD)
    o = tl.dot(q, state, input_precision="ieee") * (tl.exp2(g) * scale)[:, None]
    p = scores(q, k, g, scale, False).to(q.dtype)
    o += tl.dot(p, vn, input_precision="ieee")
    if NORM:
        col = tl.arange(0, VPAD)
        w = tl.load(norm_ptr + col, mask=col < DV, other=0)
        z = load_rows(z_ptr + h * DV, tok, r, mask, z_stride, DV, VPAD).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(o * o, 1) / DV + eps)
        o = o * rstd[:, None] * w[None, :] * z * tl.sigmoid(z)
    store_rows(o_ptr + h * DV, o, tok, r, mask, o_stride, DV, VPAD)
