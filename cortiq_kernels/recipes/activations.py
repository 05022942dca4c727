"""How much of a layer a training keeps for its backward, from what is asked for and what is free.

"auto" takes the fastest policy whose peak is at most `SHARE` of what is free (predictions are right within 10 %), and
the smallest where none is. Results are the same bits in each (`step/buffers.py`), so a resumed run may take another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from cortiq_kernels.report.results import size
from cortiq_kernels.step import POLICIES, Policy

SHARE = 0.9


class Activations(NamedTuple):
    """The policy, why, and what a dry run says of it; `peaks`: bytes at the peak of the whole run, by policy."""

    policy: Policy
    reason: str = ""
    peaks: Mapping[str, int] = {}

    @property
    def text(self) -> str:
        """One line for people."""
        sizes = ", ".join(f"{name} {size(peak)}" for name, peak in self.peaks.items())
        return f"{self.policy}: {self.reason}; at the peak {sizes}"


def smallest(asked: str) -> Policy:
    """The policy that a first look at memory counts with: the one that is asked for, or the smallest of all."""
    return next((p for p in POLICIES if p == asked), POLICIES[-1])


def choose_activations(asked: str, memory: Callable[[Policy], Mapping[str, int]]) -> Activations:
    """`memory` says what a run with a policy takes: its "peak", and what is "free"."""
    said = {p: memory(p) for p in POLICIES}
    peaks: dict[str, int] = {p: said[p]["peak"] for p in POLICIES}
    free = said[POLICIES[-1]]["free"]
    if asked != "auto":
        return Activations(smallest(asked), "asked for", peaks)
    most = int(SHARE * free)
    fits = [p for p in POLICIES if peaks[p] <= most]
    if fits:
        return Activations(fits[0], f"the fastest within {SHARE:.0%} of the {size(free)} that are free", peaks)
    # Where something else makes the peak, such as the teacher, keeping less would not help.
    least = next(p for p in POLICIES if peaks[p] <= peaks[POLICIES[-1]])
    return Activations(least, f"the least; none is within {SHARE:.0%} of the {size(free)} that are free", peaks)


def how_to_fit(asked: str) -> str:
    """What to do about a plan that does not fit."""
    other = "" if asked in ("auto", POLICIES[-1]) else ", or leave --activations out"
    return f"Lower --batch or --window{other}."
