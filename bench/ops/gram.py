"""Gram of the gated activation, added to packed tiles of its upper triangle."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.geometries import by_geometry
from bench.registry import Calls, Inputs, Op, Results, Sizes, Work, normal
from cortiq_kernels.ops.gram import gram_accumulate_, gram_finalize, gram_ref, gram_tiles, gram_zeros


def inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Inputs:
    return {"x": normal(gen, (sizes["n"], sizes["f"]), dtype)}


def calls(t: Inputs, sizes: Sizes) -> Calls:
    x, f = t["x"], sizes["f"]
    whole = torch.float64 if x.dtype == torch.float64 else torch.float32
    packed = gram_zeros(f, device=x.device, dtype=whole)
    called = [0]

    def accumulate() -> Results:
        called[0] += 1  # the sum grows with every call; its mean over the calls is the Gram of x
        gram_accumulate_(packed, x)
        return {"packed": packed}

    return {"accumulate": accumulate, "finalize": lambda: {"gram": gram_finalize(packed, f) / max(called[0], 1)}}


def reference(t: Inputs, sizes: Sizes) -> Results:
    return {"gram": gram_ref(t["x"])}


def addmm(t: Inputs, sizes: Sizes) -> Calls:
    """The whole square in place, as one product: what torch offers. 16 bit to f32 on CUDA only."""
    x, f = t["x"], sizes["f"]
    square = torch.zeros(f, f, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device)
    if x.dtype == square.dtype:
        return with_tf32(lambda: {"square": torch.addmm(square, x.T, x, out=square)}, x)
    return {"accumulate": lambda: {"square": torch.addmm(square, x.T, x, out_dtype=square.dtype, out=square)}}


def gptq(t: Inputs, sizes: Sizes) -> Calls:
    """What GPTQ and its kin do with a layer's input: a copy in float32, and the whole square."""
    x, f = t["x"], sizes["f"]
    square = torch.zeros(f, f, device=x.device)

    def accumulate() -> Results:
        wide = x.float()
        return {"square": square.addmm_(wide.T, wide)}

    return with_tf32(accumulate, x)


def with_tf32(call: Callable[[], Results], x: Tensor) -> Calls:
    """A call whose products are of float32, as torch makes them by default, and on a GPU with TF32 too."""

    def tf32() -> Results:
        matmul = torch.backends.cuda.matmul
        before, matmul.allow_tf32 = matmul.allow_tf32, True
        try:
            return call()
        finally:
            matmul.allow_tf32 = before

    return {"accumulate": call, "accumulate TF32": tf32} if x.is_cuda else {"accumulate": call}


def quack(t: Inputs, sizes: Sizes) -> Calls:
    """Quack's symmetric product of 16-bit inputs, added to a whole square in float32."""
    from quack.gemm_interface import gemm_symmetric

    x, f = t["x"], sizes["f"]
    square = torch.zeros(f, f, device=x.device)
    return {
        "accumulate": lambda: {"square": gemm_symmetric(x.T, x, C=square, out=square, out_dtype=torch.float32)},
        "not added": lambda: {"square": gemm_symmetric(x.T, x, out_dtype=torch.float32)},
    }


def work(sizes: Sizes, dtype: torch.dtype) -> dict[str, Work]:
    n, f = sizes["n"], sizes["f"]
    held = gram_tiles(f) * 128 * 128 * (8 if dtype == torch.float64 else 4)
    return {"accumulate": Work(n * f * f, n * f * dtype.itemsize + 2 * held), "finalize": Work(0, 3 * held)}


ENTRY = Op(
    name="gram",
    shapes=by_geometry(lambda g: {"f": g.intermediate[0]}),
    gate={"n": 65},
    inputs=inputs,
    calls=calls,
    reference=reference,
    work=work,
    peers={"addmm": addmm, "quack": quack, "gptq": gptq},
)
