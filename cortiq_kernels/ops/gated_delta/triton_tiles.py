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
    start = tl.load(table_ptr + 3 * i).to(tl.int64)
    return start, tl.load(table_ptr + 3 * i + 1)


@triton.jit
def load_rows(ptr, tok, r, mask, stride, D: tl.constexpr, PAD: tl.constexpr, c0=0):
    """Rows tok + r (tok int64, r [R] int32) of a matrix with unit column stride, PAD columns from c0, [R, PAD].

    0 where masked, and from column D on; c0 is a multiple of PAD.

    Offsets from the first row are 32-bit: 64-bit ones of every tile at once cost more registers than the tiles.
    """
    col = c0 + tl.arange(0, PAD)
    at = ptr + tok * stride + (r[:, None] * stride + col[None, :])
    if D % PAD == 0:
        return tl.load(at, mask=mask[:, None], other=0)
    return tl.load(at, mask=mask[:, None] & (col < D)[None, :], other=0)


@triton.jit
def load_decay(ptr, tok, r, mask, final):
    """Decay sums of a chunk's rows; past its end the last one, `final`, so that no exponent G_i - G_j grows there."""
    return tl.where(mask, tl.load(ptr + tok + r, mask=mask, other=0), tl.load(ptr + final))


@triton.jit
def load_gates(g_ptr, beta_ptr, tok, rows, g_last):
    """Decay sums (past the chunk's end `g_last`) and betas (0 there) of a chunk, [64] each.

    As one load of 128, because the compiler hands a shorter one to every thread that uses it, element by element.
    """
    e = tl.arange(0, 128)
    r = e % 64
    x = tl.load(tl.where(e < 64, g_ptr + tok + r, beta_ptr + tok + r), mask=r < rows, other=0)
    x = tl.where((e < 64) & (r >= rows), g_last, x)
    return tl.split(tl.trans(tl.reshape(x, [2, 64])))


@triton.jit
def store_rows(ptr, x, tok, r, mask, stride, D: tl.constexpr, PAD: tl.constexpr, c0=0):
    """The inverse of `load_rows`, rounded to the pointer's dtype."""
    col = c0 + tl.arange(0, PAD)
    at = ptr + tok * stride + (r[:, None] * stride + col[None, :])
    x = x.to(ptr.dtype.element_ty)
    if D % PAD == 0:
        tl.store(at, x, mask=mask[:, None])
    else:
        tl.store(at, x, mask=mask[:, None] & (col < D)[None, :])


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) as the square of a root: two instructions of the special function unit and no division."""
    root = tl.rsqrt(1 + tl.exp2(x * -LOG2E))
    return root * root


@triton.jit
def gated(u, z, sig, w):
    """The gated norm's output, from u the normalised o, z, sig its sigmoid and the norm's weight w; all float32."""
    return u * w * (z * sig)


@triton.jit
def state_at(even_ptr, odd_ptr, place, h, HV: tl.constexpr, SIZE: tl.constexpr):
    """Where the entering state of a chunk and of value head h lies; `place` is of the chunks' table."""
    base = odd_ptr if place % 2 else even_ptr
    return base + ((place // 2).to(tl.int64) * HV + h) * SIZE


@triton.jit
def load_state(ptr, R: tl.constexpr, C: tl.constexpr, r0, RPAD: tl.constexpr, c0, CPAD: tl.constexpr):
    """Block [RPAD, CPAD] at (r0, c0) of a contiguous [R, C] state, 0 outside; multiples of RPAD and CPAD."""
    r, c = r0 + tl.arange(0, RPAD), c0 + tl.arange(0, CPAD)
    at = ptr + r[:, None] * C + c[None, :]
    if R % RPAD == 0 and C % CPAD == 0:
        return tl.load(at)
    return tl.load(at, mask=(r < R)[:, None] & (c < C)[None, :], other=0)


@triton.jit
def store_state(ptr, x, R: tl.constexpr, C: tl.constexpr, r0, RPAD: tl.constexpr, c0, CPAD: tl.constexpr):
    """The inverse of `load_state`, rounded to the pointer's dtype."""
    r, c = r0 + tl.arange(0, RPAD), c0 + tl.arange(0, CPAD)
    at = ptr + r[:, None] * C + c[None, :]
    if R % RPAD == 0 and C % CPAD == 0:
        tl.store(at, x.to(ptr.dtype.element_ty))
    else:
        tl.store(at, x.to(ptr.dtype.element_ty), mask=(r < R)[:, None] & (c < C)[None, :])
