"""The policy of activations: chosen by what is free, said in the plan, and of no effect on any result."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from cortiq_kernels import backend, cli
from cortiq_kernels.recipes import heal, heal_plan, masks, masks_plan
from cortiq_kernels.recipes.activations import SHARE, choose_activations
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.masks_config import MasksConfig


@pytest.fixture
def cfg(world, tmp_path) -> HealConfig:
    return HealConfig(
        world.student, world.data, tmp_path / "o", world.teacher, device="cpu", window=32, batch=2, topk=8, lr=2e-3,
        epochs=0.5, eval_every=3,
    )  # fmt: skip


def written(folder) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_activations_are_the_fastest_that_fit(cfg, monkeypatch):
    cfg = dataclasses.replace(cfg, batch=8, window=64)
    plan = heal_plan.plan_heal(cfg)
    peaks = plan.activations.peaks
    assert list(peaks) == ["keep", "cheap", "layer"] and peaks["layer"] < peaks["cheap"] < peaks["keep"]
    assert plan.activations.policy == "keep" and peaks["keep"] == plan.memory()["peak"]
    for policy, peak in peaks.items():
        asked = heal_plan.plan_heal(dataclasses.replace(cfg, activations=policy))
        assert asked.memory()["peak"] == peak and asked.activations[:2] == (policy, "asked for")
    for policy, least in (("keep", "keep"), ("cheap", "cheap"), ("layer", "layer"), ("layer", None)):
        free = int(peaks[least] / SHARE) + 1 if least else peaks["layer"]  # of which 90 % are less than any peak
        monkeypatch.setattr(heal_plan.backend, "free_bytes", lambda device, free=free: free)
        made = heal_plan.plan_heal(cfg)
        assert made.activations.policy == policy
        why = "fastest within" if least else "least; none"
        assert made.describe()["activations"].startswith(f"{policy}: the {why}")
        assert made.describe()["activation_peaks"] == dict(peaks)


def test_activations_that_were_asked_for_and_cannot_fit_are_refused(cfg, monkeypatch):
    cfg = dataclasses.replace(cfg, activations="keep", batch=8, window=64)
    need = heal_plan.plan_heal(cfg).memory()["least"]
    monkeypatch.setattr(heal_plan.backend, "free_bytes", lambda device: need - 1)
    with pytest.raises(InputError, match="needs at least .* Lower --batch or --window, or leave --activations out"):
        heal_plan.plan_heal(cfg)
    assert heal_plan.plan_heal(dataclasses.replace(cfg, activations="auto")).activations.policy == "layer"


def test_where_something_else_makes_the_peak_nothing_is_given_up():
    memory = {"peak": 100, "free": 90}
    assert choose_activations("auto", lambda policy: memory).policy == "keep"


def test_a_plan_that_gives_up_a_second_copy_chooses_again(world, tmp_path, monkeypatch):
    """Masks hold the weights twice for evaluations in 16 bit, where both fit."""
    cfg = MasksConfig(world.teacher, world.data, tmp_path / "m", device="cpu", window=64, batch=8)
    monkeypatch.setattr(backend, "pick_dtype", lambda request, device: backend.DtypeChoice(torch.bfloat16, "forced"))
    plan = masks_plan.plan_masks(cfg)
    assert plan.two_copies and plan.activations.policy == "keep"
    least = dataclasses.replace(plan, two_copies=False).memory_with("layer")
    free = plan.memory_with("layer")["least"] - 1
    monkeypatch.setattr(backend, "free_bytes", lambda device: free)
    plan = masks_plan.plan_masks(cfg)
    assert not plan.two_copies and plan.memory()["least"] == least["least"] and plan.activations.policy == "layer"


@pytest.mark.parametrize("more", [{}, {"train": "mlp", "train_from": 1}])
def test_a_heal_writes_the_same_bytes(cfg, tmp_path, more):
    found = []
    for policy in ("auto", "keep", "cheap", "layer"):
        out, events = tmp_path / policy, []
        report = heal.run(dataclasses.replace(cfg, out=out, activations=policy, **more), events.append)
        plan = next(e for e in events if e["event"] == "plan")
        assert plan["activations"].startswith("keep: the fastest" if policy == "auto" else f"{policy}: asked for")
        found.append((written(out), report.evaluations, report.loss_best))
    assert all(f == found[0] for f in found[1:])


def test_a_run_goes_on_with_another_policy(cfg, tmp_path):
    calm = dataclasses.replace(cfg, out=tmp_path / "calm")
    heal.run(calm)

    def stop(event):
        if event["event"] == "step" and event["step"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        heal.run(dataclasses.replace(cfg, activations="layer"), stop)
    heal.run(dataclasses.replace(cfg, activations="cheap", resume=True))
    assert written(cfg.out) == written(calm.out)


@pytest.mark.parametrize("backward", ["full", "ffn"])
def test_masks_write_the_same_bytes(world, tmp_path, backward):
    found = []
    for policy in ("keep", "cheap", "layer"):
        cfg = MasksConfig(
            world.teacher, world.data, tmp_path / policy, device="cpu", window=32, batch=4, max_steps=4, eval_every=2,
            l1_init=50.0, mask_init=0.1, backward=backward, activations=policy,
        )  # fmt: skip
        assert masks_plan.plan_masks(cfg).activations.policy == policy
        masks.run(cfg)
        found.append(cfg.out.read_bytes())
    assert found[0] == found[1] == found[2]


def test_the_command_line_shows_the_choice(world, tmp_path, capsys):
    where = ["--student", str(world.student), "--teacher", str(world.teacher), "--data", str(world.data)]
    small = ["--device", "cpu", "--topk", "8", "--window", "32"]
    args = ["heal", *where, "--out", str(tmp_path / "o"), *small, "--dry-run"]
    assert cli.main(args) == 0
    assert "  activations     keep: the fastest within 90% of the" in capsys.readouterr().out
    assert cli.main([*args, "--activations", "layer", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["activations"].startswith("layer: asked for; at the peak keep ")
    assert set(plan["activation_peaks"]) == {"keep", "cheap", "layer"}
    assert plan["activation_peaks"]["layer"] == plan["memory"]["peak"]
    assert cli.main([*args, "--activations", "some"]) == 2 and "'auto' | 'keep'" in capsys.readouterr().err
