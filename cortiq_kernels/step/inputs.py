"""What a step reads of its batch: on its way to the device, and as memory that stays, for a recorded step knows
addresses, not tensors.

    host  --Ahead: pinned memory, a stream of its own-->  device  --StaticInputs-->  device, at fixed addresses

Host numbers that a step uses become 0-d tensors: a batch's `const`, and the trainer's own sum of weights and rate. The
lengths of the records are device data anyway (`cu_seqlens`), so every packing of one capacity is one shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.backend import CopyLane
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
        self._kept: dict[Hashable, Tensor] = {}

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
        return static if micro.x is None else static._replace(x=self.keep("x", micro.x))

    def keep(self, name: Hashable, t: Tensor) -> Tensor:
        """A copy of `t` in the memory that is kept for tensors of this name, shape and dtype."""
        key = (name, tuple(t.shape), t.dtype)
        if key not in self._kept:
            self._kept[key] = torch.empty(t.shape, dtype=t.dtype, device=self.device)
        return self._kept[key].copy_(t, non_blocking=True)

    def _allocate(self, micro: Micro) -> Micro:
        def like(x: Tensor) -> Tensor:
            return torch.empty(x.shape, dtype=x.dtype, device=self.device)

        tensors: dict[str, Any] = {name: like(getattr(micro.batch, name)) for name in _BATCH}
        batch = dataclasses.replace(micro.batch, row_record=None, **tensors)
        const = torch.zeros((), dtype=torch.float64, device=self.device)
        targets = Targets(like(micro.targets.ids), like(micro.targets.probs), const)
        return Micro(batch, targets)


class _Slot:
    """Pinned and device memory of one micro-batch. It grows to the largest one it has held."""

    def __init__(self, device: torch.device, pin: bool) -> None:
        self.device, self.pin = device, pin
        self.host: dict[str, Tensor] = {}
        self.there: dict[str, Tensor] = {}
        self.used_until: Any = None  # fence: what reads the device memory was queued before it
        self.copied: Any = None  # fence: the copies to the device

    def room(self, tensors: dict[str, Tensor]) -> bool:
        """See to it that `tensors` fit; whether memory is new."""
        new = False
        for name, t in tensors.items():
            old = self.there.get(name)
            if old is None or old.dtype != t.dtype or old.numel() < t.numel():
                self.there[name] = torch.empty(t.numel(), dtype=t.dtype, device=self.device)
                self.host[name] = torch.empty(t.numel(), dtype=t.dtype, pin_memory=self.pin)
                new = True
        return new

    def copy(self, name: str, t: Tensor) -> Tensor:
        """`t` in the device memory, by way of the pinned one unless it is pinned itself."""
        there = self.there[name][: t.numel()].view(t.shape)
        if self.pin and not t.is_pinned():
            t = self.host[name][: t.numel()].view(t.shape).copy_(t)
        return there.copy_(t, non_blocking=True)


class Ahead:
    """`ahead[i]`: micro-batch i on the device; those that were asked for in time (`prepare`) are there already.

    Copies go through pinned memory on a stream of their own while the device computes; two sets of slots take turns,
    and a slot is not written before what was queued when it was read is done. `make(i)` builds micro-batch i on the
    host. `lane` None (a CPU): nothing is prepared, and `make` is called when it is asked for.
    """

    def __init__(self, device: torch.device, make: Callable[[int], Micro], lane: CopyLane | None) -> None:
        self._device, self._make, self._lane = device, make, lane
        self._ready: dict[int, tuple[_Slot, Micro]] = {}
        self._in_use: list[_Slot] = []  # by work that is queued
        self._free: list[_Slot] = []

    def prepare(self, indices: Iterable[int]) -> None:
        """Start copying these, once the work on those taken so far is queued."""
        if self._lane is None:
            return
        reusable, self._free = self._free, []
        fence = self._lane.fence()
        for slot in self._in_use:
            slot.used_until = fence  # the work on it is still running: the next call may take it
        self._free, self._in_use = self._in_use, []
        wanted = [i for i in indices if i not in self._ready]
        for i in wanted:
            slot = reusable.pop() if reusable else _Slot(self._device, self._device.type == "cuda")
            self._ready[i] = slot, self._send(slot, self._make(i))
        self._free += reusable

    def __getitem__(self, i: int) -> Micro:
        if self._lane is None or i not in self._ready:
            micro = self._make(i)
            x = None if micro.x is None else micro.x.to(self._device, non_blocking=True)
            return Micro(micro.batch.to(self._device, non_blocking=True), micro.targets.to(self._device), x)
        slot, micro = self._ready.pop(i)
        self._lane.join(slot.copied)
        self._in_use.append(slot)
        return micro

    def _send(self, slot: _Slot, micro: Micro) -> Micro:
        assert self._lane is not None
        b, t = micro.batch, micro.targets
        tensors = {name: getattr(b, name) for name in _BATCH} | {"ids": t.ids, "probs": t.probs}
        if micro.x is not None:
            tensors["x"] = micro.x
        # New memory may have been another tensor's a moment ago: the copy waits for all that is queued.
        after = self._lane.fence() if slot.room(tensors) else slot.used_until
        if slot.copied is not None:
            slot.copied.synchronize()  # long since
        with self._lane.copies(after):
            there = {name: slot.copy(name, x) for name, x in tensors.items()}
            slot.copied = self._lane.done()
        moved: dict[str, Any] = {name: there[name] for name in _BATCH}
        batch = dataclasses.replace(b, row_record=None, **moved)
        return Micro(batch, Targets(there["ids"], there["probs"], t.const), there.get("x"))
