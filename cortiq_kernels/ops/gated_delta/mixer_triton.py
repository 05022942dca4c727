"""The mixer on Triton: the kernels of this folder in their order. Formulas in mixer.py, shapes checked there.

    forward    conv, wy, state, output (with the gated norm)
    backward   conv of q and k again, local (with the norm's backward), dstate, input, gates, conv backward

Kept for the backward, in bytes a token and value head at head size 128, 16-bit: entering states 512, V' 256, T 128,
decay sums and beta 8.  q^, k^ and the output of the recurrence are made again, v is not needed; `keep="all"` keeps q^
and k^ too, 256 bytes each a key head, which saves a convolution pass.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from . import triton_run as run
from .chunks import ChunkIndex
from .layout import GdnDims


class TritonSaved(NamedTuple):
    """What the Triton forward keeps; see the module docstring."""

    proj: Tensor  # [N, dims.width], the caller's
    t: Tensor  # [nv, N, CHUNK]
    g: Tensor  # [nv, N] f32
    beta: Tensor  # [nv, N] f32
    h: Tensor  # [cap, nv, dk, dv] states that enter the chunks
    vn: Tensor  # [nv, N, dv] V'
    chunks: ChunkIndex
    qk: tuple[Tensor, Tensor] | None  # keep="all" only


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
    run.outputs(rule, h, vn, out, run.Norm(proj[:, dims.z], norm_weight, eps))
    if not save:
        return None
    return TritonSaved(proj, rule.t, rule.g, rule.beta, h, vn, chunks, qkv[:2] if keep_all else None)


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
    [cap*nv, dv].
    """
    conv_weight, a_log, dt_bias, norm_weight = weights
    proj, n = saved.proj, saved.proj.shape[0]
    q, k = saved.qk or run.conv_forward(proj, conv_weight, positions, dims, values=False)[:2]
    rule = run.Rule(q, k, (n, dims.nv, dims.dv), saved.t, saved.g, saved.beta, saved.chunks, 1.0)
    norm = run.Norm(proj[:, dims.z], norm_weight, eps)
    dout = dout.unflatten(1, (dims.nv, dims.dv))
    made = run.local(rule, saved.h, saved.vn, dout, norm, dproj[:, dims.z], out)
    dh, _ = run.dstates(rule, made, None, want_dh0=False)
    grads = run.input_grads(rule, saved.h, saved.vn, dh, made)
    da, db = dproj[:, dims.ab].split(dims.nv, dim=1)
    gates = run.gate_grads(rule, grads, _gates(proj, a_log, dt_bias, dims), da, db)
    dconv = run.conv_backward(proj, conv_weight, positions, dims, grads.dqk, made.y, rule.beta, dproj)
    assert gates is not None and made.dnorm is not None
    return dconv, gates[:, 0], gates[:, 1], made.dnorm


def _gates(proj: Tensor, a_log: Tensor, dt_bias: Tensor, dims: GdnDims) -> run.Gates:
    a, b = proj[:, dims.ab].split(dims.nv, dim=1)
    return run.Gates(a, b, a_log, dt_bias)
