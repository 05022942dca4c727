"""Write Hugging Face model directories: a changed copy of one, or a new one.

What a copy keeps: file names and the split into shards; every file and shard that holds no change, byte for byte; in a
rewritten shard the order of names, the metadata, and the bytes of every other tensor; config.json byte for byte
unless a key changes. Everything is checked before anything is written, the new directory is checked as `open_model`
would check it, and it appears under its name only when complete (`destination.appearing`).
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cortiq_kernels.model import destination, hf_read, shard
from cortiq_kernels.model import names as _names
from cortiq_kernels.model.geometry import Geometry, ModelError
from cortiq_kernels.model.hf_read import CORTIQ, INDEX, SINGLE, ModelDir

FORMAT = 1
#: files of a tokenizer, copied by `create_model`
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


class Written(NamedTuple):
    """Result of a write: the directory, and sentences on what changed besides the replaced tensors (for the report)."""

    path: Path
    notes: list[str]


class WidthChange(NamedTuple):
    """What else changes with the MLP widths: `drop` and `config_updates` are for `write_model`, `notes` for people."""

    drop: set[str]
    config_updates: dict[str, Any]
    notes: list[str]


def width_changed_updates(src: ModelDir, widths: Sequence[int]) -> WidthChange:
    """Config and tensors to change when layer i's MLP becomes `widths[i]` wide.

    `intermediate_size` becomes the largest width. The multi-token-prediction layers share it, so `mtp.*` tensors are
    dropped and `mtp_num_hidden_layers` set to 0. Widths equal to the present ones change nothing.
    """
    g = src.geometry.with_widths(widths)
    if g.intermediate == src.geometry.intermediate:
        return WidthChange(set(), {}, [])
    notes: list[str] = []
    drop = {n for n in src.tensors if _is_mtp(n)}
    updates: dict[str, Any] = {"intermediate_size": max(g.intermediate)}
    if drop or _declared_mtp(src.config):
        updates["mtp_num_hidden_layers"] = 0
        gone = f"its {len(drop)} tensors were dropped" if drop else "it had no tensors"
        notes.append(
            f"MTP removed: its MLP would no longer match the changed width ({gone}, mtp_num_hidden_layers is 0)"
        )
    if not g.uniform:
        notes.append(
            f"MLP widths differ per layer ({min(g.intermediate)} to {max(g.intermediate)}): "
            f"only runtimes that read {CORTIQ} load it"
        )
    return WidthChange(drop, updates, notes)


def write_model(
    src: ModelDir,
    dst: str | os.PathLike[str],
    *,
    replace: Mapping[str, torch.Tensor],
    drop: Collection[str] = (),
    config_updates: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any],
) -> Written:
    """Write `src` with some tensors replaced to the new directory `dst`.

    `replace`: published name -> new values (any float dtype, strides, device). Each keeps the stored dtype, rounded to
    nearest even from float32, and the stored shape; only MLP tensors may change shape, together with
    `config_updates` and `drop` from `width_changed_updates`. Replacing the embedding of a tied model that also ships
    its head writes both.
    `drop`: published names to leave out. `config_updates`: keys of the text model, set at the level that holds them (at
    `text_config` in a nested config; a key that is at both levels is set at both).
    `provenance`: JSON for `cortiq.json`, which also holds the layer widths and the provenances of earlier writes.
    A config that declares MTP layers of which no tensor is (left) in the directory gets `mtp_num_hidden_layers` 0.

    Raises `ModelError` with nothing left behind: for `dst` see `check_destination`; names that are not in `src`; shapes
    that do not fit the new config; values that are not finite in the stored dtype; a source that changed meanwhile.
    `OSError` (a full disk, for one) also leaves nothing behind.
    """
    replace, dropped, notes = dict(replace), set(drop), []
    _check_names(src, replace, dropped)
    embed = f"{src.geometry.prefix}embed_tokens.weight"
    if src.geometry.tied and embed in replace and _names.HEAD in src.tensors.keys() - dropped:
        replace[_names.HEAD] = replace[embed]
        notes.append(f"{_names.HEAD} is tied: written equal to {embed}")
    shapes = {n: tuple(t.shape) for n, t in replace.items()}
    plans = {f: shard.plan_copy(s, shapes, dropped) for f, s in src.shards.items()}
    plans = {f: plan for f, plan in plans.items() if plan[1]}
    tensors = {n: t for _, placed in plans.values() for n, t in placed.items()}
    config = _updated_config(src, config_updates or {}, tensors, notes)
    geometry = _checked_output(src, config, tensors, shapes)
    left_out = hf_read.left_out_files(src)
    if left_out:
        notes.append(f"not copied (weights that the model does not use): {', '.join(left_out)}")
    others = hf_read.copied_files(src)
    total = sum(t.nbytes for t in tensors.values())
    small = {CORTIQ: _dump(_cortiq(geometry.intermediate, provenance, src.cortiq))}
    if config != src.config:
        small["config.json"] = _dump(config)
    if src.index is not None:
        small[INDEX] = _updated_index(src, dropped, total)
    need = total + sum(p.stat().st_size for p in others) + sum(map(len, small.values()))
    need += sum(len(header) for header, _ in plans.values()) + 4096 * (len(others) + len(plans))
    place = destination.check_destination(src.path, dst, need)
    with destination.appearing(place) as out:
        for file, (header, placed) in plans.items():
            shard.check_same(src.shards[file])
            if header == src.shards[file].header and not replace.keys() & placed.keys():
                destination.copy_file(src.path / file, out / file)
                continue
            with destination.new_file(out / file) as f:
                shard.write_copy(f, src.shards[file], header, placed, replace)
        for s in src.shards.values():
            shard.check_same(s)
        for path in others:
            target = out / path.relative_to(src.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            destination.copy_file(path, target)
        if "config.json" not in small:
            destination.copy_file(src.path / "config.json", out / "config.json")
            if hf_read.read_json(out / "config.json") != src.config:
                raise ModelError(
                    f"{src.path / 'config.json'}: got a file that changed since it was opened; expected the same one. "
                    "Do not write to a model that is being read."
                )
        _write_small(out, small)
    return Written(place, notes)


def create_model(
    dst: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    tokenizer_dir: str | os.PathLike[str] | None = None,
    *,
    shard_bytes: int | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Written:
    """Write a new model directory from a config (flat or nested) and published tensors, each stored in its own dtype.

    One `model.safetensors`, or with `shard_bytes` shards of at most that size (a larger tensor gets its own) and an
    index. Layer widths are those of the tensors; `cortiq.json` is written when they differ or when `provenance` is
    given.
    `tokenizer_dir`: a directory whose tokenizer files (`TOKENIZER_FILES`) are copied.

    Checks and raises as `open_model` and `write_model`.
    """
    place = destination.check_destination(None, dst, 0)
    info = shard.layout(tensors, SINGLE)
    widths = hf_read.layer_widths(Geometry.from_config(config, info), info)
    uneven = len(set(widths)) > 1
    cortiq = _cortiq(widths, provenance or {}, {}) if uneven or provenance is not None else {}
    geometry = hf_read.checked_geometry(place, config, info, cortiq)
    if geometry.tied and _names.HEAD in tensors:
        embed, head = tensors[f"{geometry.prefix}embed_tokens.weight"], tensors[_names.HEAD]
        if embed.dtype != head.dtype or not torch.equal(embed, head):
            raise ModelError(f"tensors: got a {_names.HEAD} unlike the tied embedding; expected none. Leave it out.")
    groups = _groups(tensors, shard_bytes)
    small = {"config.json": _dump(config)}
    if cortiq:
        small[CORTIQ] = _dump(cortiq)
    if len(groups) > 1:
        total = sum(t.nbytes for t in info.values())
        small[INDEX] = _dump(
            {"metadata": {"total_size": total}, "weight_map": {n: f for f, names in groups.items() for n in names}}
        )
    copied = _tokenizer_files(tokenizer_dir)
    need = sum(t.nbytes for t in info.values()) + sum(p.stat().st_size for p in copied) + sum(map(len, small.values()))
    place = destination.check_destination(tokenizer_dir, dst, need)
    with destination.appearing(place) as out:
        for file, names in groups.items():
            part = {n: tensors[n] for n in names}
            placed = shard.layout(part, file)
            with destination.new_file(out / file) as f:
                header = shard.encode_header(placed, {"format": "pt"})
                f.write(len(header).to_bytes(8, "little") + header)
                for name, t in placed.items():
                    shard.write_tensor(f, part[name], t.torch_dtype, name)
        for path in copied:
            destination.copy_file(path, out / path.name)
        _write_small(out, small)
    return Written(place, [])


def _check_names(src: ModelDir, replace: Mapping[str, torch.Tensor], drop: set[str]) -> None:
    """Refuse names that the source lacks, and tensors that are both replaced and dropped."""
    for what, given in (("replace", replace.keys()), ("drop", drop)):
        unknown = sorted(n for n in given if n not in src.tensors)
        if unknown:
            raise ModelError(
                f"{what}: got {unknown[:3]}, which {src.path} does not have; expected published tensor names. "
                "Check the prefix."
            )
    if src.geometry.tied and _names.HEAD in replace and f"{src.geometry.prefix}embed_tokens.weight" not in replace:
        raise ModelError(f"replace: got {_names.HEAD} of a tied model alone; expected its embedding. Replace that.")
    both = sorted(replace.keys() & drop)
    if both:
        raise ModelError(
            f"drop: got {both[:3]}, which are also replaced; expected one or the other. Leave them out of one."
        )
    for name, t in replace.items():
        if not t.is_floating_point():
            raise ModelError(f"replace: got {name} of {t.dtype}; expected a floating-point tensor. Convert it first.")


def _checked_output(
    src: ModelDir,
    config: dict[str, Any],
    tensors: Mapping[str, shard.TensorInfo],
    shapes: Mapping[str, tuple[int, ...]],
) -> Geometry:
    """Geometry of the output, after checking it as `open_model` would."""
    for name, shape in shapes.items():
        if shape != src.tensors[name].shape and ".mlp." not in name:
            raise ModelError(
                f"replace: got {name} of shape {list(shape)}; expected {list(src.tensors[name].shape)}. "
                "Only MLP widths may change."
            )
    widths = hf_read.layer_widths(src.geometry, tensors)
    geometry = hf_read.checked_geometry(src.path, config, tensors, {"intermediate_size": widths})
    if geometry.intermediate != src.geometry.intermediate and any(_is_mtp(n) for n in tensors):
        raise ModelError(
            "drop: got MLP widths changed and mtp.* tensors kept; expected them dropped. Use width_changed_updates."
        )
    return geometry


def _updated_config(
    src: ModelDir, updates: Mapping[str, Any], tensors: Iterable[str], notes: list[str]
) -> dict[str, Any]:
    """A copy of the source's config with `updates`, which agrees with the tensors on MTP."""
    config = copy.deepcopy(src.config)
    for key, value in updates.items():
        _set_key(config, key, value)
    if _declared_mtp(config) and not any(map(_is_mtp, tensors)):
        _set_key(config, "mtp_num_hidden_layers", 0)
        notes.append("MTP: the config declared layers that have no tensors; mtp_num_hidden_layers is now 0")
    return config


def _set_key(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a key of the text model at every level that holds it; a new key goes to the text level."""
    text = hf_read.text_level(config)
    levels = [level for level in (text, config) if key in level] or [text]
    for level in levels:
        level[key] = value


def _declared_mtp(config: Mapping[str, Any]) -> bool:
    """Whether the config promises multi-token-prediction layers."""
    return any(bool(level.get("mtp_num_hidden_layers")) for level in (config, hf_read.text_config(config)))


def _is_mtp(name: str) -> bool:
    """Whether a published tensor belongs to the multi-token-prediction layers."""
    return name.startswith(("mtp.", "model.mtp."))


def _updated_index(src: ModelDir, dropped: set[str], total: int) -> bytes:
    """The index: the source's own bytes if nothing moved."""
    assert src.index is not None
    index = copy.deepcopy(src.index)
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if n not in dropped}
    meta = index.get("metadata")
    before = sum(t.nbytes for t in src.tensors.values())
    if isinstance(meta, dict) and total != before:
        if "total_size" in meta:
            meta["total_size"] = total
        meta.pop("total_parameters", None)
    return (src.path / INDEX).read_bytes() if index == src.index else _dump(index)


def _cortiq(widths: Sequence[int], provenance: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of cortiq.json."""
    history = list(earlier.get("history") or [])
    if earlier.get("provenance"):
        history.append(earlier["provenance"])
    return {"format": FORMAT, "intermediate_size": list(widths), "provenance": dict(provenance), "history": history}


def _dump(value: Any) -> bytes:
    """JSON as Hugging Face writes it; what JSON does not know (paths, dtypes) becomes its text."""
    return (json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n").encode()


def _write_small(out: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        with destination.new_file(out / name) as f:
            f.write(data)


def _groups(tensors: Mapping[str, torch.Tensor], shard_bytes: int | None) -> dict[str, list[str]]:
    """File name -> tensors, in the given order."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, t in tensors.items():
        n = t.numel() * t.element_size()
        if shard_bytes is not None and groups[-1] and size + n > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += n
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _tokenizer_files(folder: str | os.PathLike[str] | None) -> list[Path]:
    """The tokenizer files that are there."""
    if folder is None:
        return []
    found = [Path(folder, f) for f in TOKENIZER_FILES if Path(folder, f).is_file()]
    if not found:
        raise ModelError(
            f"tokenizer {str(folder)!r}: got none of {list(TOKENIZER_FILES)}; expected a tokenizer. Check the path."
        )
    return found
