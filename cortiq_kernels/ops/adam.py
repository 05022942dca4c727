"""Adam on flat buffers, with clipping, loss scale and accept-or-skip decided on the device.

A step is three calls: `adam_norm_` on the whole flat gradient, `adam_update_` on each range, `adam_advance_` once.
All state that a step needs lives in 0-d device tensors, so the host never waits and a step can be replayed.

Maths (g' the stored gradient, which carries the loss scale; t = accepted steps so far + 1; η = rate·factor)
    norm = ‖g'‖₂/scale                            of the true gradient, before clipping
    ok   = every element of g' and the loss are finite
    g    = g'/scale · min(1, clip/norm)
    m    = β₁·m + (1 − β₁)·g,   v = β₂·v + (1 − β₂)·g²
    p    = p·(1 − η·weight_decay) − η·m̂/(√v̂ + ε),   m̂ = m/(1 − β₁ᵗ),  v̂ = v/(1 − β₂ᵗ)
    plane = round(p)
When not ok, param, m, v and plane keep every bit; the step counts as skipped, and a scale above 1 is halved (never
below 1, and it never grows back).

| tensor | shape | dtype |
|---|---|---|
| param, grad | [n] | f32 (f64 for f64) |
| m, v | [n] | that of param, or f64 for moments in double |
| plane | [n] | the 16-bit working dtype, or None |

Precision: the norm is summed in f64, so gradients whose squares overflow f32 are still good gradients and are clipped,
not skipped. Bias corrections and the clip coefficient are f64; the element-wise part runs in the dtype of m and v. With
clipping off, |g| above 1.8e19 overflows an f32 v; an f32 update takes a clip coefficient below 1e-38 with few digits.
ε stands outside the root. The decay is decoupled and uses η.
Sources: Kingma and Ba, "Adam", 2015; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.ops import checks

# Elements updated at a time: temporaries stay in a CPU's cache; on a GPU they only have to be bounded.
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 26}
_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max  # of a loss scale


class AdamRead(NamedTuple):
    """Host copy of an AdamState."""

    step: int
    skipped: int
    in_row: int
    scale: float
    norm: float
    ok: bool


class AdamState:
    """What the optimizer decides on the device, as 0-d tensors that are only ever written in place.

    step (i64) accepted steps; skipped (i64) refused ones; in_row (i64) refused since the last accepted one; scale (f32)
    the loss scale; norm (f64) gradient norm of this step; ok (bool) whether this step is accepted.
    """

    def __init__(self, step: Tensor, skipped: Tensor, in_row: Tensor, scale: Tensor, norm: Tensor, ok: Tensor) -> None:
        self.step, self.skipped, self.in_row, self.scale, self.norm, self.ok = step, skipped, in_row, scale, norm, ok

    @classmethod
    def new(cls, device: torch.device | str, scale: float = 1.0) -> AdamState:
        """No step taken yet, and ok until a norm says otherwise. `scale` is the loss scale, a normal f32 above 0."""
        if not _SMALLEST <= scale <= _LARGEST:
            checks.fail(
                "AdamState.new", "scale", "finite and above 0", f"{scale}, as float32", "use 1.0 for no loss scale"
            )

        def scalar(value: float | bool, dtype: torch.dtype) -> Tensor:
            return torch.tensor(value, dtype=dtype, device=device)

        return cls(
            step=scalar(0, torch.int64),
            skipped=scalar(0, torch.int64),
            in_row=scalar(0, torch.int64),
            scale=scalar(scale, torch.float32),
            norm=scalar(0.0, torch.float64),
            ok=scalar(True, torch.bool),
        )

    def read(self) -> AdamRead:
        """Host numbers, with one copy (which waits for the device)."""
        parts = (self.step, self.skipped, self.in_row, self.scale, self.norm, self.ok)
        step, skipped, in_row, scale, norm, ok = torch.stack([t.to(torch.float64) for t in parts]).tolist()
        return AdamRead(int(step), int(skipped), int(in_row), scale, norm, bool(ok))


def adam_ref(
    param: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    step: int,
    *,
    rate: float,
    factor: float = 1.0,
    clip: float | None = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    scale: float = 1.0,
    norm: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One accepted step in float64, not in place -> (param, m, v). `step`: earlier ones; `norm` None: of grad/scale."""
    param, grad, m, v = (t.to(torch.float64) for t in (param, grad, m, v))
    g = grad / scale
    norm = float(torch.linalg.vector_norm(g)) if norm is None else norm
    if clip is not None and clip > 0 and norm > clip:
        g = g * (clip / norm)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    m_hat = m / (1 - beta1 ** (step + 1))
    v_hat = v / (1 - beta2 ** (step + 1))
    rate = rate * factor
    return param * (1 - rate * weight_decay) - rate * m_hat / (v_hat.sqrt() + eps), m, v


def adam_norm_(state: AdamState, grad: Tensor, loss: Tensor | None = None) -> None:
    """state.norm = ‖grad‖/scale and state.ok = grad and loss are finite. grad [n] f32 or f64, n = 0 has norm 0."""
    op = "adam_norm_"
    checks.shape(op, "grad", grad, (None,), "flat, [n]", "pass the whole flat gradient")
    checks.dtype(op, "grad", grad, (torch.float32, torch.float64), "gradients are kept in the accumulation dtype")
    checks.same_device(op, "grad", grad, "state", state.step)
    length, finite = _length(grad)
    if loss is not None:
        finite = finite & torch.isfinite(loss).all()
    state.norm.copy_(length / state.scale)
    state.ok.copy_(finite)


def adam_update_(
    state: AdamState,
    param: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    plane: Tensor | None = None,
    rate: float | Tensor,
    factor: float | Tensor = 1.0,
    clip: float | None = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> None:
    """One Adam step of one flat range, in place; nothing changes, bit for bit, when state.ok is False.

    param, grad, m, v [n] (slices of flat buffers, any alignment, n = 0 allowed). `plane` [n] is the 16-bit copy that
    the GEMMs read. rate and factor: numbers, or 0-d tensors on the device. clip None or ≤ 0: no clipping. grad is
    only read.
    """
    _check("adam_update_", state, param, grad, m, v, plane)
    work = m.dtype
    t = (state.step + 1).to(torch.float64)
    fix1, fix2 = 1 - torch.pow(beta1, t), 1 - torch.pow(beta2, t)
    coef = 1 / state.scale.to(torch.float64)
    if clip is not None and clip > 0:
        coef = coef * (clip / state.norm).clamp(max=1.0)
    eta = rate * factor
    # A fill, where a copy of a host number would wait for the device.
    eta = eta.to(torch.float64) if isinstance(eta, Tensor) else torch.full_like(t, eta)
    keep = 1 - eta * weight_decay

    chunk = _CHUNK.get(param.device.type, _CHUNK["cpu"])
    for a in range(0, param.shape[0], chunk):
        p_, m_, v_ = param[a : a + chunk], m[a : a + chunk], v[a : a + chunk]
        g = grad[a : a + chunk].to(work) * coef
        m_new = (m_ * beta1).add_(g, alpha=1 - beta1)
        v_new = (v_ * beta2).addcmul_(g, g, value=1 - beta2)
        denom = v_new.sqrt().div_(fix2.sqrt()).add_(eps)
        p_new = p_.to(work) * keep
        p_new.sub_((m_new / denom).mul_(eta / fix1))
        p_new = p_new.to(p_.dtype)
        p_.copy_(torch.where(state.ok, p_new, p_))
        m_.copy_(torch.where(state.ok, m_new, m_))
        v_.copy_(torch.where(state.ok, v_new, v_))
        if plane is not None:
            w_ = plane[a : a + chunk]
            w_.copy_(torch.where(state.ok, p_new.to(w_.dtype), w_))


def adam_advance_(state: AdamState) -> None:
    """Close the step: ok counts as accepted; not ok as skipped, and halves a scale above 1 (not below 1)."""
    ok = state.ok
    state.step.add_(ok)
    state.skipped.add_(~ok)
    state.in_row.add_(1).mul_(~ok)
    halved = torch.where(state.scale > 1, (state.scale / 2).clamp(min=1.0), state.scale)
    state.scale.copy_(torch.where(ok, state.scale, halved))


def _length(grad: Tensor) -> tuple[Tensor, Tensor]:
    """(‖grad‖ 0-d f64, whether every element is finite 0-d bool)."""
    if grad.shape[0] == 0:
        return grad.new_zeros((), dtype=torch.float64), grad.new_ones((), dtype=torch.bool)
    if grad.dtype == torch.float32:
        # Squares of f32 cannot overflow f64: the sum is finite exactly when every element is.
        if grad.is_cuda:
            length = torch.linalg.vector_norm(grad, dtype=torch.float64)
        else:
            parts = [torch.linalg.vector_norm(c, dtype=torch.float64) for c in grad.split(_CHUNK["cpu"])]
            length = torch.linalg.vector_norm(torch.stack(parts))
        return length, torch.isfinite(length)
    largest = grad.abs().amax()
    unit = torch.where((largest > 0) & torch.isfinite(largest), largest, 1.0)
    return torch.linalg.vector_norm(grad / unit) * unit, torch.isfinite(largest)


def _check(op: str, state: AdamState, param: Tensor, grad: Tensor, m: Tensor, v: Tensor, plane: Tensor | None) -> None:
    checks.shape(op, "param", param, (None,), "flat, [n]", "pass a slice of the flat master")
    checks.dtype(op, "param", param, (torch.float32, torch.float64), "masters are kept in the accumulation dtype")
    checks.same_device(op, "param", param, "state", state.step)
    named = [("grad", grad), ("m", m), ("v", v)]
    if plane is not None:
        named.append(("plane", plane))
    for name, t in named:
        checks.same_shape(op, name, t, "param", param, "pass the same range of each flat buffer")
        checks.same_device(op, name, t, "param", param)
    for name, t in (("param", param), *named[1:]):
        checks.writable(op, name, t)
    checks.dtype(op, "grad", grad, (param.dtype,), "gradients are kept in the master's dtype")
    checks.dtype(op, "m", m, (param.dtype, torch.float64), "moments are kept in the master's dtype or in float64")
    checks.dtype(op, "v", v, (m.dtype,), "both moments have one dtype")
    if plane is not None:
        checks.dtype(op, "plane", plane, (torch.bfloat16, torch.float16), "it is the 16-bit copy of the master")
