"""How a run that can be resumed begins: what it says of its checkpoint, and what every checkpoint of it will say."""

from __future__ import annotations

import os
from typing import Any

from cortiq_kernels import backend
from cortiq_kernels.recipes.checkpoint_dir import CheckpointDir
from cortiq_kernels.recipes.inputs import Progress
from cortiq_kernels.recipes.logged import Logged
from cortiq_kernels.recipes.outputs import log_path
from cortiq_kernels.recipes.resume import Resumable, changes, identity


def opened(plan: Resumable, listener: Progress) -> tuple[Logged, list[str]]:
    """The run's `progress`, after its first events ("resume", "note", "plan"), and notes that are not the plan's.

    Of a resumed run what follows is marked as said again until `progress.again` is cleared.
    """
    state = plan.checkpoint
    progress = Logged(listener, lines=state["lines"] if state else 0)
    CheckpointDir(plan.cfg.out).sweep()
    if plan.cfg.resume:
        progress({"event": "resume", **_resumed(plan)})
    changed = changes(state, backend.describe(plan.device.device)) if state else None
    notes = [f"resumed {changed}"] if changed else []
    for note in notes:  # the log says it, too
        progress({"event": "note", "text": note})
    progress.again = state is not None
    progress({"event": "plan", **plan.describe()})
    for note in plan.notes:
        progress({"event": "note", "text": note})
    return progress, notes


def known(plan: Resumable, **more: Any) -> dict[str, Any]:
    """What every checkpoint of the run says besides its state."""
    path = log_path(plan.cfg.recipe, plan.cfg)
    log = os.path.realpath(path) if path is not None else None
    return {"identity": identity(plan), "log": log, "versions": backend.versions(), **more}


def nothing_left(plan: Resumable, progress: Progress, steps: int) -> str:
    """Event "resume" of a run whose output is there already, made by it; its text."""
    text = f"nothing to resume: {plan.cfg.out} is there already, complete, made by this run"
    progress({"event": "resume", "step": steps, "of": steps, "lines": 0, "log": None, "text": text})
    return text


def _resumed(plan: Resumable) -> dict[str, Any]:
    """What event "resume" says: `lines` of the run log `log` are kept, and a text for people."""
    state = plan.checkpoint
    if state is None:
        text = f"nothing to resume in {CheckpointDir(plan.cfg.out).path}: starting from the beginning"
        return {"step": 0, "of": plan.steps, "lines": 0, "log": None, "text": text}
    text = f"going on after step {state['step']} of {state['of']} (checkpoint of {state['written']})"
    if state["provenance"] is not None:
        text = f"training was over: the output is written from the checkpoint of {state['written']}"
    return {"step": state["step"], "of": state["of"], "lines": state["lines"], "log": state["log"], "text": text}
