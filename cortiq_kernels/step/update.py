"""The update: global norm and finite check, then clip, Adam and 16-bit refresh over the flat trained memory.

Accept or skip is decided on the device: a step whose loss or gradient is not finite leaves every byte of masters,
moments and the 16-bit plane as it was, counts as skipped and halves the loss scale (float16).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from cortiq_kernels.model.weights import Weights
from cortiq_kernels.ops.adam import AdamRange, AdamRanges, AdamState, adam_step_


@dataclass(frozen=True)
class AdamOptions:
    """Hyperparameters of the update; `clip` <= 0 turns clipping off."""

    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


def update(
    w: Weights, state: AdamState, loss: Tensor, rate: float | Tensor, options: AdamOptions, ranges: AdamRanges
) -> None:
    """One Adam step on `ranges` (`update_ranges`) at `rate`, a number or a 0-d tensor on the device, times their
    factors. What an earlier step left in the gradient outside of them has no part in this step's norm.
    """
    t = w.trained
    assert t is not None, "update needs trained weights"
    adam_step_(
        state,
        t.master,
        t.grad,
        t.m,
        t.v,
        ranges=ranges,
        plane=t.plane,
        loss=loss,
        rate=rate,
        clip=options.clip,
        beta1=options.beta1,
        beta2=options.beta2,
        eps=options.eps,
        weight_decay=options.weight_decay,
    )


def update_ranges(w: Weights, from_layer: int, factor: Callable[[int], float] | None) -> tuple[AdamRange, ...]:
    """What is trained in layers `from_layer ..` and outside the layers, each range with factor(layer): neighbours of
    one factor are merged, so that where all layers share a rate there are two, with and without a 16-bit plane."""
    ranges: list[AdamRange] = []
    for r in w.ranges(from_layer):
        scale = factor(r.layer) if factor and r.layer >= 0 else 1.0
        if ranges:
            start, stop, plane, last = ranges[-1]
            both_plain = plane is None and r.plane_start is None
            follows = plane is not None and r.plane_start is not None and plane + stop - start == r.plane_start
            if stop == r.start and last == scale and (both_plain or follows):
                ranges[-1] = AdamRange(start, r.stop, plane, last)
                continue
        ranges.append(AdamRange(r.start, r.stop, r.plane_start, scale))
    return tuple(ranges)
