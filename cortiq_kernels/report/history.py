"""What a run log says, gathered: series over steps, the best evaluation, how the run ended.

A run that was stopped and resumed goes on in its log (runlog.py), which has one start and every step once. Where the
logs of its parts were joined by hand (each had its own `--log`), steps that were done again after the last checkpoint
appear twice; the later one counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Series = list[tuple[int, float]]


@dataclass
class History:
    """A run. `state` is done, failed or open (stopped without a word, or still running), `state_text` says it."""

    recipe: str = "run"
    version: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    held: dict[int, float] = field(default_factory=dict)
    pruned: dict[int, float] = field(default_factory=dict)
    pressure: dict[int, float] = field(default_factory=dict)
    skips: list[dict[str, Any]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    scores: list[dict[str, Any]] = field(default_factory=list)
    chosen: tuple[int, float] | None = None
    loss_name: str = "loss"
    of: int = 0
    began: float | None = None
    ended: float | None = None
    error: str = ""
    starts: int = 0

    @staticmethod
    def of_events(events: Sequence[Mapping[str, Any]]) -> History:
        """The history of a log's events, in order."""
        h = History()
        for e in events:
            h._add(dict(e))
        h.steps = dict(sorted(h.steps.items()))
        h.held = dict(sorted(h.held.items()))
        return h

    def _add(self, e: dict[str, Any]) -> None:
        kind, time = e.get("event"), e.get("time")
        if isinstance(time, int | float):
            self.began = time if self.began is None else self.began
            self.ended = time
        self.error = ""  # only the last line's counts: a resumed run went on
        self.loss_name = e.get("loss_name", self.loss_name)
        if kind == "start":
            self.starts += 1
            self.recipe, self.version = e.get("recipe", self.recipe), e.get("version", "")
            self.settings, self.versions = e.get("settings", {}), e.get("versions", {})
            self.layers, self.scores, self.result = [], [], {}
        elif kind == "plan":
            self.plan = e
            self.of = e.get("steps", self.of)
            self.loss_name = e.get("loss", self.loss_name)
        elif kind == "note":
            if e["text"] not in self.notes:
                self.notes.append(e["text"])
        elif kind == "step":
            self.steps[e["step"]] = e
            self.of = e["of"]
        elif kind == "eval":
            self.held[e["step"]] = _value(e["loss"])
            if "pruned" in e:  # masks: the best so far comes with each, for the lowest loss is that of few closed gates
                self.pruned[e["step"]], self.pressure[e["step"]] = e["pruned"], e["l1"]
                self.chosen = None if e["best_step"] is None else (e["best_step"], _value(e["best"]))
            self.of = e["of"]
        elif kind == "skip":
            self._skip(e)
        elif kind == "layer":
            self.layers.append(e)
        elif kind == "score":
            self.scores.append(e)
        elif kind == "done":
            self.result = {k: v for k, v in e.items() if k not in ("event", "time")}
        elif kind == "error":
            self.error = e["text"]

    def _skip(self, e: dict[str, Any]) -> None:
        """A resumed run repeats skips after its checkpoint: their running number tells."""
        self.skips = [s for s in self.skips if s["skipped"] < e["skipped"]] + [e]

    @property
    def losses(self) -> Series:
        return [(d, _value(e["loss"])) for d, e in self.steps.items()]

    @property
    def rates(self) -> Series:
        return [(d, _value(e["rate"])) for d, e in self.steps.items()]

    @property
    def norms(self) -> Series:
        return [(d, _value(e["norm"])) for d, e in self.steps.items()]

    @property
    def seconds(self) -> list[float]:
        return [e["seconds"] for e in self.steps.values()]

    @property
    def evaluations(self) -> Series:
        return list(self.held.items())

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, loss) of the lowest held-out loss, the earliest of equals; None without a finite one. Of masks: what
        the run itself chose.
        """
        if self.pruned:
            return self.chosen
        finite = [(loss, d) for d, loss in self.held.items() if math.isfinite(loss)]
        return (min(finite)[1], min(finite)[0]) if finite else None

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    @property
    def state(self) -> str:
        return "done" if self.result else "failed" if self.error else "open"

    @property
    def state_text(self) -> str:
        again = f" (started {self.starts} times)" if self.starts > 1 else ""
        if self.result:
            return "done" + again
        return (f"ended early: {self.error}" if self.error else "not ended: still running, or stopped") + again


def _value(x: float | None) -> float:
    """A logged number; null is one that was not finite."""
    return math.nan if x is None else float(x)
