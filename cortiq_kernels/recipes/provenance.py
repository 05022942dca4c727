"""What a written directory says about where it came from (`provenance` in cortiq.json)."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from cortiq_kernels import backend
from cortiq_kernels.model.hf import ModelDir

#: settings that say where a run puts things and how it is carried out, and have no part in what it computes
RUN_SETTINGS = frozenset({"out", "log", "targets", "resume", "checkpoint_every", "room_mb", "activations"})


def provenance(recipe: str, cfg: Any, *, model: ModelDir, data_hash: str, **results: Any) -> dict[str, Any]:
    """JSON-able: the recipe, its settings, the model it started from, the data's hash, versions, and `results`.

    The same work gives the same bytes wherever it is written and however often it was interrupted: no times, and
    none of `RUN_SETTINGS`.
    """
    return {
        "recipe": recipe,
        "settings": {k: v for k, v in settings(cfg).items() if k not in RUN_SETTINGS},
        "model": str(model.path),
        "data_sha256": data_hash,
        "versions": backend.versions(),
        **{k: plain(v) for k, v in results.items()},
    }


def settings(cfg: Any) -> dict[str, Any]:
    """Fields of a config dataclass as JSON values."""
    return {f.name: plain(getattr(cfg, f.name)) for f in dataclasses.fields(cfg)}


def plain(value: Any) -> Any:
    """A JSON value: paths as text, tuples as lists, numbers that JSON lacks (NaN, infinity) as null."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, tuple | list) else value
