"""The attention mixer as plain PyTorch, one sequence at a time: the oracle of everything else here."""

from __future__ import annotations

import torch
from torch import Tensor

from cortiq_kernels.ops.rms_norm import rms_norm_ref

from .dims import AttnDims
from .rope import turn


def attention_mixer_ref(
    proj: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    dims: AttnDims,
    cu_seqlens: Tensor,
    eps: float,
    *,
    bias: Tensor | None = None,
    zero_centered: bool = True,
) -> Tensor:
    """The forward, one sequence and one full score matrix at a time, in the dtype of proj. -> [N, nq*hd]."""
    nq, nkv, hd = dims[:3]
    if bias is not None:
        proj = proj + bias.to(proj.dtype)
    q, k, v = proj.split([dims.q_width, nkv * hd, nkv * hd], dim=1)
    q, gate = q.unflatten(1, (nq, 2, hd)).unbind(2) if dims.gate else (q.unflatten(1, (nq, hd)), None)
    k, v = k.unflatten(1, (nkv, hd)), v.unflatten(1, (nkv, hd))
    if q_norm is not None and k_norm is not None:
        q = rms_norm_ref(q, q_norm, eps, zero_centered)
        k = rms_norm_ref(k, k_norm, eps, zero_centered)
    bounds = cu_seqlens.tolist()
    pieces = [proj.new_empty(0, nq * hd)]
    for a, b in zip(bounds, bounds[1:], strict=False):
        c, s = (table[: b - a, None].to(proj.dtype) for table in (cos, sin))
        qs = turn(q[a:b], c, s).transpose(0, 1)  # [nq, t, hd]
        ks = turn(k[a:b], c, s).repeat_interleave(nq // nkv, dim=1).transpose(0, 1)
        vs = v[a:b].repeat_interleave(nq // nkv, dim=1).transpose(0, 1)
        future = torch.ones(b - a, b - a, dtype=torch.bool, device=proj.device).triu(1)
        p = (qs @ ks.transpose(1, 2) * hd**-0.5).masked_fill(future, float("-inf")).softmax(-1)
        o = (p @ vs).transpose(0, 1)  # [t, nq, hd]
        pieces.append((o if gate is None else o * torch.sigmoid(gate[a:b])).flatten(1))
    return torch.cat(pieces)
