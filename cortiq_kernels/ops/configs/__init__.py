"""Launch configurations: fixed numbers by kernel, head size and GPU, made offline by `python -m bench.tune`.

`<gpu>.json` maps op -> size -> kernel -> {"num_warps", "num_stages", and the kernel's own constexprs}. `default.json`
serves every GPU that has no file of its own, and every kernel that its file leaves out. Nothing is tuned in a user's
call: the same shapes get the same kernel, so the same bits, on every run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from importlib import resources
from typing import Any

FILES = {90: "h200"}  # compute capability -> file


@functools.cache
def current_arch() -> int:
    """Compute capability (90 is Hopper) of the GPU that Triton launches on; 0 in its interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return 0
    import triton

    return int(triton.runtime.driver.active.get_current_target().arch)


@functools.cache
def _read(name: str) -> dict[str, Any]:
    return json.loads((resources.files(__name__) / f"{name}.json").read_text())


_trial: dict[tuple[str, int, str], dict[str, int]] = {}  # what a tuner tries


@contextlib.contextmanager
def trying(op: str, size: int, kernel: str, config: dict[str, int]) -> Iterator[None]:
    """Launch `kernel` with `config` inside: for the tuner and for tests of other configurations."""
    _trial[op, size, kernel] = config
    try:
        yield
    finally:
        del _trial[op, size, kernel]


def launch(op: str, size: int, kernel: str, arch: int | None = None) -> dict[str, int]:
    """Keyword arguments of a launch; the caller must not write to them. KeyError for a kernel that no file knows."""
    return _trial.get((op, size, kernel)) or _chosen(op, size, kernel, arch)


@functools.cache
def _chosen(op: str, size: int, kernel: str, arch: int | None) -> dict[str, int]:
    name = FILES.get(current_arch() if arch is None else arch)
    for file in (name, "default"):
        found = _read(file).get(op, {}).get(str(size), {}).get(kernel) if file else None
        if found is not None:
            return dict(found)
    raise KeyError(f"no launch configuration for {op} {size} {kernel}")
