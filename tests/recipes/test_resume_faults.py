"""A heal that meets a full disk or a signal at an awkward line."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cortiq_kernels.recipes import checkpoint_dir, heal, heal_loop, resume, saver
from cortiq_kernels.recipes.checkpoint_dir import CheckpointDir
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.stopping import Stopped


@pytest.fixture
def cfg(world, tmp_path) -> HealConfig:
    return HealConfig(
        student=world.student, teacher=world.teacher, data=world.data, out=tmp_path / "healed", device="cpu", window=32,
        batch=2, lr=2e-3, epochs=1.0, eval_every=4, topk=8, checkpoint_every="2",
    )  # fmt: skip


def full(*args) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_room_for_two_checkpoints_and_the_output_is_checked_first(cfg, monkeypatch):
    """Modelled on mlfoundations/open_lm#154."""
    usage = shutil.disk_usage(cfg.out.parent)
    monkeypatch.setattr(resume.shutil, "disk_usage", lambda p: usage._replace(free=500_000))
    with pytest.raises(InputError) as e:
        heal.run(cfg)
    text = str(e.value)
    assert "heal: out: got 0.5 MiB free on" in text and "output" in text and "a checkpoint, of which" in text
    assert "--checkpoint-every off" in text and "\n" not in text
    assert not list(cfg.out.parent.iterdir())
    heal.run(dataclasses.replace(cfg, checkpoint_every="off"))
    monkeypatch.undo()
    plan = heal.plan_heal(dataclasses.replace(cfg, out=cfg.out.with_name("b")))
    done = CheckpointDir(cfg.out.with_name("c"))
    weights = heal.Weights.load(plan.student, dtype=plan.dtype.dtype, train="layers")
    trainer = heal_loop.Trainer(weights, plan.n, cfg.window)
    done.write({"step": 1}, trainer.tensors() | {"best": weights.state()})
    assert resume.checkpoint_bytes(plan) <= done.nbytes() < resume.checkpoint_bytes(plan) + 4096


def test_small_disk(cfg, tmp_path):
    """The same on a real one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs")
    try:
        small = dataclasses.replace(cfg, out=place / "o")
        with pytest.raises(InputError, match="0.6 MiB free on .* at least .* two for a moment"):
            heal.run(small)
        assert not list(place.iterdir())
        heal.run(dataclasses.replace(small, checkpoint_every="off"))
        assert [p.name for p in place.iterdir()] == ["o"]
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_full_disk_under_a_checkpoint_does_not_end_the_run(cfg, monkeypatch):
    """Days of training outlast a disk that is full for an hour: a note, and the checkpoint before stays."""
    calm = dataclasses.replace(cfg, out=cfg.out.with_name("calm"))
    heal.run(calm)
    real, calls, kept = checkpoint_dir._write_tensors, [], []

    def write(path, tensors):
        calls.append(path)
        if len(calls) in (2, 3):
            path.write_bytes(b"half")
            kept.append(CheckpointDir(cfg.out).read()["step"])
            full()
        real(path, tensors)

    monkeypatch.setattr(checkpoint_dir, "_write_tensors", write)
    events: list[dict] = []
    heal.run(cfg, events.append)
    notes = [e["text"] for e in events if e["event"] == "note" and "no checkpoint" in e["text"]]
    assert len(notes) == 2 and "no checkpoint at step 4: No space left on device (it needs" in notes[0]
    assert kept == [2, 2] and len(calls) > 3
    assert files(cfg.out) == files(calm.out)


def test_full_disk_at_the_very_end_keeps_the_training(cfg, monkeypatch):
    """The output does not fit: what was trained is in the checkpoint, and the message says what to do."""
    calm = dataclasses.replace(cfg, out=cfg.out.with_name("calm"))
    heal.run(calm)
    monkeypatch.setattr("cortiq_kernels.model.hf_write.shard.write_tensor", full)
    with pytest.raises(OSError, match=r"writing '.*healed' takes .* MiB are free; .* same command with --resume"):
        heal.run(cfg)
    assert not cfg.out.exists()
    monkeypatch.undo()
    monkeypatch.setattr(heal_loop.Loop, "step", lambda self: pytest.fail("trained again"))
    monkeypatch.setattr(heal, "obtain_targets", lambda *a: pytest.fail("asked the teacher again"))
    report = heal.run(dataclasses.replace(cfg, resume=True))
    assert report.best_step > 0 and files(cfg.out) == files(calm.out)
    assert sorted(p.name for p in cfg.out.parent.iterdir()) == ["calm", "healed"]


def test_killed_after_the_output_and_before_the_checkpoint_goes(cfg, monkeypatch):
    def killed(self):
        raise SystemExit(9)

    monkeypatch.setattr(CheckpointDir, "remove", killed)
    with pytest.raises(SystemExit):
        heal.run(cfg)
    monkeypatch.undo()
    before = files(cfg.out)
    assert CheckpointDir(cfg.out).read()["provenance"] is not None
    with pytest.raises(ValueError, match="existing directory"):
        heal.run(cfg)
    heal.run(dataclasses.replace(cfg, resume=True))
    assert files(cfg.out) == before and not CheckpointDir(cfg.out).path.exists()
    (cfg.out / "cortiq.json").write_text("{}")
    with pytest.raises(ValueError, match="existing directory"):
        heal.run(dataclasses.replace(cfg, resume=True))


def test_stopped_at_any_line_of_the_loop(cfg):
    """SIGTERM before lines all over the training and the saving; each time the resumed run ends with the same bytes."""
    traced = {heal_loop.__file__, saver.__file__, checkpoint_dir.__file__}

    def traced_run(c: HealConfig, stop: int) -> int:
        count = 0

        def trace(frame, event, arg):
            nonlocal count
            if frame.f_code.co_filename not in traced:
                return None
            if event == "line":
                count += 1
                if count == stop:
                    signal.raise_signal(signal.SIGTERM)
            return trace

        sys.settrace(trace)
        try:
            heal.run(c)
        finally:
            sys.settrace(None)
        return count

    calm, again = dataclasses.replace(cfg, out=cfg.out.with_name("calm")), dataclasses.replace(cfg, resume=True)
    lines = traced_run(calm, 0)
    want = files(calm.out)
    begin, stride = lines // 12, max(1, lines // 9)
    for stop in range(begin, lines, stride):
        with pytest.raises(Stopped):
            traced_run(again, stop)
        if not cfg.out.exists() or CheckpointDir(cfg.out).path.exists():
            heal.run(again)
        assert files(cfg.out) == want, f"line event {stop} of {lines}"
        shutil.rmtree(cfg.out)
        assert sorted(p.name for p in cfg.out.parent.iterdir()) in (["calm"], ["calm", "healed.targets"])
