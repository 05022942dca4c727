"""Whether an op takes its Triton kernels for a tensor, and why not. Triton itself is imported only when a kernel
runs."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import warnings

import torch
from torch import Tensor

from cortiq_kernels.ops import checks
from cortiq_kernels.ops.triton_cache import usable_cache

BACKENDS = ("auto", "triton", "torch")


@functools.cache
def missing() -> str | None:
    """Why Triton kernels cannot run in this environment at all; None when they can. A CUDA tensor's op then says so
    once."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    return None


@functools.cache
def say_once(op: str, why: str) -> None:
    """Warn that `op` runs without its kernel, once for each reason."""
    warnings.warn(f"{op}: runs on plain torch operations, many times slower than its kernel: {why}", stacklevel=4)


def use_triton(op: str, x: Tensor, backend: str, unfit: str = "") -> bool:
    """Whether `op` on `x` runs on Triton: "auto" takes it for CUDA tensors below float64, "triton" insists.

    `unfit` says why the op's kernels do not take these shapes, "" when they do. Raises `ValueError` for an unknown
    backend, and for "triton" where it cannot be: float64, no Triton, a CPU tensor outside Triton's interpreter, shapes
    that are unfit.
    """
    if backend not in BACKENDS:
        checks.fail(op, "backend", f"one of {list(BACKENDS)}", repr(backend), "leave it out to have it chosen")
    if backend == "torch":
        return False
    reason = missing()
    if x.dtype == torch.float64:
        reason = "float64 is for exact runs, which the torch path does"
        quiet = True
    elif not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        reason, quiet = "a CPU tensor (Triton's interpreter needs TRITON_INTERPRET=1)", True
    else:
        reason = reason or unfit or None
        quiet = not x.is_cuda  # the interpreter is for tests: "auto" never takes it
    if backend == "triton":
        if reason:
            checks.fail(op, "backend", "one that can run here", f"'triton', but {reason}", "use backend='auto'")
        usable_cache()
        return True
    if reason and not quiet:
        say_once(op, reason)
    if reason is not None or not x.is_cuda:
        return False
    usable_cache()
    return True


def launching_on(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Kernels inside run on the GPU of `x`: Triton launches on the current one, whatever its arguments lie on."""
    return torch.accelerator.device_index(x.device.index) if x.is_cuda else contextlib.nullcontext()
