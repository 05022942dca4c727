"""Gated MLP activation with a per-neuron gate, and its gradients (the mask's too)."""

from __future__ import annotations

import torch

from bench.geometries import by_geometry
from bench.peers import through_autograd
from bench.registry import Calls, Inputs, Op, Results, Sizes, Work, acc_dtype, blank, normal
from cortiq_kernels.ops.swiglu import swiglu_mlp_bwd, swiglu_mlp_fwd, swiglu_ref


def inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Inputs:
    n, f = sizes["n"], sizes["f"]
    return {
        "gate_up": normal(gen, (n, 2 * f), dtype),
        "mask": torch.rand((f,), generator=gen, device=device).to(acc_dtype(dtype)),
        "dact": normal(gen, (n, f), dtype),
    }


def calls(t: Inputs, sizes: Sizes) -> Calls:
    gate_up, mask, dact = t["gate_up"], t["mask"], t["dact"]
    act, again, dgate_up = blank(dact.shape, dact), blank(dact.shape, dact), blank(gate_up.shape, gate_up)
    dmask = blank(mask.shape, mask)

    def bwd() -> Results:
        swiglu_mlp_bwd(dact, gate_up, mask, dgate_up=dgate_up, act=again, dmask=dmask)
        return {"dgate_up": dgate_up, "act_again": again, "dmask": dmask}

    return {"fwd": lambda: {"act": swiglu_mlp_fwd(gate_up, mask, out=act)}, "bwd": bwd}


def reference(t: Inputs, sizes: Sizes) -> Results:
    act = swiglu_ref(t["gate_up"], t["mask"])
    return {"act": act, "act_again": act.detach()}


def work(sizes: Sizes, dtype: torch.dtype) -> dict[str, Work]:
    row = sizes["n"] * sizes["f"] * dtype.itemsize
    return {"fwd": Work(0, 3 * row), "bwd": Work(0, 6 * row)}


def liger(t: Inputs, sizes: Sizes) -> Calls:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    gate, up = (x.contiguous() for x in t["gate_up"].chunk(2, dim=-1))
    mask = t["mask"].to(gate.dtype)
    return through_autograd(lambda g, u, m: LigerSiLUMulFunction.apply(g, u) * m, [gate, up, mask], t["dact"])


ENTRY = Op(
    name="swiglu",
    shapes=by_geometry(lambda g: {"f": g.intermediate[0]}),
    gate={"n": 65},
    inputs=inputs,
    calls=calls,
    reference=reference,
    grads={"dgate_up": "gate_up", "dmask": "mask"},
    work=work,
    peers={"liger": liger},
)
