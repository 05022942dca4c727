"""Where an output directory may go, and how it appears there all at once.

An output directory is written under another name beside its place (`.<name>.partial`) and renamed when complete, so
that the final name never holds half a model: not after an error, a full disk, or a kill. An error removes the partial
directory; what a killed process left is removed by the next write to the same place. Files and directories get ordinary
permissions (0666 and 0777 less the umask).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from cortiq_kernels.model.geometry import ModelError

#: what a file system may take beyond the bytes of the files (blocks, directory, the small JSON files)
SPARE_BYTES = 256 << 10
_COPY_BLOCK = 16 << 20


def check_destination(
    src: str | os.PathLike[str] | None,
    dst: str | os.PathLike[str],
    need_bytes: int,
    also: Iterable[str | os.PathLike[str]] = (),
) -> Path:
    """Refuse a destination that will not do, before any work; returns it with symlinks resolved.

    `src` is the model directory that is read (None for none), `need_bytes` what will be written
    (`ModelDir.total_bytes()` is an upper bound for anything that does not grow), `also` further directories that are
    read.

    Raises `ModelError` when `dst` is one of those, lies inside it or contains it (symlinks resolved, mounts compared),
    exists and is not an empty directory, when its parent cannot be written to, or when the file system has less than
    `need_bytes` and a little free. Creates nothing.
    """
    place = Path(os.path.realpath(dst))
    for source in (Path(os.path.realpath(p)) for p in (src, *also) if p is not None):
        how = (
            "is"
            if _same(place, source)
            else "is inside"
            if any(_same(p, source) for p in place.parents)
            else "contains"
            if any(_same(p, place) for p in source.parents)
            else ""
        )
        if how:
            raise ModelError(
                f"output {str(dst)!r}: got a place that {how} the source {source}; expected another. "
                "Choose a new directory."
            )
    if place.exists():
        if not place.is_dir():
            raise ModelError(
                f"output {str(dst)!r}: got an existing file; expected a new directory. Choose another name."
            )
        inside = sorted(os.listdir(place))
        if inside:
            raise ModelError(
                f"output {str(dst)!r}: got an existing directory with {len(inside)} entries ({', '.join(inside[:3])}); "
                "expected a new or empty one. Choose another name, or delete it first."
            )
        if os.path.ismount(place):
            raise ModelError(f"output {str(dst)!r}: got a mount point; expected a directory. Choose one inside it.")
    parent = place.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ModelError(
            f"output {str(dst)!r}: got {parent}, which cannot be written to; expected a writable directory. "
            "Choose another."
        )
    free, need = shutil.disk_usage(parent).free + _reusable(place), need_bytes + SPARE_BYTES
    if free < need:
        raise ModelError(
            f"output {str(dst)!r}: got {_size(free)} free on {parent}; expected at least {_size(need)}. "
            "Free some space."
        )
    return place


def _same(a: Path, b: Path) -> bool:
    """Whether two resolved paths are one place: by name, or as two mounts of one directory."""
    try:
        return a == b or os.path.samefile(a, b)
    except OSError:  # one of them does not exist
        return False


def partial_name(place: Path) -> Path:
    """The directory that is filled before it is renamed to `place`."""
    return place.with_name(f".{place.name}.partial")


def _reusable(place: Path) -> int:
    """Bytes that a killed run's partial directory holds; they are freed before the next write."""
    return sum(p.stat().st_blocks * 512 for p in partial_name(place).rglob("*") if p.is_file() and not p.is_symlink())


def _size(n: int) -> str:
    """Bytes for people."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n / 1024:.1f} KiB"


@contextlib.contextmanager
def appearing(place: Path) -> Iterator[Path]:
    """Context: yields an empty directory to fill; on success it becomes `place`, on any error it is removed.

    Creates missing parents (and removes those it made on an error). `ModelError` if another process is writing to the
    same place.
    """
    partial = partial_name(place)
    missing = [p for p in place.parents if not p.exists()]  # deepest first
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = _locked(partial)
    done = False
    try:
        for old in partial.iterdir():
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
        yield partial
        _sync_directory(partial)
        os.rename(partial, place)  # atomic; replaces an empty directory, fails on anything else
        done = True
        _sync_directory(place.parent)
    finally:
        if not done:
            shutil.rmtree(partial, ignore_errors=True)
            for parent in missing:
                with contextlib.suppress(OSError):  # not empty: somebody else uses it by now
                    parent.rmdir()
        os.close(lock)


def _locked(partial: Path) -> int:
    """Create and lock the partial directory; the lock ends with its process, so that a stale one can be told."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(partial)
        try:
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # the other process has just finished
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ModelError(
                f"{partial}: got a directory that another process is writing; expected none. "
                "Wait for it, or choose another name."
            ) from None
        except OSError:  # a file system without locks
            return lock
        try:
            same = os.path.samestat(os.stat(partial), os.fstat(lock))
        except FileNotFoundError:
            same = False
        if same:
            return lock
        os.close(lock)  # renamed between open and lock: it is somebody's finished output now


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[Any]]:
    """A new binary file, on the disk (fsync) when the context ends."""
    with open(path, "xb") as f:
        yield f
        f.flush()
        os.fsync(f.fileno())


def copy_file(src: Path, dst: Path) -> None:
    """Copy contents (through symlinks) to a new regular file with ordinary permissions."""
    with open(src, "rb") as fin, new_file(dst) as fout:
        shutil.copyfileobj(fin, fout, _COPY_BLOCK)


def _sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
