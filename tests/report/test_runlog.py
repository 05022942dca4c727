"""A run log whose disk fills up: it ends no run, and every line is there once there is room again."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from directories import cortiq, records, tensors_of, write_dir
from report_world import CONFIG, TRAIN, fold

from cortiq_kernels.report.runlog import RunLog, read_log


class Disk:
    """A file on a disk with room for `room` bytes more."""

    def __init__(self, file: Any, room: int):
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        n = self.file.write(data[: self.room])
        self.room -= n
        return n

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def note(n: int) -> dict[str, Any]:
    return {"event": "note", "text": f"{n} ü"}


@pytest.mark.parametrize("room", [0, 1, 50, 200])
def test_lines_wait_for_room(tmp_path, room):
    path = tmp_path / "r.jsonl"
    with RunLog(path, {"recipe": "heal"}) as log:
        log({"event": "plan"})
        log._file = disk = Disk(log._file, room)
        for n in range(6):
            log(note(n))
            log({"event": "checkpoint"})
        assert len(read_log(path)) < 8
        disk.room = 10**6
        log(note(6))
    assert [e.get("text") for e in read_log(path)] == [None, None, *(f"{n} ü" for n in range(7))] and log.lost == 0


def test_lines_that_never_found_room_are_counted(tmp_path):
    path = tmp_path / "r.jsonl"
    with pytest.raises(ZeroDivisionError), RunLog(path, {"recipe": "heal"}) as log:
        log({"event": "plan"})
        log._file = Disk(log._file, 10)
        log(note(0))
        raise ZeroDivisionError
    assert len(read_log(path)) == 2 and log.lost == 2  # the note and the error


def test_other_errors_end_the_run(tmp_path):
    with pytest.raises(OSError, match="Input/output"), RunLog(tmp_path / "r.jsonl") as log:
        log({"event": "plan"})
        disk = log._file = Disk(log._file, 0)

        def broken(data: bytes) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        disk.write = broken
        log(note(0))


def test_a_log_that_cannot_begin_is_refused_by_name(tmp_path, monkeypatch):
    model = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    data = records(tmp_path / "d.jsonl", TRAIN)
    done = cortiq(*fold(model, data, tmp_path / "o", "--log", "/dev/full", "--quiet"))
    assert done.status == 2 and "/dev/full: got 'No space left on device'" in done.err
    real = RunLog._open
    monkeypatch.setattr(RunLog, "_open", lambda self: Disk(real(self), 10))
    monkeypatch.setattr(RunLog, "_regular", staticmethod(lambda file: False))
    path = Path(tmp_path / "new.jsonl")
    done = cortiq(*fold(model, data, tmp_path / "o", "--log", path, "--quiet"))
    assert done.status == 2 and str(path) in done.err and not path.exists() and not (tmp_path / "o").exists()


def test_a_run_outlasts_a_full_disk_and_says_what_its_log_lacks(tmp_path, monkeypatch):
    model = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    data = records(tmp_path / "d.jsonl", TRAIN)
    real = RunLog._begin

    def begin(self):
        real(self)
        self._file = Disk(self._file, 0)

    monkeypatch.setattr(RunLog, "_begin", begin)
    done = cortiq(*fold(model, data, tmp_path / "o"))
    assert done.status == 0 and (tmp_path / "o" / "config.json").exists()
    assert "lines of" in done.err and "are missing: its disk is full" in done.err
