"""Softmax attention by cuDNN through SDPA's own operators, called directly: no autograd, no dispatch.

Where every window holds one sequence cuDNN is the fastest there is: on an H200, with heads of 256, it beats flash
attention in both directions, and takes fewer key heads as they are. It has two limits. dq differs between runs in its
last bits (dk and dv do not), so `torch.use_deterministic_algorithms(True)` turns it off. And it takes packed sequences
only in a form whose backward reads out of range in torch 2.11, so packed windows have a kernel of our own.

The operators are private to torch. Their forms are the same in torch 2.10 to 2.13; where they are missing, or cuDNN
refuses the heads, `choose` says "triton".
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .dims import AttnDims, AttnSaved

aten = torch.ops.aten
NAMES = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward")


def dense(cu_seqlens: Tensor, n: int, window: int) -> bool:
    """Whether each window is one sequence: every window starts one, so as many sequences as windows say it."""
    return (cu_seqlens.shape[0] - 1) * window == n


def choose(like: Tensor, dims: AttnDims, cu_seqlens: Tensor, window: int) -> str:
    """ "cudnn" or "triton", for rows like `like` [N, .] in windows of `window`. Goes by shapes; reads nothing."""
    serves = (
        dense(cu_seqlens, like.shape[0], window)
        and like.is_cuda
        and not torch.are_deterministic_algorithms_enabled()
        and _takes(like.dtype, dims.nq, dims.nkv, dims.hd, like.device.index)
    )
    return "cudnn" if serves else "triton"


@functools.cache
def _takes(dtype: torch.dtype, nq: int, nkv: int, hd: int, device: int) -> bool:
    """Whether cuDNN takes such heads on that GPU, as torch says."""
    if hd % 8 or not all(hasattr(aten, name) for name in NAMES):
        return False
    from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

    q, k = (
        torch.zeros(1, heads, 64, hd, dtype=dtype, device=torch.device("cuda", device), requires_grad=True)
        for heads in (nq, nkv)
    )
    return bool(can_use_cudnn_attention(SDPAParams(q, k, k, None, 0.0, True, nq != nkv), False))


def _windows(x: Tensor, window: int) -> Tensor:
    """[N, heads, hd] -> [B, heads, T, hd], a view."""
    return x.unflatten(0, (-1, window)).transpose(1, 2)


def _tokens(x: Tensor) -> Tensor:
    """[B, heads, T, hd] -> [N, heads*hd]: a view of what cuDNN lays out by token."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """(o [N, nq*hd], lse, what else the backward takes) of q [N, nq, hd] and k, v [N, nkv, hd]."""
    q, k, v = (_windows(x, window) for x in (q, k, v))
    o, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=q.shape[-1] ** -0.5
    )
    return _tokens(o), lse, (seed, offset)


def attend_bwd(
    saved: AttnSaved, do: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [N, nq*hd], dk and dv [N, nkv*hd]; do [N, nq*hd]."""
    heads, scale = q.shape[1:], q.shape[-1] ** -0.5
    do, o, q, k, v = (_windows(x, window) for x in (do.unflatten(1, heads), saved.o.unflatten(1, heads), q, k, v))
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, saved.lse, *saved.rest, None, None, None, window, window, 0.0, True, scale=scale
    )
    return _tokens(dq), _tokens(dk), _tokens(dv)
