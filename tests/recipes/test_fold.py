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
from cortiq_kernels.recipes import capture, fold, repair, score
from cortiq_kernels.recipes.activity import first_order, measure
from cortiq_kernels.recipes.capture_config import CaptureConfig
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.fold_config import FoldConfig
from cortiq_kernels.recipes.score_config import ScoreConfig
from cortiq_kernels.step import Evaluator, Micro
from cortiq_kernels.step.loss import next_token_targets


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
    want, size, rows = torch.zeros(40, dtype=torch.float64), torch.zeros(40, dtype=torch.float64), 0
    for r in records:
        x = p["embed"][torch.from_numpy(r.ids).long()]
        x = x + gdn(p, "layers.0.", rms(x, 1e-6) * (1 + p["layers.0.input_norm"]), m.geometry)
        n = rms(x, 1e-6) * (1 + p["layers.0.post_norm"])
        gate, up = (n @ p["layers.0.gate_up"].T).chunk(2, -1)
        want += (F.silu(gate) * up).square().sum(0)
        size += (F.silu(gate) * up).abs().sum(0)
        rows += len(r.ids)
    for window, batch in ((32, 2), (100, 3)):
        batches = list(eval_batches(pack(records, window).windows, batch))
        seen = measure(w, batches)
        assert seen.rows == rows
        torch.testing.assert_close(seen.square[0], want, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(seen.absolute[0], size, rtol=1e-9, atol=1e-12)


def test_first_order_is_the_loss_that_a_gate_moves(world, build, tmp_path):
    """Against central differences of a neuron's gate, in float64; the loss scale leaves nothing behind."""
    w = Weights.load(open_model(world.teacher), dtype=torch.float64)
    records = load_records(world.data, None, splits=("train",), vocab=23).split("train")
    batches = list(eval_batches(pack(records, 32).windows, 2))[:2]
    got = first_order(w, batches)
    again = first_order(w, batches, scale=64.0)
    assert [len(t) for t in got] == list(w.geometry.intermediate)
    torch.testing.assert_close(got, again, rtol=1e-12, atol=0)
    evaluator = Evaluator(w, batches[0].tokens.numel(), batches[0].max_seqlen)
    for layer, j in ((0, 0), (1, 7), (2, 39)):
        want = 0.0
        for b in batches:
            loss = []
            for step in (1e-4, -1e-4):
                gate = torch.ones(w.geometry.intermediate[layer], dtype=torch.float64)
                gate[j] += step
                evaluator.masks = {layer: gate}
                loss.append(evaluator.loss([Micro(b, next_token_targets(b))]))
            want += abs(loss[0] - loss[1]) / 2e-4
        assert float(got[layer][j]) == pytest.approx(want, rel=1e-5, abs=1e-10)


@pytest.mark.parametrize("rank", ["absolute", "first_order"])
def test_rankings_that_need_records_work_with_grams_too(cfg, world, tmp_path, rank):
    """The same neurons stay with Grams and without; with them down_proj is repaired."""
    capture.run(CaptureConfig(world.teacher, world.data, tmp_path / "g.safetensors", device="cpu", window=32, batch=2))
    alone = dataclasses.replace(cfg, rank=rank, dtype="f64")
    both = dataclasses.replace(alone, out=tmp_path / "both", grams=(tmp_path / "g.safetensors",))
    batches = list(fold.plan_fold(alone).measured.batches)
    assert not fold.run(alone).repaired and fold.run(both).repaired
    a, b = (open_model(c.out) for c in (alone, both))
    gates = [f"model.layers.{i}.mlp.gate_proj.weight" for i in range(3)]
    assert all(torch.equal(a.read(n), b.read(n)) for n in gates)
    w = Weights.load(open_model(world.teacher), dtype=torch.float64)
    score = measure(w, batches).absolute if rank == "absolute" else first_order(w, batches)
    full = open_model(world.teacher)
    for i, s in enumerate(score):
        name = gates[i]
        keep = repair.keep_top(s, a.geometry.intermediate[i])
        assert torch.equal(a.read(name), full.read(name)[keep])


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
    with pytest.raises(InputError, match="without records"):
        fold.run(dataclasses.replace(cfg, rank="first_order", data=None, grams=(tmp_path / "g.safetensors",)))
    with pytest.raises(InputError, match="got both"):
        fold.run(dataclasses.replace(cfg, grams=(tmp_path / "g.safetensors",)))
    with pytest.raises(ModelError):
        fold.run(dataclasses.replace(cfg, out=cfg.model))
    tensors = build.tensors(world.teacher)
    tensors["model.layers.1.mlp.up_proj.weight"].zero_()
    create_model(tmp_path / "dead", world.config, tensors)
    with pytest.raises(InputError, match="layer 1"):
        fold.run(dataclasses.replace(cfg, model=tmp_path / "dead"))
    assert not cfg.out.exists()
