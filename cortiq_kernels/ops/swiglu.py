"""Gated MLP activation with an optional gate per neuron, and its gradients.

Maths (gate_up = gate | up side by side; σ the logistic function; s the mask, 1 when absent)
    forward     act   = silu(gate) · s · up,        silu(x) = x·σ(x)
    backward    dgate = dact · s · up · σ(gate)·(1 + gate·(1 − σ(gate)))
                dup   = dact · s · silu(gate)
                ds    = Σ_rows dact · silu(gate) · up          (`=` or `+=`)

| tensor | shape | dtype |
|---|---|---|
| gate_up, dgate_up | [N, 2F] | working: bf16, f16, f32, f64 |
| act, dact | [N, F] | working |
| mask, dmask | [F] | f32 (f64 for f64) |

Precision: all in f32 (f64 for f64) from the working-dtype inputs, rounded once into each output. dmask is taken from
the unrounded activation before the gate. A neuron with s = 0 has act = 0 and passes no gradient to gate and up (both
exactly 0 for finite inputs: s comes before up, because silu·up can overflow), but has a mask gradient. N = 0 gives
dmask = 0.
The backward also returns act again, for the weight gradient of down_proj, so that the forward need not keep it.
Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortiq_kernels.ops import checks


def swiglu_ref(gate_up: Tensor, mask: Tensor | None = None) -> Tensor:
    """silu(gate)·up·mask in the dtype of gate_up. [N, 2F], [F] -> [N, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    act = torch.nn.functional.silu(gate) * up
    return act if mask is None else act * mask.to(act.dtype)


def swiglu_mlp_fwd(gate_up: Tensor, mask: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """act = silu(gate)·up·mask. [N, 2F] -> [N, F]; `out` is written with `=`, None allocates."""
    op = "swiglu_mlp_fwd"
    n, f = _check(op, gate_up, mask)
    out = checks.output(op, "out", out, (n, f), gate_up.dtype, gate_up)
    acc = checks.acc_dtype(gate_up.dtype)
    gate, up = gate_up[:, :f].to(acc), gate_up[:, f:].to(acc)
    act = torch.sigmoid(gate).mul_(gate)  # the backward's own expression: act comes out the same bit for bit
    if mask is not None:
        act.mul_(mask)
    return out.copy_(act.mul_(up))


def swiglu_mlp_bwd(
    dact: Tensor,
    gate_up: Tensor,
    mask: Tensor | None = None,
    *,
    dgate_up: Tensor | None = None,
    act: Tensor | None = None,
    dmask: Tensor | None = None,
    accumulate: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """-> (dgate_up [N, 2F], act [N, F], dmask [F] or None).

    dact [N, F] is the gradient of act after the mask. dgate_up and act are written with `=`; None allocates; dgate_up
    may be gate_up itself and act may be dact itself. dmask is computed only when passed: `=`, or `+=` with
    `accumulate`.
    """
    op = "swiglu_mlp_bwd"
    n, f = _check(op, gate_up, mask)
    checks.shape(op, "dact", dact, (n, f), f"[{n}, {f}]", "it is the gradient of the activation, one column a neuron")
    checks.alike(op, "dact", dact, "gate_up", gate_up)
    dgate_up = checks.output(op, "dgate_up", dgate_up, (n, 2 * f), gate_up.dtype, gate_up)
    act = checks.output(op, "act", act, (n, f), gate_up.dtype, gate_up)
    acc = checks.acc_dtype(gate_up.dtype)
    if dmask is not None:
        checks.vector(op, "dmask", dmask, f, "gate_up", gate_up)
        checks.writable(op, "dmask", dmask)

    gate, up, da = gate_up[:, :f].to(acc), gate_up[:, f:].to(acc), dact.to(acc)
    sig = torch.sigmoid(gate)
    silu = gate * sig
    if dmask is not None:
        total = (da * silu * up).sum(0)
        if accumulate:
            dmask.add_(total)
        else:
            dmask.copy_(total)
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


def _check(op: str, gate_up: Tensor, mask: Tensor | None) -> tuple[int, int]:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        checks.fail(op, "gate_up", "[N, 2F]", tuple(gate_up.shape), "pass gate and up side by side")
    checks.dtype(op, "gate_up", gate_up, checks.FLOATS, "convert it with .to()")
    n, f = gate_up.shape[0], gate_up.shape[1] // 2
    if mask is not None:
        checks.vector(op, "mask", mask, f, "gate_up", gate_up)
    return n, f
