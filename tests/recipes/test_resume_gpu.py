"""On a GPU with deterministic=True a resumed heal is the uninterrupted one, bit for bit, in every precision."""

from __future__ import annotations

import dataclasses
import signal

import pytest
import torch

from cortiq_kernels.recipes import heal
from cortiq_kernels.recipes.checkpoint_dir import CheckpointDir
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.stopping import Stopped

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("train_from", [0, 1])
def test_resumed_is_the_uninterrupted_run(world, tmp_path, dtype, train_from):
    cfg = HealConfig(
        student=world.student, teacher=world.teacher, data=world.data, out=tmp_path / "healed", device="cuda",
        deterministic=True, dtype=dtype, train_from=train_from, window=32, batch=2, lr=2e-3, epochs=1.5, eval_every=4,
        topk=8, ce=0.25, resume=True,
    )  # fmt: skip
    calm = dataclasses.replace(cfg, out=tmp_path / "calm")
    report = heal.run(calm)
    for step in (1, 6, report.steps - 1):

        def stop(event: dict, step: int = step) -> None:
            if (event["event"], event.get("step")) == ("step", step):
                signal.raise_signal(signal.SIGTERM)

        with pytest.raises(Stopped):
            heal.run(cfg, stop)
        state = CheckpointDir(cfg.out).read()
        assert state["step"] == step and 1.0 <= state["counters"]["scale"] <= (4096.0 if dtype == "f16" else 1.0)
    again = heal.run(cfg)
    assert again.evaluations == report.evaluations
    for p in calm.out.iterdir():
        assert p.read_bytes() == (cfg.out / p.name).read_bytes(), p.name
