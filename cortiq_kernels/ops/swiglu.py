"""Gated MLP activation with an optional gate per neuron, and its gradients.

Maths (gate_up = gate | up side by side; σ the logistic function; s the mask, 1 when absent)
    forward     act   = silu(gate) · s · up,        silu(x) = x·σ(x)
    backward    dgate = dact · s · up · σ(gate)·(1 + gate·(1 − σ(gate)))
                dup   = dact · s · silu(gate)
                ds    = Σ_rows dact · silu(gate) · up          (`=` or `+=`)
    to rank     Σ_rows |act|,  Σ_rows act²,  s·ds              (`=` or `+=`)

| tensor | shape | dtype |
|---|---|---|
| gate_up, dgate_up | [N, 2F] | working: bf16, f16, f32, f64 |
| act, dact | [N, F] | working |
| mask, dmask, sum_abs, sum_square, mask_dmask | [F] | f32 (f64 for f64) |
| counted | [N] | bool |

Precision: all in f32 (f64 for f64) from the working-dtype inputs, rounded once into each output. dmask is taken from
the unrounded activation before the gate, sum_abs and sum_square from act as it is written, in the rows that are
`counted` (padding is not). A neuron with s = 0 has act = 0 and passes no gradient to gate and up (both exactly 0 for
finite inputs: s comes before up, because silu·up can overflow), but has a mask gradient. N = 0 gives sums of 0.
s·ds is what first-order pruning scores; Σ_h Wd·dWd of down_proj and Σ_h Wu·dWu of up_proj are equal to it.
The backward also returns act again, for the weight gradient of down_proj, so that the forward need not keep it: the
same bits as the forward's on one device.

CUDA tensors take the kernels of `swiglu_triton.py`, one pass over memory each way, with sums in a fixed order; float64,
and rows whose columns are not side by side, take plain torch. Nothing waits for the device. What is allocated besides
outputs is of a size that N and F fix (a few MiB of parts of the sums), so calls can be captured.
Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cortiq_kernels.ops import checks
from cortiq_kernels.ops.triton_gate import use_triton

MAX_STRIDE = 1 << 24  # elements from row to row: offsets inside a tile of up to 64 rows fit 32 bits


def swiglu_ref(gate_up: Tensor, mask: Tensor | None = None) -> Tensor:
    """silu(gate)·up·mask in the dtype of gate_up. [N, 2F], [F] -> [N, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    act = torch.nn.functional.silu(gate) * up
    return act if mask is None else act * mask.to(act.dtype)


def swiglu_mlp_fwd(
    gate_up: Tensor,
    mask: Tensor | None = None,
    *,
    out: Tensor | None = None,
    sum_abs: Tensor | None = None,
    sum_square: Tensor | None = None,
    counted: Tensor | None = None,
    accumulate: bool = False,
    backend: str = "auto",
) -> Tensor:
    """act = silu(gate)·up·mask. [N, 2F] -> [N, F]; `out` is written with `=`, None allocates.

    sum_abs and sum_square [F] are computed only when passed: `=`, or `+=` with `accumulate`, over the rows that
    `counted` [N] bool marks (None: all). `backend`: "auto", or "triton" and "torch" to insist.
    """
    op = "swiglu_mlp_fwd"
    n, f = _check(op, gate_up, mask)
    out = checks.output(op, "out", out, (n, f), gate_up.dtype, gate_up)
    _vectors(op, f, gate_up, (("sum_abs", sum_abs), ("sum_square", sum_square)))
    if counted is not None:
        checks.shape(op, "counted", counted, (n,), f"[{n}]", "it says of every row whether it counts in the sums")
        checks.dtype(op, "counted", counted, (torch.bool,), "pass a mask of rows")
        checks.same_device(op, "counted", counted, "gate_up", gate_up)
    if out.numel() and use_triton(op, gate_up, backend, _unfit(gate_up, out)):
        from cortiq_kernels.ops import swiglu_triton

        rows = None if counted is None else counted.contiguous()
        swiglu_triton.launch_fwd(gate_up, mask, out, rows, sum_abs, sum_square, accumulate)
        return out
    acc = checks.acc_dtype(gate_up.dtype)
    gate, up = gate_up[:, :f].to(acc), gate_up[:, f:].to(acc)
    act = torch.sigmoid(gate).mul_(gate)  # the backward's own expression: act comes out the same bit for bit
    if mask is not None:
        act.mul_(mask)
    out.copy_(act.mul_(up))
    if sum_abs is not None or sum_square is not None:
        written = out.to(acc)
        if counted is not None:
            written = torch.where(counted[:, None], written, 0.0)
        if sum_abs is not None:
            _store(sum_abs, written.abs().sum(0), accumulate)
        if sum_square is not None:
            _store(sum_square, written.square().sum(0), accumulate)
    return out


def swiglu_mlp_bwd(
    dact: Tensor,
    gate_up: Tensor,
    mask: Tensor | None = None,
    *,
    dgate_up: Tensor | None = None,
    act: Tensor | None = None,
    dmask: Tensor | None = None,
    mask_dmask: Tensor | None = None,
    accumulate: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """-> (dgate_up [N, 2F], act [N, F], dmask [F] or None).

    dact [N, F] is the gradient of act after the mask. dgate_up and act are written with `=`; None allocates; dgate_up
    may be gate_up itself and act may be dact itself. dmask, and mask_dmask [F] = mask·dmask (of this call), are
    computed only when passed: `=`, or `+=` with `accumulate`. `backend` as in `swiglu_mlp_fwd`.
    """
    op = "swiglu_mlp_bwd"
    n, f = _check(op, gate_up, mask)
    checks.shape(op, "dact", dact, (n, f), f"[{n}, {f}]", "it is the gradient of the activation, one column a neuron")
    checks.alike(op, "dact", dact, "gate_up", gate_up)
    dgate_up = checks.output(op, "dgate_up", dgate_up, (n, 2 * f), gate_up.dtype, gate_up)
    act = checks.output(op, "act", act, (n, f), gate_up.dtype, gate_up)
    acc = checks.acc_dtype(gate_up.dtype)
    _vectors(op, f, gate_up, (("dmask", dmask), ("mask_dmask", mask_dmask)))
    if act.numel() and use_triton(op, gate_up, backend, _unfit(gate_up, dact, dgate_up, act)):
        from cortiq_kernels.ops import swiglu_triton

        swiglu_triton.launch_bwd(dact, gate_up, mask, dgate_up, act, dmask, mask_dmask, accumulate)
        return dgate_up, act, dmask

    gate, up, da = gate_up[:, :f].to(acc), gate_up[:, f:].to(acc), dact.to(acc)
    sig = torch.sigmoid(gate)
    silu = gate * sig
    if dmask is not None or mask_dmask is not None:
        total = (da * silu * up).sum(0)
        if dmask is not None:
            _store(dmask, total, accumulate)
        if mask_dmask is not None:
            _store(mask_dmask, total if mask is None else total * mask, accumulate)
    if mask is None:
        act_out = silu * up
    else:
        act_out = (silu * mask).mul_(up)
        da = da * mask
    # silu' = σ·(1 + gate·(1 − σ)) = σ + silu·(1 − σ)
    dsilu = sig + silu * (1 - sig)
    dgate = dsilu.mul_(da).mul_(up)
    dgate_up[:, f:].copy_(silu.mul_(da))
    dgate_up[:, :f].copy_(dgate)
    act.copy_(act_out)
    return dgate_up, act, dmask


def _store(out: Tensor, value: Tensor, accumulate: bool) -> None:
    """`=` or `+=`."""
    if accumulate:
        out.add_(value)
    else:
        out.copy_(value)


def _unfit(*matrices: Tensor) -> str:
    """Why the kernels do not take these [N, ·] tensors; "" when they do."""
    for t in matrices:
        if t.shape[1] > 1 and t.stride(1) != 1:
            return f"columns {t.stride(1)} elements apart; kernels take rows of unit column stride (.contiguous())"
        if t.stride(0) > MAX_STRIDE:
            return f"rows {t.stride(0)} elements apart; kernels take {MAX_STRIDE} at most"
    return ""


def _vectors(op: str, f: int, gate_up: Tensor, outputs: Sequence[tuple[str, Tensor | None]]) -> None:
    """Sums over rows that are asked for: [F], in the accumulation dtype, writable."""
    for name, t in outputs:
        if t is not None:
            checks.vector(op, name, t, f, "gate_up", gate_up)
            checks.writable(op, name, t)


def _check(op: str, gate_up: Tensor, mask: Tensor | None) -> tuple[int, int]:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        checks.fail(op, "gate_up", "[N, 2F]", tuple(gate_up.shape), "pass gate and up side by side")
    checks.dtype(op, "gate_up", gate_up, checks.FLOATS, "convert it with .to()")
    n, f = gate_up.shape[0], gate_up.shape[1] // 2
    if mask is not None:
        checks.vector(op, "mask", mask, f, "gate_up", gate_up)
    return n, f
