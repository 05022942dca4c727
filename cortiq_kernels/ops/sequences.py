"""Which sequence a token belongs to, and where in it.

`cu_seqlens` [S+1] int32 holds the starts of S packed sequences and, last, the number of tokens N.  It never decreases;
a value that repeats is an empty sequence, legal anywhere, so the tensor may be padded to a fixed length with N.

    seq_ids[t]   = s  with  cu_seqlens[s] <= t < cu_seqlens[s + 1]
    positions[t] = t - cu_seqlens[seq_ids[t]]

| tensor | shape | dtype | |
|---|---|---|---|
| cu_seqlens | [S+1] | int32 or int64 | on the device of the data |
| seq_ids | [N] | int64 | skips the numbers of empty sequences |
| positions | [N] | int64 | 0 at the start of a sequence |

Everything stays on the device: the values of `cu_seqlens` are never read by the host, so they are not checked either.
One index serves every layer of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import checks


class SeqIndex(NamedTuple):
    """Per-token view of `cu_seqlens`; see `sequence_index`."""

    seq_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, 0 at a sequence start


def sequence_index(cu_seqlens: Tensor, n: int) -> SeqIndex:
    """Sequence number and position of each of `n` tokens, without a host synchronisation.

    Args:
        cu_seqlens: [S+1] int32 or int64, non-decreasing, first 0, last `n`.
        n: number of tokens (host int).

    Returns:
        `SeqIndex` of two fresh int64 tensors [n] on the device of `cu_seqlens`.

    Raises:
        ValueError: `cu_seqlens` is not a vector of at least one integer of the two types, or `n` is negative.
    """
    check_cu_seqlens("sequence_index", cu_seqlens)
    if n < 0:
        checks.fail("sequence_index", "n", "at least 0", n, "pass the number of tokens")
    token = torch.arange(n, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    seq_ids = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    positions = token.long() - cu_seqlens.long()[seq_ids]
    return SeqIndex(seq_ids, positions)


def token_positions(op: str, cu_seqlens: Tensor, n: int, index: SeqIndex | None) -> Tensor:
    """[n] int64 positions, from the caller's `index` when there is one. Raises ValueError when it does not fit."""
    if index is None:
        return sequence_index(cu_seqlens, n).positions
    fix = "pass sequence_index(cu_seqlens, N), or leave it out"
    checks.shape(op, "index.positions", index.positions, (n,), f"[{n}]", fix)
    checks.dtype(op, "index.positions", index.positions, (torch.int64,), fix)
    checks.same_device(op, "index.positions", index.positions, "cu_seqlens", cu_seqlens)
    return index.positions


def check_cu_seqlens(op: str, cu_seqlens: Tensor, like: Tensor | None = None) -> None:
    """Raise ValueError unless `cu_seqlens` has the rank, dtype and device that `op` expects (values are not read)."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0 or cu_seqlens.dtype not in checks.INTS:
        got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        fix = "for one sequence of n tokens pass torch.tensor([0, n], dtype=torch.int32)"
        checks.fail(op, "cu_seqlens", "int32 [S+1]", got, fix)
    if like is not None:
        checks.same_device(op, "cu_seqlens", cu_seqlens, "the tokens", like)
