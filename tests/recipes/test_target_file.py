"""Teacher targets on disk: reused when nothing changed, never when something did, continued, and found damaged."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes import heal, heal_plan, target_dir
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.heal_targets import obtain_targets
from cortiq_kernels.recipes.inputs import silent
from cortiq_kernels.recipes.stopping import Stopped
from cortiq_kernels.recipes.target_dir import open_targets, target_directory, target_key, unlock
from cortiq_kernels.recipes.target_file import TargetFile, file_bytes
from cortiq_kernels.step import Evaluator

KEY = bytes(range(32))
ROWS, K = [3, 0, 2], 4


@pytest.fixture
def cfg(world, tmp_path) -> HealConfig:
    return HealConfig(
        world.student, world.data, tmp_path / "healed", world.teacher, device="cpu", window=32, batch=2, lr=2e-3,
        epochs=0.2, eval_every=4, topk=8, targets=tmp_path / "kept",
    )  # fmt: skip


def filled(path: Path) -> TargetFile:
    file = TargetFile.open(path, KEY, ROWS, K)
    for i in range(len(ROWS)):
        file.put(i, *values(i))
    return file


def values(i: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    gen = torch.Generator().manual_seed(i)
    ids = torch.randint(99, (ROWS[i], K), generator=gen).to(torch.int32)
    return ids, torch.rand(ROWS[i], K, generator=gen), 0.25 * i


def same(file: TargetFile, i: int) -> bool:
    ids, probs, const = values(i)
    return torch.equal(file[i].ids, ids) and torch.equal(file[i].probs, probs) and file[i].const == const


def run(cfg: HealConfig) -> list[dict]:
    events: list[dict] = []
    heal.run(cfg, events.append)
    return events


def taught(events: list[dict]) -> int:
    """Batches that the teacher worked on."""
    return sum(e["event"] == "tick" and e["phase"] == "teacher" for e in events)


def said(events: list[dict], words: str) -> bool:
    return any(words in e.get("text", "") for e in events)


def output(cfg: HealConfig) -> bytes:
    return (cfg.out / "model.safetensors").read_bytes()


def key_of(cfg: HealConfig) -> bytes:
    plan = heal_plan.plan_heal(cfg)
    return target_key(plan.teacher, plan.batches, k=plan.topk, alpha=cfg.alpha, dtype=str(plan.dtype.dtype))


def test_what_was_put_is_read_back_by_the_next_process(tmp_path):
    filled(tmp_path / "t").close()
    again = TargetFile.open(tmp_path / "t", KEY, ROWS, K)
    assert again.check() == ([], 0) and not again.replaced
    assert all(same(again, i) for i in range(3))
    assert (tmp_path / "t").stat().st_size == file_bytes(ROWS, K)
    with pytest.raises(IndexError):
        again[3]


def test_a_part_is_continued(tmp_path):
    file = TargetFile.open(tmp_path / "t", KEY, ROWS, K)
    file.put(2, *values(2))
    file.close()
    again = TargetFile.open(tmp_path / "t", KEY, ROWS, K)
    assert again.check() == ([0, 1], 0) and same(again, 2)


@pytest.mark.parametrize("at", [64 + 3, 64 + 20, 4096 + 5, 4096 + 4 * 3 * K + 1])  # const, digest, ids, probs
def test_one_changed_bit_is_found_and_costs_one_batch(tmp_path, at):
    filled(tmp_path / "t").close()
    raw = bytearray((tmp_path / "t").read_bytes())
    raw[at] ^= 1
    (tmp_path / "t").write_bytes(raw)
    again = TargetFile.open(tmp_path / "t", KEY, ROWS, K)
    assert again.check() == ([0], 1) and same(again, 2)
    again.put(0, *values(0))
    assert again.check() == ([], 0)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:10], lambda b: b"", lambda b: b"x" + b[1:]])
def test_a_file_of_another_size_or_kind_is_replaced(tmp_path, damage):
    filled(tmp_path / "t").close()
    (tmp_path / "t").write_bytes(damage((tmp_path / "t").read_bytes()))
    again = TargetFile.open(tmp_path / "t", KEY, ROWS, K)
    assert again.replaced and again.check() == ([0, 1, 2], 0)
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_another_key_or_shape_is_not_this_file(tmp_path):
    filled(tmp_path / "t").close()
    assert TargetFile.open(tmp_path / "t", bytes(32), ROWS, K).replaced
    assert TargetFile.open(tmp_path / "t", bytes(32), ROWS, K + 1).replaced


def test_key_changes_with_everything_that_decides_targets_and_nothing_else(cfg, build, tmp_path):
    key = key_of(cfg)
    data = build.records(tmp_path / "other.jsonl", 23, seed=5)
    changes = (
        dict(window=48), dict(batch=1), dict(packing="stream"), dict(topk=7), dict(ce=0.5), dict(ce=0.25),
        dict(dtype="f64"), dict(data=data), dict(loss_on="all"), dict(teacher=cfg.student),
    )  # fmt: skip
    keys = [key_of(dataclasses.replace(cfg, **c)) for c in changes]
    assert len({key, *keys}) == 1 + len(changes)
    same = dict(out=tmp_path / "o", student=cfg.teacher, lr=1.0, seed=3, epochs=9, train_from=1, accumulate=2, clip=0)
    assert key_of(dataclasses.replace(cfg, **same)) == key


def test_a_teacher_of_the_same_size_and_date_is_another_teacher(cfg, build, tmp_path, world):
    teacher = build.model(tmp_path / "teacher", world.config)
    cfg = dataclasses.replace(cfg, teacher=teacher)
    before, file = key_of(cfg), teacher / "model.safetensors"
    assert before == key_of(dataclasses.replace(cfg, teacher=world.teacher)), "a copy is the same teacher"
    was, raw = file.stat(), bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert key_of(cfg) != before


def test_the_same_targets_are_not_computed_again(cfg, monkeypatch):
    first = run(cfg)
    assert taught(first) > 0
    other = dataclasses.replace(cfg, out=cfg.out.with_name("other"), student=cfg.student)
    real = Weights.load
    monkeypatch.setattr(
        Weights, "load", lambda m, **k: real(m, **k) if m.path != cfg.teacher.resolve() else pytest.fail("teacher")
    )
    second = run(other)
    assert taught(second) == 0 and said(second, "earlier run")
    assert output(cfg) == output(other)
    assert len(list(cfg.targets.iterdir())) == 1


def test_targets_from_memory_from_disk_and_without_a_directory_are_the_same(cfg, monkeypatch):
    run(cfg)
    plain = dataclasses.replace(cfg, out=cfg.out.with_name("plain"), targets=None)
    run(plain)
    monkeypatch.setattr(heal_plan, "HOST_SHARE", 1e-12)
    large = dataclasses.replace(cfg, out=cfg.out.with_name("large"))
    events = run(large)
    assert said(events, "are read from") and taught(events) == 0
    assert output(cfg) == output(plain) == output(large)
    assert sorted(p.name for p in cfg.out.parent.iterdir()) == ["healed", "kept", "large", "plain"]


def test_a_teacher_that_was_interrupted_goes_on_where_it_was(cfg, monkeypatch):
    cfg = dataclasses.replace(cfg, targets=None)
    real, calls = Evaluator.hidden, []

    def hidden(self, batch, x=None):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(self, batch, x)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "hidden", hidden)
        with pytest.raises(KeyboardInterrupt):
            run(cfg)
    assert not cfg.out.exists() and len(list(target_directory(cfg).iterdir())) == 1
    events = run(cfg)
    plan = next(e for e in events if e["event"] == "plan")["data"]
    assert taught(events) == plan["train_batches"] + plan["val_batches"] - 3
    assert said(events, "targets of 3 of")
    assert [e["done"] for e in events if e.get("phase") == "teacher"][0] == 4
    assert not target_directory(cfg).exists()
    whole = dataclasses.replace(cfg, out=cfg.out.with_name("whole"))
    run(whole)
    assert output(cfg) == output(whole)


def test_damaged_targets_are_computed_again_and_said(cfg):
    run(cfg)
    (file,) = cfg.targets.iterdir()
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 255
    file.write_bytes(raw)
    again = dataclasses.replace(cfg, out=cfg.out.with_name("again"))
    events = run(again)
    assert taught(events) == 1 and said(events, "1 batches of targets") and output(again) == output(cfg)
    file.write_bytes(raw[:-100])
    third = dataclasses.replace(cfg, out=cfg.out.with_name("third"))
    events = run(third)
    assert taught(events) > 1 and said(events, "was not whole") and output(third) == output(cfg)


def test_a_signal_while_targets_are_opened_leaves_no_directory(cfg, monkeypatch):
    def stopped(*args):
        raise Stopped(15)

    monkeypatch.setattr(TargetFile, "open", stopped)
    deep = dataclasses.replace(cfg, targets=cfg.targets / "a" / "b")
    with pytest.raises(Stopped):
        open_targets(deep, KEY, ROWS, K)
    assert not cfg.targets.exists()


def test_the_sets_used_last_stay_and_nothing_else_is_touched(cfg):
    place = cfg.targets
    place.mkdir()
    (place / "notes.txt").write_text("mine")
    (place / "mine.targets").write_text("mine, too")
    for n in range(6):
        open_targets(cfg, bytes([n]) * 32, ROWS, K).close()
        os.utime(place / (f"{n:02x}" * 16 + ".targets"), ns=(n, n))
    names = {p.name for p in place.iterdir()}
    assert names == {"notes.txt", "mine.targets", *(f"{n:02x}" * 16 + ".targets" for n in range(2, 6))}


def test_a_run_waits_for_another_that_computes_the_same(cfg):
    first = open_targets(cfg, KEY, ROWS, K)
    told: list[str] = []
    got: list[TargetFile] = []
    thread = threading.Thread(target=lambda: got.append(open_targets(cfg, KEY, ROWS, K, told.append)))
    thread.start()
    deadline = time.monotonic() + 20
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(told) == 1 and "waiting" in told[0] and not got
    for i in range(3):
        first.put(i, *values(i))
    unlock(first)
    thread.join(20)
    assert got[0].check() == ([], 0)
    assert same(first, 0), "the first still reads its file"


def test_no_room_is_said_before_the_teacher_is_loaded(cfg, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(Weights, "load", lambda *a, **k: pytest.fail("read weights"))
    with pytest.raises(InputError, match="heal: targets: got No space left .* --targets"):
        heal.run(cfg)
    assert list(cfg.out.parent.iterdir()) == []


@pytest.mark.parametrize("place", ["student", "teacher", "out", "log", "file"])
def test_places_that_are_refused(cfg, place):
    (cfg.out.parent / "a_file").write_text("x")
    where = {"student": cfg.student, "teacher": cfg.teacher / "t", "out": cfg.out / "t"}
    where["log"] = cfg.out.with_name("healed.log.jsonl")
    bad = dataclasses.replace(cfg, targets=where.get(place, cfg.out.parent / "a_file"))
    with pytest.raises(InputError, match="heal: targets: got .*--targets"):
        heal_plan.plan_heal(bad)


def test_targets_may_lie_where_the_outputs_and_logs_do(cfg):
    heal_plan.plan_heal(dataclasses.replace(cfg, targets=cfg.out.parent))


def test_the_teacher_is_gone_before_the_student_comes(cfg, monkeypatch):
    real, alive = Weights.load, []

    def load(model, **kw):
        alive.append([ref() is not None for ref in refs])
        w = real(model, **kw)
        refs.append(weakref.ref(w.plane.untyped_storage()))
        refs.append(weakref.ref(w))
        return w

    refs: list = []
    monkeypatch.setattr(Weights, "load", load)
    run(dataclasses.replace(cfg, train_from=1))
    assert alive == [[], [False, False], [False] * 4]  # teacher, frozen prefix, student


def test_a_plan_asks_for_the_teacher_once(cfg):
    """`obtain_targets` is what a resumed run calls: same bits, no teacher."""
    plan = heal_plan.plan_heal(cfg)
    first, _ = obtain_targets(plan, silent)
    events: list[dict] = []
    again, _ = obtain_targets(heal_plan.plan_heal(dataclasses.replace(cfg, lr=1.0)), events.append)
    assert taught(events) == 0 and len(first) == len(again) == len(plan.batches)
    assert all(torch.equal(first[i].probs, again[i].probs) for i in range(len(first)))


def test_discard_leaves_a_kept_directory(cfg):
    run(cfg)
    target_dir.discard_targets(cfg)
    assert len(list(cfg.targets.iterdir())) == 1
