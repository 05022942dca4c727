"""The update: global norm and finite check, then clip, Adam and 16-bit refresh over the flat trained memory.

Accept or skip is decided on the device: a step whose loss or gradient is not finite leaves every byte of masters,
moments and the 16-bit plane as it was, counts as skipped and halves the loss scale (float16).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from cortiq_kernels.model.weights import Weights
from cortiq_kernels.ops.adam import AdamState, adam_advance_, adam_norm_, adam_update_


@dataclass(frozen=True)
class AdamOptions:
    """Hyperparameters of the update; `clip` <= 0 turns clipping off."""

    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


def update(
    w: Weights,
    state: AdamState,
    loss: Tensor,
    rate: float,
    options: AdamOptions,
    *,
    from_layer: int = 0,
    factor: Callable[[int], float] | None = None,
) -> None:
    """One Adam step on what is trained in layers `from_layer ..` (and outside the layers) at `rate` * factor(layer).

    The gradient of everything else is set to 0: what an earlier step left there has no part in this step's norm.
    """
    t = w.trained
    assert t is not None, "update needs trained weights"
    spans = _spans(w, from_layer, factor)
    for start, stop in zip([0, *(s[1] for s in spans)], [*(s[0] for s in spans), t.grad.numel()], strict=True):
        t.grad[start:stop].zero_()
    adam_norm_(state, t.grad, loss)
    for start, stop, plane_start, scale in spans:
        plane = None
        if plane_start is not None and t.plane is not None:
            plane = t.plane[plane_start : plane_start + stop - start]
        adam_update_(
            state,
            t.master[start:stop],
            t.grad[start:stop],
            t.m[start:stop],
            t.v[start:stop],
            plane=plane,
            rate=rate,
            factor=scale,
            clip=options.clip,
            beta1=options.beta1,
            beta2=options.beta2,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
    adam_advance_(state)


def _spans(
    w: Weights, from_layer: int, factor: Callable[[int], float] | None
) -> list[tuple[int, int, int | None, float]]:
    """Ranges of the trained memory with one rate each, neighbours merged: one pass where all layers share a rate."""
    assert w.trained is not None
    spans: list[tuple[int, int, int | None, float]] = []
    for r in w.ranges(from_layer):
        scale = factor(r.layer) if factor and r.layer >= 0 else 1.0
        if spans:
            start, stop, plane, last = spans[-1]
            both_plain = plane is None and r.plane_start is None
            follows = plane is not None and r.plane_start is not None and plane + stop - start == r.plane_start
            if stop == r.start and last == scale and (both_plain or follows):
                spans[-1] = (start, r.stop, plane, last)
                continue
        spans.append((r.start, r.stop, r.plane_start, scale))
    return spans
