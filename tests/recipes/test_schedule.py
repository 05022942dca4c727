"""Rates, windows and step counts against tables worked out by hand from the formulas."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortiq_kernels.recipes import heal, heal_plan
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.schedule import (
    cosine_rate,
    genesis_factor,
    genesis_from,
    genesis_rate,
    total_steps,
    warm_steps,
)
from cortiq_kernels.step import Trainer


@pytest.mark.parametrize(
    ("epochs", "n", "steps"),
    [
        (1.0, 7, 7), (0.5, 7, 4), (2.1, 10, 21), (0.001, 5, 1), (3, 4, 12), (0.34, 3, 2), (1 / 3, 3, 1),
        (1.1, 10, 11), (0.07, 100, 7),  # 7.000000000000001 in floats
        (4.35, 100, 435),  # 434.99999999999994
        (1e-9, 1, 1), (1000.0, 123_457, 123_457_000),
    ],
)  # fmt: skip
def test_total_steps(epochs, n, steps):
    assert total_steps(epochs, n) == steps


@pytest.mark.parametrize(
    ("total", "warm", "steps"),
    [(10, 0.1, 1), (100, 0.1, 10), (9, 0.1, 1), (19, 0.1, 1), (20, 0.1, 2), (7, 1.0, 7), (5, 1e-9, 1),
     (100, 0.29, 29), (50, 0.58, 29), (100, 0.57, 57)],  # 28.999999999999996, 28.999999999999996, 56.99999999999999
)  # fmt: skip
def test_warm_steps(total, warm, steps):
    assert warm_steps(total, warm) == steps


# cos(pi/4) = 0.70710678, cos(pi/6) = 0.86602540: 0.1 + 0.45 * (1 + cos(pi * p))
COSINE = {
    # T 10, warm 0.2: two steps up, then p = 1/8 .. 8/8
    (10, 0.2): [0.5, 1.0, 0.9657457896, 0.8681980515, 0.7222075445, 0.55, 0.3777924555, 0.2318019485, 0.1342542104,
                0.1],
    # T 6, warm 0.5: p = 1/3, 2/3, 1
    (6, 0.5): [1 / 3, 2 / 3, 1.0, 0.775, 0.325, 0.1],
    # T 5, warm 0.1: floor(0.5) = 0, so one step; p = 1/4 .. 1
    (5, 0.1): [1.0, 0.8681980515, 0.55, 0.2318019485, 0.1],
    # all warm-up: it never decays
    (4, 1.0): [0.25, 0.5, 0.75, 1.0],
    (1, 0.1): [1.0],
    # T 7, warm 0.9: floor(6.3) = 6; the one that is left ends at a tenth
    (7, 0.9): [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0, 0.1],
}  # fmt: skip


@pytest.mark.parametrize(("total", "warm"), COSINE)
def test_cosine_with_warm_up(total, warm):
    want = COSINE[total, warm]
    assert [cosine_rate(1.0, d, total, warm) for d in range(1, total + 1)] == pytest.approx(want, rel=1e-9)
    assert cosine_rate(3e-5, total, total, warm) == pytest.approx(3e-5 * want[-1], rel=1e-9)


# e^-0.75 = 0.4723665527, e^-1.5 = 0.2231301601, e^-2.25 = 0.1053992246, e^-3 = 0.0497870684
# e^-0.125 = 0.8824969026, e^-0.25 = 0.7788007831, e^-0.375 = 0.6872892788, e^-0.5 = 0.6065306597
GENESIS_RATES = [0.4656348829, 0.6050268396, 0.6148495218, 0.5763332763]


def test_genesis_rates():
    assert [genesis_rate(1.0, d, 4) for d in (1, 2, 3, 4)] == pytest.approx(GENESIS_RATES, rel=1e-9)
    assert genesis_rate(2e-5, 200, 400) == pytest.approx(2e-5 * GENESIS_RATES[1], rel=1e-9)


@pytest.mark.parametrize(
    ("layers", "starts"),
    [
        (24, (19, 15, 9, 0)), (32, (26, 20, 12, 0)), (64, (52, 40, 24, 0)),
        (36, (29, 22, 13, 0)),  # 6.75 -> 7, 13.5 -> 14, 22.5 -> 23
        (3, (2, 1, 1, 0)),  # 0.5625 -> 1, 1.125 -> 2, 1.875 -> 2
        (1, (0, 0, 0, 0)), (16, (13, 10, 6, 0)),  # 3, 6, 10 exactly
    ],
)  # fmt: skip
def test_genesis_windows(layers, starts):
    assert tuple(genesis_from(e, layers) for e in range(4)) == starts
    assert genesis_from(9, layers) == 0
    assert [genesis_from(e, layers, 16) for e in range(4)] == [max(s, 16) for s in starts]


@pytest.mark.parametrize(
    ("epoch", "layer", "start", "factor"),
    [(0, 19, 19, 1.0), (0, 23, 19, 0.6703200460), (1, 23, 15, 0.6703200460), (3, 23, 0, 0.5627048688),
     (2, 9, 9, 1.0), (2, 12, 9, 0.9048374180)],  # e^-0.4, e^-(0.05*8), e^-(0.025*23), e^-(0.1/3*3)
)  # fmt: skip
def test_genesis_factors(epoch, layer, start, factor):
    assert genesis_factor(epoch, layer, start) == pytest.approx(factor, rel=1e-9)


@given(st.integers(1, 3000), st.floats(1e-6, 1.0), st.floats(1e-8, 1.0))
def test_rates_are_positive_and_peak_at_lr(total, warm, lr):
    rates = [cosine_rate(lr, d, total, warm) for d in {1, total, warm_steps(total, warm), total // 2 + 1}]
    assert all(0 < r <= lr * (1 + 1e-12) for r in rates)
    assert cosine_rate(lr, warm_steps(total, warm), total, warm) == pytest.approx(lr)
    assert 0 < genesis_rate(lr, 1, total) < lr



def asked_of_the_trainer(cfg: HealConfig, monkeypatch) -> list[tuple]:
    """(rate, from_layer, factors of all trained layers, micro-batches) of every step of a heal."""
    seen = []

    def gradients(self, micros, *, from_layer=None):
        self.asked = (from_layer, len(micros))

    def apply(self, rate, *, from_layer=None, factor=None):
        assert from_layer == self.asked[0]
        factors = [factor(i) for i in range(from_layer, 3)] if factor else None
        seen.append((rate, from_layer, factors, self.asked[1]))
        self.state.ok.fill_(True)
        self.state.step += 1

    monkeypatch.setattr(Trainer, "gradients", gradients)
    monkeypatch.setattr(Trainer, "apply", apply)
    heal.run(cfg)
    return seen


@pytest.fixture
def cfg(world, tmp_path) -> HealConfig:
    return HealConfig(
        world.student, world.data, tmp_path / "healed", ce=1.0, device="cpu", window=32, batch=2, lr=2.0, eval_every=999
    )


@pytest.mark.parametrize("accumulate", [1, 2, 3, 5])
def test_a_heal_takes_the_cosine_rates(cfg, monkeypatch, accumulate):
    """T = ceil(1.5 n), n = ceil(batches / accumulate); the last step of a pass has what is left."""
    cfg = dataclasses.replace(cfg, accumulate=accumulate, epochs=1.5, warm=0.5)
    batches = len(heal_plan.plan_heal(cfg).train)
    n = -(-batches // accumulate)
    total = -(-3 * n // 2)
    seen = asked_of_the_trainer(cfg, monkeypatch)
    assert len(seen) == total
    assert [s[0] for s in seen] == [cosine_rate(2.0, d, total, 0.5) for d in range(1, total + 1)]
    left = batches - (n - 1) * accumulate
    assert [s[3] for s in seen] == ([accumulate] * (n - 1) + [left] + [accumulate] * n)[:total]
    assert all(s[1:3] == (None, None) for s in seen)


@pytest.mark.parametrize(("accumulate", "train_from", "starts"), [(1, 0, (2, 1, 1, 0)), (4, 1, (2, 1, 1, 1))])
def test_a_heal_takes_the_genesis_windows(cfg, monkeypatch, accumulate, train_from, starts):
    """A new window every n accepted steps, over the whole depth (L = 3) whatever is frozen; not a warm-up."""
    cfg = dataclasses.replace(cfg, genesis=True, epochs=4.5, accumulate=accumulate, train_from=train_from, warm=1.0)
    plan = heal_plan.plan_heal(cfg)
    n = -(-len(plan.train) // accumulate)
    seen = asked_of_the_trainer(cfg, monkeypatch)
    assert len(seen) == plan.steps == -(-9 * n // 2)
    epochs = [i // n for i in range(len(seen))]
    assert [s[1] for s in seen] == [starts[min(e, 3)] for e in epochs]
    assert [s[0] for s in seen] == [genesis_rate(2.0, d, plan.steps) for d in range(1, plan.steps + 1)]
    assert seen[0][2] == [1.0]
    assert seen[n][2] == pytest.approx([1.0, 0.9512294245])  # e^-0.05
    assert seen[-1][2] == pytest.approx([0.9801986733**i for i in range(3 - starts[3])])  # e^-0.02, epoch 4
