"""What a recipe will take of a device and the host, and the refusal of what cannot fit. Estimates of `step/memory.py`.

A plan is refused when the parts that are known exactly (weights, optimizer, preallocated and saved activations, host
copies) are more than what is free. Where only the estimate of the workspace goes beyond it, the plan says so in a note
and the run tries.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cortiq_kernels import backend
from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.layout import plan_layout
from cortiq_kernels.recipes.activations import how_to_fit, smallest
from cortiq_kernels.recipes.errors import need
from cortiq_kernels.report.results import size
from cortiq_kernels.step import Buffers
from cortiq_kernels.step.memory import forward_bytes


def forward_memory(
    g: Geometry, n: int, window: int, rows: int, dtype: torch.dtype, device: torch.device, *, slabs: float = 0.0,
    more: int = 0, work: int = 0,
) -> dict[str, int]:  # fmt: skip
    """Parts of a forward pass of the whole model over `n` tokens, `rows` of them through the head (`forward_bytes`).

    `more`: bytes on the device besides; `work`: estimated bytes alive where a layer's workspace is not. `least` is what
    is known exactly, `peak` with the estimates, `free` what the device has, `host_free` what the host has.
    """
    weights = plan_layout(g).nbytes(dtype.itemsize)
    step = forward_bytes(g, n, window, rows, dtype, device.type, slabs=slabs)
    step = step._replace(workspace=max(step.workspace, work))
    return {
        "model": weights,
        "activations": step.buffers,
        "workspace": step.workspace,
        "logits": step.head,
        "least": weights + step.buffers + more,
        "peak": weights + step.peak + more,
        "free": backend.free_bytes(device),
        "host_free": backend.host_free_bytes(),
    }


def check_window(
    recipe: str, g: Geometry, n: int, dtype: torch.dtype, device: torch.device, *, first: int = 0, save_from: int = 0,
    mixers_from: int = 0, activations: str = "cheap", train: str | None = "layers",
) -> None:  # fmt: skip
    """Refuse a micro-batch of `n` tokens whose buffers alone do not fit, before its windows are made, which would take
    minutes for two billion tokens. `first`, `save_from`, `mixers_from`, `train`: those of `Buffers`; `activations`: the
    setting. `InputError`.
    """
    free = backend.free_bytes(device)
    least = n * g.hidden * dtype.itemsize
    if least <= free:  # or the arithmetic of tensors overflows
        least = Buffers(
            g, n, dtype, torch.device("meta"), first=first, save_from=save_from, mixers_from=mixers_from,
            policy=smallest(activations), train=train,
        ).nbytes  # fmt: skip
    check_fits(recipe, {"least": least, "peak": least, "free": free}, device, how_to_fit(activations))


def check_fits(recipe: str, memory: Mapping[str, int], device: torch.device, fix: str) -> list[str]:
    """Refuse (`InputError`) a plan whose `least` is more than `free`; a note where only its `peak` is."""
    least, peak, free = memory["least"], memory["peak"], memory["free"]
    need(
        least <= free, f"{recipe}: memory", f"a plan that needs at least {size(least)}",
        f"at most the {size(free)} that are free on {device}", fix,
    )  # fmt: skip
    if peak <= free:
        return []
    return [f"this may not fit: about {size(peak)} at the peak, and {size(free)} are free on {device}. {fix}"]
