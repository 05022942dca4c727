"""Masks that were stopped and resumed are those that were not: every byte of the file, every line of the log."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import stopped
import torch
from directories import cortiq
from stopped import lines, same

from cortiq_kernels import backend
from cortiq_kernels.recipes import masks
from cortiq_kernels.recipes.checkpoint_dir import CheckpointDir
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.masks_config import MasksConfig
from cortiq_kernels.recipes.masks_plan import plan_masks
from cortiq_kernels.recipes.stopping import Stopped
from cortiq_kernels.step import GateTrainer

go = functools.partial(stopped.go, masks)


@pytest.fixture
def cfg(world, tmp_path) -> MasksConfig:
    return MasksConfig(
        world.teacher, world.data, tmp_path / "m.safetensors", device="cpu", window=32, batch=2, eval_every=5,
        max_steps=40, l1_init=1.0, l1_grow=2.0, keep_frac=0.9,
    )  # fmt: skip


CASES = {
    "settles": {},
    "kl, ffn, settled on the last step": dict(loss="kl", topk=5, backward="ffn", max_steps=23, keep_frac=0.5),
    "f64, another seed": dict(dtype="f64", seed=7),
}


@pytest.mark.parametrize("case", CASES)
def test_stopped_and_resumed_is_the_run_that_was_not(cfg, case):
    cfg = dataclasses.replace(cfg, **CASES[case])
    calm, again = dataclasses.replace(cfg, out=cfg.out.with_name("calm")), dataclasses.replace(cfg, resume=True)
    events = go(calm)
    total = max(e["step"] for e in events if e["event"] == "step")
    best = max(e["step"] for e in events if e["event"] == "eval" and e["improved"])
    assert best >= 10
    for stop_at in sorted({("step", 2), ("eval", 5), ("step", 7), ("eval", best), ("step", best + 1)}):
        if stop_at[1] >= total or (CheckpointDir(cfg.out).read() or {"step": 0})["step"] >= stop_at[1]:
            continue
        with pytest.raises(Stopped):
            go(again, stop_at)
        assert CheckpointDir(cfg.out).read()["step"] == stop_at[1]
    with pytest.raises(Stopped):
        go(again, ("eval", total))
    assert [e["step"] for e in go(again) if e["event"] == "step"] == []  # only the writing was left
    same(calm, again)
    done = masks.run(again)
    assert done.already_done and done.trace == masks.run(dataclasses.replace(calm, resume=True)).trace
    with pytest.raises(InputError, match="masks: lr: got 0.2; expected 0.1, as in the finished output"):
        masks.run(dataclasses.replace(again, lr=0.2))


def test_skipped_steps_go_on(cfg, monkeypatch):
    seen = stopped.spoil(monkeypatch, GateTrainer, lambda trainer: trainer.grad)
    calm, again = dataclasses.replace(cfg, out=cfg.out.with_name("calm")), dataclasses.replace(cfg, resume=True)
    go(calm)
    seen.clear()
    with pytest.raises(Stopped):
        go(again, ("skip", 3))
    assert CheckpointDir(cfg.out).read()["counters"]["in_row"] == 1
    go(again)
    same(calm, again)
    assert [e["event"] for e in lines(again)].count("skip") == 2


def test_evaluations_stay_in_the_dtype_that_they_were_in(cfg, monkeypatch):
    """What is free decides whether a second copy is held; a resumed run goes on as it began."""
    cfg = dataclasses.replace(cfg, activations="cheap")
    monkeypatch.setattr(backend, "pick_dtype", lambda request, device: backend.DtypeChoice(torch.bfloat16, "forced"))
    calm, again = dataclasses.replace(cfg, out=cfg.out.with_name("calm")), dataclasses.replace(cfg, resume=True)
    go(calm)
    with pytest.raises(Stopped):
        go(again, ("step", 7))
    least = plan_masks(again).memory()["least"]
    monkeypatch.setattr(backend, "free_bytes", lambda device: least - 1)
    assert not plan_masks(dataclasses.replace(cfg, out=cfg.out.with_name("other"))).two_copies
    monkeypatch.setattr(backend, "free_bytes", lambda device: least)
    go(again)
    same(calm, again)


def test_on_the_command_line(cfg, tmp_path):
    args = ("masks", "--model", cfg.model, "--data", cfg.data, "--out", cfg.out, "--device", "cpu", "--window", 32,
            "--batch", 2, "--eval-every", 5, "--max-steps", 40, "--l1-init", 1, "--l1-grow", 2, "--keep-frac", 0.9)
    with pytest.raises(Stopped):
        go(cfg, ("step", 3))
    refused = cortiq(*args)
    assert refused.status == 2 and "unfinished run (step 3 of 40)" in refused.err and "Add --resume" in refused.err
    dry = cortiq(*args, "--resume", "--dry-run")
    assert "goes on after step 3" in dry.out
    done = cortiq(*args, "--resume")
    assert done.status == 0 and "going on after step 3 of 40" in done.err
    again = cortiq(*args, "--resume", "--json")
    assert again.json["already_done"] and again.json["trace"]
    text = cortiq(*args, "--resume")
    assert text.status == 0 and "already done" in text.out
