"""Which neurons of a layer stay: the most important, at a width that GPUs like.

    width    neurons alive (at least 1), rounded up to a multiple of `align`, at most F
    uniform  the largest of these over all layers, for all (at most the narrowest F)

In a looped stack every visit of a layer has its own mask, and the layer holds what any visit keeps, rounded up again.
A neuron that n visits can use starts so that their gates multiply to what one gate starts at, σ(2):

    init logit = logit(σ(2)^(1/n))        2.000000, 2.725383, 3.141518 for 1, 2, 3
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cortiq_kernels.recipes.repair import keep_top
from cortiq_kernels.step.gates import open_gates


def mask_init_logit(loops: int) -> float:
    """The logit that a gate starts with in a stack of `loops` passes."""
    s = (1 / (1 + math.exp(-2.0))) ** (1 / loops)
    return math.log(s) - math.log1p(-s)


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


def share_of_all(logits: Sequence[Tensor], layers: int, keep: float) -> list[int]:
    """Neurons of each of `layers` physical layers that are among this share of the whole model's with the largest
    logits, of any visit; of equals the first, from layer 0 on.
    """
    best = [torch.stack(list(logits[i::layers])).amax(0) for i in range(layers)]
    flat = torch.cat(best)
    chosen = torch.zeros(len(flat), dtype=torch.bool).index_fill_(
        0, keep_top(flat, max(1, round(keep * len(flat)))), True
    )
    return [int(part.sum()) for part in chosen.split([len(b) for b in best])]


def neuron_ranking(kept: Sequence[Tensor], logits: Sequence[Tensor], layers: int) -> list[Tensor]:
    """Scores [F] of each of `layers` physical layers: the largest logit of any visit, after those that a visit keeps.
    Of one pass the logits as they are.
    """
    if len(kept) == layers:
        return list(logits)
    out, whole = [], unions(kept, layers)
    for i in range(layers):
        best = torch.stack(list(logits[i::layers])).amax(0)
        out.append(torch.where(whole[i], best, best - (best.max() - best.min() + 1)))
    return out


def unions(kept: Sequence[Tensor], layers: int) -> list[Tensor]:
    """[F] bool of each of `layers` physical layers: what any visit keeps."""
    return [torch.stack(list(kept[i::layers])).any(0) for i in range(layers)]


def keep_neurons(
    kept: Sequence[Tensor], logits: Sequence[Tensor], layers: int, align: int, uniform: bool
) -> list[Tensor]:
    """The neurons that each of `layers` physical layers holds, ascending int64: what any of its visits keeps, and the
    largest logits of any visit to fill up. `kept` [F] bool and `logits` [F] of each virtual layer; of one pass the
    result is `kept` as it is.
    """
    if len(kept) == layers:
        return [k.nonzero().flatten() for k in kept]
    whole = unions(kept, layers)
    counts = keep_widths([int(u.sum()) for u in whole], [len(u) for u in whole], align, uniform)
    return [keep_top(s, n) for s, n in zip(neuron_ranking(kept, logits, layers), counts, strict=True)]
