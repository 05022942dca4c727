"""200 steps of healing the model that ships here: in bfloat16 on a GPU the held-out loss goes where it goes in float32
on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cortiq_kernels.recipes import fold
from cortiq_kernels.recipes.fold_config import FoldConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ROOT = Path(__file__).resolve().parents[2]
SMALL = ROOT / "examples" / "small_model"
STEPS, NAT = 200, 0.02
RECORDS = {"train": 70, "val": 12}  # a part, because the CPU's curve is the test's time


def start(tmp_path: Path, data: Path, device: str, dtype: str) -> subprocess.Popen:
    """A heal of the model without half of its neurons, in a process of its own."""
    settings = {
        "student": tmp_path / "cut", "teacher": SMALL / "model", "data": data, "out": tmp_path / dtype,
        "device": device, "dtype": dtype, "window": 256, "batch": 2, "lr": 1e-3, "epochs": 1.77, "eval-every": 25,
        "checkpoint-every": "off",
    }  # fmt: skip
    words = [str(x) for name, value in settings.items() for x in (f"--{name}", value)]
    return subprocess.Popen([sys.executable, "-m", "cortiq_kernels", "heal", *words, "--quiet"], cwd=ROOT)


def curve(log: Path) -> dict[int, float]:
    events = map(json.loads, log.read_text().splitlines())
    return {e["step"]: e["loss"] for e in events if e["event"] == "eval"}


def test_a_heal_in_bfloat16_follows_the_float32_curve(tmp_path):
    room, lines = dict(RECORDS), []
    for line in (SMALL / "data.jsonl").read_text().splitlines():
        split = json.loads(line)["split"]
        if room.get(split, 0) > 0:
            room[split] -= 1
            lines.append(line)
    data = tmp_path / "d.jsonl"
    data.write_text("\n".join(lines) + "\n")
    fold.run(FoldConfig(SMALL / "model", tmp_path / "cut", data, device="cpu", dtype="f32", window=1024, batch=2,
                        keep=0.5, repair=False, max_batches=4))  # fmt: skip
    runs = [start(tmp_path, data, "cpu", "f32"), start(tmp_path, data, "cuda", "bf16")]
    try:
        assert [run.wait() for run in runs] == [0, 0]
    finally:
        for run in runs:
            run.kill()
    want, got = curve(tmp_path / "f32.log.jsonl"), curve(tmp_path / "bf16.log.jsonl")
    for step, loss in want.items():
        print(f"step {step:4d}  f32 on the CPU {loss:.4f}  bf16 on the GPU {got[step]:.4f}  {got[step] - loss:+.4f}")
    assert want.keys() == got.keys() and max(want) >= STEPS and want[max(want)] < 0.6 * want[0]
    apart = {step: got[step] - loss for step, loss in want.items()}
    assert max(map(abs, apart.values())) <= NAT, apart
