"""A model whose MLPs are cut to the neurons that stay: its weights, its tensors, and its masks.

Neuron j of a layer is row j of gate and of up, and column j of down. `keep` has the neurons that stay of each
(physical) layer, ascending, on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cortiq_kernels.model import names
from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.hf import ModelDir
from cortiq_kernels.model.weights import Weights


def mlp_names(g: Geometry, layer: int) -> tuple[str, str, str]:
    """Published names of a layer's gate, up and down projections."""
    gate, up, down = (f"{g.prefix}layers.{layer}.mlp.{p}_proj.weight" for p in ("gate", "up", "down"))
    return gate, up, down


def load_narrowed(
    model: ModelDir, keep: Sequence[Tensor], *, dtype: torch.dtype, device: torch.device, train: str | None = None,
    train_from: int = 0,
) -> Weights:  # fmt: skip
    """The weights of a directory with narrower MLPs, as `Weights.load` would read them from a directory like that:
    masters exact, never a second copy of the model.
    """
    g = model.geometry.with_widths([len(k) for k in keep])
    w = Weights(g, dtype=dtype, device=device, train=train, train_from=train_from)
    for slot in names.slots(g):
        value, kind = model.read(slot.published), slot.internal.rsplit(".", 1)[-1]
        if kind in ("gate_up", "down"):
            value = value.index_select(0 if kind == "gate_up" else 1, keep[names.layer_of(slot.internal)])
        where = f"{model.path / model.tensors[slot.published].file}: {slot.published}"
        w.assign(slot.internal, value, rows=slot.rows, name=where)
    return w


def narrowed_tensors(model: ModelDir, keep: Sequence[Tensor], trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published name -> tensor of what differs from the directory: the MLPs of layers that lose neurons, and `trained`
    (which are narrow already).
    """
    g, out = model.geometry, dict(trained)
    for i, k in enumerate(keep):
        if len(k) == g.intermediate[i]:
            continue
        for name, axis in zip(mlp_names(g, i), (0, 0, 1), strict=True):
            if name not in trained:
                out[name] = model.read(name).index_select(axis, k)
    return out


def overlay_tensors(model: ModelDir, keep: Sequence[Tensor], trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same at the directory's own width and in its dtypes: down of every layer, with the columns of neurons that go
    at 0 (so that they do nothing), and gate and up of layers in `trained`, where those neurons are as they were.
    """
    g, out = model.geometry, {}
    for i, k in enumerate(keep):
        gate, up, down = mlp_names(g, i)
        for name in (gate, up):
            if name in trained:
                whole = model.read(name)
                out[name] = whole.index_copy_(0, k, trained[name].cpu().to(whole.dtype))
        whole = model.read(down)
        kept = trained[down].cpu().to(whole.dtype) if down in trained else whole.index_select(1, k)
        out[down] = torch.zeros_like(whole).index_copy_(1, k, kept)
    return out


def visit_masks(kept: Sequence[Tensor], keep: Sequence[Tensor], dtype: torch.dtype) -> dict[int, Tensor]:
    """Gates [k] of the visits that close a neuron which another visit keeps; `kept` [F] bool of each virtual layer."""
    out = {}
    for i, mask in enumerate(kept):
        own = mask[keep[i % len(keep)]]
        if not bool(own.all()):
            out[i] = own.to(dtype)
    return out
