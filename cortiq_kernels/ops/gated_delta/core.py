"""The chunked gated delta rule on the grid [NC, B, H, C, D] (layout.py), forward and closed-form backward.

For one chunk and value head, S the state that enters, q already scaled, G_i = sum_{t in chunk} pair_it g_t, the decay
since the chunk's or the token's own sequence's start:

    gam_ij = pair_ij  exp(G_i - G_j)        ga_i   = enter_i exp(G_i)
    tail_i = leave_i  exp(G_{C-1} - G_i)    ga_C   = ga_{C-1}
    L  = strictLower(beta_i gam_ij (K K^T)_ij)           T = (I + L)^-1
    W  = T diag(beta ga) K                               V' = T diag(beta) V - W S     (= T diag(beta) (V - ga K S))
    P  = gam o Q K^T                                     O  = P V' + diag(ga) Q S
    S+ = ga_C S + K^T diag(tail) V'

Exponents are masked before exp and are never split into exp(G_i) exp(-G_j), which overflows.  G and its differences are
float64 until the exp: under strong decay G is large and a float32 difference would be off by its spacing.  G starts
afresh at each sequence, or the rounding of one would depend on the decay of those packed before it.  gam carries the
sequence mask, so L and T are block diagonal over the packed sequences of a chunk.

Backward, given dO and dS+ (y is the adjoint of the triangular solve, so the inverse itself is never differentiated):

    dV' = P^T dO + diag(tail) K dS+                      dS = ga_C dS+ + Q^T diag(ga) dO - W^T dV'
    y   = T^T dV'              dL = -strictLower(y V'^T)              M = gam o dL
    dV  = diag(beta) y         e  = ga o rowsum(K o y S^T)
    dQ  = diag(ga) dO S^T + (gam o dO V'^T) K
    dK  = dK_tail - diag(beta ga) y S^T + (gam o dO V'^T)^T Q + (Z + Z^T) K
          with dK_tail = diag(tail) V' dS+^T  and  Z = diag(beta) M
    dbeta = rowsum(y o V) - e + rowsum(M o K K^T)
    dg_t  = sum_{i>=t} (rowsum(Q o ga dO S^T) - beta e)_i          what reads S through t
          + sum_{j<t} rowsum(K o dK_tail)_j                        what reaches S+ through t
          + ga_C <S, dS+>                                          S to S+
          + sum_{i>=t>j} (P o dO V'^T + Z o K K^T)_ij              pairs that t lies between

Every term of dg is a sum of what decays through token t, so nothing cancels under strong decay, and dg of the first
token of a sequence is exactly 0.

Grouped value attention: K K^T and Q K^T are formed once per key head; the [C, C] and [C, DK] gradients are summed over
the HV/HK value heads of a key head before they become dq and dk.

Everything else is in the dtype of the inputs (float32 or float64).  Only the loop over NC is sequential: 3 launches a
chunk in each direction, over all batch rows and heads at once.  T is formed by inverting diagonal blocks of size 1, 2,
4, ... (T = [[A, 0], [-D B A, D]]), as stable as substitution and made of batched products only; the series
(I - L)(I + L^2)(I + L^4)... is not used: with equal keys its terms grow like binomials.
No atomics; sums have a fixed order.

Source: Yang et al., "Gated Delta Networks" (2024) and "Parallelizing Linear Transformers with the Delta Rule" (2024).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Masks

NEG_INF = float("-inf")
LEAST_G = -1e4  # exp of it is 0 in float64 too; keeps sums of g exact enough, and -inf - -inf away


class CoreSaved(NamedTuple):
    """What the forward keeps besides its inputs, all acc dtype; with 4-byte elements, bytes a token and value head."""

    states: Tensor  # [NC+1, B*HV, DK, DV]  entering each chunk, and the final one: 4*DK*DV/C
    inverse: Tensor  # [NC*B*HV, C, C]       T: 4*C
    v_new: Tensor  # [NC*B*HV, C, DV]        V': 4*DV


class CoreGrads(NamedTuple):
    """Gradients on the grid, acc dtype, all fresh."""

    dq: Tensor  # [NC, B, HK, C, DK], of the scaled q
    dk: Tensor  # [NC, B, HK, C, DK]
    dv: Tensor  # [NC, B, HV, C, DV]
    dg: Tensor  # [NC, B, HV, C]
    dbeta: Tensor  # [NC, B, HV, C]
    dh0: Tensor  # [B, HV, DK, DV]


class _Decay(NamedTuple):
    gam: Tensor  # [NC, B, HV, C, C]
    ga: Tensor  # [NC, B, HV, C]
    tail: Tensor  # [NC, B, HV, C]
    ga_last: Tensor  # [NC, B*HV, 1, 1]


def core_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h0: Tensor | None, masks: Masks
) -> tuple[Tensor, CoreSaved]:
    """O and what the backward needs.

    Args:
        q, k: [NC, B, HK, C, DK], q scaled.  v: [NC, B, HV, C, DV].  g, beta: [NC, B, HV, C].  All contiguous.
        h0: state entering the first chunk [B, HV, DK, DV], None = zero.

    Returns:
        o [NC, B, HV, C, DV] and `CoreSaved`; the final state is `saved.states[-1]`.
    """
    nc, batch, hk, c, dk = k.shape
    hv, dv = v.shape[2], v.shape[-1]
    heads = batch * hv
    decay = _decay(g, masks)
    kk = k @ k.mT
    lower = _grouped(decay.gam, hk) * kk.unsqueeze(3)
    lower = lower.mul_(_grouped(beta, hk).unsqueeze(-1)).tril_(-1)
    inverse = unit_lower_inverse(lower.view(-1, c, c))
    del lower
    w = torch.bmm(inverse, _scaled_rows(k, beta * decay.ga))
    k_tail = _scaled_rows(k, decay.tail)
    v_new = torch.bmm(inverse, (v * beta.unsqueeze(-1)).view(-1, c, dv))

    states = v.new_empty(nc + 1, heads, dk, dv)
    states[0] = 0 if h0 is None else h0.reshape(heads, dk, dv)
    v_c, w_c, kt_c = (x.unflatten(0, (nc, heads)) for x in (v_new, w, k_tail))
    for i in range(nc):
        v_c[i].baddbmm_(w_c[i], states[i], alpha=-1)
        torch.mul(states[i], decay.ga_last[i], out=states[i + 1])
        states[i + 1].baddbmm_(kt_c[i].mT, v_c[i])

    p = _grouped(decay.gam, hk).mul_((q @ k.mT).unsqueeze(3))
    o = torch.bmm(p.view(-1, c, c), v_new)
    o.baddbmm_(_scaled_rows(q, decay.ga), states[:-1].view(-1, dk, dv))
    return o.view(nc, batch, hv, c, dv), CoreSaved(states, inverse, v_new)


def core_bwd(
    do: Tensor,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    masks: Masks,
    saved: CoreSaved,
) -> CoreGrads:
    """All gradients, from `do` [NC, B, HV, C, DV] (contiguous) and `dht` [B, HV, DK, DV] (None = zero).

    Decays, K K^T, Q K^T and W are recomputed; nothing that is passed in is written.
    """
    nc, batch, hk, c, dk = k.shape
    hv, dv = v.shape[2], v.shape[-1]
    heads, grid = batch * hv, (nc, batch, hv, c)
    states, inverse, v_new = saved
    s_in = states[:-1].view(-1, dk, dv)
    do_m = do.view(-1, c, dv)
    decay = _decay(g, masks)
    gam = _grouped(decay.gam, hk)  # [NC, B, HK, G, C, C]
    kk, qk = k @ k.mT, q @ k.mT  # [NC, B, HK, C, C]
    beta_ga = beta * decay.ga

    # the reverse recurrence
    w = torch.bmm(inverse, _scaled_rows(k, beta_ga))
    dv_new = torch.bmm((gam * qk.unsqueeze(3)).view(-1, c, c).mT, do_m)
    ds = torch.empty_like(states)
    torch.bmm(_scaled_rows(q, decay.ga).mT, do_m, out=ds[:-1].view(-1, dk, dv))
    ds[-1] = 0 if dht is None else dht.reshape(heads, dk, dv)
    dv_c, w_c, kt_c = (x.unflatten(0, (nc, heads)) for x in (dv_new, w, _scaled_rows(k, decay.tail)))
    for i in reversed(range(nc)):
        dv_c[i].baddbmm_(kt_c[i], ds[i + 1])
        ds[i].addcmul_(ds[i + 1], decay.ga_last[i]).baddbmm_(w_c[i].mT, dv_c[i], alpha=-1)
    ds_out = ds[1:].view(-1, dk, dv)

    # everything else is parallel over chunks
    y = torch.bmm(inverse.mT, dv_new)
    dv_grid = y.view(*grid, dv)
    dbeta = (dv_grid * v).sum(-1)
    d_value = dv_grid * beta.unsqueeze(-1)

    d_state = _grouped(torch.bmm(y, s_in.mT).view(*grid, dk), hk)  # y S^T
    e = (d_state * k.unsqueeze(3)).sum(-1).view(grid).mul_(decay.ga)
    dbeta -= e
    d_tail = _grouped(torch.bmm(v_new, ds_out.mT).view(*grid, dk), hk).mul_(_grouped(decay.tail, hk).unsqueeze(-1))
    through_tail = (d_tail * k.unsqueeze(3)).sum(-1).view(grid)
    dk_out = _group_sum(d_tail.addcmul_(d_state, _grouped(beta_ga, hk).unsqueeze(-1), value=-1))
    d_read = _grouped(torch.bmm(do_m, s_in.mT).view(*grid, dk), hk).mul_(_grouped(decay.ga, hk).unsqueeze(-1))
    through_head = (d_read * q.unsqueeze(3)).sum(-1).view(grid).addcmul_(beta, e, value=-1)
    dq_out = _group_sum(d_read)

    d_qk = _grouped(torch.bmm(do_m, v_new.mT).view(*grid, c), hk).mul_(gam)  # gam o dP
    z = _grouped(torch.bmm(y, v_new.mT).view(*grid, c), hk).mul_(gam).tril_(-1).neg_()  # M, Z below
    dbeta += (z * kk.unsqueeze(3)).sum(-1).view(grid)
    z.mul_(_grouped(beta, hk).unsqueeze(-1))
    pairs = (d_qk * qk.unsqueeze(3)).addcmul_(z, kk.unsqueeze(3))
    d_qk, z = _group_sum(d_qk), _group_sum(z)
    dq_out += d_qk @ k
    dk_out += d_qk.mT @ q
    dk_out += (z + z.mT) @ k

    # sums over i >= t and over j < t as products with 0/1 triangles: exact zeros stay zero
    at_or_after = torch.ones(c, c, dtype=k.dtype, device=k.device).tril_()  # [i, t]
    before = at_or_after.mT.triu(1)  # [j, t]
    through_state = (s_in * ds_out).sum((-1, -2)).view(nc, batch, hv, 1) * decay.ga_last.view(nc, batch, hv, 1)
    dg = (pairs @ before).mul_(at_or_after).sum(-2).view(grid)
    dg += through_head @ at_or_after
    dg += through_tail @ before
    dg += through_state
    return CoreGrads(dq_out, dk_out, d_value, dg, dbeta, ds[0].view(batch, hv, dk, dv))


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 of strictly lower triangular matrices [M, C, C], C a power of two; a fresh [M, C, C].

    Inverts the diagonal blocks of size 1, 2, 4, ... in turn: the block below the diagonal is -D B A, with A and D the
    inverses above and below and B the block of `lower`.
    """
    m, c, _ = lower.shape
    inverse = torch.ones(m, c, 1, 1, dtype=lower.dtype, device=lower.device)
    size = 1
    while size < c:
        count = c // (2 * size)
        # [M, count, 2*size, 2*size]: the diagonal blocks of the next size
        blocks = lower.view(m, count, 2 * size, count, 2 * size).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        pairs = inverse.view(m, count, 2, size, size)
        above, below = pairs[:, :, 0], pairs[:, :, 1]
        inverse = lower.new_zeros(m, count, 2 * size, 2 * size)
        inverse[..., :size, :size] = above
        inverse[..., size:, size:] = below
        corner = blocks[..., size:, :size]
        inverse[..., size:, :size] = (below @ (corner @ above) if size > 1 else corner).neg()
        size *= 2
    return inverse.view(m, c, c)


def _decay(g: Tensor, masks: Masks) -> _Decay:
    """gam, ga, tail and the decay of the state, exponents masked before exp."""
    nc, batch, hv, c = g.shape
    total = g.double().clamp(min=LEAST_G)
    packed = masks.pair.dim() > 2
    total = total @ masks.pair.squeeze(2).double().mT if packed else total.cumsum(-1)  # [NC, B, HV, C]
    gam = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(g.dtype).masked_fill_(~masks.pair, NEG_INF).exp_()
    tail = total[..., -1:] - total
    if masks.leave is not None:
        tail.masked_fill_(~masks.leave, NEG_INF)
    if masks.enter is not None:
        total.masked_fill_(~masks.enter, NEG_INF)
    ga = total.to(g.dtype).exp_()
    return _Decay(gam, ga, tail.to(g.dtype).exp_(), ga[..., -1].reshape(nc, batch * hv, 1, 1))


def _grouped(x: Tensor, hk: int) -> Tensor:
    """[NC, B, HV, ...] -> the view [NC, B, HK, G, ...]: value heads under their key head."""
    return x.unflatten(2, (hk, -1))


def _group_sum(x: Tensor) -> Tensor:
    """Sum over the value heads of a key head: [NC, B, HK, G, ...] -> [NC, B, HK, ...] (the same memory if G is 1)."""
    return x.squeeze(3) if x.shape[3] == 1 else x.sum(3)


def _scaled_rows(x: Tensor, factor: Tensor) -> Tensor:
    """Rows of a key head's x [NC, B, HK, C, D] times factor [NC, B, HV, C] -> [NC*B*HV, C, D]."""
    return (x.unsqueeze(3) * _grouped(factor, x.shape[2]).unsqueeze(-1)).reshape(-1, *x.shape[-2:])
