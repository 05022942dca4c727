"""The gated delta rule and the mixer around it, one token at a time: the definition that everything else is tested on.

Per value head h (key head h // (HV/HK)), state S [DK, DV], s = scale:

    S <- exp(g_t) S ;  d_t = beta_t (v_t - S^T k_t) ;  S <- S + k_t d_t^T ;  o_t = s S^T q_t

Forward only, plain differentiable PyTorch, any device and any float dtype (16-bit inputs compute in float32, and
results are rounded once at the end).  Autograd through these in float64 is the oracle of every backward here.
Not fast: a Python loop over tokens, `cu_seqlens` read by the host.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import acc_dtype
from .layout import L2_EPS, GdnDims


def chunk_gated_delta_rule_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Token recurrence with the signature of `chunk_gated_delta_rule_fwd`.

    Args:
        q, k: [B, T, HK, DK].  v: [B, T, HV, DV].  g (log decay), beta: [B, T, HV].
        scale: factor of q, default DK**-0.5.
        initial_state: [S, HV, DK, DV] (S = B, or the number of sequences with `cu_seqlens`), default zero.
        cu_seqlens: [S+1]; B must then be 1.

    Returns:
        o [B, T, HV, DV] in v's dtype and the final state [S, HV, DK, DV] (acc dtype) or None.
    """
    acc = acc_dtype(v.dtype)
    batch, _, hk, dk = q.shape
    hv, dv = v.shape[2:]
    q = q.to(acc).repeat_interleave(hv // hk, 2) * (dk**-0.5 if scale is None else scale)
    k = k.to(acc).repeat_interleave(hv // hk, 2)
    tokens = [q, k, v.to(acc), g.to(acc), beta.to(acc)]
    rows = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    state = tokens[2].new_zeros(rows, hv, dk, dv) if initial_state is None else initial_state.to(acc)
    if cu_seqlens is None:
        o, state = _recurrence(tokens, state)
    else:
        outs, states = [tokens[2][:, :0]], [state[:0]]
        starts = cu_seqlens.tolist()
        for s, (lo, hi) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            o, last = _recurrence([x[:, lo:hi] for x in tokens], state[s : s + 1])
            outs.append(o)
            states.append(last)
        o, state = torch.cat(outs, 1), torch.cat(states)
    return o.to(v.dtype), state if output_final_state else None


def _recurrence(tokens: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence of rows; tokens: q, k [B, T, H, DK], v [B, T, H, DV], g, beta [B, T, H], state [B, H, DK, DV]."""
    rows = []
    for q_t, k_t, v_t, g_t, beta_t in zip(*(x.unbind(1) for x in tokens), strict=True):
        state = state * g_t.exp()[..., None, None]
        d = beta_t[..., None] * (v_t - (k_t.unsqueeze(-2) @ state).squeeze(-2))
        state = state + k_t.unsqueeze(-1) * d.unsqueeze(-2)
        rows.append((q_t.unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(rows, 1) if rows else tokens[2] * 1, state


def gdn_mixer_ref(
    proj: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    dims: GdnDims,
    cu_seqlens: Tensor,
    eps: float,
) -> Tensor:
    """The whole mixer, projection row to the input of the output projection; formulas in mixer.py.

    Args:
        proj: [N, dims.width], row = q | k | v | z | a | b.
        conv_weight: [C, W].  A_log, dt_bias: [nv].  norm_weight: [dv].
        cu_seqlens: [S+1] int; conv and state start afresh at each sequence.

    Returns:
        [N, nv*dv] in proj's dtype.
    """
    acc = acc_dtype(proj.dtype)
    n, (nk, nv, dk, dv, taps) = proj.shape[0], dims
    x, z, a, b = proj.to(acc).split([dims.conv_width, nv * dv, nv, nv], dim=-1)
    starts = cu_seqlens.tolist()
    pieces = [
        F.pad(x[lo:hi], (0, 0, taps - 1, 0)).unfold(0, taps, 1).mul(conv_weight).sum(-1)
        for lo, hi in zip(starts[:-1], starts[1:], strict=True)
        if hi > lo
    ]
    x = F.silu(torch.cat(pieces)) if pieces else x
    q, k, v = x.split([nk * dk, nk * dk, nv * dv], dim=-1)
    q, k, v, z = q.reshape(n, nk, dk), k.reshape(n, nk, dk), v.reshape(n, nv, dv), z.reshape(n, nv, dv)
    q = q * (q.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()
    k = k * (k.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()
    g = -A_log.exp() * F.softplus(a + dt_bias)
    o, _ = chunk_gated_delta_rule_ref(q[None], k[None], v[None], g[None], b.sigmoid()[None], cu_seqlens=cu_seqlens)
    o = o[0] * (o[0].square().mean(-1, keepdim=True) + eps).rsqrt() * norm_weight * F.silu(z)
    return o.reshape(n, nv * dv).to(proj.dtype)
