"""A small world for the recipes: a teacher, a student (the teacher with noise) and records of ids, all on disk."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import config

from cortiq_kernels.data.batches import eval_batches
from cortiq_kernels.data.records import load_records
from cortiq_kernels.data.windows import pack
from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.hf import create_model, open_model
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes.capture_config import CaptureConfig


def make_records(path: Path, vocab: int, *, seed: int = 0, train: int = 40, val: int = 4, test: int = 4) -> Path:
    """Records of ids with a pattern (each token follows from the one before, most of the time), in three splits."""
    rng = np.random.default_rng(seed)
    table = np.random.default_rng(99).permutation(vocab)
    lines = []
    for split, n in (("train", train), ("val", val), ("test", test)):
        for i in range(n):
            ids = [int(rng.integers(vocab))]
            while len(ids) < rng.integers(9, 30):
                ids.append(int(table[ids[-1]]) if rng.random() < 0.9 else int(rng.integers(vocab)))
            record = {"rid": f"{split}-{i}", "split": split, "ids": ids, "first_target": 3, "category": "ab"[i % 2]}
            lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n")
    return path


def make_model(path: Path, cfg: dict, *, seed: int = 0, noise: float = 0.0, dtype=torch.float32, extra=None) -> Path:
    """A model directory with random weights (std 0.15), plus noise of another seed; `extra`: more tensors."""
    g = Geometry.from_config(cfg)
    w = Weights.random(g, seed=seed, dtype=torch.float32, train="all", std=0.15, vector_noise=0.03)
    tensors = {n: t.clone() for n, t in w.export().items()}
    if noise:
        gen = torch.Generator().manual_seed(seed + 77)
        for n, t in tensors.items():
            if "norm" not in n and "A_log" not in n:
                t += noise * torch.randn(t.shape, generator=gen)
    keep = ("A_log", "dt_bias")
    tensors = {n: t if n.endswith(keep) else t.to(dtype) for n, t in tensors.items()}
    create_model(path, cfg, {**tensors, **(extra or {})})
    return path


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny matrices: a second thread only waits, for seconds when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """`teacher`, `student`, `data`: paths; `config`."""
    root = tmp_path_factory.mktemp("world")
    cfg = config("LFL", hidden=24, ffn=40, vocab=23)
    return SimpleNamespace(
        config=cfg,
        teacher=make_model(root / "teacher", cfg),
        student=make_model(root / "student", cfg, noise=0.03),
        data=make_records(root / "data.jsonl", 23),
    )


@pytest.fixture
def capture_cfg(world, tmp_path) -> CaptureConfig:
    """A capture of the teacher in float64."""
    return CaptureConfig(
        world.teacher, world.data, tmp_path / "grams.safetensors", dtype="f64", device="cpu", window=32, batch=2
    )


@pytest.fixture
def loaded(world):
    """(weights in float64, batches, records) of the teacher and the train records."""
    w = Weights.load(open_model(world.teacher), dtype=torch.float64)
    records = load_records(world.data, None, splits=("train",), vocab=23).split("train")
    return w, list(eval_batches(pack(records, 32).windows, 2)), records


@pytest.fixture
def build() -> SimpleNamespace:
    """`model(path, config, ...)`, `records(path, vocab, ...)` and `tensors(dir)`: bytes of every tensor."""

    def tensors(path: Path) -> dict[str, torch.Tensor]:
        m = open_model(path)
        return {n: m.read(n).clone() for n in m.tensors}

    return SimpleNamespace(model=make_model, records=make_records, tensors=tensors, config=config)
