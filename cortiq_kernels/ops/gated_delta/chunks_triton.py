"""The list of chunks (chunks.py) in one launch: in torch it is twenty, which a short scan notices."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .. import jit

ROWS = 32  # chunks a program
BLOCK = 256  # sequences at a time, fewer where there are fewer


@jit.kernel(do_not_specialize=["sequences", "capacity"])
def chunk_index_kernel(
    cu_ptr,  # [S+1] int32
    table_ptr,  # [cap, 3] int32 out
    offsets_ptr,  # [S+1] int32 out
    sequences,
    capacity,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program ROWS chunks; each counts through all sequences, BLOCK at a time."""
    C: tl.constexpr = 64
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    seq = tl.zeros([ROWS], tl.int32)  # sequences that end before chunk i
    before = tl.zeros([ROWS], tl.int32)  # and their chunks
    total = tl.zeros([1], tl.int32)
    for s0 in range(0, sequences, BLOCK):
        s = s0 + tl.arange(0, BLOCK)
        here = s < sequences
        length = tl.load(cu_ptr + s + 1, mask=here, other=0) - tl.load(cu_ptr + s, mask=here, other=0)
        ends = total + tl.cumsum((length + C - 1) // C, 0)
        tl.store(offsets_ptr + s + 1, ends, mask=s < tl.where(tl.program_id(0) == 0, sequences, 0))
        past = here[None, :] & (ends[None, :] <= i[:, None])
        seq += tl.sum(past.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(past, ends[None, :], 0), 1))
        total = tl.maximum(total, tl.max(ends, 0))
    zero = tl.arange(0, 1)
    tl.store(offsets_ptr + zero, zero, mask=zero + tl.program_id(0) == 0)
    inside = (i < total) & (i < capacity)
    start = tl.load(cu_ptr + seq, mask=inside, other=0) + (i - before) * C
    rows = tl.minimum(tl.load(cu_ptr + seq + 1, mask=inside, other=0) - start, C)
    tl.store(table_ptr + 3 * i, tl.where(inside, start, 0), mask=i < capacity)
    tl.store(table_ptr + 3 * i + 1, tl.where(inside, rows, 0), mask=i < capacity)
    tl.store(table_ptr + 3 * i + 2, (before + seq) // 2 * 2 + i - before, mask=i < capacity)


def fill(cu: Tensor, table: Tensor, offsets: Tensor) -> None:
    """table and offsets `=`."""
    sequences, capacity = cu.numel() - 1, table.shape[0]
    chunk_index_kernel[(max(1, -(-capacity // ROWS)),)](
        cu, table, offsets, sequences, capacity,
        ROWS=ROWS, BLOCK=min(BLOCK, triton.next_power_of_2(max(sequences, 1))), num_warps=4,
    )  # fmt: skip
