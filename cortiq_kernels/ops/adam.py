"""Adam on flat buffers, with clipping, loss scale and accept-or-skip decided on the device.

`adam_step_` is a whole step over ranges of flat memory, each with a factor on the rate. Its parts are there too, in
plain torch: `adam_norm_` on a flat gradient, `adam_update_` on each range, `adam_advance_` once. All state that a step
needs lives in 0-d device tensors, so the host never waits and a step can be replayed.

Maths (g' the stored gradient, which carries the loss scale; t = accepted steps so far + 1; η = rate·factor)
    norm = ‖g'‖₂/scale                            of the true gradient in all ranges, before clipping
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
On a GPU a step is three Triton launches (adam_triton.py); float64 parameters take the torch path, which reads and
writes everything several times.
Sources: Kingma and Ba, "Adam", 2015; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.ops import checks
from cortiq_kernels.ops.triton_gate import launching_on, use_triton

if TYPE_CHECKING:
    from cortiq_kernels.ops.adam_triton import Tables

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


class AdamRange(NamedTuple):
    """[start, stop) of the flat buffers, mirrored in the plane from `plane_start` on (None: not), and its factor on the
    rate."""

    start: int
    stop: int
    plane_start: int | None = None
    factor: float = 1.0


class AdamRanges:
    """What a step updates: disjoint ranges, in the order in which their norms are added. Immutable; a device's copy of
    it is made at its first use there and kept, so give every step the same object."""

    def __init__(self, ranges: Sequence[AdamRange]) -> None:
        self.ranges = tuple(ranges)
        end = 0
        for r in sorted(self.ranges):
            if not end <= r.start <= r.stop:
                checks.fail("AdamRanges", "ranges", "disjoint, start <= stop", r, "cut them where the factor changes")
            end = r.stop
        self.stop = end  # of the last range
        plane = [r.plane_start + r.stop - r.start for r in self.ranges if r.plane_start is not None]
        self.plane_stop = max(plane, default=0)
        self._tables: dict[tuple[torch.device, int], Tables] = {}

    def tables(self, device: torch.device, size: int) -> Tables:
        """For the kernels, whose moments have `size` bits."""
        from cortiq_kernels.ops import adam_triton

        if (device, size) not in self._tables:
            self._tables[device, size] = adam_triton.make_tables(self.ranges, device, size)
        return self._tables[device, size]


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


def adam_step_(
    state: AdamState,
    param: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    ranges: AdamRanges | None = None,
    plane: Tensor | None = None,
    loss: Tensor | None = None,
    rate: float | Tensor,
    clip: float | None = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    backend: str = "auto",
) -> None:
    """One step: norm and finite check, update of `ranges`, counters. What lies outside of them is not read or written.

    param, grad, m, v [n], any alignment, n = 0 allowed. ranges None: all of it, with the whole plane. `loss`: 0-d; one
    that is not finite refuses the step. rate: a number, or a 0-d tensor on the device. clip None or ≤ 0: no clipping.
    Nothing but the counters changes, bit for bit, in a refused step. grad is only read. backend: "auto" (Triton for
    CUDA tensors, but for float64 parameters), "triton" or "torch".
    """
    op = "adam_step_"
    n = param.shape[0] if param.dim() == 1 else 0
    if ranges is None:
        ranges = AdamRanges([AdamRange(0, n, None if plane is None else 0)])
    _check(op, state, param, grad, m, v, plane)
    if ranges.stop > n:
        checks.fail(op, "ranges", f"inside the {n} elements", ranges.stop, "pass the buffers that they were made for")
    if plane is not None and ranges.plane_stop > plane.shape[0]:
        checks.fail(op, "plane", f"of at least {ranges.plane_stop} elements", plane.shape[0], "pass the whole plane")
    if loss is not None:
        checks.shape(op, "loss", loss, (), "0-d", "pass the mean loss of the step")
        checks.same_device(op, "loss", loss, "param", param)
    clip = 0.0 if clip is None or clip <= 0 else clip
    hyper = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    flat = [t for t in (param, grad, m, v, plane) if t is not None]
    unfit = "" if all(t.is_contiguous() for t in flat) else "its buffers are strided"
    if use_triton(op, param, backend, unfit):
        from cortiq_kernels.ops import adam_triton

        if not isinstance(rate, Tensor):
            rate = torch.full((), rate, dtype=torch.float64, device=param.device)
        with launching_on(param):
            adam_triton.launch(
                state, param, grad, m, v, plane, ranges.tables(param.device, adam_triton.size_of(m)),
                None if loss is None else loss.to(torch.float64), rate.to(torch.float64), clip=clip, **hyper,
            )  # fmt: skip
        return
    _norm(state, [grad[r.start : r.stop] for r in ranges.ranges], loss)
    for r in ranges.ranges:
        cut = slice(r.start, r.stop)
        part = None
        if plane is not None and r.plane_start is not None:
            part = plane[r.plane_start : r.plane_start + r.stop - r.start]
        adam_update_(
            state, param[cut], grad[cut], m[cut], v[cut], plane=part, rate=rate, factor=r.factor, clip=clip, **hyper
        )  # fmt: skip
    adam_advance_(state)


def adam_norm_(state: AdamState, grad: Tensor, loss: Tensor | None = None) -> None:
    """state.norm = ‖grad‖/scale and state.ok = grad and loss are finite. grad [n] f32 or f64, n = 0 has norm 0."""
    op = "adam_norm_"
    checks.shape(op, "grad", grad, (None,), "flat, [n]", "pass the whole flat gradient")
    checks.dtype(op, "grad", grad, (torch.float32, torch.float64), "gradients are kept in the accumulation dtype")
    checks.same_device(op, "grad", grad, "state", state.step)
    _norm(state, [grad], loss)


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
    if plane is not None:
        checks.same_shape("adam_update_", "plane", plane, "param", param, "pass the same range of each flat buffer")
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


def _norm(state: AdamState, grads: Sequence[Tensor], loss: Tensor | None) -> None:
    """state.norm and state.ok of all `grads` together."""
    lengths, finite = zip(*map(_length, grads), strict=True) if grads else ((state.norm.new_zeros(()),), (state.ok,))
    length = lengths[0] if len(lengths) == 1 else _length(torch.stack(lengths))[0]
    good = finite[0] if len(finite) == 1 else torch.stack(finite).all()
    if loss is not None:
        good = good & torch.isfinite(loss).all()
    state.norm.copy_(length / state.scale)
    state.ok.copy_(good)


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
    for name, t in named:
        checks.same_shape(op, name, t, "param", param, "pass the same range of each flat buffer")
    if plane is not None:
        checks.shape(op, "plane", plane, (None,), "flat", "pass the 16-bit copy of the flat master")
        named.append(("plane", plane))
    for name, t in named:
        checks.same_device(op, name, t, "param", param)
    for name, t in (("param", param), *named[1:]):
        checks.writable(op, name, t)
    checks.dtype(op, "grad", grad, (param.dtype,), "gradients are kept in the master's dtype")
    checks.dtype(op, "m", m, (param.dtype, torch.float64), "moments are kept in the master's dtype or in float64")
    checks.dtype(op, "v", v, (m.dtype,), "both moments have one dtype")
    if plane is not None:
        checks.dtype(op, "plane", plane, (torch.bfloat16, torch.float16), "it is the 16-bit copy of the master")
