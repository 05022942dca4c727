"""Residual add and RMS norm in one step, and the gradient of both.

Maths (per row of width H; sums over the row)
    forward     x̃    = x + r                         rounded to the working dtype; this is the residual stream
                rstd = (mean(x̃²) + eps)^-½
                x̂    = x̃ · rstd
                n    = x̂ · gain
    backward    g    = dn · gain
                dx  += rstd · (g − x̂ · mean(g·x̂))    also the gradient of r: the add passes it through
                dw   = Σ_rows dn · x̂                 (`=` or `+=`)
    gain is 1 + w (`zero_centered`, as Qwen3.5 stores it) or w (Qwen3, Qwen2, Llama).

| tensor | shape | dtype |
|---|---|---|
| x, r, n, dn, dx | [N, H] | working: bf16, f16, f32, f64 |
| w, dw | [H] | f32 (f64 for f64) |
| rstd | [N] | f32 (f64 for f64) |

Precision: everything after the rounding of x̃ is in f32 (f64 for f64), rounded once into n. dx is read, summed in f32
and rounded once. Rows are independent; N = 0 gives dw = 0. No masking: a row of zeros gives n = 0 and, with dn = 0,
adds exactly 0. In f32, |x| above about 1e19 overflows the mean of squares (n = 0), as in every f32 RMS norm.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.ops import checks


class RmsNormSaved(NamedTuple):
    """What the backward needs. `x` is the x_out tensor itself, not a copy: do not overwrite it before the backward."""

    x: Tensor  # [N, H] working dtype
    rstd: Tensor  # [N] accumulation dtype


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = True) -> Tensor:
    """x·(mean(x²) + eps)^-½·(1 + weight) over the last dimension, all in the dtype of x.

    `zero_centered=False` multiplies by `weight` instead of `1 + weight`.
    """
    w = weight.to(x.dtype)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + w if zero_centered else w)


def gain(weight: Tensor, zero_centered: bool) -> Tensor:
    """What the normed value is multiplied by: 1 + weight, or weight itself."""
    return 1 + weight if zero_centered else weight


def normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x̂ = x·rstd over the last dimension. x is in the accumulation dtype already. -> (x̂ [..., D], rstd [..., 1])."""
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * rstd, rstd


def normalize_bwd(dhat: Tensor, xhat: Tensor, rstd: Tensor) -> Tensor:
    """dx = rstd·(dx̂ − x̂·mean(dx̂·x̂)), the gradient of `normalize`."""
    return (dhat - xhat * (dhat * xhat).mean(-1, keepdim=True)) * rstd


def add_rms_norm_fwd(
    x: Tensor,
    r: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    zero_centered: bool = True,
    x_out: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, RmsNormSaved]:
    """n = norm(x + r)·gain. -> (n [N, H], saved).

    x, r [N, H] working dtype; r None adds nothing. `x_out` [N, H] receives the rounded sum (`=`); by default that is x
    itself, in place. `out` [N, H] receives n (`=`); it must not overlap x_out. weight [H] accumulation dtype.
    """
    op = "add_rms_norm_fwd"
    checks.shape(op, "x", x, (None, None), "[N, H]", "flatten batch and time into rows first")
    checks.dtype(op, "x", x, checks.FLOATS, "convert it with .to()")
    checks.vector(op, "weight", weight, x.shape[1], "x", x)
    if r is not None:
        checks.same_shape(op, "r", r, "x", x, "r is what the layer adds to the residual stream")
        checks.alike(op, "r", r, "x", x)
    if x_out is None and r is None:
        x_out = x  # only read
    else:
        x_out = checks.output(op, "x_out", x if x_out is None else x_out, x.shape, x.dtype, x)
    out = checks.output(op, "out", out, x.shape, x.dtype, x)

    if r is not None:
        torch.add(x, r, out=x_out)
    elif x_out is not x:
        x_out.copy_(x)
    xhat, rstd = normalize(x_out.to(weight.dtype), eps)
    out.copy_(xhat.mul_(gain(weight, zero_centered)))
    return out, RmsNormSaved(x_out, rstd.squeeze(-1))


def add_rms_norm_bwd(
    dn: Tensor,
    saved: RmsNormSaved,
    weight: Tensor,
    *,
    dx: Tensor,
    zero_centered: bool = True,
    dweight: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """dx `+=` the gradient through the norm; dweight [H] `=` (or `+=` with `accumulate`) its own. None skips dweight.

    dn, dx [N, H] working dtype. dx holds the gradient that reaches the residual stream from above; afterwards it is
    the gradient of both x and r. dn must not overlap dx.
    """
    op = "add_rms_norm_bwd"
    x, rstd = saved
    checks.same_shape(op, "dn", dn, "the saved x", x, "pass the gradient of this norm's output")
    checks.alike(op, "dn", dn, "the saved x", x)
    checks.vector(op, "weight", weight, x.shape[1], "the saved x", x)
    checks.output(op, "dx", dx, x.shape, x.dtype, x)
    if dweight is not None:
        checks.vector(op, "dweight", dweight, x.shape[1], "the saved x", x)
        checks.writable(op, "dweight", dweight)

    scale = rstd.unsqueeze(-1)
    xhat = x.to(weight.dtype) * scale  # [N, H]
    dn = dn.to(weight.dtype)
    if dweight is not None:
        total = (dn * xhat).sum(0)
        if accumulate:
            dweight.add_(total)
        else:
            dweight.copy_(total)
    dx.add_(normalize_bwd(dn * gain(weight, zero_centered), xhat, scale))
