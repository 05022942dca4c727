"""How the op tests compare: tight in float64, and never worse than eager PyTorch in the dtype at hand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


def same(got: Tensor, want: Tensor, tol: float = 1e-10) -> None:
    """Equal to `tol` of the largest element; both finite."""
    assert got.shape == want.shape, (got.shape, want.shape)
    assert torch.isfinite(got).all()
    if want.numel():
        err = (got.double() - want.double()).abs().max().item()
        assert err <= tol * max(1.0, want.double().abs().max().item()), err


def not_worse(got: Tensor, exact: Tensor, eager: Tensor, factor: float = 1.5, ulps: float = 1.0) -> None:
    """Error against the float64 result at most `factor` times eager's plus `ulps` of the largest element."""
    assert got.shape == exact.shape, (got.shape, exact.shape)
    assert torch.isfinite(got).all()
    if exact.numel():
        err, base = ((t.double() - exact).abs().max().item() for t in (got, eager))
        ulp = torch.finfo(got.dtype).eps * exact.abs().max().item()
        assert err <= factor * base + ulps * ulp, (err, base, ulp)


def bits(*tensors: Tensor | None) -> list[bytes]:
    """The bytes of each tensor, for bitwise comparison (NaN equal to itself, -0 different from +0)."""
    return [
        b"" if t is None else t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for t in tensors
    ]


def nan(*shape: int, dtype: torch.dtype) -> Tensor:
    """An output full of NaN, which an op must overwrite."""
    return torch.full(shape, float("nan"), dtype=dtype)


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Any wait of the host for the GPU inside is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Largest error of a GPU result in units of the largest element.
GPU_TOL = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
