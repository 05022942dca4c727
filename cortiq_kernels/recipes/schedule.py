"""Learning rates over T accepted steps, d = 1 .. T, and the growing window of the genesis schedule.

Cosine with warm-up (`cosine_rate`): w = max(1, floor(T * warm)),

    d <= w:  lr * d / w
    d >  w:  lr * (0.1 + 0.45 * (1 + cos(pi * p))),  p = (d - w) / max(T - w, 1)        ends at 10 % of lr

The warm-up is long on purpose: Adam's first steps move every weight by about lr at once, whatever its gradient (all
layers of a 0.8B model at lr 1e-5 after 3 warm-up steps raised the held-out KL from 0.160 to 0.196).

Genesis (`genesis_rate`, `genesis_from`, `genesis_factor`), no warm-up; epoch = floor(steps accepted before this one
/ n):

    rate    lr * (1 - exp(-3 d / T)) * exp(-d / (2 T))
    window  layers from = max(L - ceil(f * L), train_from) .. L-1 train, f = 12/64, 24/64, 40/64, 1 for epochs 0, 1,
            2, >= 3
    factor  exp(-kappa * (l - from)) of layer l, kappa = 0.1 / (epoch + 1)

n is the steps of a pass over the train batches: their number over `accumulate`, rounded up (the last step of a pass
takes what is left). `epochs` and `warm` count as the decimals that they are written as: 0.07 passes of 100 steps
are 7 steps and 0.29 of 100 are 29, where products of floats would give 8 and 28.
"""

from __future__ import annotations

import math
from fractions import Fraction

_GENESIS_64THS = (12, 24, 40, 64)


def total_steps(epochs: float, per_epoch: int) -> int:
    """T = max(1, ceil(epochs * n)) accepted steps."""
    return max(1, math.ceil(decimal(epochs) * per_epoch))


def warm_steps(total: int, warm: float) -> int:
    """w = max(1, floor(T * warm)): steps that warm up."""
    return max(1, math.floor(decimal(warm) * total))


def cosine_rate(lr: float, d: int, total: int, warm: float) -> float:
    """Rate of accepted step d (1-based) of `total`, with a warm-up over the fraction `warm` of the steps."""
    warm_n = warm_steps(total, warm)
    if d <= warm_n:
        return lr * d / warm_n
    p = (d - warm_n) / max(total - warm_n, 1)
    return lr * (0.1 + 0.45 * (1.0 + math.cos(math.pi * p)))


def genesis_rate(lr: float, d: int, total: int) -> float:
    """Genesis rate of accepted step d (1-based) of `total`, before the per-layer factor."""
    return lr * (1.0 - math.exp(-3.0 * d / total)) * math.exp(-d / (2.0 * total))


def genesis_from(epoch: int, n_layers: int, train_from: int = 0) -> int:
    """First layer that trains in `epoch` (0-based)."""
    share = _GENESIS_64THS[min(epoch, len(_GENESIS_64THS) - 1)]
    return max(n_layers - -(-share * n_layers // 64), train_from)


def genesis_factor(epoch: int, layer: int, from_layer: int) -> float:
    """Factor on the rate of `layer` (>= from_layer) in `epoch`: the window's first layer learns fastest."""
    return math.exp(-0.1 / (epoch + 1) * (layer - from_layer))


def decimal(x: float) -> Fraction:
    """The shortest decimal that is read as `x`, exactly."""
    return Fraction(repr(float(x)))
