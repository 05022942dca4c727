"""Which neurons stay, and how those that stay stand in for those that go.

With a the gated activations of a layer, Σ = E[a aᵀ] and D = down_proj [H, F], neuron j adds a_j D_j to the residual
stream. S are the neurons that stay, P the others.

Rankings (the largest stay; of equals the lowest index):

    importance   Σ_jj |D_j|²                                 energy of what the neuron adds
    activation   Σ_jj
    magnitude    |gate_j|² + |up_j|² + |D_j|²                its weights; no data
    random       a permutation per layer, from the seed
    gram         pivoted Cholesky of |D_j| Σ_jk |D_k|: always the neuron of which those chosen before explain least.
                 Of neurons that do the same it keeps one. When nothing is left to explain, the rest by importance.

Repair: the best linear guess of a_P from a_S is Πᵀ a_S, with

    Π = (Σ_SS + εI)⁻¹ Σ_SP,    ε = ridge * mean of diag Σ_SS
    down' = D_S + D_P Πᵀ

by a Cholesky factorisation in float64, never by an inverse. Where the factorisation fails (rounding can make Σ_SS a
little indefinite) ε grows tenfold, and the ridge that was used is reported. What is left, as shares of what P did:

    residual          tr(Σ_PP − 2 Σ_PS Π + Πᵀ Σ_SS Π) / tr Σ_PP
    output_residual   tr(D_P (the same matrix) D_Pᵀ) / tr(D_P Σ_PP D_Pᵀ)       the error of the layer's output

Both are 0 when P is empty or never active, and 1 would be no repair at all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.recipes.errors import refuse

_EXPLAINED = 1e-7  # share of the largest pivot below which float32 sums hold only rounding
_TRIES = 8


class Repaired(NamedTuple):
    """`down` [H, |S|] float64; the residuals of the module docstring; `ridge` is the one that was used."""

    down: Tensor
    residual: float
    output_residual: float
    ridge: float


def importance(mean_square: Tensor, down: Tensor) -> Tensor:
    """E[act^2] * |down column|^2 per neuron: [F] and down [H, F] -> [F] float64."""
    return mean_square.double() * down.double().square().sum(0)


def magnitude(gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Sum of squares of a neuron's weights: gate, up [F, H] and down [H, F] -> [F] float64."""
    return gate.double().square().sum(1) + up.double().square().sum(1) + down.double().square().sum(0)


def random_order(neurons: int, seed: int, layer: int) -> Tensor:
    """Distinct scores [F] float64 in a random order, the same for a seed and layer everywhere."""
    gen = torch.Generator().manual_seed(seed * 1_000_003 + layer)
    return torch.randperm(neurons, generator=gen).double()


def keep_top(score: Tensor, width: int) -> Tensor:
    """Indices of the `width` largest of score [F], ascending; of equals the lowest index stays."""
    order = torch.sort(score, descending=True, stable=True).indices
    return order[:width].sort().values


def keep_by_gram(gram: Tensor, down: Tensor, width: int) -> Tensor:
    """Indices of the first `width` pivots ("gram" above), ascending. gram Σ [F, F] float64, down [H, F]."""
    n, norm = gram.shape[0], down.to(gram).square().sum(0).sqrt()
    energy = gram.diagonal() * norm.square()
    left, taken = energy.clone(), torch.zeros(n, dtype=torch.bool, device=gram.device)
    factor = gram.new_zeros(n, width)
    floor = _EXPLAINED * float(left.max())
    for k in range(width):
        j = int(torch.where(taken, -1.0, left).argmax())
        pivot = float(left[j])
        if taken[j] or pivot <= floor:
            rest = torch.where(taken, -1.0, energy)
            taken[keep_top(rest, width - k)] = True
            break
        column = gram[:, j] * norm * norm[j] - factor[:, :k] @ factor[j, :k]
        factor[:, k] = column / pivot**0.5
        left = (left - factor[:, k].square()).clamp_(min=0.0)
        taken[j] = True
    return taken.nonzero().squeeze(1)


def repair(gram: Tensor, down: Tensor, keep: Tensor, ridge: float = 1e-3, name: str = "repair") -> Repaired:
    """down' and what is left of the error, as in the module docstring.

    gram Σ [F, F] float64 (any positive multiple of it), down [H, F], keep S ascending; on one device. `name` is for
    the error of a matrix that no ridge mends.
    """
    down, every = down.to(gram), torch.ones(gram.shape[0], dtype=torch.bool, device=gram.device)
    every[keep] = False
    gone = every.nonzero().squeeze(1)
    kept_down, gone_down = down[:, keep], down[:, gone]
    outer = gram[gone[:, None], gone]  # Σ_PP
    inner = gram[keep[:, None], keep]  # Σ_SS
    scale = float(inner.diagonal().mean())
    lost = float(outer.diagonal().sum())
    if not lost > 0:  # nothing goes, or nothing that was ever active
        return Repaired(kept_down.clone(), 0.0, 0.0, ridge)
    if not scale > 0:  # nothing that stays was ever active, so it can stand in for nothing
        return Repaired(kept_down.clone(), 1.0, 1.0, ridge)
    cross = gram[keep[:, None], gone]  # Σ_SP
    factor, ridge = _factor(inner, scale, ridge, name)
    del inner
    pi = torch.cholesky_solve(cross, factor)
    moved = gone_down @ pi.T  # D_P Πᵀ [H, |S|]
    eps = ridge * scale
    # Πᵀ Σ_SS Π = Πᵀ Σ_SP − ε Πᵀ Π, so what is left is Σ_PP − Σ_PS Π − ε Πᵀ Π.
    explained = float((cross * pi).sum() + eps * pi.square().sum())
    output = float(((gone_down @ outer) * gone_down).sum())
    output_explained = float(((gone_down @ cross.T) * moved).sum() + eps * moved.square().sum())
    share = max(0.0, 1.0 - explained / lost)
    output_share = max(0.0, 1.0 - output_explained / output) if output > 0 else 0.0
    return Repaired(kept_down + moved, share, output_share, ridge)


def _factor(inner: Tensor, scale: float, ridge: float, name: str) -> tuple[Tensor, float]:
    """Cholesky factor of inner + ridge * scale * I, and the ridge with which it exists."""
    used = ridge
    for _ in range(_TRIES):
        shifted = inner.clone()
        shifted.diagonal().add_(used * scale)
        factor, failed = torch.linalg.cholesky_ex(shifted)
        if not int(failed):
            return factor, used
        used *= 10
    raise refuse(name, f"a Gram that has no Cholesky factor with a ridge of {used / 10:g}", "one that does",
                 "Capture again, on more records.")  # fmt: skip
