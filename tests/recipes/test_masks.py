"""Masks: growth of the pressure, which mask is chosen, when it ends, what is written, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from fractions import Fraction

import pytest
import torch
from directories import cortiq, refused
from safetensors.torch import load_file, safe_open, save_file

from cortiq_kernels import backend
from cortiq_kernels.data.order import MASKS_SEED, Shuffler
from cortiq_kernels.model.hf import open_model
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes import fold, masks, masks_loop, score
from cortiq_kernels.recipes.errors import InputError, TrainingFailed
from cortiq_kernels.recipes.fold_config import FoldConfig
from cortiq_kernels.recipes.keep import keep_masks, keep_widths, share_of_all
from cortiq_kernels.recipes.mask_file import read_masks
from cortiq_kernels.recipes.masks_config import MasksConfig
from cortiq_kernels.recipes.masks_plan import plan_masks, steps_in
from cortiq_kernels.recipes.score_config import ScoreConfig
from cortiq_kernels.report.page import page
from cortiq_kernels.report.runlog import read_log
from cortiq_kernels.step import GateTrainer


@pytest.fixture
def cfg(world, tmp_path) -> MasksConfig:
    return MasksConfig(
        world.teacher, world.data, tmp_path / "m.safetensors", device="cpu", window=32, batch=2, eval_every=10,
        max_steps=300, dtype="f64",
    )  # fmt: skip


def scripted(monkeypatch, closed, loss=None):
    """Steps that cost nothing. Evaluation k (from 0) finds closed[k] gates closed (the last one goes on) and the loss
    loss[k]; returns the pressures that the steps were given."""
    given: list[float] = []
    evaluations: list[int] = []

    def at(values, k):
        return values[min(k, len(values) - 1)]

    def gradients(self, micros, l1):
        given.append(l1)

    def apply(self):
        self.state.ok.fill_(True)
        self.state.step.add_(1)

    def kept(self, tau):
        evaluations.append(1)
        return torch.arange(len(self.logits)) >= at(closed, len(evaluations) - 1)

    real = masks.Loop._held_out

    def held_out(self, kept=None):
        return real(self, kept) if kept is None or loss is None else at(loss, len(evaluations) - 1)

    monkeypatch.setattr(GateTrainer, "gradients", gradients)
    monkeypatch.setattr(GateTrainer, "apply", apply)
    monkeypatch.setattr(GateTrainer, "kept", kept)
    monkeypatch.setattr(masks.Loop, "_held_out", held_out)
    return given


def test_growth_by_a_factor_reaches_the_target_where_linear_growth_has_not(cfg, tmp_path):
    """Known in kind from Qwen3.5-0.8B: linear growth stalls at 15 %, times 1.5 reaches 25 % in 325 steps."""
    half = dataclasses.replace(cfg, keep_frac=0.5, settle=0)
    fast = masks.run(half)
    assert fast.reached and fast.pruned >= 0.5 and fast.steps <= 150
    slow = masks.run(dataclasses.replace(half, l1_grow=1.0, out=tmp_path / "slow", max_steps=250))
    assert not slow.reached and slow.pruned < 0.45 and any("not reached" in n for n in slow.notes)
    assert slow.trace[-1]["pruned"] - slow.trace[-6]["pruned"] < 0.03  # 50 steps
    assert [t["l1"] for t in slow.trace] == pytest.approx([0.01 + 0.005 * k for k in range(len(slow.trace))])
    want = [0.01]
    for t in fast.trace[:-1]:
        want.append(want[-1] * 1.5 + 0.005 if t["pruned"] < 0.5 else want[-1])
    assert [t["l1"] for t in fast.trace] == pytest.approx(want, rel=1e-12)
    assert fast.trace[0]["pruned"] == 0.0 and all(math.isfinite(t["loss"]) for t in fast.trace)


def test_pressure_grows_below_the_target_only_and_it_ends_settle_evaluations_later(cfg, monkeypatch):
    """120 gates, 25 % are 30: reached at step 30, lost again at 40."""
    given = scripted(monkeypatch, [0, 29, 30, 29, 31, 99])
    report = masks.run(dataclasses.replace(cfg, settle=2, l1_init=1.0, l1_grow=2.0, l1_step=0.5))
    assert report.steps == 50 and report.reached
    assert [given[k * 10] for k in range(5)] == [1.0, 2.5, 5.5, 5.5, 11.5]
    assert all(len(set(given[k * 10 : k * 10 + 10])) == 1 for k in range(5))
    assert [(t["step"], t["l1"]) for t in report.trace] == list(zip((10, 20, 30, 40, 50), given[::10], strict=True))


@pytest.mark.parametrize(("settle", "steps"), [(0, 30), (1, 40), (99, 55)])
def test_the_last_step_is_evaluated_too(cfg, monkeypatch, settle, steps):
    scripted(monkeypatch, [0, 29, 30])
    report = masks.run(dataclasses.replace(cfg, settle=settle, max_steps=55))
    assert report.steps == steps == report.trace[-1]["step"]


def test_best_is_the_lowest_loss_at_the_target(cfg, monkeypatch):
    """Better losses below the target do not count, nor a loss that is not finite; of equals the first stays."""
    scripted(monkeypatch, [5, 30, 31, 20, 40, 50], [0.1, 0.9, 0.5, 0.2, 0.5, math.nan])
    report = masks.run(dataclasses.replace(cfg, settle=4))
    assert (report.best_step, report.loss_best, report.pruned) == (30, 0.5, 31 / 120) and report.steps == 60


def test_never_reached_gives_the_most_pruned_with_a_warning(cfg, monkeypatch):
    scripted(monkeypatch, [5, 12, 12, 12, 7], [0.1, 0.5, 0.4, 0.4, 0.3])
    report = masks.run(dataclasses.replace(cfg, max_steps=50))
    assert not report.reached and (report.best_step, report.loss_best, report.pruned) == (30, 0.4, 0.1)
    assert "25.0% closed gates was not reached in 50 steps" in report.notes[-1]
    kept = read_masks(cfg.out, open_model(cfg.model).geometry, "masks").kept
    assert [int((~k).sum()) for k in kept] == [12, 0, 0]


def test_nothing_ever_pruned_is_an_error(cfg):
    with pytest.raises(TrainingFailed, match="no closed gate in any of 2 evaluations .*Nothing was written"):
        masks.run(dataclasses.replace(cfg, max_steps=12))
    assert not cfg.out.exists()
    done = cortiq(*flags(cfg), "--max-steps", 12)
    assert done.status == 1 and "no closed gate" in done.err


def test_no_finite_loss_is_an_error(cfg, monkeypatch):
    scripted(monkeypatch, [40], [math.nan])
    with pytest.raises(TrainingFailed, match="no finite held-out loss"):
        masks.run(cfg)
    assert not cfg.out.exists()


def test_gives_up_when_steps_stay_not_finite(cfg, monkeypatch):
    real = GateTrainer.gradients

    def gradients(self, micros, l1):
        real(self, micros, l1)
        if self.read().steps >= 3:
            self.grad[0] = float("nan")

    monkeypatch.setattr(GateTrainer, "gradients", gradients)
    events: list[dict] = []
    with pytest.raises(TrainingFailed, match="masks: got 20 steps in a row"):
        masks.run(cfg, events.append)
    assert sum(e["event"] == "skip" for e in events) == 20 and sum(e["event"] == "step" for e in events) == 3


def test_better():
    def found(closed, loss):
        return masks_loop.Found(0, closed, loss, torch.zeros(1), torch.zeros(1))

    enough = Fraction(30)
    assert masks_loop.better(found(30, 9.0), found(29, 0.1), enough)
    assert not masks_loop.better(found(29, 0.1), found(30, 9.0), enough)
    assert masks_loop.better(found(3, 1.0), None, enough) and not masks_loop.better(found(3, math.inf), None, enough)


@pytest.mark.parametrize(
    ("keep", "want"), [(0.75, 0.25), (0.7, 0.3), (0.9, 0.1), (1.0, 0.0), (0.01, 0.95), (1 / 3, 2 / 3)]
)
def test_target(cfg, keep, want):
    """Of the decimal: with 0.7 exactly 30 of 100 closed gates are enough, where 1 - 0.7 is a little more than 0.3."""
    target = dataclasses.replace(cfg, keep_frac=keep).target
    assert float(target) == pytest.approx(want, abs=1e-15) and (keep != 0.7 or target == Fraction(3, 10))


def test_file_log_and_page(cfg, world):
    done = cortiq(*flags(cfg), "--json")
    report = done.json
    g = open_model(cfg.model).geometry
    found = read_masks(cfg.out, g, "masks")
    raw = load_file(cfg.out)
    assert set(raw) == {f"layers.{i}.{part}" for i in range(3) for part in ("logits", "gates", "kept")}
    for i in range(3):
        assert torch.equal(raw[f"layers.{i}.logits"], found.logits[i])
        assert torch.equal(found.kept[i], found.gates[i] > 0.5)
        torch.testing.assert_close(found.gates[i], torch.sigmoid(found.logits[i]))
    assert report["kept"] == [int(k.sum()) for k in found.kept] and report["gates"] == 120
    assert report["pruned"] == pytest.approx(1 - sum(report["kept"]) / 120)
    with safe_open(cfg.out, "pt") as f:
        origin = json.loads(f.metadata()["cortiq"])
    assert origin == found.provenance and origin["recipe"] == "masks" and origin["settings"]["tau"] == 0.5
    assert origin["trace"] == report["trace"] and "out" not in origin["settings"]
    events = read_log(report["log"])
    held = [e for e in events if e["event"] == "eval"]
    assert [e["step"] for e in held] == [0, *(t["step"] for t in report["trace"])] and held[0]["best_step"] is None
    text = page(events)
    assert "Closed gates" in text and f"{report['pruned']:.1%}" in text and "Open gates by layer" in text
    chosen = next(t for t in report["trace"] if t["step"] == report["best_step"])
    assert (chosen["loss"], chosen["pruned"]) == (report["loss_best"], report["pruned"])


def flags(cfg: MasksConfig) -> list:
    return ["masks", "--model", cfg.model, "--data", cfg.data, "--out", cfg.out, "--device", "cpu", "--window", 32,
            "--batch", 2, "--eval-every", 10, "--max-steps", 300, "--dtype", "f64"]  # fmt: skip


def test_two_runs_write_the_same_bytes_and_a_kl_run_leaves_no_targets(cfg, world, tmp_path):
    kl = dataclasses.replace(
        cfg, model=world.student, teacher=world.teacher, loss="kl", backward="ffn", topk=5, max_steps=120
    )
    other = dataclasses.replace(kl, out=tmp_path / "again")
    first, second = masks.run(kl), masks.run(other)
    assert first.loss_name == "KL" and first.trace == second.trace and first.loss_open > 0
    assert kl.out.read_bytes() == other.out.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "m.safetensors"]
    own = masks.run(dataclasses.replace(kl, teacher=None, topk=23, out=tmp_path / "own"))
    assert own.loss_open < first.loss_open  # its own teacher: what it says with all open, but for rounding to f32
    assert own.loss_open == pytest.approx(0.0, abs=1e-6)


def test_batches_come_in_the_order_of_masks(cfg, monkeypatch):
    seen = []
    real = masks.Feed.__getitem__
    monkeypatch.setattr(masks.Feed, "__getitem__", lambda self, i: seen.append(i) or real(self, i))
    plan = plan_masks(cfg)
    n = len(plan.train)
    with pytest.raises(TrainingFailed):
        masks.run(dataclasses.replace(cfg, max_steps=2 * n, eval_every=999, l1_init=1e-9, seed=5))
    order = Shuffler(n, MASKS_SEED ^ 5)
    assert [i for i in seen if i < n] == order.next_pass() + order.next_pass()


def test_precision(cfg):
    """Strict steps are in float32 beside evaluations in the working dtype; fast ones are in that."""
    bf16 = backend.DtypeChoice(torch.bfloat16, "a GPU")
    assert steps_in(cfg, bf16).dtype == torch.float32
    assert steps_in(dataclasses.replace(cfg, precision="fast"), bf16).dtype == torch.bfloat16
    assert steps_in(cfg, backend.DtypeChoice(torch.float64, "asked")).dtype == torch.float64


@pytest.mark.parametrize("precision", ["strict", "fast"])
def test_a_16_bit_run(cfg, monkeypatch, precision):
    """16 bit is for GPUs; here the choice is forced, to see both copies of the weights in a whole run."""
    monkeypatch.setattr(backend, "pick_dtype", lambda request, device: backend.DtypeChoice(torch.bfloat16, "forced"))
    plan = plan_masks(dataclasses.replace(cfg, precision=precision))
    assert plan.two_copies == (precision == "strict") and plan.eval_dtype == torch.bfloat16
    report = masks.run(dataclasses.replace(cfg, precision=precision))
    assert report.dtype == {"strict": "f32", "fast": "bf16"}[precision] and report.reached


def test_where_both_copies_do_not_fit_evaluations_are_strict_too(cfg, monkeypatch):
    monkeypatch.setattr(backend, "pick_dtype", lambda request, device: backend.DtypeChoice(torch.bfloat16, "forced"))
    least = plan_masks(cfg).memory_with("layer")["least"]  # of the policy that needs least
    monkeypatch.setattr(backend, "free_bytes", lambda device: least - 1)
    plan = plan_masks(cfg)
    assert not plan.two_copies and plan.eval_dtype == torch.float32
    assert any("evaluations are in f32, too" in n for n in plan.notes)


def test_the_fold_of_a_mask_is_the_masked_model(cfg, world, tmp_path):
    """One width a layer and no rounding up: the folded directory scores on val what the evaluation said."""
    report = masks.run(cfg)
    assert min(report.kept) >= 1
    base = FoldConfig(
        cfg.model, data=cfg.data, out=tmp_path / "exact", masks=cfg.out, align=1, device="cpu", window=32, batch=2
    )
    done = fold.run(dataclasses.replace(base, per_layer=True))
    assert done.widths == report.kept == list(open_model(tmp_path / "exact").geometry.intermediate)
    row = score.run(ScoreConfig((tmp_path / "exact",), cfg.data, splits=("val",), device="cpu", dtype="f64", window=32))
    assert row.rows[0].nll == pytest.approx(report.loss_best, rel=1e-9)
    one = fold.run(dataclasses.replace(base, out=tmp_path / "one"))
    assert one.widths == [max(report.kept)] * 3
    given = fold.run(dataclasses.replace(base, out=tmp_path / "given", width=7))
    logits = read_masks(cfg.out, open_model(cfg.model).geometry, "x").logits[1]
    gate = "model.layers.1.mlp.gate_proj.weight"
    keep = sorted(torch.sort(logits, descending=True, stable=True).indices[:7].tolist())
    assert given.widths == [7] * 3
    assert torch.equal(open_model(tmp_path / "given").read(gate), open_model(cfg.model).read(gate)[keep])
    note = json.loads((tmp_path / "given" / "cortiq.json").read_text())["provenance"]["masks"]
    assert note["recipe"] == "masks"


def test_hard_evaluation_is_the_model_with_neurons_taken_out(cfg):
    plan = plan_masks(cfg)
    loop = masks.Loop(plan, masks.Feed(plan, masks.obtain_targets(plan, lambda e: None)[0]), lambda e: None, None)
    opened = loop._held_out(None)
    kept = torch.rand(120, generator=torch.Generator().manual_seed(1)) > 0.5
    got = loop._held_out(kept)
    w = Weights.load(open_model(cfg.model), dtype=torch.float64)
    for i, part in enumerate(kept.split(40)):
        w[f"layers.{i}.down"].mul_(part)
    loop.evaluator.weights = w
    assert got == pytest.approx(loop._held_out(None), rel=1e-12)
    assert got != pytest.approx(opened)


def test_a_share_of_all_neurons_by_their_logits(cfg, tmp_path):
    """--per-layer with --keep: the largest logits of the whole model stay, however many of a layer; rounded up."""
    masks.run(cfg)
    logits = read_masks(cfg.out, open_model(cfg.model).geometry, "x").logits
    least = torch.cat(logits).sort(descending=True).values[72 - 1]
    want = [int((m >= least).sum()) for m in logits]
    base = FoldConfig(
        cfg.model, tmp_path / "own", data=cfg.data, masks=cfg.out, per_layer=True, keep=0.6, align=1, device="cpu",
        window=32, batch=2,
    )  # fmt: skip
    done = fold.run(base)
    assert done.widths == want and sum(want) == 72 and len(set(want)) > 1
    for i, m in enumerate(logits):
        gate = f"model.layers.{i}.mlp.gate_proj.weight"
        rows = (m >= least).nonzero().flatten()
        assert torch.equal(open_model(tmp_path / "own").read(gate), open_model(cfg.model).read(gate)[rows])
    rounded = fold.run(dataclasses.replace(base, out=tmp_path / "rounded", align=8)).widths
    assert rounded == [min(-(-w // 8) * 8, 40) for w in want]


def test_share_of_all():
    visits = [torch.tensor([5.0, 1, 1]), torch.tensor([3.0, 2]), torch.tensor([0.0, 4, 0]), torch.tensor([0.0, 0])]
    assert share_of_all(visits, 2, 0.6) == [2, 1] and share_of_all(visits[:2], 2, 0.4) == [1, 1]
    assert share_of_all([torch.zeros(2), torch.zeros(2)], 2, 0.5) == [2, 0]  # of equals the first
    assert sum(share_of_all(visits, 2, 1e-9)) == 1


KEEP = {
    "40 of 96": (40, 96, 32, 64), "64 of 64": (64, 64, 32, 64), "47 of 48": (47, 48, 32, 48),
    "align 1": (47, 48, 1, 47), "none": (0, 48, 32, 32),
}  # fmt: skip


@pytest.mark.parametrize("case", KEEP)
def test_keep_masks(case):
    alive, f, align, want = KEEP[case]
    ramp = torch.arange(f, 0, -1) - (f - alive) - 0.5
    kept = keep_masks([ramp], 0.5, align, False)[0]
    assert int((ramp > 0).sum()) == alive and kept.tolist() == [i < want for i in range(f)]


def test_keep_widths_uniform():
    assert keep_widths([10, 70], [96, 96], 32, True) == [96, 96]
    assert keep_widths([10, 70], [96, 96], 32, False) == [32, 96]
    assert keep_widths([10, 70], [64, 96], 32, True) == [64, 64]


REFUSED = {
    "keep_frac": (("--keep-frac", 0), "keep_frac: got 0.0; expected a fraction in (0, 1]"),
    "keep more than all": (("--keep-frac", 1.1), "keep_frac"),
    "tau": (("--tau", 1), "tau: got 1.0; expected a fraction in (0, 1)"),
    "closed from the start": (("--mask-init", 0), "mask_init: got 0.0; expected more than 0"),
    "closed at this tau": (("--tau", 0.9), "expected more than 2.197"),
    "gates without a gradient": (("--mask-init", 40), "at most 16"),
    "shrinking": (("--l1-grow", 0.9), "l1_grow: got 0.9; expected at least 1"),
    "no pressure": (("--l1-init", 0, "--l1-step", 0), "some pressure"),
    "negative pressure": (("--l1-init", -1), "l1_init"),
    "rate": (("--lr", 0), "lr: got 0.0; expected more than 0"),
    "epsilon": (("--eps", 0), "eps"),
    "eval_every": (("--eval-every", 0), "eval_every: got 0; expected at least 1"),
    "max_steps": (("--max-steps", 0), "max_steps"),
    "settle": (("--settle", -1), "settle"),
    "loss": (("--loss", "mse"), "loss"),
    "backward": (("--backward", "half"), "backward"),
    "teacher with nll": (("--teacher", "TEACHER"), "none. Leave it out, or set --loss kl."),
    "topk": (("--loss", "kl", "--topk", 24), "topk: got 24; expected 1 .. 23"),
    "batch": (("--batch", 999), "masks: batch"),
    "window": (("--window", 1), "masks: window"),
    "out in the model": (("--out", "TEACHER/m", "--log", "/dev/null"), "masks: out"),
    "log in the model": (("--log", "TEACHER/l"), "masks: log"),
    "targets in the model": (("--loss", "kl", "--topk", 5, "--targets", "TEACHER"), "masks: targets"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(cfg, world, tmp_path, monkeypatch, case):
    monkeypatch.setattr(Weights, "load", lambda *a, **k: pytest.fail("work began"))
    args, words = REFUSED[case]
    line = refused(tmp_path, *flags(cfg), *(str(a).replace("TEACHER", str(world.teacher)) for a in args))
    assert words in line and "expected" in line


def test_an_output_that_is_there_is_refused(cfg, tmp_path, world):
    cfg.out.write_text("precious")
    assert "which is there already" in refused(tmp_path, *flags(cfg))
    cfg.out.unlink()
    cfg.out.mkdir()
    assert "the directory" in refused(tmp_path, *flags(cfg))


def test_another_vocabulary_is_refused(cfg, build, tmp_path):
    other = build.model(tmp_path / "v", build.config("L", vocab=31))
    assert "vocabular" in refused(tmp_path, *flags(cfg), "--loss", "kl", "--teacher", other)


def test_files_that_are_no_masks_of_this_model(cfg, build, world, tmp_path):
    good = {f"layers.{i}.{p}": torch.ones(40) for i in range(3) for p in ("logits", "gates")}
    good |= {f"layers.{i}.kept": torch.ones(40, dtype=torch.bool) for i in range(3)}
    meta = {"cortiq": "{}"}
    bad = {
        "says nothing": (good, None), "of 2 layers": ({n: t for n, t in good.items() if "layers.2" not in n}, meta),
        "no layers.1.kept": ({n: t for n, t in good.items() if n != "layers.1.kept"}, meta),
        "[39]": ({**good, "layers.0.logits": torch.ones(39)}, meta),
        "F64": ({**good, "layers.0.logits": torch.ones(40).double()}, meta),
        "not finite": ({**good, "layers.1.logits": torch.full((40,), float("nan"))}, meta),
    }  # fmt: skip
    file = tmp_path / "x.safetensors"
    base = ("fold", "--model", cfg.model, "--data", cfg.data, "--out", tmp_path / "f", "--masks", file)
    for words, (tensors, metadata) in bad.items():
        save_file(tensors, file, metadata=metadata)
        assert words in refused(tmp_path, *base)
    file.write_bytes(b"text")
    assert "fold: masks" in refused(tmp_path, *base)
    save_file(good, file, metadata=meta)
    assert "one of them" in refused(tmp_path, *base, "--per-layer", "--width", 8)
    assert "one of them" in refused(tmp_path, *base, "--per-layer", "--widths", 8, 8, 8)
    assert "without masks" in refused(tmp_path, *base[:-2], "--per-layer")
    with pytest.raises(InputError, match="masks: keep_frac"):
        dataclasses.replace(cfg, keep_frac=-1.0).check()


def test_masks_rank_and_grams_repair(cfg, tmp_path):
    """The same neurons stay with and without Grams; with them down_proj is another. No second ranking beside masks."""
    masks.run(cfg)
    grams = tmp_path / "grams"
    shape = ("--device", "cpu", "--window", 32, "--batch", 2)
    assert cortiq("capture", "--model", cfg.model, "--data", cfg.data, "--out", grams, *shape).status == 0
    common = ("fold", "--model", cfg.model, "--masks", cfg.out, "--width", 12, "--align", 4)
    assert cortiq(*common, "--data", cfg.data, "--out", tmp_path / "cut", *shape).status == 0
    assert cortiq(*common, "--grams", grams, "--out", tmp_path / "mended", "--device", "cpu").status == 0
    cut, mended = open_model(tmp_path / "cut"), open_model(tmp_path / "mended")
    at = "model.layers.0.mlp."
    assert torch.equal(cut.read(at + "gate_proj.weight"), mended.read(at + "gate_proj.weight"))
    assert not torch.equal(cut.read(at + "down_proj.weight"), mended.read(at + "down_proj.weight"))
    line = refused(tmp_path, *common, "--data", cfg.data, "--out", tmp_path / "x", "--rank", "random")
    assert "masks with rank 'random'" in line
