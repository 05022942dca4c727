"""Runs that are stopped by a signal at a given event and resumed, and what must not differ from a run that was not."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from cortiq_kernels.recipes.checkpoint_dir import CheckpointDir
from cortiq_kernels.recipes.outputs import log_path
from cortiq_kernels.report.runlog import RunLog, read_log

TIMES = (
    "time", "seconds", "tokens_per_s", "left_s", "seconds_per_step", "seconds_per_step_a", "seconds_per_step_b",
    "tokens_per_second", "teacher_seconds",
)  # fmt: skip


def go(recipe: ModuleType, cfg: Any, stop_at: tuple[str, int] | None = None) -> list[dict]:
    """Run with a log beside the output; at event `stop_at` (kind, step) SIGTERM arrives. The events."""
    events: list[dict] = []

    def watch(event: dict) -> None:
        events.append(event)
        if stop_at and (event["event"], event.get("step")) == stop_at:
            signal.raise_signal(signal.SIGTERM)

    with RunLog(log_path(cfg.recipe, cfg), {"recipe": cfg.recipe}) as log:

        def both(event: dict) -> None:
            log(event)
            watch(event)

        report = recipe.run(cfg, both)
        log({"event": "done", **dataclasses.asdict(report)})
    return events


def files(place: Path) -> dict[str, bytes]:
    """The contents of an output."""
    if place.is_dir():
        return {p.name: p.read_bytes() for p in sorted(place.iterdir())}
    return {"": place.read_bytes()}


def lines(cfg: Any) -> list[dict]:
    """The log's training and what came after it, without times and places."""
    log = read_log(log_path(cfg.recipe, cfg))
    assert [e["event"] for e in log[:2]] == ["start", "plan"]
    kept = [e for e in log if e["event"] in ("step", "eval", "skip", "write", "done", "error")]
    places = ("out", "notes", "masks", "overlay")
    return [{k: v for k, v in e.items() if k not in (*TIMES, *places)} for e in kept]


def same(a: Any, b: Any) -> None:
    """Two configs' outputs and logs are the same, and the second left no checkpoint."""
    assert files(a.out) == files(b.out)
    assert lines(a) == lines(b)
    assert not CheckpointDir(b.out).path.exists()


def spoil(monkeypatch: pytest.MonkeyPatch, trainer: type, grad: Callable[[Any], Tensor]) -> list[None]:
    """The third and the fourth update of `trainer` find an inf in its gradient; clear the list to count anew."""
    real, seen = trainer.apply, []

    def apply(self: Any, *args: Any, **more: Any) -> None:
        seen.append(None)
        if len(seen) in (3, 4):
            grad(self)[7] = float("inf")
        real(self, *args, **more)

    monkeypatch.setattr(trainer, "apply", apply)
    return seen
