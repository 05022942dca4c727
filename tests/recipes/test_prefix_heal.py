"""A heal with frozen layers: kept, kept rounded, or run in every step, it trains what the whole model trains."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cortiq_kernels.model.hf import create_model, open_model
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes import heal, heal_plan
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.heal_targets import obtain_targets
from cortiq_kernels.recipes.inputs import silent
from cortiq_kernels.recipes.prefix import PrefixCache, run_prefix
from cortiq_kernels.step import Evaluator, Micro, Trainer


@pytest.fixture
def cfg(world, tmp_path) -> HealConfig:
    return HealConfig(
        world.student, world.data, tmp_path / "healed", ce=1.0, device="cpu", window=32, batch=2, lr=2e-3, epochs=0.7,
        eval_every=4, train_from=1,
    )  # fmt: skip


def run(cfg: HealConfig, name: str, monkeypatch, share: float | None = None):
    """(report, bytes of the weights, events, first layer that the student held)."""
    cfg = dataclasses.replace(cfg, out=cfg.out.with_name(name))
    held, real, events = [], Weights.load.__func__, []

    def load(cls, model, **kw):
        w = real(cls, model, **kw)
        held.append((w.first_layer, "layers.0.down" in w, "embed" in w))
        return w

    with monkeypatch.context() as patch:
        patch.setattr(Weights, "load", classmethod(load))
        if share is not None:
            patch.setattr(heal_plan, "HOST_SHARE", share)
        report = heal.run(cfg, events.append)
    return report, (cfg.out / "model.safetensors").read_bytes(), events, held[-1]


def share_for(cfg: HealConfig, fraction: float, monkeypatch) -> float:
    """HOST_SHARE that allows `fraction` of what the cache takes in float32; free memory stands still meanwhile."""
    monkeypatch.setattr(heal_plan.backend, "host_free_bytes", lambda: 1 << 33)
    return fraction * heal_plan.plan_heal(cfg).prefix.nbytes / (1 << 33) * (1 + 1e-9)


@pytest.mark.parametrize("train", ["layers", "mlp"])
@pytest.mark.parametrize("genesis", [False, True])
def test_kept_and_not_kept_give_the_same_bits(cfg, monkeypatch, train, genesis):
    cfg = dataclasses.replace(cfg, train=train, genesis=genesis)
    kept, kept_bytes, events, held = run(cfg, "kept", monkeypatch)
    assert held == (1, False, True), "layer 0 is not held; the embedding is, as the tied head"
    assert any("run once per batch, kept in float32" in e.get("text", "") for e in events)
    plain, plain_bytes, events, held = run(cfg, "plain", monkeypatch, share=1e-12)
    assert held == (0, True, True)
    said = [e["text"] for e in events if "run in every step" in e.get("text", "")]
    assert len(said) == 1 and "does not fit" in said[0] and " allowed" in said[0]
    assert not any(e.get("phase") == "prefix" for e in events)
    assert kept.evaluations == plain.evaluations and kept_bytes == plain_bytes
    assert kept.best_step > 0


def test_half_of_the_room_rounds_the_stream_and_trains_all_the_same(cfg, monkeypatch):
    share = share_for(cfg, 0.5, monkeypatch)
    exact, _, _, _ = run(cfg, "exact", monkeypatch)
    half, _, events, held = run(cfg, "half", monkeypatch, share=share)
    assert held[0] == 1 and any("kept in 16 bit, rounded" in e.get("text", "") for e in events)
    for (_, a), (_, b) in zip(exact.evaluations, half.evaluations, strict=True):
        assert b == pytest.approx(a, rel=2e-3) and a != b
    _, _, events, held = run(cfg, "less", monkeypatch, share=share * 0.99)
    assert held[0] == 0 and any("run in every step" in e.get("text", "") for e in events)


def test_a_stream_beyond_float16_is_said_to_be_in_bfloat16(cfg, monkeypatch, tmp_path, world):
    w = Weights.load(open_model(world.student), dtype=torch.float32, train="all")
    big = {n: t * 1e6 if "embed" in n else t for n, t in w.export().items()}
    student = tmp_path / "big"
    create_model(student, world.config, {n: t.clone() for n, t in big.items()})
    cfg = dataclasses.replace(cfg, student=student)
    _, _, events, _ = run(cfg, "out", monkeypatch, share=share_for(cfg, 0.5, monkeypatch))
    assert any("kept in bfloat16" in e.get("text", "") for e in events)


def test_a_step_on_the_tail_is_a_step_of_the_whole_model(cfg):
    """Bitwise: the gradient of the layers from 1 on, with the prefix run before, and within the whole stack."""
    plan = heal_plan.plan_heal(cfg)
    load = dict(dtype=torch.float32, train="layers", train_from=1)
    whole = Weights.load(plan.student, **load)
    tail = Weights.load(plan.student, first_layer=1, **load)
    cache = PrefixCache(torch.float32)
    run_prefix(Weights.load(plan.student, dtype=torch.float32, train=None), plan.batches, 1, cache)
    targets = obtain_targets(plan, silent)[0]
    found = []
    for w, streams in ((whole, [None] * len(cache)), (tail, cache)):
        trainer = Trainer(w, plan.n, cfg.window)
        trainer.step([Micro(plan.batches[0], targets[0], streams[0])], 1e-2)
        loss = Evaluator(w, plan.n, cfg.window).loss([Micro(plan.batches[1], targets[1], streams[1])])
        t = w.trained
        found.append((trainer.read(), loss, t.grad.clone(), t.master.clone(), t.m.clone(), t.v.clone()))
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(a, b) for a, b in zip(found[0][2:], found[1][2:], strict=True))
    assert bool(found[0][2].any())


def test_the_last_layer_alone_can_train(cfg, monkeypatch, build, world):
    cfg = dataclasses.replace(cfg, train_from=2)
    report, _, _, held = run(cfg, "last", monkeypatch)
    assert held[0] == 2 and report.best_step > 0
    before, after = build.tensors(world.student), build.tensors(cfg.out.with_name("last"))
    assert {n.split(".")[2] for n in before if not torch.equal(before[n], after[n])} == {"2"}
