"""What a step reads of its batch, as memory that stays: a recorded step knows addresses, not tensors.

    micro-batch (host or device)  --copy-->  StaticInputs.load  -->  the same micro-batch at fixed addresses

Host numbers that a step uses become 0-d tensors: a batch's `const`, and the trainer's own sum of weights and rate. The
lengths of the records are device data anyway (`cu_seqlens`), so every packing of one capacity is one shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.data.batches import Batch
from cortiq_kernels.step.loss import Targets


class Micro(NamedTuple):
    """One micro-batch on the device: a batch, its targets, and (frozen prefix) the residual stream that enters the
    first layer."""

    batch: Batch
    targets: Targets
    x: Tensor | None = None


_BATCH = ("tokens", "next_ids", "row_index", "row_weight", "cu_seqlens")


def shape_of(micro: Micro) -> Hashable:
    """All of a micro-batch that decides what is queued for it."""
    b, t = micro.batch, micro.targets
    tensors = [getattr(b, name) for name in _BATCH] + [t.ids, t.probs]
    prefix = None if micro.x is None else tuple(micro.x.shape)
    return (*(tuple(x.shape) for x in tensors), *(x.dtype for x in tensors), prefix, b.max_seqlen)


class StaticInputs:
    """Static copies of micro-batches, one for every shape; the large prefix stream is shared."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._by_shape: dict[Hashable, Micro] = {}
        self._streams: dict[Hashable, Tensor] = {}

    def load(self, micro: Micro) -> Micro:
        """The micro-batch at fixed addresses, valid until the next one of its shape is loaded. Host numbers of the
        result's batch are those of the first one of its shape."""
        key = shape_of(micro)
        static = self._by_shape.get(key)
        if static is None:
            static = self._by_shape[key] = self._allocate(micro)
        for name in _BATCH:
            getattr(static.batch, name).copy_(getattr(micro.batch, name), non_blocking=True)
        static.targets.ids.copy_(micro.targets.ids, non_blocking=True)
        static.targets.probs.copy_(micro.targets.probs, non_blocking=True)
        assert isinstance(static.targets.const, Tensor)
        if isinstance(micro.targets.const, Tensor):
            static.targets.const.copy_(micro.targets.const)
        else:
            static.targets.const.fill_(micro.targets.const)
        if static.x is not None and micro.x is not None:
            static.x.copy_(micro.x, non_blocking=True)
        return static

    def stream(self, x: Tensor) -> Tensor:
        """Memory for a residual stream like `x`."""
        key = (tuple(x.shape), x.dtype)
        if key not in self._streams:
            self._streams[key] = torch.empty(x.shape, dtype=x.dtype, device=self.device)
        return self._streams[key]

    def _allocate(self, micro: Micro) -> Micro:
        def like(x: Tensor) -> Tensor:
            return torch.empty(x.shape, dtype=x.dtype, device=self.device)

        tensors: dict[str, Any] = {name: like(getattr(micro.batch, name)) for name in _BATCH}
        batch = dataclasses.replace(micro.batch, row_record=None, **tensors)
        const = torch.zeros((), dtype=torch.float64, device=self.device)
        targets = Targets(like(micro.targets.ids), like(micro.targets.probs), const)
        return Micro(batch, targets, None if micro.x is None else self.stream(micro.x))
