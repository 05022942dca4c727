"""When checkpoints of a heal are written, what is in them besides training's own state, and what a full disk means."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cortiq_kernels._version import __version__
from cortiq_kernels.recipes.checkpoint_dir import CheckpointDir, tensor_bytes
from cortiq_kernels.recipes.interval import parse_interval
from cortiq_kernels.recipes.logged import Logged
from cortiq_kernels.recipes.provenance import plain


class Saver:
    """Writes the checkpoints of one run. `known` is what every one of them says (identity, log, ...); `seconds` is what
    earlier parts of the run took.
    """

    def __init__(
        self, folder: CheckpointDir, every: str, known: dict[str, Any], progress: Logged, seconds: float = 0.0
    ):
        self.folder, self.every, self.known, self.progress = folder, parse_interval(every), known, progress
        self._earlier, self._began = seconds, time.monotonic()
        self._last, self._at = (0, 0), time.monotonic()

    @property
    def seconds(self) -> float:
        """How long the run has taken, the parts before it was resumed included."""
        return self._earlier + time.monotonic() - self._began

    def begin(self, done: int, skipped: int) -> None:
        """Training starts or goes on here: the interval counts from now."""
        self._last, self._at = (done, skipped), time.monotonic()

    def due(self, done: int, skipped: int) -> bool:
        """Whether it is time for the next one."""
        steps = done + skipped - sum(self._last)
        return self.every.due(steps, time.monotonic() - self._at)

    def save(
        self, state: Mapping[str, Any], tensors: Mapping[str, Tensor], provenance: Mapping[str, Any] | None = None
    ) -> None:
        """Write one, unless they are off. Event "checkpoint", before it is written.

        A disk that is full is a note, not the end of a run that may take days: the checkpoint before stays, and the
        next one is tried when its time has come.
        """
        if self.every.never:
            return
        nbytes = tensor_bytes(tensors)
        self.progress({"event": "checkpoint", "step": state["step"], "of": state["of"], "bytes": nbytes})
        whole = {
            "version": __version__,
            "written": time.strftime("%F %T %z"),
            "seconds": self.seconds,
            **state,
            **self.known,
            "provenance": plain(provenance) if provenance is not None else None,
        }
        try:
            self.folder.write(whole, tensors)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            free = shutil.disk_usage(next(p for p in self.folder.path.parents if p.exists())).free
            text = f"no checkpoint at step {state['step']}: {os.strerror(e.errno)} (it needs {nbytes / 2**20:.1f} MiB, "
            text += f"{free / 2**20:.1f} MiB are free at {self.folder.path.parent}); the one before stays"
            self.progress({"event": "note", "text": text})
        self.begin(int(state["step"]), int(state["counters"]["skipped"]))
