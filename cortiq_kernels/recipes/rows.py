"""Scored rows of a batch through a head, a bounded slab of logits at a time."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from cortiq_kernels.ops.linear import linear_fwd

_SLAB = 1 << 25  # elements of a slab of logits: 128 MiB in float32


def slab_rows(vocab: int) -> int:
    """Rows whose logits are held at a time."""
    return max(1, _SLAB // vocab)


def logits_of(rows: Tensor, head: Tensor, chunk: int | None = None) -> Iterator[tuple[int, int, Tensor]]:
    """(a, b, logits [b - a, V] of rows[a:b]) for rows [R, H] and head [V, H], in their dtype; the whole is never
    held.
    """
    step = chunk or slab_rows(head.shape[0])
    for a in range(0, rows.shape[0], step):
        b = min(a + step, rows.shape[0])
        yield a, b, linear_fwd(rows[a:b], head)
