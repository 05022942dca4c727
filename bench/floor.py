"""What this device does at best, measured in the run whose figures are held against it.

Machines differ, are shared and change their clocks, so a share of the floor is only meant within one run.
Two ceilings: copy bandwidth (bytes read plus bytes written) of a tensor larger than any cache, and the rate of one
large matrix product in the working dtype. A copy is the faster of torch's copy_, on a GPU the driver's and not a
kernel, and of a kernel that reads and writes as much. What fits a cache can beat this floor; the small shapes that a
CPU runs do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.registry import Work
from bench.timing import Thunk, measure

COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
GEMM_SIDE = {"cuda": 8192, "cpu": 768}


@dataclass(frozen=True)
class Floor:
    """Ceilings of one device and dtype."""

    copy_gbs: float  # GB/s, read + written
    gemm_tflops: float
    dtype: str

    def ms(self, work: Work) -> float:
        """Least time for `work`: memory or arithmetic, whichever takes longer."""
        return max(work.nbytes / self.copy_gbs / 1e6, work.flops / self.gemm_tflops / 1e9)

    def rate(self, work: Work, ms: float) -> str:
        """Achieved TFLOP/s where the floor is arithmetic, GB/s where it is memory."""
        if work.flops / self.gemm_tflops / 1e9 > work.nbytes / self.copy_gbs / 1e6:
            return f"{work.flops / ms / 1e9:.3g} TFLOP/s"
        return f"{work.nbytes / ms / 1e6:.4g} GB/s"


def measure_floor(device: torch.device, dtype: torch.dtype) -> Floor:
    """Measure both ceilings: a second or two."""
    return Floor(_copy_gbs(device), _gemm_tflops(device, dtype), str(dtype).removeprefix("torch."))


def _copy_gbs(device: torch.device) -> float:
    x = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    y = torch.empty_like(x)
    ways: list[Thunk] = [lambda: y.copy_(x), lambda: torch.neg(x, out=y)]
    return 2 * x.nbytes / min(measure([way], device, budget_ms=300).median for way in ways) / 1e6


def _gemm_tflops(device: torch.device, dtype: torch.dtype) -> float:
    side = GEMM_SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / measure([lambda: torch.mm(a, b, out=out)], device, budget_ms=300).median / 1e9
