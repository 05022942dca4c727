"""Packed sequences as a list of chunks, made on the device.

Sequence s of length l_s is cut at its own start into ceil(l_s / CHUNK) chunks; an empty one has none.

| tensor | shape | dtype | |
|---|---|---|---|
| table | [cap, 3] | int32 | first token, rows (1 .. CHUNK), place of each chunk in order; rows 0 past the last |
| offsets | [S+1] | int32 | chunks before each sequence; the last entry is their number |

cap = floor(N / CHUNK) + S bounds the number of chunks for any lengths, so that the host never reads one.

A chunk's place is where its entering state is kept, in two tensors of half = floor((cap + S) / 2) rows: 2 row + 1 for
the odd chunks of a sequence, else 2 row.  Chunk c of sequence s, before which there are f chunks, has row
floor((f + s) / 2) + floor(c / 2), which no two chunks of one kind share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..triton_gate import launching_on, use_triton
from .layout import CHUNK


class ChunkIndex(NamedTuple):
    """See the module docstring."""

    table: Tensor  # [cap, 3] int32
    offsets: Tensor  # [S+1] int32
    cu_seqlens: Tensor  # [S+1] int32

    @property
    def capacity(self) -> int:
        return self.table.shape[0]

    @property
    def sequences(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def half(self) -> int:
        return (self.capacity + self.sequences) // 2


def chunk_index(cu_seqlens: Tensor, n: int, *, backend: str = "auto") -> ChunkIndex:
    """Chunks of the `n` tokens that `cu_seqlens` [S+1] divides; fresh tensors on its device, no synchronisation.

    `backend`: "auto" takes a Triton kernel on CUDA, "torch" and "triton" insist.
    """
    cu = cu_seqlens.to(torch.int32).contiguous()
    s = cu.numel() - 1
    if use_triton("chunk_index", cu, backend):
        from .chunks_triton import fill

        table = torch.empty(n // CHUNK + s, 3, dtype=torch.int32, device=cu.device)
        offsets = torch.empty_like(cu)
        with launching_on(cu):
            fill(cu, table, offsets)
        return ChunkIndex(table, offsets, cu)
    counts = (cu.diff() + (CHUNK - 1)).div(CHUNK, rounding_mode="floor")
    offsets = torch.zeros_like(cu)
    torch.cumsum(counts, 0, dtype=torch.int32, out=offsets[1:])
    cap = n // CHUNK + s
    i = torch.arange(cap, dtype=torch.int32, device=cu.device)
    seq = torch.searchsorted(offsets[1:], i, right=True).clamp_(max=max(s - 1, 0))  # [cap] skips empty sequences
    table = torch.zeros(cap, 3, dtype=torch.int32, device=cu.device)
    if cap:
        before = offsets[seq]
        past = i - before
        torch.add(cu[seq], past * CHUNK, out=table[:, 0])
        torch.add((before + seq.int()).div(2, rounding_mode="floor") * 2, past, out=table[:, 2])
        rows = (cu[seq + 1] - table[:, 0]).clamp_(0, CHUNK)
        torch.where(i < offsets[-1], rows, rows.new_zeros(()), out=table[:, 1])
    return ChunkIndex(table, offsets, cu)
