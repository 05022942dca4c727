"""Sizes of an attention layer, what one call of it is given, and what its forward keeps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_HEAD = 256  # largest head of the Triton kernels: a program's tiles fill its shared memory and registers
LITTLE_SHARED = (75, 86, 87, 89, 120, 121)  # compute capabilities
MAX_PACK = 8  # query heads of one tile


class AttnDims(NamedTuple):
    """Heads of one attention layer: query heads, key/value heads, head dimension, rotary dimensions, output gate."""

    nq: int
    nkv: int
    hd: int
    rot: int
    gate: bool = True

    @property
    def q_width(self) -> int:
        """Columns of q, with the gate where there is one."""
        return (2 if self.gate else 1) * self.nq * self.hd

    @property
    def width(self) -> int:
        """Columns of the projection: q (and gate) for every query head, then k, then v."""
        return self.q_width + 2 * self.nkv * self.hd

    @property
    def group(self) -> int:
        """Query heads a key head."""
        return self.nq // self.nkv


class Given(NamedTuple):
    """The arguments that forward and backward share, checked."""

    proj: Tensor  # [N, width]
    q_norm: Tensor | None  # [hd]
    k_norm: Tensor | None  # [hd]
    cos: Tensor  # [>= window, rot/2]
    sin: Tensor  # [>= window, rot/2]
    bias: Tensor | None  # [width]
    positions: Tensor  # [N] int64
    dims: AttnDims
    window: int
    eps: float
    zero_centered: bool


class VectorGrads(NamedTuple):
    """Where the gradients of the vectors go; None for what is not wanted."""

    dq_norm: Tensor | None
    dk_norm: Tensor | None
    dbias: Tensor | None
    accumulate: bool

    def write(self, name: str, value: Tensor) -> None:
        """`=` or `+=`."""
        out = getattr(self, name)
        if out is not None:
            put(out, value, self.accumulate)


class AttnSaved(NamedTuple):
    """What the backward needs. `proj` is the caller's tensor, not a copy; without a gate `o` is the forward's out.

    `via` is the path that made it, which its backward takes too: "torch", "triton" or one of `sdpa.py`, which keeps
    `rest` besides. lse is [B, nkv, nq/nkv, T] of torch, [nq, N] of Triton, [B, nq, T] of SDPA.
    """

    proj: Tensor  # [N, width] working dtype
    o: Tensor  # [N, nq*hd] working dtype, before the gate
    lse: Tensor  # accumulation dtype
    via: str = "torch"
    rest: tuple[Tensor | None, ...] = ()


def put(out: Tensor, value: Tensor, accumulate: bool) -> None:
    """out `=` or `+=` value."""
    if accumulate:
        out.add_(value)
    else:
        out.copy_(value)


class Columns(NamedTuple):
    """A projection's columns by head."""

    q: Tensor  # [N, nq, hd] view
    gate: Tensor | None  # [N, nq, hd] view
    k: Tensor  # [N, nkv, hd] view
    v: Tensor  # [N, nkv, hd] view


def columns(proj: Tensor, dims: AttnDims) -> Columns:
    """Views of q, gate, k and v in [N, width]."""
    nq, nkv, hd = dims[:3]
    q, k, v = proj.split([dims.q_width, nkv * hd, nkv * hd], dim=1)
    q, gate = q.unflatten(1, (nq, 2, hd)).unbind(2) if dims.gate else (q.unflatten(1, (nq, hd)), None)
    return Columns(q, gate, k.unflatten(1, (nkv, hd)), v.unflatten(1, (nkv, hd)))


def pack(dims: AttnDims) -> int:
    """Query heads of one tile of the Triton kernels: the largest power of two that divides a group, at most 8."""
    return min(dims.group & -dims.group, MAX_PACK)


def tile_width(hd: int) -> int:
    """Columns of a tile that enters a product: a power of two, at least 64, as `gated_delta.triton_run.padded` says."""
    return max(64, 1 << (hd - 1).bit_length())


def unfit_for_kernels(dtype: torch.dtype, hd: int, *, gpu: bool = True, arch: int = 0) -> str:
    """Why the Triton kernels do not take heads of this size; "" when they do.

    `gpu` False: for Triton's interpreter. `arch`: compute capability (90 is Hopper), where it is known.
    """
    if gpu and dtype == torch.float32:
        return "float32: its products would run without matrix units; the kernels take bfloat16 and float16"
    if hd > 128 and arch in LITTLE_SHARED:
        return f"a head size of {hd} on sm_{arch}, whose 100 KB of shared memory hold tiles of up to 128"
    return f"a head size of {hd}; the kernels take up to {MAX_HEAD}" if hd > MAX_HEAD else ""
