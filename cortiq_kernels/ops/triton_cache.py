"""Where Triton keeps compiled kernels: its own place, or a temporary one where that cannot be written to.

Containers often run under a user without a home; `~` is then `/`, and Triton fails on `/.triton` at the first kernel.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import warnings


@functools.cache
def usable_cache() -> str | None:
    """See to it that Triton can write its cache; called before a kernel's first use.

    Returns None where its own place will do. Else points Triton at a new temporary directory, removed when the process
    ends, says so once in a warning, and returns it.
    """
    from triton import knobs

    place = knobs.cache.dir
    why = _unwritable(place)
    if why is None:
        return None
    folder = tempfile.mkdtemp(prefix="cortiq-triton-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    knobs.cache.dir = folder
    warnings.warn(
        f"Triton's cache: got {place!r} ({why}); expected one that can be written to. Kernels are compiled anew in "
        "every process: set TRITON_CACHE_DIR to keep them.",
        stacklevel=3,
    )
    return folder


def _unwritable(place: str | None) -> str | None:
    """Why nothing can be written to a directory, made if need be; None when it can."""
    try:
        os.makedirs(place or "", exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place):
            return None
    except OSError as e:
        return (e.strerror or str(e)).lower()
