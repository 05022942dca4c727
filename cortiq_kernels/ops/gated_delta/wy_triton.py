"""Gates, decay sums and the chunk inverse on Triton: what the gated delta rule needs of g, beta and k alone.

For a chunk of one sequence and a value head, with G the inclusive sum of g within the chunk:

    L_ij = beta_i exp(G_i - G_j) k_i.k_j   (i > j, else 0)          T = (I + L)^-1

T carries the decay (no exp(-G) is ever formed) and turns beta (v - exp(G) k S) into the corrections V' that are written
to the state.  Its elements are products of decays and projections, at most about 1 for normalised keys and beta <= 1.

The inverse is exact block elimination in float32, never a power series, whose terms cancel badly for alike keys: 16x16
diagonal blocks by doubling from 1x1 (T <- T - T L_off T), then the blocks below them row by row.  k.k is shared by the
value heads of a key head.

The gates of the mixer are computed here too: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b).
"""

from __future__ import annotations

import triton
import triton.language as tl

from cortiq_kernels.ops import jit

from .triton_tiles import LOG2E, chunk_at


@triton.jit
def softplus(x):
    """log(1 + exp(x)) to about 3e-6 of itself: a series where the sum would lose exp(x), x where exp overflows."""
    e = tl.exp(tl.minimum(x, 20.0))
    return tl.where(x > 20, x, tl.where(x < -4, e * (1 - e * (0.5 - e / 3)), tl.log(1 + e)))


@triton.jit
def beta_of(b):
    """sigmoid(b) in float32."""
    return 1 / (1 + tl.exp(-b.to(tl.float32)))


@triton.jit
def _high(x):
    """What TF32 keeps of x, cut off."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _mm(a, b):
    """float32 product of 16x16 blocks to about float32 accuracy, in three TF32 products.

    By hand: `input_precision="tf32x3"` spends a quarter of this kernel's instructions on infinities.
    """
    a_high, b_high = _high(a), _high(b)
    x = tl.dot(a - a_high, b_high, input_precision="tf32")
    x = tl.dot(a_high, b - b_high, x, input_precision="tf32")
    return tl.dot(a_high, b_high, x, input_precision="tf32")


@triton.jit
def _unit_lower_inverse(x):
    """(I + x)^-1 of strictly lower x [16, 16]."""
    r = tl.arange(0, 16)[:, None]
    c = tl.arange(0, 16)[None, :]
    # pairs of rows: [[1, 0], [x, 1]]^-1
    t = tl.where(r == c, 1.0, 0.0) - tl.where(((r // 2) == (c // 2)) & (r > c), x, 0.0)
    for level in tl.static_range(1, 4):
        b = 1 << level
        off = tl.where(((r // (2 * b)) == (c // (2 * b))) & ((r // b) > (c // b)), x, 0.0)
        t = t - _mm(t, _mm(off, t))
    return t


@triton.jit
def _block(kk, bi, gi, gj, DIAGONAL: tl.constexpr):
    """beta_i exp2(G_i - G_j) k_i.k_j of a 16x16 block, strictly lower on the diagonal."""
    d = gi[:, None] - gj[None, :]
    if DIAGONAL:
        below = tl.arange(0, 16)[:, None] > tl.arange(0, 16)[None, :]
        return tl.where(below, kk * bi[:, None] * tl.exp2(tl.where(below, d, 0.0)), 0.0)
    return kk * bi[:, None] * tl.exp2(d)


@triton.jit
def _keys(k_ptr, tok, r, rows, stride, d: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr):
    """Rows r of the chunk's keys, BK channels from d, [16, BK]."""
    col = d + tl.arange(0, BK)
    at = k_ptr + (tok + r)[:, None] * stride + col[None, :]
    return tl.load(at, mask=(r < rows)[:, None] & (col < DK)[None, :], other=0)


@triton.jit
def _store_block(ptr, x, row0, col0, rows, C: tl.constexpr):
    r = row0 + tl.arange(0, 16)
    at = ptr + r[:, None] * C + (col0 + tl.arange(0, 16))[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=(r < rows)[:, None])


@triton.jit
def _gate_piece(
    a_ptr, b_ptr, g_ptr, beta_ptr, tok, row0, rows, stride, neg_a, dt, base, RAW: tl.constexpr, TINY: tl.constexpr
):
    """(G, beta) of rows row0 .. row0+15, written to g_ptr and beta_ptr; G continues from `base`."""
    r = row0 + tl.arange(0, 16)
    mask = r < rows
    at = (tok + r) * stride
    a = tl.load(a_ptr + at, mask=mask, other=0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=mask, other=0).to(tl.float32)
    if RAW:
        a = neg_a * softplus(a + dt)
        b = tl.where(mask, beta_of(b), 0.0)
    else:
        b = tl.where(tl.abs(b) < TINY, TINY, b)  # a dbeta of beta 0 is then still V' / beta
    a = tl.where(mask, a * LOG2E, 0.0)
    g = base + tl.cumsum(a, 0)
    tl.store(g_ptr + tok + r, g, mask=mask)
    tl.store(beta_ptr + tok + r, b, mask=mask)
    return g, b, base + tl.sum(a, 0)


@jit.kernel(do_not_specialize=["n"])
def wy_kernel(
    k_ptr,  # [N, HK, DK]
    a_ptr,  # [N, HV] g, or with RAW a; row stride ab_stride
    b_ptr,  # [N, HV] beta, or with RAW b
    a_log_ptr,  # [HV] f32, RAW only
    dt_ptr,  # [HV] f32, RAW only
    table_ptr,  # [cap, 3] int32
    t_ptr,  # [HV, N, C] out
    g_ptr,  # [HV, N] f32 out
    beta_ptr,  # [HV, N] f32 out
    n,
    k_stride,
    k_head,
    ab_stride,
    HK: tl.constexpr,
    GROUP: tl.constexpr,  # value heads a key head
    DK: tl.constexpr,
    KPAD: tl.constexpr,
    BK: tl.constexpr,
    RAW: tl.constexpr,
    TINY: tl.constexpr,  # least |beta|, RAW excepted
):
    """One program a chunk and key head: T, G and beta of its GROUP value heads."""
    C: tl.constexpr = 64
    i, hk = tl.program_id(0) // HK, tl.program_id(0) % HK
    tok, rows = chunk_at(table_ptr, i)
    if rows == 0:
        return
    r = tl.arange(0, 16)
    k_ptr += hk.to(tl.int64) * k_head
    kk00 = tl.zeros([16, 16], tl.float32)
    kk10, kk11, kk20, kk21, kk22, kk30, kk31, kk32, kk33 = kk00, kk00, kk00, kk00, kk00, kk00, kk00, kk00, kk00
    for d in tl.static_range(0, KPAD, BK):  # few channels at a time: one warp holds all of this
        k0 = _keys(k_ptr, tok, r, rows, k_stride, d, DK, BK)
        k1 = _keys(k_ptr, tok, r + 16, rows, k_stride, d, DK, BK)
        k2 = _keys(k_ptr, tok, r + 32, rows, k_stride, d, DK, BK)
        k3 = _keys(k_ptr, tok, r + 48, rows, k_stride, d, DK, BK)
        kk00 += tl.dot(k0, tl.trans(k0), input_precision="ieee")
        kk10 += tl.dot(k1, tl.trans(k0), input_precision="ieee")
        kk11 += tl.dot(k1, tl.trans(k1), input_precision="ieee")
        kk20 += tl.dot(k2, tl.trans(k0), input_precision="ieee")
        kk21 += tl.dot(k2, tl.trans(k1), input_precision="ieee")
        kk22 += tl.dot(k2, tl.trans(k2), input_precision="ieee")
        kk30 += tl.dot(k3, tl.trans(k0), input_precision="ieee")
        kk31 += tl.dot(k3, tl.trans(k1), input_precision="ieee")
        kk32 += tl.dot(k3, tl.trans(k2), input_precision="ieee")
        kk33 += tl.dot(k3, tl.trans(k3), input_precision="ieee")
    for j in range(GROUP):
        h = hk * GROUP + j
        out = t_ptr + (h.to(tl.int64) * n + tok) * C
        g_out, beta_out = g_ptr + h.to(tl.int64) * n, beta_ptr + h.to(tl.int64) * n
        neg_a, dt = 0.0, 0.0
        if RAW:
            neg_a, dt = -tl.exp(tl.load(a_log_ptr + h)), tl.load(dt_ptr + h)
        a_at, b_at = a_ptr + h, b_ptr + h
        g0, b0, s = _gate_piece(a_at, b_at, g_out, beta_out, tok, 0, rows, ab_stride, neg_a, dt, 0.0, RAW, TINY)
        g1, b1, s = _gate_piece(a_at, b_at, g_out, beta_out, tok, 16, rows, ab_stride, neg_a, dt, s, RAW, TINY)
        g2, b2, s = _gate_piece(a_at, b_at, g_out, beta_out, tok, 32, rows, ab_stride, neg_a, dt, s, RAW, TINY)
        g3, b3, s = _gate_piece(a_at, b_at, g_out, beta_out, tok, 48, rows, ab_stride, neg_a, dt, s, RAW, TINY)
        t0 = _unit_lower_inverse(_block(kk00, b0, g0, g0, True))
        t1 = _unit_lower_inverse(_block(kk11, b1, g1, g1, True))
        t2 = _unit_lower_inverse(_block(kk22, b2, g2, g2, True))
        t3 = _unit_lower_inverse(_block(kk33, b3, g3, g3, True))
        l10 = _block(kk10, b1, g1, g0, False)
        l20, l21 = _block(kk20, b2, g2, g0, False), _block(kk21, b2, g2, g1, False)
        l30, l31 = _block(kk30, b3, g3, g0, False), _block(kk31, b3, g3, g1, False)
        l32 = _block(kk32, b3, g3, g2, False)
        t10 = -_mm(t1, _mm(l10, t0))
        t21 = -_mm(t2, _mm(l21, t1))
        t32 = -_mm(t3, _mm(l32, t2))
        t20 = -_mm(t2, _mm(l20, t0) + _mm(l21, t10))
        t31 = -_mm(t3, _mm(l31, t1) + _mm(l32, t21))
        t30 = -_mm(t3, _mm(l30, t0) + _mm(l31, t10) + _mm(l32, t20))
        zero = tl.zeros([16, 16], tl.float32)
        _store_block(out, t0, 0, 0, rows, C)
        _store_block(out, zero, 0, 16, rows, C)
        _store_block(out, zero, 0, 32, rows, C)
        _store_block(out, zero, 0, 48, rows, C)
        _store_block(out, t10, 16, 0, rows, C)
        _store_block(out, t1, 16, 16, rows, C)
        _store_block(out, zero, 16, 32, rows, C)
        _store_block(out, zero, 16, 48, rows, C)
        _store_block(out, t20, 32, 0, rows, C)
        _store_block(out, t21, 32, 16, rows, C)
        _store_block(out, t2, 32, 32, rows, C)
        _store_block(out, zero, 32, 48, rows, C)
        _store_block(out, t30, 48, 0, rows, C)
        _store_block(out, t31, 48, 16, rows, C)
        _store_block(out, t32, 48, 32, rows, C)
        _store_block(out, t3, 48, 48, rows, C)
