"""Typed look-ups in a parsed `config.json`, flat or with the text model under `text_config`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cortiq_kernels.reading import Refusal, brief

#: limits of what a config may claim, so that nothing is built from a number that no model has
LARGEST, MOST_LAYERS = 2**31 - 1, 4096


class ModelError(Refusal):
    """A model directory (or config, or place) that cannot be used; says what, got, expected, and how to fix it."""


def need(ok: bool, what: str, got: Any, expected: str, fix: str) -> None:
    """Raise `ModelError` in the package's form unless `ok`."""
    if not ok:
        raise ModelError(f"{what}: got {brief(got)}; expected {expected}. {fix}")


class Config:
    """Typed look-ups in a config; in a nested one a key may be in `text_config`, at the root, or equal in both."""

    def __init__(self, config: Mapping[str, Any]):
        self.nested = isinstance(config.get("text_config"), Mapping)
        self.text: Mapping[str, Any] = config["text_config"] if self.nested else config
        #: (where, mapping) pairs, the first wins where a disagreement is allowed
        self.places = [("text_config", self.text), ("the root", config)] if self.nested else [("config.json", config)]

    def get(self, key: str, default: Any = None) -> Any:
        """Value of `key`; null counts as absent. Refuses different values at the two levels."""
        found = [(where, place[key]) for where, place in self.places if place.get(key) is not None]
        for where, value in found[1:]:
            need(
                value == found[0][1] and isinstance(value, bool) == isinstance(found[0][1], bool),
                f"config.json: {key}",
                f"{found[0][1]!r} in {found[0][0]} and {value!r} at {where}",
                "one value",
                "Delete the wrong one.",
            )
        return found[0][1] if found else default

    def size(self, key: str, default: int | None = None, most: int = LARGEST) -> int:
        """A positive integer, at most `most`."""
        value = self.get(key, default)
        need(
            value is not None,
            f"config.json: {key}",
            "nothing",
            "a positive integer",
            "Take the model's own config.json.",
        )
        need(
            is_int(value) and 0 < value <= most, f"config.json: {key}", repr(value),
            f"a positive integer, at most {most}", "Mend config.json.",
        )  # fmt: skip
        return int(value)

    def real(self, key: str, default: float) -> float:
        """A positive, finite number."""
        value = self.get(key, default)
        need(
            is_real(value) and value > 0, f"config.json: {key}", repr(value), "a positive number", "Mend config.json."
        )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.get(key, default)
        need(isinstance(value, bool), f"config.json: {key}", repr(value), "true or false", "Mend config.json.")
        return value


def is_int(x: Any) -> bool:
    """An integer that is not a truth value."""
    return isinstance(x, int) and not isinstance(x, bool)


def is_real(x: Any) -> bool:
    """A finite number; an integer only where a float can hold it."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        return False
    return math.isfinite(x) if isinstance(x, float) else abs(x) < 2**1023
