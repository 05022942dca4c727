"""A file of learned masks (safetensors), written by `masks` and `bake`, and read by `fold`.

    layers.{i}.logits  [F_i] float32   what was trained
    layers.{i}.gates   [F_i] float32   sigmoid(logits)
    layers.{i}.kept    [F_i] bool      gates > tau, strictly; of bake those that it exports: rounded up to `align`
    physical.{i}.kept  [F_i] bool      of bake: what the narrowed directory holds, the union over visits rounded up

Layers are virtual: in a looped stack every visit of a layer has a mask of its own

and in the metadata, under "cortiq", the provenance as JSON (`provenance.py`), which holds tau among the settings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from cortiq_kernels.model.geometry import Geometry, ModelError
from cortiq_kernels.model.shard import all_finite, read_shard, read_tensor
from cortiq_kernels.recipes.errors import need, refuse
from cortiq_kernels.recipes.outputs import write_file
from cortiq_kernels.step.gates import gate_widths

KEY = "cortiq"
_PARTS = {"logits": ("F32", torch.float32), "gates": ("F32", torch.float32), "kept": ("BOOL", torch.bool)}


class Masks(NamedTuple):
    """Per layer, on the host; `provenance` says how they were made."""

    logits: list[Tensor]
    gates: list[Tensor]
    kept: list[Tensor]
    provenance: dict[str, Any]


def write_masks(
    path: Path, logits: Sequence[Tensor], kept: Sequence[Tensor], provenance: dict[str, Any],
    physical: Sequence[Tensor] = (),
) -> None:  # fmt: skip
    """Write a mask file, beside its place and renamed. The same masks give the same bytes (of two keys of metadata
    the library would write either first).
    """
    tensors: dict[str, Tensor] = {}
    for i, (m, k) in enumerate(zip(logits, kept, strict=True)):
        m = m.detach().to("cpu", torch.float32)
        tensors |= {f"layers.{i}.logits": m, f"layers.{i}.gates": torch.sigmoid(m), f"layers.{i}.kept": k.cpu()}
    tensors |= {f"physical.{i}.kept": k for i, k in enumerate(physical)}
    tensors = {name: t.clone() for name, t in tensors.items()}  # views of one flat buffer
    write_file(path, save(tensors, metadata={KEY: json.dumps(provenance)}))


def read_masks(path: Path, g: Geometry, what: str) -> Masks:
    """The masks in a file, for a model of geometry `g`.

    InputError, its first words `what`, for a file that is no mask file, one of another number of layers or other
    widths, and logits that are not finite.
    """
    fix = "Name a file that cortiq masks wrote for this model."
    try:
        shard = read_shard(path)
    except ModelError as e:
        raise refuse(what, f"a file that cannot be read ({e})", "a mask file", fix) from None
    try:
        origin = json.loads((shard.metadata or {})[KEY])
        if not isinstance(origin, dict):
            raise ValueError
    except (KeyError, ValueError, RecursionError):
        raise refuse(what, f"{str(path)!r}, which says nothing of how it was made", "a mask file", fix) from None
    layers = len({name.split(".")[1] for name in shard.tensors if name.startswith("layers.")})
    got = f"masks of {layers} layers in {str(path)!r}"
    passes = f" in {g.num_loops} passes" if g.num_loops > 1 else ""
    need(layers == g.n_virtual, what, got, f"the model's {g.n_virtual}{passes}", fix)
    found: dict[str, list[Tensor]] = {part: [] for part in _PARTS}
    for i, f in enumerate(gate_widths(g)):
        for part, (kind, dtype) in _PARTS.items():
            name = f"layers.{i}.{part}"
            info = shard.tensors.get(name)
            need(info is not None, what, f"no {name} in {str(path)!r}", "a mask file", fix)
            assert info is not None
            got = f"{name} of {info.dtype} {list(info.shape)} in {str(path)!r}"
            need(info.dtype == kind and info.shape == (f,), what, got, f"{kind} [{f}], the width of layer {i}", fix)
            t = read_tensor(shard, name).to(dtype)
            need(dtype == torch.bool or all_finite(t), what, f"{name} that is not finite", "finite values", fix)
            found[part].append(t)
    return Masks(found["logits"], found["gates"], found["kept"], origin)
