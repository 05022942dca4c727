"""The mixer on Triton: the kernels of this folder in their order. Formulas in mixer.py, shapes checked there.

    forward    conv, wy, state, output (with the gated norm)
    backward   norm backward, conv of q and k again, advance, dstate, input, gates, conv backward

Kept for the backward, in bytes a token and value head at head size 128, 16-bit: entering states of every second chunk
256, V' 256, o 256, T 128, decay sums and the norm's rstd 8.  q^, k^, beta and the other states are made again, v is not
needed; `keep="all"` keeps q^ and k^ too, 256 bytes each a key head, which saves a convolution pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from . import triton_run as run
from .chunks import ChunkIndex, chunk_index
from .layout import CHUNK, GdnDims


class TritonSaved(NamedTuple):
    """What the Triton forward keeps; see the module docstring."""

    proj: Tensor  # [N, dims.width], the caller's
    t: Tensor  # [nv, N, CHUNK]
    g: Tensor  # [nv, N] f32
    h: Tensor  # [half, nv, dv, dk] states that enter even chunks
    vn: Tensor  # [nv, N, dv] V'
    kept: run.Kept  # o and the norm's rstd
    chunks: ChunkIndex
    qk: tuple[Tensor, Tensor] | None  # keep="all" only


def compile_kernels(
    proj: Tensor, weights: tuple[Tensor, Tensor, Tensor, Tensor], out: Tensor, *, dims: GdnDims, eps: float, save: bool
) -> None:
    """Compile the kernels of these calls, several at a time, on the first one: of both directions with `save`."""
    key = ("gdn_mixer", dims, proj.dtype, proj.device, proj.stride(0), out.stride(0), save)
    jit.compile_once(key, lambda: _one_chunk(proj, weights, out, dims, eps, save))


def _one_chunk(
    proj: Tensor, weights: tuple[Tensor, Tensor, Tensor, Tensor], out: Tensor, dims: GdnDims, eps: float, save: bool
) -> None:
    """Both directions on a chunk of nothing, with the strides of `proj` and `out`."""
    like = [x.new_empty(CHUNK, max(x.stride(0), x.shape[1]))[:, : x.shape[1]] for x in (proj, proj, out, out)]
    positions = torch.zeros(CHUNK, dtype=torch.int64, device=proj.device)
    cu = torch.zeros(2, dtype=torch.int32, device=proj.device)
    saved = mixer_fwd(
        like[0], weights, like[2], dims=dims, positions=positions, chunks=chunk_index(cu, CHUNK), eps=eps, save=save,
        keep_all=False,
    )  # fmt: skip
    if saved is not None:
        mixer_bwd(like[2], saved, weights, like[1], dims=dims, positions=positions, eps=eps, out=like[3])


def mixer_fwd(
    proj: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    out: Tensor,
    *,
    dims: GdnDims,
    positions: Tensor,
    chunks: ChunkIndex,
    eps: float,
    save: bool,
    keep_all: bool,
) -> TritonSaved | None:
    """out [N, nv*dv] `=`."""
    conv_weight, a_log, dt_bias, norm_weight = weights
    qkv = run.conv_forward(proj, conv_weight, positions, dims)
    rule = run.prepare(*qkv, _gates(proj, a_log, dt_bias, dims), chunks, 1.0)
    h, vn, _ = run.states(rule, qkv[2], None, final=False)
    kept = run.outputs(rule, h, vn, out, run.Norm(proj[:, dims.z], norm_weight, eps), keep=save)
    if kept is None:
        return None
    return TritonSaved(proj, rule.t, rule.g, h.even, vn, kept, chunks, qkv[:2] if keep_all else None)


def mixer_bwd(
    dout: Tensor,
    saved: TritonSaved,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    dproj: Tensor,
    *,
    dims: GdnDims,
    positions: Tensor,
    eps: float,
    out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dproj `=`, and unless None out `=` the forward's output again.

    Returns parts, to be summed over their first dimension: dconv [P, C, W], dA_log and ddt_bias [cap, nv], dnorm
    [P, dv].
    """
    conv_weight, a_log, dt_bias, norm_weight = weights
    proj, n, vn = saved.proj, saved.proj.shape[0], saved.vn
    source = _gates(proj, a_log, dt_bias, dims)
    norm = run.Norm(proj[:, dims.z], norm_weight, eps)
    made = run.norm_backward(saved.kept, norm, source.b, dout, dproj[:, dims.z], out)
    do = made.do.transpose(0, 1)
    q, k = saved.qk or run.conv_forward(proj, conv_weight, positions, dims, values=False)[:2]
    rule = run.Rule(q, k, (n, dims.nv, dims.dv), saved.t, saved.g, made.beta, saved.chunks, 1.0)
    h = run.advance(rule, saved.h, vn)
    dh, y, _ = run.dstates(rule, do, None, want_dh0=False)
    grads = run.input_grads(rule, h, vn, dh, do, y)
    da, db = dproj[:, dims.ab].split(dims.nv, dim=1)
    gates = run.gate_grads(rule, grads, source, da, db)
    dconv = run.conv_backward(proj, conv_weight, positions, dims, grads.dqk, y, rule.beta, dproj)
    assert gates is not None
    return dconv, gates[:, 0], gates[:, 1], made.dnorm.flatten(0, 1)


def _gates(proj: Tensor, a_log: Tensor, dt_bias: Tensor, dims: GdnDims) -> run.Gates:
    a, b = proj[:, dims.ab].split(dims.nv, dim=1)
    return run.Gates(a, b, a_log, dt_bias)
