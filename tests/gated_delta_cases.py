"""Cases of the gated delta rule and of the mixer, for tests of their kernels under the interpreter and on a GPU: how
inputs are made, the truth in float64, and errors head by head, so that no head hides behind another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cortiq_kernels.ops.checks import acc_dtype
from cortiq_kernels.ops.gated_delta import (
    GdnDims,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    chunk_gated_delta_rule_ref,
    gdn_mixer_bwd,
    gdn_mixer_fwd,
    gdn_mixer_ref,
)

EPS = 1e-6
WEIGHTS = ("dconv", "dA_log", "ddt_bias", "dnorm")  # the mixer's small gradients


class Scan(NamedTuple):
    """Inputs of the recurrence, and the gradients of o and of the final state."""

    q: Tensor  # [B, T, HK, DK]
    k: Tensor
    v: Tensor  # [B, T, HV, DV]
    g: Tensor  # [B, T, HV]
    beta: Tensor
    h0: Tensor | None  # [S, HV, DK, DV]
    do: Tensor
    dht: Tensor | None


def scan_case(
    rng, batch, t, hk, hv, dk, dv, *, dtype=torch.float32, states=None, g=None, rates=(0.02, 16.0), state=True
) -> Scan:
    """Unit q and k; g of decay rates from `rates`, head by head, or `g` everywhere; g, beta and states in float32."""

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float32, device=rng.device)

    q, k = (F.normalize(normal(batch, t, hk, dk), dim=-1).to(dtype) for _ in range(2))
    if g is None:
        speed = torch.linspace(*rates, hv, device=rng.device) if hv > 1 else torch.tensor(rates[:1], device=rng.device)
        decay = -speed * F.softplus(normal(batch, t, hv))
    else:
        decay = torch.full((batch, t, hv), g, device=rng.device)
    h0, dht = (normal(batch if states is None else states, hv, dk, dv) if state else None for _ in range(2))
    v, do = (normal(batch, t, hv, dv).to(dtype) for _ in range(2))
    return Scan(q, k, v, decay, normal(batch, t, hv).sigmoid(), h0, do, dht)


def scan_run(case: Scan, cu=None, scale=None, backend="triton") -> dict[str, Tensor]:
    """Every result of both directions, by name."""
    o, ht, saved = chunk_gated_delta_rule_fwd(
        *case[:5], scale, case.h0, case.dht is not None, cu_seqlens=cu, backend=backend
    )
    grads = chunk_gated_delta_rule_bwd(case.do, saved, case.dht)
    names = ("dq", "dk", "dv", "dg", "dbeta", "dh0")
    found = {"o": o, "final": ht, **dict(zip(names, grads, strict=True))}
    return {name: x for name, x in found.items() if x is not None}


def doubled(case: Scan) -> Scan:
    return Scan(*(None if x is None else x.double() for x in case))


def scan_truth(case: Scan, cu=None, scale=None) -> dict[str, Tensor]:
    """float64 autograd through the token recurrence."""
    leaves = [x.detach().requires_grad_() for x in doubled(case)[:6] if x is not None]
    h0 = leaves[5] if case.h0 is not None else None
    o, ht = chunk_gated_delta_rule_ref(*leaves[:5], scale, h0, case.dht is not None, cu)
    outs, grads = [o], [case.do.double()]
    if case.dht is not None:
        outs, grads = [o, ht], [case.do.double(), case.dht.double()]
    back = torch.autograd.grad(outs, leaves, grads, materialize_grads=True)
    names = ("dq", "dk", "dv", "dg", "dbeta", "dh0")
    found = {"o": o.detach(), **dict(zip(names, back, strict=False))}
    return found if ht is None else {**found, "final": ht.detach()}


def head_errors(name: str, got: Tensor, want: Tensor, floor: float = 1e-7) -> Tensor:
    """[H] relative L2 error of each head; a head below `floor` of the largest is judged by that much of it."""
    assert got.shape == want.shape, (name, got.shape, want.shape)
    dim = 1 if name in ("final", "dh0") else 2
    err, size = ((x.double().movedim(dim, 0).flatten(1)).norm(dim=1) for x in (got.double() - want, want))
    if not size.numel():
        return size
    return err / size.clamp(min=max(floor * size.max().item(), 1e-30))


def close(got: dict[str, Tensor], want: dict[str, Tensor], bound: float | dict[str, float], **kw) -> None:
    """Every result is finite, and every head of it within its bound."""
    assert got.keys() == want.keys(), (got.keys(), want.keys())
    for name, x in got.items():
        assert torch.isfinite(x).all(), name
        most = bound[name] if isinstance(bound, dict) else bound
        worst = head_errors(name, x, want[name], **kw)
        assert (worst <= most).all(), (name, worst.tolist())


class Mixer(NamedTuple):
    """Inputs of the mixer, and the gradient of its output."""

    proj: Tensor  # [N, dims.width]
    weights: tuple[Tensor, Tensor, Tensor, Tensor]  # conv, A_log, dt_bias, norm
    dout: Tensor  # [N, dims.out_width]
    dims: GdnDims


def mixer_case(rng, dims: GdnDims, n: int, *, dtype=torch.float32, rates=(0.02, 16.0)) -> Mixer:
    """`rates` are those of exp(A_log), from the first head to the last."""

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float32, device=rng.device)

    speed = torch.linspace(*rates, dims.nv, device=rng.device)
    weights = (0.5 * normal(dims.conv_width, dims.conv), speed.log(), normal(dims.nv), normal(dims.dv))
    proj, dout = normal(n, dims.width).to(dtype), normal(n, dims.out_width).to(dtype)
    return Mixer(proj, tuple(w.to(acc_dtype(dtype)) for w in weights), dout, dims)


def empty_like(case: Mixer) -> dict[str, Tensor]:
    """NaN for everything that the two directions write."""
    shapes = {"out": case.dout, "dproj": case.proj, **dict(zip(WEIGHTS, case.weights, strict=True))}
    return {name: torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device) for name, x in shapes.items()}


def mixer_run(case: Mixer, cu: Tensor, window: int, *, backend="triton", keep="lean", into=None) -> dict[str, Tensor]:
    """Every result of both directions, by name, written into NaN; `into` are the tensors to write to."""
    made = empty_like(case) if into is None else into
    common = dict(dims=case.dims, cu_seqlens=cu, max_seqlen=window, eps=EPS)
    _, saved = gdn_mixer_fwd(case.proj, *case.weights, out=made["out"], backend=backend, keep=keep, **common)
    grads = {name: made[name] for name in WEIGHTS}
    gdn_mixer_bwd(case.dout, saved, *case.weights, dproj=made["dproj"], **grads, **common)
    return made


def mixer_truth(case: Mixer, cu: Tensor) -> dict[str, Tensor]:
    """float64 autograd through the reference."""
    leaves = [x.detach().double().requires_grad_() for x in (case.proj, *case.weights)]
    out = gdn_mixer_ref(*leaves, case.dims, cu, EPS)
    grads = torch.autograd.grad(out, leaves, case.dout.double())
    return {"out": out.detach(), **dict(zip(("dproj", *WEIGHTS), grads, strict=True))}


def by_part(case: Mixer, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mixer's results as the heads that they consist of, [1, N, H, D] each (`dnorm` has none: one head)."""
    d = case.dims
    heads = {"q": (d.nk, d.dk), "k": (d.nk, d.dk), "v": (d.nv, d.dv)}

    def split(rows):  # [R, C] -> q, k, v
        parts = rows.split([h * w for h, w in heads.values()], dim=1)
        return {n: x.reshape(1, -1, *s) for (n, s), x in zip(heads.items(), parts, strict=True)}

    dproj = results["dproj"]
    parts = {"out": results["out"].reshape(1, -1, d.nv, d.dv), "dz": dproj[:, d.z].reshape(1, -1, d.nv, d.dv)}
    parts |= {f"d{n}": x for n, x in split(dproj[:, d.qkv]).items()}
    parts["da"], parts["db"] = (x[None, :, :, None] for x in dproj[:, d.ab].split(d.nv, dim=1))
    parts |= {f"dconv_{n}": x for n, x in split(results["dconv"].t()).items()}
    parts |= {name: results[name][None, None, :, None] for name in ("dA_log", "ddt_bias")}
    return {**parts, "dnorm": results["dnorm"][None, None, None, :]}


def mixer_close(case: Mixer, got, want, bound: float | dict[str, float], **kw) -> None:
    """`close` on every head of every part."""
    close(by_part(case, got), by_part(case, want), bound, **kw)
