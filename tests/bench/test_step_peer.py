"""The peer of a step computes what the step computes: the same loss from the same weights, and it learns."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench import step, step_peer  # noqa: E402
from bench.geometries import geometry  # noqa: E402
from cortiq_kernels.model.weights import Weights  # noqa: E402
from cortiq_kernels.step import Trainer  # noqa: E402

pytest.importorskip("transformers")
CPU = torch.device("cpu")


def test_the_same_loss_from_the_same_weights():
    g = geometry("small")
    micro = step.random_micro(g, 2, 32, 4, CPU)
    w = Weights.random(g, dtype=torch.float32, train="all")
    peer = step_peer.PeerStep(g, micro, 1e-4, CPU, torch.float32, compiled=False)
    missing, unexpected = peer.model.load_state_dict(w.export(), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    for master, p in zip(peer.masters, peer.params, strict=True):
        master.copy_(p.detach())
    want = Trainer(w, 64, 32).gradients([micro])
    assert float(peer()) == pytest.approx(float(want), rel=1e-5)
    assert float(peer()) < float(want)


def test_its_figures_lie_beside_ours(tmp_path: Path, capsys, monkeypatch):
    small = ["--size", "small", "--device", "cpu", "--batch", "1", "--window", "32", "--topk", "4", "--steps", "2"]
    out = tmp_path / "s.json"
    assert step.main([*small, "--rate", "1e-3", "--peer", "--json", str(out)]) == 0
    found = json.loads(out.read_text())["step"]
    peer = found["peer"]
    assert found["speedup"] == pytest.approx(peer["median_ms"] / found["eager"]["median_ms"])
    assert peer["median_ms"] > 0 and peer["loss_by_step"][-1] < peer["loss_by_step"][0]
    said = capsys.readouterr().out
    assert "peer: step" in said and "x as fast as the peer" in said

    def broken(*args, **more):
        raise ModuleNotFoundError("No module named 'fla'")

    monkeypatch.setattr(step, "measure_peer", broken)
    assert step.main([*small, "--rate", "1e-3", "--peer", "--json", str(out)]) == 0
    found = json.loads(out.read_text())["step"]
    assert found["peer"] == {"failed": "ModuleNotFoundError: No module named 'fla'"} and "speedup" not in found
