"""The Gram accumulator as PyTorch operators, for torch.compile and code that calls operators by name.

    torch.ops.cortiq.gram_accumulate_(gram, x, row_index, row_weight) -> ()      changes gram
    torch.ops.cortiq.gram_finalize(gram, n) -> Tensor [n, n]

Importing this module registers them; nothing else in the package imports it. Formulas, shapes and errors are those of
ops/gram.py. Neither has a gradient: tensors count as detached. Under torch.compile each is one opaque call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortiq_kernels.ops import gram as op


def gram_accumulate_(
    gram: Tensor, x: Tensor, *, row_index: Tensor | None = None, row_weight: Tensor | None = None
) -> Tensor:
    """gram += the Gram of x [T, n], on packed tiles of its upper triangle; returns `gram`.

    As `ops.gram.gram_accumulate_`: row_index [R] says which rows count, row_weight [R] (or [T]) how much.
    """
    detached = (None if t is None else t.detach() for t in (row_index, row_weight))
    torch.ops.cortiq.gram_accumulate_(gram.detach(), x.detach(), *detached)
    return gram


def gram_finalize(gram: Tensor, n: int) -> Tensor:
    """The whole matrix G [n, n] in the dtype of `gram` [tiles, 128, 128], exactly symmetric."""
    return torch.ops.cortiq.gram_finalize(gram.detach(), n)


@torch.library.custom_op(
    "cortiq::gram_accumulate_",
    mutates_args=("gram",),
    schema="(Tensor(a!) gram, Tensor x, Tensor? row_index=None, Tensor? row_weight=None) -> ()",
)
def _accumulate(
    gram: Tensor, x: Tensor, row_index: Tensor | None = None, row_weight: Tensor | None = None
) -> None:
    op.gram_accumulate_(gram, x, row_index=row_index, row_weight=row_weight)


@_accumulate.register_fake
def _(gram: Tensor, x: Tensor, row_index: Tensor | None = None, row_weight: Tensor | None = None) -> None:
    return None


@torch.library.custom_op("cortiq::gram_finalize", mutates_args=(), schema="(Tensor gram, SymInt n) -> Tensor")
def _finalize(gram: Tensor, n: int) -> Tensor:
    return op.gram_finalize(gram, n)


@_finalize.register_fake
def _(gram: Tensor, n: int) -> Tensor:
    return gram.new_empty((n, n))
