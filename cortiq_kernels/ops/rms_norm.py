"""Residual add and RMS norm in one step, and the gradient of both.

Maths (per row of width H; sums over the row)
    forward     x̃    = x + r                         rounded to the working dtype; this is the residual stream
                rstd = (mean(x̃²) + eps)^-½
                x̂    = x̃ · rstd
                n    = x̂ · gain
    backward    g    = dn · gain
                dx  += rstd · (g − x̂ · mean(g·x̂))    also the gradient of r: the add passes it through (`+=` or `=`)
                dw   = Σ_rows dn · x̂                 (`=` or `+=`)
                n    = x̂ · gain                      again, where a weight's gradient reads it (optional)
    gain is 1 + w (`zero_centered`, as Qwen3.5 stores it) or w (Qwen3, Qwen2, Llama).

| tensor | shape | dtype |
|---|---|---|
| x, r, n, dn, dx | [N, H] | working: bf16, f16, f32, f64 |
| w, dw | [H] | f32 (f64 for f64) |
| rstd | [N] | f32 (f64 for f64) |

Precision: everything after the rounding of x̃ is in f32 (f64 for f64), rounded once into n. dx is read, summed in f32
and rounded once. Rows are independent; N = 0 gives dw = 0. No masking: a row of zeros gives n = 0 and, with dn = 0,
adds exactly 0. In f32, |x| above about 1e19 overflows the mean of squares (n = 0), as in every f32 RMS norm. The n of
the backward has the bits of the forward's.

On a GPU each way is one pass over memory (`rms_norm_triton.py`), and dw is summed in a fixed order: shares of a fixed
number of programs, then their sum. float64, rows wider than 16384 and tensors whose rows have gaps take torch.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.ops import checks
from cortiq_kernels.ops.triton_gate import launching_on, use_triton

MAX_WIDTH = 16384  # of a row that a kernel takes


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
    backend: str = "auto",
) -> tuple[Tensor, RmsNormSaved]:
    """n = norm(x + r)·gain. -> (n [N, H], saved).

    x, r [N, H] working dtype; r None adds nothing. `x_out` [N, H] receives the rounded sum (`=`); by default that is x
    itself, in place. `out` [N, H] receives n (`=`); it must not overlap x_out. weight [H] accumulation dtype.
    backend: "auto" (Triton for CUDA tensors below float64), "triton" or "torch".
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

    if use_triton(op, x, backend, _unfit(x, r, weight, x_out, out)):
        from cortiq_kernels.ops import rms_norm_triton

        rstd = x.new_empty((x.shape[0],), dtype=weight.dtype)
        with launching_on(x):
            rms_norm_triton.norm_fwd(x, r, weight, eps, x_out, out, rstd, zero_centered)
        return out, RmsNormSaved(x_out, rstd)
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
    add_dx: bool = True,
    out: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """dx `+=` the gradient through the norm; dweight [H] `=` (or `+=` with `accumulate`) its own. None skips dweight.

    dn, dx [N, H] working dtype. dx holds the gradient that reaches the residual stream from above; afterwards it is
    the gradient of both x and r. dn must not overlap dx. Where nothing comes from above, `add_dx=False` writes dx with
    `=`, and dx may be dn itself. `out` [N, H] receives n again (`=`); it must not overlap the others. backend as in the
    forward.
    """
    op = "add_rms_norm_bwd"
    x, rstd = saved
    checks.same_shape(op, "dn", dn, "the saved x", x, "pass the gradient of this norm's output")
    checks.alike(op, "dn", dn, "the saved x", x)
    checks.vector(op, "weight", weight, x.shape[1], "the saved x", x)
    checks.output(op, "dx", dx, x.shape, x.dtype, x)
    if add_dx:
        checks.apart(op, "dx", dx, (("dn", dn),))
    if dweight is not None:
        checks.vector(op, "dweight", dweight, x.shape[1], "the saved x", x)
        checks.writable(op, "dweight", dweight)
    if out is not None:
        checks.output(op, "out", out, x.shape, x.dtype, x)
        checks.apart(op, "out", out, (("dn", dn), ("dx", dx), ("the saved x", x)))

    if use_triton(op, x, backend, _unfit(x, dn, weight, dx, out, dweight)):
        from cortiq_kernels.ops import rms_norm_triton

        with launching_on(x):
            rms_norm_triton.norm_bwd(
                dn, x, rstd, weight, dx, out, dweight, centered=zero_centered, add_dx=add_dx, accumulate=accumulate
            )
        return
    scale = rstd.unsqueeze(-1)
    xhat = x.to(weight.dtype) * scale  # [N, H]
    dn = dn.to(weight.dtype)
    if dweight is not None:
        total = (dn * xhat).sum(0)
        if accumulate:
            dweight.add_(total)
        else:
            dweight.copy_(total)
    if out is not None:
        out.copy_(xhat * gain(weight, zero_centered))
    change = normalize_bwd(dn * gain(weight, zero_centered), xhat, scale)
    if add_dx:
        dx.add_(change)
    else:
        dx.copy_(change)


def _unfit(x: Tensor, *others: Tensor | None) -> str:
    """Why the kernels do not take these tensors; "" when they do."""
    if x.shape[1] > MAX_WIDTH:
        return f"rows of {x.shape[1]} elements; a program holds one of up to {MAX_WIDTH}"
    if any(t is not None and t.shape[-1] > 1 and t.stride(-1) != 1 for t in (x, *others)):
        return "the elements of a row, or of the weight, do not lie beside one another"
    return ""
