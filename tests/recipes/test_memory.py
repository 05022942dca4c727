"""What a plan says of memory, against the tensors and against the peak of a process."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import batch, config, geometry, plain_config, targets

from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes import fold, heal_plan, score
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.fold_config import FoldConfig
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.score_config import ScoreConfig
from cortiq_kernels.step import Micro, Trainer
from cortiq_kernels.step.loss import Targets
from cortiq_kernels.step.memory import gdn_chunk, train_bytes

TOLERANCE = 0.2

# A run in a process of its own, and the peak of its resident memory over what importing and a tiny run took.
CHILD = """
import importlib, json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)

def kib(key):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith(key))

def run(settings):
    recipe, plan = settings.pop("recipe"), {}
    module = importlib.import_module("cortiq_kernels.recipes." + recipe)
    Config = getattr(importlib.import_module(f"cortiq_kernels.recipes.{recipe}_config"), recipe.capitalize() + "Config")
    for name in ("student", "teacher", "data", "out", "model"):
        if name in settings:
            settings[name] = Path(settings[name])
    if "models" in settings:
        settings["models"] = tuple(map(Path, settings["models"]))
    module.run(Config(**settings), lambda e: plan.update(e) if e["event"] == "plan" else None)
    return plan["memory"]

run(json.loads(sys.argv[1]))
before = kib("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
memory = run(json.loads(sys.argv[2]))
print(json.dumps({"peak": kib("VmHWM") - before, "memory": memory}))
"""
linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")


def peaks(warm: dict, settings: dict) -> tuple[int, int]:
    """(peak that the plan said, peak that the process had) of a run."""
    args = [json.dumps(s, default=str) for s in (warm, settings)]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}  # or glibc keeps what is freed, by chance more or less
    done = subprocess.run([sys.executable, "-c", CHILD, *args], capture_output=True, text=True, check=True, env=env)
    found = json.loads(done.stdout)
    return found["memory"]["peak"], found["peak"]


def storages(value, seen: set[int]) -> int:
    """Bytes of all tensors in a nest of tuples, each storage once."""
    if isinstance(value, torch.Tensor):
        s = value.untyped_storage()
        fresh = s.data_ptr() not in seen
        seen.add(s.data_ptr())
        return s.nbytes() if fresh else 0
    return sum(storages(v, seen) for v in value) if isinstance(value, tuple) else 0


@pytest.mark.parametrize("window", [16, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize(("first", "train_from"), [(0, 0), (0, 2), (1, 1)])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("policy", "train"), [("keep", "layers"), ("keep", "mlp"), ("cheap", "layers"), ("layer", "mlp")]
)
def test_buffers_and_saved_tensors_are_counted_to_the_byte(window, dtype, first, train_from, plain, policy, train):
    g = geometry("LFLF", hidden=24, ffn=20, vocab=37)
    if plain:
        g = Geometry.from_config(plain_config("qwen2", 4, hidden=24, ffn=20, vocab=37, nq=2, nkv=1))
    w = Weights.random(g, dtype=dtype, train=train, train_from=train_from, first_layer=first)
    b = batch([[9, 5], [12]], window, g.vocab)
    n = 2 * window
    trainer = Trainer(w, n, window, policy=policy)
    x = torch.zeros(n, 24, dtype=dtype) if first else None
    trainer.step([Micro(b, Targets(*targets(b, g.vocab, 3)), x)], 1e-3)
    said = train_bytes(
        g, n, window, b.n_scored, dtype, "cpu", first=first, train_from=train_from, trained=w.layout.trained_numel,
        policy=policy, train=train,
    )  # fmt: skip
    buf = trainer.buffers
    own = [t for name, t in vars(buf).items() if isinstance(t, torch.Tensor) and name != "spare"]  # lent by the weights
    slots = ("x_mix", "n_mix", "proj", "mix", "x_mlp", "n_mlp", "gate_up")
    own += [getattr(s, name) for s in (buf._shared, *buf.kept.values()) for name in slots]
    seen: set[int] = set()
    assert sum(storages(t, seen) for t in own) == said.buffers == buf.nbytes
    kept = sum(storages((s.norm_mix, s.mixer, s.norm_mlp), seen) for s in buf.kept.values())
    assert kept + storages(buf.final_norm, seen) == said.saved
    assert sorted(buf.kept) == list(range(train_from, 4))


def test_chunks_of_gated_deltanet():
    assert [gdn_chunk(t, "cpu") for t in (1, 16, 17, 32, 4096)] == [16, 16, 32, 32, 32]
    assert [gdn_chunk(t, "cuda") for t in (1, 33, 64, 4096)] == [16, 64, 64, 64]


def big(layers: str, vocab: int) -> dict:
    return config(layers, hidden=192, ffn=768, nq=4, nkv=2, hd=48, nk=4, nv=4, dk=48, dv=48, vocab=vocab)


@linux
@pytest.mark.parametrize(
    ("layers", "vocab", "more"), [("LLFL", 800, {}), ("LLFL", 800, {"train_from": 2, "ce": 0.5}), ("FFL", 9000, {}),
     ("LLFL", 800, {"activations": "layer"})],
)  # fmt: skip
def test_the_peak_of_a_heal_is_what_the_plan_said(tmp_path, build, world, layers, vocab, more):
    student, teacher = (build.model(tmp_path / f"m{i}", big(layers, vocab), seed=i) for i in (0, 1))
    data = build.records(tmp_path / "d.jsonl", vocab, train=150, val=40)
    shared = dict(recipe="heal", device="cpu", epochs=0.01, checkpoint_every="off")
    warm = dict(student=world.student, teacher=world.teacher, data=world.data, out=tmp_path / "w", window=32, batch=2)
    settings = dict(student=student, teacher=teacher, data=data, out=tmp_path / "o", window=256, batch=4, topk=16)
    said, had = peaks({**shared, **warm, "topk": 4}, {**shared, **settings, **more})
    assert said == pytest.approx(had, rel=TOLERANCE)


@linux
@pytest.mark.parametrize("models", [1, 2])
def test_the_peak_of_a_score_is_what_the_plan_said(tmp_path, build, world, models):
    paths = [build.model(tmp_path / f"m{i}", big("LLFL", 9000), seed=i) for i in range(models)]
    data = build.records(tmp_path / "d.jsonl", 9000, train=1, val=1, test=250)
    shared = dict(recipe="score", device="cpu")
    warm = dict(models=[world.student], data=world.data, window=32, batch=2)
    said, had = peaks({**shared, **warm}, {**shared, "models": paths, "data": data, "window": 1024, "batch": 4})
    assert said == pytest.approx(had, rel=TOLERANCE)


@linux
def test_the_peak_of_a_fold_is_what_the_plan_said(tmp_path, build, world):
    model = build.model(tmp_path / "m", big("LLFL", 900))
    data = build.records(tmp_path / "d.jsonl", 900, train=600)
    shared = dict(recipe="fold", device="cpu")
    warm = dict(model=world.student, data=world.data, out=tmp_path / "w", window=32, batch=2)
    settings = dict(model=model, data=data, out=tmp_path / "o", window=1024, batch=8)
    said, had = peaks({**shared, **warm}, {**shared, **settings})
    assert said == pytest.approx(had, rel=TOLERANCE)


def heal_of(world, tmp_path, **more) -> HealConfig:
    settings = dict(device="cpu", window=32, batch=2, topk=8, activations="cheap") | more
    return HealConfig(world.student, world.data, tmp_path / "o", world.teacher, **settings)


def test_what_surely_does_not_fit_is_refused_and_what_may_not_is_said(world, tmp_path, monkeypatch):
    cfg = heal_of(world, tmp_path)
    memory = heal_plan.plan_heal(cfg).memory()
    assert memory["least"] < memory["peak"]
    for free, notes in ((memory["peak"], 0), (memory["peak"] - 1, 1), (memory["least"], 1)):
        monkeypatch.setattr(heal_plan.backend, "free_bytes", lambda device, free=free: free)
        assert sum("may not fit" in n for n in heal_plan.plan_heal(cfg).notes) == notes
    monkeypatch.setattr(heal_plan.backend, "free_bytes", lambda device: memory["least"] - 1)
    with pytest.raises(InputError, match="heal: memory: got a plan that needs at least .* Lower --batch"):
        heal_plan.plan_heal(cfg)


@pytest.mark.parametrize("recipe", ["fold", "score", "compare"])
def test_fold_and_score_refuse_what_cannot_fit(world, tmp_path, monkeypatch, recipe):
    shared = dict(device="cpu", window=32, batch=2)
    if recipe == "fold":
        plan = lambda: fold.plan_fold(FoldConfig(world.teacher, tmp_path / "o", world.data, **shared))  # noqa: E731
    else:
        models = (world.teacher, world.student)[: 2 if recipe == "compare" else 1]
        plan = lambda: score.plan_score(ScoreConfig(models, world.data, **shared))  # noqa: E731
    memory = plan().memory()
    assert 0 < memory["model"] < memory["least"] < memory["peak"]
    monkeypatch.setattr(heal_plan.backend, "free_bytes", lambda device: memory["peak"] - 1)
    assert any("may not fit" in n for n in plan().notes)
    monkeypatch.setattr(heal_plan.backend, "free_bytes", lambda device: memory["least"] - 1)
    with pytest.raises(InputError, match="memory: got a plan that needs at least .* Lower --batch or --window"):
        plan()


def test_every_part_of_a_plan_moves_with_its_cause(world, tmp_path):
    base = heal_plan.plan_heal(heal_of(world, tmp_path)).memory()
    tail = heal_plan.plan_heal(heal_of(world, tmp_path, train_from=2)).memory()
    alone = heal_plan.plan_heal(dataclasses.replace(heal_of(world, tmp_path), teacher=None, ce=1.0)).memory()
    assert base["host_prefix"] == base["prefix_phase"] == 0 < min(tail["host_prefix"], tail["prefix_phase"])
    for part in ("student_and_optimizer", "activations", "saved_by_ops", "host_best"):
        assert tail[part] < base[part], part
    assert alone["teacher"] == alone["teacher_phase"] == alone["host_targets"] == 0 < base["host_targets"]
    assert base["host_least"] == base["host_targets"] + base["host_best"]


def test_room_for_more_sequences_is_room_for_their_chunks():
    """Of the Gated DeltaNet kernels: a state a head for each of them, kept by every layer of that kind; a backward has
    room for another, and for a gradient."""
    g = geometry("LLF", dk=64, dv=64)
    said = [
        train_bytes(g, 256, 64, 9, torch.bfloat16, "cuda", first=0, train_from=0, trained=0, sequences=s)
        for s in (0, 4, 104)
    ]
    assert said[0] == said[1]
    more = 100 * g.nv * g.dk * g.dv * 2
    assert said[2].saved - said[1].saved == 2 * more and 0 <= said[2].workspace - said[1].workspace <= 2 * more
    assert said[2].buffers == said[1].buffers
