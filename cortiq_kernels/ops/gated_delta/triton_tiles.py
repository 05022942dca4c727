"""What the Triton kernels of this folder share: how a chunk is found, and how its tiles are loaded.

A chunk is CHUNK consecutive tokens of one sequence (fewer at its end); `chunks.py` lists them.  Sequences never share a
chunk, so a sequence's numbers do not depend on what it is packed with, bit for bit.  Rows past a chunk's end are read
as 0: k = v = 0 neither read nor write the state, and a decay sum of 0 keeps every exponent at or below 0.

Decay sums G are within a chunk, inclusive, float32, and in units of log 2 (exp2 is the instruction).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def chunk_at(table_ptr, i):
    """(first token as int64, rows) of chunk i; rows is 0 past the last one."""
    start = tl.load(table_ptr + 2 * i).to(tl.int64)
    return start, tl.load(table_ptr + 2 * i + 1)


@triton.jit
def load_rows(ptr, tok, r, mask, stride, D: tl.constexpr, PAD: tl.constexpr):
    """Rows tok + r (tok int64, r [R] int32) of a matrix with unit column stride, [R, PAD].

    0 where masked, and from column D on where D < PAD.

    Offsets from the first row are 32-bit: 64-bit ones of every tile at once cost more registers than the tiles.
    """
    col = tl.arange(0, PAD)
    at = ptr + tok * stride + (r[:, None] * stride + col[None, :])
    if D >= PAD:
        return tl.load(at, mask=mask[:, None], other=0)
    return tl.load(at, mask=mask[:, None] & (col < D)[None, :], other=0)


@triton.jit
def load_decay(ptr, tok, r, mask, final):
    """Decay sums of a chunk's rows; past its end the last one, `final`, so that no exponent G_i - G_j grows there."""
    return tl.where(mask, tl.load(ptr + tok + r, mask=mask, other=0), tl.load(ptr + final))


@triton.jit
def store_rows(ptr, x, tok, r, mask, stride, D: tl.constexpr, PAD: tl.constexpr):
    """The inverse of `load_rows`, rounded to the pointer's dtype."""
    col = tl.arange(0, PAD)
    at = ptr + tok * stride + (r[:, None] * stride + col[None, :])
    x = x.to(ptr.dtype.element_ty)
    if D >= PAD:
        tl.store(at, x, mask=mask[:, None])
    else:
        tl.store(at, x, mask=mask[:, None] & (col < D)[None, :])


@triton.jit
def load_state(ptr, DK: tl.constexpr, DV: tl.constexpr, k0, KPAD: tl.constexpr, v0, VPAD: tl.constexpr):
    """Block [KPAD, VPAD] at (k0, v0) of a contiguous [DK, DV] state; 0 outside."""
    k, v = k0 + tl.arange(0, KPAD), v0 + tl.arange(0, VPAD)
    at = ptr + k[:, None] * DV + v[None, :]
    return tl.load(at, mask=(k < DK)[:, None] & (v < DV)[None, :], other=0)


@triton.jit
def store_state(ptr, x, DK: tl.constexpr, DV: tl.constexpr, k0, KPAD: tl.constexpr, v0, VPAD: tl.constexpr):
    """The inverse of `load_state`, rounded to the pointer's dtype."""
    k, v = k0 + tl.arange(0, KPAD), v0 + tl.arange(0, VPAD)
    at = ptr + k[:, None] * DV + v[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=(k < DK)[:, None] & (v < DV)[None, :])
