"""How tokens are laid out: the columns of a projection row, and the grid of chunks.

A row of the fused projection is  q (nk*dk) | k (nk*dk) | v (nv*dv) | z (nv*dv) | a (nv) | b (nv).

The chunked form works on the grid [NC, B, H, C, D]: token (b, t) of head h sits at chunk t // C, row t % C.  Chunks
come first so that the one sequential loop, over NC, slices contiguous blocks of all batch rows and heads.  A length
that is no multiple of C is padded with zeros: k = v = 0 makes a padded token neither read nor write the state.

Packed sequences need only `positions` (0 at a sequence start), p below.  In a chunk with rows i, j in [0, C):

    pair_ij = j <= i and i - j <= p_i     j is seen by i: not later, and of the same sequence
    enter_i = p_i > i                     i continues the sequence of the token before the chunk
    leave_i = C-1-i <= p_{C-1}            i is of the same sequence as the chunk's last token
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens a chunk
CHUNK_CPU = 32  # 10 to 30 % faster there than 64 (dk = dv = 32 to 64): no launches to save, fewer operations a token
MAX_HEAD = 128  # largest head of the Triton kernels: a program's tiles fill its shared memory
MAX_TAPS = 4  # most taps of their convolution, whose last rows lie in registers
L2_EPS = 1e-6  # inside the root of the q and k norm


class GdnDims(NamedTuple):
    """Geometry of one gated delta net layer."""

    nk: int  # key heads
    nv: int  # value heads, a multiple of nk
    dk: int
    dv: int
    conv: int  # taps of the causal convolution

    @property
    def conv_width(self) -> int:
        """Channels of the convolution, q | k | v."""
        return 2 * self.nk * self.dk + self.nv * self.dv

    @property
    def width(self) -> int:
        """Columns of the fused projection."""
        return self.conv_width + self.nv * self.dv + 2 * self.nv

    @property
    def out_width(self) -> int:
        """Columns of the mixer's output."""
        return self.nv * self.dv

    @property
    def qkv(self) -> slice:
        """Columns of q | k | v, the input of the convolution."""
        return slice(0, self.conv_width)

    @property
    def z(self) -> slice:
        """Columns of the output gate."""
        return slice(self.conv_width, self.conv_width + self.nv * self.dv)

    @property
    def ab(self) -> slice:
        """Columns of a (decay) | b (beta)."""
        return slice(self.conv_width + self.nv * self.dv, self.width)


class Masks(NamedTuple):
    """Who sees whom in a chunk; None in `enter` and `leave` means all do."""

    pair: Tensor  # [NC, B, 1, C, C] or [C, C] bool
    enter: Tensor | None  # [NC, B, 1, C] bool
    leave: Tensor | None  # [NC, B, 1, C] bool


def unfit_for_kernels(dtype: torch.dtype, dk: int, dv: int, conv: int = 1, *, gpu: bool = True) -> str:
    """Why the Triton kernels do not take heads of these sizes, or a convolution of `conv` taps; "" when they do.

    `gpu` False: for Triton's interpreter.
    """
    if gpu and dtype == torch.float32:
        return "float32: its products would run without matrix units; the kernels take bfloat16 and float16"
    if max(dk, dv) > MAX_HEAD:
        return f"head sizes {dk} and {dv}; the kernels take up to {MAX_HEAD}"
    return f"a convolution of {conv} taps; the kernels take up to {MAX_TAPS}" if conv > MAX_TAPS else ""


def chunk_size(length: int, device: torch.device) -> int:
    """Tokens a chunk for rows of `length` tokens; the next power of two (at least 16) for rows shorter than a chunk."""
    size, most = 16, CHUNK_CPU if device.type == "cpu" else CHUNK
    while size < min(length, most):
        size *= 2
    return size


def unit_stride(x: Tensor) -> Tensor:
    """x, or a contiguous copy where its last dimension is strided: kernels read rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


def to_chunks(x: Tensor, c: int) -> Tensor:
    """[B, T, H, D] -> the grid view [NC, B, H, C, D]; a copy only where T has to be padded with zeros."""
    tail = -x.shape[1] % c
    if tail:
        x = F.pad(x, (0, 0, 0, 0, 0, tail))
    return x.unflatten(1, (x.shape[1] // c, c)).permute(1, 0, 3, 2, 4)


def from_chunks(x: Tensor, length: int) -> Tensor:
    """[NC, B, H, C, D] -> [B, T, H, D], the padding dropped; shares memory if NC is 1."""
    return x.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]


def causal_masks(c: int, device: torch.device) -> Masks:
    """Masks of rows that hold one sequence each."""
    return Masks(torch.ones(c, c, dtype=torch.bool, device=device).tril_(), None, None)


def packed_masks(positions: Tensor, c: int) -> Masks:
    """Masks of rows that hold packed sequences.  positions: [B, T] int64; no host synchronisation."""
    positions = F.pad(positions, (0, -positions.shape[1] % c))
    pos = positions.unflatten(1, (positions.shape[1] // c, c)).transpose(0, 1).unsqueeze(2)  # [NC, B, 1, C]
    row = torch.arange(c, device=positions.device)
    lag = row[:, None] - row
    pair = (lag >= 0) & (lag <= pos.unsqueeze(-1))
    return Masks(pair, pos > row, pos[..., -1:] >= c - 1 - row)
