"""The one file that asks about devices: which one a run takes, in what precision, how much memory there is, and why.

Nothing is asked at import. Every choice comes with its reason, so that a run can say it once; an explicit request
that cannot be met is an error, never a quiet fallback. Ops do not come here: they go by the device of their tensors.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from cortiq_kernels._version import __version__
from cortiq_kernels.reading import Refusal

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}


class DeviceError(Refusal):
    """A device or precision that was asked for and cannot be had: one line with what, got, expected and how to fix."""


class DeviceChoice(NamedTuple):
    """A device and why it was taken."""

    device: torch.device
    reason: str


class DtypeChoice(NamedTuple):
    """A working dtype and why it was taken."""

    dtype: torch.dtype
    reason: str


def pick_device(request: str = "auto") -> DeviceChoice:
    """The device to run on: "auto" (a GPU where there is one), "cpu", "cuda" (the current one) or "cuda:N".

    Raises DeviceError for anything else, and for a GPU that is not there, with the reason.
    """
    if request == "cpu":
        return DeviceChoice(torch.device("cpu"), "asked for")
    if request == "auto":
        why = no_gpu_reason()
        if why:
            return DeviceChoice(torch.device("cpu"), f"no GPU: {why}")
        return DeviceChoice(_cuda(torch.cuda.current_device()), f"a GPU is there: {torch.cuda.get_device_name()}")
    kind, _, number = request.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()) or (":" in request and not number):
        raise DeviceError(f"device: got {request!r}; expected auto, cpu, cuda or cuda:N. Set --device.")
    why = no_gpu_reason()
    if why:
        raise DeviceError(f"device: got {request!r} but {why}; expected a GPU. Use --device cpu, or auto.")
    index, count = int(number) if number else torch.cuda.current_device(), torch.cuda.device_count()
    if index >= count:
        raise DeviceError(
            f"device: got {request!r} with {count} GPU(s) visible; expected cuda:0 .. cuda:{count - 1}. Set --device."
        )
    return DeviceChoice(_cuda(index), f"asked for: {torch.cuda.get_device_name(index)}")


def pick_dtype(request: str | None, device: torch.device) -> DtypeChoice:
    """The working dtype: "bf16", "f16", "f32", "f64", or None for the default (bf16 on a GPU, f32 on a CPU).

    Raises DeviceError for another name, and for 16 bit on a CPU.
    """
    gpu = device.type != "cpu"
    if request is None:
        return (
            DtypeChoice(torch.bfloat16, "the default on a GPU")
            if gpu
            else DtypeChoice(torch.float32, "the default on a CPU")
        )
    if request not in DTYPES:
        raise DeviceError(f"dtype: got {request!r}; expected one of {', '.join(DTYPES)}. Set --dtype.")
    if not gpu and request in ("bf16", "f16"):
        raise DeviceError(
            f"dtype: got {request!r} on a CPU, where 16-bit products are emulated and slower than float32; "
            "expected f32 or f64. Leave --dtype out, or use a GPU."
        )
    return DtypeChoice(DTYPES[request], "asked for")


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a working dtype: bf16, f16, f32 or f64."""
    return next(name for name, d in DTYPES.items() if d == dtype)


def no_gpu_reason() -> str | None:
    """None when a GPU can be used, else why not."""
    if not torch.backends.cuda.is_built():
        return f"this torch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device (is the driver there, and CUDA_VISIBLE_DEVICES not empty?)"
    return None


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a GPU (what torch holds in reserve included), or host memory available."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return host_free_bytes()


def host_free_bytes() -> int:
    """Host memory available without swapping: the least of what the kernel says and what the control group leaves."""
    found = [_meminfo_available(), _cgroup_left()]
    return min((f for f in found if f is not None), default=4 << 30)


def peak_bytes(device: torch.device) -> int | None:
    """Most bytes that tensors took on a GPU since `reset_peak`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    """Start measuring `peak_bytes` anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def release(device: torch.device) -> None:
    """Give memory of dropped tensors back, between two phases of a run."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a GPU or the host ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


class GraphCapture:
    """Records the work that a function queues on a GPU, without running it; `replay()` of what it returns queues it all
    at once, `reset()` drops it.

    The graphs of one capture share the memory that they allocate while recorded, so they run one at a time, and nothing
    that one of them allocates may be used after it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._pool, self._stream = torch.cuda.graph_pool_handle(), _capture_stream(device)

    def __call__(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Raises RuntimeError when `work` does something that a graph cannot hold, such as waiting for the device."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads do meanwhile (a checkpoint on its way to the disk) is no business of it
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            work()
        return graph


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps a workspace of 32 MB for every stream that it has seen, for good. Its priority
    is high, so that in a replay the chain of a step goes before what runs beside it (`SideLane`)."""
    return torch.cuda.Stream(device, priority=-1)


class CopyLane:
    """A stream for copies to a GPU that run while it computes: copies may start once what was queued at `fence` is
    done, and what is queued after `join` waits for them. Nothing but `wait` waits on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def fence(self) -> torch.cuda.Event:
        """The work queued so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextlib.contextmanager
    def copies(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """Copies inside go on this stream, after the event."""
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield

    def done(self) -> torch.cuda.Event:
        """The copies so far."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def join(self, copies: torch.cuda.Event) -> None:
        """What is queued from now on comes after those copies."""
        torch.cuda.current_stream(self._device).wait_event(copies)


class SideLane:
    """A second stream of a GPU for work that nothing waits for yet: it fills what the chain of the others leaves idle.
    `run` queues work behind all that is queued so far; `wait(what)` puts what comes next behind the work that said it
    reads or writes `what`; `join` behind all of it. On a CPU the work simply runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _side_stream(device) if device.type == "cuda" else None
        self._queued: dict[str, torch.cuda.Event] = {}

    def run(self, what: str, work: Callable[[], None]) -> None:
        if self._stream is None:
            work()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        self._queued[what] = event = torch.cuda.Event()
        event.record(self._stream)

    def wait(self, what: str) -> None:
        event = self._queued.pop(what, None)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def join(self) -> None:
        for what in list(self._queued):
            self.wait(what)

    def forget(self) -> None:
        """Of a recording that failed."""
        self._queued.clear()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all, for cuBLAS's workspaces; of a lower priority than the one that records (`_capture_stream`)."""
    return torch.cuda.Stream(device)


def copy_lane(device: torch.device) -> CopyLane | None:
    """A stream for copies to `device`; None for a CPU, which has nothing to copy to."""
    return CopyLane(device) if device.type == "cuda" else None


@contextlib.contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Within the context, ask torch for algorithms that give the same bits in every run (the rest warns)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        if enabled:
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        yield
    finally:
        if enabled:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def versions() -> dict[str, str | None]:
    """Versions that a result depends on; None for what is not installed. Imports nothing."""
    packages = ("torch", "triton", "numpy", "safetensors", "tokenizers")
    return {
        "cortiq_kernels": __version__,
        "python": platform.python_version(),
        **{p: _installed(p) for p in packages},
        "cuda": torch.version.cuda,
    }


def describe(device: torch.device) -> str:
    """A device in words: the GPU's name, or the CPU's threads."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)"


class Gpu(NamedTuple):
    """One visible GPU."""

    name: str
    capability: str
    memory: int


def gpus() -> list[Gpu]:
    """The visible GPUs; empty without any."""
    if no_gpu_reason():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [Gpu(p.name, f"{p.major}.{p.minor}", p.total_memory) for p in found]


def driver_version() -> str | None:
    """Version of the NVIDIA kernel driver, or None without one."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as f:
            words = f.readline().split()
    except OSError:
        return None
    return next((w for w in words if w[:1].isdigit() and "." in w), None)


def _cuda(index: int) -> torch.device:
    return torch.device("cuda", index)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _meminfo_available() -> int | None:
    try:
        with open("/proc/meminfo", encoding="utf-8") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _cgroup_left() -> int | None:
    """What a container's limit leaves: limit - use + reclaimable file cache; None without a limit."""
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="utf-8") as f:
            limit = f.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="utf-8") as f:
            used = int(f.read())
        with open("/sys/fs/cgroup/memory.stat", encoding="utf-8") as f:
            stat = dict(line.split() for line in f)
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
