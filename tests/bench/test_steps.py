"""What several trainers take beside each other: no figure without a green gate, and what each row says."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from directories import id_rows, records, tensors_of, write_dir

from bench import masks_precision, step_masks, step_widths
from bench.geometries import geometry
from cortiq_kernels.model.names import parameter_count
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes.mask_file import Masks
from cortiq_kernels.step import GateTrainer

SMALL = ["--size", "small", "--device", "cpu", "--batch", "1", "--window", "32", "--topk", "4", "--steps", "1"]


def test_steps_of_masks_beside_a_heal(tmp_path):
    assert step_masks.main([*SMALL, "--shares", "--json", str(tmp_path / "m.json")]) == 0
    found = json.loads((tmp_path / "m.json").read_text())["masks"]
    assert list(found["steps"]) == ["heal", "full", "ffn", "full, strict", "ffn, strict"]
    for row in found["steps"].values():
        assert row["median_ms"] > 0 and row["of_heal"] > 0 and row["loss_by_step"][-1] < row["loss_by_step"][0]
    assert found["steps"]["heal"]["of_heal"] == 1
    shares = found["shares_ms"]
    assert list(shares) == ["heal", "full", "ffn"] and all(s["GEMM"] > 0 and s["Adam"] > 0 for s in shares.values())


def test_a_step_of_masks_that_does_not_learn_has_no_time(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(GateTrainer, "apply", lambda self: None)
    assert step_masks.main([*SMALL, "--json", str(tmp_path / "m.json")]) == 1
    assert "full: gate RED" in capsys.readouterr().out and not (tmp_path / "m.json").exists()


def test_widths(tmp_path):
    keep = ("1", "0.75", "0.25")
    assert step_widths.main([*SMALL, "--keep", *keep, "--json", str(tmp_path / "w.json")]) == 0
    rows = json.loads((tmp_path / "w.json").read_text())["widths"]["steps"]
    assert [(name, r["width"]) for name, r in rows.items()] == [("100%", 160), ("75%", 128), ("25%", 64)]
    g = geometry("small")
    for row in rows.values():
        want = parameter_count(g.with_widths([row["width"]] * 4))
        assert (row["parameters"], row["file_bytes"]) == (want, 4 * want)
        assert row["median_ms"] > 0 and row["forward_ms"] > 0
        assert row["loss"] == pytest.approx(row["loss_of_whole"], rel=1e-4)
    assert rows["75%"]["loss"] != rows["100%"]["loss"]


def test_a_cut_model_that_is_another_has_no_time(monkeypatch, capsys, tmp_path):
    real = step_widths.compact

    def other(w: Weights, masks, **more):
        cut = real(w, masks, **more)
        cut.weights["layers.0.down"].mul_(-30)
        return cut

    monkeypatch.setattr(step_widths, "compact", other)
    assert step_widths.main([*SMALL, "--json", str(tmp_path / "w.json")]) == 1
    assert "gate RED" in capsys.readouterr().out and not (tmp_path / "w.json").exists()


def test_differences_of_masks():
    logits = [torch.tensor([1.0, -1.0, 2.0, -2.0]), torch.tensor([3.0, 4.0, -0.5, 5.0])]
    kept = [m > 0 for m in logits]
    a = Masks(logits, logits, kept, {})
    b = Masks([logits[0], -logits[1]], logits, [kept[0], ~kept[1]], {})
    found = masks_precision.differences(a, b)
    assert (found["closed_here_only"], found["open_here_only"]) == (3, 1)
    assert found["closed_here_only_by_layer"] == [0, 3] and found["open_here_only_by_layer"] == [0, 1]
    assert (found["quarter"], found["lowest_quarter_differs"]) == (2, 2)  # 1 and 3 against 7 and 5
    assert not masks_precision.differences(a, a)["lowest_quarter_differs"]


def test_precision_of_masks_on_a_cpu_is_one(tmp_path, monkeypatch):
    """Strict and fast are both float32 there; another order of the records is another mask."""
    config = tiny.config("LF", hidden=24, ffn=40, vocab=23)
    write_dir(tmp_path / "model", config, tensors_of(config))
    records(tmp_path / "data.jsonl", [*id_rows(23, (30, 25, 32, 28), "train"), *id_rows(23, (20, 31), "val")])
    monkeypatch.setattr(masks_precision, "EXAMPLE", tmp_path)
    short = ["--max-steps", "6", "--window", "32", "--batch", "1", "--l1-init", "2", "--lr", "1", "--eval-every", "1"]
    file = tmp_path / "p.json"
    assert masks_precision.main(["--device", "cpu", "--json", str(file), "--", *short]) == 0
    runs = json.loads(file.read_text())["masks_precision"]["runs"]
    same, other = runs[masks_precision.FAST], runs[masks_precision.OTHER]
    assert same["closed_here_only"] == same["open_here_only"] == same["lowest_quarter_differs"] == 0 < same["pruned"]
    assert other["lowest_quarter_differs"] > 0 and sum(same["kept"]) == round((1 - same["pruned"]) * 2 * 40)
