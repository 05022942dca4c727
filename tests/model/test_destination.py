"""Where output may go, and that it appears complete or not at all: full disk, kill, other writers."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

from cortiq_kernels.model import ModelError, check_destination, destination, open_model, write_model

NORM = "model.norm.weight"


@pytest.fixture
def src(model, tmp_path):
    return open_model(model().save(tmp_path / "models" / "src", 2))


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_same_place_inside_or_around_the_source(src, tmp_path):
    before = snapshot(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(src.path)
    loop = tmp_path / "dirlink"
    loop.symlink_to(tmp_path / "models")
    cases = [(src.path, "is the source"), (link, "is the source"), (loop / "src", "is the source"),
             (src.path / "out", "is inside the source"), (link / "a" / "b", "is inside the source"),
             (src.path.parent, "contains the source"), (loop, "contains the source")]  # fmt: skip
    for dst, match in cases:
        with pytest.raises(ModelError, match=match):
            check_destination(src.path, dst, 0)
        with pytest.raises(ModelError, match=match):
            write_model(src, dst, replace={NORM: torch.ones(16)}, provenance={})
    with pytest.raises(ModelError, match="is the source"):
        check_destination(link, src.path, 0)
    assert snapshot(tmp_path) == before


def test_an_older_output_is_not_mixed_with(src, tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    for i in range(3):
        (old / f"model-0000{i + 1}-of-00003.safetensors").write_text("old")
    before = snapshot(tmp_path)
    with pytest.raises(ModelError, match=r"existing directory with 3 entries \(model-00001.*new or empty"):
        write_model(src, old, replace={}, provenance={})
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="existing file"):
        check_destination(src.path, tmp_path / "file", 0)
    (tmp_path / "file").unlink()
    assert snapshot(tmp_path) == before


def test_an_empty_directory_and_links_to_new_places_will_do(src, tmp_path):
    (tmp_path / "empty").mkdir()
    write_model(src, tmp_path / "empty", replace={}, provenance={})
    open_model(tmp_path / "empty")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert write_model(src, tmp_path / "link", replace={}, provenance={}).path == tmp_path / "real"
    assert open_model(tmp_path / "link").path == tmp_path / "real"


def test_no_space_is_refused_at_the_start(src, tmp_path, monkeypatch):
    total = src.total_bytes()
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(destination.shutil, "disk_usage", lambda p: usage(1 << 20, 0, 1 << 20))
    check_destination(src.path, tmp_path / "new" / "dst", total)
    with pytest.raises(ModelError, match="got 1.0 MiB free on .*; expected at least 8.0 GiB"):
        check_destination(src.path, tmp_path / "new" / "dst", 8 << 30)
    monkeypatch.setattr(destination.shutil, "disk_usage", lambda p: usage(1 << 20, 0, 1 << 10))
    with pytest.raises(ModelError, match="free"):
        write_model(src, tmp_path / "new" / "dst", replace={}, provenance={})
    assert not (tmp_path / "new").exists()


def test_a_mount_point_and_an_unwritable_parent(src, tmp_path, monkeypatch):
    (tmp_path / "mnt").mkdir()
    monkeypatch.setattr(destination.os.path, "ismount", lambda p: True)
    with pytest.raises(ModelError, match="mount point"):
        check_destination(src.path, tmp_path / "mnt", 0)
    monkeypatch.setattr(destination.os, "access", lambda p, mode: False)
    with pytest.raises(ModelError, match="cannot be written to"):
        check_destination(src.path, tmp_path / "x", 0)


@contextlib.contextmanager
def file_size_limit(n: int):
    """The kernel refuses writes beyond n bytes of a file: a real failing write in the middle of one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failing_write_leaves_nothing(src, tmp_path):
    write_model(src, tmp_path / "earlier", replace={}, provenance={})
    before = snapshot(tmp_path)
    names = {p.name for p in tmp_path.iterdir()}
    for replace in ({}, {n: src.read(n) for n in src.tensors}):
        with file_size_limit(6000), pytest.raises(OSError) as e:
            write_model(src, tmp_path / "deep" / "dst", replace=replace, provenance={})
        assert e.value.errno in (errno.EFBIG, errno.ENOSPC)
        assert snapshot(tmp_path) == before and {p.name for p in tmp_path.iterdir()} == names
    write_model(src, tmp_path / "deep" / "dst", replace={}, provenance={})


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device")])
def test_an_interrupt_leaves_nothing(src, tmp_path, monkeypatch, error):
    calls = []

    def failing(fd):
        calls.append(fd)
        if len(calls) == 3:
            raise error

    monkeypatch.setattr(destination.os, "fsync", failing)
    with pytest.raises(BaseException) as e:  # noqa: B017
        write_model(src, tmp_path / "dst", replace={}, provenance={})
    assert type(e.value) is (error if isinstance(error, type) else type(error))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["models"]


def killed_while_writing(src, dst: Path) -> None:
    """Fork a process that is killed (SIGKILL) in the middle of write_model."""
    pid = os.fork()
    if pid == 0:
        count = []

        def fsync(fd):
            count.append(fd)
            if len(count) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        destination.os.fsync = fsync
        try:
            write_model(src, dst, replace={}, provenance={})
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_a_kill_leaves_no_half_output_and_the_next_write_cleans_up(src, tmp_path):
    dst = tmp_path / "dst"
    killed_while_writing(src, dst)
    partial = destination.partial_name(dst)
    assert not dst.exists() and any(partial.iterdir())
    (partial / "stale.safetensors").write_text("stale")
    (partial / "folder").mkdir()
    write_model(src, dst, replace={}, provenance={})
    assert not partial.exists() and "stale.safetensors" not in {p.name for p in dst.iterdir()}
    open_model(dst)


def test_two_writers_of_one_place(src, tmp_path):
    dst = tmp_path / "dst"
    with destination.appearing(dst) as partial:
        (partial / "a").write_text("a")
        with pytest.raises(ModelError, match="another process is writing"):
            write_model(src, dst, replace={}, provenance={})
        assert (partial / "a").read_text() == "a"
    assert snapshot(dst) == {"a": b"a"}


def test_a_source_that_shrinks_meanwhile(src, tmp_path):
    file = sorted(src.path.glob("*.safetensors"))[0]
    os.truncate(file, file.stat().st_size - 64)
    name = next(n for n, t in src.tensors.items() if t.file == file.name)
    with pytest.raises(ModelError, match="changed since it was opened"):
        write_model(src, tmp_path / "dst", replace={name: torch.zeros(src.tensors[name].shape)}, provenance={})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["models"]
