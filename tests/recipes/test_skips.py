"""Steps that are not finite: what they leave alone, the float16 loss scale, and when a heal gives up."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny import batch, geometry, targets

from cortiq_kernels import backend
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes import heal
from cortiq_kernels.recipes.errors import TrainingFailed
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.step import Micro, Trainer
from cortiq_kernels.step.loss import Targets

G = geometry("LF", hidden=24, ffn=20, vocab=37)


@pytest.fixture
def cfg(world, tmp_path) -> HealConfig:
    return HealConfig(
        world.student, world.data, tmp_path / "healed", ce=1.0, device="cpu", window=32, batch=2, lr=1e-3,
        eval_every=9999,
    )  # fmt: skip


def trainer(dtype: torch.dtype, scale: float) -> tuple[Trainer, Micro]:
    weights = Weights.random(G, seed=1, dtype=dtype, train="layers", std=0.2)
    b = batch([[9, 5], [12]], 16, G.vocab)
    return Trainer(weights, 32, 16, loss_scale=scale), Micro(b, Targets(*targets(b, G.vocab, 3)))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_overflow_halves_the_scale_down_to_one_and_it_never_grows_back(bad):
    t, micro = trainer(torch.float16, 4096.0)
    stores = t.weights.trained
    scales = []
    for _ in range(14):
        before = [x.clone() for x in (stores.master, stores.m, stores.v, stores.plane)]
        t.gradients([micro])
        stores.grad[5] = bad
        t.apply(1e-3)
        stats = t.read()
        assert not stats.ok and stats.steps == 0
        after = (stores.master, stores.m, stores.v, stores.plane)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        scales.append(stats.scale)
    assert scales == [2048.0, 1024.0, 512.0, 256.0, 128.0, 64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0]
    assert (stats.skipped, stats.in_row) == (14, 14)
    for _ in range(3):
        t.step([micro], 1e-3)
    stats = t.read()
    assert stats.ok and (stats.steps, stats.skipped, stats.in_row, stats.scale) == (3, 14, 0, 1.0)


def test_a_loss_that_is_not_finite_is_a_skip_too():
    t, micro = trainer(torch.float32, 1.0)
    before = t.weights.trained.master.clone()
    t.gradients([micro])
    t.loss.mul_(float("nan"))
    t.apply(1e-3)
    assert not t.read().ok and torch.equal(before, t.weights.trained.master)


def test_the_scale_leaves_loss_norm_and_step_as_they_are():
    """A power of two is exact in float32: the same bits with scale 4096 and 1."""
    found = []
    for scale in (1.0, 4096.0):
        t, micro = trainer(torch.float32, scale)
        t.step([micro], 1e-3)
        stats = t.read()
        found.append((stats.loss, stats.norm, t.weights.trained.master.clone()))
    assert found[0][0] == found[1][0] and found[0][1] == pytest.approx(found[1][1], rel=1e-6)
    torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-5, atol=1e-8)


def test_a_float16_heal_survives_an_overflow(cfg, monkeypatch):
    """float16 is for GPUs; here the choice is forced, to see its scale in a whole run."""
    half = backend.DtypeChoice(torch.float16, "forced")
    monkeypatch.setattr(backend, "pick_dtype", lambda request, device: half)
    real, calls = Trainer.gradients, []

    def gradients(self, *a, **k):
        loss = real(self, *a, **k)
        calls.append(1)
        if len(calls) in (2, 3):
            self.weights.trained.grad[0] = float("inf")
        return loss

    monkeypatch.setattr(Trainer, "gradients", gradients)
    events: list[dict] = []
    report = heal.run(dataclasses.replace(cfg, epochs=0.5), events.append)
    skips = [e for e in events if e["event"] == "skip"]
    assert [(e["step"], e["scale"], e["in_row"]) for e in skips] == [(2, 2048.0, 1), (2, 1024.0, 2)]
    assert report.skipped == 2 and report.dtype == "f16" and len(calls) == report.steps + 2
    assert report.loss_best < report.loss_start


def scripted(monkeypatch, ok) -> list[bool]:
    """Steps that cost nothing; `ok(attempt)` (from 0) says which are accepted."""
    seen: list[bool] = []

    def apply(self, rate, **kw):
        good = ok(len(seen))
        seen.append(good)
        self.state.ok.fill_(good)
        (self.state.step if good else self.state.skipped).add_(1)
        self.state.in_row.copy_(torch.zeros(()) if good else self.state.in_row + 1)

    monkeypatch.setattr(Trainer, "gradients", lambda self, micros, **kw: None)
    monkeypatch.setattr(Trainer, "apply", apply)
    return seen


@pytest.mark.parametrize(("epochs", "most"), [(5.0, 20), (50.0, 30)])
def test_gives_up_after_too_many_skips_in_all(cfg, monkeypatch, epochs, most):
    """Every other step fails. T = 100: more than max(20, 5) = 20; T = 600: more than 5 % = 30."""
    seen = scripted(monkeypatch, lambda i: i % 2 == 0)
    steps = {5.0: 100, 50.0: 600}[epochs]
    monkeypatch.setattr("cortiq_kernels.recipes.heal_plan.total_steps", lambda e, n: steps)
    with pytest.raises(TrainingFailed, match=f"{most + 1} in all"):
        heal.run(dataclasses.replace(cfg, epochs=epochs))
    assert seen.count(False) == most + 1 and not cfg.out.exists()


def test_as_many_skips_as_allowed_are_fine(cfg, monkeypatch):
    """19 in a row, and 20 in all, of T = 100."""
    seen = scripted(monkeypatch, lambda i: not (i < 19 or i == 50))
    monkeypatch.setattr("cortiq_kernels.recipes.heal_plan.total_steps", lambda e, n: 100)
    assert heal.run(cfg).skipped == 20
    assert seen.count(True) == 100


def test_gives_up_after_twenty_in_a_row(cfg, monkeypatch):
    seen = scripted(monkeypatch, lambda i: i < 5)
    with pytest.raises(TrainingFailed, match="20 steps in a row"):
        heal.run(dataclasses.replace(cfg, epochs=3))
    assert seen == [True] * 5 + [False] * 20
