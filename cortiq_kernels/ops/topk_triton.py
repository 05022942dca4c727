"""The Triton kernels of `topk.py`: one sweep of a row, then only the tiles that can hold a winner. One program a row.

`sweep_kernel`   1. the maximum of every tile of 256 columns, and the log-sum-exp `select_kernel`  2. τ = the k-th
largest tile maximum. At least k values reach it (one in each of those tiles), so no winner
                    is below it, and every winner lies in a tile whose maximum reaches it: k tiles and ties, 7 % of a
                    row of 248,320 for k = 64
                 3. the values of those tiles that reach τ are collected. Where logits are not ordered by column they
                    are k and a few more; when they do not fit, the exact k-th value is searched for, bit by bit, in the
                    same tiles, and of the values equal to it the lowest columns are taken
                 4. a sort by (value descending, column ascending), as one 64-bit key, so that ties have one answer

Two kernels, because the sweep wants many small programs to keep memory busy and the selection wants registers; as one
kernel they were slower (bench/results/h200/head.json has the time of the two). Values are compared as order-preserving
integers of their float32 bits; a bfloat16 logit has only the upper 16 of them, so its searches take half the steps. −0
counts as +0 and NaN as −inf. Row pointers are 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cortiq_kernels.ops import jit

TILE = 256  # columns
LOG2E = tl.constexpr(1.4426950408889634)
LIMIT = tl.constexpr(60.0)  # exp(60) times 2^18 columns is 3e31, far from what float32 holds
SWEEP = 8, 4  # tiles at a time and warps
SELECT = 4, 4


@triton.jit
def _clean(raw):
    """f32 with −inf for NaN and +0 for −0."""
    z = raw.to(tl.float32)
    z = tl.where(z == z, z, float("-inf"))
    return tl.where(z == 0.0, 0.0, z)


@triton.jit
def _values(z_ptr, cols, mask):
    """Logits in f32: −inf where masked or NaN, +0 for −0."""
    return _clean(tl.load(z_ptr + cols, mask=mask, other=float("-inf")))


@triton.jit
def _key(z, BITS: tl.constexpr):
    """f32 -> int32 in the same order, of the upper BITS bits."""
    bits = z.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> (32 - BITS)


@triton.jit
def _tiles(z_ptr, list_ptr, first, count, vocab, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Logits of tiles first .. of the list [GROUP, TILE] as stored, their columns, and which of them exist."""
    place = first + tl.arange(0, GROUP)
    tile = tl.load(list_ptr + place, mask=place < count, other=0)
    cols = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    exists = (place < count)[:, None] & (cols < vocab)
    return tl.load(z_ptr + cols, mask=exists, other=float("-inf")), cols, exists


@triton.jit
def _append(found_ptr, n_found, cols, take, SORT: tl.constexpr):
    """Store the taken columns [GROUP, TILE] behind n_found others, in rising order; returns the new count."""
    taken = take.to(tl.int32)
    in_tile = tl.cumsum(taken, 1)
    per_tile = tl.sum(taken, 1)
    place = n_found + (tl.cumsum(per_tile, 0) - per_tile)[:, None] + in_tile - 1
    tl.store(found_ptr + place, cols, mask=take & (place < SORT))
    return n_found + tl.sum(per_tile, 0)


@triton.jit
def _count(z_ptr, list_ptr, count, vocab, threshold, GROUP: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr):
    """How many values of the listed tiles reach the threshold."""
    reach = tl.zeros([GROUP], tl.int32)
    for first in range(0, count, GROUP):
        raw, _, exists = _tiles(z_ptr, list_ptr, first, count, vocab, GROUP, TILE)
        reach += tl.sum((exists & (_key(_clean(raw), BITS) >= threshold)).to(tl.int32), 1)
    return tl.sum(reach, 0)


@jit.kernel
def sweep_kernel(
    z_ptr,  # [n, V]
    tile_ptr,  # [n, TILES] f32: tile maxima
    lse_ptr,  # [n] f32: a reference that the row's maximum exceeds by LIMIT at most
    mass_ptr,  # [n] f32: Σ exp(z − reference)
    vocab,
    z_stride,
    WITH_LSE: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Maximum of every tile of a row, and its log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    tile_ptr += row * TILES
    n_tiles = tl.cdiv(vocab, TILE)
    # [GROUP, TILE] at a time: a tile's maximum stays within a warp, and each element costs one exp. Every row of the
    # group sums against a reference of its own, which moves only when a tile exceeds it by LIMIT.
    ref = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP, TILE], tl.float32)
    group = tl.arange(0, GROUP)
    inside = group[:, None] * TILE + tl.arange(0, TILE)[None, :]
    ahead = tl.load(z_ptr + inside, mask=inside < vocab, other=float("-inf"))
    for first in range(0, n_tiles, GROUP):
        z = ahead.to(tl.float32)
        z = tl.where(z == z, z, float("-inf"))  # NaN
        cols = (first + GROUP) * TILE + inside  # the next group is on its way while this one is worked on
        ahead = tl.load(z_ptr + cols, mask=cols < vocab, other=float("-inf"))
        top = tl.max(z, 1)
        tl.store(tile_ptr + first + group, tl.where(top == 0.0, 0.0, top), mask=first + group < n_tiles)
        if WITH_LSE:
            moved = tl.where(top > ref + LIMIT, top, ref)
            level = tl.where(moved == float("-inf"), 0.0, moved)
            shift = level * LOG2E  # one fused multiply-add before the exp, where exp(z - level) needs two instructions
            total = total * tl.exp(ref - level)[:, None] + tl.exp2(z * LOG2E - shift[:, None])
            ref = moved
    if WITH_LSE:
        top = tl.max(ref, 0)
        level = tl.where(top == float("-inf"), 0.0, top)
        tl.store(lse_ptr + row, level)
        tl.store(mass_ptr + row, tl.sum(tl.sum(total, 1) * tl.exp(ref - level), 0))


@jit.kernel
def select_kernel(
    z_ptr,  # [n, V]
    ids_ptr,  # [n, k] int32
    probs_ptr,  # [n, k] f32
    lse_ptr,  # [n] f32, in: see sweep_kernel; out: the log-sum-exp
    mass_ptr,  # [n] f32, likewise; out: the winners' share
    tile_ptr,  # [n, TILES] f32: tile maxima
    list_ptr,  # [n, TILES] int32 scratch: tiles that can hold a winner
    found_ptr,  # [n, SORT] int32 scratch: columns that reach the threshold
    vocab,
    k,
    z_stride,
    BITS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    TILES: tl.constexpr,
    SORT: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The k largest of a row from its tile maxima, sorted, with their probabilities and the mass they hold."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    tile_ptr += row * TILES
    list_ptr += row * TILES
    found_ptr += row * SORT
    n_tiles = tl.cdiv(vocab, TILE)

    # 2. the largest threshold that k tile maxima reach, from the highest bit down; fewer tiles than k: the lowest value
    tile = tl.arange(0, TILES)
    real = tile < n_tiles
    maxima = _key(tl.load(tile_ptr + tile, mask=real, other=float("-inf")), BITS)
    lowest = tl.full([], -(1 << (BITS - 1)), tl.int32)
    threshold = lowest
    if n_tiles >= k:
        threshold = tl.where(tl.sum((real & (maxima >= 0)).to(tl.int32), 0) >= k, 0, lowest)
        for i in range(1, BITS):
            trial = threshold + (1 << (BITS - 1 - i))
            reached = tl.sum((real & (maxima >= trial)).to(tl.int32), 0)
            threshold = tl.where(reached >= k, trial, threshold)
    chosen = (real & (maxima >= threshold)).to(tl.int32)
    count = tl.sum(chosen, 0)
    tl.store(list_ptr + tl.cumsum(chosen, 0) - 1, tile, mask=chosen != 0)
    tl.debug_barrier()

    # 3.
    n_found = 0
    ahead, ahead_cols, ahead_exists = _tiles(z_ptr, list_ptr, 0, count, vocab, GROUP, TILE)
    for first in range(0, count, GROUP):
        raw, cols, exists = ahead, ahead_cols, ahead_exists
        ahead, ahead_cols, ahead_exists = _tiles(z_ptr, list_ptr, first + GROUP, count, vocab, GROUP, TILE)
        take = exists & (_key(_clean(raw), BITS) >= threshold)
        n_found = _append(found_ptr, n_found, cols, take, SORT)
    if n_found > SORT:
        threshold = tl.where(_count(z_ptr, list_ptr, count, vocab, 0, GROUP, TILE, BITS) >= k, 0, lowest)
        for i in range(1, BITS):
            trial = threshold + (1 << (BITS - 1 - i))
            reached = _count(z_ptr, list_ptr, count, vocab, trial, GROUP, TILE, BITS)
            threshold = tl.where(reached >= k, trial, threshold)
        equals = k - _count(z_ptr, list_ptr, count, vocab, threshold + 1, GROUP, TILE, BITS)
        tl.debug_barrier()
        n_found = 0
        n_equal = 0
        for first in range(0, count, GROUP):
            raw, cols, exists = _tiles(z_ptr, list_ptr, first, count, vocab, GROUP, TILE)
            key = _key(_clean(raw), BITS)
            equal = (exists & (key == threshold)).to(tl.int32)
            per_tile = tl.sum(equal, 1)
            rank = n_equal + (tl.cumsum(per_tile, 0) - per_tile)[:, None] + tl.cumsum(equal, 1)  # from 1
            take = exists & ((key > threshold) | ((equal != 0) & (rank <= equals)))
            n_found = _append(found_ptr, n_found, cols, take, SORT)
            n_equal += tl.sum(per_tile, 0)
    tl.debug_barrier()

    # 4.
    lane = tl.arange(0, SORT)
    held = lane < n_found
    cols = tl.load(found_ptr + lane, mask=held, other=0)
    key = _key(_values(z_ptr, cols, held), BITS)
    packed = (key.to(tl.int64) << 32) | (0x7FFFFFFF - cols).to(tl.int64)
    packed = tl.sort(tl.where(held, packed, -9223372036854775807), descending=True)
    cols = (0x7FFFFFFF - (packed & 0x7FFFFFFF)).to(tl.int32)
    kept = lane < k
    z = _values(z_ptr, cols, kept)
    best = tl.max(z, 0)
    safe = tl.where(best == float("-inf"), 0.0, best)
    e = tl.where(kept, tl.exp(z - safe), 0.0)
    s = tl.sum(e, 0)
    tl.store(ids_ptr + row * k + lane, cols, mask=kept)
    tl.store(probs_ptr + row * k + lane, e / tl.where(s == 0.0, 1.0, s), mask=kept)
    if WITH_LSE:
        level = tl.load(lse_ptr + row)
        whole = tl.load(mass_ptr + row)
        tl.debug_barrier()
        # of sums below one reference: a difference of logarithms is off by the spacing of floats at their size
        share = tl.minimum(s * tl.exp(safe - level) / whole, 1.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(lse_ptr + row, level + tl.log(whole))
        tl.store(mass_ptr + row, tl.where(s == 0.0, 0.0, share))


def launch(z: Tensor, k: int, ids: Tensor, probs: Tensor, lse: Tensor | None, mass: Tensor | None) -> None:
    """Run both kernels on z [n, V], unit column stride, rows any distance apart, bf16, f16 or f32; fills the
    outputs."""
    n, vocab = z.shape
    if n == 0:
        return
    tiles = max(16, triton.next_power_of_2(triton.cdiv(vocab, TILE)))
    sort = max(128, triton.next_power_of_2(2 * k))
    with_lse = lse is not None
    maxima = torch.empty((n, tiles), dtype=torch.float32, device=z.device)
    lse = maxima if lse is None else lse  # neither is touched without WITH_LSE
    mass = maxima if mass is None else mass
    group, warps = SWEEP
    sweep_kernel[(n,)](
        z,
        maxima,
        lse,
        mass,
        vocab,
        z.stride(0),
        WITH_LSE=with_lse,
        TILES=tiles,
        TILE=TILE,
        GROUP=group,
        num_warps=warps,
    )
    group, warps = SELECT
    select_kernel[(n,)](
        z,
        ids,
        probs,
        lse,
        mass,
        maxima,
        torch.empty((n, tiles), dtype=torch.int32, device=z.device),
        torch.empty((n, sort), dtype=torch.int32, device=z.device),
        vocab,
        k,
        z.stride(0),
        BITS=16 if z.dtype == torch.bfloat16 else 32,
        WITH_LSE=with_lse,
        TILES=tiles,
        SORT=sort,
        TILE=TILE,
        GROUP=group,
        num_warps=warps,
    )
