"""One safetensors file: read its header with checks, and write a changed copy of it.

Layout of the format: 8 bytes little-endian length n; n bytes of JSON, `{name: {dtype, shape, data_offsets}}` and
optionally `__metadata__` (strings), space-padded; then the tensors' bytes, without gaps, to the end of the file.

A changed copy keeps the header's order of names, the metadata and every untouched tensor's bytes. The header is kept to
the byte when no dtype or shape changes and nothing is dropped. Otherwise tensors keep their order in the data, wider
element types first (which is how the reference library writes them, and keeps every tensor aligned).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from cortiq_kernels import reading
from cortiq_kernels.model.config_values import LARGEST, ModelError

_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16,
    "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_READABLE = FLOATS | {
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_MAX_HEADER = 100_000_000  # the reference library's own limit
_BLOCK = 16 << 20


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `file` (name), `dtype` ("BF16", ...), `shape`, bytes `[start, stop)` after the header."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    stop: int = 0

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.stop - self.start

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of a floating-point tensor; `ModelError` for any other element type."""
        if self.dtype not in FLOATS:
            raise ModelError(
                f"{self.file}: got a tensor of type {self.dtype}; expected one of {sorted(FLOATS)}. Convert it."
            )
        return FLOATS[self.dtype]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A parsed file: `header` (the JSON's bytes), `metadata`, `tensors` in header order, `size` of the whole file.

    `changed_ns`: when it was last written to, as of the moment it was read; later reads hold it against the file.
    """

    path: Path
    header: bytes
    metadata: dict[str, str] | None
    tensors: dict[str, TensorInfo]
    size: int
    changed_ns: int

    @property
    def data_start(self) -> int:
        """Offset of the first tensor byte."""
        return 8 + len(self.header)


def dtype_name(dtype: torch.dtype) -> str:
    """Stored name of a floating-point torch dtype; `ModelError` for others."""
    for name, t in FLOATS.items():
        if t == dtype:
            return name
    raise ModelError(f"tensor: got {dtype}; expected one of {list(FLOATS.values())}. Convert it first.")


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of stored type `dtype`."""
    return math.prod(shape) * _BITS[dtype] // 8


def read_shard(path: Path) -> Shard:
    """Parse and check one file; reads the header only.

    Raises `ModelError`, naming the file and the cause: what `reading.open_file` refuses, a Git LFS pointer, 0 bytes, no
    safetensors, truncated (with both sizes and the number of tensors cut off), too long, or offsets that do not tile
    the data.
    """
    again = "Download the file again."
    with _opened(path) as f:
        status = os.fstat(f.fileno())
        size = status.st_size
        head = f.read(len(reading.LFS_POINTER) + 1)
        if head.startswith(reading.LFS_POINTER):
            raise ModelError(
                f"{path}: got a Git LFS pointer ({size} bytes of text); expected the weights. Run `git lfs pull`."
            )
        if size == 0:
            raise ModelError(f"{path}: got 0 bytes; expected a safetensors file. {again}")
        n = int.from_bytes(head[:8], "little")
        if size < 8 or n > _MAX_HEADER or head[8:9] != b"{":
            raise ModelError(
                f"{path}: got {size} bytes that are not safetensors; expected a safetensors header. {again}"
            )
        if size < 8 + n:
            raise ModelError(
                f"{path}: got {size} bytes, which end inside the header; "
                f"expected more than {8 + n} (truncated). {again}"
            )
        f.seek(8)
        header = f.read(n)
    try:
        entries = reading.parse_json(reading.decode(header))
        if not isinstance(entries, dict):
            raise ValueError(f"a JSON {type(entries).__name__}")
        metadata = entries.pop("__metadata__", None)
        if metadata is not None and not (
            isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
        ):
            raise ValueError("__metadata__ is not an object of strings")
        tensors = {name: _info(path, name, e) for name, e in entries.items()}
    except ModelError:
        raise
    except ValueError as e:
        why = e.got if isinstance(e, reading.Unreadable) else reading.brief(e)
        raise ModelError(
            f"{path}: got a header that cannot be parsed ({why}); expected safetensors JSON. {again}"
        ) from e
    end, want = size - 8 - n, max((t.stop for t in tensors.values()), default=0)
    if end < want:
        cut = sum(t.stop > end for t in tensors.values())
        raise ModelError(
            f"{path}: got {size} bytes; "
            f"expected {8 + n + want}: truncated, {cut} of {len(tensors)} tensors cut. {again}"
        )
    if end > want:
        raise ModelError(
            f"{path}: got {size} bytes; expected {8 + n + want}: {end - want} bytes belong to no tensor. {again}"
        )
    at = 0
    for name, t in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if t.start != at:
            raise ModelError(f"{path}: got {name} at byte {t.start}; expected {at} (no gap, no overlap). {again}")
        at = t.stop
    return Shard(path, header, metadata, tensors, size, status.st_mtime_ns)


def _opened(path: Path) -> IO[bytes]:
    """The open file, or a `ModelError` that says what is there instead."""
    try:
        return reading.open_file(path)
    except reading.Unreadable as e:
        raise ModelError(f"{path}: got {e.got}; expected a safetensors file. {e.fix}") from None


def _info(path: Path, name: str, entry: Any) -> TensorInfo:
    """One header entry, with its types and its size checked."""
    keys = ("dtype", "shape", "data_offsets")
    if not isinstance(entry, dict) or any(k not in entry for k in keys):
        raise ValueError(f"{name!r} has no {', '.join(keys)}")
    dtype, shape, offsets = (entry[k] for k in keys)
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ModelError(
            f"{path}: got element type {reading.brief(repr(dtype), 40)}; expected one of {sorted(_BITS)}. "
            "Convert the model."
        )
    if not _counts(shape, LARGEST) or not _counts(offsets, 2**63 - 1) or len(offsets) != 2:
        raise ValueError(f"{name!r} has shape {shape} at {offsets}")
    t = TensorInfo(path.name, dtype, tuple(shape), *offsets)
    if nbytes(t.dtype, t.shape) != t.nbytes:
        raise ValueError(f"{name!r} has {t.shape} {t.dtype} in {t.nbytes} bytes")
    return t


def _counts(values: Any, most: int) -> bool:
    """Whether `values` is a list of integers from 0 to `most`."""
    return isinstance(values, list) and all(type(v) is int and 0 <= v <= most for v in values)


def check_unchanged(shard: Shard, f: IO[bytes]) -> None:
    """`ModelError` if the open file is not what `read_shard` saw, by its size and the time of the last write."""
    now = os.fstat(f.fileno())
    if (now.st_size, now.st_mtime_ns) != (shard.size, shard.changed_ns):
        raise ModelError(
            f"{shard.path}: got a file that changed since it was opened ({shard.size} bytes then, {now.st_size} now); "
            "expected the same one. Do not write to a model that is being read."
        )


def check_same(shard: Shard) -> None:
    """`check_unchanged` of the file that now has the shard's name."""
    with _opened(shard.path) as f:
        check_unchanged(shard, f)


def read_tensor(shard: Shard, name: str) -> torch.Tensor:
    """The tensor in its own dtype and shape, in memory of its own.

    It is read, not mapped: a file that somebody cuts short while it is mapped ends the process with a bus error.
    """
    t = shard.tensors[name]
    if t.dtype not in _READABLE:
        raise ModelError(
            f"{shard.path}: got {name} of type {t.dtype}; expected one of {sorted(_READABLE)}. Convert it."
        )
    out = torch.empty(t.shape, dtype=_READABLE[t.dtype])
    into = out.reshape(-1).view(torch.uint8).numpy().data
    with _opened(shard.path) as f:
        check_unchanged(shard, f)
        f.seek(shard.data_start + t.start)
        at = 0
        while at < len(into):
            n = f.readinto(into[at:])  # type: ignore[attr-defined]
            if not n:
                raise _cut_short(shard)
            at += n
        check_unchanged(shard, f)
    return out


def raw_blocks(shard: Shard, name: str) -> Iterator[bytes]:
    """The stored bytes of a tensor, in blocks of at most 16 MiB."""
    t = shard.tensors[name]
    with _opened(shard.path) as f:
        check_unchanged(shard, f)
        f.seek(shard.data_start + t.start)
        left = t.nbytes
        while left:
            block = f.read(min(left, _BLOCK))
            if not block:
                raise _cut_short(shard)
            left -= len(block)
            yield block


def _cut_short(shard: Shard) -> ModelError:
    return ModelError(
        f"{shard.path}: got fewer bytes than at the start; expected an unchanged file. Do not write to it."
    )


def plan_copy(
    shard: Shard, shapes: Mapping[str, tuple[int, ...]], drop: set[str]
) -> tuple[bytes, dict[str, TensorInfo]]:
    """(header bytes, tensors in data order) of a copy with `shapes` changed and `drop` left out; dtypes are kept.

    The header is the original's to the byte when nothing is dropped and no shape changes.
    """
    order = sorted(shard.tensors.items(), key=lambda item: (item[1].start, item[1].stop))
    changed = {n: s for n, s in shapes.items() if n in shard.tensors and s != shard.tensors[n].shape}
    if not changed and not drop & shard.tensors.keys():
        return shard.header, dict(order)
    kept = [(n, t) for n, t in order if n not in drop]
    kept.sort(key=lambda item: -_BITS[item[1].dtype])
    placed: dict[str, TensorInfo] = {}
    at = 0
    for name, t in kept:
        shape = changed.get(name, t.shape)
        size = nbytes(t.dtype, shape)
        placed[name] = TensorInfo(t.file, t.dtype, shape, at, at + size)
        at += size
    return encode_header({n: placed[n] for n in shard.tensors if n in placed}, shard.metadata), placed


def encode_header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None) -> bytes:
    """JSON of a header in the order of `tensors`, padded with spaces to a multiple of 8 bytes."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for name, t in tensors.items():
        entries[name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.start, t.stop]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8)


def layout(tensors: Mapping[str, torch.Tensor], file: str) -> dict[str, TensorInfo]:
    """Placement of new tensors in a file: wider element types first, then in the given order."""
    out: dict[str, TensorInfo] = {}
    at = 0
    for name, t in sorted(tensors.items(), key=lambda item: -_BITS[dtype_name(item[1].dtype)]):
        size = t.numel() * t.element_size()
        out[name] = TensorInfo(file, dtype_name(t.dtype), tuple(t.shape), at, at + size)
        at += size
    return out


def all_finite(t: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; one pass, no temporary of the tensor's size."""
    return t.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(t.detach()))).all())


def write_tensor(f: IO[Any], tensor: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    """Append `tensor`, rounded to `dtype`, in row-major order (whatever its strides and device).

    16-bit rounding is to nearest, ties to even, of the float32 value (a float64 tensor is rounded to float32 first).
    Raises `ModelError` for values that are not finite or do not fit `dtype`.
    """
    t = tensor.detach()
    if t.dtype == torch.float64 and dtype in (torch.float16, torch.bfloat16):
        t = t.float()
    t = t.to(dtype)
    if not all_finite(t):
        raise ModelError(
            f"{name}: got values that are not finite in {dtype}; expected finite ones. Nothing was written."
        )
    flat = t.cpu().contiguous().reshape(-1)
    f.write(flat.view(torch.uint8).numpy().data)


def write_copy(
    f: IO[Any], shard: Shard, header: bytes, order: Mapping[str, TensorInfo], replace: Mapping[str, torch.Tensor]
) -> None:
    """Write a whole file: `header`, then the tensors of `order`, from `replace` or else from `shard`."""
    f.write(len(header).to_bytes(8, "little") + header)
    for name, t in order.items():
        if name in replace:
            write_tensor(f, replace[name], t.torch_dtype, name)
        else:
            for block in raw_blocks(shard, name):
                f.write(block)
