"""Rankings and the repair of down_proj, against dense float64 formulas."""

from __future__ import annotations

import pytest
import torch

from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.repair import (
    importance,
    keep_by_gram,
    keep_top,
    magnitude,
    random_order,
    repair,
)


def draw(rng, rows=60, f=14, h=6):
    """Activations [rows, f] with much in common, their mean Gram, and a down projection [h, f]."""
    mix = torch.randn(5, f, generator=rng, dtype=torch.float64)
    act = torch.randn(rows, 5, generator=rng, dtype=torch.float64) @ mix
    act = act + 0.3 * torch.randn(rows, f, generator=rng, dtype=torch.float64)
    return act, act.T @ act / rows, torch.randn(h, f, generator=rng, dtype=torch.float64)


def test_the_formula(rng):
    act, gram, down = draw(rng)
    s = torch.tensor([0, 2, 3, 7, 8, 11])
    p = torch.tensor([j for j in range(14) if j not in s.tolist()])
    for ridge in (1e-3, 0.2):
        eps = ridge * gram[s, s].mean()
        pi = torch.linalg.inv(gram[s][:, s] + eps * torch.eye(6, dtype=torch.float64)) @ gram[s][:, p]
        got = repair(gram, down, s, ridge)
        torch.testing.assert_close(got.down, down[:, s] + down[:, p] @ pi.T, rtol=1e-10, atol=1e-10)
        assert got.ridge == ridge
        error = act[:, p] - act[:, s] @ pi  # what is left, measured on the activations themselves
        assert got.residual == pytest.approx(float(error.square().sum() / act[:, p].square().sum()), rel=1e-9)
        out, all_of_it = error @ down[:, p].T, act[:, p] @ down[:, p].T
        assert got.output_residual == pytest.approx(float(out.square().sum() / all_of_it.square().sum()), rel=1e-9)
        torch.testing.assert_close(act @ down.T - act[:, s] @ got.down.T, out, rtol=1e-9, atol=1e-9)
    assert 0 < repair(gram, down, s).output_residual < 0.5
    scaled = repair(gram * 1e6, down.float(), s)  # sums do as well as means
    torch.testing.assert_close(scaled.down, repair(gram, down.float(), s).down, rtol=1e-9, atol=1e-9)


def test_neurons_that_do_the_same_are_lost_without_a_trace(rng):
    """Each kept neuron has a copy, scaled, that goes: down' does the work of both."""
    act = torch.randn(80, 5, generator=rng, dtype=torch.float64)
    act = torch.cat([act, -2.0 * act], 1)
    gram, down = act.T @ act, torch.randn(4, 10, generator=rng, dtype=torch.float64)
    got = repair(gram, down, torch.arange(5), 1e-12)
    torch.testing.assert_close(act[:, :5] @ got.down.T, act @ down.T, rtol=1e-9, atol=1e-9)
    assert got.residual < 1e-10 and got.output_residual < 1e-10
    assert repair(gram, down, torch.arange(5)).residual < 1e-5  # the usual ridge


def test_copies_among_those_that_stay(rng):
    """Σ_SS is singular; the ridge shares the work between the copies."""
    act = torch.randn(80, 3, generator=rng, dtype=torch.float64)
    act = torch.cat([act, act, act], 1)
    gram, down = act.T @ act, torch.randn(4, 9, generator=rng, dtype=torch.float64)
    got = repair(gram, down, torch.arange(6))
    assert got.residual < 1e-5 and got.ridge == 1e-3
    torch.testing.assert_close(act[:, :6] @ got.down.T, act @ down.T, rtol=2e-3, atol=2e-3)


def test_nothing_goes_and_dead_neurons(rng):
    act, _, down = draw(rng)
    act[:, [1, 5, 6]] = 0
    gram = act.T @ act
    every = repair(gram, down, torch.arange(14))
    assert torch.equal(every.down, down) and (every.residual, every.output_residual) == (0.0, 0.0)
    alive = torch.tensor([j for j in range(14) if j not in (1, 5, 6)])
    silent = repair(gram, down, alive)  # only dead ones go
    assert torch.equal(silent.down, down[:, alive]) and silent.residual == 0.0
    some = repair(gram, down, torch.tensor([0, 1, 2, 5, 9]))  # dead ones stay: their columns are as they were
    assert torch.equal(some.down[:, [1, 3]], down[:, [1, 5]]) and 0 < some.residual < 1
    dead = repair(gram, down, torch.tensor([1, 5]))  # only dead ones stay
    assert torch.equal(dead.down, down[:, [1, 5]]) and (dead.residual, dead.output_residual) == (1.0, 1.0)
    down[:, [0, 2]] = 0  # what goes added nothing to the output
    unheard = repair(gram, down, torch.tensor([j for j in range(14) if j not in (0, 2)]))
    assert unheard.output_residual == 0.0 and torch.isfinite(unheard.down).all()


def test_fewer_rows_than_neurons(rng):
    act, gram, down = draw(rng, rows=4)
    got = repair(gram, down, torch.arange(7))
    assert torch.isfinite(got.down).all() and 0 <= got.residual < 0.1
    torch.testing.assert_close(act[:, :7] @ got.down.T, act @ down.T, rtol=0.1, atol=0.1 * float((act @ down.T).std()))


def test_a_gram_that_rounding_made_indefinite(rng):
    _, gram, down = draw(rng)
    lowest = torch.linalg.eigvalsh(gram[:7, :7])[0]
    gram -= (lowest + 5e-3 * gram[:7, :7].diagonal().mean()) * torch.eye(14, dtype=torch.float64)
    got = repair(gram, down, torch.arange(7))
    assert got.ridge == pytest.approx(1e-2) and torch.isfinite(got.down).all()
    with pytest.raises(InputError, match="layer 3"):
        bad = gram.clone()
        bad[0, 1] = bad[1, 0] = float("nan")
        repair(bad, down, torch.arange(7), name="fold: layer 3")


def test_rankings(rng):
    _, gram, down = draw(rng)
    score = importance(gram.diagonal(), down)
    torch.testing.assert_close(score, gram.diagonal() * down.square().sum(0))
    gate, up = (torch.randn(14, 6, generator=rng) for _ in range(2))
    want = (gate.double() ** 2).sum(1) + (up.double() ** 2).sum(1) + (down**2).sum(0)
    torch.testing.assert_close(magnitude(gate, up, down), want)
    a, b = random_order(14, 3, 0), random_order(14, 3, 1)
    assert a.sort().values.tolist() == list(range(14)) and not torch.equal(a, b)
    assert torch.equal(a, random_order(14, 3, 0)) and not torch.equal(a, random_order(14, 4, 0))
    assert keep_top(torch.tensor([1.0, 5.0, 5.0, 5.0]), 2).tolist() == [1, 2]


def test_by_gram_is_the_greedy_choice(rng):
    """Each pivot is the neuron whose output energy the ones before it explain least: dense residuals say the same."""
    _, gram, down = draw(rng)
    norm = down.square().sum(0).sqrt()
    weighted, chosen = gram * norm * norm[:, None], []
    for _ in range(6):
        left = weighted.diagonal()
        if chosen:
            c = torch.tensor(chosen)
            left = left - (weighted[:, c] @ torch.linalg.inv(weighted[c][:, c]) * weighted[:, c]).sum(1)
            left[c] = -1
        chosen.append(int(left.argmax()))
    assert keep_by_gram(gram, down, 6).tolist() == sorted(chosen)


def test_by_gram_keeps_one_of_each_kind(rng):
    act = torch.randn(90, 4, generator=rng, dtype=torch.float64) * torch.tensor([4.0, 3.0, 2.0, 1.0])
    act = torch.cat([act, act], 1)  # the four strongest by importance are two pairs of copies
    gram, down = act.T @ act, torch.ones(3, 8, dtype=torch.float64)
    keep = keep_by_gram(gram, down, 4)
    assert sorted(j % 4 for j in keep.tolist()) == [0, 1, 2, 3]
    assert sorted(j % 4 for j in keep_top(importance(gram.diagonal(), down), 4).tolist()) == [0, 0, 1, 1]
    assert repair(gram, down, keep).output_residual < 1e-4
    six = keep_by_gram(gram, down, 6)  # nothing is left to explain after four: the rest by importance
    assert set(keep.tolist()) < set(six.tolist()) and sorted(j % 4 for j in six.tolist()) == [0, 0, 1, 1, 2, 3]
    assert keep_by_gram(gram, down, 8).tolist() == list(range(8))
