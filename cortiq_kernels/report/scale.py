"""Axes: round ticks for a range, their labels, and where a value falls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Scale(NamedTuple):
    """Values lo .. hi, spread over pixels a .. b; `log`: by their logarithm."""

    lo: float
    hi: float
    a: float
    b: float
    ticks: list[float]
    labels: list[str]
    log: bool

    def at(self, value: float) -> float:
        """Pixel of a value; values outside lie on the edge."""
        value = min(max(value, self.lo), self.hi)
        if self.log:
            share = math.log(value / self.lo) / math.log(self.hi / self.lo)
        else:
            share = (value - self.lo) / (self.hi - self.lo)
        return self.a + share * (self.b - self.a)


def linear(values: Sequence[float], a: float, b: float) -> Scale:
    """A scale over `values` (finite, at least one) whose ends are ticks, 3 to 7 of them."""
    lo, hi = min(values), max(values)
    if hi - lo <= 1e-9 * max(abs(lo), abs(hi)):  # so close that no label could tell them apart
        pad = abs(lo) / 10 or 1.0
        lo, hi = lo - pad, hi + pad
    step = _round_step((hi - lo) / 5)
    first, last = math.floor(lo / step), math.ceil(hi / step)
    ticks = [i * step for i in range(first, last + 1)]
    return Scale(ticks[0], ticks[-1], a, b, ticks, labels(ticks, step), False)


def steps_axis(last: int, a: float, b: float) -> Scale:
    """A scale of steps 0 .. last that ends at `last` exactly; ticks are round numbers."""
    last = max(last, 1)
    step = max(1, round(_round_step(last / 7)))
    ticks = [float(t) for t in range(0, last + 1, step)]
    return Scale(0.0, float(last), a, b, ticks, [f"{int(t):,}" for t in ticks], False)


def logarithmic(values: Sequence[float], a: float, b: float) -> Scale:
    """A logarithmic scale over positive `values`: ends and ticks are 1, 2 or 5 times a power of ten, or powers of ten
    where there are more than 7.
    """
    lo, hi = min(values), max(values)
    exponents = range(math.floor(math.log10(lo)), math.ceil(math.log10(hi)) + 1)
    fine = [m * 10.0**e for e in exponents for m in (1, 2, 5)]
    first = max((t for t in fine if t <= lo), default=lo)
    last = min((t for t in fine if t >= hi), default=hi)
    ticks = [t for t in fine if first <= t <= last]
    if len(ticks) > 7:
        every = max(1, len(exponents) // 6)
        ticks = [10.0**e for e in exponents][::every]
        first, last = min(first, ticks[0]), max(last, ticks[-1])
    return Scale(first, last, a, b, ticks, [short(t) for t in ticks], True)


def labels(ticks: Sequence[float], step: float) -> list[str]:
    """Labels of evenly spaced ticks: as many digits as tell them apart, an exponent where that is shorter."""
    largest = max(abs(t) for t in ticks)
    if largest >= 1e6 or (0 < largest < 1e-3):
        digits = max(0, math.floor(math.log10(largest)) - math.floor(math.log10(step) + 1e-9))
        return ["0" if t == 0 else f"{t:.{digits}e}".replace("e-0", "e-").replace("e+0", "e") for t in ticks]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{t:,.{digits}f}" for t in ticks]


def short(value: float) -> str:
    """A number in few characters: 0.002, 50, 3e-7."""
    text = f"{value:.3g}"
    return text.replace("e-0", "e-").replace("e+0", "e")


def _round_step(rough: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
