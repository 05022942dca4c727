"""Causal depthwise convolution over packed sequences, and its gradients (the SiLU after it belongs to the caller).

    y_t = sum_{s=0}^{W-1} w[:, W-1-s] o x_{t-s} [s <= p_t]              p_t = position of t in its sequence
    dx_t = sum_s w[:, W-1-s] o dy_{t+s} [s <= p_{t+s}]
    dw[:, W-1-s] = sum_{b,t} x_{t-s} o dy_t [s <= p_t]

| tensor | shape | dtype |
|---|---|---|
| x, y, dx, dy | [B, T, C] | acc dtype |
| w, dw | [C, W], last tap = current token, no bias | acc dtype |
| positions | [B, T] | int64 |

Tokens of another sequence are selected away, not multiplied by 0: what they hold (NaN too) never gets in.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv_fwd(x: Tensor, weight: Tensor, positions: Tensor, *, out: Tensor) -> Tensor:
    """y = conv(x), written to `out` [B, T, C] (`=`, every element); x may be strided."""
    length, taps = x.shape[1], weight.shape[1]
    torch.mul(x, weight[:, -1], out=out)
    for s in range(1, min(taps, length)):
        seen = (positions[:, s:] >= s).unsqueeze(-1)
        out[:, s:].addcmul_(torch.where(seen, x[:, : length - s], 0), weight[:, -1 - s])
    return out


def causal_conv_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, positions: Tensor, *, dx: Tensor, dweight: Tensor | None
) -> None:
    """dx [B, T, C] `=` (acc dtype, no overlap with dy), dweight [C, W] `=` (None skips it)."""
    length, taps = x.shape[1], weight.shape[1]
    torch.mul(dy, weight[:, -1], out=dx)
    if dweight is not None:
        dweight.zero_()
        dweight[:, -1] = (x * dy).sum((0, 1))
    for s in range(1, min(taps, length)):
        seen = (positions[:, s:] >= s).unsqueeze(-1)
        dy_s = torch.where(seen, dy[:, s:], 0)
        dx[:, : length - s].addcmul_(dy_s, weight[:, -1 - s])
        if dweight is not None:
            # dy_s is 0 where the tap is cut, but x there may be anything
            dweight[:, -1 - s] = dy_s.mul_(torch.where(seen, x[:, : length - s], 0)).sum((0, 1))
