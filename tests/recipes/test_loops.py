"""Looped stacks on the command line: scored as the deeper model that they are, healed, and refused elsewhere."""

from __future__ import annotations

import json

import pytest
import torch
from directories import cortiq, id_rows, nll, read_dir, records, refused, tensors_of, write_dir
from report_world import HEAL
from tiny import config

LOOPED = config("LF", vocab=23, num_loops=2)


@pytest.fixture
def world(tmp_path):
    train = id_rows(23, (30, 25, 32, 28), "train", seed=1)
    known = [{**row, "rid": f"known{i}", "split": "val"} for i, row in enumerate(train)]  # what training must learn
    rows = train + known + id_rows(23, (20, 31))
    path = write_dir(tmp_path / "m", LOOPED, tensors_of(LOOPED))
    return path, records(tmp_path / "d.jsonl", rows)


def test_scores_like_the_unrolled_directory(tmp_path, world):
    path, data = world
    tensors = read_dir(path)
    deep = dict(tensors)
    for name, t in tensors.items():
        if name.startswith("model.layers."):
            _, _, i, rest = name.split(".", 3)
            deep[f"model.layers.{int(i) + 2}.{rest}"] = t.clone()
    unrolled = write_dir(tmp_path / "deep", config("LFLF", vocab=23), deep)
    assert nll(model=path, data=data) == nll(model=unrolled, data=data)
    once = write_dir(tmp_path / "once", config("LF", vocab=23), tensors)
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


def test_what_takes_each_layer_to_run_once_refuses(tmp_path, world):
    path, data = world
    for recipe, out in (("fold", "o"), ("capture", "g.safetensors")):
        line = refused(tmp_path, recipe, "--model", path, "--data", data, "--out", tmp_path / out, "--device", "cpu")
        assert f"{recipe}: num_loops: got 2; expected 1" in line
    line = refused(
        tmp_path, "heal", "--student", path, "--data", data, "--out", tmp_path / "o", *HEAL, "--train-from", "1"
    )
    assert "heal: train_from: got 1 in a stack of 2 passes; expected 0" in line
