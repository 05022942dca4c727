"""Memory of a training step that the head's slab of logits may take: gradients that are not written yet.

The head runs between the forward pass and the backward pass. In the first micro-batch of a step (`=`) the backward then
writes every gradient of the trained layers anew, so until then their memory is nobody's. In 4B that is 14 GB, of which
the slab takes 2. Later micro-batches add to gradients that are there, and take a slab of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortiq_kernels.model.layout import Layout
from cortiq_kernels.ops.topk_kl import CHUNK_ROWS, slab_stride


def spare_run(layout: Layout, *, train: str | None, train_from: int, mixers_from: int) -> tuple[int, int]:
    """[start, stop) of the flat gradient: the longest run of whole matrices of layers, no gap among them, that the
    backward of a step writes with `=`. Empty where a trained mixer below `mixers_from` keeps its gradient of 0.

    Gaps between tensors hold zeros that the update relies on, and embedding and head are written by the head itself
    (or before it).
    """
    best = (0, 0)
    if train != "mlp" and mixers_from > train_from:
        return best
    run = best
    for name, span in layout.trained_matrices.items():
        if name.startswith("layers."):
            run = (run[0] if run[1] == span.start else span.start, span.stop)
            best = max(best, run, key=lambda r: r[1] - r[0])
    return best


def spare_elements(layout: Layout, *, train: str | None, train_from: int, mixers_from: int = 0) -> int:
    """Length of `spare_run`."""
    start, stop = spare_run(layout, train=train, train_from=train_from, mixers_from=mixers_from)
    return stop - start


def slab_rows(n: int) -> int:
    """Rows of the slab of a step of `n` tokens."""
    return min(CHUNK_ROWS, n)


def slab_in(memory: Tensor, n: int, vocab: int, dtype: torch.dtype) -> Tensor | None:
    """A slab for steps of `n` tokens in flat `memory` of another dtype; None where it does not fit."""
    rows, stride = slab_rows(n), slab_stride(vocab)
    if memory.nbytes < rows * stride * dtype.itemsize:
        return None
    return memory.view(dtype)[: rows * stride].view(rows, stride)


def slab_fits(elements: int, n: int, vocab: int, dtype: torch.dtype, acc: torch.dtype) -> bool:
    """Whether `slab_in` finds room in a run of so many `elements` of the accumulation dtype."""
    return elements * acc.itemsize >= slab_rows(n) * slab_stride(vocab) * dtype.itemsize
