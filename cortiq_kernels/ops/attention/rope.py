"""Rotary positions: tables of cos and sin, and the half-split turn."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.ops import checks


class Llama3Rope(NamedTuple):
    """How Llama 3.1 and later stretch RoPE: turns longer than original / low are `factor` times longer, turns shorter
    than original / high as they were, those in between blended.
    """

    factor: float
    low: float
    high: float
    original: float


def rope_table(
    n: int, rot: int, theta: float, dtype: torch.dtype, device: torch.device | str, llama3: Llama3Rope | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of position·f_i, f_i = theta^(−2i/rot). -> two [n, rot/2] in the accumulation dtype of `dtype`.

    `llama3`: f_i becomes (1 − s)·f_i/factor + s·f_i, s = (original·f_i/2π − low)/(high − low) held within 0 and 1.
    Below float64 the angles are formed in float32, because published checkpoints were trained and are served that way.
    """
    if n < 0 or rot < 0 or rot % 2:
        checks.fail("rope_table", "n and rot", "non-negative, rot even", (n, rot), "rot counts both halves")
    acc = checks.acc_dtype(dtype)
    inv_freq = 1.0 / theta ** (torch.arange(0, rot, 2, dtype=acc, device=device) / max(rot, 1))
    if llama3 is not None:
        share = (llama3.original * inv_freq / (2 * torch.pi) - llama3.low) / (llama3.high - llama3.low)
        share.clamp_(0, 1)
        inv_freq = (1 - share) * inv_freq / llama3.factor + share * inv_freq
    angle = torch.outer(torch.arange(n, dtype=acc, device=device), inv_freq)
    return angle.cos(), angle.sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn dimension i and i + rot/2 by the angle of i; dimensions from rot on pass. x [..., hd], cos [..., rot/2]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
