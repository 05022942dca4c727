"""Open a Hugging Face model directory: every check is made here, before any work.

A model directory holds `config.json` and either `model.safetensors` or shards listed in `model.safetensors.index.json`
(names and symlinks as the hub makes them). Directories that this package wrote may also hold `cortiq.json`:

    {"format": 1, "intermediate_size": [F of layer 0, ...], "provenance": {...}, "history": [older provenances]}

Opening reads headers only (plus the two heads of a tied model that ships both), so it is quick for any size.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from cortiq_kernels import reading
from cortiq_kernels.model import names as _names
from cortiq_kernels.model.geometry import Geometry, ModelError, text_config
from cortiq_kernels.model.shard import FLOATS, Shard, TensorInfo, raw_blocks, read_shard, read_tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CORTIQ = "cortiq.json"
_SHOWN = 8  # missing files and tensors that one message names


@dataclasses.dataclass(frozen=True)
class ModelDir:
    """An opened, checked model directory.

    `path` (symlinks resolved), `config` (parsed config.json), `geometry`, `tensors` (every tensor of every shard,
    also those that are not used), `shards` by file name, `index` (parsed index or None), `cortiq` (parsed
    cortiq.json or {}).
    """

    path: Path
    config: dict[str, Any]
    geometry: Geometry
    tensors: dict[str, TensorInfo]
    shards: dict[str, Shard]
    index: dict[str, Any] | None
    cortiq: dict[str, Any]

    def read(self, name: str) -> torch.Tensor:
        """A tensor by its published name, in its own dtype and memory."""
        if name not in self.tensors:
            raise KeyError(f"{self.path} has no tensor {name!r}")
        return read_tensor(self.shards[self.tensors[name].file], name)

    def total_bytes(self) -> int:
        """Bytes of all that `write_model` would copy: an upper bound of the space that an output directory takes."""
        return sum(p.stat().st_size for p in copied_files(self)) + sum(s.size for s in self.shards.values())


def open_model(path: str | os.PathLike[str]) -> ModelDir:
    """Open and check a model directory.

    Raises `ModelError` (what, got, expected, how to fix), before reading any weight, for: no directory, no or broken
    config.json, unsupported geometry (`Geometry.from_config`), no safetensors, both a single file and shards, an index
    that names missing shards (with the number of tensors each holds) or missing tensors, a shard that is a Git LFS
    pointer, empty, truncated or damaged, missing tensors (by layer), unexpected tensors in the text model, wrong
    shapes or element types, layer widths that disagree with config.json or cortiq.json, and a tied model with a
    different `lm_head.weight`.
    """
    root = _directory(path)
    config = read_json(root / "config.json")
    cortiq = _read_cortiq(root / CORTIQ) if os.path.lexists(root / CORTIQ) else {}
    index = read_json(root / INDEX) if os.path.lexists(root / INDEX) else None
    Geometry.from_config(config)  # an unsupported model is refused as such, not by its strange weights
    shards = _open_shards(root, index)
    tensors = {name: t for s in shards.values() for name, t in s.tensors.items()}
    geometry = checked_geometry(root, config, tensors, cortiq)
    model = ModelDir(root, config, geometry, tensors, shards, index, cortiq)
    if geometry.tied and _names.HEAD in tensors:
        _check_tied_head(model)
    return model


def _directory(path: str | os.PathLike[str]) -> Path:
    """The directory with symlinks resolved, or a `ModelError` that says what is there instead."""
    what, expected = f"model {reading.brief(repr(str(path)))}", "expected a model directory"
    got = reading.kind_of(path)
    if got != "a directory":
        got = "a file" if got is None else got.replace("file", "directory", 1) if got.startswith("no such") else got
        raise ModelError(f"{what}: got {got}; {expected}. Download it first (`hf download ... --local-dir`).")
    if not os.access(path, os.R_OK | os.X_OK):
        raise ModelError(f"{what}: got 'permission denied'; {expected} that you may read. Check its owner and mode.")
    return Path(os.path.realpath(path))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a `ModelError` that names the file and the cause (see `reading`)."""
    try:
        return reading.read_object(path)
    except reading.Unreadable as e:
        fix = f"Is {path.parent} a complete model directory?" if e.got.startswith("no such file") else e.fix
        raise ModelError(f"{path}: got {e.got}; expected a file with a JSON object. {fix}") from None


def _read_cortiq(path: Path) -> dict[str, Any]:
    """cortiq.json; refuses what a later write could not carry on."""
    found = read_json(path)
    for key, kind, words in (
        ("format", int, "1"),
        ("provenance", dict, "an object"),
        ("history", list, "a list"),
    ):
        value = found.get(key)
        if value is not None and (type(value) is not kind or key == "format" and value != 1):
            raise ModelError(
                f"{path}: got {key} {reading.brief(repr(value), 60)}; expected {words}. "
                "Use the version that wrote it, or delete the file if all layers are equally wide."
            )
    return found


def _open_shards(root: Path, index: dict[str, Any] | None) -> dict[str, Shard]:
    """All weight files of the directory, checked against the index."""
    if index is None:
        if not os.path.lexists(root / SINGLE):
            other = sorted(
                p.name for p in root.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors")
            )
            raise ModelError(
                f"{root}: got {reading.brief(other) if other else 'no weights'}; expected {SINGLE} or {INDEX}. "
                "Convert the model to safetensors."
            )
        return {SINGLE: read_shard(root / SINGLE)}
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{root / INDEX}: got no weight_map; expected one of names to files. Download it again.")
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or os.path.basename(file) != file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{root / INDEX}: got {reading.brief(repr(file))} for {reading.brief(repr(name))}; expected the name "
                "of a safetensors file in this directory. Download it again."
            )
        files.setdefault(file, []).append(name)
    if SINGLE not in files and os.path.lexists(root / SINGLE):
        raise ModelError(f"{root}: got both {SINGLE} and {INDEX}; expected one set of weights. Delete the stale one.")
    gone = [f for f in files if not os.path.exists(root / f)]
    if gone:
        each = ", ".join(f"{f} ({len(files[f])} tensors, such as {files[f][0]})" for f in sorted(gone)[:_SHOWN])
        more = f" and {len(gone) - _SHOWN} more" if len(gone) > _SHOWN else ""
        raise ModelError(
            f"{root}: got {len(files) - len(gone)} of {len(files)} shards; expected also {each}{more}. "
            "Download them again."
        )
    shards = {f: read_shard(root / f) for f in sorted(files)}
    seen: dict[str, str] = {}
    for file, shard in shards.items():
        lost = [n for n in files[file] if n not in shard.tensors]
        if lost:
            raise ModelError(
                f"{root / file}: got a shard without {len(lost)} tensors that {INDEX} lists ({', '.join(lost[:3])}); "
                "expected them there. Download the shard and the index again."
            )
        for name in shard.tensors:
            if name in seen:
                raise ModelError(
                    f"{root}: got {name} in {seen[name]} and {file}; expected it once. Delete the stale shard."
                )
            seen[name] = file
    return shards


def checked_geometry(
    root: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], cortiq: Mapping[str, Any]
) -> Geometry:
    """Geometry with the layer widths of the tensors, after checking that config, cortiq.json and every tensor agree."""
    plain = Geometry.from_config(config, tensors)
    gates = _gates(plain)
    _refuse_missing(root, plain, tensors)
    found = layer_widths(plain, tensors)
    declared = cortiq.get("intermediate_size")
    if declared is not None:
        if not isinstance(declared, list) or len(declared) != plain.n_layers:
            raise ModelError(
                f"{root / CORTIQ}: got intermediate_size {reading.brief(repr(declared))}; expected {plain.n_layers} "
                "widths. Delete the file."
            )
        wrong = [i for i, (a, b) in enumerate(zip(declared, found, strict=True)) if a != b]
        if wrong:
            i = wrong[0]
            raise ModelError(
                f"{root}: got {gates[i]} with {found[i]} rows; expected {reading.brief(repr(declared[i]), 40)} "
                f"(layer {i} in {CORTIQ}). "
                "Shards and cortiq.json are of different models."
            )
    else:
        wide = plain.intermediate[0]
        wrong = [i for i, f in enumerate(found) if f != wide]
        if wrong:
            i = wrong[0]
            raise ModelError(
                f"{root}: got {gates[i]} of shape {list(tensors[gates[i]].shape)}; expected [{wide}, {plain.hidden}] "
                f"(intermediate_size; widths that differ per layer need {CORTIQ}). "
                "Config and weights are of different models."
            )
    geometry = Geometry.from_config(config, tensors, widths=found)
    _check_tensors(root, geometry, tensors)
    return geometry


def _gates(g: Geometry) -> list[str]:
    """Published names of the gate projections, whose rows are the layers' widths."""
    return [f"{g.prefix}layers.{i}.mlp.gate_proj.weight" for i in range(g.n_layers)]


def layer_widths(g: Geometry, tensors: Mapping[str, TensorInfo]) -> list[int]:
    """MLP width of each layer of `g` that has a gate projection in `tensors` (0 where it is no matrix)."""
    return [tensors[n].shape[0] if len(tensors[n].shape) == 2 else 0 for n in _gates(g) if n in tensors]


def _refuse_missing(root: Path, g: Geometry, tensors: Iterable[str]) -> None:
    """Names every missing tensor of the first incomplete layer, and how many there are in all."""
    have = set(tensors)
    missing = [s for s in _names.slots(g) if s.published not in have]
    if not missing:
        return
    layer = _names.layer_of(missing[0].internal)
    first = [s.published for s in missing if _names.layer_of(s.internal) == layer]
    where = f"layer {layer} ({g.layer_types[layer]})" if layer >= 0 else "the model"
    hint = "Download the model again."
    if first == [_names.HEAD]:
        hint = "Set tie_word_embeddings to true in config.json if the head is the embedding."
    raise ModelError(
        f"{root}: got {where} without {', '.join(first)}; expected it ({len(missing)} tensors missing in all). {hint}"
    )


def _check_tensors(root: Path, g: Geometry, tensors: Mapping[str, TensorInfo]) -> None:
    """Shapes and element types of used tensors, and no stranger inside the text model."""
    used = _names.by_published(g)
    for name, slot in used.items():
        t = tensors[name]
        if t.shape != slot.shape:
            raise ModelError(
                f"{root / t.file}: got {name} of shape {list(t.shape)}; expected {list(slot.shape)} from config.json. "
                "Config and weights are of different models."
            )
        if t.dtype not in FLOATS:
            raise ModelError(
                f"{root / t.file}: got {name} of type {t.dtype}; expected {sorted(FLOATS)}. Use the unquantised model."
            )
    inside = (f"{g.prefix}layers.", f"{g.prefix}embed_tokens.", f"{g.prefix}norm.", "lm_head.")
    strange = [
        n
        for n in tensors
        if n.startswith(inside) and n not in used and n != _names.HEAD and not n.endswith("rotary_emb.inv_freq")
    ]
    if strange:
        raise ModelError(
            f"{root}: got {len(strange)} tensors that a {g.n_layers}-layer model of this config does not have "
            f"({', '.join(strange[:3])}); expected none. Is config.json this model's own?"
        )


def _check_tied_head(model: ModelDir) -> None:
    """A tied model may ship its head too, if it is the embedding to the byte (two values would be two models)."""
    embed = f"{model.geometry.prefix}embed_tokens.weight"
    a, b = model.tensors[embed], model.tensors[_names.HEAD]
    same = a.dtype == b.dtype and a.shape == b.shape
    if same:
        pair = (raw_blocks(model.shards[t.file], n) for t, n in ((a, embed), (b, _names.HEAD)))
        same = all(x == y for x, y in zip(*pair, strict=True))
    if not same:
        raise ModelError(
            f"{model.path}: got tie_word_embeddings true and a {_names.HEAD} that differs from {embed}; "
            "expected equal ones. Set tie_word_embeddings to false to use the head, or delete the head tensor."
        )


def copied_files(model: ModelDir) -> list[Path]:
    """Files that are copied as they are: everything but weights, config.json, the index and cortiq.json.

    Left out: hidden directories (`.git`, `.cache`), and weights that are not the model's shards (other formats or
    stale shards, which would keep the old values beside the new), pipes, sockets and devices. A broken symlink and
    a file or directory that may not be read are a `ModelError`.
    """

    def refuse(e: OSError) -> None:
        raise ModelError(f"{e.filename}: got '{(e.strerror or str(e)).lower()}'; expected a directory to copy. {mend}")

    mend = "Check its owner and mode, or move it away."
    own = {"config.json", INDEX, CORTIQ, *model.shards}
    out: list[Path] = []
    for folder, folders, files in os.walk(model.path, onerror=refuse):
        folders[:] = sorted(d for d in folders if not d.startswith("."))
        for file in sorted(files):
            path = Path(folder, file)
            top = folder == str(model.path)
            if (top and file in own) or _is_other_weights(file):
                continue
            got = reading.kind_of(path)
            if got is not None and "symlink" in got:
                raise ModelError(f"{path}: got {got}; expected a file. Download it again, or delete the link.")
            if got is None and not os.access(path, os.R_OK):
                raise ModelError(f"{path}: got 'permission denied'; expected a file to copy. {mend}")
            if got is None:
                out.append(path)
    return out


def left_out_files(model: ModelDir) -> list[str]:
    """Names of weight files in the directory that are not the model's shards, so are not copied."""
    own = {INDEX, *model.shards}
    return sorted(p.name for p in model.path.iterdir() if _is_other_weights(p.name) and p.name not in own)


def _is_other_weights(file: str) -> bool:
    """Weights by name: any safetensors, PyTorch, TensorFlow, Flax, ONNX or GGUF file, and the indices of those."""
    ends = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".bin.index.json")
    return file.endswith((*ends, ".safetensors.index.json"))


def text_level(config: dict[str, Any]) -> dict[str, Any]:
    """The (mutable) level of `config` that describes the text model."""
    level = text_config(config)
    assert isinstance(level, dict)
    return level
