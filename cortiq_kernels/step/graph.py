"""Parts of a step that are recorded once and replayed: on a GPU, as one CUDA graph each.

A part is a function without arguments over memory that stays (weights, buffers, counters, `StaticInputs`), under a key
that holds all that would change what it queues: shapes, the layers that train, whether gradients are `=` or `+=`.

    first call of a key     the function runs: kernels compile (`ahead`: before, side by side), libraries choose theirs
    second                  it is recorded, and replayed
    from then on            it is replayed; the host only copies inputs and fills scalars

All graphs share one pool of memory, because they run one after another and nothing lives on from one to the next. A
key that is not recorded costs nothing; the least recently used graph goes when there are more than `LIMIT`.

Where nothing can be recorded (a CPU, or something in a function that waits for the device) the functions simply run:
`reason` says why, and a failed recording says so once in a warning. What is replayed are the same kernels on the same
inputs, so the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from cortiq_kernels import backend

LIMIT = 32  # graphs; scored rows come in multiples, so a run of uneven records needs several
Work = Callable[[], None]


class Replay(Protocol):
    """A recorded function."""

    def replay(self) -> Any: ...

    def reset(self) -> Any: ...


Capture = Callable[[Work], Replay]


class Programs:
    """See the module docstring. `capture` makes what records a function, anew for every pool of memory; `compiler`
    compiles the kernels of a function, which it may call for that with their launches held back."""

    def __init__(
        self,
        device: torch.device,
        *,
        enabled: bool = True,
        capture: Callable[[], Capture] | None = None,
        compiler: Callable[[Work], None] | None = None,
    ):
        self.reason = ""
        if not enabled:
            self.reason = "switched off"
        elif capture is None and device.type != "cuda":
            self.reason = "a CPU has no graphs"
        self._make: Callable[[], Capture] = capture or (lambda: backend.GraphCapture(device))
        self._compile = compiler or (_compile_kernels if device.type == "cuda" else None)
        self._capture: Capture | None = None
        self._known: dict[Hashable, Replay | None] = {}  # by the last use; None: ran once

    @property
    def enabled(self) -> bool:
        """Whether functions are recorded: then their inputs must stay where they are."""
        return not self.reason

    @property
    def recorded(self) -> list[Hashable]:
        """Keys that are replayed."""
        return [key for key, graph in self._known.items() if graph is not None]

    def run(self, key: Hashable, work: Work, *, release: Work = lambda: None, ahead: bool = False) -> None:
        """`work`, run, recorded or replayed. `release` drops tensors that a run or a recording left behind: those of a
        run would take their memory a second time (and plain runs would not find the allocator as the last one did, and
        now and then need memory of the device), those of a recording keep it from the next. `ahead`: the kernels may
        be compiled before the first run, because all that `work` writes it writes anew (`=`)."""
        if self.reason:
            release()
            work()
            return
        if key not in self._known:
            if ahead and self._compile is not None:
                self._compile(work)
                release()
            work()
            self._known[key] = None
            return
        graph = self._known.pop(key)
        if graph is None:
            release()
            try:
                graph = self._record(work)
            except RuntimeError as e:
                release()
                self._give_up(e)
                work()
                return
            release()
        self._known[key] = graph
        graph.replay()
        while len(self.recorded) > LIMIT:
            self.forget(lambda k, oldest=self.recorded[0]: k == oldest)  # type: ignore[misc]

    def forget(self, which: Callable[[Any], bool]) -> None:
        """Drop the keys that `which` names and their graphs; the last one takes the memory with it."""
        for key in [k for k in self._known if which(k)]:
            graph = self._known.pop(key)
            if graph is not None:
                graph.reset()
        if not self.recorded:
            self._capture = None

    def _record(self, work: Work) -> Replay:
        if self._capture is None:
            self._capture = self._make()
        return self._capture(work)

    def _give_up(self, error: RuntimeError) -> None:
        self.forget(lambda key: True)
        self.reason = f"recording failed: {str(error).splitlines()[0][:200]}"
        warnings.warn(f"step: runs without a CUDA graph, which takes longer: {self.reason}", stacklevel=4)


def _compile_kernels(work: Work) -> None:
    """Several at a time, where there is Triton (`ops/jit.py`)."""
    from cortiq_kernels.ops import triton_gate

    if triton_gate.missing() is None:
        from cortiq_kernels.ops.jit import compile_ahead

        compile_ahead(work)
