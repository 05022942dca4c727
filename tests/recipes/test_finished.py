"""A heal that is started again when it is over, and what a kill at its very end leaves."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from directories import cortiq, snapshot

from cortiq_kernels import backend
from cortiq_kernels.recipes import heal, heal_plan, target_dir
from cortiq_kernels.recipes.checkpoint_dir import CheckpointDir
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.stopping import Stopped
from cortiq_kernels.report.runlog import read_log


@pytest.fixture
def cfg(world, tmp_path) -> HealConfig:
    return HealConfig(
        student=world.student, teacher=world.teacher, data=world.data, out=tmp_path / "healed", device="cpu", window=32,
        batch=2, lr=2e-3, epochs=0.5, eval_every=4, topk=8, checkpoint_every="2",
    )  # fmt: skip


def killed(*args, **more) -> None:
    raise SystemExit(9)


def flags(cfg: HealConfig, *more: str) -> list[str]:
    names = ("student", "teacher", "data", "out", "device", "window", "batch", "lr", "epochs", "eval_every", "topk",
             "checkpoint_every")  # fmt: skip
    return ["heal", *(w for n in names for w in ("--" + n.replace("_", "-"), str(getattr(cfg, n)))), *more]


def test_a_finished_run_is_done_when_it_is_resumed(cfg, tmp_path):
    first = heal.run(cfg)
    again = dataclasses.replace(cfg, resume=True, checkpoint_every="off", targets=tmp_path / "kept")
    shutil.copytree(cfg.student, tmp_path / "moved")  # by content, as for a checkpoint
    moved = dataclasses.replace(again, student=tmp_path / "moved")
    before = snapshot(tmp_path)
    for c in (again, moved):
        events: list[dict] = []
        report = heal.run(c, events.append)
        assert report.already_done and not first.already_done and snapshot(tmp_path) == before
        assert (report.loss_best, report.best_step, report.evaluations) == (
            first.loss_best, first.best_step, first.evaluations)  # fmt: skip
        assert [e["event"] for e in events] == ["resume"] and "nothing to resume: " in events[0]["text"]
    assert "nothing is left to do" in heal_plan.plan_heal(again).describe()["checkpoint"]


def test_another_output_is_refused(cfg, world, tmp_path):
    heal.run(cfg)
    again = dataclasses.replace(cfg, resume=True)
    data = tmp_path / "other.jsonl"
    data.write_text(world.data.read_text().partition("\n")[2])
    before = snapshot(tmp_path)
    for name, change in {
        "seed": dict(seed=3), "ce": dict(ce=0.5), "dtype": dict(dtype="f64"), "data": dict(data=data),
        "student": dict(student=world.teacher), "teacher": dict(teacher=None, ce=1.0),
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=rf"heal: ({name}|ce): got .*, as in the finished output '.*healed'"):
            heal.run(dataclasses.replace(again, **change))
    with pytest.raises(ValueError, match="existing directory"):
        heal.run(cfg)
    assert snapshot(tmp_path) == before
    made = json.loads((cfg.out / "cortiq.json").read_text())
    for damage in ({"recipe": "fold"}, {"inputs": None}, {"settings": 3}):
        text = json.dumps({**made, "provenance": made["provenance"] | damage})
        (cfg.out / "cortiq.json").write_text(text)
        with pytest.raises(ValueError, match=r"existing directory|as in the finished output"):
            heal.run(again)


def test_a_scheduler_gets_status_0_and_the_log_stays(cfg, tmp_path):
    assert cortiq(*flags(cfg, "--resume")).status == 0
    before = snapshot(tmp_path)
    done = cortiq(*flags(cfg, "--resume"))
    assert done.status == 0 and done.out.startswith("already done: ") and "nothing to resume: " in done.err
    assert cortiq(*flags(cfg, "--resume", "--json", "--quiet")).json["already_done"] is True
    assert cortiq(*flags(cfg, "--resume", "--dry-run")).status == 0
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("where", [(CheckpointDir, "_clean"), (heal, "discard_targets"), (target_dir, "_forget")])
@pytest.mark.parametrize("resume", [True, False])
def test_a_kill_in_the_last_cleanup_leaves_nothing_for_good(cfg, tmp_path, monkeypatch, where, resume):
    """The checkpoint's tensors without a state.json, or the targets: the next run to the same place removes them."""
    real = CheckpointDir.remove

    def remove(self):
        monkeypatch.setattr(*where, killed)
        real(self)

    monkeypatch.setattr(CheckpointDir, "remove", remove)
    with pytest.raises(SystemExit):
        heal.run(cfg)
    monkeypatch.undo()
    beside = {p.name for p in tmp_path.iterdir()}
    assert beside & {"healed.resume", "healed.targets"} and CheckpointDir(cfg.out).read() is None
    if not resume:
        shutil.rmtree(cfg.out)
    seen: list[bool] = []
    heal.run(dataclasses.replace(cfg, resume=resume), lambda e: seen.append(CheckpointDir(cfg.out).path.exists()))
    assert resume or not seen[0]  # not only at the end of a run that may take days, or fail
    assert [p.name for p in tmp_path.iterdir()] == ["healed"]


def test_sweep_spares_a_checkpoint_and_what_is_not_ours(tmp_path):
    folder = CheckpointDir(tmp_path / "o")
    folder.sweep()
    folder.write({"step": 1}, {})
    (folder.path / "state-7.safetensors").write_bytes(b"")
    (folder.path / "mine").write_bytes(b"")
    folder.sweep()
    assert folder.read() is not None
    (folder.path / "state.json").unlink()
    folder.sweep()
    assert [p.name for p in folder.path.iterdir()] == ["mine"]


def test_other_versions_are_said(cfg, tmp_path, monkeypatch):
    """Going on with another torch changes bits: the log of the run says so."""
    from cortiq_kernels.step import Trainer

    real, calls = Trainer.apply, []

    def apply(self, *args, **more):
        calls.append(1)
        if len(calls) == 3:
            raise Stopped(15)
        real(self, *args, **more)

    monkeypatch.setattr(Trainer, "apply", apply)
    assert cortiq(*flags(cfg)).status == 143
    now = backend.versions()
    monkeypatch.setattr(backend, "versions", lambda: now | {"torch": "9.9"})
    done = cortiq(*flags(cfg, "--resume", "--json"))
    text = f"resumed with torch 9.9, where it was {now['torch']}: results differ by rounding"
    assert text in done.json["notes"] and text in done.err
    events = read_log(Path(f"{cfg.out}.log.jsonl"))
    assert [e["text"] for e in events if e["event"] == "note"].count(text) == 1
    assert [e["event"] for e in events].count("start") == 1
