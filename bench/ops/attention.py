"""Gated softmax attention between the projections: q/k norm, partial RoPE, causal GQA, output gate."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.geometries import by_geometry
from bench.registry import Calls, Inputs, Op, Results, Sizes, Work, acc_dtype, blank, normal, starts
from cortiq_kernels.ops.attention import (
    AttnDims,
    attention_mixer_bwd,
    attention_mixer_fwd,
    attention_mixer_ref,
    rope_table,
)
from cortiq_kernels.ops.rms_norm import rms_norm_ref

EPS = 1e-6


def dims_of(sizes: Sizes) -> AttnDims:
    return AttnDims(sizes["nq"], sizes["nkv"], sizes["hd"], sizes["rot"])


def inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Inputs:
    d, acc = dims_of(sizes), acc_dtype(dtype)
    cos, sin = rope_table(sizes["window"], d.rot, 1e7, acc, device)
    return {
        "proj": normal(gen, (sizes["n"], d.width), dtype),
        "q_norm": normal(gen, (d.hd,), acc, 0.1),
        "k_norm": normal(gen, (d.hd,), acc, 0.1),
        "cos": cos,
        "sin": sin,
        "cu_seqlens": starts(sizes, device),
        "dout": normal(gen, (sizes["n"], d.nq * d.hd), dtype),
    }


def calls(t: Inputs, sizes: Sizes) -> Calls:
    proj, dout, vectors = t["proj"], t["dout"], (t["q_norm"], t["k_norm"], t["cos"], t["sin"])
    out, dproj = blank(dout.shape, dout), blank(proj.shape, proj)
    dq_norm, dk_norm = (blank(t[name].shape, t[name]) for name in ("q_norm", "k_norm"))
    common: dict[str, Any] = {"dims": dims_of(sizes), "cu_seqlens": t["cu_seqlens"], "max_seqlen": sizes["window"]}
    common["eps"] = EPS
    _, saved = attention_mixer_fwd(proj, *vectors, **common)
    assert saved is not None

    def fwd() -> Results:
        attention_mixer_fwd(proj, *vectors, **common, out=out)
        return {"out": out}

    def bwd() -> Results:
        attention_mixer_bwd(dout, saved, *vectors, **common, dproj=dproj, dq_norm=dq_norm, dk_norm=dk_norm)
        return {"dproj": dproj, "dq_norm": dq_norm, "dk_norm": dk_norm}

    return {"fwd": fwd, "bwd": bwd}


def reference(t: Inputs, sizes: Sizes) -> Results:
    args = (t["proj"], t["q_norm"], t["k_norm"], t["cos"], t["sin"], dims_of(sizes), t["cu_seqlens"], EPS)
    return {"out": attention_mixer_ref(*args)}


def sdpa(t: Inputs, sizes: Sizes) -> Results:
    """The same layer the usual way: norms and RoPE in PyTorch, scaled_dot_product_attention over whole windows."""
    d, window = dims_of(sizes), sizes["window"]
    half = d.rot // 2
    qg, k, v = t["proj"].split([2 * d.nq * d.hd, d.nkv * d.hd, d.nkv * d.hd], dim=1)
    q, gate = qg.unflatten(1, (d.nq, 2, d.hd)).unbind(2)
    k, v = k.unflatten(1, (d.nkv, d.hd)), v.unflatten(1, (d.nkv, d.hd))
    cos, sin = (table[:, None].to(q.dtype) for table in (t["cos"], t["sin"]))

    def heads(x: Tensor, weight: Tensor | None = None) -> Tensor:
        x = x.unflatten(0, (-1, window))  # [B, T, heads, hd]
        if weight is not None:
            x = rms_norm_ref(x, weight, EPS)
            a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            x = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
        return x.transpose(1, 2)

    o = F.scaled_dot_product_attention(
        heads(q, t["q_norm"]), heads(k, t["k_norm"]), heads(v), is_causal=True, enable_gqa=True
    )
    return {"out": (o.transpose(1, 2).flatten(0, 1) * torch.sigmoid(gate)).flatten(1)}


def work(sizes: Sizes, dtype: torch.dtype) -> dict[str, Work]:
    """Causal scores and their product with v, half of the square; the backward has five such products for two."""
    d, n = dims_of(sizes), sizes["n"]
    flops = 2 * n * sizes["window"] * d.nq * d.hd
    proj, out = (n * width * dtype.itemsize for width in (d.width, d.nq * d.hd))
    return {"fwd": Work(flops, proj + out), "bwd": Work(2.5 * flops, 2 * proj + 2 * out)}


ENTRY = Op(
    name="attention",
    shapes=by_geometry(lambda g: {"nq": g.nq, "nkv": g.nkv, "hd": g.hd, "rot": g.rot}),
    gate={"n": 192, "window": 96, "packed": 1},
    inputs=inputs,
    calls=calls,
    reference=reference,
    grads={"dproj": "proj", "dq_norm": "q_norm", "dk_norm": "k_norm"},
    work=work,
    eager=sdpa,
)
