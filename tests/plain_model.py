"""The model family written as plainly as possible, for autograd: one sequence at a time, one token at a time in the
GDN.

Nothing here is shared with the package but the names of the weights, so it can be the oracle of the explicit step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def gdn(p: Mapping[str, Tensor], at: str, n: Tensor, g) -> Tensor:
    t, (nk, nv, dk, dv) = n.shape[0], (g.nk, g.nv, g.dk, g.dv)
    proj = n @ p[at + "in_proj"].T
    qkv, z, a, b = proj.split([2 * nk * dk + nv * dv, nv * dv, nv, nv], -1)
    padded = F.pad(qkv.T, (g.conv - 1, 0))  # [C, W-1+T]
    conv = p[at + "conv"]
    qkv = F.silu(sum(padded[:, j : j + t] * conv[:, j : j + 1] for j in range(g.conv))).T
    q, k, v = qkv.split([nk * dk, nk * dk, nv * dv], -1)
    q, k, v = q.view(t, nk, dk), k.view(t, nk, dk), v.view(t, nv, dv)
    q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * dk**-0.5
    k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
    q, k = q.repeat_interleave(nv // nk, 1), k.repeat_interleave(nv // nk, 1)
    decay = torch.exp(-p[at + "A_log"].exp() * F.softplus(a + p[at + "dt_bias"]))
    beta = torch.sigmoid(b)
    state, out = n.new_zeros(nv, dk, dv), []
    for i in range(t):
        state = state * decay[i, :, None, None]
        delta = beta[i, :, None] * (v[i] - torch.einsum("hkv,hk->hv", state, k[i]))
        state = state + torch.einsum("hk,hv->hkv", k[i], delta)
        out.append(torch.einsum("hkv,hk->hv", state, q[i]))
    o = rms(torch.stack(out), g.eps) * p[at + "gdn_norm"] * F.silu(z.view(t, nv, dv))
    return o.reshape(t, nv * dv) @ p[at + "out_proj"].T


def rope(x: Tensor, g) -> Tensor:
    rot, theta = g.rot, g.rope_theta
    t, half = x.shape[0], rot // 2
    freq = theta ** (-torch.arange(half, dtype=x.dtype) * 2 / rot)
    angle = torch.arange(t, dtype=x.dtype)[:, None] * freq
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    x1, x2, rest = x[..., :half], x[..., half:rot], x[..., rot:]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], -1)


def norm(p: Mapping[str, Tensor], name: str, x: Tensor, g) -> Tensor:
    return rms(x, g.eps) * (1 + p[name] if g.zero_centered else p[name])


def attention(p: Mapping[str, Tensor], at: str, n: Tensor, g) -> Tensor:
    t, (nq, nkv, hd) = n.shape[0], (g.nq, g.nkv, g.hd)
    proj = n @ p[at + "qkv_proj"].T
    if g.qkv_bias:
        proj = proj + p[at + "qkv_bias"]
    q, k, v = proj.split([proj.shape[1] - 2 * nkv * hd, nkv * hd, nkv * hd], -1)
    k, v = k.view(t, nkv, hd), v.view(t, nkv, hd)
    gate = None
    if g.attn_gate:
        q, gate = q.view(t, nq, 2 * hd).chunk(2, -1)
    q = q.reshape(t, nq, hd)
    if g.qk_norm:
        q, k = norm(p, at + "q_norm", q, g), norm(p, at + "k_norm", k, g)
    q, k = rope(q, g), rope(k, g)
    k, v = k.repeat_interleave(nq // nkv, 1), v.repeat_interleave(nq // nkv, 1)
    score = torch.einsum("ihd,jhd->hij", q, k) * hd**-0.5
    score = score.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
    o = torch.einsum("hij,jhd->ihd", score.softmax(-1), v)
    if gate is not None:
        o = o * torch.sigmoid(gate)
    return o.reshape(t, nq * hd) @ p[at + "o_proj"].T


def hidden_states(p: Mapping[str, Tensor], g, tokens: Tensor, masks: Mapping[int, Tensor] | None = None) -> Tensor:
    """One sequence: tokens [T] -> hidden states [T, H] after the final norm."""
    x = p["embed"][tokens]
    for i in range(len(g.layer_types) * g.num_loops):
        kind, at = g.layer_types[i % len(g.layer_types)], f"layers.{i % len(g.layer_types)}."
        if i and i % len(g.layer_types) == 0 and g.norm_between_loops:
            x = norm(p, "final_norm", x, g)
        n = norm(p, at + "input_norm", x, g)
        x = x + (gdn if kind == "linear_attention" else attention)(p, at, n, g)
        n = norm(p, at + "post_norm", x, g)
        gate, up = (n @ p[at + "gate_up"].T).chunk(2, -1)
        act = F.silu(gate) * up
        if masks and i in masks:
            act = act * masks[i]
        x = x + act @ p[at + "down"].T
    return norm(p, "final_norm", x, g)


def packed_hidden(p: Mapping[str, Tensor], g, tokens: Tensor, cu_seqlens: Tensor, masks=None) -> Tensor:
    cuts = cu_seqlens.tolist()
    parts = [hidden_states(p, g, tokens[s:e], masks) for s, e in zip(cuts, cuts[1:], strict=False) if e > s]
    return torch.cat(parts)


def kd_loss(p, g, batch, ids: Tensor, probs: Tensor, masks=None) -> Tensor:
    """Sum over scored rows of w * KL(target || softmax) / sum of w."""
    h = packed_hidden(p, g, batch.tokens, batch.cu_seqlens, masks)[batch.row_index.long()]
    head = p["embed"] if g.tied else p["head"]
    logq = torch.log_softmax(h @ head.T, -1)
    target = torch.zeros_like(logq).scatter_add(1, ids.long(), probs.to(logq.dtype))
    kl = (torch.xlogy(target, target) - target * logq).sum(-1)
    return (batch.row_weight.to(kl.dtype) * kl).sum() / batch.weight_sum


def plain_grams(w, records):
    """Dense float64 Grams by the formula, a record at a time."""
    p, g = {n: w[n] for n in w.names}, w.geometry
    want = [torch.zeros(f, f, dtype=torch.float64) for f in g.intermediate]
    for r in records:
        x = p["embed"][torch.from_numpy(r.ids).long()]
        for i in range(g.n_layers):
            at = f"layers.{i}."
            n = rms(x, g.eps) * (1 + p[at + "input_norm"])
            x = x + (attention if g.is_full(i) else gdn)(p, at, n, g)
            n = rms(x, g.eps) * (1 + p[at + "post_norm"])
            gate, up = (n @ p[at + "gate_up"].T).chunk(2, -1)
            act = F.silu(gate) * up
            want[i] += act.T @ act
            x = x + act @ p[at + "down"].T
    return want
