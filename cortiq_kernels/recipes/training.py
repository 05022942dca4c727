"""A training that may be stopped at any moment and goes on with the same bits: steps, with evaluations and checkpoints
between them.

Between two steps everything that the rest depends on is in `state` and `tensors`. A signal may end a run at any
moment: what changes that state (the update of a step with its counters and events; what an evaluation adds) happens in
`changing`, as a whole, so the state is always one that an uninterrupted run passes through.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from cortiq_kernels.recipes.logged import Logged
from cortiq_kernels.recipes.saver import Saver
from cortiq_kernels.recipes.stopping import asked_to_stop, check, shielded


class Training(ABC):
    """What the trainings of all recipes share. `done` accepted steps, `skipped` others, `step_seconds` of the first."""

    def __init__(self, progress: Logged, saver: Saver):
        self.progress, self.saver = progress, saver
        self.done = self.skipped = 0
        self.step_seconds = 0.0
        self._whole = True  # no half of a step or an evaluation in the state

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether all steps are done."""

    @property
    @abstractmethod
    def evaluation_is_due(self) -> bool:
        """Whether the state as it is has to be evaluated before the next step, or the end."""

    @abstractmethod
    def evaluate(self) -> None: ...

    @abstractmethod
    def step(self) -> None:
        """One step: accepted, or skipped with a report."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """JSON-able: all but the tensors; with what `Saver` reads. Waits for the device. See `exact`."""

    @abstractmethod
    def tensors(self, over: bool = False) -> dict[str, Tensor]:
        """The tensors of a checkpoint, which lacks what follows from the rest; of a training that is `over` only what
        the output needs.
        """

    def train(self) -> None:
        """The steps that are left, with evaluations and checkpoints.

        What stops it (a signal, or a disk that is full) finds the state saved, as far as that is possible.
        """
        self.saver.begin(self.done, self.skipped)
        try:
            while True:
                while self.evaluation_is_due:
                    self.evaluate()
                if self.over:
                    return
                if self.saver.due(self.done, self.skipped):
                    self.save()
                self.step()
                check()
        except BaseException as e:
            stopped = asked_to_stop() or isinstance(e, KeyboardInterrupt | OSError)
            if stopped and self._whole and self.done + self.skipped > 0:
                self.save()
            raise

    def save(self, provenance: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint; with the output's `provenance` once training is over."""
        self.saver.save(self.state(), self.tensors(over=provenance is not None), provenance)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Within the context the state changes: a signal waits, and an error leaves nothing to be saved."""
        with shielded():
            self._whole = False
            yield
            self._whole = True


def exact(x: float) -> float | str:
    """A number that `float` reads back exactly, also where JSON has none."""
    return x if math.isfinite(x) else str(x)
