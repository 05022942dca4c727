"""Triton kernels that move whole rows by an index on the device: gather, scatter, and the sum of rows that share an id.

`gather_kernel`   out[r]        = src[index[r]], or 0 where weight[r] is 0
`scatter_kernel`  out[index[r]] = rows[r]·factor[r], every index at most once; the rest of `out` stays
`sum_kernel`      out[ids[i]]   = (or +=) Σ src[order[i]] over the run of equal ids that starts at i

A negative index names no row: it gathers 0 and is not scattered. One past the end gathers NaN, which the loss then
shows, and is not scattered. A row of `out` has one writer, and a sum's order is that of its run (ROWS at a time), so
the same inputs give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cortiq_kernels.ops import configs, jit


@jit.kernel
def gather_kernel(
    src_ptr,  # [n, H]
    index_ptr,  # [R]
    weight_ptr,  # [R] f32
    out_ptr,  # [R, H]
    rows,
    n,
    src_stride,
    out_stride,
    H: tl.constexpr,
    INDEXED: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    """ROWS rows and W columns a program."""
    first = tl.program_id(0) * ROWS
    lane, cols = tl.arange(0, ROWS), tl.program_id(1) * W + tl.arange(0, W)
    row = first + lane
    real = row < rows
    source = row
    if INDEXED:
        source = tl.load(index_ptr + row, mask=real, other=-1)
    counts = real & (source >= 0) & (tl.load(weight_ptr + row, mask=real, other=0.0) != 0)
    there = counts & (source < n)
    at = src_ptr + source.to(tl.int64)[:, None] * src_stride + cols[None, :]
    x = tl.load(at, mask=there[:, None] & (cols < H)[None, :], other=0.0)
    x = tl.where((counts & (source >= n))[:, None], float("nan"), x)
    at = out_ptr + first.to(tl.int64) * out_stride + (lane[:, None] * out_stride + cols[None, :])
    tl.store(at, x, mask=real[:, None] & (cols < H)[None, :])


@jit.kernel
def scatter_kernel(
    rows_ptr,  # [R, H]
    factor_ptr,  # [R] f32
    index_ptr,  # [R]
    out_ptr,  # [n, H]
    rows,
    n,
    rows_stride,
    out_stride,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    """ROWS rows and W columns a program."""
    first = tl.program_id(0) * ROWS
    lane, cols = tl.arange(0, ROWS), tl.program_id(1) * W + tl.arange(0, W)
    row = first + lane
    target = tl.load(index_ptr + row, mask=row < rows, other=-1)
    inside = ((target >= 0) & (target < n))[:, None] & (cols < H)[None, :]
    at = rows_ptr + first.to(tl.int64) * rows_stride + (lane[:, None] * rows_stride + cols[None, :])
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if SCALE:
        x *= tl.load(factor_ptr + row, mask=row < rows, other=0.0)[:, None]
    at = out_ptr + target.to(tl.int64)[:, None] * out_stride + cols[None, :]
    tl.store(at, x.to(out_ptr.dtype.element_ty), mask=inside)


@jit.kernel
def sum_kernel(
    src_ptr,  # [n, H]
    ids_ptr,  # [n] int32, sorted
    order_ptr,  # [n] int64: where in src the row of each id lies
    out_ptr,  # [V, H] f32
    n,
    vocab,
    src_stride,
    out_stride,
    H: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    """One place in the sorted ids and W columns a program, which works only where a run starts."""
    start = tl.program_id(0)
    lane, cols = tl.arange(0, ROWS), tl.program_id(1) * W + tl.arange(0, W)
    own = tl.load(ids_ptr + start)
    before = tl.load(ids_ptr + start - 1, mask=start > 0, other=-1)
    if (own != before) & (own >= 0) & (own < vocab):
        total = tl.zeros([W], tl.float32)
        at = start
        more = own == own
        while more:
            here = tl.load(ids_ptr + at + lane, mask=at + lane < n, other=-1) == own
            row = tl.load(order_ptr + at + lane, mask=here, other=0)
            x = tl.load(
                src_ptr + row[:, None] * src_stride + cols[None, :], mask=here[:, None] & (cols < H)[None, :], other=0.0
            )
            total += tl.sum(x.to(tl.float32), 0)
            at += ROWS
            more = tl.load(ids_ptr + at, mask=at < n, other=-1) == own
        place = out_ptr + own.to(tl.int64) * out_stride + cols
        if ADD:
            total += tl.load(place, mask=cols < H, other=0.0)
        tl.store(place, total, mask=cols < H)


def shape_of(width: int, kernel: str, arch: int | None = None) -> dict[str, int]:
    """Launch configuration for rows of `width`: ROWS and W of a program's tile, num_warps, num_stages."""
    found = dict(configs.launch("rows", 0, kernel, arch))
    return found | {"W": min(found["W"], max(16, triton.next_power_of_2(width)))}


def gather(src: Tensor, index: Tensor | None, weight: Tensor, out: Tensor) -> None:
    """out [R, H] `=` src[index[r]] (src[r] without an index), 0 where weight [R] f32 is 0."""
    rows, h = out.shape
    if out.numel() == 0:
        return
    launch = shape_of(h, "gather")
    gather_kernel[(triton.cdiv(rows, launch["ROWS"]), triton.cdiv(h, launch["W"]))](
        src, weight if index is None else index, weight, out, rows, src.shape[0], src.stride(0), out.stride(0),
        H=h, INDEXED=index is not None, **launch,
    )  # fmt: skip


def scatter(rows: Tensor, factor: Tensor | None, index: Tensor, out: Tensor) -> None:
    """out[index[r]] `=` rows[r]·factor[r] (no factor: 1), rounded to the dtype of `out`; other rows stay."""
    r, h = rows.shape
    if rows.numel() == 0:
        return
    launch = shape_of(h, "scatter")
    scatter_kernel[(triton.cdiv(r, launch["ROWS"]), triton.cdiv(h, launch["W"]))](
        rows, rows if factor is None else factor, index, out, r, out.shape[0], rows.stride(0), out.stride(0),
        H=h, SCALE=factor is not None, **launch,
    )  # fmt: skip


def sum_by_id(src: Tensor, ids: Tensor, order: Tensor, out: Tensor, add: bool) -> None:
    """out[v] `=`, or `+=`, the sum of src[order[i]] over ids[i] = v, for every v that is in the sorted `ids`."""
    n, h = src.shape
    if src.numel() == 0:
        return
    launch = shape_of(h, "sum")
    sum_kernel[(n, triton.cdiv(h, launch["W"]))](
        src, ids, order, out, n, out.shape[0], src.stride(0), out.stride(0), H=h, ADD=add, **launch
    )
