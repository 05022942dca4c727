"""Where teacher targets are kept between runs, under what name, and for how long.

A run keeps them in OUT.targets beside its output and removes that when the output is written: after a kill, a failure
or Ctrl-C it stays, and the same command continues from it (delete it when you do not want that). With `--targets DIR`
they stay in DIR for all later runs, the `KEPT` sets used last; older ones are removed, and nothing else in DIR is
ever touched.

The name of a file is a sha256 over everything that decides what is in it:

    every byte of the teacher's weights, and its geometry       a changed teacher never matches, whatever its dates
    the batches themselves: tokens, next tokens, scored rows,   so records, tokenizer, template, loss_on, window,
    weights, sequence starts, in order                          packing and batch are all in
    K, alpha, the working dtype
    the versions of this package and of the file format

Not in it: the output, the student, rates, seed, epochs, accumulate, train_from, device. Targets that one device
computed serve another; they differ from its own by rounding.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from cortiq_kernels._version import __version__
from cortiq_kernels.data.batches import Batch
from cortiq_kernels.model.hf import ModelDir
from cortiq_kernels.recipes.errors import need, refuse
from cortiq_kernels.recipes.outputs import log_path
from cortiq_kernels.recipes.target_file import FORMAT, TargetFile, file_bytes
from cortiq_kernels.report.results import size

KEPT = 4  # sets of targets that stay in a --targets directory
SUFFIX = ".targets"
_HASH_BLOCK = 1 << 24


class Asked(Protocol):
    """The config of a recipe that learns from a teacher."""

    @property
    def recipe(self) -> str: ...
    @property
    def out(self) -> Path: ...
    @property
    def targets(self) -> Path | None: ...


def target_directory(cfg: Asked) -> Path:
    """`cfg.targets`, else OUT.targets beside the output."""
    if cfg.targets is not None:
        return Path(os.path.realpath(cfg.targets))
    out = Path(os.path.realpath(cfg.out))
    return out.with_name(out.name + SUFFIX)


def check_target_directory(cfg: Asked, room: int = 0) -> None:
    """Refuse, before any work, a place for the targets that is a file, cannot be written to, or lies in a model.

    `room`: bytes that they take; less on the disk of a --targets directory (besides what a rerun finds there) is
    refused, too. Raises `InputError`; creates nothing.
    """
    place, fix = target_directory(cfg), "Set --targets to another directory."
    what = f"{cfg.recipe}: targets"
    need(place.is_dir() or not os.path.lexists(place), what, f"the file {str(place)!r}", "a directory", fix)
    log = log_path(cfg.recipe, cfg)
    if log is not None and place == Path(os.path.realpath(log)):
        raise refuse(what, f"{str(place)!r}, which is the run log", "a directory", fix)
    parent = next(p for p in (place, *place.parents) if p.exists())
    writable = parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
    need(writable, what, f"{str(place)!r} below {str(parent)!r}", "a directory that can be written to", fix)
    for name in ("student", "model", "teacher", "out"):
        other = getattr(cfg, name, None)
        if other is not None and (real := Path(os.path.realpath(other))) in (place, *place.parents):
            raise refuse(what, f"{str(place)!r} in --{name} {str(real)!r}", "a directory of its own", fix)
    if cfg.targets is not None:
        free = shutil.disk_usage(parent).free + held_bytes(cfg)
        got = f"{size(free)} free on {str(parent)!r}"
        need(free >= room, what, got, f"at least {size(room)}", "Free some space, or lower --topk.")


def target_key(teacher: ModelDir, batches: Iterable[Batch], *, k: int, alpha: float, dtype: str) -> bytes:
    """The sha256 (32 bytes) that names a set of targets; see the module docstring. Reads the teacher's files once."""
    h = hashlib.sha256(f"{__version__} {FORMAT} {k} {alpha!r} {dtype} {teacher.geometry!r}".encode())
    files = sorted(teacher.shards)
    with ThreadPoolExecutor(4) as pool:  # hashing leaves the interpreter's lock alone
        for file, digest in zip(files, pool.map(lambda f: _hash_file(teacher.path / f), files), strict=True):
            h.update(file.encode() + b"\0" + digest)
    for b in batches:
        h.update(f"{b.max_seqlen} {tuple(b.tokens.shape)} {b.n_scored}".encode())
        for t in (b.tokens, b.next_ids, b.row_index, b.row_weight, b.cu_seqlens):
            h.update(t.numpy().tobytes())
    return h.digest()


def open_targets(
    cfg: Asked, key: bytes, rows: Sequence[int], k: int, waiting: Callable[[str], None] = lambda text: None
) -> TargetFile:
    """The file of these targets, checked or new, locked for this run until `unlock` or `close`.

    While another run fills it this one waits, and `waiting` is told once. `InputError` when the disk has no room.
    """
    place = target_directory(cfg)
    path = place / f"{key.hex()[:32]}{SUFFIX}"
    made = [p for p in (place, *place.parents) if not p.exists()]  # deepest first
    try:
        return _open_targets(cfg.recipe, path, key, rows, k, made, keep=KEPT if cfg.targets else 1, waiting=waiting)
    except BaseException:  # a signal included: no empty directories stay
        _remove_empty(made)
        raise


def _open_targets(
    recipe: str, path: Path, key: bytes, rows: Sequence[int], k: int, made: list[Path], keep: int,
    waiting: Callable[[str], None],
) -> TargetFile:  # fmt: skip
    """`open_targets` for a file; `made` are the directories that are new with it."""
    place, told = path.parent, False
    while True:
        place.mkdir(parents=True, exist_ok=True)
        with _locked(place):
            try:
                file = TargetFile.open(path, key, rows, k)
            except OSError as e:
                raise refuse(
                    f"{recipe}: targets", f"{e.strerror or e} at {str(path)!r}",
                    f"room for {size(file_bytes(rows, k))}",
                    "Free some space, lower --topk, or set --targets to another disk.",
                ) from e  # fmt: skip
            if _try_lock(file.fd):
                os.utime(path)
                file.made = made
                _forget(place, keep=keep)
                return file
            file.close()
        if not told:
            waiting(f"another run is computing these targets ({path}): waiting for it")
            told = True
        time.sleep(0.2)


def unlock(file: TargetFile) -> None:
    """Let other runs have the file, now that it is full; it can still be read."""
    with contextlib.suppress(OSError):
        fcntl.flock(file.fd, fcntl.LOCK_UN)


def discard_targets(cfg: Asked) -> None:
    """Remove OUT.targets when its run is complete; what lies in a --targets directory stays."""
    place = target_directory(cfg)
    if cfg.targets is None and place.is_dir():
        _forget(place, keep=0)
        _remove_empty([place])


def give_up(file: TargetFile) -> None:
    """After an error: close the file, and where no batch is in it remove it with the directories that it came with."""
    if not any(file.there):
        file.path.unlink(missing_ok=True)
        _remove_empty(file.made)
    file.close()


def held_bytes(cfg: Asked) -> int:
    """Bytes that a rerun finds reserved already: the largest set of targets in the directory."""
    return max((p.stat().st_size for p in _files(target_directory(cfg))), default=0)


def _files(place: Path) -> list[Path]:
    """Our files in a directory, the one used last first."""
    found = [p for p in place.glob(f"*{SUFFIX}") if len(p.name) == 32 + len(SUFFIX) and p.is_file()]
    return sorted(found, key=lambda p: p.stat().st_mtime_ns, reverse=True)


def _forget(place: Path, keep: int) -> None:
    """Remove all but the `keep` sets used last. A run that still reads a removed one keeps what it has open."""
    for old in _files(place)[keep:]:
        old.unlink(missing_ok=True)


def _remove_empty(places: Iterable[Path]) -> None:
    for place in places:
        with contextlib.suppress(OSError):
            place.rmdir()


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """One process at a time opens, makes and removes files in a directory."""
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _hash_file(path: Path) -> bytes:
    h = hashlib.sha256()
    with open(path, "rb", buffering=0) as f:
        while block := f.read(_HASH_BLOCK):
            h.update(block)
    return h.digest()
