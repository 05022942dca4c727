"""Packed sequences as lists of blocks for the attention kernels, made on the device.

Sequence s of length l_s is cut at its own start into ceil(l_s / size) blocks; an empty one has none. A list is
[cap, 4] int32: first token, its place in its sequence, tokens (1 .. size; 0 past the last block) and the sequence's
length. cap = floor(N / size) + S holds for any lengths, so that the host never reads one. The blocks with most to do
come first (of queries those with most keys before them, of keys those with most queries after), so that none is left
over when the others are done.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import configs, triton_gate
from . import sdpa
from .dims import MAX_HEAD, AttnDims, pack, tile_width


class AttnBlocks(NamedTuple):
    """The lists of one batch."""

    forward: Tensor  # of queries
    queries: Tensor  # of the backward
    keys: Tensor  # of the backward


def attention_blocks(cu_seqlens: Tensor, n: int, dims: AttnDims) -> AttnBlocks:
    """Lists for the `n` tokens that `cu_seqlens` [S+1] divides; fresh tensors on its device, no synchronisation."""
    fwd, bwd = (configs.launch("attention", tile_width(dims.hd), name)["ROWS"] for name in ("softmax", "softmax_bwd"))
    share = pack(dims)
    forward = block_list(cu_seqlens, n, fwd // share, keys=False)
    queries = forward if fwd == bwd else block_list(cu_seqlens, n, bwd // share, keys=False)
    return AttnBlocks(forward, queries, block_list(cu_seqlens, n, bwd, keys=True))


def kernel_blocks(cu_seqlens: Tensor, n: int, window: int, dims: AttnDims) -> AttnBlocks | None:
    """The lists, for a caller of many layers; None where no layer will take them (on a CPU, for whole windows)."""
    whole = sdpa.dense(cu_seqlens, n, window) and not torch.are_deterministic_algorithms_enabled()
    if whole or not cu_seqlens.is_cuda or dims.hd > MAX_HEAD or triton_gate.missing():
        return None
    return attention_blocks(cu_seqlens, n, dims)


def block_list(cu_seqlens: Tensor, n: int, size: int, *, keys: bool) -> Tensor:
    """One list of blocks of `size` tokens, in the order of `keys` or of queries."""
    cu = cu_seqlens.to(torch.int32).contiguous()
    s = cu.numel() - 1
    lengths = cu.diff()
    ends = lengths.add(size - 1).div(size, rounding_mode="floor").cumsum(0, dtype=torch.int32)  # [S]
    cap = n // size + s
    i = torch.arange(cap, dtype=torch.int32, device=cu.device)
    if cap == 0:
        return i.new_empty(0, 4)
    seq = torch.searchsorted(ends, i, right=True).clamp_(max=s - 1)  # [cap] skips empty sequences
    length = lengths[seq]
    blocks = length.add(size - 1).div(size, rounding_mode="floor")
    place = (i - (ends[seq] - blocks)) * size
    rows = torch.where(i < ends[-1], (length - place).clamp(0, size), 0)
    work = torch.where(rows > 0, length - place if keys else place, -1)
    order = work.sort(descending=True, stable=True).indices
    return torch.stack([cu[seq] + place, place, rows, length], dim=1)[order]
