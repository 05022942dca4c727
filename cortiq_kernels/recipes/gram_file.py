"""A capture on disk: one safetensors file, `layers.{i}.gram` [tiles, 128, 128] float32 each (layout: `ops/gram.py`).

Its metadata (text, as the format asks for):

    cortiq_gram   "1", the version of this format
    tile          "128"
    rows          real rows that every Gram is summed over
    widths        JSON: layer -> neurons
    model         fingerprint of the model (fingerprint.py)
    data_sha256   hash of the records
    provenance    JSON: settings and versions of the run

Files of the same model, layers and widths add up: the sums are added (in float64), and so are the rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor

from cortiq_kernels.model.shard import Shard, TensorInfo, encode_header, read_shard, read_tensor, write_tensor
from cortiq_kernels.ops.gram import TILE, gram_tiles
from cortiq_kernels.reading import Unreadable, parse_json
from cortiq_kernels.recipes.errors import InputError, need, refuse

_FORMAT = "1"


def name_of(layer: int) -> str:
    """Name of a layer's Gram in the file."""
    return f"layers.{layer}.gram"


class GramWriter:
    """Writes a capture layer by layer, in the order of `widths`, beside its place, and renames it when whole.

    with GramWriter(path, widths, metadata) as file:
        file.put(layer, gram)

    After an error there is no file, and none of what was written. Missing parents must exist (`lock.locked` makes
    them).
    """

    def __init__(self, path: Path, widths: Mapping[int, int], metadata: Mapping[str, str]):
        self.place = Path(os.path.realpath(path))
        self.partial = self.place.with_name(f".{self.place.name}.partial")
        self.left = list(widths)
        tensors, at = {}, 0
        for layer, width in widths.items():
            shape = (gram_tiles(width), TILE, TILE)
            size = 4 * shape[0] * TILE * TILE
            tensors[name_of(layer)] = TensorInfo(self.place.name, "F32", shape, at, at + size)
            at += size
        said = {"cortiq_gram": _FORMAT, "tile": str(TILE), "widths": json.dumps(dict(widths)), **metadata}
        self.header = encode_header(tensors, said)
        self.file: IO[bytes] | None = None

    def __enter__(self) -> GramWriter:
        self.file = open(self.partial, "wb")  # noqa: SIM115 - closed by __exit__
        self.file.write(len(self.header).to_bytes(8, "little") + self.header)
        return self

    def put(self, layer: int, gram: Tensor) -> None:
        """Write the next layer. InputError, naming it, for a Gram that is not finite, or all zero."""
        assert self.file is not None and layer == self.left[0], (layer, self.left)
        check_gram(f"capture: layer {layer}", gram)
        write_tensor(self.file, gram, torch.float32, name_of(layer))
        self.left.pop(0)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self.file is not None
        whole = kind is None and not self.left
        try:
            if whole:
                self.file.flush()
                os.fsync(self.file.fileno())
            self.file.close()
            if whole:
                os.replace(self.partial, self.place)
        finally:
            self.partial.unlink(missing_ok=True)


def check_gram(what: str, gram: Tensor) -> None:
    """InputError unless the values of a packed Gram are finite, and some are not zero."""
    low, high = (float(v) for v in torch.aminmax(gram))
    finite = low - low == 0.0 == high - high
    fix = "Check the model (cortiq score) and the data."
    need(finite, what, "activations that are not finite, or squares beyond float32", "finite ones", fix)
    need(bool(low or high), what, "no activity (all energy is zero)", "some", fix)


class Grams:
    """One or more captures that were opened together: `rows`, `widths` (layer -> neurons), `hashes` of their data."""

    def __init__(self, shards: Sequence[Shard], rows: int, widths: dict[int, int], model: str, hashes: list[str]):
        self.shards, self.rows, self.widths, self.model, self.hashes = shards, rows, widths, model, hashes

    @classmethod
    def open(cls, paths: Sequence[Path]) -> Grams:
        """Open captures to be added up; reads their headers.

        ModelError for what is no whole safetensors file; InputError for one that is no capture, for captures of
        different models or layers, and for the same records twice.
        """
        shards = [read_shard(p) for p in paths]
        found = [_Said(s) for s in shards]
        first = found[0]
        for s, other in zip(shards[1:], found[1:], strict=True):
            same = (other.model, other.widths) == (first.model, first.widths)
            need(same, f"grams: {s.path}", "another model or other layers", f"those of {paths[0]}", "Capture anew.")
        hashes = [f.data for f in found]
        twice = next((p for p, h in zip(paths, hashes, strict=True) if hashes.count(h) > 1), None)
        need(twice is None, f"grams: {twice}", "the same records in two captures", "others in each", "Name one.")
        return cls(shards, sum(f.rows for f in found), first.widths, first.model, hashes)

    def read(self, layer: int, device: torch.device | str = "cpu") -> Tensor:
        """The packed Gram of a layer: float32 of one capture, float64 of several. InputError as `check_gram`."""
        total = read_tensor(self.shards[0], name_of(layer)).to(device)
        if len(self.shards) > 1:
            total = total.double()
        for s in self.shards[1:]:
            total += read_tensor(s, name_of(layer)).to(device)
        check_gram(f"grams: layer {layer} of {self.shards[0].path}", total)
        return total


class _Said:
    """What a capture's metadata says, checked against its tensors."""

    def __init__(self, shard: Shard):
        m: Mapping[str, str] = shard.metadata or {}
        self.shard = shard
        if m.get("cortiq_gram") != _FORMAT or m.get("tile") != str(TILE):
            raise self._bad("a safetensors file that is no capture of this version")
        try:
            widths: Any = parse_json(m["widths"])
            self.widths = {int(k): v for k, v in widths.items()}
            self.rows = int(m["rows"])
            self.model, self.data = m["model"], m["data_sha256"]
        except (KeyError, ValueError, AttributeError, Unreadable):
            raise self._bad("a capture whose metadata is damaged") from None
        ok = self.rows > 0 and bool(self.widths) and all(type(v) is int and v > 0 for v in self.widths.values())
        shapes = {name_of(i): ("F32", (gram_tiles(v), TILE, TILE)) for i, v in self.widths.items()} if ok else {}
        if not ok or shapes != {n: (t.dtype, t.shape) for n, t in shard.tensors.items()}:
            raise self._bad("a capture whose metadata does not fit its tensors")

    def _bad(self, got: str) -> InputError:
        return refuse(f"grams: {self.shard.path}", got, "a file of cortiq capture", "Capture again.")
