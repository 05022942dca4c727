"""A heal whose steps and evaluations are recorded and replayed writes the bytes of one that runs them."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from recorder import Recorder

from cortiq_kernels.recipes import heal, heal_loop
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.step.loss import pad_rows


@pytest.mark.parametrize("train_from", [0, 1])
def test_a_recorded_heal_is_a_heal(world, tmp_path, build, monkeypatch, train_from):
    """Genesis moves the trained window and the factors, two micro-batches a step, an odd one left over, val in between,
    and scored rows in multiples, as on a GPU."""

    def host(feed, i):
        micro = plain_host(feed, i)
        return micro._replace(**dict(zip(("batch", "targets"), pad_rows(micro.batch, micro.targets, 32), strict=True)))

    plain_host = heal_loop.Feed._host
    monkeypatch.setattr(heal_loop.Feed, "_host", host)
    cfg = HealConfig(
        world.student, world.data, tmp_path / "plain", world.teacher, window=32, batch=2, accumulate=2, epochs=4.0,
        genesis=True, ce=0.3, topk=8, eval_every=3, lr=2e-3, train_from=train_from, device="cpu",
        checkpoint_every="off",
    )  # fmt: skip
    plain = heal.run(cfg)
    made = []

    class Trainer(heal_loop.Trainer):
        def __post_init__(self):
            super().__post_init__()
            made.append(self)

    Recorder.made = []
    monkeypatch.setattr(heal_loop, "Trainer", partial(Trainer, capture=Recorder))
    recorded = heal.run(dataclasses.replace(cfg, out=tmp_path / "recorded"))
    assert recorded.evaluations == plain.evaluations and recorded.best_step == plain.best_step
    a, b = build.tensors(tmp_path / "plain"), build.tensors(tmp_path / "recorded")
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert {k[0] for k in made[0].programs.recorded} == {"hidden", "step", "update"}
    assert sum(p.replays for p in Recorder.made) > 2 * plain.steps > sum(p.recorded for p in Recorder.made)


SIZES = [(1, 512), (8192, 512), (8193, 1024), (16384, 1024), (65536, 4096), (65537, 4608)]


@pytest.mark.parametrize("n,multiple", SIZES)
def test_scored_rows_come_in_sixteen_sizes_at_most(n, multiple):
    assert heal_loop.row_multiple(n) == multiple and -(-n // multiple) <= 16
