"""The correctness gate: an op's results against its reference in float64, before any clock is started.

    error = max|x - truth| / max|truth|
    bound = max(1.5 * error of the same reference run in the working dtype, eps(result) + 64 * eps(sums)), at most 0.05

So an op may be as inexact as plain PyTorch in the same dtype, and no more: there is no table of tolerances. An entry
whose reference computes everything in the accumulation dtype says how many roundings to the working dtype its own
products take (`rounding`): so many eps of it are a third bound. The second
term (one rounding of the result, and the noise of sums in the accumulation dtype) is for references that happen to be
exact.
Integer results must be equal. A NaN or an infinity never passes, wherever it comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.registry import Inputs, Op, Results, Sizes, acc_dtype

FACTOR, SUM_EPS, CAP = 1.5, 64.0, 0.05


@dataclass(frozen=True)
class Check:
    """One result: its error, what it may be, and whether it is."""

    name: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True)
class Gate:
    """All results of one op at one size; `reason` is the exception when it did not even run."""

    checks: tuple[Check, ...] = ()
    reason: str = ""

    @property
    def ok(self) -> bool:
        return not self.reason and bool(self.checks) and all(c.ok for c in self.checks)

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        bad = [f"{c.name} error {c.error:.3g} > {c.bound:.3g}" for c in self.checks if not c.ok]
        return "; ".join(bad) if bad else f"{len(self.checks)} results within bounds"


def gate(op: Op, sizes: Sizes, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Gate:
    """Run `op` and its reference on the same inputs, at `sizes` reduced by the entry's gate sizes."""
    sizes = {**sizes, **op.gate}
    try:
        inputs = op.inputs(sizes, dtype, device, torch.Generator(device).manual_seed(seed))
        truth = differentiate(op, cast(inputs, torch.float64), sizes, op.reference)
        eager = differentiate(op, cast(inputs, None), sizes, op.reference)
        results: dict[str, Tensor] = {}
        for call in op.calls(inputs, sizes).values():
            results.update(call())
    except Exception as e:  # whatever an op or its reference raises is this op's red gate, and the others still run
        return Gate(reason=f"{type(e).__name__}: {e}")
    inside = op.rounding * torch.finfo(dtype).eps
    if missing := sorted(set(truth) - set(results)):
        return Gate(reason=f"no result called {', '.join(missing)}")
    return Gate(tuple(compare(name, results[name], truth[name], eager[name], inside) for name in truth))


def compare(name: str, got: Tensor, truth: Tensor, eager: Tensor, inside: float = 0.0) -> Check:
    """The check of one result; `inside` is the part of the bound for roundings inside the op."""
    if got.shape != truth.shape:
        return Check(f"{name} (shape {tuple(got.shape)}, not {tuple(truth.shape)})", float("inf"), 0.0)
    if not truth.is_floating_point():
        return Check(name, float((got.long() != truth.long()).sum()), 0.0)
    own = error(eager, truth)
    bound = torch.finfo(got.dtype).eps + SUM_EPS * torch.finfo(acc_dtype(got.dtype)).eps
    bound = max(bound, inside)
    if own < float("inf"):
        bound = max(bound, FACTOR * own)
    return Check(name, error(got, truth), min(bound, CAP))


def error(x: Tensor, truth: Tensor) -> float:
    """max|x - truth| / max|truth|, infinite when either holds a NaN or an infinity."""
    if truth.numel() == 0:
        return 0.0
    x, truth = x.detach().double(), truth.detach().double()
    if not bool(torch.isfinite(x).all() & torch.isfinite(truth).all()):
        return float("inf")
    worst, size = float((x - truth).abs().max()), float(truth.abs().max())
    return worst / size if size > 0 else worst


def cast(inputs: Inputs, dtype: torch.dtype | None) -> Inputs:
    """Detached copies, floating tensors in `dtype` (None: their own)."""
    return {
        k: (v.detach().to(dtype or v.dtype).clone() if v.is_floating_point() else v) if isinstance(v, Tensor) else v
        for k, v in inputs.items()
    }


def differentiate(
    op: Op, inputs: Inputs, sizes: Sizes, forward: Callable[[Inputs, Sizes], Results]
) -> dict[str, Tensor]:
    """Results of `forward` and the gradients of the entry, by autograd."""
    leaves = {name: inputs[source].requires_grad_() for name, source in op.grads.items()}
    out = dict(forward(inputs, sizes))
    if leaves:
        ends = [name for name in out if f"d{name}" in inputs]
        upstream = [inputs[f"d{name}"].to(out[name].dtype) for name in ends]
        got = torch.autograd.grad([out[name] for name in ends], list(leaves.values()), upstream)
        out.update(zip(leaves, got, strict=True))
    return {k: v.detach() for k, v in out.items()}
