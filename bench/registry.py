"""What an op has to say about itself to be verified and measured.

An entry is one file in bench/ops/ that defines `ENTRY = Op(...)`; nothing else has to be touched. Names in it are the
op's own: `inputs` builds named tensors, `calls` are the op's functions as thunks that return named results, and
`reference` gives the same results from the op's `X_ref`. A result called `y` whose gradient enters the backward has an
input `dy`; `grads` says which results are gradients, and of which input.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Sizes = Mapping[str, int]
Inputs = dict[str, Any]
Results = Mapping[str, Tensor]
Call = Callable[[], Results]
Calls = dict[str, Call]


class Work(NamedTuple):
    """The least one call can do: arithmetic, and bytes that must cross the memory bus (each tensor once)."""

    flops: float
    nbytes: float

    def __add__(self, other: object) -> Work:
        assert isinstance(other, Work)
        return Work(self.flops + other.flops, self.nbytes + other.nbytes)


@dataclass(frozen=True)
class Op:
    """One benchmark entry.

    name       what the command line calls it
    shapes     shape name -> sizes; a CPU runs "small" by default, a GPU everything else
    gate       sizes that the correctness gate changes (few tokens: the reference runs in float64)
    inputs     (sizes, dtype, device, generator) -> named inputs
    calls      (inputs, sizes) -> {"fwd": thunk, "bwd": thunk, ...}, in the order in which they run
    reference  (inputs, sizes) -> results of the forward, differentiable, in the dtype of the inputs
    grads      result name -> name of the input whose gradient it is
    work       (sizes, dtype) -> least work of each call
    rounding   how often the working dtype rounds on the way: products take operands in it, and the reference does not
    eager      what the torch eager and torch.compile peers run; None: `reference`, False: there is no such peer
    peers      name -> builder like `calls`, of functions by other people; it may raise (not installed, unsupported)
    """

    name: str
    shapes: Mapping[str, Sizes]
    gate: Sizes
    inputs: Callable[[Sizes, torch.dtype, torch.device, torch.Generator], Inputs]
    calls: Callable[[Inputs, Sizes], Calls]
    reference: Callable[[Inputs, Sizes], Results]
    work: Callable[[Sizes, torch.dtype], dict[str, Work]]
    grads: Mapping[str, str] = field(default_factory=dict)
    rounding: float = 0.0
    eager: Callable[[Inputs, Sizes], Results] | None | bool = None
    peers: Mapping[str, Callable[[Inputs, Sizes], Calls]] = field(default_factory=dict)


def entries() -> dict[str, Op]:
    """Every op in bench/ops/, by name."""
    package = importlib.import_module("bench.ops")
    modules = sorted(m.name for m in pkgutil.iter_modules(package.__path__))
    found = [importlib.import_module(f"bench.ops.{name}").ENTRY for name in modules]
    return {op.name: op for op in found}


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, norm weights and weight gradients beside a working dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def normal(gen: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Normal values of the given spread, drawn in float32 on the generator's device."""
    return torch.randn(shape, generator=gen, device=gen.device).mul_(scale).to(dtype)


def blank(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An output buffer full of NaN: an element that an op forgets to write is seen by the gate."""
    return torch.full(shape, float("nan"), dtype=dtype or like.dtype, device=like.device)


def starts(sizes: Sizes, device: torch.device) -> Tensor:
    """cu_seqlens [S + 1]: one sequence a window.

    With `packed`, short ones of odd length and empty ones at the end; with `records`, that many of uneven length in
    every window, the longest 8 times the shortest.
    """
    n, window = sizes["n"], sizes["window"]
    cuts = list(range(0, n, window))
    if sizes.get("records"):
        share = torch.linspace(1, 8, sizes["records"]).cumsum(0)
        cuts = [start + int(window * x / share[-1]) for start in cuts for x in (0, *share[:-1])]
    if sizes.get("packed"):
        cuts = sorted({*cuts, *range(0, n, 37)}) + [n] * 2
    return torch.tensor([*cuts, n], dtype=torch.int32, device=device)
