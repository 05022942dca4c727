"""How a run that can be resumed begins: in which order it looks and locks, what it says of its checkpoint, and what
every checkpoint of it will say."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from cortiq_kernels import backend
from cortiq_kernels.recipes.checkpoint_dir import CheckpointDir
from cortiq_kernels.recipes.finished import output_is_done, provenance_of
from cortiq_kernels.recipes.inputs import Progress
from cortiq_kernels.recipes.lock import check_unlocked, locked
from cortiq_kernels.recipes.logged import Logged
from cortiq_kernels.recipes.outputs import log_path
from cortiq_kernels.recipes.resume import Resumable, changes, find_checkpoint, identity
from cortiq_kernels.recipes.stopping import stop_on_signals

Plan = TypeVar("Plan", bound=Resumable)
Report = TypeVar("Report")


def run_locked(
    cfg: Any,
    make_plan: Callable[[Any], Plan],
    *,
    already: Callable[[Plan], Report],
    check_output: Callable[[Plan, bool], object],
    work: Callable[[Plan, bool], Report],
    check_models: Callable[[Plan], object] = lambda plan: None,
) -> Report:
    """A run under its output's lock: `work(plan, done)`, or `already(plan)` for an output that it has made before.

    Everything is looked at before the lock is asked for; what another process may have changed meanwhile is looked at
    again under it: whether the output is `done`, whether it can be written (`check_output(plan, done)`), the
    checkpoint. A signal raises `Stopped`.
    """
    with stop_on_signals():
        cfg.check()
        check_unlocked(cfg.recipe, cfg.out)
        plan = make_plan(cfg)
        check_models(plan)
        with locked(cfg.recipe, cfg.out):
            if plan.made is not None and provenance_of(cfg.out) == plan.made:
                return already(plan)
            done = output_is_done(cfg)
            check_output(plan, done)
            if find_checkpoint(plan) != plan.checkpoint:
                plan = make_plan(cfg)
            return work(plan, done)


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
