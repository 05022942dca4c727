"""Heal from directories and records to a written directory, in seconds."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from cortiq_kernels.model.geometry import ModelError
from cortiq_kernels.model.hf import open_model
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes import heal, heal_loop, heal_plan
from cortiq_kernels.recipes.errors import InputError, TrainingFailed
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.targets import TrueTokens
from cortiq_kernels.step import Trainer


@pytest.fixture
def cfg(world, tmp_path) -> HealConfig:
    return HealConfig(
        student=world.student,
        teacher=world.teacher,
        data=world.data,
        out=tmp_path / "healed",
        device="cpu",
        window=32,
        batch=2,
        lr=2e-3,
        epochs=3,
        eval_every=4,
        topk=8,
    )


def events_of(cfg: HealConfig):
    events: list[dict] = []
    return heal.run(cfg, events.append), events


def test_loss_falls_and_the_directory_loads(cfg, build):
    report, events = events_of(cfg)
    assert report.loss_name == "KL"
    assert report.loss_best < 0.7 * report.loss_start
    assert report.evaluations[0] == (0, report.loss_start)
    assert report.loss_best == min(loss for _, loss in report.evaluations)
    steps = [e for e in events if e["event"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, report.steps + 1))
    assert [e["step"] for e in events if e["event"] == "eval"] == [0, *range(4, report.steps, 4), report.steps]
    before, after = build.tensors(cfg.student), build.tensors(cfg.out)
    assert before.keys() == after.keys()
    for name, t in before.items():
        changed = not torch.equal(t, after[name])
        assert after[name].dtype == t.dtype and after[name].shape == t.shape
        assert changed == (".layers." in name), name
    cortiq = json.loads((cfg.out / "cortiq.json").read_text())["provenance"]
    assert cortiq["recipe"] == "heal" and cortiq["best_step"] == report.best_step
    assert cortiq["settings"]["lr"] == cfg.lr and cortiq["teacher"] == str(cfg.teacher)
    assert len(cortiq["data_sha256"]) == 64 and cortiq["versions"]["torch"]
    assert (cfg.out / "config.json").read_bytes() == (cfg.student / "config.json").read_bytes()


def test_what_is_written_scores_what_was_reported(cfg):
    """The directory holds the best weights: healing it again starts at the best held-out loss."""
    report, _ = events_of(cfg)
    again = dataclasses.replace(cfg, student=cfg.out, out=cfg.out.with_name("again"), epochs=0.01)
    start = heal.run(again).loss_start
    assert start == pytest.approx(report.loss_best, rel=1e-6)


@pytest.mark.parametrize(("train", "train_from"), [("mlp", 0), ("mlp", 2), ("layers", 1), ("all", 0)])
def test_only_what_trains_changes(cfg, build, train, train_from):
    cfg = dataclasses.replace(cfg, train=train, train_from=train_from, epochs=1)
    report, _ = events_of(cfg)
    assert report.best_step > 0
    before, after = build.tensors(cfg.student), build.tensors(cfg.out)
    for name, t in before.items():
        layer = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else -1
        trains = layer >= train_from and (train != "mlp" or ".mlp." in name) if layer >= 0 else train == "all"
        assert torch.equal(t, after[name]) != trains, name
    g = open_model(cfg.student).geometry
    assert (
        report.trained_parameters
        == sum(t.numel() for n, t in before.items() if not torch.equal(t, after[n]))
        == heal_plan.trained_parameters(g, train, train_from)
    )


def test_cached_prefix_is_exact(cfg, build, monkeypatch):
    cfg = dataclasses.replace(cfg, train_from=1, epochs=1)
    cached, events = events_of(cfg)
    assert any("run once per batch" in e.get("text", "") for e in events)
    assert any(e["event"] == "tick" and e["phase"] == "prefix" for e in events)
    monkeypatch.setattr("cortiq_kernels.recipes.heal_plan.HOST_SHARE", 1e-12)
    plain, events = events_of(dataclasses.replace(cfg, out=cfg.out.with_name("plain")))
    assert any("run in every step" in e.get("text", "") for e in events)
    assert plain.evaluations == cached.evaluations
    a, b = build.tensors(cfg.out), build.tensors(cfg.out.with_name("plain"))
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_accumulated_micro_batches_are_one_big_batch(cfg, build):
    """Weights of rows, not of micro-batches, count; and the last step of a pass takes what is left."""
    cfg = dataclasses.replace(cfg, dtype="f64", clip=0, packing="records")
    seen = {}
    for accumulate, batch in ((2, 1), (1, 2)):
        one = dataclasses.replace(
            cfg, accumulate=accumulate, batch=batch, epochs=0.01, out=cfg.out.with_name(f"a{accumulate}"), lr=1e-3
        )
        plan = heal_plan.plan_heal(one)
        weights = Weights.load(plan.student, dtype=torch.float64, train="layers")
        trainer = Trainer(weights, plan.n, one.window)
        feed = heal_loop.Feed(plan, TrueTokens(plan.batches), None)
        loss = float(trainer.gradients([feed[i] for i in range(accumulate)]))
        seen[accumulate] = loss, weights.trained.grad.clone()
    assert seen[2][0] == pytest.approx(seen[1][0], rel=1e-12)
    torch.testing.assert_close(seen[2][1], seen[1][1], rtol=1e-9, atol=1e-12)


def test_last_partial_group_is_used(cfg):
    plan = heal_plan.plan_heal(dataclasses.replace(cfg, batch=1, accumulate=4, epochs=1))
    assert len(plan.train) % 4, "the case needs a remainder"
    assert plan.steps == -(-len(plan.train) // 4)
    groups = heal_loop.Groups(len(plan.train), plan.cfg.accumulate, plan.cfg.seed)
    first_pass = []
    for _ in range(plan.per_epoch):
        first_pass.append(groups.next())
        groups.advance()
    assert sorted(i for g in first_pass for i in g) == list(range(len(plan.train)))
    assert len(first_pass[-1]) == len(plan.train) % 4


def test_untouched_student_is_a_candidate(cfg, build):
    report, _ = events_of(dataclasses.replace(cfg, lr=5.0, epochs=0.5))
    assert report.best_step == 0 and report.loss_best == report.loss_start
    before, after = build.tensors(cfg.student), build.tensors(cfg.out)
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_nonfinite_step_changes_no_byte_and_is_not_counted(cfg, monkeypatch):
    """A planted inf in the gradient: no bit of masters and moments changes; the next batch follows."""
    real, calls, checked = Trainer.apply, [], []

    def apply(self, rate, **kw):
        t = self.weights.trained
        calls.append(rate)
        if len(calls) != 3:
            return real(self, rate, **kw)
        before = [x.clone() for x in (t.master, t.m, t.v)]
        t.grad[7] = float("inf")
        real(self, rate, **kw)
        checked.append(all(torch.equal(a, b) for a, b in zip(before, (t.master, t.m, t.v), strict=True)))

    monkeypatch.setattr(Trainer, "apply", apply)
    report, events = events_of(dataclasses.replace(cfg, epochs=1))
    assert checked == [True]
    assert report.skipped == 1 and len(calls) == report.steps + 1
    assert calls[2] == calls[3]  # the rate goes by accepted steps
    assert [e["step"] for e in events if e["event"] == "skip"] == [3]


def test_gives_up_after_twenty_skips_in_a_row_and_writes_nothing(cfg, monkeypatch):
    real = Trainer.gradients

    def bad(self, *a, **k):
        loss = real(self, *a, **k)
        self.weights.trained.grad[0] = float("nan")
        return loss

    monkeypatch.setattr(Trainer, "gradients", bad)
    events: list[dict] = []
    with pytest.raises(TrainingFailed, match="20 steps in a row"):
        heal.run(cfg, events.append)
    assert sum(e["event"] == "skip" for e in events) == 20
    assert not cfg.out.exists()


def test_true_tokens_only_without_a_teacher(cfg):
    report, _ = events_of(dataclasses.replace(cfg, ce=1.0, teacher=None))
    assert report.loss_name == "NLL" and report.teacher_seconds == 0
    assert report.loss_best < report.loss_start


def test_mixed_loss_on_a_stream(cfg):
    report, _ = events_of(dataclasses.replace(cfg, ce=0.5, epochs=1, packing="stream"))
    assert report.loss_name == "mixed"
    assert report.loss_best < report.loss_start


def test_genesis_trains_the_last_layers_first(cfg, build):
    report, _ = events_of(dataclasses.replace(cfg, genesis=True, epochs=1))
    assert report.best_step > 0
    before, after = build.tensors(cfg.student), build.tensors(cfg.out)
    changed = {int(n.split("layers.")[1].split(".")[0]) for n in before if not torch.equal(before[n], after[n])}
    assert changed == {2}  # ceil(12/64 * 3) = 1 layer in the first epoch


def test_same_run_same_bytes(cfg):
    other = dataclasses.replace(cfg, out=cfg.out.with_name("other"), epochs=1)
    first = dataclasses.replace(cfg, epochs=1)
    assert heal.run(first).evaluations == heal.run(other).evaluations
    name = "model.safetensors"
    assert (first.out / name).read_bytes() == (other.out / name).read_bytes()
    third = dataclasses.replace(first, out=cfg.out.with_name("third"), seed=1)
    heal.run(third)
    assert (first.out / name).read_bytes() != (third.out / name).read_bytes()


REFUSED = {
    "warm": (dict(warm=0.0), "warm"),
    "no_teacher": (dict(teacher=None), "--teacher"),
    "all_from": (dict(train="all", train_from=1), "train_from"),
    "all_genesis": (dict(train="all", genesis=True), "genesis.*are defined for layers"),
    "clip": (dict(clip=-1.0), "clip: got -1.0; expected at least 0"),
    "train_from": (dict(train_from=3), "0 .. 2"),
    "eval_every": (dict(eval_every=0), "eval_every"),
    "half_on_cpu": (dict(dtype="bf16"), "CPU"),
    "device": (dict(device="tpu"), "cuda:N"),
    "few_windows": (dict(batch=640), "640"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_any_work(cfg, case, monkeypatch):
    change, words = REFUSED[case]
    monkeypatch.setattr(Weights, "load", lambda *a, **k: pytest.fail("read weights"))
    with pytest.raises(ValueError, match=words):
        heal.run(dataclasses.replace(cfg, **change))
    assert list(cfg.out.parent.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(cfg):
    with pytest.raises(ValueError, match="expected a GPU"):
        heal.run(dataclasses.replace(cfg, device="cuda"))


def test_no_val_records_is_an_error(cfg, build, tmp_path):
    data = build.records(tmp_path / "d.jsonl", 23, val=0)
    with pytest.raises(ValueError, match="no val windows"):
        heal.run(dataclasses.replace(cfg, data=data))


def test_other_vocabulary_and_destination(cfg, build, tmp_path):
    other = build.model(tmp_path / "other", build.config("LF", hidden=24, vocab=67))
    with pytest.raises(InputError, match="vocabularies of 67 .* and 23"):
        heal.run(dataclasses.replace(cfg, teacher=other))
    for out in (cfg.student, cfg.teacher):
        with pytest.raises(ModelError):
            heal.run(dataclasses.replace(cfg, out=out))
