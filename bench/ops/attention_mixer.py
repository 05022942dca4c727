"""Gated softmax attention between the projections: q/k norm, partial RoPE, causal GQA, output gate.

"records" has 8 sequences of uneven length in every window. Peers: the whole layer with PyTorch around SDPA, and softmax
attention alone (of normed and rotated q and k) through SDPA's autograd or by flash attention called directly.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.geometries import by_geometry
from bench.peers import through_autograd
from bench.registry import Calls, Inputs, Op, Results, Sizes, Work, acc_dtype, blank, normal, starts
from cortiq_kernels.ops.attention import (
    AttnDims,
    attention_blocks,
    attention_mixer_bwd,
    attention_mixer_fwd,
    attention_mixer_ref,
    rope_table,
)
from cortiq_kernels.ops.rms_norm import rms_norm_ref
from cortiq_kernels.ops.sequences import sequence_index

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
    common["index"] = sequence_index(t["cu_seqlens"], sizes["n"])  # once a batch, as in a step
    if proj.is_cuda:
        common["blocks"] = attention_blocks(t["cu_seqlens"], sizes["n"], common["dims"])
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


def prepared(t: Inputs, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normed and rotated q, k, then v and the gate, [N, heads, hd]; positions as in one sequence a window."""
    d, window = dims_of(sizes), sizes["window"]
    half = d.rot // 2
    qg, k, v = t["proj"].split([2 * d.nq * d.hd, d.nkv * d.hd, d.nkv * d.hd], dim=1)
    q, gate = qg.unflatten(1, (d.nq, 2, d.hd)).unbind(2)
    k, v = k.unflatten(1, (d.nkv, d.hd)), v.unflatten(1, (d.nkv, d.hd))
    times = sizes["n"] // window
    cos, sin = (table[:window].repeat(times, 1)[:, None].to(q.dtype) for table in (t["cos"], t["sin"]))

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        x = rms_norm_ref(x, weight, EPS)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

    return turned(q, t["q_norm"]), turned(k, t["k_norm"]), v, gate


def sdpa(t: Inputs, sizes: Sizes) -> Results:
    """The same layer the usual way: norms and RoPE in PyTorch, scaled_dot_product_attention over whole windows."""
    q, k, v, gate = prepared(t, sizes)
    return {"out": (_whole_windows(q, k, v, sizes) * torch.sigmoid(gate)).flatten(1)}


def _whole_windows(q: Tensor, k: Tensor, v: Tensor, sizes: Sizes) -> Tensor:
    """SDPA over [N, heads, hd], one sequence a window."""
    if sizes.get("records"):
        raise ValueError("scaled_dot_product_attention has no causal form for packed sequences")
    q, k, v = (x.unflatten(0, (-1, sizes["window"])).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)


def sdpa_alone(t: Inputs, sizes: Sizes) -> Calls:
    """Softmax attention alone, through autograd."""
    leaves = [x.detach() for x in prepared(t, sizes)[:3]]
    dout = t["dout"].unflatten(1, (sizes["nq"], sizes["hd"]))
    return through_autograd(lambda q, k, v: _whole_windows(q, k, v, sizes), leaves, dout)


def flash_alone(t: Inputs, sizes: Sizes) -> Calls:
    """Softmax attention alone: flash attention over packed sequences, forward and backward called directly."""
    q, k, v = (x.detach().contiguous() for x in prepared(t, sizes)[:3])
    do, cu, window = t["dout"].unflatten(1, (sizes["nq"], sizes["hd"])), t["cu_seqlens"], sizes["window"]
    aten, scale = torch.ops.aten, sizes["hd"] ** -0.5

    def forward() -> tuple[Tensor, ...]:
        return aten._flash_attention_forward(q, k, v, cu, cu, window, window, 0.0, True, False, scale=scale)

    o, lse, seed, unused, _ = forward()

    def bwd() -> Results:
        grads = aten._flash_attention_backward(
            do, q, k, v, o, lse, cu, cu, window, window, 0.0, True, seed, unused, scale=scale
        )
        return dict(zip("qkv", grads, strict=True))

    return {"fwd": lambda: {"out": forward()[0]}, "bwd": bwd}


def work(sizes: Sizes, dtype: torch.dtype) -> dict[str, Work]:
    """Causal scores and their product with v, half of each square; the backward has five such products for two."""
    d, n = dims_of(sizes), sizes["n"]
    cuts = starts(sizes, torch.device("cpu")).diff().double()
    flops = 2 * float(cuts.square().sum()) * d.nq * d.hd
    proj, out = (n * width * dtype.itemsize for width in (d.width, d.nq * d.hd))
    return {"fwd": Work(flops, proj + out), "bwd": Work(2.5 * flops, 2 * proj + 2 * out)}


def shapes() -> dict[str, Sizes]:
    """The published geometries, and 8 records of uneven length in every window."""
    found = by_geometry(lambda g: {"nq": g.nq, "nkv": g.nkv, "hd": g.hd, "rot": g.rot})
    for name in ("0.8B", "4B"):
        found[f"{name} records"] = {**found[name], "records": 8}
    return dict(found)


ENTRY = Op(
    name="attention_mixer",
    shapes=shapes(),
    gate={"n": 1024, "window": 512},
    inputs=inputs,
    calls=calls,
    reference=reference,
    grads={"dproj": "proj", "dq_norm": "q_norm", "dk_norm": "k_norm"},
    work=work,
    eager=sdpa,
    peers={"SDPA alone": sdpa_alone, "flash alone": flash_alone},
)
