"""Capture: what is summed, in how many passes, what is written and what is refused; and the fold that uses it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from directories import cortiq, refused
from plain_model import attention, gdn, rms
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cortiq_kernels.data.batches import eval_batches
from cortiq_kernels.data.records import load_records
from cortiq_kernels.data.windows import pack
from cortiq_kernels.model.hf import create_model, open_model
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.ops.gram import gram_finalize
from cortiq_kernels.recipes import capture, capture_pass, fold, score
from cortiq_kernels.recipes.capture_config import CaptureConfig
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.fold_config import FoldConfig
from cortiq_kernels.recipes.gram_file import Grams
from cortiq_kernels.recipes.score_config import ScoreConfig

SMALL = {"device": "cpu", "window": 32, "batch": 2}


@pytest.fixture
def cfg(world, tmp_path) -> CaptureConfig:
    return CaptureConfig(world.teacher, world.data, tmp_path / "grams.safetensors", dtype="f64", **SMALL)


@pytest.fixture
def loaded(world):
    """(weights in float64, batches, records) of the teacher and the train records."""
    w = Weights.load(open_model(world.teacher), dtype=torch.float64)
    records = load_records(world.data, None, splits=("train",), vocab=23).split("train")
    return w, list(eval_batches(pack(records, 32).windows, 2)), records


def grams_of(w, batches, layers=(0, 1, 2), **more):
    return dict(capture_pass.capture(w, batches, layers, window=32, **more))


def plain_grams(w, records):
    """Dense float64 Grams by the formula, a record at a time."""
    p, g = {n: w[n] for n in w.names}, w.geometry
    want = [torch.zeros(f, f, dtype=torch.float64) for f in g.intermediate]
    for r in records:
        x = p["embed"][torch.from_numpy(r.ids).long()]
        for i in range(g.n_layers):
            at = f"layers.{i}."
            n = rms(x, g.eps) * (1 + p[at + "input_norm"])
            x = x + (attention if g.is_full(i) else gdn)(p, at, n, g)
            n = rms(x, g.eps) * (1 + p[at + "post_norm"])
            gate, up = (n @ p[at + "gate_up"].T).chunk(2, -1)
            act = F.silu(gate) * up
            want[i] += act.T @ act
            x = x + act @ p[at + "down"].T
    return want


def test_grams_are_those_of_the_formula(cfg, loaded):
    w, _, records = loaded
    report = capture.run(cfg)
    grams = Grams.open([cfg.out])
    assert grams.rows == report.rows == sum(len(r.ids) for r in records)
    for i, want in enumerate(plain_grams(w, records)):
        got = gram_finalize(grams.read(i), 40).double()
        scale = want.diagonal().sqrt()
        assert ((got - want).abs() <= 1e-6 * scale[:, None] * scale).all()
        assert report.energy[i] == pytest.approx(float(want.diagonal().mean() / report.rows), rel=1e-5)
    assert report.dead == [0, 0, 0] and report.layers == [0, 1, 2] and report.passes == 1


def test_the_file(cfg, world):
    report = capture.run(cfg)
    tensors = load_file(cfg.out)  # the format's own library reads it
    assert {n: tuple(t.shape) for n, t in tensors.items()} == {f"layers.{i}.gram": (1, 128, 128) for i in range(3)}
    assert all(t.dtype == torch.float32 and not t[:, 40:].any() and not t[:, :, 40:].any() for t in tensors.values())
    with safe_open(cfg.out, "pt") as f:
        said = f.metadata()
    assert int(said["rows"]) == report.rows and json.loads(said["widths"]) == {"0": 40, "1": 40, "2": 40}
    assert len(said["data_sha256"]) == 64 and json.loads(said["provenance"])["recipe"] == "capture"
    assert sorted(p.name for p in cfg.out.parent.iterdir()) == ["grams.safetensors"]


def test_padding_never_enters(loaded, monkeypatch):
    w, batches, _ = loaded
    assert any(sum(b.n_tokens) < len(b.tokens) for b in batches)
    want = grams_of(w, batches)
    right = capture_pass.gram_accumulate_

    def with_garbage(gram, x, *, row_index):
        dirty = torch.full_like(x, float("nan"))
        dirty[row_index] = x[row_index]
        return right(gram, dirty, row_index=row_index)

    monkeypatch.setattr(capture_pass, "gram_accumulate_", with_garbage)
    got = grams_of(w, batches)
    assert all(torch.equal(got[i], want[i]) for i in range(3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_passes_give_the_same_bits(world, loaded, dtype, monkeypatch):
    """One layer a pass, resumed or from the start, is one pass; resumed, every layer runs once a batch."""
    _, batches, _ = loaded
    w = Weights.load(open_model(world.teacher), dtype=dtype)
    ran = []
    right = capture_pass.layers_forward

    def counted(w, buf, x, seqs, start, stop, **more):
        ran.append((start, stop))
        return right(w, buf, x, seqs, start, stop, **more)

    monkeypatch.setattr(capture_pass, "layers_forward", counted)
    want, n = grams_of(w, batches), len(batches)
    assert ran == [(0, 3)] * n
    ran.clear()
    got = grams_of(w, batches, room=1)
    assert ran == [(0, 1)] * n + [(1, 2)] * n + [(2, 3)] * n
    assert all(torch.equal(got[i], want[i]) for i in range(3))
    ran.clear()
    got = grams_of(w, batches, room=1, keep_stream=False)
    assert ran == [(0, 1)] * n + [(0, 2)] * n + [(0, 3)] * n
    assert all(torch.equal(got[i], want[i]) for i in range(3))
    two = grams_of(w, batches, (2, 0, 2), room=1)
    assert list(two) == [0, 2] and torch.equal(two[2], want[2])


def test_streams_serve_the_same_set_only(loaded, monkeypatch):
    w, batches, _ = loaded
    want = grams_of(w, batches)
    kept, starts = capture_pass.Residuals(), []
    right = capture_pass.layers_forward
    monkeypatch.setattr(
        capture_pass, "layers_forward",
        lambda w, b, x, s, start, stop, **m: starts.append(start) or right(w, b, x, s, start, stop, **m),
    )  # fmt: skip

    def measured(batches, layers):
        starts.clear()
        found = grams_of(w, batches, layers, kept=kept)
        return found, set(starts)

    assert measured(batches, [0])[1] == {0} and kept.layer == 1 and len(kept.streams) == len(batches)
    again, start = measured(batches, [1])
    assert start == {1} and torch.equal(again[1], want[1]) and kept.layer == 2
    again, start = measured(batches, [1])  # below what is kept: from the start
    assert start == {0} and torch.equal(again[1], want[1])
    other = measured(batches[:-1], [2])  # another set
    assert other[1] == {0}
    again, start = measured(batches, [1, 2])
    assert start == {0} and all(torch.equal(again[i], want[i]) for i in (1, 2))


def test_plan_of_passes():
    one = capture_pass.gram_bytes(100)
    assert one == 128 * 128 * 4 and capture_pass.gram_bytes(129) == 3 * one
    widths = {0: 100, 1: 100, 2: 129, 3: 100, 5: 100}
    assert capture_pass.plan_passes(widths, 10 * one) == [(0, 1, 2, 3, 5)]
    assert capture_pass.plan_passes(widths, 4 * one) == [(0, 1), (2, 3), (5,)]
    assert capture_pass.plan_passes(widths, 0) == [(0,), (1,), (2,), (3,), (5,)]
    assert capture_pass.layers_run([(0, 1), (2, 3), (5,)], True) == [2, 2, 2]
    assert capture_pass.layers_run([(0, 1), (2, 3), (5,)], False) == [2, 4, 6]


def test_room_mb_changes_passes_and_no_byte(world, build, tmp_path):
    wide = build.config("LFL", hidden=16, ffn=520, vocab=23)  # 15 tiles, 0.94 MiB a layer
    model = build.model(tmp_path / "m", wide)
    files, events = [], []
    for room in (None, 2, 1):
        out = tmp_path / f"{room}.safetensors"
        cfg = CaptureConfig(model, world.data, out, room_mb=room, **SMALL)
        report = capture.run(cfg, events.append)
        assert report.passes == {None: 1, 2: 2, 1: 3}[room]
        files.append(out.read_bytes())
    assert files[0] == files[1] == files[2]
    ticks = [e for e in events if e["event"] == "tick"]
    last = ticks[-1]
    assert last["done"] == last["of"] and last["left_s"] == 0 and all(e["tokens_per_s"] > 0 for e in ticks)


def test_two_captures_add_up(world, cfg, tmp_path, build):
    lines = [json.loads(line) for line in world.data.read_text().splitlines()]
    train, rest = [r for r in lines if r["split"] == "train"], [r for r in lines if r["split"] != "train"]
    outs = []
    for k, part in enumerate((train[:15], train[15:], train)):
        data = tmp_path / f"{k}.jsonl"
        data.write_text("".join(json.dumps(r) + "\n" for r in part + rest))
        outs.append(tmp_path / f"{k}.safetensors")
        capture.run(dataclasses.replace(cfg, data=data, out=outs[-1]))
    both, whole = Grams.open(outs[:2]), Grams.open(outs[2:])
    assert both.rows == whole.rows and len(both.hashes) == 2
    for i in range(3):
        torch.testing.assert_close(both.read(i), whole.read(i).double(), rtol=1e-6, atol=1e-6)
    with pytest.raises(InputError, match="the same records in two captures"):
        Grams.open([outs[0], outs[1], outs[0]])
    args = FoldConfig(world.teacher, tmp_path / "a", grams=tuple(outs[:2]), device="cpu", align=4)
    a = fold.run(args)
    b = fold.run(dataclasses.replace(args, out=tmp_path / "b", grams=(outs[2],)))
    assert a.output_residual == pytest.approx(b.output_residual, rel=1e-4)


def test_fold_with_grams_repairs(world, cfg, loaded, build, tmp_path):
    """The written down_proj is that of the formula; the same neurons without repair are worse."""
    capture.run(cfg)
    base = FoldConfig(world.teacher, tmp_path / "fold", grams=(cfg.out,), device="cpu", align=4)
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


def test_widths_of_each_layer(world, cfg, tmp_path, build):
    capture.run(cfg)
    base = FoldConfig(world.teacher, tmp_path / "f", grams=(cfg.out,), device="cpu", align=4, widths=(12, 40, 20))
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
    report = capture.run(dataclasses.replace(cfg, model=tmp_path / "f", out=again))
    assert Grams.open([again]).widths == {0: 12, 1: 40, 2: 20}


@pytest.mark.parametrize("rank", ["activation", "magnitude", "random", "gram"])
def test_every_ranking_folds(world, cfg, tmp_path, rank):
    capture.run(cfg)
    base = FoldConfig(world.teacher, tmp_path / "f", grams=(cfg.out,), device="cpu", align=4, rank=rank, seed=5)
    report = fold.run(base)
    best = fold.run(dataclasses.replace(base, rank="importance", out=tmp_path / "i"))
    assert report.width == 20 and all(a <= b + 1e-9 for a, b in zip(report.kept_energy, best.kept_energy, strict=True))
    assert open_model(tmp_path / "f").geometry.intermediate == (20,) * 3


def test_dead_layers_and_values_that_are_not_finite(cfg, world, build, tmp_path):
    tensors = build.tensors(world.teacher)
    tensors["model.layers.1.mlp.up_proj.weight"].zero_()
    create_model(tmp_path / "dead", world.config, tensors)
    out = tmp_path / "in" / "g.safetensors"
    with pytest.raises(InputError, match="layer 1: got no activity"):
        capture.run(dataclasses.replace(cfg, model=tmp_path / "dead", out=out))
    tensors = build.tensors(world.teacher)
    tensors["model.layers.2.mlp.up_proj.weight"] *= 1e25
    create_model(tmp_path / "huge", world.config, tensors)
    with pytest.raises(InputError, match="layer 2: got activations that are not finite, or squares beyond float32"):
        capture.run(dataclasses.replace(cfg, model=tmp_path / "huge", out=out))
    assert not out.parent.exists()
    some = build.tensors(world.teacher)
    some["model.layers.0.mlp.up_proj.weight"][[3, 4]] = 0
    create_model(tmp_path / "some", world.config, some)
    assert capture.run(dataclasses.replace(cfg, model=tmp_path / "some", out=out)).dead == [2, 0, 0]


def test_capture_refusals(cfg, world, loaded, tmp_path):
    base = ("capture", "--model", world.teacher, "--data", world.data, "--window", "32", "--batch", "2")
    (tmp_path / "there").write_text("mine")
    (tmp_path / "empty").mkdir()
    for more, words in (
        (("--out", tmp_path / "x", "--layers", "1", "3"), "layers: got 3; expected layers of a model that has 3"),
        (("--out", tmp_path / "x", "--layers", "-1"), "layers: got -1"),
        (("--out", tmp_path / "there"), "expected a new file"),
        (("--out", tmp_path / "empty"), "got a directory"),
        (("--out", tmp_path / "x", "--room-mb", "0"), "room_mb: got 0; expected at least 1. Set --room-mb."),
        (("--out", world.teacher / "g", "--log", tmp_path / "l"), "inside the source"),
    ):
        assert words in refused(tmp_path, *base, *more)
    w, batches, _ = loaded
    for bad, words in (
        ({"layers": []}, "layers: got none"),
        ({"layers": [0, 7]}, "got \\[7\\]"),
        ({"batches": []}, "batches: got none"),
        ({"window": 16}, "got a window of 32 tokens; expected at most 16"),
        ({"batches": [*batches, batches[0].__class__(**{**vars(batches[0]), "max_seqlen": 16})]}, "one shape"),
    ):
        args = {"batches": batches, "layers": [0], "window": 32} | bad
        with pytest.raises(InputError, match=words):
            list(capture_pass.capture(w, args.pop("batches"), args.pop("layers"), **args))


def test_grams_that_do_not_fit_the_fold(cfg, world, build, tmp_path):
    capture.run(dataclasses.replace(cfg, max_batches=2))
    part = tmp_path / "part.safetensors"
    capture.run(dataclasses.replace(cfg, out=part, layers=(2, 0, 2)))
    assert Grams.open([part]).widths == {0: 40, 2: 40}
    plain = tmp_path / "plain.safetensors"
    save_file({"x": torch.zeros(2)}, plain)
    cut, spoiled = tmp_path / "cut.safetensors", tmp_path / "spoiled.safetensors"
    cut.write_bytes(cfg.out.read_bytes()[:-10])
    with safe_open(cfg.out, "pt") as f:
        said = f.metadata()
    nan = {n: torch.full_like(t, float("nan")) for n, t in load_file(cfg.out).items()}
    save_file(nan, spoiled, metadata=said)
    wrong = tmp_path / "wrong.safetensors"
    save_file(load_file(cfg.out), wrong, metadata={**said, "widths": '{"0": 400}'})
    base = ("fold", "--out", tmp_path / "f", "--device", "cpu", "--model")
    for model, grams, words in (
        (world.student, (cfg.out,), "the Grams of another model"),
        (world.teacher, (part,), "no Gram of layer [1]"),
        (world.teacher, (cfg.out, part), "another model or other layers"),
        (world.teacher, (plain,), "no capture of this version"),
        (world.teacher, (cut,), "truncated"),
        (world.teacher, (wrong,), "does not fit its tensors"),
        (world.teacher, (tmp_path / "nowhere",), "no such file"),
    ):
        assert words in refused(tmp_path, *base, model, "--grams", *grams), words
    assert "not finite" in refused(tmp_path, *base, world.teacher, "--grams", spoiled, "--quiet", "--log", "/dev/null")
    assert "got both" in refused(tmp_path, *base, world.teacher, "--grams", cfg.out, "--data", world.data)
    assert "got neither" in refused(tmp_path, *base, world.teacher)
    assert "'gram' without Grams" in refused(tmp_path, *base, world.teacher, "--data", world.data, "--rank", "gram")


@pytest.mark.parametrize("said", [
    {"widths": "[]"}, {"widths": "null"}, {"widths": '{"x": 40}'}, {"widths": '{"0": "40"}'},
    {"widths": '{"0": 1e999}'}, {"widths": '{"0": true}'}, {"widths": '{"0": -40}'}, {"widths": "{}"},
    {"widths": "[" * 5000}, {"widths": "{"},
    {"widths": '{"0": 40, "0": 40}'}, {"rows": "0"}, {"rows": "-3"}, {"rows": "x"}, {"rows": "9" * 5000},
    {"tile": "64"}, {"cortiq_gram": "2"}, {"model": None}, {"data_sha256": None}, {"rows": None},
])  # fmt: skip
def test_metadata_that_cannot_be_used(cfg, tmp_path, said):
    good = {"cortiq_gram": "1", "tile": "128", "rows": "5", "widths": '{"0": 40}', "model": "m", "data_sha256": "d"}
    tensors, place = {"layers.0.gram": torch.ones(1, 128, 128)}, tmp_path / "x.safetensors"
    save_file(tensors, place, metadata=good)
    assert Grams.open([place]).rows == 5  # it is the one value that is refused
    save_file(tensors, place, metadata={k: v for k, v in (good | said).items() if v is not None})
    with pytest.raises(InputError, match="expected a file of cortiq capture"):
        Grams.open([place])


@pytest.mark.parametrize("when", ["tick", "layer", "write"])
def test_a_capture_that_is_stopped_leaves_nothing(cfg, tmp_path, when):
    def stop(event):
        if event["event"] == when:
            raise KeyboardInterrupt

    out = tmp_path / "new" / "g.safetensors"
    with pytest.raises(KeyboardInterrupt):
        capture.run(dataclasses.replace(cfg, out=out), stop)
    assert not list(tmp_path.iterdir())


def test_the_commands(world, tmp_path):
    """Capture, then the fold that it suggests, with log and page; --dry-run writes nothing."""
    out = tmp_path / "g.safetensors"
    base = ("capture", "--model", world.teacher, "--data", world.data, "--out", out, "--window", "32", "--batch", "2")
    plan = cortiq(*base, "--dry-run")
    assert plan.status == 0 and "passes          1, of 3 layers" in plan.out and not list(tmp_path.iterdir())
    done = cortiq(*base)
    assert done.status == 0 and "captured: 3 layers" in done.out and "tokens/s" in done.err and "left" in done.err
    assert f"next: cortiq fold --model {world.teacher} --grams {out}" in done.out
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"g.safetensors", "g.safetensors.log.jsonl", "g.safetensors.html"}
    assert "Activations by layer" in (tmp_path / "g.safetensors.html").read_text()
    fold_args = ("fold", "--model", world.teacher, "--grams", out, "--out", tmp_path / "f", "--align", "4")
    dry = cortiq(*fold_args, "--dry-run")
    assert dry.status == 0 and "rows" in dry.out and not (tmp_path / "f").exists()
    done = cortiq(*fold_args)
    assert done.status == 0 and "repaired:" in done.out and "Error left by layer" in (tmp_path / "f.html").read_text()
