"""Kernels that can be compiled before they run, several at a time.

Triton compiles a kernel when it is first launched, one after another, seconds each. `compile_ahead(body)` calls `body`
with launches that compile and do not run, so that a thread each does it, and the real call that follows finds every
kernel made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton

_ahead = False  # whether launches only compile
_compiled: set[Hashable] = set()


class Kernel:
    """A `triton.jit` function whose launches `compile_ahead` can hold back; otherwise that function."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if _ahead:
            return lambda *args, **constants: self.function.warmup(*args, grid=grid, **constants)
        return self.function[grid]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit` for what is launched from Python; functions that kernels call stay `triton.jit`."""
    if function is None:
        return lambda f: Kernel(triton.jit(**options)(f))
    return Kernel(triton.jit(function))


def compile_ahead(body: Callable[[], object], threads: int | None = None) -> None:
    """Call `body` once with every launch of a `kernel` compiled and none run; returns when all are compiled.

    What `body` computes is garbage, since torch's own operations in it do run: it must write nothing that is read
    later. A kernel that does not compile is left to its launch, which says why. `threads`: the cores of this process.
    In Triton's interpreter nothing is compiled, and `body` is not called; nor is it inside another `compile_ahead`,
    whose own body comes through here again: there it is called, and its launches belong to the outer one.
    """
    global _ahead
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    if _ahead:
        body()
        return
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        _ahead = True
        try:
            with triton.AsyncCompileMode(pool, ignore_errors=True):
                body()
        finally:
            _ahead = False


def compile_once(key: Hashable, body: Callable[[], object]) -> None:
    """`compile_ahead(body)` on the first call with `key` (op, shapes, dtype, flags: what decides which kernels)."""
    if key not in _compiled:
        _compiled.add(key)
        compile_ahead(body)
