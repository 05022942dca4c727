"""Looped stacks in every recipe: scored as the deeper model that they are, healed, masked by visit, folded."""

from __future__ import annotations

import json

import pytest
import torch
from directories import SMALL, cortiq, id_rows, nll, read_dir, records, refused, tensors_of, write_dir
from report_world import HEAL
from safetensors.torch import load_file
from tiny import config

from cortiq_kernels.data.batches import eval_batches
from cortiq_kernels.data.records import load_records
from cortiq_kernels.data.windows import pack
from cortiq_kernels.model.hf import open_model
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.ops.gram import gram_finalize
from cortiq_kernels.recipes import capture
from cortiq_kernels.recipes.activity import first_order, measure
from cortiq_kernels.recipes.gram_file import Grams
from cortiq_kernels.recipes.keep import neuron_ranking
from cortiq_kernels.recipes.mask_file import read_masks
from cortiq_kernels.step import Buffers, Micro
from cortiq_kernels.step.forward import rope_for
from cortiq_kernels.step.gates import by_layer
from cortiq_kernels.step.loss import next_token_targets
from cortiq_kernels.step.train import mean_loss_and_gradients

LOOPED = config("LF", vocab=23, num_loops=2)


@pytest.fixture
def world(tmp_path):
    train = id_rows(23, (30, 25, 32, 28), "train", seed=1)
    known = [{**row, "rid": f"known{i}", "split": "val"} for i, row in enumerate(train)]  # what training must learn
    rows = train + known + id_rows(23, (20, 31))
    path = write_dir(tmp_path / "m", LOOPED, tensors_of(LOOPED))
    return path, records(tmp_path / "d.jsonl", rows)


@pytest.fixture
def deep(tmp_path, world):
    """The unrolled directory: layers 0 .. 3 are the visits of 0, 1, 0, 1."""
    tensors = dict(read_dir(world[0]))
    for name, t in list(tensors.items()):
        if name.startswith("model.layers."):
            _, _, i, rest = name.split(".", 3)
            tensors[f"model.layers.{int(i) + 2}.{rest}"] = t.clone()
    return write_dir(tmp_path / "deep", config("LFLF", vocab=23), tensors)


def test_scores_like_the_unrolled_directory(tmp_path, world, deep):
    path, data = world
    assert nll(model=path, data=data) == nll(model=deep, data=data)
    once = write_dir(tmp_path / "once", config("LF", vocab=23), read_dir(path))
    assert nll(model=path, data=data)[0] != nll(model=once, data=data)[0]


@pytest.mark.parametrize("more", [(), ("--genesis",)])
def test_heals(tmp_path, world, more):
    path, data = world
    out = tmp_path / "healed"
    done = cortiq("heal", "--student", path, "--data", data, "--out", out, *HEAL, "--epochs", "4", *more, "--json")
    assert done.status == 0, done.err
    assert json.loads((out / "config.json").read_text())["num_loops"] == 2
    assert done.json["loss_best"] < done.json["loss_start"]
    before, after = read_dir(path), read_dir(out)
    assert set(before) == set(after) and not torch.equal(before["model.layers.0.mlp.up_proj.weight"],
                                                         after["model.layers.0.mlp.up_proj.weight"])  # fmt: skip


def test_heal_has_no_prefix(tmp_path, world):
    path, data = world
    line = refused(
        tmp_path, "heal", "--student", path, "--data", data, "--out", tmp_path / "o", *HEAL, "--train-from", "1"
    )
    assert "heal: train_from: got 1 in a stack of 2 passes; expected 0" in line


def captured(model, data, out) -> dict:
    return cortiq("capture", "--model", model, "--data", data, "--out", out, *SMALL, "--dtype", "f64", "--json").json


def test_grams_add_up_over_visits(tmp_path, world, deep, monkeypatch):
    """Of the same model unrolled the Grams of both visits, whatever the passes; rows are those of one visit."""
    path, data = world
    files = {}
    for name, model in (("loop", path), ("deep", deep)):
        files[name] = tmp_path / f"{name}.safetensors"
        assert captured(model, data, files[name])["passes"] == 1
    loop, deeper = (Grams.open([f]) for f in files.values())
    assert loop.rows == deeper.rows and loop.widths == {0: 48, 1: 48}
    for i in range(2):
        want = gram_finalize(deeper.read(i), 48).double() + gram_finalize(deeper.read(i + 2), 48).double()
        torch.testing.assert_close(gram_finalize(loop.read(i), 48).double(), want, rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(capture.CapturePlan, "room", lambda self, memory: 1)
    again = tmp_path / "passes.safetensors"
    report = captured(path, data, again)
    assert report["passes"] == 2 and any("each of 2 passes starts at the first layer" in n for n in report["notes"])
    assert load_file(again).keys() == load_file(files["loop"]).keys()
    assert all(torch.equal(t, load_file(files["loop"])[n]) for n, t in load_file(again).items())


def test_activity_adds_up_over_visits(world, deep):
    path, data = world
    found = {}
    for name, place in (("loop", path), ("deep", deep)):
        records_ = load_records(data, None, splits=("train",), vocab=23).split("train")
        batches = list(eval_batches(pack(records_, 32).windows, 1))
        w = Weights.load(open_model(place), dtype=torch.float64)
        found[name] = (measure(w, batches), w, batches)
    (loop, w, batches), (deeper, w_deep, _) = found["loop"], found["deep"]
    assert loop.rows == deeper.rows
    for i in range(2):
        torch.testing.assert_close(loop.square[i], deeper.square[i] + deeper.square[i + 2])
        torch.testing.assert_close(loop.absolute[i], deeper.absolute[i] + deeper.absolute[i + 2])
    one = first_order(w, batches[:1])  # of one batch: of the visits' gradients the size of their sum
    grad = torch.zeros(4 * 48, dtype=torch.float64)
    buf = Buffers(w_deep.geometry, len(batches[0].tokens), torch.float64, w.device, save_from=0)
    micro = Micro(batches[0], next_token_targets(batches[0]))
    mean_loss_and_gradients(
        w_deep, buf, [micro], rope_for(w_deep, 32), torch.ones(()), stop=0,
        masks=by_layer(torch.ones_like(grad), w_deep.geometry), dmasks=by_layer(grad, w_deep.geometry),
    )  # fmt: skip
    a, b, c, d = grad.split(48)
    torch.testing.assert_close(torch.cat(one), torch.cat([(a + c).abs(), (b + d).abs()]))


def test_masks_by_visit_and_their_fold(tmp_path, world, deep):
    """Four masks of two layers; the same held-out loss as the unrolled model under them; fold keeps their union."""
    path, data = world
    out = tmp_path / "m.safetensors"
    pressure = ("--eval-every", 5, "--max-steps", 40, "--l1-init", 3, "--l1-grow", 2, "--dtype", "f64")
    report = cortiq("masks", "--model", path, "--data", data, "--out", out, *SMALL, *pressure, "--json").json
    masks = read_masks(out, open_model(path).geometry, "masks")
    assert report["gates"] == 4 * 48 and report["kept"] == [int(k.sum()) for k in masks.kept] and len(masks.kept) == 4
    assert report["pruned"] == pytest.approx(1 - sum(report["kept"]) / 192) and report["reached"]
    tensors = read_dir(deep)
    for i, k in enumerate(masks.kept):
        tensors[f"model.layers.{i}.mlp.down_proj.weight"] *= k
    cut = write_dir(tmp_path / "cut", config("LFLF", vocab=23), tensors)
    assert nll(model=cut, data=data, split="val")[0] == pytest.approx(report["loss_best"], rel=1e-6)
    text = (tmp_path / "m.html").read_text()
    assert "Open gates by layer" in text
    args = ("--model", path, "--data", data, "--masks", out, "--per-layer", "--align", 1, *SMALL)
    folded = cortiq("fold", *args, "--out", tmp_path / "folded", "--json").json
    union = [masks.kept[i] | masks.kept[i + 2] for i in range(2)]
    assert folded["widths"] == [int(u.sum()) for u in union] != [48, 48]
    assert any("mask of any visit keeps" in n for n in folded["notes"])
    before, after = read_dir(path), read_dir(tmp_path / "folded")
    for i, u in enumerate(union):
        name = f"model.layers.{i}.mlp.down_proj.weight"
        assert torch.equal(after[name], before[name][:, u])
    assert open_model(tmp_path / "folded").geometry.num_loops == 2


def test_repair_of_a_looped_stack(tmp_path, world):
    """Folded with the Grams of all visits: nearer to the original than without repair."""
    path, data = world
    grams = tmp_path / "g.safetensors"
    captured(path, data, grams)
    losses = {}
    for name, more in (("repaired", ()), ("cut", ("--no-repair",))):
        args = ("--model", path, "--grams", grams, "--out", tmp_path / name, "--width", 24, "--device", "cpu", *more)
        assert cortiq("fold", *args).status == 0
        models = ("--models", path, tmp_path / name)
        rows = cortiq("score", *models, "--data", data, *SMALL, "--splits", "val", "--json").json["rows"]
        losses[name] = next(r["kl"] for r in rows if r["kl"] is not None)
    assert losses["repaired"] < losses["cut"]


def test_ranking_over_visits():
    kept = [torch.tensor([1, 0, 0, 1]).bool(), torch.tensor([0, 0, 1, 0]).bool()]
    logits = [torch.tensor([3.0, 2.0, -9.0, 0.5]), torch.tensor([-1.0, 2.5, 1.0, -2.0])]
    (scores,) = neuron_ranking(kept, logits, 1)
    assert scores.argsort(descending=True).tolist() == [0, 2, 3, 1]  # neuron 1 is closed in both
    assert neuron_ranking(kept, logits, 2) == logits
