"""Rates and windows: the constants of the specification."""

from __future__ import annotations

import math

import pytest

from cortiq_kernels.recipes.schedule import cosine_rate, genesis_factor, genesis_from, genesis_rate, total_steps


@pytest.mark.parametrize(("epochs", "n", "steps"), [(1.0, 7, 7), (0.5, 7, 4), (2.1, 10, 21), (0.001, 5, 1), (3, 4, 12)])
def test_total_steps(epochs, n, steps):
    assert total_steps(epochs, n) == steps


def test_cosine_warms_up_and_ends_at_a_tenth():
    rates = [cosine_rate(2.0, d, 100, 0.1) for d in range(1, 101)]
    assert rates[:10] == pytest.approx([0.2 * d for d in range(1, 11)])
    assert rates[-1] == pytest.approx(0.2)
    assert rates[54] == pytest.approx(2.0 * (0.1 + 0.45))  # p = 1/2
    assert all(a > b for a, b in zip(rates[9:], rates[10:], strict=False))


def test_cosine_corners():
    assert cosine_rate(1.0, 1, 1, 0.1) == 1.0  # one step is all warm-up
    assert cosine_rate(1.0, 5, 5, 1.0) == 1.0  # warm-up only never decays
    assert cosine_rate(1.0, 1, 1000, 0.1) == pytest.approx(0.01)


@pytest.mark.parametrize(("layers", "starts"), [(24, (19, 15, 9, 0)), (32, (26, 20, 12, 0)), (64, (52, 40, 24, 0))])
def test_genesis_windows(layers, starts):
    assert tuple(genesis_from(e, layers) for e in range(4)) == starts
    assert genesis_from(9, layers) == 0
    assert [genesis_from(e, layers, 16) for e in range(4)] == [max(s, 16) for s in starts]


def test_genesis_rate_and_factor():
    assert genesis_rate(1.0, 50, 100) == pytest.approx((1 - math.exp(-1.5)) * math.exp(-0.25))
    assert genesis_factor(0, 19, 19) == 1.0
    assert genesis_factor(0, 23, 19) == pytest.approx(math.exp(-0.4))
    assert genesis_factor(1, 23, 15) == pytest.approx(math.exp(-0.05 * 8))
