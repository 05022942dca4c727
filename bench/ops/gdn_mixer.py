"""Gated DeltaNet between the projections: convolution, gates, l2norm, delta rule, gated norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.geometries import by_geometry
from bench.peers import through_autograd
from bench.registry import Calls, Inputs, Op, Results, Sizes, Work, acc_dtype, blank, normal, starts
from cortiq_kernels.ops.gated_delta import GdnDims, chunk_index, gdn_mixer_bwd, gdn_mixer_fwd, gdn_mixer_ref
from cortiq_kernels.ops.sequences import sequence_index

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
    chunks = chunk_index(t["cu_seqlens"], sizes["n"])  # once a batch, as in a step
    common["index"] = sequence_index(t["cu_seqlens"], sizes["n"])
    _, saved = gdn_mixer_fwd(proj, conv, a_log, dt_bias, norm, **common, chunks=chunks)
    assert saved is not None

    def fwd() -> Results:
        gdn_mixer_fwd(proj, conv, a_log, dt_bias, norm, **common, chunks=chunks, out=out)
        return {"out": out}

    def bwd() -> Results:  # as the step calls it: it does not keep the mixer's output
        gdn_mixer_bwd(dout, saved, conv, a_log, dt_bias, norm, **common, dproj=dproj, out=out, **grads)
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
    """FLA's convolution, chunked rule (FlashQLA's where installed) and gated norm, and compiled gates.

    The columns of the projection come apart and contiguous, as from projections of their own.
    """
    from fla.modules import FusedRMSNormGated
    from fla.modules.causal_conv1d.ops import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    d, dtype = dims_of(sizes), t["proj"].dtype
    packed = {"cu_seqlens": t["cu_seqlens"].long()} if sizes.get("records") else {}
    rows = (1, -1) if packed else (-1, sizes["window"])
    norm = FusedRMSNormGated(d.dv, eps=EPS, activation="swish", device=t["proj"].device, dtype=dtype)
    widths = [d.conv_width, d.nv * d.dv, d.nv, d.nv]
    qkv, z, a, b = (x.contiguous() for x in t["proj"].unflatten(0, rows).split(widths, dim=-1))

    @torch.compile(dynamic=False)
    def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        return -a_log.exp() * F.softplus(a.float() + dt_bias), b.sigmoid()

    def forward(
        qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, conv: Tensor, a_log: Tensor, dt: Tensor, weight: Tensor
    ) -> Tensor:
        x, _ = causal_conv1d(qkv, conv, None, activation="silu", **packed)
        q, k, v = x.split([d.nk * d.dk, d.nk * d.dk, d.nv * d.dv], dim=-1)
        g, beta = gates(a, b, a_log, dt)
        heads = [y.unflatten(-1, (-1, size)) for y, size in ((q, d.dk), (k, d.dk), (v, d.dv))]
        o, _ = chunk_gated_delta_rule(*heads, g, beta, use_qk_l2norm_in_kernel=True, **packed)
        norm._parameters["weight"] = weight
        return norm(o, z.unflatten(-1, (d.nv, d.dv))).reshape(sizes["n"], -1)

    leaves = [qkv, z, a, b, t["conv_weight"].to(dtype), t["A_log"], t["dt_bias"], t["norm_weight"].to(dtype)]
    return through_autograd(forward, leaves, t["dout"])


def shapes() -> dict[str, Sizes]:
    """The published geometries, and 8 records of uneven length in one window."""
    found = by_geometry(lambda g: {"nk": g.nk, "nv": g.nv, "dk": g.dk, "dv": g.dv, "conv": g.conv})
    for name in ("0.8B", "4B"):
        found[f"{name} records"] = {**found[name], "window": found[name]["n"], "records": 8}
    return dict(found)


ENTRY = Op(
    name="gdn_mixer",
    shapes=shapes(),
    gate={"n": 192, "window": 96, "packed": 1, "records": 0},
    inputs=inputs,
    calls=calls,
    reference=reference,
    grads={"dproj": "proj", **dict(zip(VECTOR_GRADS, VECTORS, strict=True))},
    work=work,
    rounding=2.0,  # q, k, V', states and scores enter the kernels' products in 16 bit
    eager=False,  # the reference is a loop over tokens
    peers={"fla": fla},
)
