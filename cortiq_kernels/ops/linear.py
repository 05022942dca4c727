"""Matrix products of the step: y = x·Wᵀ and its two gradients.

Maths
    forward     y  = x · wᵀ
    backward    dx = dy · w          (`=` or `+=`)
                dw = dyᵀ · x         (`=` or `+=`)

| tensor | shape | dtype |
|---|---|---|
| x, dx | [N, I] | working: bf16, f16, f32, f64 |
| w | [O, I] | working |
| y, dy | [N, O] | working |
| dw | [O, I] | f32 (f64 when the working dtype is f64) |

Precision: products are summed in f32 (f64 for f64) and rounded once on the way out. The weight gradient never passes
through 16 bit: on CUDA the 16-bit GEMM writes f32 directly, on the CPU the operands are converted first (a CPU has no
16-bit GEMM with an f32 result). Sixteen-bit accumulation of dw over micro-batches drifts without bound.
N = 0 gives dw = 0 (`=`) or leaves it (`+=`). Rows may be strided or expanded; outputs may hold NaN before, and must not
overlap an input (one that is an input is refused).
GEMMs are the vendor library's, through torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortiq_kernels.ops import checks

_HALF = (torch.bfloat16, torch.float16)


def linear_ref(x: Tensor, w: Tensor) -> Tensor:
    """y = x·wᵀ in the dtype of x. [N, I], [O, I] -> [N, O]."""
    return x @ w.to(x.dtype).transpose(0, 1)


def linear_fwd(x: Tensor, w: Tensor, *, out: Tensor | None = None) -> Tensor:
    """y = x·wᵀ.

    x [N, I], w [O, I], one dtype and device. `out` [N, O] is written with `=`; None allocates.
    Raises ValueError when shapes, dtypes or devices do not fit.
    """
    _operands("linear_fwd", "x", x, "w", w)
    if x.shape[1] != w.shape[1]:
        checks.fail(
            "linear_fwd", "w", f"[O, {x.shape[1]}] for x {tuple(x.shape)}", tuple(w.shape), "w is stored [out, in]"
        )
    out = checks.output("linear_fwd", "out", out, (x.shape[0], w.shape[0]), x.dtype, x)
    checks.apart("linear_fwd", "out", out, (("x", x), ("w", w)))
    return torch.mm(x, w.t(), out=out)


def linear_bwd_x(dy: Tensor, w: Tensor, *, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
    """dx = dy·w.

    dy [N, O], w [O, I], one dtype and device. `out` [N, I] in the same dtype: `=`, or `+=` with `accumulate`
    (the sum is formed in the accumulation dtype and rounded once). None allocates, which `accumulate` refuses.
    """
    _operands("linear_bwd_x", "dy", dy, "w", w)
    if dy.shape[1] != w.shape[0]:
        checks.fail(
            "linear_bwd_x", "w", f"[{dy.shape[1]}, I] for dy {tuple(dy.shape)}", tuple(w.shape), "w is stored [out, in]"
        )
    sizes = (dy.shape[0], w.shape[1])
    out = checks.output("linear_bwd_x", "out", out, sizes, dy.dtype, dy, accumulate=accumulate)
    checks.apart("linear_bwd_x", "out", out, (("dy", dy), ("w", w)))
    if accumulate:
        return out.addmm_(dy, w)
    return torch.mm(dy, w, out=out)


def linear_bwd_w(dy: Tensor, x: Tensor, *, out: Tensor, accumulate: bool = False) -> Tensor:
    """dw = dyᵀ·x, in the accumulation dtype.

    dy [N, O], x [N, I], one dtype and device. `out` [O, I] f32 (f64 for f64): `=`, or `+=` with `accumulate`.
    """
    _operands("linear_bwd_w", "dy", dy, "x", x)
    if dy.shape[0] != x.shape[0]:
        checks.fail(
            "linear_bwd_w", "x", f"[{dy.shape[0]}, I] for dy {tuple(dy.shape)}", tuple(x.shape), "rows must pair up"
        )
    acc = checks.acc_dtype(x.dtype)
    out = checks.output("linear_bwd_w", "out", out, (dy.shape[1], x.shape[1]), acc, x)
    checks.apart("linear_bwd_w", "out", out, (("dy", dy), ("x", x)))
    dyt = dy.t()
    if x.dtype in _HALF and x.is_cuda and x.shape[0] > 0:
        if accumulate:
            return torch.addmm(out, dyt, x, out_dtype=acc, out=out)
        return torch.mm(dyt, x, out_dtype=acc, out=out)
    if x.dtype != acc:
        dyt, x = dyt.to(acc), x.to(acc)
    if accumulate:
        return out.addmm_(dyt, x)
    return torch.mm(dyt, x, out=out)


def _operands(op: str, a_name: str, a: Tensor, b_name: str, b: Tensor) -> None:
    for name, t in ((a_name, a), (b_name, b)):
        checks.shape(op, name, t, (None, None), "a matrix", "flatten batch and time into rows first")
    checks.dtype(op, a_name, a, checks.FLOATS, "convert it with .to()")
    checks.alike(op, b_name, b, a_name, a)
