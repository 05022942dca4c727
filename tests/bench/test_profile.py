"""Where a step's time goes, and the products that it is held against."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import profile, step
from bench.geometries import geometry
from bench.profile import Span, shares_of
from bench.step_gemms import gemm_calls, measure_products
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import Trainer
from cortiq_kernels.step import forward as forward_module

CPU = torch.device("cpu")
SMALL = ["--size", "small", "--device", "cpu", "--batch", "1", "--window", "32", "--topk", "4", "--steps", "1"]


def test_work_belongs_to_the_mark_in_which_it_begins():
    marks = [Span(0, 100, "other"), Span(10, 20, "GEMM"), Span(30, 40, "GDN"), Span(40, 60, "GEMM")]
    work = [Span(12, 19, "a"), Span(5, 9, "b"), Span(31, 33, "c"), Span(40, 41, "d"), Span(70, 90, "e")]
    assert shares_of(marks, work) == {"other": 24, "GEMM": 8, "GDN": 2}
    assert shares_of([], work) == {"other": 34}
    assert shares_of(marks, None) == {"other": 60, "GEMM": 30, "GDN": 10}


def test_shares_are_of_the_whole_and_written_with_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plain = forward_module.linear_fwd
    assert profile.main([*SMALL, "--json", str(tmp_path / "p.json")]) == 0
    assert forward_module.linear_fwd is plain
    found = json.loads((tmp_path / "p.json").read_text())["profile"]
    assert list(found["ms"]) == [f for f in profile.ORDER if f in found["ms"]] == list(profile.ORDER)
    assert all(ms > 0 for ms in found["ms"].values())
    assert found["kernel_ms"] == pytest.approx(sum(found["ms"].values()))
    shown = (tmp_path / "p.html").read_text()
    assert shown.count("<rect") == len(found["ms"]) == shown.count("<td>") // 2
    assert "GEMM" in capsys.readouterr().out


@pytest.mark.parametrize("packing", ["stream", "records"])
def test_the_floor_is_every_product_of_the_step(packing: str, monkeypatch: pytest.MonkeyPatch):
    """As many multiplications as the step does through the same functions, and nothing else is changed."""
    g = geometry("small")
    args = step.parse([*SMALL, "--packing", packing], "x", "a\n\nb")
    micro = step.micro_of(args, g, CPU)
    assert micro.batch.n_scored == 32 - (8 if packing == "records" else 1)
    w = Weights.random(g, dtype=torch.float32, device=CPU, train="layers")
    trainer = Trainer(w, 32, 32)
    trainer.step([micro], 1e-3)
    before = w.trained.master.clone()
    per_layer = [g.gdn_width + g.nv * g.dv, g.attn_width + g.nq * g.hd]
    weights = sum(g.hidden * (per_layer[g.is_full(i)] + 3 * g.intermediate[i]) for i in range(g.n_layers))
    want = 3 * 32 * weights + 2 * micro.batch.n_scored * g.hidden * g.vocab
    done = []
    for name in ("mm", "addmm"):
        real = getattr(torch, name)

        def counted(a, b, *rest, real=real, **kw):
            done.append(a.shape[0] * a.shape[1] * b.shape[1])
            return real(a, b, *rest, **kw)

        monkeypatch.setattr(torch, name, counted)
    for call in gemm_calls(trainer, micro.batch.n_scored):
        call()
    assert sum(done) == want
    monkeypatch.undo()
    timing, finite = measure_products(trainer, micro.batch.n_scored, CPU)
    assert timing.median > 0 and finite and torch.equal(before, w.trained.master)
