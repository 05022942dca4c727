"""bench.mlp: everyone's rows against the products of the same rounds, and no figure without a green gate."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from bench import mlp as command
from bench.ops import mlp


def test_rows_on_a_cpu(tmp_path, capsys):
    out = tmp_path / "mlp.json"
    assert command.main(["--device", "cpu", "--rounds", "2", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["results"]
    assert {r["part"] for r in rows} == {"fwd", "bwd", "fwd+bwd"}
    assert {r["who"] for r in rows} == {command.FLOOR, command.OURS, command.HALF}
    for r in rows:
        assert r["median_ms"] > 0 and r["of_products"] > 0
        assert r["of_products"] == 1 or r["who"] != command.FLOOR
    assert "gate 5 results within bounds" in capsys.readouterr().out


def test_a_red_gate_is_not_measured(monkeypatch, capsys, tmp_path):
    def calls(t, sizes):
        made = mlp.calls(t, sizes)
        return {**made, "fwd": lambda: {"y": torch.zeros_like(t["x"])}}

    monkeypatch.setattr(mlp, "ENTRY", dataclasses.replace(mlp.ENTRY, calls=calls))
    out = tmp_path / "mlp.json"
    assert command.main(["--device", "cpu", "--rounds", "1", "--json", str(out)]) == 1
    assert json.loads(out.read_text())["results"] == []
    assert " x products" not in capsys.readouterr().out


def test_half_of_the_neurons_is_what_compacting_leaves(rng):
    """The benchmark cuts the matrices by itself; the package's way of doing so gives the same ones."""
    from tiny import geometry

    from cortiq_kernels.model.compact import compact
    from cortiq_kernels.model.weights import Weights

    g = geometry("LF")
    w = Weights.random(g, dtype=torch.float32)
    t = {"gate_up_weight": w["layers.0.gate_up"], "down_weight": w["layers.0.down"], "mask": torch.ones(48)}
    half = command.halved(t)
    keep = torch.zeros(48)
    keep[::2] = 1
    c = compact(w, {0: keep}, align=1)
    assert torch.equal(c.weights["layers.0.gate_up"], half["gate_up_weight"])
    assert torch.equal(c.weights["layers.0.down"], half["down_weight"])
    assert half["mask"].shape == (24,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_floor_does_the_products_of_the_op(dtype):
    """Shapes and dtypes of what both write are alike: nothing is left out of the floor, nothing is smaller."""
    sizes = dict(mlp.ENTRY.shapes["small"])
    t = mlp.inputs(sizes, dtype, torch.device("cpu"), torch.Generator().manual_seed(0))
    made = [f(t, sizes) for f in (mlp.calls, mlp.products)]
    ours, floor = ({k: v for call in calls.values() for k, v in call().items()} for calls in made)
    assert set(ours) == {*floor, "dmask"}
    for name, out in floor.items():
        assert (out.shape, out.dtype) == (ours[name].shape, ours[name].dtype)
        assert torch.isfinite(out).all()
