"""The teacher's pass of a heal or of masks: targets that are there already are used, the others computed and kept.

    1  name the targets by all that decides them, open their file        target_dir.py
    2  check every batch in it by its digest                             target_file.py
    3  load the teacher for the batches that are missing, if any; every batch is on its way to the disk when the next
       one starts; then drop the teacher
    4  read the file into (pinned) memory if it fits; else batches are read from it as they come

What a resumed run can rely on: with the same teacher, data and settings, `obtain_targets` gives the bits that the
first run had, from its file (OUT.targets, or --targets); only batches that it had not finished are computed. Were the
file deleted, they are computed again: the same bits on the same machine and versions on a CPU, and on a GPU as far as
its attention and GEMMs repeat themselves. Naming them costs one read of the teacher's files.
"""

from __future__ import annotations

import time
from typing import Protocol

from cortiq_kernels import backend
from cortiq_kernels.data.batches import Batch
from cortiq_kernels.model.hf import ModelDir
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes.inputs import Joined, Progress, Ticks
from cortiq_kernels.recipes.target_dir import Asked, give_up, open_targets, target_key, unlock
from cortiq_kernels.recipes.target_file import TargetFile
from cortiq_kernels.recipes.targets import TargetStore, TrueTokens, teacher_targets
from cortiq_kernels.report.results import size
from cortiq_kernels.step import Evaluator

HealTargets = TargetStore | TargetFile | TrueTokens


class _Settings(Asked, Protocol):
    @property
    def window(self) -> int: ...
    @property
    def alpha(self) -> float: ...


class Taught(Protocol):
    """What the plan of a recipe that learns from a teacher says; see `HealPlan`."""

    @property
    def cfg(self) -> _Settings: ...
    @property
    def teacher(self) -> ModelDir | None: ...
    @property
    def batches(self) -> Joined[Batch]: ...
    @property
    def rows(self) -> list[int]: ...
    @property
    def topk(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def device(self) -> backend.DeviceChoice: ...
    @property
    def dtype(self) -> backend.DtypeChoice: ...
    @property
    def target_bytes(self) -> int: ...
    @property
    def target_room(self) -> int: ...


def obtain_targets(plan: Taught, progress: Progress) -> tuple[HealTargets, float]:
    """(targets of `plan.batches`, seconds that it took). The teacher is gone when this returns.

    Events: "tick" with phase "teacher" (only when something is computed), and "note" for what was reused, damaged,
    replaced, or is read from the disk. Raises `InputError` when the disk has no room for them.
    """
    if plan.teacher is None:
        return TrueTokens(plan.batches), 0.0
    began = time.perf_counter()
    batches = plan.batches
    rows = plan.rows
    dtype = backend.dtype_name(plan.dtype.dtype)
    key = target_key(plan.teacher, batches, k=plan.topk, alpha=plan.cfg.alpha, dtype=dtype)
    file = open_targets(plan.cfg, key, rows, plan.topk, lambda text: _note(progress, text))
    try:
        _fill(plan, file, progress)
    except BaseException:  # Ctrl-C included: what is computed stays, an empty file does not
        give_up(file)
        raise
    unlock(file)
    if plan.target_bytes > plan.target_room:
        _note(progress, f"targets ({size(plan.target_bytes)}) are read from {file.path} in every step")
        return file, time.perf_counter() - began
    store = TargetStore(rows, plan.topk, pin=plan.device.device.type == "cuda")
    for i in range(len(rows)):
        ids, probs, const = file[i]
        store.put(i, ids, probs, float(const))
    file.close()
    return store, time.perf_counter() - began


def _fill(plan: Taught, file: TargetFile, progress: Progress) -> None:
    """Check what is in the file, say what was found, and compute the rest."""
    found, n = file.check(), len(file)
    if file.replaced:
        _note(progress, f"{file.path} was not whole: it is replaced, and the targets are computed again")
    if found.damaged:
        _note(progress, f"{found.damaged} batches of targets in {file.path} are damaged: computed again")
    if kept := n - len(found.missing):
        _note(progress, f"targets of {kept} of {n} batches are those of an earlier run ({file.path})")
    if found.missing:
        _teach(plan, file, found.missing, progress)


def _note(progress: Progress, text: str) -> None:
    progress({"event": "note", "text": text})


def _teach(plan: Taught, file: TargetFile, missing: list[int], progress: Progress) -> None:
    """The teacher's pass over the missing batches. Its memory is free when this returns."""
    assert plan.teacher is not None
    device = plan.device.device
    weights = Weights.load(plan.teacher, dtype=plan.dtype.dtype, device=device, train=None)
    ticks = Ticks(progress, "teacher", len(plan.batches))
    teacher_targets(
        Evaluator(weights, plan.n, plan.cfg.window), plan.batches, file, plan.cfg.alpha, only=missing, done=ticks
    )
    file.flush()
    del weights
    backend.release(device)
