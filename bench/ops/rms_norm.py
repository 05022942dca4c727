"""Residual add and RMS norm, as before every mixer and MLP."""

from __future__ import annotations

import torch

from bench.geometries import by_geometry
from bench.registry import Calls, Inputs, Op, Results, Sizes, Work, acc_dtype, blank, normal
from cortiq_kernels.ops.rms_norm import add_rms_norm_bwd, add_rms_norm_fwd, rms_norm_ref

EPS = 1e-6


def inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Inputs:
    n, h = sizes["n"], sizes["h"]
    acts = {name: normal(gen, (n, h), dtype) for name in ("x", "r", "dy")}
    return acts | {"weight": normal(gen, (h,), acc_dtype(dtype), 0.1)}


def calls(t: Inputs, sizes: Sizes) -> Calls:
    """fwd; bwd as the step calls it where no weight of a product trains; bwd+n where one does: n again, on the way."""
    x, weight = t["x"], t["weight"]
    x_out, y, dx, dweight = blank(x.shape, x), blank(x.shape, x), torch.zeros_like(x), blank(weight.shape, weight)
    spare = torch.zeros_like(x)

    def fwd() -> Results:
        add_rms_norm_fwd(x, t["r"], weight, EPS, x_out=x_out, out=y)
        return {"y": y, "x_out": x_out}

    _, saved = add_rms_norm_fwd(x, t["r"], weight, EPS, x_out=x_out.clone())

    def bwd() -> Results:
        add_rms_norm_bwd(t["dy"], saved, weight, dx=dx, dweight=dweight)  # dx +=, from zero on the first call
        return {"dx": dx, "dweight": dweight}

    again = blank(x.shape, x)

    def bwd_n() -> Results:
        add_rms_norm_bwd(t["dy"], saved, weight, dx=spare, dweight=dweight, out=again)
        return {"y": again}

    return {"fwd": fwd, "bwd": bwd, "bwd+n": bwd_n}


def reference(t: Inputs, sizes: Sizes) -> Results:
    x = t["x"] + t["r"]
    return {"y": rms_norm_ref(x, t["weight"], EPS), "x_out": x}


def work(sizes: Sizes, dtype: torch.dtype) -> dict[str, Work]:
    four = 4 * sizes["n"] * sizes["h"] * dtype.itemsize  # fwd: x r -> x_out y; bwd: dy x dx -> dx
    return {"fwd": Work(0, four), "bwd": Work(0, four), "bwd+n": Work(0, four // 4 * 5)}


def copy(t: Inputs, sizes: Sizes) -> Calls:
    """As many bytes as fwd and bwd move, by torch's copy: what memory gives at this size."""
    source = torch.cat((t["x"], t["r"]))
    target = torch.empty_like(source)
    return {"fwd": lambda: {"copy": target.copy_(source)}, "bwd": lambda: {"copy": target.copy_(source)}}


def liger(t: Inputs, sizes: Sizes) -> Calls:
    """Its fused add and norm; the gradient of the weight in the working dtype."""
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    x, r, w, dy = (t[name].detach().clone() for name in ("x", "r", "weight", "dy"))
    leaves = [x.requires_grad_(), r.requires_grad_(), w.to(x.dtype).requires_grad_()]

    def fwd() -> Results:
        with torch.no_grad():
            y, total = liger_fused_add_rms_norm(*leaves, EPS, 1.0)
        return {"y": y, "x_out": total}

    def both() -> Results:
        outs = liger_fused_add_rms_norm(*leaves, EPS, 1.0)
        dx, _, dw = torch.autograd.grad(outs, leaves, (dy, torch.zeros_like(dy)))
        return {"dx": dx, "dweight": dw}

    return {"fwd": fwd, "fwd+bwd": both}


ENTRY = Op(
    name="rms_norm",
    shapes=by_geometry(lambda g: {"h": g.hidden}),
    gate={"n": 65},
    inputs=inputs,
    calls=calls,
    reference=reference,
    grads={"dx": "x", "dweight": "weight"},
    work=work,
    peers={"copy of the same bytes": copy, "liger": liger},
)
