"""Backward of the decay sums, and of the mixer's gates, on Triton.

dg_i = sum of dG from row i to the chunk's end            (G is an inclusive sum within the chunk)
da = -dg exp(A_log) sigmoid(a + dt_bias)       db = dbeta beta (1 - beta)
dA_log = sum dg g       ddt_bias = sum da                  g = -exp(A_log) softplus(a + dt_bias)
"""

from __future__ import annotations

import triton.language as tl

from cortiq_kernels.ops import jit

from .triton_tiles import chunk_at
from .wy_triton import softplus


@jit.kernel(do_not_specialize=["n"])
def gates_bwd_kernel(
    dgs_ptr,  # [PARTS, HV, N] f32 parts of dG
    dbeta_ptr,  # [HV, N] f32 beta dbeta
    a_ptr,  # [N, HV] a, RAW only; row stride ab_stride
    beta_ptr,  # [HV, N] f32
    a_log_ptr,  # [HV] f32, RAW only
    dt_ptr,  # [HV] f32, RAW only
    table_ptr,  # [cap, 3] int32
    da_ptr,  # [N, HV] out: da, or without RAW dg; row stride da_stride
    db_ptr,  # [N, HV] out: db, or without RAW dbeta
    part_ptr,  # [cap, 2, HV] f32 out, RAW only: the chunk's part of dA_log and ddt_bias
    n,
    ab_stride,
    da_stride,
    HV: tl.constexpr,
    PAD: tl.constexpr,  # HV padded
    RAW: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program a chunk, all heads."""
    C: tl.constexpr = 64
    i = tl.program_id(0)
    tok, rows = chunk_at(table_ptr, i)
    h = tl.arange(0, PAD)
    heads = h < HV
    part = part_ptr + i.to(tl.int64) * 2 * HV + h
    if rows == 0:
        if RAW:
            tl.store(part, tl.zeros([PAD], tl.float32), mask=heads)
            tl.store(part + HV, tl.zeros([PAD], tl.float32), mask=heads)
        return
    r = tl.arange(0, C)
    row = tok + r
    mask = heads[:, None] & (r < rows)[None, :]
    at = h.to(tl.int64)[:, None] * n + row[None, :]
    dgs = tl.load(dgs_ptr + at, mask=mask, other=0)
    for j in tl.static_range(1, PARTS):
        dgs += tl.load(dgs_ptr + at + j * HV * n.to(tl.int64), mask=mask, other=0)
    dbeta = tl.load(dbeta_ptr + at, mask=mask, other=0)
    beta = tl.load(beta_ptr + at, mask=mask, other=1)
    dg = tl.cumsum(dgs, 1, reverse=True)
    if RAW:
        tokens = row[None, :] * ab_stride + h[:, None]
        a = tl.load(a_ptr + tokens, mask=mask, other=0).to(tl.float32)
        a_log = tl.load(a_log_ptr + h, mask=heads, other=0)
        dt = tl.load(dt_ptr + h, mask=heads, other=0)
        x = a + dt[:, None]
        neg_a = -tl.exp(a_log)[:, None]
        tl.store(part, tl.sum(tl.where(mask, dg * neg_a * softplus(x), 0.0), 1), mask=heads)
        dg = tl.where(mask, dg * neg_a * tl.sigmoid(x), 0.0)
        tl.store(part + HV, tl.sum(dg, 1), mask=heads)
        dbeta = dbeta * (1 - beta)
    else:
        dbeta = dbeta / beta
    out = row[None, :] * da_stride + h[:, None]
    tl.store(da_ptr + out, dg.to(da_ptr.dtype.element_ty), mask=mask)
    tl.store(db_ptr + out, dbeta.to(db_ptr.dtype.element_ty), mask=mask)
