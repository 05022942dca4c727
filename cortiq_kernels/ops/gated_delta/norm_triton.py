"""Backward of the mixer's gated norm on Triton.

With o as the forward kept it, u = o rstd and dn = dout (mixer.py):

    dz = dn u w SiLU'(z)       dnorm = sum dn SiLU(z) u       du = dn SiLU(z) w       do = rstd (du - u mean(u du))

and the two things that the forward made and did not keep: out (WRITE_OUT) and beta = sigmoid(b).
"""

from __future__ import annotations

import triton.language as tl

from cortiq_kernels.ops import jit

from .triton_tiles import gated, load_rows, sigmoid, store_rows
from .wy_triton import beta_of


@jit.kernel(do_not_specialize=["n"])
def gated_norm_bwd_kernel(
    o_ptr,  # [HV, N, DV]
    rstd_ptr,  # [HV, N] f32
    z_ptr,  # [N, HV, DV], row stride z_stride
    b_ptr,  # [N, HV], row stride ab_stride
    norm_ptr,  # [DV] f32
    dout_ptr,  # [N, HV, DV], row stride dout_stride
    do_ptr,  # [HV, N, DV] out
    dz_ptr,  # [N, HV, DV] out, row stride dz_stride
    out_ptr,  # [N, HV, DV] out, WRITE_OUT only; row stride out_stride
    beta_ptr,  # [HV, N] f32 out
    dnorm_ptr,  # [N / ROWS, HV, DV] f32 out: the rows' part of dnorm
    n,
    z_stride,
    ab_stride,
    dout_stride,
    dz_stride,
    out_stride,
    HV: tl.constexpr,
    DV: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
    WRITE_OUT: tl.constexpr,
):
    """One program ROWS tokens and a value head."""
    part, h = tl.program_id(0) // HV, tl.program_id(0) % HV
    tok = part.to(tl.int64) * ROWS
    r = tl.arange(0, ROWS)
    mask = r < n - tok
    wide_h = h.to(tl.int64)
    at = wide_h * n + tok + r
    o = load_rows(o_ptr + wide_h * n * DV, tok, r, mask, DV, DV, PAD)
    z = load_rows(z_ptr + h * DV, tok, r, mask, z_stride, DV, PAD)
    dn = load_rows(dout_ptr + h * DV, tok, r, mask, dout_stride, DV, PAD)
    rstd = tl.load(rstd_ptr + at, mask=mask, other=0)[:, None]
    tl.store(beta_ptr + at, beta_of(tl.load(b_ptr + (tok + r) * ab_stride + h, mask=mask, other=0)), mask=mask)
    col = tl.arange(0, PAD)
    w = tl.load(norm_ptr + col, mask=col < DV, other=0)[None, :]
    u, z, dn = o.to(tl.float32) * rstd, z.to(tl.float32), dn.to(tl.float32)
    sig = sigmoid(z)
    if WRITE_OUT:
        store_rows(out_ptr + h * DV, gated(u, z, sig, w), tok, r, mask, out_stride, DV, PAD)
    silu = z * sig
    store_rows(dz_ptr + h * DV, dn * u * w * (sig + silu * (1 - sig)), tok, r, mask, dz_stride, DV, PAD)
    dn = dn * silu
    tl.store(dnorm_ptr + (part.to(tl.int64) * HV + h) * DV + col, tl.sum(dn * u, 0), mask=col < DV)
    du = dn * w
    mean = tl.sum(u * du, 1)[:, None] / DV
    store_rows(do_ptr + wide_h * n * DV, (du - u * mean) * rstd, tok, r, mask, DV, DV, PAD)
