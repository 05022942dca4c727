"""The run log: one JSON object a line, written as things happen.

Every line has "event" and "time" (seconds since 1970); the rest depends on the event:

    start   version, recipe, settings                     first line
    plan    everything that was decided, with reasons
    note    text: something worth knowing about the data or a decision
    step    step, of, loss, loss_name, norm, rate, seconds, tokens_per_s, left_s, skipped
    skip    step, loss, norm, skipped, in_row, scale       a step that changed nothing
    eval    step, of, loss, loss_name, best, best_step, improved
    layer   layer, kept_energy                            fold
    score   model, split, category, nll, perplexity, count, records, agreement, kl
    write   out
    done    the report                                    last line of a run that ended well
    error   text                                          last line of one that did not

Numbers that JSON lacks (NaN, infinity) are null. Progress within a phase ("tick") is for the eye and not logged.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any


class RunLog:
    """Writes events to `path`. The file is created by the first event, so a refused run leaves none.

    Use as a context manager; an instance is a `progress` function of a recipe's `run`.
    """

    def __init__(self, path: str | Path, first: dict[str, Any] | None = None):
        self.path = Path(path)
        self._first = first
        self._file: IO[str] | None = None

    def __call__(self, event: dict[str, Any]) -> None:
        """Write one event, on the disk when this returns (bar a crash of the machine)."""
        if event.get("event") == "tick":
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "w", encoding="utf-8")  # noqa: SIM115 - closed by close()
            if self._first is not None:
                self._line({"event": "start", **self._first})
        self._line(event)

    def error(self, text: str) -> None:
        """The last line of a run that failed; nothing when the run was refused before it began."""
        if self._file is not None:
            self._line({"event": "error", "text": text})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(OSError):  # a full disk here must not hide the error that ended the run
            self.error(f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError):
            self.close()

    def _line(self, event: dict[str, Any]) -> None:
        assert self._file is not None
        head = {"event": event["event"], "time": round(time.time(), 3)}
        self._file.write(json.dumps(finite({**head, **event}), ensure_ascii=False) + "\n")
        self._file.flush()


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Events of a run log; a last line cut off by a kill is left out."""
    text = Path(path).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n")[:-1]]


def finite(value: Any) -> Any:
    """`value` with NaN and infinities as None, at any depth; tuples become lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list | tuple) else value
