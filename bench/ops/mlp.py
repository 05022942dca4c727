"""The whole gated MLP as a step runs it: its matrix products around the SwiGLU passes, a gate on every neuron, and the
gradients of input, gates and weights (float32). `python -m bench.mlp` holds it against the products alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.geometries import by_geometry
from bench.peers import through_autograd
from bench.registry import Calls, Inputs, Op, Results, Sizes, Work, acc_dtype, blank, normal
from cortiq_kernels.ops.linear import linear_bwd_w, linear_bwd_x, linear_fwd, linear_ref
from cortiq_kernels.ops.swiglu import swiglu_mlp_bwd, swiglu_mlp_fwd, swiglu_ref


def inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Inputs:
    n, h, f = sizes["n"], sizes["h"], sizes["f"]
    return {
        "x": normal(gen, (n, h), dtype),
        "gate_up_weight": normal(gen, (2 * f, h), dtype, h**-0.5),
        "down_weight": normal(gen, (h, f), dtype, f**-0.5),
        "mask": torch.rand((f,), generator=gen, device=device).to(acc_dtype(dtype)),
        "dy": normal(gen, (n, h), dtype),
    }


def calls(t: Inputs, sizes: Sizes) -> Calls:
    x, up, down, mask, dy = (t[k] for k in ("x", "gate_up_weight", "down_weight", "mask", "dy"))
    n, f = x.shape[0], down.shape[1]
    gate_up, dgate_up = (blank((n, 2 * f), x) for _ in range(2))
    act, dact = (blank((n, f), x) for _ in range(2))
    y, dx, dmask = blank(x.shape, x), blank(x.shape, x), blank(mask.shape, mask)
    dup, ddown = (blank(w.shape, w, acc_dtype(w.dtype)) for w in (up, down))

    def fwd() -> Results:
        linear_fwd(x, up, out=gate_up)
        swiglu_mlp_fwd(gate_up, mask, out=act)
        return {"y": linear_fwd(act, down, out=y)}

    def bwd() -> Results:
        linear_bwd_x(dy, down, out=dact)
        swiglu_mlp_bwd(dact, gate_up, mask, dgate_up=dgate_up, act=act, dmask=dmask)
        linear_bwd_w(dy, act, out=ddown)
        linear_bwd_w(dgate_up, x, out=dup)
        linear_bwd_x(dgate_up, up, out=dx)
        return {"dx": dx, "dgate_up_weight": dup, "ddown_weight": ddown, "dmask": dmask}

    return {"fwd": fwd, "bwd": bwd}


def products(t: Inputs, sizes: Sizes) -> Calls:
    """The floor: the same matrix products and no more, called directly, weight gradients in float32 too."""
    x, up, down, dy = (t[k] for k in ("x", "gate_up_weight", "down_weight", "dy"))
    n, f = x.shape[0], down.shape[1]
    gate_up, dgate_up = (torch.randn((n, 2 * f), device=x.device).to(x.dtype) for _ in range(2))
    act, dact = torch.randn((n, f), device=x.device).to(x.dtype), blank((n, f), x)
    y, dx = blank(x.shape, x), blank(x.shape, x)
    dup, ddown = (blank(w.shape, w, acc_dtype(w.dtype)) for w in (up, down))
    wide = {"out_dtype": dup.dtype} if x.is_cuda and dup.dtype != x.dtype else {}

    def weight(dy: Tensor, x: Tensor, out: Tensor) -> None:
        if wide or x.dtype == out.dtype:
            torch.mm(dy.t(), x, out=out, **wide)
        else:
            torch.mm(dy.t().to(out.dtype), x.to(out.dtype), out=out)

    def fwd() -> Results:
        torch.mm(x, up.t(), out=gate_up)
        return {"y": torch.mm(act, down.t(), out=y)}

    def bwd() -> Results:
        torch.mm(dy, down, out=dact)
        weight(dy, act, ddown)
        weight(dgate_up, x, dup)
        torch.mm(dgate_up, up, out=dx)
        return {"dx": dx, "dgate_up_weight": dup, "ddown_weight": ddown}

    return {"fwd": fwd, "bwd": bwd}


def reference(t: Inputs, sizes: Sizes) -> Results:
    return {"y": linear_ref(swiglu_ref(linear_ref(t["x"], t["gate_up_weight"]), t["mask"]), t["down_weight"])}


def work(sizes: Sizes, dtype: torch.dtype) -> dict[str, Work]:
    n, h, f, e = sizes["n"], sizes["h"], sizes["f"], dtype.itemsize
    flops, weights = 6 * n * h * f, 3 * h * f
    ends = 2 * n * h * e + weights * e
    return {"fwd": Work(flops, ends), "bwd": Work(2 * flops, 2 * ends + weights * acc_dtype(dtype).itemsize)}


def liger(t: Inputs, sizes: Sizes) -> Calls:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    gate, up = (w.contiguous() for w in t["gate_up_weight"].chunk(2))

    def forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, mask: Tensor) -> Tensor:
        return F.linear(LigerSiLUMulFunction.apply(F.linear(x, gate), F.linear(x, up)) * mask, down)

    return through_autograd(forward, [t["x"], gate, up, t["down_weight"], t["mask"].to(gate.dtype)], t["dy"])


ENTRY = Op(
    name="mlp",
    shapes=by_geometry(lambda g: {"h": g.hidden, "f": g.intermediate[0]}),
    gate={"n": 65},
    inputs=inputs,
    calls=calls,
    reference=reference,
    grads={"dx": "x", "dgate_up_weight": "gate_up_weight", "ddown_weight": "down_weight", "dmask": "mask"},
    work=work,
    rounding=2.0,  # gate_up, act and their gradients enter the products in 16 bit; a reference of 65 rows can be lucky
    peers={"liger": liger},
)
