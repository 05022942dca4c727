"""One run at a time for an output: a lock on `.<name>.lock` beside it.

The lock belongs to the process (flock), so it ends with it however it ends: a file that a killed run left blocks
nobody. The file says who holds the lock and is removed with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from cortiq_kernels.recipes.errors import InputError, refuse


def lock_name(out: Path) -> Path:
    """The lock file of an output: beside it, symlinks resolved, so that all names of a place share one."""
    real = Path(os.path.realpath(out))
    return real.with_name(f".{real.name}.lock")


@contextlib.contextmanager
def locked(recipe: str, out: Path) -> Iterator[None]:
    """Hold the lock of output `out` (a file or directory that need not exist).

    `InputError`, naming process and host, when another run holds it. Missing parents are created; those still empty at
    the end are removed. On a file system without locks there is none.
    """
    file = lock_name(out)
    missing = [p for p in file.parents if not p.exists()]  # deepest first
    lock = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = _take(recipe, out, file)
        yield
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):
                file.unlink()  # while it is held: whoever opened it meanwhile sees that it is gone
            os.close(lock)
        for parent in missing:
            with contextlib.suppress(OSError):  # not empty
                parent.rmdir()


def check_unlocked(recipe: str, out: Path) -> None:
    """Refuse at once, with the error of `locked`, an output that another run holds; creates nothing."""
    try:
        lock = os.open(lock_name(out), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # no such file, or a place that is refused elsewhere
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _busy(recipe, out, lock) from None
    except OSError:
        pass
    finally:
        os.close(lock)


def _take(recipe: str, out: Path, file: Path) -> int:
    """Create, open and lock the file; its descriptor."""
    while True:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _busy(recipe, out, lock) from None
            except OSError:  # a file system without locks
                return lock
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(file), os.fstat(lock)):
                    who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T %z")}
                    with contextlib.suppress(OSError):  # a full disk: the lock holds, and says less
                        os.ftruncate(lock, 0)
                        os.pwrite(lock, (json.dumps(who) + "\n").encode(), 0)
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # removed between open and lock: its holder has just finished


def _busy(recipe: str, out: Path, lock: int) -> InputError:
    """The error of a lock that somebody else holds."""
    holder = "another process"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        who = json.loads(os.pread(lock, 4096, 0))
        holder = f"process {who['pid']} on {who['host']} (since {who['since']})"
    return refuse(
        f"{recipe}: out", f"{str(out)!r}, which {holder} is writing", "an output of this run alone",
        "Wait for it or stop it, or choose another --out.",
    )  # fmt: skip
