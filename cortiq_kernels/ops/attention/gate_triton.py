"""The output gate on Triton, where the attention kernel does not have it as its epilogue, and its backward.

    out = o s,  s = sigmoid(gate)       do = dout s,  dgate = dout o s (1 - s),  delta = rowsum(do o)

A program takes ROWS rows of one token and head each, in their order in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..jit import kernel


@triton.jit
def _rows(n, NQ: tl.constexpr, ROWS: tl.constexpr):
    """(first token as int64, tokens after it, heads, mask) of the program's rows."""
    base = tl.program_id(0).to(tl.int64) * ROWS
    tok = base // NQ
    r = (base % NQ).to(tl.int32) + tl.arange(0, ROWS)
    return tok, r // NQ, r % NQ, r // NQ < n - tok


@triton.jit
def _at(ptr, tok, t, h, stride, head, PAD: tl.constexpr):
    return ptr + tok * stride + ((t * stride + h * head)[:, None] + tl.arange(0, PAD)[None, :])


@kernel(do_not_specialize=["n"])
def attn_gate_kernel(
    o_ptr,  # [N, NQ, HD], row stride o_stride
    gate_ptr,  # [N, NQ, HD], heads gate_head apart
    out_ptr,  # [N, NQ, HD] out
    n,
    o_stride,
    gate_stride,
    gate_head,
    out_stride,
    NQ: tl.constexpr,
    HD: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program ROWS rows."""
    tok, t, h, inside = _rows(n, NQ, ROWS)
    mask = inside[:, None] & (tl.arange(0, PAD) < HD)[None, :]
    o = tl.load(_at(o_ptr, tok, t, h, o_stride, HD, PAD), mask=mask, other=0).to(tl.float32)
    gate = tl.load(_at(gate_ptr, tok, t, h, gate_stride, gate_head, PAD), mask=mask, other=0).to(tl.float32)
    out = o * tl.sigmoid(gate)
    tl.store(_at(out_ptr, tok, t, h, out_stride, HD, PAD), out.to(out_ptr.dtype.element_ty), mask=mask)


@kernel(do_not_specialize=["n"])
def attn_gate_bwd_kernel(
    dout_ptr,  # [N, NQ, HD], row stride dout_stride
    o_ptr,  # [N, NQ, HD], row stride o_stride
    gate_ptr,  # [N, NQ, HD], heads gate_head apart; GATE only
    do_ptr,  # [N, NQ, HD] contiguous, out; GATE only
    dgate_ptr,  # [N, NQ, HD] out, heads gate_head apart; GATE only
    delta_ptr,  # [NQ, N] f32 out, DELTA only
    n,
    dout_stride,
    o_stride,
    gate_stride,
    gate_head,
    dgate_stride,
    NQ: tl.constexpr,
    HD: tl.constexpr,
    PAD: tl.constexpr,
    GATE: tl.constexpr,
    DELTA: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program ROWS rows."""
    tok, t, h, inside = _rows(n, NQ, ROWS)
    mask = inside[:, None] & (tl.arange(0, PAD) < HD)[None, :]
    do = tl.load(_at(dout_ptr, tok, t, h, dout_stride, HD, PAD), mask=mask, other=0).to(tl.float32)
    o = tl.load(_at(o_ptr, tok, t, h, o_stride, HD, PAD), mask=mask, other=0).to(tl.float32)
    if GATE:
        gate = tl.load(_at(gate_ptr, tok, t, h, gate_stride, gate_head, PAD), mask=mask, other=0).to(tl.float32)
        s = tl.sigmoid(gate)
        dgate = do * o * s * (1 - s)
        tl.store(
            _at(dgate_ptr, tok, t, h, dgate_stride, gate_head, PAD), dgate.to(dgate_ptr.dtype.element_ty), mask=mask
        )
        rounded = (do * s).to(do_ptr.dtype.element_ty)
        tl.store(_at(do_ptr, tok, t, h, NQ * HD, HD, PAD), rounded, mask=mask)
        do = rounded.to(tl.float32)
    if DELTA:
        at = delta_ptr + tok + (h.to(tl.int64) * n + t)
        tl.store(at, tl.sum(do * o, 1), mask=inside)
