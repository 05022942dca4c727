"""Norm, clip, Adam and 16-bit refresh over flat memory: one accepted step."""

from __future__ import annotations

import torch

from bench.registry import Calls, Inputs, Op, Results, Sizes, Work, acc_dtype, blank, normal
from cortiq_kernels.ops.adam import AdamRange, AdamRanges, AdamState, adam_ref, adam_step_

RATE, CLIP = 1e-3, 1.0


def inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Inputs:
    n, acc = sizes["numel"], acc_dtype(dtype)
    return {
        "param": normal(gen, (n,), acc),
        "grad": normal(gen, (n,), acc, 0.1),
        "m": normal(gen, (n,), acc, 0.01),
        "v": normal(gen, (n,), acc, 0.01).square_(),
        "half": torch.empty(0, dtype=dtype, device=device),  # its dtype is the plane's
    }


def calls(t: Inputs, sizes: Sizes) -> Calls:
    state = AdamState.new(t["param"].device)
    param, m, v = (t[name].clone() for name in ("param", "m", "v"))
    half = t["half"].dtype.itemsize == 2
    plane = blank(param.shape, param, t["half"].dtype) if half else None
    ranges = AdamRanges([AdamRange(0, sizes["numel"], 0 if half else None)])

    def step() -> Results:
        adam_step_(state, param, t["grad"], m, v, ranges=ranges, plane=plane, rate=RATE, clip=CLIP)
        return {"param": param, "m": m, "v": v, "plane": param if plane is None else plane}

    return {"step": step}


def reference(t: Inputs, sizes: Sizes) -> Results:
    param, m, v = adam_ref(t["param"], t["grad"], t["m"], t["v"], 0, rate=RATE, clip=CLIP)
    return {"param": param, "m": m, "v": v, "plane": param}


def work(sizes: Sizes, dtype: torch.dtype) -> dict[str, Work]:
    """Gradient read twice (the norm comes first), param, m and v read and written, the plane written."""
    n, a = sizes["numel"], acc_dtype(dtype).itemsize
    return {"step": Work(0, n * (8 * a + (dtype.itemsize if dtype.itemsize == 2 else 0)))}


def fused(t: Inputs, sizes: Sizes) -> Calls:
    """torch's fused Adam, clip_grad_norm_, and a copy to 16 bit."""
    param = torch.nn.Parameter(t["param"].clone())
    param.grad = t["grad"].clone()
    plane = torch.empty_like(t["param"], dtype=t["half"].dtype)
    optimizer = torch.optim.Adam([param], lr=RATE, fused=True)

    def step() -> Results:
        torch.nn.utils.clip_grad_norm_([param], CLIP)
        optimizer.step()
        plane.copy_(param.detach())
        return {"plane": plane}

    return {"step": step}


ENTRY = Op(
    name="adam",
    shapes={"small": {"numel": 1 << 18}, "0.8B": {"numel": 500_000_000}, "1e9": {"numel": 1_000_000_000}},
    gate={"numel": 100_003},
    inputs=inputs,
    calls=calls,
    reference=reference,
    work=work,
    eager=False,
    peers={"torch fused Adam + clip + copy": fused},
)
