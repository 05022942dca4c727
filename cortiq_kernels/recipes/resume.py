"""When a run may go on from a checkpoint: with the same models, the same data and the same settings.

Where things are, how often a checkpoint is written and the device may change; everything that decides the result may
not, and the refusal names the first setting that differs, with both values. Directories are compared by what is in them
(`fingerprint`), so a run goes on when its files were copied elsewhere.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from cortiq_kernels import backend
from cortiq_kernels.data.records import Dataset
from cortiq_kernels.model.hf import ModelDir
from cortiq_kernels.recipes.checkpoint_dir import CheckpointDir
from cortiq_kernels.recipes.errors import need, refuse
from cortiq_kernels.recipes.fingerprint import fingerprint
from cortiq_kernels.recipes.interval import parse_interval
from cortiq_kernels.recipes.prefix import PrefixPlan
from cortiq_kernels.recipes.provenance import RUN_SETTINGS, settings


class Asked(Protocol):
    """The settings of a recipe that can be resumed."""

    @property
    def recipe(self) -> str: ...
    @property
    def data(self) -> Path: ...
    @property
    def out(self) -> Path: ...
    @property
    def resume(self) -> bool: ...
    @property
    def checkpoint_every(self) -> str: ...


class Resumable(Protocol):
    """What the plan of such a recipe says; `models` by the name of their setting (None: not opened), `dtype` that of
    the result, `state_bytes` the most that the tensors of one checkpoint take, `out_bytes` the output.
    """

    @property
    def cfg(self) -> Asked: ...
    @property
    def models(self) -> dict[str, ModelDir | None]: ...
    @property
    def dataset(self) -> Dataset: ...
    @property
    def device(self) -> backend.DeviceChoice: ...
    @property
    def dtype(self) -> backend.DtypeChoice: ...
    @property
    def steps(self) -> int: ...
    @property
    def notes(self) -> list[str]: ...
    @property
    def checkpoint(self) -> dict[str, Any] | None: ...
    @property
    def made(self) -> dict[str, Any] | None: ...
    @property
    def state_bytes(self) -> int: ...
    @property
    def out_bytes(self) -> int: ...
    def describe(self) -> dict[str, Any]: ...


def identity(plan: Resumable) -> dict[str, Any]:
    """JSON-able: everything that decides what a run computes, by the setting that a user would change."""
    out = {k: v for k, v in settings(plan.cfg).items() if k not in RUN_SETTINGS and k != "device"}
    for name, model in plan.models.items():
        out[name] = _model(model) if model else None
    out["data"] = {"path": str(plan.cfg.data), "sha256": plan.dataset.data_hash, "tokens": plan.dataset.token_hash}
    out["dtype"] = backend.dtype_name(plan.dtype.dtype)
    return out


def find_checkpoint(plan: Resumable) -> dict[str, Any] | None:
    """The state to go on from, or None for a fresh start. `InputError` for a checkpoint that nobody asked to resume, of
    another run, or that cannot be used.
    """
    folder = CheckpointDir(plan.cfg.out)
    state = folder.read()
    if state is None:
        return None
    if not plan.cfg.resume:
        raise refuse(
            f"{plan.cfg.recipe}: out",
            f"the checkpoint {str(folder.path)!r} of an unfinished run (step {state['step']} of {state['of']})", "none",
            "Add --resume to go on with it, or delete that directory to start afresh.",
        )  # fmt: skip
    now = identity(plan)
    name = difference(now, state["identity"])
    if name is not None:
        raise refuse(
            f"{plan.cfg.recipe}: {name}", words(now.get(name)),
            f"{words(state['identity'].get(name))}, as in the checkpoint {str(folder.path)!r}",
            "Give the settings of the run that is to go on, or delete that directory to start afresh.",
        )  # fmt: skip
    return state


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first setting of an `identity` in which two differ, where things lie apart; None when they are the same."""
    for name in [*ours, *(k for k in theirs if k not in ours)]:
        if _content(ours.get(name)) != _content(theirs.get(name)):
            return name
    return None


def changes(state: Mapping[str, Any], device: str) -> str | None:
    """What is not as it was when the checkpoint was written, and may change results by rounding, in words: the device
    and the versions. None for nothing.
    """
    found = [] if device == state["device"] else [f"on {device}, where it was {state['device']}"]
    now, before = backend.versions(), state.get("versions") or {}
    for name in now:
        if name in before and now[name] != before[name]:
            found.append(f"with {name} {now[name]}, where it was {before[name]}")
    return "; ".join(found) + ": results differ by rounding" if found else None


def checkpoint_bytes(plan: Resumable) -> int:
    """Most bytes that one checkpoint takes; 0 when none is written."""
    return 0 if parse_interval(plan.cfg.checkpoint_every).never else plan.state_bytes


def where_checkpoint(plan: Resumable) -> str:
    """Where checkpoints go and how often, in words."""
    cfg = plan.cfg
    if plan.made is not None:
        return "none: the output is there, made by this run, and nothing is left to do"
    place = f"every {cfg.checkpoint_every} in {CheckpointDir(cfg.out).path}"
    if plan.checkpoint is not None:
        return f"goes on after step {plan.checkpoint['step']}; {place}"
    return "none" if cfg.checkpoint_every == "off" else place


def check_room(plan: Resumable, targets: int = 0) -> None:
    """Refuse a run for which the disk of its output is too small: `targets` bytes beside the output, and the larger of
    two checkpoints (the next one is written before the last goes) and of a checkpoint with the output.
    """
    one, out = checkpoint_bytes(plan), plan.out_bytes
    folder = CheckpointDir(plan.cfg.out)
    parent = next(p for p in folder.path.parents if p.exists())
    free = shutil.disk_usage(parent).free + folder.nbytes()
    want = targets + one + max(one, out)
    parts = [f"{_size(out)} output", f"{_size(one)} a checkpoint, of which there are two for a moment"]
    parts += [f"{_size(targets)} teacher targets"] if targets else []
    need(
        free >= want, f"{plan.cfg.recipe}: out", f"{_size(free)} free on {parent}",
        f"at least {_size(want)} ({', '.join(parts)})",
        "Free some space, choose another --out, or do without checkpoints (--checkpoint-every off).",
    )  # fmt: skip


def same_prefix(plan: PrefixPlan | None, state: Mapping[str, Any], working: torch.dtype) -> PrefixPlan | None:
    """How a resumed run keeps the frozen layers' output: rounded as before, whatever memory is free now; where it was
    exact, not rounded.
    """
    if plan is None:
        return None
    before, now = state["prefix"], rounding(plan, working)
    if before == now:
        return plan
    dtype = getattr(torch, before) if before else None
    how = f"kept in {before}" if before else "run in every step"
    return dataclasses.replace(plan, dtype=dtype, reason=f"frozen layers: {how}, to go on bit for bit")


def rounding(plan: PrefixPlan | None, working: torch.dtype) -> str | None:
    """The dtype that the frozen layers' output is rounded to; None where it is exact."""
    if plan is None or plan.dtype in (None, working):
        return None
    return str(plan.dtype).removeprefix("torch.")


def _size(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"


def _model(model: ModelDir) -> dict[str, str]:
    return {"path": str(model.path), "sha256": fingerprint(model)}


def _content(value: Any) -> Any:
    """What is compared: not where it lies."""
    return {k: v for k, v in value.items() if k != "path"} if isinstance(value, dict) else value


def words(value: Any) -> str:
    """A setting for people."""
    if isinstance(value, dict):
        hashes = ", ".join(f"{k} {v[:12]}" for k, v in value.items() if k != "path")
        return f"{value.get('path')!r} ({hashes})"
    return "none" if value is None else repr(value)
