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

    local_kernel   all chunks side by side: P^T do, and before it the gated norm's backward, for which o is made again
    dstate_kernel  chunks from last to first: dS, Y
    input_kernel   all chunks side by side: dq and dk of each value head, dG, beta dbeta

Where value heads share a key head, dq and dk are kept in float32 and summed by whoever reads them, in that order.

Every transposed product is a product of its own: transposing a result of the matrix units into another product is
miscompiled by Triton before 3.7.1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cortiq_kernels.ops import jit

from .fwd_triton import scores
from .triton_tiles import chunk_at, load_decay, load_rows, load_state, store_rows, store_state


@triton.jit
def _output(
    q, p, ga, state, vn_ptr, tok, r, mask, v0, DK: tl.constexpr, DV: tl.constexpr, KPAD: tl.constexpr,
    VW: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """o of a chunk, BV value channels from v0, [C, BV]."""
    o = tl.dot(q, load_state(state, DK, DV, 0, KPAD, v0, BV), input_precision="ieee") * ga[:, None]
    return tl.dot(p, load_rows(vn_ptr + v0, tok, r, mask, DV, VW, BV), o, input_precision="ieee")


@triton.jit
def _gate(z_ptr, norm_ptr, dout_ptr, tok, r, mask, z_stride, dout_stride, VW: tl.constexpr, BV: tl.constexpr):
    """z, sigmoid(z), norm_weight [1, BV] and dout."""
    col = tl.arange(0, BV)
    w = tl.load(norm_ptr + col, mask=col < VW, other=0)[None, :]
    z = load_rows(z_ptr, tok, r, mask, z_stride, VW, BV).to(tl.float32)
    dn = load_rows(dout_ptr, tok, r, mask, dout_stride, VW, BV).to(tl.float32)
    return z, tl.sigmoid(z), w, dn


@jit.kernel(do_not_specialize=["n"])
def local_kernel(
    q_ptr,  # [N, HK, DK]
    k_ptr,  # [N, HK, DK]
    vn_ptr,  # [HV, N, DV] V'
    g_ptr,  # [HV, N] f32
    h_ptr,  # [cap, HV, DK, DV], NORM only
    z_ptr,  # [N, HV, DV], NORM only
    norm_ptr,  # [DV] f32, NORM only
    dout_ptr,  # [N, HV, DV]: gradient of o, or with NORM of out
    table_ptr,  # [cap, 2] int32
    do_ptr,  # [HV, N, DV] gradient of o out
    dvl_ptr,  # [HV, N, DV] P^T do out
    dz_ptr,  # [N, HV, DV] out, NORM only
    out_ptr,  # [N, HV, DV] out, WRITE_OUT only: the mixer's output again
    dnorm_ptr,  # [cap, HV, DV] f32 out, NORM only: the chunk's part of dnorm
    n,
    scale,
    eps,
    q_stride,
    q_head,
    k_stride,
    k_head,
    z_stride,
    dout_stride,
    dout_head,
    dz_stride,
    out_stride,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KPAD: tl.constexpr,
    BV: tl.constexpr,  # value channels at a time
    NORM: tl.constexpr,
    WRITE_OUT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program a chunk and value head."""
    C: tl.constexpr = 64
    i, h = tl.program_id(0) // HV, tl.program_id(0) % HV
    tok, rows = chunk_at(table_ptr, i)
    col = tl.arange(0, BV)
    wide_i, wide_h = i.to(tl.int64), h.to(tl.int64)
    if rows == 0:
        if NORM:
            at = dnorm_ptr + (wide_i * HV + h) * DV + col
            for v0 in tl.static_range(0, DV, BV):
                tl.store(at + v0, tl.zeros([BV], tl.float32), mask=col < DV - v0)
        return
    r = tl.arange(0, C)
    mask = r < rows
    heads = wide_h * n * DV
    q = load_rows(q_ptr + (h // GROUP).to(tl.int64) * q_head, tok, r, mask, q_stride, DK, KPAD)
    k = load_rows(k_ptr + (h // GROUP).to(tl.int64) * k_head, tok, r, mask, k_stride, DK, KPAD)
    g = load_decay(g_ptr + wide_h * n, tok, r, mask, tok + rows - 1)
    dt = k.dtype
    dout_ptr += wide_h * dout_head
    VW: tl.constexpr = DV if BV > DV else BV  # BV divides DV or is its padded size
    if NORM:
        # BV value channels at a time, in two passes, the second of which makes o again and reads z and dout again:
        # kept in between they would take the registers of a second program on the SM, and only that hides the loads.
        # Run-time loops, because the compiler would merge the passes of unrolled ones.
        state = h_ptr + (wide_i * HV + h) * DK * DV
        vn_ptr += heads
        z_ptr += h * DV
        ga = tl.exp2(g) * scale
        p = scores(q, k, g, scale, False).to(dt)
        square = tl.zeros([C], tl.float32)
        mean = tl.zeros([C], tl.float32)
        for v0 in tl.range(0, DV, BV, num_stages=STAGES):
            o = _output(q, p, ga, state, vn_ptr, tok, r, mask, v0, DK, DV, KPAD, VW, BV)
            z, sig, w, dn = _gate(
                z_ptr + v0, norm_ptr + v0, dout_ptr + v0, tok, r, mask, z_stride, dout_stride, VW, BV
            )  # fmt: skip
            square += tl.sum(o * o, 1)
            mean += tl.sum(o * (dn * z * sig * w), 1)
        rstd = tl.rsqrt(square / DV + eps)
        mean = (mean * rstd * rstd / DV)[:, None]
        rstd = rstd[:, None]
        pt = scores(q, k, g, scale, True).to(dt)
        for v0 in tl.range(0, DV, BV, num_stages=STAGES):
            o = _output(q, p, ga, state, vn_ptr, tok, r, mask, v0, DK, DV, KPAD, VW, BV)
            z, sig, w, dn = _gate(
                z_ptr + v0, norm_ptr + v0, dout_ptr + v0, tok, r, mask, z_stride, dout_stride, VW, BV
            )  # fmt: skip
            if WRITE_OUT:
                store_rows(out_ptr + h * DV + v0, o * rstd * w * z * sig, tok, r, mask, out_stride, VW, BV)
            dz = dn * o * rstd * w * sig * (1 + z * (1 - sig))
            store_rows(dz_ptr + h * DV + v0, dz, tok, r, mask, dz_stride, VW, BV)
            dn = dn * z * sig
            at = dnorm_ptr + (wide_i * HV + h) * DV + v0 + col
            tl.store(at, tl.sum(dn * o * rstd, 0), mask=col < VW)
            do = ((dn * w - o * mean) * rstd).to(dt)
            store_rows(do_ptr + heads + v0, do, tok, r, mask, DV, VW, BV)
            x = tl.dot(pt, do, input_precision="ieee")
            store_rows(dvl_ptr + heads + v0, x, tok, r, mask, DV, VW, BV)
    else:
        pt = scores(q, k, g, scale, True).to(dt)
        for v0 in tl.range(0, DV, BV, num_stages=STAGES):
            do = load_rows(dout_ptr + v0, tok, r, mask, dout_stride, VW, BV).to(dt)
            store_rows(do_ptr + heads + v0, do, tok, r, mask, DV, VW, BV)
            x = tl.dot(pt, do, input_precision="ieee")
            store_rows(dvl_ptr + heads + v0, x, tok, r, mask, DV, VW, BV)


@jit.kernel(do_not_specialize=["n"])
def dstate_kernel(
    q_ptr,  # [N, HK, DK]
    k_ptr,  # [N, HK, DK]
    t_ptr,  # [HV, N, C]
    g_ptr,  # [HV, N] f32
    beta_ptr,  # [HV, N] f32
    do_ptr,  # [HV, N, DV] gradient of o
    dvl_ptr,  # [HV, N, DV] P^T do
    cu_ptr,  # [S+1] int32
    offsets_ptr,  # [S+1] int32
    dht_ptr,  # [S, HV, DK, DV] f32, HAS_DHT only
    dh_ptr,  # [cap, HV, DK, DV] out: gradient of the state that leaves each chunk
    y_ptr,  # [HV, N, DV] out: Y
    dh0_ptr,  # [S, HV, DK, DV] f32 out, HAS_DH0 only
    n,
    scale,
    q_stride,
    q_head,
    k_stride,
    k_head,
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
        dstate = load_state(dht_ptr + at_state, DK, DV, 0, KPAD, v0, BV).to(tl.float32)
    else:
        dstate = tl.zeros([KPAD, BV], tl.float32)
    q_ptr += (h // GROUP).to(tl.int64) * q_head
    k_ptr += (h // GROUP).to(tl.int64) * k_head
    do_ptr += wide_h * n * DV + v0
    dvl_ptr += wide_h * n * DV + v0
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
        do = load_rows(do_ptr, tok, r, mask, DV, VW, BV)
        dvl = load_rows(dvl_ptr, tok, r, mask, DV, VW, BV)
        final = tl.minimum(tok + C, end) - 1
        g, g_last = load_decay(g_ptr, tok, r, mask, final), tl.load(g_ptr + final)
        beta = tl.load(beta_ptr + tok + r, mask=mask, other=0)
        low = dstate.to(dt)
        store_state(dh_ptr + (c.to(tl.int64) * HV + h) * DK * DV, low, DK, DV, 0, KPAD, v0, BV)
        tail = tl.exp2(g_last - g)
        dvn = tl.dot(k, low, input_precision="ieee") * tail[:, None] + dvl
        y = tl.dot(tl.trans(t), dvn.to(dt), input_precision="ieee")
        store_rows(y_ptr, y, tok, r, mask, DV, VW, BV)
        ga = tl.exp2(g)
        dstate = dstate * tl.exp2(g_last)
        dstate += tl.dot(tl.trans(q), (do * (ga * scale)[:, None]).to(dt), input_precision="ieee")
        dstate -= tl.dot(tl.trans(k), (y * (ga * beta)[:, None]).to(dt), input_precision="ieee")
    if HAS_DH0:
        store_state(dh0_ptr + at_state, dstate, DK, DV, 0, KPAD, v0, BV)


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
    h_ptr,  # [cap, HV, DK, DV]
    dh_ptr,  # [cap, HV, DK, DV]
    do_ptr,  # [HV, N, DV]
    y_ptr,  # [HV, N, DV]
    table_ptr,  # [cap, 2] int32
    dq_ptr,  # [HV, N, DK] out: dq of each value head
    dk_ptr,  # [HV, N, DK] out: dk of each value head
    dg_ptr,  # [HV, N] f32 out: dG
    dbeta_ptr,  # [HV, N] f32 out: beta dbeta
    n,
    scale,
    q_stride,
    q_head,
    k_stride,
    k_head,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,  # key channels at a time
    VPAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program a chunk and value head; loops over key channels."""
    C: tl.constexpr = 64
    KW: tl.constexpr = DK if BK > DK else BK  # BK divides DK or is its padded size
    i, h = tl.program_id(0) // HV, tl.program_id(0) % HV
    tok, rows = chunk_at(table_ptr, i)
    if rows == 0:
        return
    r = tl.arange(0, C)
    mask = r < rows
    i_, j_ = r[:, None], r[None, :]
    wide_h = h.to(tl.int64)
    heads_k = wide_h * n * DK
    q_ptr += (h // GROUP).to(tl.int64) * q_head
    k_ptr += (h // GROUP).to(tl.int64) * k_head
    dt = k_ptr.dtype.element_ty
    heads = wide_h * n * DV
    at = (i.to(tl.int64) * HV + h) * DK * DV
    final = tok + rows - 1
    g = load_decay(g_ptr + wide_h * n, tok, r, mask, final)
    g_last = tl.load(g_ptr + wide_h * n + final)
    beta = tl.load(beta_ptr + wide_h * n + tok + r, mask=mask, other=0)
    vn = load_rows(vn_ptr + heads, tok, r, mask, DV, DV, VPAD)
    y = load_rows(y_ptr + heads, tok, r, mask, DV, DV, VPAD)
    do = load_rows(do_ptr + heads, tok, r, mask, DV, DV, VPAD)
    s = tl.dot(y, tl.trans(vn), input_precision="ieee")
    tl.store(dbeta_ptr + wide_h * n + tok + r, tl.sum(tl.where(i_ == j_, s, 0.0), 1), mask=mask)
    z = _masked(s, g, i_ > j_, -1.0).to(dt)
    zt = _masked(tl.dot(vn, tl.trans(y), input_precision="ieee"), -g, i_ < j_, -beta[None, :]).to(dt)
    # The diagonal of do V'^T, where the decay is 1, is no part of dG: it would drown the rest under strong decay.
    s = tl.dot(do, tl.trans(vn), input_precision="ieee") * scale
    diagonal = tl.sum(tl.where(i_ == j_, s, 0.0), 1)[:, None]
    dp = _masked(s, g, i_ > j_, 1.0).to(dt)
    dpt = _masked(tl.dot(vn, tl.trans(do), input_precision="ieee"), -g, i_ < j_, scale).to(dt)
    ga = tl.exp2(g)[:, None]
    tail = tl.exp2(g_last - g)[:, None]
    dg = tl.zeros([C], tl.float32)
    leave = tl.zeros([C], tl.float32)
    inner = tl.zeros([C], tl.float32)
    for k0 in tl.range(0, DK, BK, num_stages=STAGES):
        k = load_rows(k_ptr + k0, tok, r, mask, k_stride, KW, BK)
        state = load_state(h_ptr + at, DK, DV, k0, BK, 0, VPAD)
        # k as it reads the state
        x = tl.dot(y, tl.trans(state), input_precision="ieee") * -ga
        x = tl.dot(z, k, x, input_precision="ieee") * beta[:, None]
        dg += tl.sum(k * x, 1)
        dk = x
        # q
        x = tl.dot(do, tl.trans(state), input_precision="ieee") * (ga * scale)
        x = tl.dot(dp, k, x, input_precision="ieee")
        q = load_rows(q_ptr + k0, tok, r, mask, q_stride, KW, BK)
        dg += tl.sum(q * x, 1)
        store_rows(dq_ptr + heads_k + k0, x + k * diagonal, tok, r, mask, DK, KW, BK)
        # k as it writes the state: for what comes after the chunk, and for the chunk's later rows
        dstate = load_state(dh_ptr + at, DK, DV, k0, BK, 0, VPAD)
        inner += tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1), 0)
        x = tl.dot(vn, tl.trans(dstate), input_precision="ieee") * tail
        leave += tl.sum(k * x, 1)
        dk += x
        x = tl.dot(dpt, q, input_precision="ieee")
        x = tl.dot(zt, k, x, input_precision="ieee")
        dg -= tl.sum(k * x, 1)
        dk += x + q * diagonal
        store_rows(dk_ptr + heads_k + k0, dk, tok, r, mask, DK, KW, BK)
    leave = tl.where(r < rows - 1, leave, 0.0)  # the last row's would cancel itself
    dg += tl.where(r == rows - 1, inner * tl.exp2(g_last) + tl.sum(leave), -leave)
    tl.store(dg_ptr + wide_h * n + tok + r, dg, mask=mask)
