"""Fold: the kept set, what is written, and that nothing else moves."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from plain_model import gdn, rms

from cortiq_kernels.data.batches import eval_batches
from cortiq_kernels.data.records import load_records
from cortiq_kernels.data.windows import pack
from cortiq_kernels.model.geometry import ModelError
from cortiq_kernels.model.hf import create_model, open_model
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes import fold, repair, score
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.fold_config import FoldConfig
from cortiq_kernels.recipes.score_config import ScoreConfig


@pytest.fixture
def cfg(world, tmp_path) -> FoldConfig:
    return FoldConfig(
        model=world.teacher, data=world.data, out=tmp_path / "fold", device="cpu", window=32, batch=2, align=4
    )


def test_neurons_that_matter_stay_and_the_model_is_the_same(cfg, build, world, tmp_path):
    """Half the columns of down are zero: exactly the other half must stay, and then nothing is lost."""
    gen = torch.Generator().manual_seed(3)
    tensors = build.tensors(world.teacher)
    alive = {}
    for i in range(3):
        name = f"model.layers.{i}.mlp.down_proj.weight"
        alive[i] = torch.randperm(40, generator=gen)[:20].sort().values
        mask = torch.zeros(40)
        mask[alive[i]] = 1.0
        tensors[name] = tensors[name] * mask
    create_model(tmp_path / "half", world.config, tensors)
    report = fold.run(dataclasses.replace(cfg, model=tmp_path / "half"))
    assert report.width == 20 and report.kept_energy == pytest.approx([1.0] * 3)
    after = build.tensors(cfg.out)
    for i, keep in alive.items():
        at = f"model.layers.{i}.mlp."
        assert torch.equal(after[at + "gate_proj.weight"], tensors[at + "gate_proj.weight"][keep])
        assert torch.equal(after[at + "up_proj.weight"], tensors[at + "up_proj.weight"][keep])
        assert torch.equal(after[at + "down_proj.weight"], tensors[at + "down_proj.weight"][:, keep])
    assert all(torch.equal(t, after[n]) for n, t in tensors.items() if ".mlp." not in n)
    s = score.run(ScoreConfig((tmp_path / "half", cfg.out), world.data, device="cpu", dtype="f64", window=40))
    assert s.row("fold").nll == pytest.approx(s.row("half").nll, rel=1e-10)


def test_energy_is_that_of_real_rows_only(world, build, tmp_path):
    cfg = build.config("L", hidden=24, ffn=40, vocab=23)
    m = open_model(build.model(tmp_path / "one", cfg))
    w = Weights.load(m, dtype=torch.float64)
    p = {n: w[n] for n in w.names}
    records = load_records(world.data, None, splits=("train",), vocab=23).split("train")
    want, rows = torch.zeros(40, dtype=torch.float64), 0
    for r in records:
        x = p["embed"][torch.from_numpy(r.ids).long()]
        x = x + gdn(p, "layers.0.", rms(x, 1e-6) * (1 + p["layers.0.input_norm"]), m.geometry)
        n = rms(x, 1e-6) * (1 + p["layers.0.post_norm"])
        gate, up = (n @ p["layers.0.gate_up"].T).chunk(2, -1)
        want += (F.silu(gate) * up).square().sum(0)
        rows += len(r.ids)
    for window, batch in ((32, 2), (100, 3)):
        batches = list(eval_batches(pack(records, window).windows, batch))
        energy, n_rows = fold.activation_energy(w, batches)
        assert n_rows == rows
        torch.testing.assert_close(energy[0], want, rtol=1e-9, atol=1e-12)


def test_importance_and_ties():
    down = torch.tensor([[1.0, 0.0, 2.0], [1.0, 3.0, 0.0]])
    s = repair.importance(torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64), down)
    assert s.tolist() == [4.0, 9.0, 4.0]
    assert repair.keep_top(s, 2).tolist() == [0, 1]
    assert repair.keep_top(torch.tensor([1.0, 5.0, 3.0, 5.0]), 3).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("f", "keep", "width", "align", "want"),
    [(96, 0.4, None, 32, 64), (64, 1.0, None, 32, 64), (48, 0.97, None, 32, 48), (48, 0.01, None, 32, 32),
     (40, 0.5, None, 1, 20), (3584, 0.5, None, 32, 1792), (96, 0.5, 37, 32, 37)],
)  # fmt: skip
def test_width(world, f, keep, width, align, want):
    cfg = FoldConfig(world.teacher, world.data, world.data, keep=keep, width=width, align=align)
    assert cfg.target_width(f) == want


def test_config_and_mtp_agree_with_the_new_width(cfg, build, world, tmp_path):
    extra = {"mtp.layers.0.mlp.down_proj.weight": torch.ones(24, 40), "mtp.fc.weight": torch.ones(24, 48)}
    model = build.model(tmp_path / "mtp", {**world.config, "mtp_num_hidden_layers": 1}, extra=extra)
    report = fold.run(dataclasses.replace(cfg, model=model, width=21))
    after = json.loads((cfg.out / "config.json").read_text())
    assert after["intermediate_size"] == 21 and after["mtp_num_hidden_layers"] == 0
    assert not any(n.startswith("mtp.") for n in build.tensors(cfg.out))
    assert any("MTP" in n for n in report.notes)
    assert any("not a multiple of 4" in n for n in report.notes)
    assert open_model(cfg.out).geometry.intermediate == (21,) * 3
    assert len(json.loads((cfg.out / "cortiq.json").read_text())["provenance"]["kept_energy"]) == 3


def test_refusals(cfg, tmp_path, build, world):
    with pytest.raises(InputError, match="narrowest"):
        fold.run(dataclasses.replace(cfg, width=41))
    with pytest.raises(InputError, match="keep"):
        fold.run(dataclasses.replace(cfg, keep=0.0))
    with pytest.raises(ModelError):
        fold.run(dataclasses.replace(cfg, out=cfg.model))
    tensors = build.tensors(world.teacher)
    tensors["model.layers.1.mlp.up_proj.weight"].zero_()
    create_model(tmp_path / "dead", world.config, tensors)
    with pytest.raises(InputError, match="layer 1"):
        fold.run(dataclasses.replace(cfg, model=tmp_path / "dead"))
    assert not cfg.out.exists()
