"""Exact top-k of a slab of logits with probabilities: the teacher's targets."""

from __future__ import annotations

import torch

from bench.geometries import by_geometry
from bench.registry import Calls, Inputs, Op, Results, Sizes, Work, normal
from cortiq_kernels.ops.topk import topk_softmax, topk_softmax_ref

SHAPES = by_geometry(lambda g: {"vocab": g.vocab, "k": 64})


def inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Inputs:
    return {"logits": normal(gen, (sizes["n"], sizes["vocab"]), dtype, 2.0)}


def calls(t: Inputs, sizes: Sizes) -> Calls:
    def plain() -> Results:
        top = topk_softmax(t["logits"], sizes["k"])
        return {"ids": top.ids, "probs": top.probs}

    def with_lse() -> Results:
        top = topk_softmax(t["logits"], sizes["k"], return_lse=True)
        assert top.lse is not None
        return {"ids": top.ids, "probs": top.probs, "lse": top.lse}

    return {"top-k": plain, "top-k+lse": with_lse}


def reference(t: Inputs, sizes: Sizes) -> Results:
    ids, probs = topk_softmax_ref(t["logits"], sizes["k"])
    return {"ids": ids, "probs": probs, "lse": torch.logsumexp(t["logits"], dim=-1)}


def work(sizes: Sizes, dtype: torch.dtype) -> dict[str, Work]:
    n, k = sizes["n"], sizes["k"]
    read, write = n * sizes["vocab"] * dtype.itemsize, 8 * n * k
    return {"top-k": Work(0, read + write), "top-k+lse": Work(0, read + write)}


def torch_topk(t: Inputs, sizes: Sizes) -> Calls:
    """torch.topk in the logits' dtype; ties in any order."""

    def plain() -> Results:
        values, ids = torch.topk(t["logits"], sizes["k"], dim=-1)
        return {"ids": ids, "probs": torch.softmax(values.float(), dim=-1)}

    return {
        "top-k": plain,
        "top-k+lse": lambda: {**plain(), "lse": torch.logsumexp(t["logits"].float(), dim=-1)},
    }


ENTRY = Op(
    name="topk_softmax",
    shapes={name: SHAPES[name] for name in ("small", "0.8B")},  # one vocabulary in all published sizes
    gate={"n": 9},
    inputs=inputs,
    calls=calls,
    reference=reference,
    work=work,
    eager=False,  # a full sort
    peers={"torch.topk": torch_topk},
)
