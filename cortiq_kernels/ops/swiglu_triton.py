"""The Triton kernels of `swiglu.py`: one pass over memory forward, one backward, and the sums over rows.

    fwd_kernel   act from gate_up; on request a program's part of Σ|act| and Σ act²
    bwd_kernel   dgate_up and act from dact and gate_up; on request a program's part of dmask
    sum_kernel   the parts [P, F] of one sum, added in their order

A program owns a strip of COLS columns and walks down STEPS tiles of ROWS rows, so that a sum over rows stays in its
registers [ROWS, COLS] until the end and leaves as one row of the parts; no atomics, and the order of every sum follows
from N, F and the launch configuration alone. The next tile is on its way while this one is worked on. A tile is read
before it is written, and no other program touches it: outputs may lie on inputs, as swiglu.py says.
Programs are numbered along the columns first, so that those of a wave lie in the same rows. Starting at the last rows,
which the product before has just written, and giving up first in the L2 cache what is read for the last time, were
tried within the MLP on an H200: neither is faster. A forward without sums has a tile a program, and a configuration of
its own. Loads are 16 bytes wide where F and the row strides are multiples of 16 elements and the memory begins at 16
bytes (every buffer of the step does); else they are narrower, and the kernels slower. Row pointers are 64-bit, offsets
within a tile 32-bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cortiq_kernels.ops import configs, jit
from cortiq_kernels.ops.triton_gate import launching_on

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(ptr, at, here, f):
    """Gate and up [ROWS, COLS] as stored, side by side in a row."""
    return tl.load(ptr + at, mask=here, other=0.0), tl.load(ptr + f + at, mask=here, other=0.0)


@triton.jit
def _place(n, f, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr):
    """(part, its first row, the row after its last, columns [COLS]) of this program."""
    strips = tl.cdiv(f, COLS)
    part = tl.program_id(0) // strips
    first = part * (ROWS * STEPS)
    return part, first, tl.minimum(first + ROWS * STEPS, n), (tl.program_id(0) % strips) * COLS + tl.arange(0, COLS)


@triton.jit
def _sigmoid(x):
    """1/(1 + exp(-x)); 0 where exp(-x) overflows."""
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@jit.kernel(do_not_specialize=["n"])
def fwd_kernel(
    gate_up_ptr,  # [N, 2F], row stride gate_up_stride
    mask_ptr,  # [F] f32 or None
    act_ptr,  # [N, F] out, row stride act_stride
    counted_ptr,  # [N] bool, contiguous, or None: rows that count in the sums
    abs_ptr,  # [P, F] f32 out or None: parts of Σ|act|
    square_ptr,  # [P, F] f32 out or None: parts of Σ act²
    n,
    f,
    gate_up_stride,
    act_stride,
    mask_stride,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """act = silu(gate)·mask·up of one strip of columns and ROWS·STEPS rows."""
    part, first, end, cols = _place(n, f, ROWS, COLS, STEPS)
    exists = (cols < f)[None, :]
    row = tl.arange(0, ROWS)
    gate_up_ptr += first.to(tl.int64) * gate_up_stride
    act_ptr += first.to(tl.int64) * act_stride
    read, write = row[:, None] * gate_up_stride + cols[None, :], row[:, None] * act_stride + cols[None, :]
    if mask_ptr is not None:
        mask = tl.load(mask_ptr + cols * mask_stride, mask=cols < f, other=0.0)[None, :]
    total_abs = tl.zeros([ROWS, COLS], tl.float32)
    total_square = tl.zeros([ROWS, COLS], tl.float32)
    gate_next, up_next = _tile(gate_up_ptr, read, (first + row < end)[:, None] & exists, f)
    for at in range(first, end, ROWS):
        gate, up = gate_next.to(tl.float32), up_next.to(tl.float32)
        gate_up_ptr += ROWS * gate_up_stride
        gate_next, up_next = _tile(gate_up_ptr, read, (at + ROWS + row < end)[:, None] & exists, f)
        act = _sigmoid(gate) * gate
        if mask_ptr is not None:
            act *= mask
        act = (act * up).to(act_ptr.dtype.element_ty)
        here = (at + row < end)[:, None] & exists
        tl.store(act_ptr + write, act, mask=here)
        act_ptr += ROWS * act_stride
        if abs_ptr is not None or square_ptr is not None:
            if counted_ptr is not None:
                counts = tl.load(counted_ptr + at + row, mask=at + row < end, other=0)
                here &= (counts != 0)[:, None]
            act = tl.where(here, act.to(tl.float32), 0.0)
            if abs_ptr is not None:
                total_abs += tl.abs(act)
            if square_ptr is not None:
                total_square += act * act
    place = part.to(tl.int64) * f + cols
    if abs_ptr is not None:
        tl.store(abs_ptr + place, tl.sum(total_abs, 0), mask=cols < f)
    if square_ptr is not None:
        tl.store(square_ptr + place, tl.sum(total_square, 0), mask=cols < f)


@jit.kernel(do_not_specialize=["n"])
def bwd_kernel(
    dact_ptr,  # [N, F], row stride dact_stride
    gate_up_ptr,  # [N, 2F], row stride gate_up_stride
    mask_ptr,  # [F] f32 or None
    dgate_up_ptr,  # [N, 2F] out, row stride dgate_up_stride
    act_ptr,  # [N, F] out, row stride act_stride
    dmask_ptr,  # [P, F] f32 out or None: parts of dmask
    n,
    f,
    dact_stride,
    gate_up_stride,
    dgate_up_stride,
    act_stride,
    mask_stride,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """dgate, dup, act again and dmask of one strip of columns and ROWS·STEPS rows."""
    part, first, end, cols = _place(n, f, ROWS, COLS, STEPS)
    exists = (cols < f)[None, :]
    row = tl.arange(0, ROWS)
    start = first.to(tl.int64)
    dact_ptr += start * dact_stride
    gate_up_ptr += start * gate_up_stride
    dgate_up_ptr += start * dgate_up_stride
    act_ptr += start * act_stride
    read, read_d = row[:, None] * gate_up_stride + cols[None, :], row[:, None] * dact_stride + cols[None, :]
    write, write_d = row[:, None] * act_stride + cols[None, :], row[:, None] * dgate_up_stride + cols[None, :]
    if mask_ptr is not None:
        mask = tl.load(mask_ptr + cols * mask_stride, mask=cols < f, other=0.0)[None, :]
    total = tl.zeros([ROWS, COLS], tl.float32)
    here = (first + row < end)[:, None] & exists
    gate_next, up_next = _tile(gate_up_ptr, read, here, f)
    da_next = tl.load(dact_ptr + read_d, mask=here, other=0.0)
    for at in range(first, end, ROWS):
        gate, up, da = gate_next.to(tl.float32), up_next.to(tl.float32), da_next.to(tl.float32)
        gate_up_ptr += ROWS * gate_up_stride
        dact_ptr += ROWS * dact_stride
        ahead = (at + ROWS + row < end)[:, None] & exists
        gate_next, up_next = _tile(gate_up_ptr, read, ahead, f)
        da_next = tl.load(dact_ptr + read_d, mask=ahead, other=0.0)
        sig = _sigmoid(gate)
        silu = sig * gate
        act = silu
        if dmask_ptr is not None:
            total += da * silu * up  # 0 where there is no row
        if mask_ptr is not None:
            act = silu * mask
            da = da * mask
        act = act * up
        dgate = (sig + silu * (1.0 - sig)) * da * up
        here = (at + row < end)[:, None] & exists
        tl.store(act_ptr + write, act.to(act_ptr.dtype.element_ty), mask=here)
        tl.store(dgate_up_ptr + write_d, dgate.to(dgate_up_ptr.dtype.element_ty), mask=here)
        tl.store(dgate_up_ptr + f + write_d, (silu * da).to(dgate_up_ptr.dtype.element_ty), mask=here)
        act_ptr += ROWS * act_stride
        dgate_up_ptr += ROWS * dgate_up_stride
    if dmask_ptr is not None:
        tl.store(dmask_ptr + part.to(tl.int64) * f + cols, tl.sum(total, 0), mask=cols < f)


@jit.kernel(do_not_specialize=["parts"])
def sum_kernel(
    part_ptr,  # [P, F] f32
    out_ptr,  # [F] f32 out or None: `=`, or `+=` with ADD
    mask_ptr,  # [F] f32 or None, for `product`
    product_ptr,  # [F] f32 out or None: mask times the sum, likewise
    parts,
    f,
    out_stride,
    mask_stride,
    product_stride,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """The sum of all parts, COLS columns a program."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    exists = cols < f
    row = tl.arange(0, ROWS)
    read = row[:, None] * f + cols[None, :]
    total = tl.zeros([ROWS, COLS], tl.float32)
    ahead = tl.load(part_ptr + read, mask=(row < parts)[:, None] & exists[None, :], other=0.0)
    for at in range(0, parts, ROWS):
        here = ahead
        part_ptr += ROWS * f
        ahead = tl.load(part_ptr + read, mask=(at + ROWS + row < parts)[:, None] & exists[None, :], other=0.0)
        total += here
    value = tl.sum(total, 0)
    if product_ptr is not None:
        product = value
        if mask_ptr is not None:
            product = value * tl.load(mask_ptr + cols * mask_stride, mask=exists, other=0.0)
        if ADD:
            product += tl.load(product_ptr + cols * product_stride, mask=exists, other=0.0)
        tl.store(product_ptr + cols * product_stride, product, mask=exists)
    if out_ptr is not None:
        if ADD:
            value += tl.load(out_ptr + cols * out_stride, mask=exists, other=0.0)
        tl.store(out_ptr + cols * out_stride, value, mask=exists)


def launch_fwd(
    gate_up: Tensor,
    mask: Tensor | None,
    act: Tensor,
    counted: Tensor | None,
    sum_abs: Tensor | None,
    sum_square: Tensor | None,
    accumulate: bool,
) -> None:
    """Fill `act`, and the sums that are not None. N and F at least 1."""
    n, f = act.shape
    wanted = [t for t in (sum_abs, sum_square) if t is not None]
    config, parts = _config(gate_up, "fwd_sums" if wanted else "fwd", n)
    scratch = torch.empty((len(wanted), parts, f), dtype=torch.float32, device=act.device) if wanted else None
    pieces = iter(scratch) if scratch is not None else iter(())
    part_abs = next(pieces) if sum_abs is not None else None
    part_square = next(pieces) if sum_square is not None else None
    with launching_on(act):
        fwd_kernel[(parts * triton.cdiv(f, config["COLS"]),)](
            gate_up, mask, act, counted, part_abs, part_square, n, f,
            gate_up.stride(0), act.stride(0), _stride(mask), **config,
        )  # fmt: skip
        for part, out in ((part_abs, sum_abs), (part_square, sum_square)):
            if part is not None:
                add_parts(gate_up, part, out, None, None, accumulate)


def launch_bwd(
    dact: Tensor,
    gate_up: Tensor,
    mask: Tensor | None,
    dgate_up: Tensor,
    act: Tensor,
    dmask: Tensor | None,
    mask_dmask: Tensor | None,
    accumulate: bool,
) -> None:
    """Fill `dgate_up` and `act`, and the sums that are not None. N and F at least 1."""
    n, f = act.shape
    config, parts = _config(gate_up, "bwd", n)
    wanted = dmask is not None or mask_dmask is not None
    part = torch.empty((parts, f), dtype=torch.float32, device=act.device) if wanted else None
    with launching_on(act):
        bwd_kernel[(parts * triton.cdiv(f, config["COLS"]),)](
            dact, gate_up, mask, dgate_up, act, part, n, f,
            dact.stride(0), gate_up.stride(0), dgate_up.stride(0), act.stride(0), _stride(mask), **config,
        )  # fmt: skip
        if part is not None:
            add_parts(gate_up, part, dmask, mask, mask_dmask, accumulate)


def add_parts(
    gate_up: Tensor, part: Tensor, out: Tensor | None, mask: Tensor | None, product: Tensor | None, accumulate: bool
) -> None:
    """The sum of `part` [P, F] into `out`, and times `mask` into `product`, where these are not None."""
    parts, f = part.shape
    config = configs.launch("swiglu", 8 * gate_up.element_size(), "sum")
    sum_kernel[(triton.cdiv(f, config["COLS"]),)](
        part, out, mask if product is not None else None, product, parts, f,
        _stride(out), _stride(mask), _stride(product), ADD=accumulate, **config,
    )  # fmt: skip


def _config(gate_up: Tensor, kernel: str, n: int) -> tuple[dict[str, Any], int]:
    """Launch configuration, and how many programs share the rows of a strip."""
    config = configs.launch("swiglu", 8 * gate_up.element_size(), kernel)
    return config, triton.cdiv(n, config["ROWS"] * config["STEPS"])


def _stride(vector: Tensor | None) -> int:
    return 1 if vector is None else vector.stride(0)
