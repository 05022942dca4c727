"""Token gather, and the deterministic scatter into a float32 gradient of the whole table."""

from __future__ import annotations

import torch

from bench.geometries import by_geometry
from bench.registry import Calls, Inputs, Op, Results, Sizes, Work, acc_dtype, blank, normal
from cortiq_kernels.ops.embedding import embedding_bwd, embedding_fwd, embedding_ref


def inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Inputs:
    n, h, v = sizes["n"], sizes["h"], sizes["vocab"]
    ids = torch.randint(0, v, (n,), generator=gen, device=device)
    ids[: n // 8] = ids[0]  # padding: one id that many rows share
    return {"ids": ids, "weight": normal(gen, (v, h), dtype), "dy": normal(gen, (n, h), dtype)}


def calls(t: Inputs, sizes: Sizes) -> Calls:
    ids, weight, dy = t["ids"], t["weight"], t["dy"]
    y, dweight = blank(dy.shape, dy), blank(weight.shape, weight, acc_dtype(weight.dtype))
    total = torch.zeros_like(dweight)

    def add() -> Results:  # what a table that is also the head gets: nothing is zeroed, and the sums differ by run
        embedding_bwd(dy, ids, out=total, accumulate=True)
        return {}

    return {
        "fwd": lambda: {"y": embedding_fwd(ids, weight, out=y)},
        "bwd": lambda: {"dweight": embedding_bwd(dy, ids, out=dweight)},
        "bwd+=": add,
    }


def reference(t: Inputs, sizes: Sizes) -> Results:
    return {"y": embedding_ref(t["ids"], t["weight"])}


def work(sizes: Sizes, dtype: torch.dtype) -> dict[str, Work]:
    n, h, e = sizes["n"], sizes["h"], dtype.itemsize
    return {
        "fwd": Work(0, 2 * n * h * e + 8 * n),
        "bwd": Work(0, n * h * e + 8 * n + sizes["vocab"] * h * acc_dtype(dtype).itemsize),
        "bwd+=": Work(0, n * h * (e + 2 * acc_dtype(dtype).itemsize) + 8 * n),  # were every id another
    }


ENTRY = Op(
    name="embedding",
    shapes=by_geometry(lambda g: {"h": g.hidden, "vocab": g.vocab}),
    gate={"n": 130, "vocab": 1009},
    inputs=inputs,
    calls=calls,
    reference=reference,
    grads={"dweight": "weight"},
    work=work,
)
