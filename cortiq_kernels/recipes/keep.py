"""Which neurons of a layer stay: the most important, at a width that GPUs like.

    width    neurons alive (at least 1), rounded up to a multiple of `align`, at most F
    uniform  the largest of these over all layers, for all (at most the narrowest F)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cortiq_kernels.recipes.repair import keep_top
from cortiq_kernels.step.gates import open_gates


def keep_widths(alive: Sequence[int], widths: Sequence[int], align: int, uniform: bool) -> list[int]:
    """Neurons to keep of each layer, `alive` of its `widths` being needed."""
    rounded = [min(-(-max(n, 1) // align) * align, f) for n, f in zip(alive, widths, strict=True)]
    return [min(max(rounded), *widths)] * len(rounded) if uniform else rounded


def keep_masks(logits: Sequence[Tensor], tau: float, align: int, uniform: bool) -> list[Tensor]:
    """[F] bool of each layer, from the logits of its gates: those with the largest, `keep_widths` of them."""
    widths = [len(m) for m in logits]
    counts = keep_widths([int(open_gates(m, tau).sum()) for m in logits], widths, align, uniform)
    return [
        torch.zeros(len(m), dtype=torch.bool, device=m.device).index_fill_(0, keep_top(m, n), True)
        for m, n in zip(logits, counts, strict=True)
    ]
