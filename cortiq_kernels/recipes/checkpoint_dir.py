"""OUT.resume: the directory beside an output that holds the checkpoint of its unfinished run.

    state.json                 everything that is not a tensor, for the program and for people; names the other file
    state-<n>.safetensors      the tensors, flat

A checkpoint counts when state.json names it: its tensors are written under a new name and are on the disk before
state.json is replaced in one rename, and only then the ones before it go. So a kill, an error or a full disk at any
moment leaves the last checkpoint as it was; what it left half-written is removed by the next write.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cortiq_kernels.model import shard
from cortiq_kernels.model.geometry import ModelError
from cortiq_kernels.recipes.checkpoint_place import STATE, checkpoint_path
from cortiq_kernels.recipes.errors import InputError, refuse

FORMAT = 1
_TENSORS = re.compile(r"state-(\d{1,15})\.safetensors")
_PARTIAL = f".{STATE}.partial"
_BLOCK = 1 << 24  # elements that go through the host at a time


class CheckpointDir:
    """The checkpoint directory of an output. Writers hold the output's lock; reading needs none."""

    def __init__(self, out: Path):
        self.path = checkpoint_path(out)

    def read(self) -> dict[str, Any] | None:
        """state.json, or None where there is no checkpoint. InputError for one that cannot be used."""
        try:
            text = (self.path / STATE).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            state = dict(json.loads(text))
            number, file = state["format"], state["file"]
        except (ValueError, TypeError, KeyError) as e:
            raise self._unusable(f"a {STATE} that cannot be read ({e!r})") from None
        if number != FORMAT:
            raise self._unusable(f"a checkpoint of format {number!r}", f"format {FORMAT}")
        if file is not None and not _TENSORS.fullmatch(str(file)):
            raise self._unusable(f"a {STATE} that names {file!r}")
        if file is not None:
            try:
                shard.read_shard(self.path / file)
            except ModelError as e:
                raise self._unusable(f"tensors that cannot be read ({e})") from None
        return state

    def tensors(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """The tensors that `state` names, each read when it is asked for."""
        return _Tensors(shard.read_shard(self.path / state["file"]) if state["file"] else None)

    def write(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Replace the checkpoint: `state` (JSON), with `tensors` (flat, on any device, any values).

        Any error, and a signal, leaves the one before it as it was.
        """
        made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        held = self._held()
        self._clean(keep=held)
        last = max((int(m[1]) for f in held if (m := _TENSORS.fullmatch(f))), default=0)
        file = f"state-{last + 1}.safetensors" if tensors else None
        try:
            if file is not None:
                _write_tensors(self.path / file, tensors)
            text = json.dumps({"format": FORMAT, "file": file, **state}, indent=1, allow_nan=False) + "\n"
            with open(self.path / _PARTIAL, "w", encoding="utf-8") as f:
                f.write(text)
                f.flush()
                os.fsync(f.fileno())
            os.replace(self.path / _PARTIAL, self.path / STATE)
        except BaseException:
            self._clean(keep=self._held())  # what state.json names now, whichever side of the rename this is
            if made:
                with contextlib.suppress(OSError):
                    self.path.rmdir()
            raise
        _sync(self.path)
        _sync(self.path.parent)
        self._clean(keep=[file] if file else [])

    def remove(self) -> None:
        """The run is complete: its checkpoint goes, state.json first. Files that are not ours stay, and keep the
        directory.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (self.path / STATE).unlink()
        self._clean(keep=[])
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def sweep(self) -> None:
        """Remove what a kill left of a checkpoint that does not count, or no longer: our files without a state.json."""
        if self.path.is_dir() and not (self.path / STATE).exists():
            self.remove()

    def nbytes(self) -> int:
        """Bytes that our files take there, half-written ones too."""
        return sum((self.path / f).stat().st_size for f in self._files())

    def _held(self) -> list[str]:
        """The tensors' file that state.json names."""
        try:
            file = json.loads((self.path / STATE).read_text(encoding="utf-8"))["file"]
        except (OSError, ValueError, KeyError, TypeError):
            return []
        return [file] if isinstance(file, str) else []

    def _files(self) -> list[str]:
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [n for n in names if n in (STATE, _PARTIAL) or _TENSORS.fullmatch(n)]

    def _clean(self, keep: list[str]) -> None:
        """Remove our files that belong to no checkpoint."""
        for name in self._files():
            if name != STATE and name not in keep:
                with contextlib.suppress(FileNotFoundError):
                    (self.path / name).unlink()

    def _unusable(self, got: str, expected: str = "a whole checkpoint") -> InputError:
        return refuse(str(self.path), got, expected, "Delete that directory to start from the beginning.")


class _Tensors(Mapping[str, Tensor]):
    """A file's tensors, one in memory at a time."""

    def __init__(self, file: shard.Shard | None):
        self._file = file
        self._names = list(file.tensors) if file else []

    def __getitem__(self, name: str) -> Tensor:
        if self._file is None or name not in self._names:
            raise KeyError(name)
        return shard.read_tensor(self._file, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A new safetensors file, on the disk when this returns. Values are written as they are, finite or not."""
    placed = shard.layout(tensors, path.name)
    header = shard.encode_header(placed, {"format": "pt"})
    with open(path, "wb") as f:
        f.write(len(header).to_bytes(8, "little") + header)
        for name in placed:
            for part in tensors[name].detach().reshape(-1).split(_BLOCK):
                f.write(part.cpu().contiguous().view(torch.uint8).numpy().data)
        f.flush()
        os.fsync(f.fileno())


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the tensors of a checkpoint."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _sync(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
