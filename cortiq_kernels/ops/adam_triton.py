"""`adam_step_` on a GPU: three launches over flat memory, whatever the number of ranges.

    norm      sums of squares of one tile of gradient each, in f64                                     parts [P]
    decide    one program: the norm, ok, and every scalar of the update; then it closes the step       plan [2 + 2R]
    update    clip, Adam and the 16-bit plane of one tile each: everything read once, written once

A square of f32 cannot overflow f64, so the sum is finite exactly when every gradient is. The parts are added in a fixed
order. Ranges are cut into tiles of their own, and a program finds its range by counting those that start at or before
its tile. A refused step stores nothing: `ok` is part of every store's mask, so that no load waits for it.

    plan: coef (clip coefficient over the loss scale) | (1 - beta2^t)^-1/2 | eta_r/(1 - beta1^t) by range |
          1 - eta_r*decay by range

| tensor | shape | dtype | |
|---|---|---|---|
| table | [R, 3] | i64 | first element of a range, its length, where it starts in the plane (-1: nowhere) |
| tiles | [2, R] | i32 | tiles of the norm, and of the update, before a range |
| factor | [R] | f64 | of a range on the rate |

Hyperparameters are constexprs: a float argument of a kernel is f32, and 0.999 is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cortiq_kernels.ops import configs, jit

if TYPE_CHECKING:
    from cortiq_kernels.ops.adam import AdamRange, AdamState

TILE = 1 << 16  # elements of a part of the norm: 15,000 parts for 1e9, which one program adds in microseconds
HINT = 16  # elements: a range that starts at a multiple of this is read 16 bytes at a time


@triton.jit
def _range_of(tile, tiles_ptr, table_ptr, ranges, ALIGNED: tl.constexpr, R_PAD: tl.constexpr, TILE: tl.constexpr):
    """(range, its first element, offset of the tile in it, elements of the tile)."""
    r = tl.arange(0, R_PAD)
    starts = tl.load(tiles_ptr + r, mask=r < ranges, other=2147483647)
    mine = tl.sum((starts <= tile).to(tl.int32), 0) - 1
    offset = (tile - tl.load(tiles_ptr + mine)).to(tl.int64) * TILE
    start = tl.load(table_ptr + 3 * mine)
    left = tl.minimum(tl.load(table_ptr + 3 * mine + 1) - offset, TILE).to(tl.int32)
    if ALIGNED:
        start, left = tl.multiple_of(start, 16), tl.multiple_of(left, 16)
    return mine, start, offset, left


@jit.kernel
def adam_norm_kernel(
    grad_ptr,  # [n]
    tiles_ptr,  # [R]
    table_ptr,  # [R, 3]
    parts_ptr,  # [P]
    ranges,
    ALIGNED: tl.constexpr,
    R_PAD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of squares of one tile of the gradient."""
    tile = tl.program_id(0)
    _, start, offset, left = _range_of(tile, tiles_ptr, table_ptr, ranges, ALIGNED, R_PAD, TILE)
    lane = tl.arange(0, BLOCK)
    grad_ptr += start + offset
    total = tl.zeros([BLOCK], tl.float64)
    following = tl.load(grad_ptr + lane, mask=lane < left, other=0.0)
    for at in range(0, TILE, BLOCK):
        g = following.to(tl.float64)
        ahead = at + BLOCK + lane
        following = tl.load(grad_ptr + ahead, mask=ahead < left, other=0.0)
        total += g * g
    tl.store(parts_ptr + tile, tl.sum(total, 0))


@jit.kernel
def adam_decide_kernel(
    parts_ptr,  # [P]
    loss_ptr,  # 0-d f64
    rate_ptr,  # 0-d f64
    factor_ptr,  # [R]
    plan_ptr,  # [2 + 2R]
    norm_ptr,
    ok_ptr,
    step_ptr,
    skipped_ptr,
    in_row_ptr,
    scale_ptr,
    parts,
    ranges,
    HAS_LOSS: tl.constexpr,
    CLIP: tl.constexpr,  # 0: none
    LOG1: tl.constexpr,  # log(beta1)
    LOG2: tl.constexpr,
    DECAY: tl.constexpr,
    R_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: norm, ok and plan of the step, and the counters after it."""
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float64)
    for at in range(0, parts, BLOCK):
        sums += tl.load(parts_ptr + at + lane, mask=at + lane < parts, other=0.0)
    length = tl.sqrt(tl.sum(sums, 0))
    ok = length < float("inf")  # false for NaN
    if HAS_LOSS:
        loss = tl.load(loss_ptr)
        ok = ok & (tl.abs(loss) < float("inf"))
    scale = tl.load(scale_ptr)
    norm = length / scale.to(tl.float64)
    tl.store(norm_ptr, norm)
    tl.store(ok_ptr, ok.to(tl.uint8))

    one = tl.full((), 1.0, tl.float64)
    coef = one / scale.to(tl.float64)
    if CLIP > 0:
        limit = tl.full((), CLIP, tl.float64)
        coef = coef * tl.where(norm > limit, limit / norm, one)
    step, skipped, in_row = tl.load(step_ptr), tl.load(skipped_ptr), tl.load(in_row_ptr)
    t = (step + 1).to(tl.float64)
    fix1 = one - tl.exp(t * tl.full((), LOG1, tl.float64))
    fix2 = one - tl.exp(t * tl.full((), LOG2, tl.float64))
    tl.store(plan_ptr, coef)
    tl.store(plan_ptr + 1, one / tl.sqrt(fix2))
    r = tl.arange(0, R_PAD)
    inside = r < ranges
    eta = tl.load(rate_ptr) * tl.load(factor_ptr + r, mask=inside, other=0.0)
    tl.store(plan_ptr + 2 + r, eta / fix1, mask=inside)
    tl.store(plan_ptr + 2 + ranges + r, one - eta * tl.full((), DECAY, tl.float64), mask=inside)

    tl.store(step_ptr, step + ok.to(tl.int64))
    tl.store(skipped_ptr, skipped + (1 - ok.to(tl.int64)))
    tl.store(in_row_ptr, tl.where(ok, 0, in_row + 1))
    halved = tl.where(scale > 1.0, tl.maximum(scale * 0.5, 1.0), scale)
    tl.store(scale_ptr, tl.where(ok, scale, halved))


@jit.kernel
def adam_update_kernel(
    param_ptr,  # [n]
    grad_ptr,  # [n]
    m_ptr,  # [n]
    v_ptr,  # [n]
    plane_ptr,  # [plane]
    tiles_ptr,  # [R]
    table_ptr,  # [R, 3]
    plan_ptr,  # [2 + 2R]
    ok_ptr,
    ranges,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    REST1: tl.constexpr,  # 1 - beta1
    REST2: tl.constexpr,
    EPS: tl.constexpr,
    HAS_PLANE: tl.constexpr,
    ALIGNED: tl.constexpr,
    R_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Clip, Adam and the plane of one tile; a refused step stores nothing."""
    work = m_ptr.dtype.element_ty
    tile = tl.program_id(0)
    mine, start, offset, left = _range_of(tile, tiles_ptr, table_ptr, ranges, ALIGNED, R_PAD, BLOCK)
    lane = tl.arange(0, BLOCK)
    inside = lane < left
    first = start + offset
    grad = tl.load(grad_ptr + first + lane, mask=inside, other=0.0)
    param = tl.load(param_ptr + first + lane, mask=inside, other=0.0)
    m = tl.load(m_ptr + first + lane, mask=inside, other=0.0)
    v = tl.load(v_ptr + first + lane, mask=inside, other=0.0)
    coef, root2 = tl.load(plan_ptr).to(work), tl.load(plan_ptr + 1).to(work)
    rate, keep = tl.load(plan_ptr + 2 + mine).to(work), tl.load(plan_ptr + 2 + ranges + mine).to(work)

    g = grad.to(work) * coef
    m = m * tl.full((), BETA1, work) + g * tl.full((), REST1, work)
    v = v * tl.full((), BETA2, work) + g * g * tl.full((), REST2, work)
    root = tl.sqrt_rn(v) if work == tl.float32 else tl.sqrt(v)
    below = root * root2 + tl.full((), EPS, work)
    ratio = tl.div_rn(m, below) if work == tl.float32 else m / below
    param = (param.to(work) * keep - ratio * rate).to(param_ptr.dtype.element_ty)

    # a block first, as a block & a scalar is no mask to Triton 3.9's interpreter
    written = inside & (tl.broadcast_to(tl.load(ok_ptr), [BLOCK]) != 0)
    tl.store(param_ptr + first + lane, param, mask=written)
    tl.store(m_ptr + first + lane, m, mask=written)
    tl.store(v_ptr + first + lane, v, mask=written)
    if HAS_PLANE:
        there = tl.load(table_ptr + 3 * mine + 2)
        if there >= 0:
            if ALIGNED:
                there = tl.multiple_of(there, 16)
            tl.store(plane_ptr + there + offset + lane, param.to(plane_ptr.dtype.element_ty), mask=written)


class Tables(NamedTuple):
    """The device's copy of ranges; see the module docstring."""

    table: Tensor
    tiles: Tensor
    factor: Tensor
    norm_tiles: int
    update_tiles: int
    block: int  # elements of an update's tile
    aligned: bool


def size_of(m: Tensor) -> int:
    """Bits of the moments, the size that launch configurations go by."""
    return 8 * m.element_size()


def make_tables(ranges: Sequence[AdamRange], device: torch.device, size: int) -> Tables:
    """Tables of `ranges`, copied without waiting for the device (so not inside a capture)."""
    block = configs.launch("adam", size, "update")["BLOCK"]
    lengths = [r.stop - r.start for r in ranges]
    counts = [[-(-n // tile) for n in lengths] for tile in (TILE, block)]
    before = [[sum(c[:i]) for i in range(len(c))] for c in counts]
    starts = [-1 if r.plane_start is None else r.plane_start for r in ranges]
    pin = device.type == "cuda"

    def move(values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, pin_memory=pin).to(device, non_blocking=True)

    return Tables(
        table=move([[r.start, n, s] for r, n, s in zip(ranges, lengths, starts, strict=True)], torch.int64),
        tiles=move(before, torch.int32),
        factor=move([r.factor for r in ranges], torch.float64),
        norm_tiles=sum(counts[0]),
        update_tiles=sum(counts[1]),
        block=block,
        aligned=all(x % HINT == 0 for r, n in zip(ranges, lengths, strict=True) for x in (r.start, n))
        and all(s % HINT == 0 for s in starts if s >= 0),
    )


def launch(
    state: AdamState,
    param: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    plane: Tensor | None,
    tables: Tables,
    loss: Tensor | None,
    rate: Tensor,
    *,
    clip: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One step, `rate` and `loss` 0-d f64 on the device; `clip` 0 for none."""
    size, ranges = size_of(m), tables.factor.shape[0]
    pad = max(16, triton.next_power_of_2(ranges))
    parts = torch.empty(max(tables.norm_tiles, 1), dtype=torch.float64, device=param.device)
    plan = torch.empty(2 + 2 * ranges, dtype=torch.float64, device=param.device)
    ok = state.ok.view(torch.uint8)
    shape = {"ALIGNED": tables.aligned, "R_PAD": pad}
    if tables.norm_tiles:
        adam_norm_kernel[(tables.norm_tiles,)](
            grad, tables.tiles[0], tables.table, parts, ranges,
            **shape, TILE=TILE, **configs.launch("adam", size, "norm"),
        )  # fmt: skip
    adam_decide_kernel[(1,)](
        parts, state.norm if loss is None else loss, rate, tables.factor, plan, state.norm, ok, state.step,
        state.skipped, state.in_row, state.scale, tables.norm_tiles, ranges,
        HAS_LOSS=loss is not None, CLIP=clip, LOG1=_log(beta1), LOG2=_log(beta2), DECAY=weight_decay, R_PAD=pad,
        **configs.launch("adam", size, "decide"),
    )  # fmt: skip
    if tables.update_tiles:
        update = {**configs.launch("adam", size, "update"), "BLOCK": tables.block}
        adam_update_kernel[(tables.update_tiles,)](
            param, grad, m, v, param if plane is None else plane, tables.tiles[1], tables.table, plan, ok, ranges,
            BETA1=beta1, BETA2=beta2, REST1=1 - beta1, REST2=1 - beta2, EPS=eps, HAS_PLANE=plane is not None,
            **shape, **update,
        )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
