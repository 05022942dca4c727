"""The GEMMs of a layer's largest projection (gate and up together), with the weight gradient in float32."""

from __future__ import annotations

import torch

from bench.geometries import by_geometry
from bench.registry import Calls, Inputs, Op, Results, Sizes, Work, acc_dtype, blank, normal
from cortiq_kernels.ops.linear import linear_bwd_w, linear_bwd_x, linear_fwd, linear_ref


def inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Inputs:
    n, i, o = sizes["n"], sizes["in"], sizes["out"]
    return {
        "x": normal(gen, (n, i), dtype),
        "w": normal(gen, (o, i), dtype, i**-0.5),
        "dy": normal(gen, (n, o), dtype),
    }


def calls(t: Inputs, sizes: Sizes) -> Calls:
    x, w, dy = t["x"], t["w"], t["dy"]
    y, dx, dw = blank(dy.shape, x), blank(x.shape, x), blank(w.shape, w, acc_dtype(w.dtype))
    return {
        "fwd": lambda: {"y": linear_fwd(x, w, out=y)},
        "bwd_x": lambda: {"dx": linear_bwd_x(dy, w, out=dx)},
        "bwd_w": lambda: {"dw": linear_bwd_w(dy, x, out=dw)},
    }


def reference(t: Inputs, sizes: Sizes) -> Results:
    return {"y": linear_ref(t["x"], t["w"])}


def work(sizes: Sizes, dtype: torch.dtype) -> dict[str, Work]:
    n, i, o, e = sizes["n"], sizes["in"], sizes["out"], dtype.itemsize
    flops, acts = 2 * n * i * o, n * (i + o) * e
    return {
        "fwd": Work(flops, acts + i * o * e),
        "bwd_x": Work(flops, acts + i * o * e),
        "bwd_w": Work(flops, acts + i * o * acc_dtype(dtype).itemsize),
    }


ENTRY = Op(
    name="linear",
    shapes=by_geometry(lambda g: {"in": g.hidden, "out": 2 * g.intermediate[0]}),
    gate={"n": 65},
    inputs=inputs,
    calls=calls,
    reference=reference,
    grads={"dx": "x", "dw": "w"},
    work=work,
)
