"""OUT.resume: a checkpoint is there whole, whatever happens to the writing of the next one."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cortiq_kernels.recipes import checkpoint_dir
from cortiq_kernels.recipes.checkpoint import Best
from cortiq_kernels.recipes.checkpoint_dir import CheckpointDir
from cortiq_kernels.recipes.checkpoint_place import last_step

OLD = {"master": torch.arange(5.0), "m": torch.zeros(5, dtype=torch.float64)}
NEW = {"master": -torch.arange(7.0), "best": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, 3.0, 1.0, 2.0])}


def held(folder: CheckpointDir) -> tuple[int, dict[str, torch.Tensor]]:
    state = folder.read()
    assert state is not None
    return state["step"], dict(folder.tensors(state).items())


def is_old_or_new(folder: CheckpointDir) -> str:
    """Which checkpoint is there; every bit of it is checked."""
    step, tensors = held(folder)
    want = {1: OLD, 2: NEW}[step]
    assert tensors.keys() == want.keys()
    for name, t in want.items():
        assert tensors[name].dtype == t.dtype
        assert torch.equal(tensors[name].view(torch.uint8), t.view(torch.uint8)), name
    return {1: "old", 2: "new"}[step]


def at_line(n: int, act: Callable[[], None]) -> Callable[[], int]:
    """Trace this thread: at the n-th line that runs in checkpoint_dir.py, `act`. Returns how many ran so far."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if frame.f_code.co_filename != checkpoint_dir.__file__:
            return None
        if event == "line":
            count += 1
            if count == n:
                act()
        return trace

    sys.settrace(trace)
    return lambda: count


def two(tmp_path: Path) -> CheckpointDir:
    folder = CheckpointDir(tmp_path / "o")
    folder.write({"step": 1}, OLD)
    return folder


def all_lines(tmp_path: Path) -> int:
    lines = at_line(0, lambda: None)
    try:
        two(tmp_path / "count").write({"step": 2}, NEW)
    finally:
        sys.settrace(None)
    return lines()


def test_killed_at_any_line(tmp_path):
    """kill -9 before every line of the writing: the old checkpoint or the new one, and the next write cleans up."""
    n, seen = all_lines(tmp_path), []
    assert n > 40
    for i in range(1, n + 1):
        place = tmp_path / str(i)
        folder = two(place)
        pid = os.fork()
        if pid == 0:
            at_line(i, lambda: os._exit(9))
            try:
                folder.write({"step": 2}, NEW)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        seen.append(is_old_or_new(folder))
        folder.write({"step": 2}, NEW)
        assert is_old_or_new(folder) == "new" and len(list(folder.path.iterdir())) == 2, i
        folder.remove()
        assert not folder.path.exists()
    assert {"old", "new"} == set(seen)


def test_interrupted_at_any_line(tmp_path):
    """The same for an exception (Ctrl-C): no half-written file stays either."""

    def stop() -> None:
        raise KeyboardInterrupt

    for i in range(1, all_lines(tmp_path) + 1):
        folder = two(tmp_path / str(i))
        at_line(i, stop)
        try:
            folder.write({"step": 2}, NEW)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        is_old_or_new(folder)
        folder.write({"step": 2}, NEW)
        assert len(list(folder.path.iterdir())) == 2, i


@pytest.mark.parametrize("call", ["fsync", "replace", "listdir"])
def test_full_disk_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch, call):
    folder = two(tmp_path)
    before = {p.name: p.read_bytes() for p in folder.path.iterdir()}
    real, calls = getattr(os, call), []

    def full(*args):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    if call == "listdir":  # while the tensors are written
        monkeypatch.setattr(checkpoint_dir, "_write_tensors", lambda p, t: (p.write_bytes(b"ha"), full(), full()))
    else:
        calls.extend([1] if call == "replace" else [])
        monkeypatch.setattr(checkpoint_dir.os, call, full)
    with pytest.raises(OSError, match="No space left"):
        folder.write({"step": 2}, NEW)
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in folder.path.iterdir()} == before


def test_first_write_that_fails_leaves_no_directory(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_dir.os, "replace", full)
    folder = CheckpointDir(tmp_path / "o")
    with pytest.raises(OSError, match="No space left"):
        folder.write({"step": 1}, OLD)
    assert not list(tmp_path.iterdir())
    assert folder.read() is None and last_step(tmp_path / "o") is None


def test_files_of_others_are_left_alone(tmp_path):
    folder = two(tmp_path)
    (folder.path / "notes.txt").write_text("mine")
    folder.remove()
    assert [p.name for p in folder.path.iterdir()] == ["notes.txt"]
    assert folder.read() is None and folder.nbytes() == 0


def test_state_without_tensors(tmp_path):
    folder = two(tmp_path)
    folder.write({"step": 3}, {})
    assert held(folder) == (3, {}) and [p.name for p in folder.path.iterdir()] == ["state.json"]
    assert last_step(tmp_path / "o") == 3


def test_best_goes_on():
    class Fake:
        value = torch.zeros(3)

        def state(self, out=None):
            return self.value.clone() if out is None else out.copy_(self.value)

    best = Best.kept(4, 0.5, torch.ones(3))
    assert not best.offer(5, 0.5, Fake()) and (best.step, best.loss) == (4, 0.5)
    assert torch.equal(best.state, torch.ones(3))
    assert best.offer(6, 0.25, Fake()) and torch.equal(best.state, torch.zeros(3))
