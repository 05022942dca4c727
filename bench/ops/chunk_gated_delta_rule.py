"""The gated delta rule alone, in the field's layout [B, T, H, D]."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench.geometries import by_geometry
from bench.peers import through_autograd
from bench.registry import Calls, Inputs, Op, Results, Sizes, Work, acc_dtype, normal
from cortiq_kernels.ops.gated_delta import (
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    chunk_gated_delta_rule_ref,
)

NAMES = ("q", "k", "v", "g", "beta")


def inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Inputs:
    b, t, hk, hv = sizes["n"] // sizes["window"], sizes["window"], sizes["nk"], sizes["nv"]
    q, k = (F.normalize(normal(gen, (b, t, hk, sizes["dk"]), torch.float32), dim=-1).to(dtype) for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": normal(gen, (b, t, hv, sizes["dv"]), dtype),
        "g": F.logsigmoid(normal(gen, (b, t, hv), torch.float32) + 3).to(acc_dtype(dtype)),
        "beta": torch.rand((b, t, hv), generator=gen, device=device).to(dtype),
        "do": normal(gen, (b, t, hv, sizes["dv"]), dtype),
    }


def calls(t: Inputs, sizes: Sizes) -> Calls:
    args, do = [t[name] for name in NAMES], t["do"]
    _, _, saved = chunk_gated_delta_rule_fwd(*args)
    assert saved is not None

    def bwd() -> Results:
        dq, dk, dv, dg, dbeta, _ = chunk_gated_delta_rule_bwd(do, saved)
        return {"dq": dq, "dk": dk, "dv": dv, "dg": dg, "dbeta": dbeta}

    return {"fwd": lambda: {"o": chunk_gated_delta_rule_fwd(*args)[0]}, "bwd": bwd}


def reference(t: Inputs, sizes: Sizes) -> Results:
    return {"o": chunk_gated_delta_rule_ref(*(t[name] for name in NAMES))[0]}


def work(sizes: Sizes, dtype: torch.dtype) -> dict[str, Work]:
    """Arithmetic of the recurrence itself (three products with the state a token; the backward counts twice that)."""
    n, nk, nv, dk, dv = (sizes[k] for k in ("n", "nk", "nv", "dk", "dv"))
    flops, e = 6 * n * nv * dk * dv, dtype.itemsize
    inside = n * ((2 * nk * dk + nv * dv + nv) * e + nv * acc_dtype(dtype).itemsize)
    out = n * nv * dv * e
    return {"fwd": Work(flops, inside + out), "bwd": Work(2 * flops, 2 * inside + out)}


def fla(t: Inputs, sizes: Sizes) -> Calls:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return through_autograd(lambda *a: chunk_gated_delta_rule(*a)[0], [t[name] for name in NAMES], t["do"])


def flash_qla(t: Inputs, sizes: Sizes) -> Calls:
    from flash_qla import chunk_gated_delta_rule_bwd as bwd
    from flash_qla import chunk_gated_delta_rule_fwd as fwd

    q, k, v, g, beta = (t[name] for name in NAMES)
    scale = sizes["dk"] ** -0.5
    g_sum, a = fwd(q, k, v, g, beta, scale=scale)[:2]
    return {
        "fwd": lambda: {"o": fwd(q, k, v, g, beta, scale=scale)[2]},
        "bwd": lambda: {"dq": bwd(q, k, v, g_sum, beta, a, t["do"], scale=scale)[0]},
    }


def transformers(t: Inputs, sizes: Sizes) -> Calls:
    """The chunked PyTorch function that transformers falls back to."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    groups = sizes["nv"] // sizes["nk"]
    q, k = (t[name].repeat_interleave(groups, dim=2) for name in ("q", "k"))
    return through_autograd(lambda *a: torch_chunk_gated_delta_rule(*a)[0], [q, k, t["v"], t["g"], t["beta"]], t["do"])


def shapes() -> dict[str, Sizes]:
    """The published geometries, and one sequence of 32,768 tokens."""
    found = by_geometry(lambda g: {"nk": g.nk, "nv": g.nv, "dk": g.dk, "dv": g.dv})
    found["4B long"] = {**found["4B"], "n": 32768, "window": 32768}
    return dict(found)


ENTRY = Op(
    name="chunk_gated_delta_rule",
    shapes=shapes(),
    gate={"n": 194, "window": 97},
    inputs=inputs,
    calls=calls,
    reference=reference,
    grads={f"d{name}": name for name in NAMES},
    work=work,
    rounding=2.0,  # q, k, V', states and scores enter the kernels' products in 16 bit
    eager=False,  # the reference is a loop over tokens
    peers={"transformers": transformers, "fla": fla, "flash-qla": flash_qla},
)
