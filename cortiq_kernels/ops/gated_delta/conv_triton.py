"""Causal convolution, SiLU and the l2 norm of q and k on Triton, forward and backward.

    pre_t = sum_{s<W} w[:, W-1-s] o x_{t-s} [s <= p_t]       y = SiLU(pre)       p_t: position of t in its sequence
    q^ = y dk^-1/2 rsqrt(sum y^2 + 1e-6),  k^ = y rsqrt(sum y^2 + 1e-6) a head,  v = y

    dy of the norm: c r (d - u u.d), u = y r, r = rsqrt(sum y^2 + 1e-6), c the scale
    dpre = dy SiLU'(pre)       dx_t = sum_s w[:, W-1-s] o dpre_{t+s} [s <= p_{t+s}]
    dw[:, W-1-s] = sum_t x_{t-s} o dpre_t [s <= p_t]

The forward is a tile of ROWS tokens and a head: the tokens before each come from the cache, masked where the sequence
begins, so that all loads are in flight at once.  The backward walks STRIPS strips of STEPS tokens side by side, one
token of each at a time, reads two tokens ahead and carries the last W-1 rows in registers: it needs dpre of later
tokens, and hands partial sums back instead of computing it again.  A strip reads W-1 rows before it and W-1 after it.
W is at most 4.  x is read where the projection left it.  The backward makes pre and y again rather than keep them:
12 KB a token at 16/16 heads of 128.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cortiq_kernels.ops import jit

from .triton_tiles import load_rows, sigmoid, store_rows


@triton.jit
def _taps(w_ptr, W: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr):
    """[1, PAD] weights of the token itself and of 1, 2 and 3 back; 0 where there is no such tap."""
    col = tl.arange(0, PAD)[:, None]
    tap = tl.arange(0, 4)[None, :] - (4 - W)
    w = tl.load(w_ptr + col * W + tap, mask=(col < D) & (tap >= 0), other=0)  # [PAD, 4], the token itself last
    even, odd = tl.split(tl.reshape(w, [PAD, 2, 2]))
    w3, w1 = tl.split(even)
    w2, w0 = tl.split(odd)
    return w0[None, :], w1[None, :], w2[None, :], w3[None, :]


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
    ROWS: tl.constexpr,
):
    """One program ROWS tokens and a head."""
    p = tl.program_id(0)
    h = p % HEADS
    tok = (p // HEADS).to(tl.int64) * ROWS
    r = tl.arange(0, ROWS)
    mask = r < n - tok
    channel = start + h * D
    x_ptr += channel
    pos = tl.load(pos_ptr + tok + r, mask=mask, other=0)
    w0, w1, w2, w3 = _taps(w_ptr + channel * W, W, D, PAD)
    x0 = load_rows(x_ptr, tok, r, mask, x_stride, D, PAD)
    x1 = load_rows(x_ptr, tok - 1, r, pos >= 1, x_stride, D, PAD)
    x2 = load_rows(x_ptr, tok - 2, r, pos >= 2, x_stride, D, PAD)
    x3 = load_rows(x_ptr, tok - 3, r, (pos >= 3) & (W > 3), x_stride, D, PAD)
    pre = x0.to(tl.float32) * w0 + x1.to(tl.float32) * w1 + x2.to(tl.float32) * w2 + x3.to(tl.float32) * w3
    y = pre * sigmoid(pre)
    if head0 + h < norm_heads:
        factor = tl.where(head0 + h < scaled_heads, scale, 1.0)
        y = y * (tl.rsqrt(tl.sum(y * y, 1) + 1e-6) * factor)[:, None]
    store_rows(y_ptr + channel, y, tok, r, mask, y_stride, D, PAD)


@triton.jit
def _dy(dqk_ptr, y_ptr, n, head, norm_heads, tok, r, mask, D: tl.constexpr, PAD: tl.constexpr):
    """Rows of the gradient of q^, k^, or Y."""
    if head < norm_heads:
        d = load_rows(dqk_ptr + head.to(tl.int64) * n * D, tok, r, mask, D, D, PAD)
    else:
        d = load_rows(y_ptr + (head - norm_heads).to(tl.int64) * n * D, tok, r, mask, D, D, PAD)
    return d


@triton.jit
def _walk(
    x_ptr, w_ptr, pos_ptr, dqk_ptr, y_ptr, beta_ptr, dx_ptr, dw_ptr, n, scale, x_stride, dx_stride, head, norm_heads,
    scaled_heads, base, STARTS: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, W: tl.constexpr,
    STRIPS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The strips from token `base` on, of one head; `STARTS`: a sequence may begin in them.

    Products enter sums by `fma` by name: left to the compiler, unrolled steps and the two kinds of strips would round
    differently, and a token's bits depend on what its sequence is packed with.
    """
    r = tl.arange(0, STRIPS) * STEPS
    w0, w1, w2, w3 = _taps(w_ptr, W, D, PAD)
    normed = head < norm_heads
    factor = tl.where(head < scaled_heads, scale, 1.0)
    inside = (r < n - base) & (base + r > 0)
    x1 = load_rows(x_ptr, base - 1, r, inside, x_stride, D, PAD).to(tl.float32)
    x2 = load_rows(x_ptr, base - 2, r, inside & (base + r > 1), x_stride, D, PAD).to(tl.float32)
    x3 = load_rows(x_ptr, base - 3, r, inside & (base + r > 2), x_stride, D, PAD).to(tl.float32)
    raw = load_rows(x_ptr, base, r, r < n - base, x_stride, D, PAD)
    raw_d = _dy(dqk_ptr, y_ptr, n, head, norm_heads, base, r, r < n - base, D, PAD)
    next_x = load_rows(x_ptr, base + 1, r, r < n - base - 1, x_stride, D, PAD)
    next_d = _dy(dqk_ptr, y_ptr, n, head, norm_heads, base + 1, r, r < n - base - 1, D, PAD)
    zero = tl.zeros([STRIPS, PAD], tl.float32)
    later1, later2, later3 = zero, zero, zero  # what later tokens gave to dx of the last three
    dw0, dw1, dw2, dw3 = zero, zero, zero, zero
    STEP4: tl.constexpr = (STEPS + W - 1 + 3) // 4 * 4
    for step in tl.range(0, STEP4, loop_unroll_factor=4):
        tok = base + step
        mask = r < n - tok
        x, d = raw.to(tl.float32), raw_d.to(tl.float32)
        raw, raw_d = next_x, next_d
        ahead = (r < n - tok - 2) & (step < STEPS + W - 3)
        next_x = load_rows(x_ptr, tok + 2, r, ahead, x_stride, D, PAD)
        next_d = _dy(dqk_ptr, y_ptr, n, head, norm_heads, tok + 2, r, ahead, D, PAD)
        if STARTS:
            pos = tl.load(pos_ptr + tok + r, mask=mask, other=0)[:, None]
            x1 = tl.where(pos >= 1, x1, 0.0)
            x2 = tl.where(pos >= 2, x2, 0.0)
            x3 = tl.where(pos >= 3, x3, 0.0)
        pre = tl.fma(x3, w3, tl.fma(x2, w2, tl.fma(x1, w1, x * w0)))
        sig = sigmoid(pre)
        y = pre * sig
        if normed:
            rstd = tl.rsqrt(tl.sum(y * y, 1) + 1e-6)
            dot = tl.sum(y * d, 1) * rstd * rstd
            d = tl.fma(y, -dot[:, None], d) * (rstd * factor)[:, None]
        else:
            d = d * tl.load(beta_ptr + tok + r, mask=mask, other=0)[:, None]
        d = d * tl.fma(y, 1 - sig, sig)
        d1, d2, d3 = d, d, d
        if STARTS:
            d1 = tl.where(pos >= 1, d, 0.0)
            d2 = tl.where(pos >= 2, d, 0.0)
            d3 = tl.where(pos >= 3, d, 0.0)
        if W == 4:
            dx = tl.fma(d3, w3, later3)
        elif W == 3:
            dx = tl.fma(d2, w2, later2)
        elif W == 2:
            dx = tl.fma(d1, w1, later1)
        else:
            dx = d * w0
        done = tok - (W - 1)
        store_rows(dx_ptr, dx, done, r, (r < n - done) & (step >= W - 1) & (step < STEPS + W - 1), dx_stride, D, PAD)
        later3 = tl.fma(d2, w2, later2)
        later2 = tl.fma(d1, w1, later1)
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
    at = dw_ptr + col * W
    tl.store(at + W - 1, tl.sum(dw0, 0), mask=col < D)
    if W > 1:
        tl.store(at + W - 2, tl.sum(dw1, 0), mask=col < D)
    if W > 2:
        tl.store(at + W - 3, tl.sum(dw2, 0), mask=col < D)
    if W > 3:
        tl.store(at, tl.sum(dw3, 0), mask=col < D)


@jit.kernel(do_not_specialize=["n"])
def conv_bwd_kernel(
    x_ptr,  # [N, C], row stride x_stride
    w_ptr,  # [C, W] f32
    pos_ptr,  # [N] int64
    dqk_ptr,  # [2 NK, N, DK] gradients of q^ and k^
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
    channel = start + h * D
    x_ptr += channel
    dx_ptr += channel
    w_ptr += channel * W
    dw_ptr += (part.to(tl.int64) * channels + channel) * W
    beta_ptr += tl.maximum(head - norm_heads, 0).to(tl.int64) * n
    # Whether a sequence begins among the tokens read here: only then are there positions to look at.
    every = tl.arange(0, triton.next_power_of_2(STRIPS * STEPS + W - 1))
    near = (every < STRIPS * STEPS + W - 1) & (every < n - base)
    if tl.min(tl.load(pos_ptr + base + every, mask=near, other=3), 0) < 3:
        _walk(
            x_ptr, w_ptr, pos_ptr, dqk_ptr, y_ptr, beta_ptr, dx_ptr, dw_ptr, n, scale, x_stride, dx_stride, head,
            norm_heads, scaled_heads, base, True, D, PAD, W, STRIPS, STEPS,
        )  # fmt: skip
    else:
        _walk(
            x_ptr, w_ptr, pos_ptr, dqk_ptr, y_ptr, beta_ptr, dx_ptr, dw_ptr, n, scale, x_stride, dx_stride, head,
            norm_heads, scaled_heads, base, False, D, PAD, W, STRIPS, STEPS,
        )  # fmt: skip
