"""Scores against a plain float64 model, one record at a time."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from plain_model import hidden_states

from cortiq_kernels.data.record import DataError
from cortiq_kernels.model.hf import open_model
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes import score
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.score_config import ScoreConfig


@pytest.fixture
def cfg(world) -> ScoreConfig:
    return ScoreConfig(
        models=(world.teacher, world.student), data=world.data, device="cpu", dtype="f64", window=40, batch=2
    )


def oracle(path, data, split: str):
    """(log q [n, V] of every scored token, true ids [n], categories [n]) of a model, record by record."""
    m = open_model(path)
    w = Weights.load(m, dtype=torch.float64)
    p = {name: w[name] for name in w.names}
    head = p["embed"] if m.geometry.tied else p["head"]
    logq, true, categories = [], [], []
    for line in data.read_text().splitlines():
        r = json.loads(line)
        if r["split"] != split:
            continue
        ids = torch.tensor(r["ids"])
        first = max(r["first_target"], 1)
        h = hidden_states(p, m.geometry, ids)
        logq.append(torch.log_softmax(h @ head.T, -1)[first - 1 : -1])
        true.append(ids[first:])
        categories += [r["category"]] * (len(ids) - first)
    return torch.cat(logq), torch.cat(true), categories


def test_against_a_plain_model(cfg, world):
    report = score.run(dataclasses.replace(cfg, splits=("test", "val")))
    assert list(report.models) == ["teacher", "student"]
    for split in ("test", "val"):
        logp, true, categories = oracle(world.teacher, world.data, split)
        for name, path in (("teacher", world.teacher), ("student", world.student)):
            logq, _, _ = oracle(path, world.data, split)
            nll = -logq.gather(1, true[:, None]).squeeze(1)
            kl = (logp.exp() * (logp - logq)).sum(1)
            same = (logp.argmax(1) == logq.argmax(1)).double()
            for category in (None, "a", "b"):
                mine = torch.tensor([category in (None, c) for c in categories])
                row = report.row(name, split, category)
                assert row.count == int(mine.sum())
                assert row.nll == pytest.approx(float(nll[mine].mean()), rel=1e-9)
                assert row.perplexity == pytest.approx(math.exp(row.nll))
                if name == "student":
                    assert row.kl == pytest.approx(float(kl[mine].mean()), rel=1e-6)
                    assert row.agreement == pytest.approx(float(same[mine].mean()))
                else:
                    assert row.kl is None and row.agreement is None


@pytest.mark.parametrize(("window", "batch"), [(8, 1), (40, 1), (64, 7), (512, 3)])
def test_independent_of_window_and_batch(cfg, window, batch):
    want = score.run(cfg)
    got = score.run(dataclasses.replace(cfg, window=window, batch=batch))
    for a, b in zip(want.rows, got.rows, strict=True):
        assert (a.model, a.category, a.count, a.records) == (b.model, b.category, b.count, b.records)
        assert b.nll == pytest.approx(a.nll, rel=1e-9)
        assert b.kl is None or b.kl == pytest.approx(a.kl, rel=1e-6)


def test_a_token_counts_once_whatever_its_record_weighs(cfg, world, tmp_path):
    records = [json.loads(line) for line in world.data.read_text().splitlines()]
    heavy = tmp_path / "heavy.jsonl"
    heavy.write_text("\n".join(json.dumps({**r, "weight": 5.0 if i % 3 else 0.5}) for i, r in enumerate(records)))
    a, b = score.run(cfg), score.run(dataclasses.replace(cfg, data=heavy))
    assert [r.nll for r in a.rows] == [r.nll for r in b.rows]


def test_first_equal_maximum_wins():
    assert score.top1(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])).tolist() == [1, 0]


def test_logits_in_slabs_are_the_whole(cfg, monkeypatch):
    want = score.run(cfg)
    monkeypatch.setattr("cortiq_kernels.recipes.rows._SLAB", {"cpu": 23 * 3})
    got = score.run(cfg)
    for a, b in zip(want.rows, got.rows, strict=True):
        assert b.nll == pytest.approx(a.nll, rel=1e-12)
        assert b.kl is None or b.kl == pytest.approx(a.kl, rel=1e-9)


def test_result_file_and_names(cfg, build, world, tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        build.model(tmp_path / name / "m", world.config, seed=5)
    out = tmp_path / "scores.json"
    report = score.run(dataclasses.replace(cfg, models=(tmp_path / "x" / "m", tmp_path / "y" / "m"), out=out))
    assert list(report.models) == ["x/m", "y/m"]
    row = report.row("y/m")
    assert row.agreement == 1.0 and row.kl == pytest.approx(0.0, abs=1e-12)
    assert json.loads(out.read_text())["rows"] == [dataclasses.asdict(r) for r in report.rows]


def test_refusals(cfg, build, tmp_path):
    with pytest.raises(InputError, match="splits"):
        score.run(dataclasses.replace(cfg, splits=("dev",)))
    with pytest.raises(InputError, match="same directory twice"):
        score.run(dataclasses.replace(cfg, models=(cfg.models[0],) * 2))
    data = build.records(tmp_path / "d.jsonl", 23, test=0)
    with pytest.raises((InputError, DataError), match="0 records are test"):
        score.run(dataclasses.replace(cfg, data=data))
    with pytest.raises(InputError, match="out"):
        score.run(dataclasses.replace(cfg, out=tmp_path / "no" / "such" / "file.json"))


def test_test_records_are_opened_by_score_alone(cfg, build, world, tmp_path, monkeypatch):
    """Test records that could not even be tokenised change no byte of a fold or a heal; score refuses them."""
    from cortiq_kernels.data import records as reading
    from cortiq_kernels.recipes import fold, heal
    from cortiq_kernels.recipes.fold_config import FoldConfig
    from cortiq_kernels.recipes.heal_config import HealConfig

    opened: set[str] = set()
    real = reading.encode_examples

    def watched(examples, *args, **kwargs):
        opened.update(e.split for e in examples)
        return real(examples, *args, **kwargs)

    monkeypatch.setattr(reading, "encode_examples", watched)
    lines = world.data.read_text().splitlines()
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(line if '"test"' not in line else json.dumps(json.loads(line) | {"ids": [10**6] * 9})
                               for line in lines))  # fmt: skip
    small = {"window": 32, "batch": 2, "device": "cpu"}
    for name, data in (("a", world.data), ("b", other)):
        fold.run(FoldConfig(world.teacher, tmp_path / f"fold-{name}", data, align=4, **small))
        out = tmp_path / f"heal-{name}"
        heal.run(HealConfig(world.student, data, out, world.teacher, lr=1e-3, epochs=0.5, topk=8, **small))
    assert opened == {"train", "val"}
    for what in ("fold", "heal"):
        a, b = (build.tensors(tmp_path / f"{what}-{name}") for name in "ab")
        assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    with pytest.raises(DataError, match="cannot be used"):
        score.run(dataclasses.replace(cfg, data=other))


def test_four_models_side_by_side(cfg, build, world, tmp_path):
    """Each is compared with the first, whatever its width or dtype, and alone it has the same NLL."""
    from cortiq_kernels.recipes import fold
    from cortiq_kernels.recipes.fold_config import FoldConfig

    fold.run(FoldConfig(world.teacher, tmp_path / "fold", world.data, width=12, device="cpu", window=32, batch=2))
    build.model(tmp_path / "half", world.config, noise=0.03, dtype=torch.bfloat16)
    models = (world.teacher, world.student, tmp_path / "fold", tmp_path / "half")
    report = score.run(dataclasses.replace(cfg, models=models))
    names = list(report.models)
    assert names == ["teacher", "student", "fold", "half"] and set(report.tokens_per_s) == set(names)
    assert all(v > 0 for v in report.tokens_per_s.values())
    first = report.row("teacher")
    assert first.kl is None and first.agreement is None
    for name, path in zip(names, models, strict=True):
        alone = score.run(dataclasses.replace(cfg, models=(path,)))
        assert report.row(name).nll == pytest.approx(alone.row(name).nll, rel=1e-9)
        if name != "teacher":
            pair = score.run(dataclasses.replace(cfg, models=(world.teacher, path)))
            assert (pair.row(name).kl, pair.row(name).agreement) == (report.row(name).kl, report.row(name).agreement)
            assert report.row(name).kl > 0 and 0 <= report.row(name).agreement <= 1
