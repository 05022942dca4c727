"""A heal that was stopped and resumed is the heal that was not: every byte of the output, every line of the log."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import stopped as stopped_at
import torch
from stopped import files, lines, same, spoil

from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes import heal, heal_loop, heal_plan
from cortiq_kernels.recipes.checkpoint_dir import CheckpointDir
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.stopping import Stopped
from cortiq_kernels.report.runlog import RunLog, read_log
from cortiq_kernels.step import Trainer


@pytest.fixture
def cfg(world, tmp_path) -> HealConfig:
    return HealConfig(
        student=world.student, teacher=world.teacher, data=world.data, out=tmp_path / "healed", device="cpu", window=32,
        batch=2, lr=2e-3, epochs=1.5, eval_every=3, topk=8,
    )  # fmt: skip


go = functools.partial(stopped_at.go, heal)


CASES = {
    "plain": {},
    "accumulated, last group short": dict(batch=1, accumulate=3, weight_decay=0.1),
    "genesis": dict(genesis=True),
    "prefix": dict(train_from=1, epochs=0.8),
    "mixed loss of a stream, clip off": dict(ce=0.4, packing="stream", clip=0.0),
    "true tokens, all weights": dict(ce=1.0, train="all", teacher=None),
    "f64 mlp": dict(dtype="f64", train="mlp", epochs=0.8),
    "worse and worse": dict(lr=3.0, epochs=0.5),
}


@pytest.mark.parametrize("case", CASES)
def test_stopped_and_resumed_is_the_run_that_was_not(cfg, case):
    cfg = dataclasses.replace(cfg, **CASES[case])
    calm, again = dataclasses.replace(cfg, out=cfg.out.with_name("calm")), dataclasses.replace(cfg, resume=True)
    events = go(calm)
    total = max(e["step"] for e in events if e["event"] == "step")
    stops = [("step", 2), ("eval", 3), ("eval", total)]
    for stop_at in stops:
        with pytest.raises(Stopped):
            go(again, stop_at)
        assert CheckpointDir(cfg.out).read()["step"] == stop_at[1]
    assert [e["step"] for e in go(again) if e["event"] == "step"] == []  # only the writing was left
    same(calm, again)


def test_order_of_the_second_pass_goes_on(cfg, monkeypatch):
    """Modelled on modelscope/ms-swift#10050: stopped inside pass 2 of 8 batches, the resumed run must not replay the
    first pass's order, nor start the second one anew.
    """
    fed: list[int] = []
    real = heal_loop.Feed.__getitem__
    monkeypatch.setattr(heal_loop.Feed, "__getitem__", lambda self, i: (fed.append(i), real(self, i))[1])
    cfg = dataclasses.replace(cfg, epochs=3, eval_every=1000)
    n = len(heal_plan.plan_heal(cfg).train)
    assert n >= 8
    calm, again = dataclasses.replace(cfg, out=cfg.out.with_name("calm")), dataclasses.replace(cfg, resume=True)
    go(calm)
    order = [i for i in fed if i < n]
    first, second = order[:n], order[n : 2 * n]
    assert sorted(first) == sorted(second) == list(range(n)) and first != second
    fed.clear()
    with pytest.raises(Stopped):
        go(again, ("step", n + 3))
    go(again)
    assert [i for i in fed if i < n] == order
    same(calm, again)


def test_f32_state_and_f16_scale_go_on(world):
    """Modelled on TensorAuto/OpenTau#184: masters and moments are bitwise what they were, never rounded to 16 bit, and
    the loss scale and the counters of skipped steps are kept.
    """
    from cortiq_kernels.model.hf import open_model

    model = open_model(world.student)

    def trainer() -> Trainer:
        weights = Weights.load(model, dtype=torch.float16, train="layers")
        return Trainer(weights, 32, 32, loss_scale=4096.0)

    def step(t: Trainer, seed: int, bad: bool = False) -> None:
        grad = t.weights.trained.grad
        grad.copy_(torch.randn(grad.shape, generator=torch.Generator().manual_seed(seed)))
        if bad:
            grad[3] = float("nan")
        t.apply(1e-3)

    calm = trainer()
    for seed, bad in ((1, False), (2, True), (3, False), (4, True)):
        step(calm, seed, bad)
    assert calm.counters() == {"step": 2, "skipped": 2, "in_row": 1, "scale": 1024.0}
    folder = CheckpointDir(world.student.parent / "f16")
    folder.write({"counters": calm.counters()}, calm.tensors())
    state = folder.read()
    other = trainer()
    other.restore(folder.tensors(state), state["counters"])
    folder.remove()
    for _ in range(2):
        for name, t in calm.tensors().items():
            assert t.dtype == torch.float32 and torch.equal(t, other.tensors()[name]), name
        assert not torch.equal(calm.tensors()["v"], calm.tensors()["v"].half().float())
        assert torch.equal(calm.weights.plane, other.weights.plane)
        assert calm.counters() == other.counters()
        step(calm, 5)
        step(other, 5)
    with pytest.raises(ValueError, match="expected"):
        other.restore({**calm.tensors(), "m": calm.tensors()["m"].half()}, calm.counters())


def test_skipped_steps_go_on(cfg, monkeypatch):
    """Counters, batches and the log, when the stop comes right after a skipped step."""
    seen = spoil(monkeypatch, Trainer, lambda trainer: trainer.weights.trained.grad)
    calm, again = dataclasses.replace(cfg, out=cfg.out.with_name("calm")), dataclasses.replace(cfg, resume=True)
    go(calm)
    seen.clear()
    with pytest.raises(Stopped):
        go(again, ("skip", 3))
    assert CheckpointDir(cfg.out).read()["counters"]["in_row"] == 1
    go(again)
    same(calm, again)
    assert [e["event"] for e in lines(again)].count("skip") == 2


def stopped(cfg: HealConfig, step: int = 2) -> Path:
    with pytest.raises(Stopped):
        go(cfg, ("step", step))
    return CheckpointDir(cfg.out).path


def test_checkpoint_without_resume_is_refused(cfg):
    place = stopped(cfg)
    with pytest.raises(InputError, match=r"unfinished run \(step 2 of .*Add --resume .*delete that directory"):
        heal.run(cfg)
    assert "goes on after step 2" in heal_plan.plan_heal(dataclasses.replace(cfg, resume=True)).describe()["checkpoint"]
    for p in place.iterdir():
        p.unlink()
    heal.run(cfg)


def test_resume_without_a_checkpoint_starts_and_says_so(cfg):
    events = go(dataclasses.replace(cfg, resume=True))
    assert events[0]["event"] == "resume" and "starting from the beginning" in events[0]["text"]
    assert lines(cfg)[0]["event"] == "eval"


OTHER = {
    "lr": (dict(lr=1e-3), "heal: lr: got 0.001; expected 0.002, as in the checkpoint"),
    "epochs": (dict(epochs=2.0), "heal: epochs: got 2.0; expected 1.5"),
    "seed": (dict(seed=4), "heal: seed: got 4; expected 0"),
    "dtype": (dict(dtype="f64"), "heal: dtype: got 'f64'; expected 'f32'"),
    "accumulate": (dict(accumulate=2), "heal: accumulate: got 2; expected 1"),
    "deterministic": (dict(deterministic=True), "heal: deterministic: got True; expected False"),
    "teacher": (dict(teacher="student"), "heal: teacher: got '.*student' (.*); expected '.*teacher'"),
    "student": (dict(student="teacher"), "heal: student: got '.*teacher' (.*); expected '.*student'"),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_setting_is_refused_by_name(cfg, name):
    change, words = OTHER[name]
    place = stopped(cfg)
    before = files(place)
    change = {k: getattr(cfg, v) if v in ("student", "teacher") else v for k, v in change.items()}
    with pytest.raises(InputError, match=words) as e:
        heal.run(dataclasses.replace(cfg, resume=True, **change))
    assert "\n" not in str(e.value)
    assert files(place) == before and not cfg.out.exists()


def test_other_data_is_refused_and_a_copy_is_not(cfg, build, tmp_path):
    calm = dataclasses.replace(cfg, out=cfg.out.with_name("calm"))
    go(calm)
    place = stopped(cfg)
    other = build.records(tmp_path / "other.jsonl", 23, seed=5)
    with pytest.raises(InputError, match=r"heal: data: got '.*other.jsonl' \(sha256 \w+.*; expected '.*data.jsonl' \("):
        heal.run(dataclasses.replace(cfg, resume=True, data=other))
    assert place.exists()
    copied = tmp_path / "copy.jsonl"
    copied.write_bytes(cfg.data.read_bytes())
    again = dataclasses.replace(cfg, resume=True, data=copied, checkpoint_every="1", log=tmp_path / "elsewhere")
    go(again)
    weights = "model.safetensors"
    assert files(calm.out)[weights] == files(cfg.out)[weights]


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 99, "file": null}', '{"format": 1, "file": "../x"}',
                                  '{"format": 1, "file": "state-9.safetensors"}'])  # fmt: skip
def test_damaged_checkpoint_is_refused(cfg, text):
    place = stopped(cfg)
    (place / "state.json").write_text(text)
    with pytest.raises(InputError, match="Delete that directory to start"):
        heal.run(dataclasses.replace(cfg, resume=True))


def test_truncated_tensors_are_refused(cfg):
    place = stopped(cfg)
    file = next(place.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match="tensors that cannot be read .*truncated"):
        heal.run(dataclasses.replace(cfg, resume=True))


def test_new_log_gets_everything(cfg):
    """A resumed run with another log: its file starts with the plan, and has the steps from there on."""
    stopped(cfg)
    log = cfg.out.with_name("healed.log.jsonl")
    log.rename(log.with_name("kept"))
    go(dataclasses.replace(cfg, resume=True))
    events = read_log(log)
    assert [e["event"] for e in events[:2]] == ["start", "plan"]
    assert min(e["step"] for e in events if e["event"] == "step") == 3


def test_lines_after_the_checkpoint_are_cut_off(cfg):
    """Killed two steps after the last checkpoint: those steps are done again, and are in the log once."""
    cfg = dataclasses.replace(cfg, checkpoint_every="2")
    calm, again = dataclasses.replace(cfg, out=cfg.out.with_name("calm")), dataclasses.replace(cfg, resume=True)
    go(calm)

    class Killed(BaseException):
        pass

    def kill(event: dict) -> None:
        log(event)
        if (event["event"], event.get("step")) == ("step", 4):
            raise Killed

    with pytest.raises(Killed), RunLog(cfg.out.with_name("healed.log.jsonl"), {"recipe": "heal"}) as log:
        heal.run(again, kill)
    assert CheckpointDir(cfg.out).read()["step"] == 2
    with open(log.path, "a") as f:
        f.write('{"event": "st')  # and a line that the kill cut off
    go(again)
    same(calm, again)


def test_half_a_step_is_never_saved(cfg, monkeypatch):
    """A program's own handler may raise in the middle of an update, which no shield holds back."""
    cfg = dataclasses.replace(cfg, checkpoint_every="1")
    calm, again = dataclasses.replace(cfg, out=cfg.out.with_name("calm")), dataclasses.replace(cfg, resume=True)
    go(calm)
    real, calls = Trainer.apply, []

    def apply(self, rate, **kw):
        calls.append(rate)
        real(self, rate, **kw)
        if len(calls) == 3:
            self.weights.trained.m[:9] = 7.0
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "apply", apply)
    with pytest.raises(KeyboardInterrupt):
        go(again)
    assert CheckpointDir(cfg.out).read()["step"] == 2
    go(again)
    same(calm, again)


def test_rounded_prefix_stays_rounded(cfg, monkeypatch):
    """What is free decides how the frozen layers' output is kept; a resumed run keeps it as before."""
    cfg = dataclasses.replace(cfg, train_from=1, epochs=0.8)
    plan = heal_plan.plan_heal(cfg)
    need = plan.prefix.nbytes

    def host(share: float) -> None:
        monkeypatch.setattr("cortiq_kernels.recipes.heal_plan.backend.host_free_bytes", lambda: int(share * need / 0.3))

    calm, again = dataclasses.replace(cfg, out=cfg.out.with_name("calm")), dataclasses.replace(cfg, resume=True)
    for first, then in ((0.7, 100.0), (100.0, 0.7)):
        monkeypatch.setattr("cortiq_kernels.backend.free_bytes", lambda device: 1 << 40)
        host(first)
        go(calm)
        stopped(again)
        host(then)
        go(again)
        same(calm, again)
        for c in (calm, again):
            for p in c.out.iterdir():
                p.unlink()


def test_no_checkpoints_when_they_are_off(cfg):
    off = dataclasses.replace(cfg, checkpoint_every="off")
    with pytest.raises(Stopped):
        go(off, ("step", 2))
    assert not CheckpointDir(cfg.out).path.exists()
    go(off)


def test_state_is_json_for_people(cfg):
    place = stopped(cfg)
    state = json.loads((place / "state.json").read_text())
    assert (state["step"], state["identity"]["lr"], state["best"]["step"]) == (2, cfg.lr, 0)
    assert sorted(p.suffix for p in place.iterdir()) == [".json", ".safetensors"]
