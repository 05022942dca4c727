"""A run that is asked to go on and was over: its output is there, whole, and made by the same run.

Restart loops always pass `resume`; the last start of theirs finds the work done, and that is no error. The output says
in its cortiq.json (a mask file in its metadata) what made it, so the same comparison holds as for a checkpoint
(resume.py): models and data by content, settings by value. An output of other settings, of another program or of a
version that did not say it is an existing output like any other.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from cortiq_kernels.model.geometry import ModelError
from cortiq_kernels.model.hf_read import CORTIQ
from cortiq_kernels.model.shard import read_shard
from cortiq_kernels.recipes.checkpoint_dir import CheckpointDir
from cortiq_kernels.recipes.errors import refuse
from cortiq_kernels.recipes.resume import Asked, Resumable, difference, identity, words


def provenance_of(out: Path) -> dict[str, Any] | None:
    """What an output says of the run that made it; None where it says nothing."""
    place = Path(os.path.realpath(out))
    try:
        if place.is_file():
            found = json.loads((read_shard(place).metadata or {})["cortiq"])
        else:
            found = json.loads((place / CORTIQ).read_text(encoding="utf-8"))["provenance"]
    except (OSError, ValueError, LookupError, TypeError, ModelError):
        return None
    return found if isinstance(found, dict) else None


def output_is_done(cfg: Asked) -> bool:
    """Whether the output is there, written by the run whose checkpoint is still there too: the run was killed between
    the two. Only looked at with `resume`.
    """
    if not cfg.resume:
        return False
    state = CheckpointDir(cfg.out).read()
    return state is not None and state["provenance"] is not None and provenance_of(cfg.out) == state["provenance"]


def made_output(cfg: Asked) -> dict[str, Any] | None:
    """The provenance of the recipe's output that is there without a checkpoint; None for anything else, and without
    `resume`.
    """
    if not cfg.resume or CheckpointDir(cfg.out).read() is not None:
        return None
    made = provenance_of(cfg.out)
    return made if made is not None and made.get("recipe") == cfg.recipe and "inputs" in made else None


def inputs_of(plan: Resumable) -> dict[str, Any]:
    """What provenance says of a run's inputs besides paths and the data's hash."""
    now = identity(plan)
    return {
        **{name: now[name]["sha256"] if now[name] else None for name in plan.models},
        "tokens": now["data"]["tokens"],
    }


def check_same_run(plan: Resumable, made: dict[str, Any]) -> None:
    """`InputError`, naming the first setting that differs, unless `plan` is of the run that `made` is the provenance
    of.
    """
    try:
        settings, inputs = made["settings"], made["inputs"]
        theirs = {k: v for k, v in settings.items() if k != "device"}
        for model in plan.models:
            theirs[model] = {"path": settings[model], "sha256": inputs[model]} if inputs[model] else None
        theirs["data"] = {"path": settings["data"], "sha256": made["data_sha256"], "tokens": inputs["tokens"]}
        theirs["dtype"] = made["dtype"]
    except (LookupError, TypeError, AttributeError):
        theirs = {}
    now = identity(plan)
    name = difference(now, theirs)
    if name is not None:
        raise refuse(
            f"{plan.cfg.recipe}: {name}", words(now.get(name)), f"{words(theirs.get(name))}, as in the finished output "
            f"{str(plan.cfg.out)!r}", "Choose another --out, or delete that directory first.",
        )  # fmt: skip
