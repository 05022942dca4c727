"""Bake: what is kept in both phases, what is written, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from directories import cortiq, refused
from safetensors.torch import load_file
from stopped import files
from tiny import config

from cortiq_kernels import backend
from cortiq_kernels.model.hf import create_model, open_model
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes import bake, bake_loop, fold
from cortiq_kernels.recipes.bake_config import BakeConfig
from cortiq_kernels.recipes.bake_plan import plan_bake
from cortiq_kernels.recipes.errors import InputError, TrainingFailed
from cortiq_kernels.recipes.fold_config import FoldConfig
from cortiq_kernels.recipes.heal_loop import Feed
from cortiq_kernels.recipes.keep import keep_masks, keep_neurons, mask_init_logit
from cortiq_kernels.recipes.mask_file import read_masks
from cortiq_kernels.recipes.targets import TrueTokens
from cortiq_kernels.report.page import page
from cortiq_kernels.report.runlog import read_log
from cortiq_kernels.step import Evaluator, GateTrainer, Trainer

MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture
def cfg(world, tmp_path) -> BakeConfig:
    return BakeConfig(
        world.teacher, world.data, tmp_path / "baked", steps_a=20, steps_b=8, eval_every=4, l1_mult=2000.0, lr_b=3e-3,
        fcd_layers=2, align=4, chunk=16, held=4, calib=20, target_sparsity=0.2, dtype="f64", device="cpu",
    )  # fmt: skip


def looped(build, tmp_path, **more):
    return build.model(tmp_path / "looped", config("LF", hidden=24, ffn=40, vocab=23, num_loops=2, **more))


def held_out(cfg, model, masks=None) -> float:
    """Perplexity of the held-out chunks of `cfg`, measured apart from the recipe."""
    plan = plan_bake(dataclasses.replace(cfg, out=cfg.out.with_name("nowhere"), resume=False))
    w = Weights.load(open_model(model), dtype=torch.float64)
    evaluator = Evaluator(w, plan.held.batch * cfg.chunk, cfg.chunk, masks=masks)
    return math.exp(evaluator.loss([Feed(plan, TrueTokens(plan.batches))[len(plan.calib)]]))


def scripted(monkeypatch, closed, loss, loss_b=None):
    """Steps that cost nothing. Evaluation k of phase A finds closed[k] gates closed (the last ones; aligned too) and
    the loss loss[k]; loss[-1] is the backbone's. Evaluations of phase B find loss_b."""
    seen: list[int] = []

    def apply(self, *rate):
        self.state.ok.fill_(True)
        self.state.step.add_(1)

    def kept(self, logits):
        seen.append(1)
        mask = torch.arange(len(logits)) < len(logits) - closed[min(len(seen), len(closed)) - 1]
        return mask, mask

    def held(self, kept, micro):
        return loss[-1] if kept is None else loss[len(seen) - 1]

    monkeypatch.setattr(GateTrainer, "apply", apply)
    monkeypatch.setattr(bake_loop.GatePhase, "kept", kept)
    monkeypatch.setattr(bake_loop.GatePhase, "held_out", held)
    if loss_b is not None:
        monkeypatch.setattr(Trainer, "apply", apply)
        given = iter(loss_b)
        monkeypatch.setattr(Evaluator, "loss", lambda self, micros: next(given))


def test_both_phases(cfg, build):
    """What is reported is what is on disk, measured again."""
    report = bake.run(cfg)
    assert report.reached and report.pruned >= 0.2 and report.best_step_b > 0 and report.trained_layers == [1, 2]
    assert report.overlaid < report.masked and report.directory == report.overlaid
    assert held_out(cfg, cfg.model) == pytest.approx(report.backbone, rel=1e-9)
    assert held_out(cfg, cfg.out) == pytest.approx(report.overlaid, rel=1e-6)  # written in float32
    masks = read_masks(Path(report.masks), open_model(cfg.model).geometry, "masks")
    gates = {i: k.double() for i, k in enumerate(masks.kept)}
    assert held_out(cfg, cfg.model, gates) == pytest.approx(report.masked, rel=1e-9)
    raw = {i: (g > cfg.tau).double() for i, g in enumerate(masks.gates)}
    assert held_out(cfg, cfg.model, raw) == pytest.approx(report.masked_raw, rel=1e-6)
    assert report.pruned_raw == pytest.approx(1 - sum(float(m.sum()) for m in raw.values()) / 120)
    assert report.kept == [int(k.sum()) for k in masks.kept] == report.kept_by_visit
    assert report.pruned == pytest.approx(1 - sum(report.kept) / 120) and all(k % 4 == 0 for k in report.kept)
    again = keep_masks(masks.logits, cfg.tau, cfg.align, False)
    assert all(torch.equal(a, k) for a, k in zip(again, masks.kept, strict=True))
    before, after = build.tensors(cfg.model), build.tensors(cfg.out)
    keep = [k.nonzero().flatten() for k in masks.kept]
    for name, t in after.items():
        old = before[name]
        if ".mlp." in name:
            i = int(name.split(".")[2])
            old = old.index_select(1 if "down" in name else 0, keep[i])
            assert torch.equal(t, old) == (i < 2 - 1)
        else:
            assert torch.equal(t, old)


def test_the_masked_model_can_be_folded_too(cfg, tmp_path):
    """The mask file serves fold: its kept neurons, without the weights of phase B."""
    report = bake.run(dataclasses.replace(cfg, steps_b=0))
    made = fold.run(FoldConfig(
        cfg.model, tmp_path / "folded", data=cfg.data, masks=tmp_path / "baked.masks.safetensors", per_layer=True,
        align=4, device="cpu",
    ))  # fmt: skip
    assert made.widths == report.kept
    for name in (p.name for p in cfg.out.glob("*.safetensors")):
        assert (cfg.out / name).read_bytes() == (tmp_path / "folded" / name).read_bytes()


@pytest.mark.parametrize("change", [dict(lr_b=0.1), dict(fcd_layers=0), dict(steps_b=0)])
def test_phase_b_without_improvement_leaves_the_weights_of_phase_a(cfg, build, monkeypatch, change):
    real = Trainer.gradients

    def uphill(self, micros, **more):
        real(self, micros, **more)
        self.weights.trained.grad.neg_()

    monkeypatch.setattr(Trainer, "gradients", uphill)
    report = bake.run(dataclasses.replace(cfg, **change))
    assert report.best_step_b == 0 and report.trained_layers == [] and report.overlaid == report.masked
    said = any("did not improve" in n for n in report.notes)
    assert said == ("lr_b" in change) and len(report.tuned) == (3 if "lr_b" in change else 0)
    masks = read_masks(Path(report.masks), open_model(cfg.model).geometry, "masks")
    before, after = build.tensors(cfg.model), build.tensors(cfg.out)
    for i, k in enumerate(masks.kept):
        for part, axis in zip(MLP, (0, 0, 1), strict=True):
            name = f"model.layers.{i}.mlp.{part}.weight"
            assert torch.equal(after[name], before[name].index_select(axis, k.nonzero().flatten()))
    assert report.steps_b == (8 if "lr_b" in change else 0)


def test_what_phase_a_keeps(cfg, monkeypatch):
    """The lowest loss at the target, 24 of 120; of equals the first; not the lower one of fewer."""
    scripted(monkeypatch, [0, 20, 24, 30, 28], [2.0, 0.5, 1.5, 1.2, 1.2, 1.0])
    report = bake.run(dataclasses.replace(cfg, steps_b=0))
    assert (report.best_step_a, report.pruned, report.reached) == (16, 30 / 120, True)
    assert report.masked == pytest.approx(math.exp(1.2)) and any("masked model is worse" in n for n in report.notes)
    l1 = [t["l1"] for t in report.trace]
    assert l1 == pytest.approx([2000 * (0.01 + 0.005 * k) for k in range(5)])


def test_target_never_reached_gives_the_sparsest_with_a_warning(cfg, monkeypatch):
    scripted(monkeypatch, [0, 20, 12, 20, 8], [0.9, 1.5, 0.7, 1.4, 0.8, 1.0])
    report = bake.run(dataclasses.replace(cfg, steps_b=0))
    assert (report.best_step_a, report.pruned, report.reached) == (16, 20 / 120, False)
    assert any("target of 20.0% closed neurons was not reached" in n for n in report.notes)


@pytest.mark.parametrize("loss", [[2.0, 1.3, math.nan, 1.4, 1.0, 1.0], [1.0] * 6])
def test_without_a_target_the_backbone_may_win(cfg, build, monkeypatch, loss):
    """All gates stay open, nothing is pruned, and the report says so; phase B may still improve it."""
    scripted(monkeypatch, [0, 4, 8], loss, [1.0, 1.5, 1.0])
    report = bake.run(dataclasses.replace(cfg, target_sparsity=0.0))
    assert (report.best_step_a, report.pruned, report.kept) == (0, 0.0, [40, 40, 40])
    assert any("nothing is pruned" in n for n in report.notes) and report.best_step_b == 0
    before, after = build.tensors(cfg.model), build.tensors(cfg.out)
    assert all(torch.equal(t, before[n]) for n, t in after.items())
    assert report.parameters_after == report.parameters_before
    assert not any("worse" in n for n in report.notes)


def test_without_a_target_a_better_mask_wins(cfg, monkeypatch):
    scripted(monkeypatch, [0, 4, 8, 12, 16], [1.0, 0.9, 0.9, 0.95, 2.0, 1.0], [0.9, 0.85, 0.85])
    report = bake.run(dataclasses.replace(cfg, target_sparsity=0.0))
    assert (report.best_step_a, report.pruned) == (8, 4 / 120)
    assert (report.best_step_b, report.overlaid) == (4, pytest.approx(math.exp(0.85)))


def test_nothing_ever_closed(cfg):
    """No pressure to speak of: with a target the open mask is written with a warning."""
    report = bake.run(dataclasses.replace(cfg, l1_mult=1e-9, steps_a=6))
    assert report.pruned == 0 and not report.reached and report.kept == [40, 40, 40]
    assert any("not reached: the sparsest mask, 0.0%" in n for n in report.notes)


def test_no_finite_loss_is_an_error(cfg, monkeypatch):
    scripted(monkeypatch, [4], [math.nan] * 6)
    with pytest.raises(TrainingFailed, match="no finite held-out loss in 6 evaluations"):
        bake.run(cfg)
    assert not list(cfg.out.parent.iterdir())


def test_gives_up_when_steps_stay_not_finite(cfg, monkeypatch):
    real = Trainer.gradients

    def gradients(self, micros, **more):
        real(self, micros, **more)
        self.weights.trained.grad[0] = float("nan")

    monkeypatch.setattr(Trainer, "gradients", gradients)
    events: list[dict] = []
    with pytest.raises(TrainingFailed, match="bake: got 20 steps in a row"):
        bake.run(cfg, events.append)
    assert sum(e["event"] == "skip" for e in events) == 20 and not cfg.out.exists()


def test_looped_stack(cfg, build, tmp_path):
    """A mask a visit; the directory holds the union; the masked and overlaid figures are those of the visits."""
    loop = dataclasses.replace(cfg, model=looped(build, tmp_path), fcd_layers=1, steps_a=40)
    report = bake.run(loop)
    g = open_model(loop.model).geometry
    masks = read_masks(Path(report.masks), g, "masks")
    assert len(masks.kept) == 4 and report.kept_by_visit == [int(k.sum()) for k in masks.kept]
    assert report.pruned == pytest.approx(1 - sum(report.kept_by_visit) / 160) and report.best_step_b > 0
    keep = keep_neurons(masks.kept, masks.logits, 2, 4, False)
    assert report.kept == [len(k) for k in keep] == list(open_model(loop.out).geometry.intermediate)
    raw = load_file(report.masks)
    for i in range(2):
        held = torch.zeros(40, dtype=torch.bool).index_fill_(0, keep[i], True)
        assert torch.equal(raw[f"physical.{i}.kept"], held) and not (masks.kept[i] | masks.kept[i + 2])[~held].any()
    full = {i: k.double() for i, k in enumerate(masks.kept)}
    assert held_out(loop, loop.model, full) == pytest.approx(report.masked, rel=1e-9)
    cut = {i: k[keep[i % 2]].double() for i, k in enumerate(masks.kept)}
    assert held_out(loop, loop.out, cut) == pytest.approx(report.overlaid, rel=1e-6)
    assert held_out(loop, loop.out) == pytest.approx(report.directory, rel=1e-6)
    assert report.directory != report.overlaid and any("the directory alone" in n for n in report.notes)


def test_pressure_counts_physical_layers(cfg, build, tmp_path):
    """l1 / (F * L) on every gate, whatever the passes; a gate starts at logit(sigmoid(2)^(1/loops))."""
    loop = dataclasses.replace(cfg, model=looped(build, tmp_path))
    plan = plan_bake(loop)
    phase = bake_loop.GatePhase(plan)
    micro, grads = Feed(plan, TrueTokens(plan.batches))[0], []
    for l1 in (0.0, 80.0):
        phase.l1 = l1
        phase.gradients(micro)
        grads.append(phase.trainer.grad.clone())
    s = torch.sigmoid(phase.trainer.logits)
    assert float(s[0]) ** 2 == pytest.approx(1 / (1 + math.exp(-2)))
    torch.testing.assert_close(grads[1] - grads[0], 80.0 / (40 * 2) * s * (1 - s))
    assert phase.trainer.clip == 1.0 and phase.trainer.gradient == "ffn"


def test_mask_init_logit():
    found = [mask_init_logit(n) for n in (1, 2, 3)]
    assert found == pytest.approx([2.0, 2.725383, 3.141518], abs=1e-5)


def test_keep_neurons():
    """A union of 5 rounded up to 8: what any visit keeps, then the largest logits of any visit."""
    logits = [torch.arange(10.0), torch.arange(10.0).flip(0), torch.zeros(10), torch.zeros(10)]
    kept = [logits[0] > 6.5, torch.ones(10).bool(), logits[1] > 7.5, torch.zeros(10).bool()]
    first, second = keep_neurons(kept, [logits[0], logits[2], logits[1], logits[3]], 2, 4, False)
    assert first.tolist() == [0, 1, 2, 3, 6, 7, 8, 9] and second.tolist() == list(range(10))
    both = keep_neurons(kept, [logits[0], logits[2], logits[1], logits[3]], 2, 4, True)
    assert [len(k) for k in both] == [10, 10]
    assert keep_neurons(kept[:1], logits[:1], 1, 4, False)[0].tolist() == [7, 8, 9]


def test_steps_take_the_chunks_in_turn(cfg, monkeypatch):
    """Step i of each phase uses chunk i mod n; the held-out chunks are the first, in one pass."""
    seen: list[int] = []
    real = Feed.__getitem__
    monkeypatch.setattr(Feed, "__getitem__", lambda self, i: seen.append(i) or real(self, i))
    bake.run(dataclasses.replace(cfg, calib=12))
    assert [i for i in seen if i < 12] == [*range(12), *range(8), *range(8)]
    plan = plan_bake(dataclasses.replace(cfg, out=cfg.out.with_name("other")))
    assert (len(plan.held), plan.held.batch, len(plan.calib)) == (1, 4, 20)
    first = torch.cat([plan.held[0].tokens, plan.calib[0].tokens])
    stream = torch.cat([torch.from_numpy(r.ids).long() for r in plan.dataset.split("train")])
    assert torch.equal(first, stream[: len(first)])


def test_rate_of_phase_b(cfg, build, tmp_path):
    events: list[dict] = []
    bake.run(dataclasses.replace(cfg, model=looped(build, tmp_path)), events.append)
    rates = [e["rate"] for e in events if e["event"] == "step" and e["phase"] == "B"]
    assert rates == pytest.approx([3e-3 * 0.5 * (1 + math.cos(math.pi * i / 8)) / 2 for i in range(8)])
    assert {e["rate"] for e in events if e["event"] == "step" and e["phase"] == "A"} == {0.1}


def test_evaluations_say_what_happened(cfg):
    events: list[dict] = []
    report = bake.run(dataclasses.replace(cfg, align=8), events.append)
    held = [e for e in events if e["event"] == "eval"]
    assert [(e["phase"], e["step"]) for e in held] == [
        ("A", 0), ("A", 4), ("A", 8), ("A", 12), ("A", 16), ("A", 20), ("B", 20), ("B", 24), ("B", 28)
    ]  # fmt: skip
    for e, t in zip(held[1:6], report.trace, strict=True):
        assert (e["l1"], e["pruned"], e["resurrected"]) == (t["l1"], t["pruned"], t["resurrected"])
        assert e["perplexity"] == pytest.approx(math.exp(e["loss"])) and e["raw_pruned"] >= e["pruned"]
        assert e["resurrected"] == round((e["raw_pruned"] - e["pruned"]) * 120)
        assert len(e["closed"]) == min(32, e["newly"])
    assert sum(e["newly"] for e in held[1:6]) >= report.pruned_raw * 120
    assert any(e["resurrected"] for e in held[1:6]) and held[-1]["bottom"] == min(e["perplexity"] for e in held)
    names = [name for e in held[1:6] for name in e["closed"]]
    assert names and all(0 <= int(n.split(":")[0][1:]) < 3 and 0 <= int(n.split(":")[1]) < 40 for n in names)


def test_overlay_is_the_directory_at_full_width(cfg, build):
    report = bake.run(dataclasses.replace(cfg, overlay=True))
    over = load_file(report.overlay)
    assert sum("down_proj" in n for n in over) == 3 and sum("gate_proj" in n for n in over) == 2
    whole = build.tensors(cfg.model) | over
    place = cfg.out.with_name("whole")
    create_model(place, json.loads((cfg.model / "config.json").read_text()), whole)
    assert held_out(cfg, place) == pytest.approx(report.overlaid, rel=1e-6)
    masks = read_masks(Path(report.masks), open_model(cfg.model).geometry, "masks")
    assert not over["model.layers.0.mlp.down_proj.weight"][:, ~masks.kept[0]].any()


def test_uniform_is_loaded_by_transformers(cfg):
    """Every layer as wide as the widest; transformers' logits are ours."""
    transformers = pytest.importorskip("transformers")
    report = bake.run(dataclasses.replace(cfg, uniform=True))
    assert len(set(report.kept)) == 1 and report.kept[0] < 40 and report.best_step_b > 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(cfg.out, dtype=torch.float32).eval()
    plan = plan_bake(dataclasses.replace(cfg, out=cfg.out.with_name("other")))
    batch = plan.held[0]
    w = Weights.load(open_model(cfg.out), dtype=torch.float32)
    got = Evaluator(w, len(batch.tokens), cfg.chunk).hidden(batch) @ w["head"].T
    with torch.no_grad():
        want = theirs(batch.tokens.view(4, -1), use_cache=False).logits.reshape(got.shape)
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_two_runs_write_the_same_bytes(cfg):
    other = dataclasses.replace(cfg, out=cfg.out.with_name("again"))
    first, second = bake.run(cfg), bake.run(other)
    assert first.trace == second.trace and first.tuned == second.tuned
    assert files(cfg.out) == files(other.out) and files(Path(first.masks)) == files(Path(second.masks))
    assert sorted(p.name for p in cfg.out.parent.iterdir()) == [
        "again", "again.masks.safetensors", "baked", "baked.masks.safetensors"
    ]  # fmt: skip


def test_a_16_bit_run(cfg, monkeypatch):
    """16 bit is for GPUs; here the choice is forced: phase A strict, evaluations and phase B in bfloat16."""
    monkeypatch.setattr(backend, "pick_dtype", lambda request, device: backend.DtypeChoice(torch.bfloat16, "forced"))
    plan = plan_bake(cfg)
    assert plan.two_copies and plan.step_dtype.dtype == torch.float32 and plan.eval_dtype == torch.bfloat16
    report = bake.run(cfg)
    assert report.dtype == "bf16" and report.reached
    other = dataclasses.replace(cfg, out=cfg.out.with_name("b"), fcd_layers=0, held=1)
    least = plan_bake(other).memory()["least"]
    monkeypatch.setattr(backend, "free_bytes", lambda device: least - 1)
    small = plan_bake(other)
    assert not small.two_copies and any("evaluations of phase A are in f32" in n for n in small.notes)


def flags(cfg: BakeConfig) -> list:
    return ["bake", "--model", cfg.model, "--data", cfg.data, "--out", cfg.out, "--device", "cpu", "--steps-a", 20,
            "--steps-b", 8, "--eval-every", 4, "--l1-mult", 2000, "--lr-b", 3e-3, "--fcd-layers", 2, "--align", 4,
            "--chunk", 16, "--held", 4, "--calib", 20, "--target-sparsity", 0.2]  # fmt: skip


def test_the_command(cfg, tmp_path):
    dry = cortiq(*flags(cfg), "--dry-run")
    assert dry.status == 0 and "20 steps on the gates, 8 on the MLPs of layers 1 .. 2" in dry.out
    assert "20 calibration chunks, 4 held out chunks" in dry.out and not list(tmp_path.iterdir())
    done = cortiq(*flags(cfg), "--category", "a")
    assert done.status == 0 and "baked:" in done.out and "next: cortiq score" in done.out, done.err
    assert "newly closed L" in done.err and "lowest so far" in done.err
    events = read_log(tmp_path / "baked.log.jsonl")
    text = page(events)
    for words in ("Closed neurons", "Held-out perplexity, hard gates", "Neurons by layer", "Given up most", "chosen:"):
        assert words in text
    note = json.loads((cfg.out / "cortiq.json").read_text())["provenance"]
    assert note["recipe"] == "bake" and note["settings"]["category"] == "a" and "out" not in note["settings"]
    assert note == read_masks(tmp_path / "baked.masks.safetensors", open_model(cfg.model).geometry, "m").provenance


def test_refusals(cfg, world, build, tmp_path):
    odd = tmp_path / "odd"
    fold.run(FoldConfig(cfg.model, odd, data=cfg.data, widths=(16, 24, 40), device="cpu"))
    (tmp_path / "there.masks.safetensors").write_text("mine")
    few = build.records(tmp_path / "few.jsonl", 23, train=3)
    none = build.records(tmp_path / "none.jsonl", 23, train=0)
    base = flags(cfg)
    for more, words in (
        (("--model", odd), "bake: model: got MLP widths that differ per layer (16 to 40); expected one width"),
        (("--data", few), "chunks of 16 tokens in 3 train records; expected at least 16: 4 held out, and 12 to"),
        (("--data", none), "got 0 chunks of 16 tokens in 0 train records; expected at least 16"),
        (("--category", "c"), "bake: category: got 'c'; expected a category of the train records: a, b"),
        (("--held", 0), "bake: held: got 0; expected at least 1"),
        (("--calib", 11), "bake: calib: got 11; expected at least 12"),
        (("--held", 60), "expected at least 72: 60 held out"),
        (("--tau", 0.9), "bake: tau: got 0.9; expected a fraction in (0, 0.8808)"),
        (("--target-sparsity", 1), "bake: target_sparsity: got 1.0; expected a fraction in [0, 1)"),
        (("--l1-mult", 0), "bake: l1_init: got no pressure"),
        (("--l1-init", 0, "--l1-step", 0), "bake: l1_init: got no pressure"),
        (("--lr-a", 0), "bake: lr_a: got 0.0; expected more than 0. Set --lr-a."),
        (("--steps-a", 0), "bake: steps_a: got 0; expected at least 1"),
        (("--out", tmp_path / "there"), "bake: masks: got"),
        (("--out", odd), "got an existing directory with"),
        (("--device", "cuda:7"), "cuda"),
    ):
        args = list(base)
        for flag, value in zip(more[::2], more[1::2], strict=True):
            if flag in args:
                args[args.index(flag) + 1] = value
            else:
                args += [flag, value]
        assert words in refused(tmp_path, *args), (more, words)
    with pytest.raises(InputError, match="bake: chunk"):
        bake.run(dataclasses.replace(cfg, chunk=1))
