"""How long a call takes: median, 20th and 80th percentile.

- GPU, a call of 5 ms or more: a pair of device events around each call, all queued before the first is read.
- GPU, shorter: calls are captured into a CUDA graph that runs for about 2 ms, replays are timed and divided by the
  number of calls; otherwise the host's launch time is what one measures. A call that cannot be captured is timed by
  events, and the row says so.
- CPU: the host's clock.

Several thunks over different inputs are taken in turn, so that inputs smaller than the L2 cache are not found in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

GRAPH_BELOW_MS = 5.0  # a call of a dozen kernels takes the host about half a millisecond to launch
GRAPH_TARGET_MS = 2.0
BUDGET_MS = 1500.0
REPEATS = (5, 50)  # least and most measurements of one call
Thunk = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, and how they were taken."""

    median: float
    p20: float
    p80: float
    repeats: int
    method: str


def measure(thunks: Sequence[Thunk], device: torch.device, budget_ms: float = BUDGET_MS) -> Timing:
    """Time one call of `thunks`, which do the same work on different inputs."""
    if device.type != "cuda":
        return summary(_host(thunks, budget_ms), "host clock")
    for thunk in thunks:
        thunk()
    torch.cuda.synchronize(device)
    estimate = min(_events(thunks, device, 3))
    if estimate >= GRAPH_BELOW_MS:
        return summary(_events(thunks, device, _repeats(estimate, budget_ms)), "events")
    try:
        times = _graph(thunks, device, estimate, budget_ms)
    except RuntimeError as e:
        torch.cuda.synchronize(device)
        reason = str(e).splitlines()[0][:80]
        times = _events(thunks, device, _repeats(estimate, budget_ms))
        return summary(times, f"events (no graph: {reason})")
    return summary(times, "graph")


def peak_bytes(thunk: Thunk, device: torch.device) -> int | None:
    """Most memory that one warm call holds beyond what was there before; None on a CPU, where torch does not count."""
    if device.type != "cuda":
        return None
    thunk()  # library workspaces and compilation are of the first call only
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    thunk()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def rotation(nbytes: int, device: torch.device, most: int = 8) -> int:
    """How many input sets of `nbytes` to take in turn so that together they are twice the L2 cache."""
    if device.type != "cuda":
        return 1
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
    return max(1, min(most, -(-2 * cache // max(nbytes, 1))))


def _repeats(estimate: float, budget_ms: float) -> int:
    least, most = REPEATS
    return max(least, min(most, int(budget_ms / max(estimate, 1e-6))))


def _host(thunks: Sequence[Thunk], budget_ms: float) -> list[float]:
    for thunk in thunks:
        thunk()
    times: list[float] = []
    least, most = REPEATS
    while len(times) < least or (len(times) < most and sum(times) < budget_ms):
        start = time.perf_counter()
        thunks[len(times) % len(thunks)]()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _events(thunks: Sequence[Thunk], device: torch.device, repeats: int) -> list[float]:
    pairs = []
    for i in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        thunks[i % len(thunks)]()
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in pairs]


def _graph(thunks: Sequence[Thunk], device: torch.device, estimate: float, budget_ms: float) -> list[float]:
    calls = max(1, int(GRAPH_TARGET_MS / max(estimate, 1e-3)))
    calls = -(-calls // len(thunks)) * len(thunks)  # every input set equally often
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for thunk in thunks:
            thunk()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            thunks[i % len(thunks)]()
    for _ in range(3):
        graph.replay()
    times = _events([graph.replay], device, _repeats(estimate * calls, budget_ms))
    return [t / calls for t in times]


def summary(times: Sequence[float], method: str) -> Timing:
    """Median and percentiles of `times`, in milliseconds."""
    t = torch.tensor(sorted(times), dtype=torch.float64)
    low, mid, high = (float(torch.quantile(t, q)) for q in (0.2, 0.5, 0.8))
    return Timing(mid, low, high, len(times), method)
