"""What surrounds softmax attention on Triton: q~ and k~ from the projection, and back.

    forward     q~ = rope(x r gain), x = q + bias, r = (mean(x^2) + eps)^-1/2      v + bias where there is one
    backward    d(x r gain) = rope^T(dq~)       g = d(x r gain) gain
                dx = r (g - x r mean(g x r))    dnorm = sum d(x r gain) x r    dbias = sum dx

Half-split RoPE joins dimension i with i +- rot/2: a row is read twice, the second time in the order of its partners,
which the L1 cache serves. A program walks the heads of ROWS tokens, whose angles stay in registers; the next head is
loaded while this one is worked on. Sums over tokens leave each program as parts, that torch adds in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..jit import kernel


@triton.jit
def _angles(cos_ptr, sin_ptr, pos_ptr, tok, r, inside, ROT: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr):
    """(cos, signed sin) [R, PAD] of the tokens' positions, (1, 0) on dimensions that do not turn."""
    col = tl.arange(0, PAD)
    turned = inside[:, None] & (col < ROT)[None, :]
    pos = tl.load(pos_ptr + tok + r, mask=inside, other=0)
    at = pos[:, None] * HALF + tl.where(col < HALF, col, col - HALF)[None, :]
    cos = tl.load(cos_ptr + at, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + at, mask=turned, other=0.0)
    return cos, tl.where((col < HALF)[None, :], -sin, sin)


@triton.jit
def _partner(ROT: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr):
    """[PAD] the dimension that each is turned with; itself from ROT on."""
    col = tl.arange(0, PAD)
    return tl.where(col < HALF, col + HALF, tl.where(col < ROT, col - HALF, col))


@triton.jit
def _gain(norm_ptr, at, inside, NORM: tl.constexpr, CENTERED: tl.constexpr, PAD: tl.constexpr):
    """[1, PAD] gain at these dimensions; 1 without a norm."""
    if NORM:
        w = tl.load(norm_ptr + at, mask=inside, other=0.0)
        return (w + 1.0 if CENTERED else w)[None, :]
    return tl.full([1, PAD], 1.0, tl.float32)


@triton.jit
def _row(ptr, tok, r, inside, stride, start, at, valid):
    """[R, PAD] columns start + at of rows tok + r."""
    return tl.load(
        ptr + tok * stride + (r[:, None] * stride + (start + at)[None, :]), mask=inside[:, None] & valid, other=0
    )


@triton.jit
def _with_bias(x, bias_ptr, start, at, ok, BIAS: tl.constexpr):
    x = x.to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + start + at, mask=ok, other=0.0)[None, :]
    return x


@kernel(do_not_specialize=["n"])
def attn_prep_kernel(
    proj_ptr,  # [N, W], row stride proj_stride
    q_norm_ptr,  # [HD] f32, NORM only
    k_norm_ptr,  # [HD] f32, NORM only
    bias_ptr,  # [W] f32, BIAS only
    cos_ptr,  # [>= T, ROT / 2] f32
    sin_ptr,  # [>= T, ROT / 2] f32
    pos_ptr,  # [N] int64
    y_ptr,  # [N, (NQ + NKV)*HD] out: q~ | k~, with BIAS also | v
    n,
    eps,
    proj_stride,
    y_stride,
    q_head,  # columns from one query head to the next
    k_start,  # column of k
    NQ: tl.constexpr,
    NKV: tl.constexpr,
    HD: tl.constexpr,
    PAD: tl.constexpr,
    ROT: tl.constexpr,
    NORM: tl.constexpr,
    CENTERED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program ROWS tokens, all heads."""
    HALF: tl.constexpr = ROT // 2
    tok = tl.program_id(0).to(tl.int64) * ROWS
    r = tl.arange(0, ROWS)
    inside = r < n - tok
    col = tl.arange(0, PAD)
    at = _partner(ROT, HALF, PAD)
    ok, turns = col < HD, col < ROT
    cos, sin = _angles(cos_ptr, sin_ptr, pos_ptr, tok, r, inside, ROT, HALF, PAD)
    gain, gain_at = _gain(q_norm_ptr, col, ok, NORM, CENTERED, PAD), _gain(q_norm_ptr, at, ok, NORM, CENTERED, PAD)
    raw = _row(proj_ptr, tok, r, inside, proj_stride, 0, col, ok[None, :])
    raw_at = _row(proj_ptr, tok, r, inside, proj_stride, 0, at, turns[None, :])
    start = 0
    for h in range(NQ + NKV):
        x, x_at = _with_bias(raw, bias_ptr, start, col, ok, BIAS), _with_bias(raw_at, bias_ptr, start, at, turns, BIAS)
        if h == NQ:
            gain, gain_at = (
                _gain(k_norm_ptr, col, ok, NORM, CENTERED, PAD),
                _gain(k_norm_ptr, at, ok, NORM, CENTERED, PAD),
            )
        start = tl.where(h + 1 < NQ, (h + 1) * q_head, k_start + (h + 1 - NQ) * HD)
        ahead = inside & (h + 1 < NQ + NKV)
        raw = _row(proj_ptr, tok, r, ahead, proj_stride, start, col, ok[None, :])
        raw_at = _row(proj_ptr, tok, r, ahead, proj_stride, start, at, turns[None, :])
        y = x * gain * cos + x_at * gain_at * sin
        if NORM:
            y = y * tl.rsqrt(tl.sum(x * x, 1) / HD + eps)[:, None]
        out = y_ptr + tok * y_stride + (r[:, None] * y_stride + (h * HD + col)[None, :])
        tl.store(out, y.to(y_ptr.dtype.element_ty), mask=inside[:, None] & ok[None, :])
    if BIAS:
        for h in range(NKV):
            start = k_start + (NKV + h) * HD
            raw = _row(proj_ptr, tok, r, inside, proj_stride, start, col, ok[None, :])
            y = _with_bias(raw, bias_ptr, start, col, ok, BIAS)
            out = y_ptr + tok * y_stride + (r[:, None] * y_stride + ((NQ + NKV + h) * HD + col)[None, :])
            tl.store(out, y.to(y_ptr.dtype.element_ty), mask=inside[:, None] & ok[None, :])


@kernel(do_not_specialize=["n"])
def attn_prep_bwd_kernel(
    proj_ptr,  # [N, W], row stride proj_stride
    q_norm_ptr,  # [HD] f32, NORM only
    k_norm_ptr,  # [HD] f32, NORM only
    bias_ptr,  # [W] f32, BIAS only
    cos_ptr,  # [>= T, ROT / 2] f32
    sin_ptr,  # [>= T, ROT / 2] f32
    pos_ptr,  # [N] int64
    dq_ptr,  # [N, NQ*HD] dq~
    dk_ptr,  # [N, NKV*HD] dk~
    dv_ptr,  # [N, NKV*HD], VALUES only
    dproj_ptr,  # [N, W] out: the columns of q and k, with VALUES also v
    dnorm_ptr,  # [P, 2, HD] f32 out, NORM only: parts of dq_norm and dk_norm
    dbias_ptr,  # [P, W] f32 out, BIAS only: parts of dbias
    n,
    eps,
    proj_stride,
    dq_stride,
    dk_stride,
    dv_stride,
    dproj_stride,
    q_head,
    k_start,
    NQ: tl.constexpr,
    NKV: tl.constexpr,
    HD: tl.constexpr,
    PAD: tl.constexpr,
    ROT: tl.constexpr,
    NORM: tl.constexpr,
    CENTERED: tl.constexpr,
    BIAS: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program ROWS tokens, all heads."""
    HALF: tl.constexpr = ROT // 2
    pid = tl.program_id(0).to(tl.int64)
    tok = pid * ROWS
    r = tl.arange(0, ROWS)
    inside = r < n - tok
    col = tl.arange(0, PAD)
    at = _partner(ROT, HALF, PAD)
    ok, turns = col < HD, col < ROT
    cos, sin = _angles(cos_ptr, sin_ptr, pos_ptr, tok, r, inside, ROT, HALF, PAD)
    gain = _gain(q_norm_ptr, col, ok, NORM, CENTERED, PAD)
    dnorm = tl.zeros([ROWS, PAD], tl.float32)
    parts = dbias_ptr + pid * (k_start + 2 * NKV * HD)
    raw = _row(proj_ptr, tok, r, inside, proj_stride, 0, col, ok[None, :])
    grad = _row(dq_ptr, tok, r, inside, dq_stride, 0, col, ok[None, :])
    grad_at = _row(dq_ptr, tok, r, inside, dq_stride, 0, at, turns[None, :])
    start = 0
    for h in range(NQ + NKV):
        if NORM:  # noqa: SIM102 - known when it is compiled, the other is not
            if h == NQ:
                tl.store(dnorm_ptr + pid * 2 * HD + col, tl.sum(dnorm, 0), mask=ok)
                dnorm = tl.zeros([ROWS, PAD], tl.float32)
                gain = _gain(k_norm_ptr, col, ok, NORM, CENTERED, PAD)
        here = start
        x = _with_bias(raw, bias_ptr, here, col, ok, BIAS)
        dy = grad.to(tl.float32) * cos - grad_at.to(tl.float32) * sin
        start = tl.where(h + 1 < NQ, (h + 1) * q_head, k_start + (h + 1 - NQ) * HD)
        ahead = inside & (h + 1 < NQ + NKV)
        if NORM:
            raw = _row(proj_ptr, tok, r, ahead, proj_stride, start, col, ok[None, :])
        if h + 1 < NQ:
            grad = _row(dq_ptr, tok, r, ahead, dq_stride, (h + 1) * HD, col, ok[None, :])
            grad_at = _row(dq_ptr, tok, r, ahead, dq_stride, (h + 1) * HD, at, turns[None, :])
        else:
            grad = _row(dk_ptr, tok, r, ahead, dk_stride, (h + 1 - NQ) * HD, col, ok[None, :])
            grad_at = _row(dk_ptr, tok, r, ahead, dk_stride, (h + 1 - NQ) * HD, at, turns[None, :])
        if NORM:
            rstd = tl.where(inside, tl.rsqrt(tl.sum(x * x, 1) / HD + eps), 0.0)[:, None]
            unit = x * rstd
            dnorm += dy * unit
            dy = dy * gain
            dy = rstd * (dy - unit * (tl.sum(dy * unit, 1) / HD)[:, None])
        if BIAS:
            tl.store(parts + here + col, tl.sum(tl.where(inside[:, None], dy, 0.0), 0), mask=ok)
        out = dproj_ptr + tok * dproj_stride + (r[:, None] * dproj_stride + (here + col)[None, :])
        tl.store(out, dy.to(dproj_ptr.dtype.element_ty), mask=inside[:, None] & ok[None, :])
    if NORM:
        tl.store(dnorm_ptr + (pid * 2 + 1) * HD + col, tl.sum(dnorm, 0), mask=ok)
    if VALUES:
        for h in range(NKV):
            here = k_start + (NKV + h) * HD
            dv = _row(dv_ptr, tok, r, inside, dv_stride, h * HD, col, ok[None, :])
            if BIAS:
                tl.store(parts + here + col, tl.sum(dv.to(tl.float32), 0), mask=ok)
            out = dproj_ptr + tok * dproj_stride + (r[:, None] * dproj_stride + (here + col)[None, :])
            tl.store(out, dv, mask=inside[:, None] & ok[None, :])
