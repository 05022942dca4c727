"""Causal depthwise convolution over packed sequences, and its gradients (the SiLU after it belongs to the caller).

    y_t = sum_{s=0}^{W-1} w[:, W-1-s] o x_{t-s} [s <= p_t]              p_t = position of t in its sequence
    dx_t = sum_s w[:, W-1-s] o dy_{t+s} [s <= p_{t+s}]
    dw[:, W-1-s] = sum_{b,t} x_{t-s} o dy_t [s <= p_t]

| tensor | shape | dtype |
|---|---|---|
| x, y, dx, dy | [B, T, C] | acc dtype |
| w, dw | [C, W], last tap = current token, no bias | acc dtype |
| positions | [B, T] | int64 |
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv_fwd(x: Tensor, weight: Tensor, positions: Tensor, *, out: Tensor) -> Tensor:
    """y = conv(x), written to `out` [B, T, C] (`=`, every element); x may be strided."""
    length, taps = x.shape[1], weight.shape[1]
    tap = weight.mT.contiguous()  # [W, C]; elementwise products with a strided row are several times slower on a CPU
    torch.mul(x, tap[-1], out=out)
    scratch = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for s in range(1, min(taps, length)):
        x_s = torch.mul(x[:, : length - s], _seen(positions, s, x.dtype), out=_head(scratch, s))
        out[:, s:].addcmul_(x_s, tap[-1 - s])
    return out


def causal_conv_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, positions: Tensor, *, dx: Tensor, dweight: Tensor | None
) -> None:
    """dx [B, T, C] `=` (acc dtype, no overlap with dy), dweight [C, W] `=` (None skips it)."""
    length, taps = x.shape[1], weight.shape[1]
    tap = weight.mT.contiguous()
    torch.mul(dy, tap[-1], out=dx)
    scratch = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    if dweight is not None:
        dweight.zero_()
        dweight[:, -1] = torch.mul(x, dy, out=scratch).sum((0, 1))
    for s in range(1, min(taps, length)):
        dy_s = torch.mul(dy[:, s:], _seen(positions, s, x.dtype), out=_head(scratch, s))
        dx[:, : length - s].addcmul_(dy_s, tap[-1 - s])
        if dweight is not None:
            dweight[:, -1 - s] = dy_s.mul_(x[:, : length - s]).sum((0, 1))


def _seen(positions: Tensor, s: int, dtype: torch.dtype) -> Tensor:
    """[B, T-s, 1]: 1 where the token s back is of the same sequence, else 0."""
    return (positions[:, s:] >= s).to(dtype).unsqueeze(-1)


def _head(scratch: Tensor, s: int) -> Tensor:
    """Contiguous [B, T-s, C] in the memory of scratch [B, T, C].

    One buffer serves all taps (a fresh page costs more than the product written to it), and a sum over the leading
    dimensions is several times faster when they are contiguous.
    """
    batch, length, width = scratch.shape
    return scratch.view(-1)[: batch * (length - s) * width].view(batch, length - s, width)
