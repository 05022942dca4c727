"""Causal convolution, SiLU and the l2 norm of q and k on Triton, forward and backward.

    pre_t = sum_{s<W} w[:, W-1-s] o x_{t-s} [s <= p_t]       y = SiLU(pre)       p_t: position of t in its sequence
    q^ = y dk^-1/2 rsqrt(sum y^2 + 1e-6),  k^ = y rsqrt(sum y^2 + 1e-6) a head,  v = y

    dy of the norm: c r (d - u u.d), u = y r, r = rsqrt(sum y^2 + 1e-6), c the scale
    dpre = dy SiLU'(pre)       dx_t = sum_s w[:, W-1-s] o dpre_{t+s} [s <= p_{t+s}]
    dw[:, W-1-s] = sum_t x_{t-s} o dpre_t [s <= p_t]

A program walks STRIPS strips of STEPS tokens of one head side by side, one token of each at a time, and carries the
last W-1 rows in registers: a row is read once, and the backward, which needs dpre of later tokens, hands partial sums
back instead of computing it again.  A strip reads W-1 rows before it, and the backward also W-1 after it.  W is at most
4.  x is read where the projection left it.  The backward makes pre and y again rather than keep them: 12 KB a token at
16/16 heads of 128.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cortiq_kernels.ops import jit

from .triton_tiles import load_rows, store_rows


@triton.jit
def _tap(w_ptr, s: tl.constexpr, W: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr):
    """[1, PAD] weights of the token s back; 0 where there is no such tap."""
    col = tl.arange(0, PAD)
    if s < W:
        return tl.load(w_ptr + col * W + (W - 1 - s), mask=col < D, other=0)[None, :]
    return tl.zeros([1, PAD], tl.float32)


@jit.kernel(do_not_specialize=["n"])
def conv_kernel(
    x_ptr,  # [N, C], row stride x_stride
    w_ptr,  # [C, W] f32
    pos_ptr,  # [N] int64
    y_ptr,  # [N, C] out, row stride y_stride
    n,
    scale,
    x_stride,
    y_stride,
    head0,  # the launch's first head
    start,  # and its first channel
    norm_heads,  # heads below are normalised
    scaled_heads,  # heads below are scaled
    HEADS: tl.constexpr,  # heads of the launch
    D: tl.constexpr,
    PAD: tl.constexpr,
    W: tl.constexpr,
    STRIPS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """One program STRIPS strips of STEPS tokens and a head."""
    p = tl.program_id(0)
    h = p % HEADS
    base = (p // HEADS).to(tl.int64) * (STRIPS * STEPS)
    r = tl.arange(0, STRIPS) * STEPS
    channel = start + h * D
    x_ptr += channel
    y_ptr += channel
    w_ptr += channel * W
    w0, w1 = _tap(w_ptr, 0, W, D, PAD), _tap(w_ptr, 1, W, D, PAD)
    w2, w3 = _tap(w_ptr, 2, W, D, PAD), _tap(w_ptr, 3, W, D, PAD)
    normed = head0 + h < norm_heads
    factor = tl.where(head0 + h < scaled_heads, scale, 1.0)
    inside = (r < n - base) & (base + r > 0)
    x1 = load_rows(x_ptr, base - 1, r, inside, x_stride, D, PAD).to(tl.float32)
    x2 = load_rows(x_ptr, base - 2, r, inside & (base + r > 1), x_stride, D, PAD).to(tl.float32)
    x3 = load_rows(x_ptr, base - 3, r, inside & (base + r > 2), x_stride, D, PAD).to(tl.float32)
    raw = load_rows(x_ptr, base, r, r < n - base, x_stride, D, PAD)
    for step in range(STEPS):
        tok = base + step
        mask = r < n - tok
        x = raw.to(tl.float32)
        raw = load_rows(x_ptr, tok + 1, r, r < n - tok - 1, x_stride, D, PAD)  # the next row, while this one is used
        pos = tl.load(pos_ptr + tok + r, mask=mask, other=0)[:, None]
        pre = x * w0
        pre += tl.where(pos >= 1, x1 * w1, 0.0)
        pre += tl.where(pos >= 2, x2 * w2, 0.0)
        pre += tl.where(pos >= 3, x3 * w3, 0.0)
        y = pre * tl.sigmoid(pre)
        if normed:
            y = y * (tl.rsqrt(tl.sum(y * y, 1) + 1e-6) * factor)[:, None]
        store_rows(y_ptr, y, tok, r, mask, y_stride, D, PAD)
        x3 = x2
        x2 = x1
        x1 = x


@triton.jit
def _dy(
    dqk_ptr, y_ptr, n, head, norm_heads, tok, r, mask, GROUP: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    """Rows of the gradient of q^, k^ (summed over a group's value heads), or Y."""
    if head < norm_heads:
        at = dqk_ptr + head.to(tl.int64) * GROUP * n * D
        d = load_rows(at, tok, r, mask, D, D, PAD)
        for j in tl.static_range(1, GROUP):
            d += load_rows(at + j * D * n.to(tl.int64), tok, r, mask, D, D, PAD)
    else:
        d = load_rows(y_ptr + (head - norm_heads).to(tl.int64) * n * D, tok, r, mask, D, D, PAD)
        d = d.to(dqk_ptr.dtype.element_ty)
    return d


@jit.kernel(do_not_specialize=["n"])
def conv_bwd_kernel(
    x_ptr,  # [N, C], row stride x_stride
    w_ptr,  # [C, W] f32
    pos_ptr,  # [N] int64
    dqk_ptr,  # [2 NK GROUP, N, DK] gradients of q^ and k^, of each value head
    y_ptr,  # [HV, N, DV] Y: beta Y is the gradient of v
    beta_ptr,  # [HV, N] f32
    dx_ptr,  # [N, C] out, row stride dx_stride
    dw_ptr,  # [PARTS, C, W] f32 out
    n,
    scale,
    channels,
    x_stride,
    dx_stride,
    head0,
    start,
    norm_heads,
    scaled_heads,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # value heads a key head
    D: tl.constexpr,
    PAD: tl.constexpr,
    W: tl.constexpr,
    STRIPS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """One program STRIPS strips of STEPS tokens and a head."""
    p = tl.program_id(0)
    h, part = p % HEADS, p // HEADS
    head = head0 + h
    base = part.to(tl.int64) * (STRIPS * STEPS)
    r = tl.arange(0, STRIPS) * STEPS
    channel = start + h * D
    x_ptr += channel
    dx_ptr += channel
    w_ptr += channel * W
    w0, w1 = _tap(w_ptr, 0, W, D, PAD), _tap(w_ptr, 1, W, D, PAD)
    w2, w3 = _tap(w_ptr, 2, W, D, PAD), _tap(w_ptr, 3, W, D, PAD)
    normed = head < norm_heads
    factor = tl.where(head < scaled_heads, scale, 1.0)
    inside = (r < n - base) & (base + r > 0)
    x1 = load_rows(x_ptr, base - 1, r, inside, x_stride, D, PAD).to(tl.float32)
    x2 = load_rows(x_ptr, base - 2, r, inside & (base + r > 1), x_stride, D, PAD).to(tl.float32)
    x3 = load_rows(x_ptr, base - 3, r, inside & (base + r > 2), x_stride, D, PAD).to(tl.float32)
    raw = load_rows(x_ptr, base, r, r < n - base, x_stride, D, PAD)
    raw_d = _dy(dqk_ptr, y_ptr, n, head, norm_heads, base, r, r < n - base, GROUP, D, PAD)
    zero = tl.zeros([STRIPS, PAD], tl.float32)
    later1, later2, later3 = zero, zero, zero  # what later tokens gave to dx of the last three
    dw0, dw1, dw2, dw3 = zero, zero, zero, zero
    for step in range(STEPS + W - 1):
        tok = base + step
        mask = r < n - tok
        x, d = raw.to(tl.float32), raw_d.to(tl.float32)
        ahead = (r < n - tok - 1) & (step < STEPS + W - 2)
        raw = load_rows(x_ptr, tok + 1, r, ahead, x_stride, D, PAD)
        raw_d = _dy(dqk_ptr, y_ptr, n, head, norm_heads, tok + 1, r, ahead, GROUP, D, PAD)
        pos = tl.load(pos_ptr + tok + r, mask=mask, other=0)[:, None]
        x1 = tl.where(pos >= 1, x1, 0.0)
        x2 = tl.where(pos >= 2, x2, 0.0)
        x3 = tl.where(pos >= 3, x3, 0.0)
        pre = x * w0 + x1 * w1 + x2 * w2 + x3 * w3
        sig = tl.sigmoid(pre)
        if normed:
            y = pre * sig
            rstd = tl.rsqrt(tl.sum(y * y, 1) + 1e-6)
            dot = tl.sum(y * d, 1) * rstd * rstd
            d = (d - y * dot[:, None]) * (rstd * factor)[:, None]
        else:
            at = beta_ptr + (head - norm_heads).to(tl.int64) * n
            d = d * tl.load(at + tok + r, mask=mask, other=0)[:, None]
        d = d * sig * (1 + pre * (1 - sig))
        if W == 4:
            dx = later3 + tl.where(pos >= 3, d * w3, 0.0)
        elif W == 3:
            dx = later2 + tl.where(pos >= 2, d * w2, 0.0)
        elif W == 2:
            dx = later1 + tl.where(pos >= 1, d * w1, 0.0)
        else:
            dx = d * w0
        done = tok - (W - 1)
        store_rows(dx_ptr, dx, done, r, (r < n - done) & (step >= W - 1), dx_stride, D, PAD)
        later3 = later2 + tl.where(pos >= 2, d * w2, 0.0)
        later2 = later1 + tl.where(pos >= 1, d * w1, 0.0)
        later1 = d * w0
        if step < STEPS:
            dw0 += d * x
            dw1 += d * x1
            dw2 += d * x2
            dw3 += d * x3
        x3 = x2
        x2 = x1
        x1 = x
    col = tl.arange(0, PAD)
    at = dw_ptr + (part.to(tl.int64) * channels + channel + col) * W
    tl.store(at + W - 1, tl.sum(dw0, 0), mask=col < D)
    if W > 1:
        tl.store(at + W - 2, tl.sum(dw1, 0), mask=col < D)
    if W > 2:
        tl.store(at + W - 3, tl.sum(dw2, 0), mask=col < D)
    if W > 3:
        tl.store(at, tl.sum(dw3, 0), mask=col < D)
