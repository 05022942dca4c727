"""Gated DeltaNet between the projections: convolution, gates, l2norm, delta rule, gated norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.geometries import by_geometry
from bench.peers import through_autograd
from bench.registry import Calls, Inputs, Op, Results, Sizes, Work, acc_dtype, blank, normal, starts
from cortiq_kernels.ops.gated_delta import GdnDims, gdn_mixer_bwd, gdn_mixer_fwd, gdn_mixer_ref

EPS = 1e-6
VECTORS = ("conv_weight", "A_log", "dt_bias", "norm_weight")
VECTOR_GRADS = ("dconv", "dA_log", "ddt_bias", "dnorm")


def dims_of(sizes: Sizes) -> GdnDims:
    return GdnDims(sizes["nk"], sizes["nv"], sizes["dk"], sizes["dv"], sizes["conv"])


def inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Inputs:
    d, acc, n = dims_of(sizes), acc_dtype(dtype), sizes["n"]
    channels = 2 * d.nk * d.dk + d.nv * d.dv
    return {
        "proj": normal(gen, (n, d.width), dtype),
        "conv_weight": normal(gen, (channels, d.conv), acc, 0.3),
        "A_log": torch.rand((d.nv,), generator=gen, device=device).mul_(16).clamp_(min=0.01).log_().to(acc),
        "dt_bias": normal(gen, (d.nv,), acc, 0.5) - 3,
        "norm_weight": 1 + normal(gen, (d.dv,), acc, 0.1),
        "cu_seqlens": starts(sizes, device),
        "dout": normal(gen, (n, d.nv * d.dv), dtype),
    }


def calls(t: Inputs, sizes: Sizes) -> Calls:
    proj, dout = t["proj"], t["dout"]
    conv, a_log, dt_bias, norm = (t[name] for name in VECTORS)
    out, dproj = blank(dout.shape, dout), blank(proj.shape, proj)
    grads: dict[str, Any] = {
        grad: blank(t[name].shape, t[name]) for grad, name in zip(VECTOR_GRADS, VECTORS, strict=True)
    }
    common: dict[str, Any] = {"dims": dims_of(sizes), "cu_seqlens": t["cu_seqlens"], "max_seqlen": sizes["window"]}
    common["eps"] = EPS
    _, saved = gdn_mixer_fwd(proj, conv, a_log, dt_bias, norm, **common)
    assert saved is not None

    def fwd() -> Results:
        gdn_mixer_fwd(proj, conv, a_log, dt_bias, norm, **common, out=out)
        return {"out": out}

    def bwd() -> Results:
        gdn_mixer_bwd(dout, saved, conv, a_log, dt_bias, norm, **common, dproj=dproj, **grads)
        return {"dproj": dproj, **grads}

    return {"fwd": fwd, "bwd": bwd}


def reference(t: Inputs, sizes: Sizes) -> Results:
    conv, a_log, dt_bias, norm = (t[name] for name in VECTORS)
    return {"out": gdn_mixer_ref(t["proj"], conv, a_log, dt_bias, norm, dims_of(sizes), t["cu_seqlens"], EPS)}


def work(sizes: Sizes, dtype: torch.dtype) -> dict[str, Work]:
    """Arithmetic of the recurrence itself (three products with the state a token; the backward counts twice that)."""
    d, n = dims_of(sizes), sizes["n"]
    flops = 6 * n * d.nv * d.dk * d.dv
    proj, out = (n * width * dtype.itemsize for width in (d.width, d.nv * d.dv))
    return {"fwd": Work(flops, proj + out), "bwd": Work(2 * flops, 2 * proj + out)}


def fla(t: Inputs, sizes: Sizes) -> Calls:
    """FLA's convolution, chunked rule (FlashQLA's where installed) and gated norm, gates in plain PyTorch."""
    from fla.modules import FusedRMSNormGated
    from fla.modules.causal_conv1d.ops import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    d, window, dtype = dims_of(sizes), sizes["window"], t["proj"].dtype
    norm = FusedRMSNormGated(d.dv, eps=EPS, activation="swish", device=t["proj"].device, dtype=dtype)
    widths = [2 * d.nk * d.dk + d.nv * d.dv, d.nv * d.dv, d.nv, d.nv]

    def forward(proj: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, weight: Tensor) -> Tensor:
        qkv, z, a, b = proj.unflatten(0, (-1, window)).split(widths, dim=-1)
        x, _ = causal_conv1d(qkv, conv.to(dtype), None, activation="silu")
        q, k, v = x.split([d.nk * d.dk, d.nk * d.dk, d.nv * d.dv], dim=-1)
        g = -a_log.exp() * F.softplus(a.float() + dt_bias)
        o, _ = chunk_gated_delta_rule(
            q.unflatten(-1, (d.nk, d.dk)),
            k.unflatten(-1, (d.nk, d.dk)),
            v.unflatten(-1, (d.nv, d.dv)),
            g,
            b.sigmoid(),
            use_qk_l2norm_in_kernel=True,
        )
        norm.weight.data.copy_(weight.detach())
        return norm(o, z.unflatten(-1, (d.nv, d.dv))).reshape(proj.shape[0], -1)

    return through_autograd(forward, [t["proj"], *(t[name] for name in VECTORS)], t["dout"])


ENTRY = Op(
    name="gdn_mixer",
    shapes=by_geometry(lambda g: {"nk": g.nk, "nv": g.nv, "dk": g.dk, "dv": g.dv, "conv": g.conv}),
    gate={"n": 192, "window": 96, "packed": 1},
    inputs=inputs,
    calls=calls,
    reference=reference,
    grads={"dproj": "proj", **dict(zip(VECTOR_GRADS, VECTORS, strict=True))},
    work=work,
    eager=False,  # the reference is a loop over tokens
    peers={"fla": fla},
)
