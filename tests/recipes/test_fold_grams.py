"""Fold with the Grams of a capture: what stays, what is repaired, and which files are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from directories import refused
from plain_model import plain_grams
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cortiq_kernels.model.hf import create_model, open_model
from cortiq_kernels.recipes import capture, fold, score
from cortiq_kernels.recipes.capture_config import CaptureConfig
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.fold_config import FoldConfig
from cortiq_kernels.recipes.gram_file import Grams
from cortiq_kernels.recipes.score_config import ScoreConfig

SMALL = {"device": "cpu", "window": 32, "batch": 2}


def test_fold_with_grams_repairs(world, capture_cfg, loaded, build, tmp_path):
    """The written down_proj is that of the formula; the same neurons without repair are worse."""
    capture.run(capture_cfg)
    base = FoldConfig(world.teacher, tmp_path / "fold", grams=(capture_cfg.out,), device="cpu", align=4)
    events = []
    report = fold.run(base, events.append)
    plain = fold.run(dataclasses.replace(base, out=tmp_path / "plain", repair=False))
    measured = fold.run(FoldConfig(world.teacher, tmp_path / "data", world.data, dtype="f64", align=4, **SMALL))
    assert report.repaired and not plain.repaired and plain.residual == [] and not measured.repaired
    assert plain.kept_energy == pytest.approx(measured.kept_energy, rel=1e-5)
    before, after = build.tensors(world.teacher), build.tensors(tmp_path / "fold")
    same, data = build.tensors(tmp_path / "plain"), build.tensors(tmp_path / "data")
    assert all(torch.equal(t, data[n]) for n, t in same.items())
    w, _, records = loaded
    for i, gram in enumerate(plain_grams(w, records)):
        at = f"model.layers.{i}.mlp."
        down = before[at + "down_proj.weight"].double()
        keep = (gram.diagonal() * down.square().sum(0)).argsort(descending=True)[:20].sort().values
        assert torch.equal(after[at + "gate_proj.weight"], before[at + "gate_proj.weight"][keep])
        assert torch.equal(same[at + "down_proj.weight"], before[at + "down_proj.weight"][:, keep])
        gone = torch.tensor([j for j in range(40) if j not in keep.tolist()])
        inner = gram[keep][:, keep]
        inner += 1e-3 * inner.diagonal().mean() * torch.eye(20, dtype=torch.float64)
        want = down[:, keep] + down[:, gone] @ (torch.linalg.inv(inner) @ gram[keep][:, gone]).T
        torch.testing.assert_close(after[at + "down_proj.weight"], want.float(), rtol=1e-4, atol=1e-5)
        assert 0 < report.output_residual[i] < 1 and 0 < report.residual[i] < 1 and report.ridge[i] == 1e-3
    layers = [e for e in events if e["event"] == "layer"]
    assert [e["output_residual"] for e in layers] == report.output_residual
    s = score.run(ScoreConfig((world.teacher, tmp_path / "plain", tmp_path / "fold"), world.data, device="cpu",
                              dtype="f64", window=40, splits=("train",)))  # fmt: skip
    assert s.row("fold", "train").kl < s.row("plain", "train").kl


def test_a_model_with_every_neuron_twice_loses_nothing(world, build, tmp_path):
    """Twice the neurons, each with half of its down column: by gram one of each stays, and the repair doubles it."""
    tensors = build.tensors(world.teacher)
    for i in range(3):
        at = f"model.layers.{i}.mlp."
        for part in ("gate_proj.weight", "up_proj.weight"):
            tensors[at + part] = torch.cat([tensors[at + part]] * 2)
        half = tensors[at + "down_proj.weight"] / 2
        tensors[at + "down_proj.weight"] = torch.cat([half, half], 1)
    create_model(tmp_path / "twice", {**world.config, "intermediate_size": 80}, tensors)
    grams = tmp_path / "g.safetensors"
    capture.run(CaptureConfig(tmp_path / "twice", world.data, grams, dtype="f64", **SMALL))
    report = fold.run(FoldConfig(tmp_path / "twice", tmp_path / "once", grams=(grams,), rank="gram", ridge=1e-6,
                                 align=4, device="cpu"))  # fmt: skip
    assert report.width == 40 and max(report.residual) < 1e-5
    models = (world.teacher, tmp_path / "twice", tmp_path / "once")
    s = score.run(ScoreConfig(models, world.data, device="cpu", dtype="f64", window=40))
    assert s.row("once").nll == pytest.approx(s.row("teacher").nll, abs=1e-4)
    assert s.row("once").kl < 1e-6


def test_widths_of_each_layer(world, capture_cfg, tmp_path, build):
    capture.run(capture_cfg)
    grams = (capture_cfg.out,)
    base = FoldConfig(world.teacher, tmp_path / "f", grams=grams, device="cpu", align=4, widths=(12, 40, 20))
    report = fold.run(base)
    assert report.widths == [12, 40, 20] and report.width == 40 and report.residual[1] == 0.0
    m = open_model(tmp_path / "f")
    assert m.geometry.intermediate == (12, 40, 20) and any("differ per layer" in n for n in report.notes)
    assert torch.equal(m.read("model.layers.1.mlp.down_proj.weight"),
                       open_model(world.teacher).read("model.layers.1.mlp.down_proj.weight"))  # fmt: skip
    assert score.run(ScoreConfig((tmp_path / "f",), world.data, device="cpu")).rows[0].nll > 0
    for widths, words in (((12, 40), "one a layer"), ((12, 41, 20), "layer 1"), ((0, 1, 1), "at least 1")):
        with pytest.raises(InputError, match=words):
            fold.run(dataclasses.replace(base, out=tmp_path / "g", widths=widths))
    again = tmp_path / "again.safetensors"  # a capture of a model whose layers differ in width
    report = capture.run(dataclasses.replace(capture_cfg, model=tmp_path / "f", out=again))
    assert Grams.open([again]).widths == {0: 12, 1: 40, 2: 20}


@pytest.mark.parametrize("rank", ["activation", "magnitude", "random", "gram"])
def test_every_ranking_folds(world, capture_cfg, tmp_path, rank):
    capture.run(capture_cfg)
    base = FoldConfig(world.teacher, tmp_path / "f", grams=(capture_cfg.out,), device="cpu", align=4, rank=rank, seed=5)
    report = fold.run(base)
    best = fold.run(dataclasses.replace(base, rank="importance", out=tmp_path / "i"))
    assert report.width == 20 and all(a <= b + 1e-9 for a, b in zip(report.kept_energy, best.kept_energy, strict=True))
    assert open_model(tmp_path / "f").geometry.intermediate == (20,) * 3


def test_grams_that_do_not_fit_the_fold(capture_cfg, world, build, tmp_path):
    capture.run(dataclasses.replace(capture_cfg, max_batches=2))
    part = tmp_path / "part.safetensors"
    capture.run(dataclasses.replace(capture_cfg, out=part, layers=(2, 0, 2)))
    assert Grams.open([part]).widths == {0: 40, 2: 40}
    plain = tmp_path / "plain.safetensors"
    save_file({"x": torch.zeros(2)}, plain)
    cut, spoiled = tmp_path / "cut.safetensors", tmp_path / "spoiled.safetensors"
    cut.write_bytes(capture_cfg.out.read_bytes()[:-10])
    with safe_open(capture_cfg.out, "pt") as f:
        said = f.metadata()
    nan = {n: torch.full_like(t, float("nan")) for n, t in load_file(capture_cfg.out).items()}
    save_file(nan, spoiled, metadata=said)
    wrong = tmp_path / "wrong.safetensors"
    save_file(load_file(capture_cfg.out), wrong, metadata={**said, "widths": '{"0": 400}'})
    base = ("fold", "--out", tmp_path / "f", "--device", "cpu", "--model")
    for model, grams, words in (
        (world.student, (capture_cfg.out,), "the Grams of another model"),
        (world.teacher, (part,), "no Gram of layer [1]"),
        (world.teacher, (capture_cfg.out, part), "another model or other layers"),
        (world.teacher, (plain,), "no capture of this version"),
        (world.teacher, (cut,), "truncated"),
        (world.teacher, (wrong,), "does not fit its tensors"),
        (world.teacher, (tmp_path / "nowhere",), "no such file"),
    ):
        assert words in refused(tmp_path, *base, model, "--grams", *grams), words
    assert "not finite" in refused(tmp_path, *base, world.teacher, "--grams", spoiled, "--quiet", "--log", "/dev/null")
    assert "got both" in refused(tmp_path, *base, world.teacher, "--grams", capture_cfg.out, "--data", world.data)
    assert "got neither" in refused(tmp_path, *base, world.teacher)
    assert "'gram' without Grams" in refused(tmp_path, *base, world.teacher, "--data", world.data, "--rank", "gram")
