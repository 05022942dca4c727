"""Capture: what is summed, in how many passes, what is written and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from directories import cortiq, refused
from plain_model import plain_grams
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cortiq_kernels import backend
from cortiq_kernels.model.hf import create_model, open_model
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.ops.gram import gram_finalize
from cortiq_kernels.recipes import capture, capture_pass, fold
from cortiq_kernels.recipes.capture_config import CaptureConfig
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.fold_config import FoldConfig
from cortiq_kernels.recipes.gram_file import Grams

SMALL = {"device": "cpu", "window": 32, "batch": 2}


def grams_of(w, batches, layers=(0, 1, 2), **more):
    return dict(capture_pass.capture(w, batches, layers, window=32, **more))


def test_grams_are_those_of_the_formula(capture_cfg, loaded):
    w, _, records = loaded
    report = capture.run(capture_cfg)
    grams = Grams.open([capture_cfg.out])
    assert grams.rows == report.rows == sum(len(r.ids) for r in records)
    for i, want in enumerate(plain_grams(w, records)):
        got = gram_finalize(grams.read(i), 40).double()
        scale = want.diagonal().sqrt()
        assert ((got - want).abs() <= 1e-6 * scale[:, None] * scale).all()
        assert report.energy[i] == pytest.approx(float(want.diagonal().mean() / report.rows), rel=1e-5)
    assert report.dead == [0, 0, 0] and report.layers == [0, 1, 2] and report.passes == 1


def test_the_file(capture_cfg, world):
    report = capture.run(capture_cfg)
    tensors = load_file(capture_cfg.out)  # the format's own library reads it
    assert {n: tuple(t.shape) for n, t in tensors.items()} == {f"layers.{i}.gram": (1, 128, 128) for i in range(3)}
    assert all(t.dtype == torch.float32 and not t[:, 40:].any() and not t[:, :, 40:].any() for t in tensors.values())
    with safe_open(capture_cfg.out, "pt") as f:
        said = f.metadata()
    assert int(said["rows"]) == report.rows and json.loads(said["widths"]) == {"0": 40, "1": 40, "2": 40}
    assert len(said["data_sha256"]) == 64 and json.loads(said["provenance"])["recipe"] == "capture"
    assert sorted(p.name for p in capture_cfg.out.parent.iterdir()) == ["grams.safetensors"]


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


def test_memory_decides_the_passes(world, build, tmp_path, monkeypatch):
    """Less memory gives more passes, then no kept stream (with a note), then a refusal; never another result."""
    model = build.model(tmp_path / "m", build.config("LFL", hidden=16, ffn=520, vocab=23))
    cfg = CaptureConfig(model, world.data, tmp_path / "a", **SMALL)
    base = capture.plan_capture(cfg).memory()
    one = capture_pass.gram_bytes(520)
    assert base["grams"] == 3 * one and base["residual"] == 0

    def plan(free, host):
        monkeypatch.setattr(backend, "free_bytes", lambda device: free)
        monkeypatch.setattr(backend, "host_free_bytes", lambda: host)
        made = capture.plan_capture(cfg)
        return made, made.memory()

    forward = base["peak_without_grams"]
    made, memory = plan(forward + 3 * one, 1 << 30)
    assert made.passes(memory) == [(0, 1), (2,)] and memory["residual"] > 0 and memory["grams"] == 2 * one
    assert memory["peak"] <= memory["free"] and not made.notes
    made, memory = plan(forward + 2 * one, 1000)
    assert made.passes(memory) == [(0,), (1,), (2,)] and memory["residual"] == 0
    assert any("each of 3 passes starts at the first layer" in n for n in made.notes)
    few = capture.run(cfg)
    assert few.passes == 3
    with pytest.raises(InputError, match="capture: memory"):
        cfg = dataclasses.replace(cfg, out=tmp_path / "b")
        plan(base["least"] - 3 * one, 1 << 30)
    monkeypatch.undo()
    capture.run(cfg)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_two_captures_add_up(world, capture_cfg, tmp_path, build):
    lines = [json.loads(line) for line in world.data.read_text().splitlines()]
    train, rest = [r for r in lines if r["split"] == "train"], [r for r in lines if r["split"] != "train"]
    outs = []
    for k, part in enumerate((train[:15], train[15:], train)):
        data = tmp_path / f"{k}.jsonl"
        data.write_text("".join(json.dumps(r) + "\n" for r in part + rest))
        outs.append(tmp_path / f"{k}.safetensors")
        capture.run(dataclasses.replace(capture_cfg, data=data, out=outs[-1]))
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


def test_dead_layers_and_values_that_are_not_finite(capture_cfg, world, build, tmp_path):
    tensors = build.tensors(world.teacher)
    tensors["model.layers.1.mlp.up_proj.weight"].zero_()
    create_model(tmp_path / "dead", world.config, tensors)
    out = tmp_path / "in" / "g.safetensors"
    with pytest.raises(InputError, match="layer 1: got no activity"):
        capture.run(dataclasses.replace(capture_cfg, model=tmp_path / "dead", out=out))
    tensors = build.tensors(world.teacher)
    tensors["model.layers.2.mlp.up_proj.weight"] *= 1e25
    create_model(tmp_path / "huge", world.config, tensors)
    with pytest.raises(InputError, match="layer 2: got activations that are not finite, or squares beyond float32"):
        capture.run(dataclasses.replace(capture_cfg, model=tmp_path / "huge", out=out))
    assert not out.parent.exists()
    some = build.tensors(world.teacher)
    some["model.layers.0.mlp.up_proj.weight"][[3, 4]] = 0
    create_model(tmp_path / "some", world.config, some)
    assert capture.run(dataclasses.replace(capture_cfg, model=tmp_path / "some", out=out)).dead == [2, 0, 0]


def test_capture_refusals(capture_cfg, world, loaded, tmp_path):
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


@pytest.mark.parametrize("said", [
    {"widths": "[]"}, {"widths": "null"}, {"widths": '{"x": 40}'}, {"widths": '{"0": "40"}'},
    {"widths": '{"0": 1e999}'}, {"widths": '{"0": true}'}, {"widths": '{"0": -40}'}, {"widths": "{}"},
    {"widths": "[" * 5000}, {"widths": "{"},
    {"widths": '{"0": 40, "0": 40}'}, {"rows": "0"}, {"rows": "-3"}, {"rows": "x"}, {"rows": "9" * 5000},
    {"tile": "64"}, {"cortiq_gram": "2"}, {"model": None}, {"data_sha256": None}, {"rows": None},
])  # fmt: skip
def test_metadata_that_cannot_be_used(capture_cfg, tmp_path, said):
    good = {"cortiq_gram": "1", "tile": "128", "rows": "5", "widths": '{"0": 40}', "model": "m", "data_sha256": "d"}
    tensors, place = {"layers.0.gram": torch.ones(1, 128, 128)}, tmp_path / "x.safetensors"
    save_file(tensors, place, metadata=good)
    assert Grams.open([place]).rows == 5  # it is the one value that is refused
    save_file(tensors, place, metadata={k: v for k, v in (good | said).items() if v is not None})
    with pytest.raises(InputError, match="expected a file of cortiq capture"):
        Grams.open([place])


@pytest.mark.parametrize("when", ["tick", "layer", "write"])
def test_a_capture_that_is_stopped_leaves_nothing(capture_cfg, tmp_path, when):
    def stop(event):
        if event["event"] == when:
            raise KeyboardInterrupt

    out = tmp_path / "new" / "g.safetensors"
    with pytest.raises(KeyboardInterrupt):
        capture.run(dataclasses.replace(capture_cfg, out=out), stop)
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
