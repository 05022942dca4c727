"""Hard masks made real speed: a model under 0/1 gates on its MLP neurons, cut to the neurons that are open.

A neuron whose gate is 0 has no output and takes no gradient: rows j and F + j of gate_up and column j of down may as
well not be there. `compact` gathers what is left once, into `Weights` of narrower layers (`geometry.intermediate`), on
which every pass runs its matrix products at the kept width; `Compact.write_back` puts what was trained back in place.

    c = compact(w, masks, train="mlp", train_from=20)     # masks: layer -> [F] of 0 and 1
    trainer = Trainer(c.weights, n, window)               # forward and backward take masks=c.masks, where there are any
    c.write_back(w)                                       # or: write_model(..., replace=c.weights.export(...))

Loss and gradients are those of the dense model under the masks, up to the order of sums.

GEMM kernels read rows of 16 bytes and tiles of 64 columns, so a width is rounded up to a multiple of `align` by
carrying closed neurons along, their gates still 0 (`Compact.masks`). In a looped stack a layer carries what any of its
visits opens, and each visit has its own mask. A model that is exported from here must carry no closed neuron: give
masks whose widths are rounded already, and `align=1`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from cortiq_kernels.model import names
from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.weights import Weights


@dataclasses.dataclass(frozen=True)
class Compact:
    """What `compact` made.

    `weights`: narrower by `geometry.intermediate`. `keep`: neurons that each physical layer carries, [k] int64,
    ascending, on the weights' device. `masks`: (virtual) layer -> gates [k] in the accumulation dtype, of those visits
    that close a neuron that is carried; for `masks=` of forward, backward and Evaluator.
    """

    weights: Weights
    keep: list[Tensor]
    masks: dict[int, Tensor]

    def write_back(self, into: Weights) -> None:
        """Put what trains here into `into`, the dense model: the neurons that are carried, in their places.

        Closed neurons of `into` keep their weights. Where `into` trains a tensor too, its gradient and Adam moments are
        written as well, exactly 0 in the rows and columns of neurons that are not carried: `into` is then what a dense
        run under the masks would have left. Waits for the device. ValueError when nothing trains here, or `into` is
        another model or lacks a tensor that trains here.
        """
        trained, dense = self.weights.trained, into.geometry
        if trained is None:
            raise ValueError("write_back: got weights that do not train; expected train='layers', 'mlp' or 'all'.")
        if dense.with_widths(self.weights.geometry.intermediate) != self.weights.geometry or any(
            len(k) and int(k[-1]) >= f for k, f in zip(self.keep, dense.intermediate, strict=True)
        ):
            raise ValueError("write_back: got another model; expected the one that was compacted. Pass that one.")
        if lacking := [name for name in trained.names if name not in into]:
            raise ValueError(f"write_back: got weights without {lacking[0]}; expected all layers. Hold those, too.")
        for name in trained.names:
            place = _neurons(name, self.keep, dense)
            into.assign(name, _scattered(_held(into, name).clone(), trained.master_view(name), place), name=name)
            if into.trained is not None and into.trains(name):
                for mine, theirs in zip(_states(self.weights, name), _states(into, name), strict=True):
                    _scattered(theirs.zero_(), mine, place)


def carried(g: Geometry, masks: Mapping[int, Tensor], align: int = 64) -> list[Tensor]:
    """Neurons that each physical layer carries under hard masks: [k] int64 on the host, ascending.

    `masks`: (virtual) layer -> [F] of bool or 0 and 1, of any dtype, on any device; a layer that is absent is open.
    Carried are those that any visit of the layer opens, then closed ones, the lowest first, until k is a multiple of
    `align` or all F. The widths are the lengths. Waits for the device. ValueError: a layer that does not exist, a mask
    of another length or with values besides 0 and 1, an align below 1.
    """
    if align < 1:
        raise ValueError(f"align: got {align}; expected at least 1. 1 rounds no width.")
    gates = _checked(g, masks)
    out = []
    for layer, f in enumerate(g.intermediate):
        visits = [gates.get(i) for i in range(layer, g.n_virtual, g.n_layers)]
        union = torch.zeros(f, dtype=torch.bool)
        for gate in visits:
            union |= torch.ones_like(union) if gate is None else gate
        count = int(union.sum())
        more = min(f, -(-max(count, 1) // align) * align) - count
        union[torch.nonzero(~union).flatten()[:more]] = True
        out.append(torch.nonzero(union).flatten())
    return out


def compact(
    w: Weights,
    masks: Mapping[int, Tensor],
    *,
    align: int = 64,
    train: str | None = None,
    train_from: int = 0,
) -> Compact:
    """`w` under hard masks, cut to the neurons that `carried(w.geometry, masks, align)` lists.

    A copy: dtype, device and held layers are those of `w`; `train` and `train_from` say what trains in it
    (`plan_layout`). Masters are taken exactly where `w` trains, else from the values that `w` holds; Adam moments start
    at 0. Memory: `plan_layout(w.geometry.with_widths(widths), ...).nbytes`. Waits for the device: once before a phase,
    never in a step. Errors as of `carried` and `plan_layout`.
    """
    g = w.geometry
    keep = carried(g, masks, align)
    made = Weights(
        g.with_widths([len(k) for k in keep]), dtype=w.dtype, device=w.device, train=train, train_from=train_from,
        first_layer=w.first_layer,
    )  # fmt: skip
    there = [k.to(w.device) for k in keep]
    for name in made.names:
        value, place = _held(w, name), _neurons(name, there, g)
        made.assign(name, value if place is None else value.index_select(*place), name=name)
    still: dict[int, Tensor] = {}
    for layer, gate in _checked(g, masks).items():
        part = gate[keep[g.physical(layer)]]
        if not bool(part.all()):
            still[layer] = part.to(device=w.device, dtype=w.acc_dtype)
    return Compact(made, there, still)


def _checked(g: Geometry, masks: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The masks as booleans on the host."""
    out = {}
    for layer, mask in sorted(masks.items()):
        if not 0 <= layer < g.n_virtual:
            raise ValueError(f"masks: got layer {layer}; expected 0 to {g.n_virtual - 1}. Leave it out.")
        f, host = g.intermediate[g.physical(layer)], mask.detach().cpu()
        if tuple(host.shape) != (f,):
            raise ValueError(f"masks: layer {layer}: got {tuple(host.shape)}; expected [{f}], a gate of every neuron.")
        gate = host != 0
        if not bool((host == gate.to(host.dtype)).all()):
            raise ValueError(f"masks: layer {layer}: got gates besides 0 and 1; expected hard ones. Compare with tau.")
        out[layer] = gate
    return out


def _neurons(name: str, keep: list[Tensor], dense: Geometry) -> tuple[int, Tensor] | None:
    """(dimension, index) of the carried neurons in a dense tensor; None for a tensor that has none."""
    kind, layer = name.rsplit(".", 1)[-1], names.layer_of(name)
    if kind == "gate_up":
        return 0, torch.cat([keep[layer], keep[layer] + dense.intermediate[layer]])
    return (1, keep[layer]) if kind == "down" else None


def _held(w: Weights, name: str) -> Tensor:
    """The exact values of a tensor: its master where it trains, else the view."""
    return w.trained.master_view(name) if w.trained is not None and w.trains(name) else w[name]


def _states(w: Weights, name: str) -> tuple[Tensor, ...]:
    """Gradient and Adam moments of a tensor that trains, as views."""
    t = w.trained
    assert t is not None
    span = t.spans[name]
    return tuple(flat[span.start : span.stop].view(span.shape) for flat in (t.grad, t.m, t.v))


def _scattered(dense: Tensor, value: Tensor, place: tuple[int, Tensor] | None) -> Tensor:
    """`dense` with `value` written where the carried neurons are; everywhere without a place."""
    value = value.to(dense.dtype)
    return dense.copy_(value) if place is None else dense.index_copy_(*place, value)
