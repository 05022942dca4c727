"""The recipes on a GPU: the same commands, 16-bit precision by default, the same results to rounding."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cortiq_kernels.recipes import fold, heal, score
from cortiq_kernels.recipes.fold_config import FoldConfig
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.score_config import ScoreConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", [None, "f16", "f32"])
@pytest.mark.parametrize("train_from", [0, 1])
def test_heal(world, tmp_path, dtype, train_from):
    cfg = HealConfig(
        student=world.student,
        teacher=world.teacher,
        data=world.data,
        out=tmp_path / "healed",
        device="cuda",
        dtype=dtype,
        train_from=train_from,
        window=32,
        batch=2,
        lr=2e-3,
        epochs=3,
        eval_every=4,
        topk=8,
        ce=0.25,
    )
    report = heal.run(cfg)
    assert report.dtype == (dtype or "bf16") and report.peak_device_bytes > 0
    assert report.skipped <= (4 if dtype == "f16" else 0)  # where the loss scale starts is too much for a few steps
    assert report.loss_best < 0.9 * report.loss_start
    again = dataclasses.replace(cfg, out=tmp_path / "again", deterministic=True)
    third = dataclasses.replace(cfg, out=tmp_path / "third", deterministic=True)
    assert heal.run(again).evaluations == heal.run(third).evaluations


def test_fold_and_score_agree_with_the_cpu(world, tmp_path):
    folds = {}
    for device in ("cuda", "cpu"):
        out = tmp_path / f"fold-{device}"
        cfg = FoldConfig(world.teacher, out, world.data, device=device, dtype="f32", window=32, batch=2, align=4)
        folds[device] = fold.run(cfg)
    assert folds["cuda"].kept_energy == pytest.approx(folds["cpu"].kept_energy, rel=1e-3)
    models = (world.teacher, tmp_path / "fold-cpu")
    cfg = ScoreConfig(models, world.data, device="cpu", dtype="f32", window=40)
    want = score.run(cfg)
    for dtype, rel in (("f32", 1e-4), ("bf16", 0.05)):
        got = score.run(dataclasses.replace(cfg, device="cuda", dtype=dtype))
        for a, b in zip(want.rows, got.rows, strict=True):
            assert b.count == a.count and b.nll == pytest.approx(a.nll, rel=rel)
