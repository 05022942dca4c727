"""The gated delta net mixer: everything between a layer's two projections, forward and explicit backward.

For a token with projection row q | k | v | z | a | b (widths nk*dk, nk*dk, nv*dv, nv*dv, nv, nv):

    q, k, v = SiLU(causal_conv(q | k | v))                            restarts at every sequence (conv.py)
    q^ = q rsqrt(sum q^2 + 1e-6) dk^-1/2,   k^ = k rsqrt(sum k^2 + 1e-6)
    g = -exp(A_log) softplus(a + dt_bias),  beta = sigmoid(b)
    o = gated delta rule(q^, k^, v, g, beta)                          core.py; value head h on key head h // (nv/nk),
                                                                      scale 1, state 0 at the start of a sequence
    out = o rsqrt(mean o^2 + eps) * norm_weight * SiLU(z)             over dv; the weight is w, not 1 + w

Backward, with u the normalised o, r its rsqrt, dn = dout:

    dz = dn u w SiLU'(z)       dnorm = sum dn SiLU(z) u       du = dn SiLU(z) w       do = r (du - u mean(u du))
    dx of an l2 norm y = c x r:   c r (dy' - y y.dy / c^2)    with r = rsqrt(sum x^2 + 1e-6), dy' = dy, c = dk^-1/2 or 1
    db = dbeta beta (1 - beta)
    da = -dg exp(A_log) sigmoid(a + dt_bias)      ddt_bias = sum da      dA_log = sum dg g
    the SiLU and the convolution: conv.py

| tensor | shape | dtype | |
|---|---|---|---|
| proj, dproj | [N, dims.width] | working | rows may be strided; dproj `=`, every element |
| out, dout | [N, nv*dv] | working | out `=`, every element; dout may be expanded |
| conv_weight, dconv | [C, W], C = 2*nk*dk + nv*dv | acc | last tap = current token, no bias |
| A_log, dt_bias, dA_log, ddt_bias | [nv] | acc | |
| norm_weight, dnorm | [dv] | acc | |
| cu_seqlens | [S+1] | int32 | on the device; never read by the host |

acc is float64 for a float64 projection, else float32.  All of it computes in acc from the working-dtype inputs and
rounds once, into `out` and `dproj`.  The vector gradients are acc, `=` with accumulate=False and `+=` with True, None
skips one; plain sums of fixed order, no atomics.

In plain torch the N tokens fold to rows of max_seqlen: no sequence crosses a multiple of max_seqlen.  Sequences inside
a row are kept apart by masks, so nothing depends on their number and nothing synchronises with the host.

A NaN or infinity in a sequence can reach the others of its row (masks multiply by 0); finite values never do, bit for
bit, as long as nothing computed from them overflows.

Kept for the backward: `proj` itself (not a copy: do not overwrite it in between), and in acc, per token and value head,
the chunk states (dk*dv/C elements), T (C), V' (dv) and o (dv).  In float32 at dk = dv = 128 that is 2.3 KB with C = 64,
and 3.2 KB with the C = 32 of a CPU.  Everything else (convolution, norms, gates, decays, K K^T, Q K^T) is recomputed.

On a GPU, bfloat16 and float16 with heads up to 128 run on Triton kernels (mixer_triton.py; what they keep is told
there).  They cut each sequence into chunks of its own, so that its bits do not depend on what it is packed with and
nothing that it holds, NaN included, reaches another; products take operands in the working dtype (q^, k^, v, V', the
states, T and the score matrices are rounded to it) and sum in float32, and so does everything between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from ..checks import acc_dtype
from ..sequences import SeqIndex, check_cu_seqlens, token_positions
from ..triton_gate import launching_on, use_triton
from .chunks import ChunkIndex, chunk_index
from .conv import causal_conv_bwd, causal_conv_fwd
from .core import CoreSaved, core_bwd, core_fwd
from .layout import (
    L2_EPS,
    GdnDims,
    chunk_size,
    from_chunks,
    packed_masks,
    to_chunks,
    unfit_for_kernels,
    unit_stride,
)

if TYPE_CHECKING:
    from .mixer_triton import TritonSaved


class GdnSaved(NamedTuple):
    """What `gdn_mixer_fwd` keeps; see the module docstring."""

    proj: Tensor  # [N, dims.width], the caller's
    core: CoreSaved
    o: Tensor  # [NC, B, nv, C, dv] before the norm


class _Front(NamedTuple):
    """The recomputed part: projection row to the inputs of the recurrence."""

    x: Tensor  # [B, T, C] q | k | v of the projection, acc
    pre: Tensor  # [B, NC*c, C] convolution before SiLU, 0 in the padding
    q: Tensor  # [NC, B, nk, c, dk] normalised, scaled
    k: Tensor  # [NC, B, nk, c, dk] normalised
    v: Tensor  # [NC, B, nv, c, dv]
    q_rstd: Tensor  # [NC, B, nk, c, 1], dk^-1/2 included
    k_rstd: Tensor  # [NC, B, nk, c, 1]
    dt: Tensor  # [NC, B, nv, c] a + dt_bias
    neg_a: Tensor  # [nv, 1] -exp(A_log)
    g: Tensor  # [NC, B, nv, c]
    beta: Tensor  # [NC, B, nv, c]


def gdn_mixer_fwd(
    proj: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    *,
    dims: GdnDims,
    cu_seqlens: Tensor,
    max_seqlen: int,
    eps: float,
    out: Tensor | None = None,
    save: bool = True,
    index: SeqIndex | None = None,
    chunks: ChunkIndex | None = None,
    keep: str = "lean",
    backend: str = "auto",
) -> tuple[Tensor, GdnSaved | TritonSaved | None]:
    """Projection row to the input of the output projection; formulas and shapes in the module docstring.

    Args:
        dims: geometry of the layer.
        max_seqlen: tokens a row; N is a multiple of it, and each multiple is a sequence start.
        eps: of the output norm.
        out: [N, nv*dv] in proj's dtype to write to (`=`), allocated if None.
        save: keep what the backward needs.
        index: `sequence_index(cu_seqlens, N)`, when the caller has it already.
        chunks: `chunk_index(cu_seqlens, N)`, likewise; only the Triton kernels need it.
        keep: "lean", or "all" to spend memory on a faster backward (Triton kernels only).
        backend: "auto" takes the Triton kernels for CUDA tensors that fit them, "torch" and "triton" insist.

    Returns:
        out and what the backward needs (None with save=False): `GdnSaved`, or `TritonSaved` of the Triton kernels.

    Raises:
        ValueError: a shape or dtype that does not fit `dims`, or N not a multiple of max_seqlen.
    """
    op = "gdn_mixer_fwd"
    _check(op, proj, conv_weight, A_log, dt_bias, norm_weight, dims, cu_seqlens, max_seqlen)
    n = proj.shape[0]
    out = checks.output(op, "out", out, (n, dims.out_width), proj.dtype, proj)
    if n == 0:
        empty = proj.new_empty(0, dtype=acc_dtype(proj.dtype))
        return out, GdnSaved(proj, CoreSaved(empty, empty, empty), empty) if save else None
    if keep not in ("lean", "all"):
        checks.fail(op, "keep", "'lean' or 'all'", repr(keep), "leave it out for the trainer's choice")
    positions = token_positions(op, cu_seqlens, n, index)
    unfit = unfit_for_kernels(proj.dtype, dims.dk, dims.dv, dims.conv, gpu=proj.is_cuda)
    if use_triton(op, proj, backend, unfit):
        from .mixer_triton import compile_kernels, mixer_fwd

        target, rows = unit_stride(out), unit_stride(proj)
        weights = (conv_weight, A_log, dt_bias, norm_weight)
        with launching_on(proj):
            compile_kernels(rows, weights, target, dims=dims, eps=eps, save=save)
            saved = mixer_fwd(
                rows, weights, target, dims=dims, positions=positions, chunks=chunks or chunk_index(cu_seqlens, n),
                eps=eps, save=save, keep_all=keep == "all",
            )  # fmt: skip
        return (out if target is out else out.copy_(target)), saved
    length = max_seqlen
    positions = positions.view(-1, length)  # [B, T]
    front = _front(proj, conv_weight, A_log, dt_bias, positions, dims)
    masks = packed_masks(positions, chunk_size(length, proj.device))
    o, core = core_fwd(front.q, front.k, front.v, front.g, front.beta, None, masks)
    del front

    z = proj[:, dims.z].view(-1, length, dims.nv, dims.dv).to(o.dtype)
    y = from_chunks(o * _norm_rstd(o, eps), length)
    torch.mul(y.mul_(F.silu(z)), norm_weight, out=y)
    out.view(y.shape).copy_(y)
    return out, GdnSaved(proj, core, o) if save else None


def gdn_mixer_bwd(
    dout: Tensor,
    saved: GdnSaved | TritonSaved,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    *,
    dims: GdnDims,
    cu_seqlens: Tensor,
    max_seqlen: int,
    eps: float,
    dproj: Tensor | None = None,
    dconv: Tensor | None = None,
    dA_log: Tensor | None = None,
    ddt_bias: Tensor | None = None,
    dnorm: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    index: SeqIndex | None = None,
) -> Tensor:
    """Gradient of the projection row, and of the four small weights; formulas and shapes in the module docstring.

    Args:
        dout: [N, nv*dv] in proj's dtype.
        saved: of the forward; its tensors are left as they are.
        dproj: [N, dims.width] in proj's dtype to write to (`=`), allocated if None; must not be `saved.proj`.
        dconv, dA_log, ddt_bias, dnorm: acc-dtype gradients, `=` or with accumulate=True `+=`; None skips one.
        out: [N, nv*dv] in proj's dtype to write the forward's output to once more (`=`), for a caller that did not
            keep it (by another kernel: within a rounding of the first); None skips that.
        The others as in the forward.

    Returns:
        dproj.

    Raises:
        ValueError: a shape or dtype that does not fit.
    """
    proj = saved.proj
    op = "gdn_mixer_bwd"
    _check(op, proj, conv_weight, A_log, dt_bias, norm_weight, dims, cu_seqlens, max_seqlen)
    n, length = proj.shape[0], max_seqlen
    checks.shape(op, "dout", dout, (n, dims.out_width), str([n, dims.out_width]), "pass the gradient of out")
    checks.alike(op, "dout", dout, "proj", proj)
    dproj = checks.output(op, "dproj", dproj, (n, dims.width), proj.dtype, proj)
    if out is not None:
        checks.output(op, "out", out, (n, dims.out_width), proj.dtype, proj)
    for name, grad, weight in (
        ("dconv", dconv, conv_weight),
        ("dA_log", dA_log, A_log),
        ("ddt_bias", ddt_bias, dt_bias),
        ("dnorm", dnorm, norm_weight),
    ):
        if grad is not None:
            checks.output(op, name, grad, weight.shape, weight.dtype, proj)
    if n == 0:
        for grad in (dconv, dA_log, ddt_bias, dnorm):
            if grad is not None and not accumulate:
                grad.zero_()
        return dproj
    positions = token_positions(op, cu_seqlens, n, index)
    if not isinstance(saved, GdnSaved):
        from cortiq_kernels.ops.parts_triton import sum_parts

        from .mixer_triton import mixer_bwd

        weights = (conv_weight, A_log, dt_bias, norm_weight)
        target = unit_stride(dproj)
        again = None if out is None else unit_stride(out)
        with launching_on(proj):
            parts = mixer_bwd(
                unit_stride(dout), saved, weights, target, dims=dims, positions=positions, eps=eps, out=again
            )
        if target is not dproj:
            dproj.copy_(target)
        if out is not None and again is not None and again is not out:
            out.copy_(again)
        for grad, part in zip((dconv, dA_log, ddt_bias, dnorm), parts, strict=True):
            if grad is not None:
                sum_parts(part, grad, accumulate)
        return dproj
    positions = positions.view(-1, length)  # [B, T]
    front = _front(proj, conv_weight, A_log, dt_bias, positions, dims)
    masks = packed_masks(positions, chunk_size(length, proj.device))
    core, o = saved.core, saved.o
    acc, chunk = o.dtype, o.shape[3]
    shape = (-1, length, dims.nv, dims.dv)

    # the gated norm
    z = proj[:, dims.z].view(shape).to(acc)
    rstd = _norm_rstd(o, eps)
    u = o * rstd
    u_tokens = from_chunks(u, length)
    dn = dout.reshape(shape).to(acc)
    gated = dn * F.silu(z)
    if dnorm is not None:
        _write(dnorm, (gated * u_tokens).sum((0, 1, 2)), accumulate)
    if out is not None:
        out.view(shape).copy_((u_tokens * F.silu(z)).mul_(norm_weight))
    dz = torch.ops.aten.silu_backward((u_tokens * dn).mul_(norm_weight), z)
    dproj[:, dims.z].view(shape).copy_(dz)
    du = to_chunks(gated.mul_(norm_weight), chunk)
    do = du.addcmul(u, (u * du).mean(-1, keepdim=True), value=-1).mul_(rstd).contiguous()
    del z, u, u_tokens, dn, gated, dz, du

    grads = core_bwd(do, None, front.q, front.k, front.v, front.g, front.beta, masks, core)

    # the gates
    d_gate = torch.empty(2, *front.g.shape, dtype=acc, device=o.device)
    torch.mul(grads.dg * front.neg_a, front.dt.sigmoid(), out=d_gate[0])
    torch.ops.aten.sigmoid_backward.grad_input(grads.dbeta, front.beta, grad_input=d_gate[1])
    if dA_log is not None:
        _write(dA_log, (grads.dg * front.g).sum((0, 1, 3)), accumulate)
    if ddt_bias is not None:
        _write(ddt_bias, d_gate[0].sum((0, 1, 3)), accumulate)
    ab_tokens = d_gate.permute(2, 1, 4, 0, 3).flatten(1, 2)[:, :length]  # [B, T, 2, nv]
    dproj[:, dims.ab].unflatten(0, (-1, length)).unflatten(-1, (2, dims.nv)).copy_(ab_tokens)

    # the norms of q and k, SiLU, convolution
    d_act = torch.empty_like(front.pre)
    dq_grid, dk_grid, dv_grid = _heads(d_act, dims, chunk)
    _l2_norm_bwd(grads.dq, front.q, front.q_rstd, float(dims.dk), dq_grid)
    _l2_norm_bwd(grads.dk, front.k, front.k_rstd, 1.0, dk_grid)
    dv_grid.copy_(grads.dv)
    torch.ops.aten.silu_backward.grad_input(d_act, front.pre, grad_input=d_act)
    d_pre, d_x = d_act[:, :length], front.pre[:, :length]  # pre has been read, its memory serves again
    fresh = dconv if dconv is None or not accumulate else torch.empty_like(dconv)
    causal_conv_bwd(d_pre, front.x, conv_weight, positions, dx=d_x, dweight=fresh)
    if dconv is not None and accumulate and fresh is not None:
        dconv += fresh
    dproj[:, dims.qkv].unflatten(0, (-1, length)).copy_(d_x)
    return dproj


def _front(
    proj: Tensor, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor, positions: Tensor, dims: GdnDims
) -> _Front:
    """Projection rows to the inputs of the recurrence, on the grid."""
    batch, length = positions.shape
    acc, chunk = acc_dtype(proj.dtype), chunk_size(length, proj.device)
    padded = length + -length % chunk
    grid = (padded // chunk, batch)
    x = proj[:, dims.qkv].unflatten(0, (batch, length)).to(acc)
    pre = torch.empty(batch, padded, dims.conv_width, dtype=acc, device=proj.device)
    pre[:, length:] = 0
    causal_conv_fwd(x, conv_weight, positions, out=pre[:, :length])
    raw_q, raw_k, raw_v = _heads(F.silu(pre), dims, chunk)

    q = torch.empty(*grid, dims.nk, chunk, dims.dk, dtype=acc, device=proj.device)
    k = torch.empty_like(q)
    q_rstd = (raw_q.square().sum(-1, keepdim=True) + L2_EPS).rsqrt_().mul_(dims.dk**-0.5)
    k_rstd = (raw_k.square().sum(-1, keepdim=True) + L2_EPS).rsqrt_()
    torch.mul(raw_q, q_rstd, out=q)
    torch.mul(raw_k, k_rstd, out=k)

    gates = proj[:, dims.ab].unflatten(0, (batch, length)).unflatten(-1, (2, dims.nv))  # [B, T, 2, nv]
    gates = to_chunks(gates.to(acc), chunk).permute(2, 0, 1, 4, 3).contiguous()
    gates = gates.view(2, *grid, dims.nv, chunk)
    dt = gates[0] + dt_bias[:, None]
    neg_a = A_log.exp().neg_()[:, None]
    g = F.softplus(dt).mul_(neg_a)
    return _Front(x, pre, q, k, raw_v.contiguous(), q_rstd, k_rstd, dt, neg_a, g, gates[1].sigmoid())


def _heads(rows: Tensor, dims: GdnDims, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of convolved rows [B, NC*c, C] as views on the grid, [NC, B, heads, c, d]."""
    key = dims.nk * dims.dk
    q, k, v = rows.split([key, key, dims.nv * dims.dv], dim=-1)
    return (
        to_chunks(q.unflatten(-1, (dims.nk, dims.dk)), chunk),
        to_chunks(k.unflatten(-1, (dims.nk, dims.dk)), chunk),
        to_chunks(v.unflatten(-1, (dims.nv, dims.dv)), chunk),
    )


def _l2_norm_bwd(dy: Tensor, y: Tensor, rstd: Tensor, inv_scale_sq: float, out: Tensor) -> None:
    """dx of y = x * rstd, rstd = c rsqrt(sum x^2 + eps), inv_scale_sq = 1/c^2; dy is overwritten."""
    dot = (y * dy).sum(-1, keepdim=True)
    torch.mul(dy.addcmul_(y, dot, value=-inv_scale_sq), rstd, out=out)


def _norm_rstd(o: Tensor, eps: float) -> Tensor:
    """rsqrt(mean o^2 + eps) over the last dimension, kept."""
    return (o.square().mean(-1, keepdim=True) + eps).rsqrt_()


def _write(out: Tensor, value: Tensor, accumulate: bool) -> None:
    """out `=` or `+=` value."""
    if accumulate:
        out += value
    else:
        out.copy_(value)


def _check(
    op: str,
    proj: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    dims: GdnDims,
    cu_seqlens: Tensor,
    max_seqlen: int,
) -> None:
    """Everything that the host can see without reading device values."""
    if min(dims) < 1 or dims.nv % dims.nk:
        checks.fail(op, "dims", "positive with nv a multiple of nk", dims, "value head h uses key head h // (nv/nk)")
    checks.shape(op, "proj", proj, (None, dims.width), f"[N, {dims.width}]", "its columns are q | k | v | z | a | b")
    checks.dtype(op, "proj", proj, checks.FLOATS, "convert it with .to()")
    taps = (dims.conv_width, dims.conv)
    checks.shape(
        op, "conv_weight", conv_weight, taps, str(list(taps)), "drop the middle dimension of a stored [C, 1, W]"
    )
    checks.dtype(op, "conv_weight", conv_weight, (acc_dtype(proj.dtype),), "it is held in the accumulation dtype")
    checks.same_device(op, "conv_weight", conv_weight, "proj", proj)
    checks.vector(op, "A_log", A_log, dims.nv, "proj", proj)
    checks.vector(op, "dt_bias", dt_bias, dims.nv, "proj", proj)
    checks.vector(op, "norm_weight", norm_weight, dims.dv, "proj", proj)
    check_cu_seqlens(op, cu_seqlens, proj)
    if max_seqlen < 1 or proj.shape[0] % max_seqlen:
        expected = f"a divisor of the {proj.shape[0]} tokens"
        checks.fail(op, "max_seqlen", expected, max_seqlen, "it is the window, and a batch is whole windows")
