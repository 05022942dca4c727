"""A heal that is asked to go on and was over: its output is there, whole, and made by the same run.

Restart loops always pass `resume`; the last start of theirs finds the work done, and that is no error. The output says
in its cortiq.json what made it, so the same comparison holds as for a checkpoint (resume.py): models and data by
content, settings by value. An output of other settings, of another program or of a version that did not say it is an
existing directory like any other.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortiq_kernels.model.hf_read import CORTIQ
from cortiq_kernels.recipes.checkpoint_dir import CheckpointDir
from cortiq_kernels.recipes.errors import refuse
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.resume import difference, identity, words

if TYPE_CHECKING:
    from cortiq_kernels.recipes.heal_plan import HealPlan


def provenance_of(out: Path) -> dict[str, Any] | None:
    """What an output directory says of the run that made it; None where it says nothing."""
    try:
        found = json.loads((Path(os.path.realpath(out)) / CORTIQ).read_text(encoding="utf-8"))["provenance"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def output_is_done(cfg: HealConfig) -> bool:
    """Whether the output is there, written by the run whose checkpoint is still there too: the run was killed between
    the two. Only looked at with `resume`.
    """
    if not cfg.resume:
        return False
    state = CheckpointDir(cfg.out).read()
    return state is not None and state["provenance"] is not None and provenance_of(cfg.out) == state["provenance"]


def made_output(cfg: HealConfig) -> dict[str, Any] | None:
    """The provenance of a heal's output that is there without a checkpoint; None for anything else, and without
    `resume`.
    """
    if not cfg.resume or CheckpointDir(cfg.out).read() is not None:
        return None
    made = provenance_of(cfg.out)
    return made if made is not None and made.get("recipe") == "heal" and "inputs" in made else None


def inputs_of(plan: HealPlan) -> dict[str, Any]:
    """What provenance says of a run's inputs besides paths and the data's hash."""
    now = identity(plan)
    return {
        "student": now["student"]["sha256"],
        "teacher": now["teacher"]["sha256"] if now["teacher"] else None,
        "tokens": now["data"]["tokens"],
    }


def check_same_run(plan: HealPlan, made: dict[str, Any]) -> None:
    """`InputError`, naming the first setting that differs, unless `plan` is of the run that `made` is the provenance
    of.
    """
    try:
        settings, inputs = made["settings"], made["inputs"]
        theirs = {k: v for k, v in settings.items() if k != "device"}
        theirs["student"] = {"path": settings["student"], "sha256": inputs["student"]}
        theirs["teacher"] = {"path": made["teacher"], "sha256": inputs["teacher"]} if made["teacher"] else None
        theirs["data"] = {"path": settings["data"], "sha256": made["data_sha256"], "tokens": inputs["tokens"]}
        theirs["dtype"] = made["dtype"]
    except (LookupError, TypeError, AttributeError):
        theirs = {}
    now = identity(plan)
    name = difference(now, theirs)
    if name is not None:
        raise refuse(
            f"heal: {name}", words(now.get(name)), f"{words(theirs.get(name))}, as in the finished output "
            f"{str(plan.cfg.out)!r}", "Choose another --out, or delete that directory first.",
        )  # fmt: skip
