"""What the softmax attention kernels share: how a block of a sequence is found, and how its tiles are loaded.

A tile has one row a token and head: PACK query heads of one key head lie side by side, row r is token r // PACK and
head r % PACK. With a key block of COLS the heads of a group then share its loads, and a block covers fewer tokens, of
which fewer wait masked behind the diagonal. Keys and values are tiles of PACK 1. `blocks.py` lists the blocks: none is
shared by two sequences, and loops begin at a sequence's own start, so that what a sequence is packed with changes no
bit of it. Rows past a block's end are read as 0. Offsets within a tile are 32-bit, from a 64-bit scalar.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def block_at(blocks_ptr, i):
    """(first token, its place in its sequence, rows, the sequence's length) of block i; rows is 0 past the last."""
    at = blocks_ptr + 4 * i
    return tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def load_heads(ptr, tok, t, g, mask, stride, head, HD: tl.constexpr, PAD: tl.constexpr):
    """Rows tok + t (tok int64, t [R]), heads g [R] that lie `head` columns apart: [R, PAD]; 0 where masked."""
    col = tl.arange(0, PAD)
    at = ptr + tok * stride + ((t * stride + g * head)[:, None] + col[None, :])
    if PAD == HD:
        return tl.load(at, mask=mask[:, None], other=0)
    return tl.load(at, mask=mask[:, None] & (col < HD)[None, :], other=0)


@triton.jit
def store_heads(ptr, x, tok, t, g, mask, stride, head, HD: tl.constexpr, PAD: tl.constexpr):
    """The inverse of `load_heads`, rounded to the pointer's dtype."""
    col = tl.arange(0, PAD)
    at = ptr + tok * stride + ((t * stride + g * head)[:, None] + col[None, :])
    x = x.to(ptr.dtype.element_ty)
    if PAD == HD:
        tl.store(at, x, mask=mask[:, None])
    else:
        tl.store(at, x, mask=mask[:, None] & (col < HD)[None, :])
