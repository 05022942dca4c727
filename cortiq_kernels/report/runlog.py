"""The run log: one JSON object a line, written as things happen.

Every line has "event" and "time" (seconds since 1970); the rest depends on the event:

    start   version, versions, recipe, settings           first line
    plan    everything that was decided, with reasons
    note    text: something worth knowing about the data or a decision
    step    step, of, loss, loss_name, norm, rate, seconds, tokens_per_s, left_s, skipped
    skip    step, loss, norm, skipped, in_row, scale       a step that changed nothing
    eval    step, of, loss, loss_name, best, best_step, improved; masks: also l1, pruned (at first, all gates open,
            best and best_step are null)
    layer   layer, kept_energy, residual, output_residual  fold (the residuals with Grams)
            layer, energy, dead                           capture
    score   model, split, category, nll, perplexity, count, records, agreement, kl
    write   out
    done    the report                                    last line of a run that ended well
    error   text                                          last line of one that did not

Numbers that JSON lacks (NaN, infinity) are null. Not logged: progress within a phase ("tick"), the writing of
checkpoints ("checkpoint"), and what a resumed run says again ("again" is true). So the log of a run that was stopped
and resumed is that of one that was not, apart from times.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import stat
import time
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

UNLOGGED = ("tick", "checkpoint", "resume")


class LogError(ValueError):
    """A file that is no run log: one line with what, got, expected and how to fix it."""


class RunLog:
    """Writes events to `path`. The file is created by the first event, so a refused run leaves none. It is locked until
    `close`: LogError, with the file as it was, where another run writes it (devices and pipes may be shared).

    A disk that is full when the log has begun ends no run: lines wait in memory until there is room again. `lost` says
    after `close` how many never found it.

    Event "resume" (log, lines) goes on with the earlier log when that is the same file: what it holds beyond `lines`
    events was written after the checkpoint and is cut off. Use as a context manager; an instance is a `progress`
    function of a recipe's `run`.
    """

    def __init__(self, path: str | Path, first: dict[str, Any] | None = None):
        self.path = Path(path)
        self._first = first
        self._again = True  # what was said before belongs into a new file
        self._file: BinaryIO | None = None
        self._waiting = b""
        self.lost = 0

    def __call__(self, event: dict[str, Any]) -> None:
        """Write one event, on the disk when this returns (bar a crash of the machine, or a disk that is full)."""
        kind = event["event"]
        if kind == "resume":
            self._continue(event)
        elif kind == "checkpoint" and self._file is not None:
            with contextlib.suppress(OSError):  # a pipe, say
                os.fsync(self._file.fileno())  # a checkpoint is never ahead of the log
        if not is_logged(event) and not (event.get("again") and self._again and kind not in UNLOGGED):
            return
        if self._file is None:
            self._begin()
        self._line(event)

    def _begin(self) -> None:
        """A new log with its first line. An error leaves no new file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = not self.path.exists()
        self._file = self._open()
        try:
            if self._regular(self._file):
                self._file.truncate(0)
            if self._first is not None:
                self._line({"event": "start", **self._first})
            if self._waiting:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            self._file.close()
            self._file, self._waiting = None, b""
            if new:
                self.path.unlink(missing_ok=True)
            raise

    def _continue(self, event: dict[str, Any]) -> None:
        """Go on with the file as it was when the checkpoint was written: its start and `lines` events. A log with fewer
        (copied, or cut) is kept as far as it goes.
        """
        if event.get("log") != os.path.realpath(self.path) or not self.path.is_file():
            return
        left = event["lines"] + (self._first is not None)
        file = self._open()
        end = 0
        with open(self.path, "rb") as f:
            for line in f:
                if not left or not line.endswith(b"\n"):
                    break
                end, left = end + len(line), left - 1
        file.truncate(end)
        if end:
            self._again = False
            self._file = file
        else:
            file.close()

    def _open(self) -> BinaryIO:
        """The file, made if need be, for appending; locked where it is a regular file."""
        file: BinaryIO = open(self.path, "ab", buffering=0)  # noqa: SIM115 - see close()
        try:
            if self._regular(file):
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise LogError(
                f"run log {str(self.path)!r}: got a file that another run is writing; expected a log of this run "
                "alone. Wait for it or stop it, or choose another --log."
            ) from None
        except OSError:  # a file system without locks
            pass
        return file

    @staticmethod
    def _regular(file: BinaryIO) -> bool:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)

    def error(self, text: str) -> None:
        """The last line of a run that failed; nothing when the run was refused before it began."""
        if self._file is not None:
            self._line({"event": "error", "text": text})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self.lost, self._waiting = self._waiting.count(b"\n"), b""
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
        text = json.dumps(finite({**head, **event}), ensure_ascii=False) + "\n"
        self._waiting += text.encode("utf-8", "replace")
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) or 0 :]
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise


def is_logged(event: dict[str, Any]) -> bool:
    """Whether an event is a line of the log of a run."""
    return event["event"] not in UNLOGGED and not event.get("again")


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Events of a run log; a last line cut off by a kill is left out. LogError for a file that is no run log."""
    try:
        text = Path(path).read_bytes().decode("utf-8", "replace")
    except OSError as e:
        got = f"a file that cannot be read ({e.strerror})"
        raise LogError(f"{path}: got {got}; expected a run log. Name another file.") from None
    events = []
    for n, line in enumerate(text.split("\n")[:-1], 1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict) or "event" not in event:
            got = f"line {n}, {line[:40]!r}"
            raise LogError(f"{path}: got {got}; expected a run log (JSON objects with \"event\"). Name another file.")
        events.append(event)
    if not events:
        raise LogError(f"{path}: got no whole line; expected a run log. Name another file.")
    return events


def finite(value: Any) -> Any:
    """`value` with NaN and infinities as None, at any depth; tuples become lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list | tuple) else value
