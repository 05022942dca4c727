"""For tests under Triton's interpreter: whether this process has it, and a check that it does not make. It reads and
writes whatever a pointer says; inside `addresses_checked` an address must lie in a tensor that the launch was given.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch


def unfit() -> str:
    """Why this process cannot run them; "" when it can."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "needs TRITON_INTERPRET=1 (make test)"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    import triton

    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    return f"triton {triton.__version__}: its interpreter fails with NumPy >= 2.4, 3.7 does not" if old else ""


@contextlib.contextmanager
def strips_of(strips: int, steps: int) -> Iterator[None]:
    """The convolution's backward walks `strips` strips of `steps` tokens a program, its forward takes `strips` tokens;
    their own numbers take their time here."""
    from cortiq_kernels.ops import configs

    with contextlib.ExitStack() as stack:
        for size in (64,):
            for kernel, cut in (("conv", {"ROWS": strips}), ("conv_bwd", {"STRIPS": strips, "STEPS": steps})):
                config = {**configs.launch("gated_delta", size, kernel), **cut}
                stack.enter_context(configs.trying("gated_delta", size, kernel, config))
        yield


def _extent(t: torch.Tensor) -> tuple[int, int]:
    """First byte, and the one past the last, of a tensor's elements: of a column slice not those beside it."""
    last = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


@contextlib.contextmanager
def addresses_checked() -> Iterator[Counter[str]]:
    """An unmasked address outside every tensor of its launch is an error; yields how many accesses a kernel made."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, convert = builder.create_masked_load, builder.create_masked_store, executor._init_args_hst
    seen: Counter[str] = Counter()
    launch: dict = {}

    def check(ptrs, mask, what: str) -> None:
        addresses = np.broadcast_to(ptrs.data, np.broadcast_shapes(ptrs.data.shape, mask.data.shape))
        used = addresses[np.broadcast_to(mask.data, addresses.shape).astype(bool)].astype(np.int64)
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        inside = np.zeros(used.shape, dtype=bool)
        for first, end in launch["extents"]:
            inside |= (used >= first) & (used + size <= end)
        assert inside.all(), f"{launch['kernel']}: {what} of {(~inside).sum()} addresses outside its tensors"
        seen[launch["kernel"]] += 1

    def arguments(self, args, kwargs):
        host = convert(self, args, kwargs)
        tensors = [x for x in (*host[0], *host[1].values()) if isinstance(x, torch.Tensor) and x.numel()]
        launch.update(kernel=self.fn.__name__, extents={_extent(t) for t in tensors})
        return host

    def checked_load(self, ptrs, mask, *rest):
        check(ptrs, mask, "load")
        return load(self, ptrs, mask, *rest)

    def checked_store(self, ptrs, value, mask, *rest):
        check(ptrs, mask, "store")
        return store(self, ptrs, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_init_args_hst", arguments)
        patch.setattr(builder, "create_masked_load", checked_load)
        patch.setattr(builder, "create_masked_store", checked_store)
        yield seen
