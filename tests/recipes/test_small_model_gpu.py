"""200 steps of healing the model that ships here: in bfloat16 on a GPU the held-out loss goes where it goes in float32
on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cortiq_kernels.recipes import fold, heal
from cortiq_kernels.recipes.fold_config import FoldConfig
from cortiq_kernels.recipes.heal_config import HealConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SMALL = Path(__file__).resolve().parents[2] / "examples" / "small_model"
STEPS, NAT = 200, 0.02


def test_a_heal_in_bfloat16_follows_the_float32_curve(tmp_path):
    source, data, cut = SMALL / "model", SMALL / "data.jsonl", tmp_path / "cut"
    fold.run(FoldConfig(source, cut, data, device="cpu", dtype="f32", window=1024, batch=2, keep=0.5, repair=False,
                        max_batches=4))  # fmt: skip
    curves = {}
    threads = torch.get_num_threads()
    for device, dtype in (("cpu", "f32"), ("cuda", "bf16")):
        cfg = HealConfig(
            student=cut, teacher=source, data=data, out=tmp_path / dtype, device=device, dtype=dtype, window=256,
            batch=4, lr=1e-3, epochs=STEPS / 263, eval_every=25, checkpoint_every="off",
        )  # fmt: skip
        try:
            torch.set_num_threads(8 if device == "cpu" else 1)
            report = heal.run(cfg)
        finally:
            torch.set_num_threads(threads)
        assert report.steps == STEPS and report.skipped == 0
        curves[dtype] = report.evaluations
    for (step, want), (_, got) in zip(curves["f32"], curves["bf16"], strict=True):
        print(f"step {step:4d}  f32 on the CPU {want:.4f}  bf16 on the GPU {got:.4f}  {got - want:+.4f}")
    assert curves["f32"][-1][1] < 0.5 * curves["f32"][0][1]
    apart = {step: got - want for (step, want), (_, got) in zip(curves["f32"], curves["bf16"], strict=True)}
    assert max(map(abs, apart.values())) <= NAT, apart
