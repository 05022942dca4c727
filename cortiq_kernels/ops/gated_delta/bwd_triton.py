"""Backward of the gated delta rule on Triton.

With S, V', R as in fwd_triton.py, and dS the gradient of the state that leaves the chunk:

    P = scale tril(exp(G_i - G_j) q k^T)
    dV' = P^T do + exp(G_C - G) k dS       Y = T^T dV'                  Y: gradient of beta R
    dS <- exp(G_C) dS + scale q^T (exp(G) do) - k^T (exp(G) beta Y)

The gradient of L = T^-1 - I needs no product with T: V' solves (I + L) V' = beta R, so dL = -Y V'^T below the diagonal.
Then, with decay D_ij = exp(G_i - G_j) for i >= j, dP' = scale D o do V'^T and Z = D o dL:

    dv    = beta Y
    dq    = scale exp(G) do S^T + dP' k
    dk_r  = beta (Z k - exp(G) Y S^T)                                   where k reads the state
    dk_w  = exp(G_C - G) V' dS^T + dP'^T q + (beta Z)^T k               where k writes it
    dk    = dk_r + dk_w
    beta dbeta = Y.V'
    dG    = q.dq + k.dk_r - k.dk_w ;  the chunk's last row: + sum k.(exp(G_C - G) V' dS^T) + exp(G_C) <S, dS>
    dg    = sum of dG from the row to the chunk's end                   gates_triton.py

dG is that short because a decay sum only ever scales what a row reads (exp(G)) or writes (exp(-G)); dbeta because what
beta does inside T cancels against half of what it does to R.

    dstate_kernel  chunks from last to first: dS, Y
    input_kernel   all chunks side by side: dq and dk, summed over the value heads of a key head; dG, beta dbeta

dS lies value channels first, [DV, DK], and dstate_kernel computes the transposes of its products, as state_kernel does.
P is made there, off the chain of dS, rather than read: P^T do would be another tensor of the size of do.

Every transposed product is a product of its own: transposing a result of the matrix units into another product is
miscompiled by Triton before 3.7.1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cortiq_kernels.ops import jit

from .fwd_triton import scores
from .triton_tiles import chunk_at, load_decay, load_gates, load_rows, load_state, state_at, store_rows, store_state


@jit.kernel(do_not_specialize=["n"])
def dstate_kernel(
    q_ptr,  # [N, HK, DK]
    k_ptr,  # [N, HK, DK]
    t_ptr,  # [HV, N, C]
    g_ptr,  # [HV, N] f32
    beta_ptr,  # [HV, N] f32
    do_ptr,  # [N, HV, DV] gradient of o
    cu_ptr,  # [S+1] int32
    offsets_ptr,  # [S+1] int32
    dht_ptr,  # [S, HV, DK, DV] f32, HAS_DHT only
    dh_ptr,  # [cap, HV, DV, DK] out: gradient of the state that leaves each chunk
    y_ptr,  # [HV, N, DV] out: Y
    dh0_ptr,  # [S, HV, DK, DV] f32 out, HAS_DH0 only
    n,
    scale,
    q_stride,
    q_head,
    k_stride,
    k_head,
    do_stride,
    do_head,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KPAD: tl.constexpr,
    BV: tl.constexpr,
    HAS_DHT: tl.constexpr,
    HAS_DH0: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program a sequence, value head and BV value channels, from its last chunk to its first."""
    C: tl.constexpr = 64
    BLOCKS: tl.constexpr = (DV + BV - 1) // BV
    p = tl.program_id(0)
    v0, h, s = (p % BLOCKS) * BV, (p // BLOCKS) % HV, p // (BLOCKS * HV)
    start, end = tl.load(cu_ptr + s).to(tl.int64), tl.load(cu_ptr + s + 1).to(tl.int64)
    first, last = tl.load(offsets_ptr + s), tl.load(offsets_ptr + s + 1)
    wide_h = h.to(tl.int64)
    at_state = (s.to(tl.int64) * HV + h) * DK * DV
    if HAS_DHT:
        dstate = tl.trans(load_state(dht_ptr + at_state, DK, DV, 0, KPAD, v0, BV).to(tl.float32))
    else:
        dstate = tl.zeros([BV, KPAD], tl.float32)
    q_ptr += (h // GROUP).to(tl.int64) * q_head
    k_ptr += (h // GROUP).to(tl.int64) * k_head
    do_ptr += wide_h * do_head + v0
    y_ptr += wide_h * n * DV + v0
    t_ptr += wide_h * n * C
    g_ptr += wide_h * n
    beta_ptr += wide_h * n
    VW: tl.constexpr = DV if BLOCKS == 1 else BV
    dt = k_ptr.dtype.element_ty
    r = tl.arange(0, C)
    for step in tl.range(0, last - first, num_stages=STAGES):
        c = last - 1 - step
        tok = start + (c - first).to(tl.int64) * C
        mask = r < end - tok
        q = load_rows(q_ptr, tok, r, mask, q_stride, DK, KPAD)
        k = load_rows(k_ptr, tok, r, mask, k_stride, DK, KPAD)
        t = load_rows(t_ptr, tok, r, mask, C, C, C)
        do = load_rows(do_ptr, tok, r, mask, do_stride, VW, BV)
        final = tl.minimum(tok + C, end) - 1
        g_last = tl.load(g_ptr + final)
        g, beta = load_gates(g_ptr, beta_ptr, tok, end - tok, g_last)
        low = dstate.to(dt)
        store_state(dh_ptr + (c.to(tl.int64) * HV + h) * DK * DV, low, DV, DK, v0, BV, 0, KPAD)
        local = scores(q, k, g, scale).to(dt)
        dot = tl.trans(do)
        dvn = tl.dot(low, tl.trans(k), input_precision="ieee") * tl.exp2(g_last - g)[None, :]
        dvn = tl.dot(dot, local, dvn, input_precision="ieee")
        y = tl.dot(dvn.to(dt), t, input_precision="ieee")
        store_rows(y_ptr, tl.trans(y.to(dt)), tok, r, mask, DV, VW, BV)
        ga = tl.exp2(g)
        dstate = dstate * tl.exp2(g_last)
        dstate = tl.dot((dot * (ga * scale)[None, :]).to(dt), q, dstate, input_precision="ieee")
        dstate = tl.dot((y * (ga * -beta)[None, :]).to(dt), k, dstate, input_precision="ieee")
    if HAS_DH0:
        store_state(dh0_ptr + at_state, tl.trans(dstate), DK, DV, 0, KPAD, v0, BV)


@triton.jit
def _masked(s, g, seen, factor):
    """s exp2(G_i - G_j) factor where `seen`, else 0."""
    return tl.where(seen, s * tl.exp2(tl.where(seen, g[:, None] - g[None, :], 0.0)) * factor, 0.0)


@jit.kernel(do_not_specialize=["n"])
def input_kernel(
    q_ptr,  # [N, HK, DK]
    k_ptr,  # [N, HK, DK]
    vn_ptr,  # [HV, N, DV]
    g_ptr,  # [HV, N] f32
    beta_ptr,  # [HV, N] f32
    even_ptr,  # [half, HV, DV, DK]
    odd_ptr,  # [half, HV, DV, DK]
    dh_ptr,  # [cap, HV, DV, DK]
    do_ptr,  # [N, HV, DV]
    y_ptr,  # [HV, N, DV]
    table_ptr,  # [cap, 3] int32
    dq_ptr,  # [HK, N, DK] out
    dk_ptr,  # [HK, N, DK] out
    dg_ptr,  # [DK / BK, HV, N] f32 out: dG, each program's part
    dbeta_ptr,  # [HV, N] f32 out: beta dbeta
    n,
    scale,
    q_stride,
    q_head,
    k_stride,
    k_head,
    do_stride,
    do_head,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,  # key channels of a program
    VPAD: tl.constexpr,
):
    """One program a chunk, key head and BK key channels; loops over the head's value heads.

    With half of the key channels a program's tiles leave room for a second one on the SM, which hides its loads; the
    score matrices are made twice for that.
    """
    C: tl.constexpr = 64
    HK: tl.constexpr = HV // GROUP
    BLOCKS: tl.constexpr = (DK + BK - 1) // BK
    p = tl.program_id(0)
    part, hk, i = p % BLOCKS, (p // BLOCKS) % HK, p // (BLOCKS * HK)
    k0 = part * BK
    tok, rows = chunk_at(table_ptr, i)
    if rows == 0:
        return
    r = tl.arange(0, C)
    mask = r < rows
    i_, j_ = r[:, None], r[None, :]
    place = tl.load(table_ptr + 3 * i + 2)
    wide_k = hk.to(tl.int64)
    q = load_rows(q_ptr + wide_k * q_head, tok, r, mask, q_stride, DK, BK, k0)
    k = load_rows(k_ptr + wide_k * k_head, tok, r, mask, k_stride, DK, BK, k0)
    dt = k.dtype
    final = tok + rows - 1
    dq = tl.zeros([C, BK], tl.float32)
    dk = tl.zeros([C, BK], tl.float32)
    for j in tl.range(GROUP, disable_licm=True):  # what it would hoist, it would spill
        h = wide_k * GROUP + j
        at_head = h * n
        heads = at_head * DV
        g = load_decay(g_ptr + at_head, tok, r, mask, final)
        g_last = tl.load(g_ptr + at_head + final)
        beta = tl.load(beta_ptr + at_head + tok + r, mask=mask, other=0)
        do = load_rows(do_ptr + h * do_head, tok, r, mask, do_stride, DV, VPAD)
        vn = load_rows(vn_ptr + heads, tok, r, mask, DV, DV, VPAD)
        y = load_rows(y_ptr + heads, tok, r, mask, DV, DV, VPAD)
        state = load_state(state_at(even_ptr, odd_ptr, place, h, HV, DK * DV), DV, DK, 0, VPAD, k0, BK)
        dstate = load_state(dh_ptr + (i.to(tl.int64) * HV + h) * DK * DV, DV, DK, 0, VPAD, k0, BK)
        inner = tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1), 0)
        # q.  The diagonal of do V'^T, where the decay is 1, is no part of dG: it would drown the rest under strong
        # decay.
        s = tl.dot(do, tl.trans(vn), input_precision="ieee") * scale
        diagonal = tl.sum(tl.where(i_ == j_, s, 0.0), 1)[:, None]
        dp = _masked(s, g, i_ > j_, 1.0).to(dt)
        x = tl.dot(do, state, input_precision="ieee") * (tl.exp2(g) * scale)[:, None]
        x = tl.dot(dp, k, x, input_precision="ieee")
        e = q * x
        dq += x + k * diagonal
        # k as it reads the state
        s = tl.dot(y, tl.trans(vn), input_precision="ieee")
        if part == 0:
            tl.store(dbeta_ptr + at_head + tok + r, tl.sum(tl.where(i_ == j_, s, 0.0), 1), mask=mask)
        z = _masked(s, g, i_ > j_, -1.0).to(dt)
        x = tl.dot(y, state, input_precision="ieee") * -tl.exp2(g)[:, None]
        x = tl.dot(z, k, x, input_precision="ieee") * beta[:, None]
        e += k * x
        dk += x + q * diagonal
        # k as it writes the state: for the chunk's later rows, and for what comes after the chunk
        dpt = _masked(tl.dot(vn, tl.trans(do), input_precision="ieee"), -g, i_ < j_, scale).to(dt)
        x = tl.dot(dpt, q, input_precision="ieee")
        zt = _masked(tl.dot(vn, tl.trans(y), input_precision="ieee"), -g, i_ < j_, -beta[None, :]).to(dt)
        x = tl.dot(zt, k, x, input_precision="ieee")
        e -= k * x
        dk += x
        x = tl.dot(vn, dstate, input_precision="ieee") * tl.exp2(g_last - g)[:, None]
        dk += x
        leave = tl.where(r < rows - 1, tl.sum(k * x, 1), 0.0)  # the last row's would cancel itself
        dg = tl.sum(e, 1) - leave
        dg += tl.where(r == rows - 1, inner * tl.exp2(g_last) + tl.sum(leave), 0.0)
        tl.store(dg_ptr + (part * HV + h) * n + tok + r, dg, mask=mask)
    store_rows(dq_ptr + wide_k * n * DK, dq, tok, r, mask, DK, DK, BK, k0)
    store_rows(dk_ptr + wide_k * n * DK, dk, tok, r, mask, DK, DK, BK, k0)
