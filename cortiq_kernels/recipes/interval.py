"""How often a checkpoint is written: after so many steps, or after so much time."""

from __future__ import annotations

import re
from typing import NamedTuple

from cortiq_kernels.recipes.errors import refuse

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Interval(NamedTuple):
    """One of `steps` and `seconds` is set; neither means never."""

    steps: int | None = None
    seconds: float | None = None

    @property
    def never(self) -> bool:
        """Whether no checkpoint is wanted at all."""
        return self.steps is None and self.seconds is None

    def due(self, steps: int, seconds: float) -> bool:
        """Whether it has passed, `steps` and `seconds` after the last checkpoint."""
        if self.steps is not None:
            return steps >= self.steps
        return self.seconds is not None and steps > 0 and seconds >= self.seconds


def parse_interval(text: str, what: str = "checkpoint_every") -> Interval:
    """`"500"` is steps, `"90s"`, `"10m"` and `"2h"` are times, `"off"` is never. InputError for anything else."""
    if text == "off":
        return Interval()
    if re.fullmatch(r"[0-9]{1,9}", text) and int(text) > 0:
        return Interval(steps=int(text))
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smh])", text)
    if found and float(found[1]) > 0:
        return Interval(seconds=float(found[1]) * _UNITS[found[2]])
    flag = "--" + what.rpartition(" ")[2].replace("_", "-")
    raise refuse(what, repr(text), "steps (500), a time (90s, 10m, 2h) or off", f"Set {flag}.")
