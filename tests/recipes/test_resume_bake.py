"""A bake that was stopped and resumed is the bake that was not: every byte of what it writes, every line of the log."""

from __future__ import annotations

import dataclasses
import functools
import os

import pytest
import stopped
import torch
from directories import cortiq
from stopped import files, lines, same
from tiny import config

from cortiq_kernels import backend
from cortiq_kernels.recipes import bake
from cortiq_kernels.recipes.bake_config import BakeConfig
from cortiq_kernels.recipes.bake_plan import MASKS, OVERLAY, beside
from cortiq_kernels.recipes.checkpoint_dir import CheckpointDir
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.stopping import Stopped
from cortiq_kernels.step import GateTrainer, Trainer

go = functools.partial(stopped.go, bake)


@pytest.fixture
def cfg(world, tmp_path) -> BakeConfig:
    return BakeConfig(
        world.teacher, world.data, tmp_path / "baked", steps_a=14, steps_b=7, eval_every=4, l1_mult=4000.0, lr_b=3e-3,
        fcd_layers=2, align=4, chunk=16, held=4, calib=12, target_sparsity=0.2, device="cpu", overlay=True,
    )  # fmt: skip


def pair(cfg: BakeConfig) -> tuple[BakeConfig, BakeConfig]:
    return dataclasses.replace(cfg, out=cfg.out.with_name("calm")), dataclasses.replace(cfg, resume=True)


def all_the_same(calm: BakeConfig, again: BakeConfig) -> None:
    same(calm, again)
    for suffix in (MASKS, OVERLAY):
        assert files(beside(calm.out, suffix)) == files(beside(again.out, suffix))


CASES = {
    "float32": {},
    "float64, the backbone wins": dict(dtype="f64", target_sparsity=0.0),
    "phase B only hurts": dict(lr_b=30.0),
    "no phase B": dict(fcd_layers=0),
    "looped": dict(fcd_layers=1),
}


@pytest.mark.parametrize("case", CASES)
def test_stopped_and_resumed_is_the_run_that_was_not(cfg, build, tmp_path, case):
    cfg = dataclasses.replace(cfg, **CASES[case])
    if case == "looped":
        looped = build.model(tmp_path / "m", config("LF", hidden=24, ffn=40, vocab=23, num_loops=2))
        cfg = dataclasses.replace(cfg, model=looped)
    calm, again = pair(cfg)
    total = max(e["step"] for e in go(calm) if e["event"] == "step")
    assert total == (14 if case == "no phase B" else 21)
    # a second event of step 14 is the evaluation that phase B starts from
    for stop_at in (("step", 2), ("eval", 4), ("step", 13), ("eval", 14), ("step", 16), ("eval", 18), ("step", 20)):
        if stop_at[1] < total:
            with pytest.raises(Stopped):
                go(again, stop_at)
            assert CheckpointDir(cfg.out).read()["step"] == stop_at[1]
    with pytest.raises(Stopped):
        go(again, ("write", None))
    assert [e["step"] for e in go(again) if e["event"] == "step"] == []  # only the writing was left
    all_the_same(calm, again)
    before = lines(again)
    done = bake.run(again)
    assert done.already_done and done.kept == bake.run(dataclasses.replace(calm, resume=True)).kept
    assert lines(again) == before


def test_killed_between_the_mask_file_and_the_directory(cfg, monkeypatch):
    calm, again = pair(cfg)
    go(calm)

    class Killed(BaseException):
        pass

    def kill(*args, **more):
        raise Killed

    with monkeypatch.context() as m, pytest.raises(Killed):
        m.setattr(bake, "write_model", kill)
        go(again)
    assert beside(cfg.out, MASKS).exists() and not cfg.out.exists() and CheckpointDir(cfg.out).read()["step"] == 21
    go(again)
    all_the_same(calm, again)


@pytest.mark.parametrize(
    ("phase", "grad", "at"),
    [(GateTrainer, lambda trainer: trainer.grad, 3), (Trainer, lambda trainer: trainer.weights.trained.grad, 17)],
)
def test_skipped_steps_go_on(cfg, monkeypatch, phase, grad, at):
    seen = stopped.spoil(monkeypatch, phase, grad)
    calm, again = pair(cfg)
    go(calm)
    seen.clear()
    with pytest.raises(Stopped):
        go(again, ("skip", at))
    assert CheckpointDir(cfg.out).read()["counters"]["in_row"] == 1
    go(again)
    all_the_same(calm, again)
    assert [e["event"] for e in lines(again)].count("skip") == 2


def test_16_bit(cfg, monkeypatch):
    """Two copies in phase A, masters beside a 16-bit plane in phase B; whatever memory is free later."""
    monkeypatch.setattr(backend, "pick_dtype", lambda request, device: backend.DtypeChoice(torch.bfloat16, "forced"))
    calm, again = pair(cfg)
    go(calm)
    for stop_at in (("step", 6), ("step", 17)):
        with pytest.raises(Stopped):
            go(again, stop_at)
    go(again)
    all_the_same(calm, again)


def test_another_setting_is_refused_by_name_and_a_checkpoint_without_resume(cfg):
    with pytest.raises(Stopped):
        go(cfg, ("step", 3))
    before = files(CheckpointDir(cfg.out).path)
    with pytest.raises(InputError, match=r"out: got the checkpoint .* \(step 3 of 21\); expected none. Add --resum"):
        bake.run(cfg)
    again = dataclasses.replace(cfg, resume=True)
    for change, words in (
        (dict(l1_mult=1.0), "bake: l1_mult: got 1.0; expected 4000.0, as in the checkpoint"),
        (dict(category="a"), "bake: category: got 'a'; expected none"),
        (dict(chunk=8), "bake: chunk: got 8; expected 16"),
        (dict(dtype="f64"), "bake: dtype: got 'f64'; expected 'f32'"),
    ):
        with pytest.raises(InputError, match=words):
            bake.run(dataclasses.replace(again, **change))
    assert files(CheckpointDir(cfg.out).path) == before and not os.path.lexists(cfg.out)
    go(again)
    with pytest.raises(InputError, match="bake: lr_b: got 0.5; expected 0.003, as in the finished output"):
        bake.run(dataclasses.replace(again, lr_b=0.5))


def test_on_the_command_line(cfg):
    args = ["bake", "--model", cfg.model, "--data", cfg.data, "--out", cfg.out, "--device", "cpu", "--steps-a", 14,
            "--steps-b", 7, "--eval-every", 4, "--l1-mult", 4000, "--lr-b", 3e-3, "--fcd-layers", 2, "--align", 4,
            "--chunk", 16, "--held", 4, "--calib", 12, "--target-sparsity", 0.2, "--overlay", "--resume"]  # fmt: skip
    with pytest.raises(Stopped):
        go(cfg, ("step", 3))
    assert "goes on after step 3" in cortiq(*args, "--dry-run").out
    done = cortiq(*args)
    assert done.status == 0 and "going on after step 3 of 21" in done.err
    again = cortiq(*args)
    assert again.status == 0 and "already done: baked:" in again.out
