"""On a GPU: a heal's peak is what its plan said, and its targets lie in pinned memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cortiq_kernels.recipes import heal, heal_plan
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.heal_targets import obtain_targets
from cortiq_kernels.recipes.inputs import silent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize(
    ("layers", "train_from", "activations"),
    [("LLLLLL", 0, "cheap"), ("LLLLLL", 3, "cheap"), ("FFFFFF", 0, "cheap"), ("FFFFFF", 3, "cheap"),
     ("LLFLLF", 0, "keep"), ("LLFLLF", 0, "cheap"), ("LLFLLF", 0, "layer")],
)  # fmt: skip
def test_the_peak_of_a_heal_is_what_the_plan_said(build, tmp_path, layers, train_from, activations):
    cfg = build.config(layers, hidden=1024, ffn=3584, vocab=50000, nq=8, nkv=2, hd=256, nk=16, nv=16, dk=128, dv=128)
    model = build.model(tmp_path / "m", cfg, dtype=torch.bfloat16)
    data = build.records(tmp_path / "d.jsonl", 50000, train=1200, val=450)
    settings = HealConfig(
        model, data, tmp_path / "o", model, device="cuda", window=2048, batch=4, topk=64, epochs=0.1,
        train_from=train_from, checkpoint_every="off", activations=activations,
    )  # fmt: skip
    said = heal_plan.plan_heal(settings).memory()
    had = heal.run(settings).peak_device_bytes
    assert said["least"] <= had * 1.02 and said["peak"] == pytest.approx(had, rel=0.1)


def test_targets_are_pinned(world, tmp_path):
    cfg = HealConfig(world.student, world.data, tmp_path / "o", world.teacher, device="cuda", window=32, batch=2)
    targets, _ = obtain_targets(heal_plan.plan_heal(dataclasses.replace(cfg, topk=8)), silent)
    assert targets.ids.is_pinned() and targets.probs.is_pinned()
