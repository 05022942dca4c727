"""The frozen prefix: layers below `train_from` run once per batch, and what enters the first trained layer is kept
on the host.

The stream is kept in its own dtype, so training on it is bit for bit training without it. It must fit `budget` bytes.
A float32 stream of which only half fits is kept in float16 when every value of it is finite and at most 65504 in
magnitude, else in bfloat16. Where even that does not fit nothing is kept, and the whole stack runs every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cortiq_kernels.data.batches import Batch
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.report.results import size
from cortiq_kernels.step.buffers import Buffers
from cortiq_kernels.step.forward import Sequences, embed, layers_forward, rope_for

_F16_MAX = 65504.0


@dataclass(frozen=True)
class PrefixPlan:
    """`dtype` to keep the stream in (None: do not), its `nbytes`, and a sentence that says why."""

    dtype: torch.dtype | None
    nbytes: int
    reason: str


def plan_prefix(n_batches: int, n: int, hidden: int, dtype: torch.dtype, budget: int) -> PrefixPlan:
    """How to keep the residual streams [n, hidden] of `n_batches` batches in at most `budget` host bytes."""
    full = n_batches * n * hidden * dtype.itemsize
    sizes = f"{size(full)} needed, {size(budget)} allowed"
    if full <= budget:
        return PrefixPlan(dtype, full, f"frozen layers run once per batch, kept in {_name(dtype)}: {sizes}")
    if dtype == torch.float32 and full // 2 <= budget:
        return PrefixPlan(
            torch.float16, full // 2, f"frozen layers run once per batch, kept in 16 bit, rounded: {sizes}"
        )
    return PrefixPlan(None, full, f"frozen layers run in every step, their output does not fit in memory: {sizes}")


@dataclass
class PrefixCache:
    """`cache[i]`: the residual stream [n, H] of batch i, on the host, in `dtype`."""

    dtype: torch.dtype
    pin: bool = False
    streams: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.streams)

    def __getitem__(self, i: int) -> Tensor:
        return self.streams[i]

    def append(self, x: Tensor) -> None:
        """Keep one more stream. On the first one that float16 cannot hold, everything becomes bfloat16."""
        if self.dtype == torch.float16 and x.dtype == torch.float32 and not bool((x.abs() <= _F16_MAX).all()):
            self.dtype = torch.bfloat16
            self.streams = [self._host(s) for s in self.streams]
        self.streams.append(self._host(x))

    def _host(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=self.dtype, pin_memory=self.pin)
        return out.copy_(x)


def run_prefix(
    w: Weights,
    batches: Sequence[Batch],
    stop: int,
    cache: PrefixCache,
    *,
    done: Callable[[int], None] = lambda n: None,
) -> None:
    """Append to `cache` the residual stream that enters layer `stop` (> 0), for every batch; `done(n)` after batch
    n.
    """
    first = batches[0]
    n, t = first.tokens.shape[0], first.max_seqlen
    buf = Buffers(w.geometry, n, w.dtype, w.device)
    rope = rope_for(w, t)
    for i, host in enumerate(batches):
        batch = host.to(w.device)
        seqs = Sequences.build(w.geometry, batch.cu_seqlens, t, n, rope)
        x, r = layers_forward(w, buf, embed(w, buf, batch.tokens), seqs, 0, stop)
        # The same sum, rounded once, as the next layer's add_rms_norm forms.
        cache.append(x if r is None else x + r)
        done(i + 1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
