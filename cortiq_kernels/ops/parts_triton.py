"""The sum of parts: what many programs hold of one small gradient, [P, ..] -> [..] `=` or `+=`, as one Triton kernel.

Kernels that see a weight's gradient a few rows at a time leave a part a program instead of adding by atomics. The
parts of a column are summed PARTS at a time and in a fixed order, so the same inputs give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cortiq_kernels.ops import jit
from cortiq_kernels.ops.triton_gate import launching_on

COLS = 16  # 64 bytes of a row
WIDE = 2048  # columns from which on there are programs enough, and each takes few parts at a time


@jit.kernel
def parts_kernel(
    part_ptr,  # [P, width] f32
    out_ptr,  # [width] f32
    parts,
    width,
    stride,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    COLS: tl.constexpr,
):
    """COLS columns a program."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([PARTS, COLS], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & (cols < width)[None, :]
        total += tl.load(part_ptr + part[:, None] * stride + cols[None, :], mask=inside, other=0.0)
    out = tl.sum(total, 0)
    if ADD:
        out += tl.load(out_ptr + cols, mask=cols < width, other=0.0)
    tl.store(out_ptr + cols, out, mask=cols < width)


def shape_of(parts: int, width: int) -> dict[str, int]:
    """The tile of a program, and its warps."""
    most, warps = (64, 4) if width >= WIDE else (512, 8)
    return {"PARTS": min(most, max(16, triton.next_power_of_2(parts))), "COLS": COLS, "num_warps": warps}


def sum_parts(parts: Tensor, out: Tensor, accumulate: bool) -> None:
    """out [..] f32 `=`, or `+=` with `accumulate`, parts [P, ..] f32 summed over P. The parts of one program lie in one
    piece; `out` does too, or takes torch."""
    if parts.numel() == 0 or not out.is_contiguous():
        total = parts.sum(0)
        out.add_(total) if accumulate else out.copy_(total)
        return
    flat = parts.flatten(1)
    shape = shape_of(*flat.shape)
    with launching_on(out):
        parts_kernel[(triton.cdiv(out.numel(), COLS),)](
            flat, out, flat.shape[0], out.numel(), flat.stride(0), ADD=accumulate, **shape
        )
