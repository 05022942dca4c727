"""Teacher targets in a file: a fixed size, filled batch by batch, each batch with a digest of its own.

    | bytes            | what                                                                                  |
    |------------------|---------------------------------------------------------------------------------------|
    | 64               | magic, version u64, key [32], batches n u64, slots K u64 (little endian, like all)     |
    | n * 40           | per batch: const f64, sha256 of (index, const, ids, probs); 40 zeros: not there yet    |
    | up to 4096's     | zeros                                                                                  |
    | 8 * K * rows     | batch after batch: ids [R, K] int32, then probs [R, K] float32                         |

So a file is never half written in a way that could be mistaken: a batch counts when its digest does. What a killed
run left is continued, a truncated file is replaced, and a damaged batch is computed again. Batches are read and
written with plain calls, not through a mapping: a full disk or a broken one is an `OSError`, never a SIGBUS.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.step.loss import Targets

FORMAT = 1
_MAGIC = b"cortiq-t"
_HEADER = struct.Struct("<8sQ32sQQ")
_ENTRY = 40
_PAGE = 4096
_IO = 1 << 30  # bytes a system call (Linux moves at most 2 GiB)


class Found(NamedTuple):
    """What a check found: batches to compute, and how many of those were there, but damaged."""

    missing: list[int]
    damaged: int


class TargetFile:
    """Targets of `rows[i]` scored rows each, `k` slots a row, in the file `path`; `file[i]` reads those of batch i.

    Use `open` (which checks the file or makes a new one). `replaced` says that a file of this name could not be used.
    """

    def __init__(self, path: Path, fd: int, key: bytes, rows: Sequence[int], k: int, replaced: bool = False):
        self.path, self.fd, self.key, self.rows, self.k, self.replaced = path, fd, key, list(rows), k, replaced
        self.const = [0.0] * len(self.rows)
        self.there = [False] * len(self.rows)  # batches that are known to be good: checked, or written
        self.made: list[Path] = []  # directories made for this file, deepest first
        at = _data_start(len(self.rows))
        self._at = []
        for r in self.rows:
            self._at.append(at)
            at += 8 * r * k

    @classmethod
    def open(cls, path: Path, key: bytes, rows: Sequence[int], k: int) -> TargetFile:
        """The file at `path` if it is whole and of this key and shape, else a new, empty one in its place.

        A new file is made beside its place, with all its room reserved, and renamed. `OSError` when the disk is full.
        """
        header = _HEADER.pack(_MAGIC, FORMAT, key, len(rows), k)
        size = file_bytes(rows, k)
        there = path.exists()
        if there:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if os.fstat(fd).st_size == size and os.pread(fd, len(header), 0) == header:
                return cls(path, fd, key, rows, k)
            os.close(fd)
        partial = path.with_name(f".{path.name}.partial")
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(fd, 0, size)  # a disk that is full later would lose what a teacher took hours for
            _write(fd, header, 0)
            os.fsync(fd)
            os.replace(partial, path)
        except BaseException:
            os.close(fd)
            partial.unlink(missing_ok=True)
            raise
        return cls(path, fd, key, rows, k, replaced=there)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Targets:
        if not 0 <= i < len(self.rows):
            raise IndexError(i)
        shape, half = (self.rows[i], self.k), 4 * self.rows[i] * self.k
        ids, probs = torch.empty(shape, dtype=torch.int32), torch.empty(shape, dtype=torch.float32)
        self._read(ids, self._at[i])
        self._read(probs, self._at[i] + half)
        return Targets(ids, probs, self.const[i])

    def put(self, i: int, ids: Tensor, probs: Tensor, const: float) -> None:
        """Write batch i (host tensors [R, K] int32 and float32), then the digest that makes it count."""
        raw_ids, raw_probs = _bytes(ids), _bytes(probs)
        _write(self.fd, raw_ids, self._at[i])
        _write(self.fd, raw_probs, self._at[i] + len(raw_ids))
        entry = struct.pack("<d", const) + _digest(i, const, raw_ids, raw_probs)
        _write(self.fd, entry, _HEADER.size + _ENTRY * i)
        self.const[i], self.there[i] = const, True

    def check(self) -> Found:
        """Read everything and compare digests; sets `const` and `there` of the batches that are good."""
        missing, damaged = [], 0
        table = os.pread(self.fd, _ENTRY * len(self.rows), _HEADER.size)
        for i in range(len(self.rows)):
            entry = table[_ENTRY * i : _ENTRY * (i + 1)]
            const = struct.unpack("<d", entry[:8])[0]
            if entry == bytes(_ENTRY):
                missing.append(i)
                continue
            try:
                t = self[i]
                good = _digest(i, const, _bytes(t.ids), _bytes(t.probs)) == entry[8:]
            except OSError:  # a bad block, say
                good = False
            if good:
                self.const[i], self.there[i] = const, True
            else:
                missing.append(i)
                damaged += 1
        return Found(missing, damaged)

    def flush(self) -> None:
        """All of it on the disk."""
        os.fsync(self.fd)

    def close(self) -> None:
        """Close the file, which also gives up its lock."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()

    def _read(self, out: Tensor, at: int) -> None:
        view = _bytes(out)
        done = 0
        while done < len(view):
            n = os.preadv(self.fd, [view[done : done + _IO]], at + done)
            if n == 0:
                raise OSError(f"{self.path}: ends early; it was changed while it was in use")
            done += n


def file_bytes(rows: Sequence[int], k: int) -> int:
    """Size of the file."""
    return _data_start(len(rows)) + 8 * k * sum(rows)


def _data_start(n: int) -> int:
    return -(-(_HEADER.size + _ENTRY * n) // _PAGE) * _PAGE


def _bytes(t: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, shared with it."""
    return memoryview(t.reshape(-1).view(torch.uint8).numpy().data)


def _digest(i: int, const: float, ids: memoryview, probs: memoryview) -> bytes:
    h = hashlib.sha256(struct.pack("<Qd", i, const))
    h.update(ids)
    h.update(probs)
    return h.digest()


def _write(fd: int, data: bytes | memoryview, at: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + _IO], at + done)
