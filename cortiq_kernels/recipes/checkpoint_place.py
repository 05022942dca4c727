"""Where the checkpoint of an output lies, and how far it is. No torch here: a stopped command line asks it."""

from __future__ import annotations

import json
import os
from pathlib import Path

SUFFIX = ".resume"
STATE = "state.json"


def checkpoint_path(out: Path) -> Path:
    """OUT.resume beside an output, symlinks resolved."""
    real = Path(os.path.realpath(out))
    return real.with_name(real.name + SUFFIX)


def last_step(out: Path) -> int | None:
    """The step of the checkpoint of an output; None without one, or where it cannot be read."""
    try:
        return int(json.loads((checkpoint_path(out) / STATE).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
