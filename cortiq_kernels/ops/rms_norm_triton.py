"""The Triton kernels of `rms_norm.py`: whole rows in registers, so that each way is one pass over memory.

`norm_kernel`        ROWS rows a program: reads x and r, writes x̃, n and rstd
`norm_bwd_kernel`    program p of P walks row groups p, p + P, ..: reads dn, x̃ (and dx), writes dx (and n again), and
                     keeps its share of dw in registers, one float32 a column; a share lands in a row of [P, H]

The shares are summed in their order by `parts_triton.py`.
Which rows a program takes and how a row's sum is split depend on the width and the configuration alone, and nothing is
added by atomics: the same inputs give the same bits. With AHEAD the next rows are on their way while a group is worked
on.
Every lane reads an element before it writes there, and no other lane touches it: x̃ may be x, and dx may be dn.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cortiq_kernels.ops import configs, jit
from cortiq_kernels.ops.parts_triton import sum_parts

NARROW = 1024  # narrower rows are taken several at a time, as if this wide


@triton.jit
def _gain(w_ptr, cols, inside, ZERO_CENTERED: tl.constexpr):
    """What x̂ is multiplied by, [1, W] f32."""
    w = tl.load(w_ptr + cols, mask=inside, other=0.0)[None, :]
    if ZERO_CENTERED:
        w += 1
    return w


@triton.jit
def _rows(ptr, first, n, stride, H: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr):
    """Rows first .. [ROWS, W] as stored; 0 past n and past H."""
    lane, cols = tl.arange(0, ROWS), tl.arange(0, W)
    inside = (first + lane < n)[:, None] & (cols < H)[None, :]
    return tl.load(ptr + first.to(tl.int64) * stride + (lane[:, None] * stride + cols[None, :]), mask=inside, other=0.0)


@triton.jit
def _write(ptr, value, first, n, stride, H: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr):
    """Store rows first .. [ROWS, W], rounded to the type of `ptr`."""
    lane, cols = tl.arange(0, ROWS), tl.arange(0, W)
    inside = (first + lane < n)[:, None] & (cols < H)[None, :]
    at = ptr + first.to(tl.int64) * stride + (lane[:, None] * stride + cols[None, :])
    tl.store(at, value.to(ptr.dtype.element_ty), mask=inside)


@jit.kernel
def norm_kernel(
    x_ptr,  # [n, H]
    r_ptr,  # [n, H]
    w_ptr,  # [H] f32
    sum_ptr,  # [n, H] x̃
    out_ptr,  # [n, H]
    rstd_ptr,  # [n] f32
    n,
    x_stride,
    r_stride,
    sum_stride,
    out_stride,
    eps,
    H: tl.constexpr,
    ADD: tl.constexpr,
    WRITE_SUM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    """n = norm(x + r)·gain of ROWS rows."""
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    cols = tl.arange(0, W)
    x = _rows(x_ptr, first, n, x_stride, H, ROWS, W).to(tl.float32)
    if ADD:
        x += _rows(r_ptr, first, n, r_stride, H, ROWS, W).to(tl.float32)
    if WRITE_SUM:
        rounded = x.to(sum_ptr.dtype.element_ty)
        _write(sum_ptr, rounded, first, n, sum_stride, H, ROWS, W)
        x = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / H + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < n)
    y = x * rstd[:, None] * _gain(w_ptr, cols, cols < H, ZERO_CENTERED)
    _write(out_ptr, y, first, n, out_stride, H, ROWS, W)


@triton.jit
def _group(
    x_ptr, dn_ptr, dx_ptr, rstd_ptr, first, n, x_stride, dn_stride, dx_stride,
    H: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """What the backward reads of a group of rows: x, dn and dx (dn again without ADD) [ROWS, W], rstd [ROWS]."""
    x = _rows(x_ptr, first, n, x_stride, H, ROWS, W)
    dn = _rows(dn_ptr, first, n, dn_stride, H, ROWS, W)
    dx = dn
    if ADD:
        dx = _rows(dx_ptr, first, n, dx_stride, H, ROWS, W)
    row = first + tl.arange(0, ROWS)
    return x, dn, dx, tl.load(rstd_ptr + row, mask=row < n, other=0.0)


@jit.kernel
def norm_bwd_kernel(
    dn_ptr,  # [n, H]
    x_ptr,  # [n, H] x̃
    dx_ptr,  # [n, H]
    again_ptr,  # [n, H] n
    w_ptr,  # [H] f32
    rstd_ptr,  # [n] f32
    part_ptr,  # [P, H] f32
    n,
    dn_stride,
    x_stride,
    dx_stride,
    again_stride,
    H: tl.constexpr,
    ADD: tl.constexpr,  # dx += instead of =
    AGAIN: tl.constexpr,  # write n
    WEIGHT: tl.constexpr,  # write dw's shares
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """dx of every P-th group of ROWS rows, and their share of dw."""
    step = tl.num_programs(0) * ROWS
    cols = tl.arange(0, W)
    gain = _gain(w_ptr, cols, cols < H, ZERO_CENTERED)
    total = tl.zeros([W], tl.float32)
    start = tl.program_id(0) * ROWS
    if AHEAD:
        x_next, dn_next, dx_next, rstd_next = _group(
            x_ptr, dn_ptr, dx_ptr, rstd_ptr, start, n, x_stride, dn_stride, dx_stride, H, ADD, ROWS, W
        )
    for past in range(0, n - start, step):
        first = start + past
        if AHEAD:
            x, dn, above, rstd = x_next, dn_next, dx_next, rstd_next
            x_next, dn_next, dx_next, rstd_next = _group(
                x_ptr, dn_ptr, dx_ptr, rstd_ptr, first + step, n, x_stride, dn_stride, dx_stride, H, ADD, ROWS, W
            )
        else:
            x, dn, above, rstd = _group(
                x_ptr, dn_ptr, dx_ptr, rstd_ptr, first, n, x_stride, dn_stride, dx_stride, H, ADD, ROWS, W
            )
        xhat = x.to(tl.float32) * rstd[:, None]
        g = dn.to(tl.float32)
        if WEIGHT:
            total += tl.sum(g * xhat, 0)
        g *= gain
        dx = (g - xhat * (tl.sum(g * xhat, 1) / H)[:, None]) * rstd[:, None]
        if ADD:
            dx += above.to(tl.float32)
        _write(dx_ptr, dx, first, n, dx_stride, H, ROWS, W)
        if AGAIN:
            _write(again_ptr, xhat * gain, first, n, again_stride, H, ROWS, W)
    if WEIGHT:
        tl.store(part_ptr + tl.program_id(0) * H + cols, total, mask=cols < H)


def shape_of(width: int, kernel: str, arch: int | None = None) -> dict[str, int]:
    """Launch configuration for rows of `width`: ROWS, W, num_warps, num_stages, and PROGRAMS of the backward."""
    w = max(16, triton.next_power_of_2(width))
    found = dict(configs.launch("rms_norm", max(w, NARROW), kernel, arch))
    return found | {"ROWS": found["ROWS"] * max(1, NARROW // w), "W": w}


def norm_fwd(
    x: Tensor, r: Tensor | None, weight: Tensor, eps: float, x_out: Tensor, out: Tensor, rstd: Tensor, centered: bool
) -> None:
    """The forward of `add_rms_norm_fwd` into x_out, out and rstd; `x_out` is not written where it is x and r None."""
    n, h = x.shape
    if x.numel() == 0:
        return
    launch = shape_of(h, "fwd")
    norm_kernel[(triton.cdiv(n, launch["ROWS"]),)](
        x, x if r is None else r, weight, x_out, out, rstd, n,
        x.stride(0), x.stride(0) if r is None else r.stride(0), x_out.stride(0), out.stride(0), eps,
        H=h, ADD=r is not None, WRITE_SUM=r is not None or x_out is not x, ZERO_CENTERED=centered, **launch,
    )  # fmt: skip


def norm_bwd(
    dn: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    dx: Tensor,
    out: Tensor | None,
    dweight: Tensor | None,
    *,
    centered: bool,
    add_dx: bool,
    accumulate: bool,
) -> None:
    """The backward of `add_rms_norm_bwd`."""
    n, h = x.shape
    if x.numel() == 0:
        if dweight is not None and not accumulate:
            dweight.zero_()
        return
    launch = shape_of(h, "bwd")
    programs = min(launch.pop("PROGRAMS"), triton.cdiv(n, launch["ROWS"]))
    parts = rstd if dweight is None else rstd.new_empty((programs, h))
    again = dx if out is None else out
    norm_bwd_kernel[(programs,)](
        dn, x, dx, again, weight, rstd, parts, n, dn.stride(0), x.stride(0), dx.stride(0), again.stride(0),
        H=h, ADD=add_dx, AGAIN=out is not None, WEIGHT=dweight is not None, ZERO_CENTERED=centered, **launch,
    )  # fmt: skip
    if dweight is not None:
        sum_parts(parts, dweight, accumulate)
