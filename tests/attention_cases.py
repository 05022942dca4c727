"""Cases of the attention mixer for its kernels' tests: inputs, one run, and float64 autograd through the reference."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.ops.attention import (
    AttnDims,
    attention_mixer_bwd,
    attention_mixer_fwd,
    attention_mixer_ref,
    rope_table,
)

EPS = 1e-6


class Case(NamedTuple):
    """Inputs of the mixer; vectors that a model lacks are None."""

    proj: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos: Tensor
    sin: Tensor
    bias: Tensor | None
    dout: Tensor
    dims: AttnDims
    zero_centered: bool = True

    def rows(self, lo: int, hi: int) -> Case:
        """The case of these tokens alone."""
        return self._replace(proj=self.proj[lo:hi], dout=self.dout[lo:hi])


def make(
    gen: torch.Generator, dims: AttnDims, n: int, window: int, *, dtype: torch.dtype = torch.float32, norm: bool = True,
    bias: bool = False, zero_centered: bool = True,
) -> Case:  # fmt: skip
    """Normal values, on the generator's device."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=gen.device)

    cos, sin = rope_table(window, dims.rot, 1e4, torch.float32, gen.device)
    base = 0.0 if zero_centered else 1.0
    norms = [base + 0.3 * normal(dims.hd) if norm else None for _ in range(2)]
    proj, dout = normal(n, dims.width).to(dtype), normal(n, dims.nq * dims.hd).to(dtype)
    return Case(proj, *norms, cos, sin, normal(dims.width) if bias else None, dout, dims, zero_centered)


def common(case: Case, cu: Tensor, window: int) -> dict:
    """Keyword arguments of both directions."""
    return {
        "dims": case.dims, "cu_seqlens": cu, "max_seqlen": window, "eps": EPS, "bias": case.bias,
        "zero_centered": case.zero_centered,
    }  # fmt: skip


def outputs(case: Case) -> dict[str, Tensor]:
    """Outputs full of NaN."""
    like = {"out": case.dout, "dproj": case.proj, "dq_norm": case.q_norm, "dk_norm": case.k_norm, "dbias": case.bias}
    return {
        n: torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device) for n, x in like.items() if x is not None
    }


def run(
    case: Case, cu: Tensor, window: int, *, backend: str = "triton", into: dict[str, Tensor] | None = None, **more
) -> dict[str, Tensor]:
    """Forward and backward into `into`, or outputs full of NaN."""
    made = outputs(case) if into is None else into
    vectors = (case.q_norm, case.k_norm, case.cos, case.sin)
    _, saved = attention_mixer_fwd(
        case.proj, *vectors, **common(case, cu, window), out=made["out"], backend=backend, **more
    )
    grads = {n: x for n, x in made.items() if n != "out"}
    attention_mixer_bwd(case.dout, saved, *vectors, **common(case, cu, window), **grads, **more)
    return made


def truth(case: Case, cu: Tensor) -> dict[str, Tensor]:
    """The same in float64, from the same rounded inputs."""
    given = {"dproj": case.proj, "dq_norm": case.q_norm, "dk_norm": case.k_norm, "dbias": case.bias}
    leaves = {n: x.double().requires_grad_() for n, x in given.items() if x is not None}
    out = attention_mixer_ref(
        leaves["dproj"], leaves.get("dq_norm"), leaves.get("dk_norm"), case.cos.double(), case.sin.double(), case.dims,
        cu, EPS, bias=leaves.get("dbias"), zero_centered=case.zero_centered,
    )  # fmt: skip
    grads = torch.autograd.grad(out, list(leaves.values()), case.dout.double())
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def close(case: Case, got: dict[str, Tensor], want: dict[str, Tensor], bound: float) -> None:
    """Relative L2 error of every result, head by head, at most `bound`; a head that gets next to nothing (the query of
    a lone token) counts as a tenth of the whole.
    """
    for name, x in got.items():
        y = want[name]
        assert torch.isfinite(x).all(), name
        if name == "dproj":  # no head hides behind another
            x, y = (t.unflatten(1, (-1, case.dims.hd)).transpose(0, 1) for t in (x, y))
        elif name == "out":
            x, y = (t.unflatten(1, (case.dims.nq, -1)).transpose(0, 1) for t in (x, y))
        else:
            x, y = x[None], y[None]
        if x[0].numel():
            size = y.flatten(1).norm(dim=1).clamp(min=0.1 * max(y.norm().item(), 1.0))
            error = (x.double() - y).flatten(1).norm(dim=1) / size
            assert error.max() <= bound, (name, error.tolist())
