"""Install, caches and devices as users of such packages met them. Each test names the report that it is modelled on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(code: str, **env: str) -> subprocess.CompletedProcess:
    whole = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")} | {"OMP_NUM_THREADS": "1"} | env
    args = [sys.executable, "-c", code]
    return subprocess.run(args, env=whole, cwd=ROOT, capture_output=True, text=True, timeout=120)


CACHE = """
import os, warnings
from cortiq_kernels.ops.triton_cache import usable_cache
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    places = [usable_cache() for _ in range(3)]
from triton.runtime.cache import get_cache_manager
get_cache_manager("ab" * 32).put("x", "kernel.txt")
from triton import knobs
print(len(set(places)), places[0], knobs.cache.dir, len(said), *[w.message for w in said], sep="\\n")
"""


def test_a_home_that_cannot_be_written_to():
    """Modelled on foundation-model-stack/fms-hf-tuning#367: HOME=/ without root's rights, here /proc, which denies
    root, too: a temporary cache, one message, gone afterwards."""
    pytest.importorskip("triton")
    done = run(CACHE, HOME="/proc")
    assert done.returncode == 0, done.stderr
    n, place, used, said, words = done.stdout.splitlines()
    assert (n, said) == ("1", "1") and place == used and "cortiq-triton-" in place
    assert "got '/proc/.triton/cache'" in words and "TRITON_CACHE_DIR" in words
    assert not Path(place).exists()


def test_a_home_that_can_be_written_to(tmp_path):
    """The other half of fms-hf-tuning#367: Triton's own place is used, and nothing is said."""
    pytest.importorskip("triton")
    done = run(CACHE, HOME=str(tmp_path))
    assert done.stdout.splitlines() == ["1", "None", str(tmp_path / ".triton/cache"), "0"], (done.stdout, done.stderr)
    assert list((tmp_path / ".triton/cache").rglob("kernel.txt"))


def test_every_kernel_sees_to_its_cache(monkeypatch):
    """The gate that ops ask before a kernel runs is where the cache is looked at."""
    import torch

    from cortiq_kernels.ops import triton_gate

    pytest.importorskip("triton")
    calls: list[int] = []
    monkeypatch.setattr(triton_gate, "usable_cache", lambda: calls.append(1))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not triton_gate.use_triton("op", torch.zeros(1), "auto") and not calls
    assert triton_gate.use_triton("op", torch.zeros(1), "triton") and calls == [1]


def test_compiling_ahead_of_time_sees_to_its_cache(monkeypatch):
    from cortiq_kernels import aot

    pytest.importorskip("triton")
    calls: list[int] = []
    monkeypatch.setattr(aot, "usable_cache", lambda: calls.append(1))
    monkeypatch.setattr(aot, "variants", lambda arch: [])
    assert aot.main(["--arch", "90"]) == 0 and calls == [1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """What pip builds from, without anything else of the checkout."""
    root = tmp_path_factory.mktemp("tree")
    built = shutil.ignore_patterns("__pycache__", "_C*")
    shutil.copytree(ROOT / "cortiq_kernels", root / "cortiq_kernels", ignore=built)
    shutil.copytree(ROOT / "csrc", root / "csrc")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, root)
    return root


@pytest.mark.parametrize("case", ["no nvcc", "nvcc without CUDA_HOME", "CUDA_HOME is a list"])
def test_building_where_nvcc_is_missing_or_odd(tmp_path, tree, case):
    """Modelled on NVIDIA/apex#1633 (`None + "/bin/nvcc"`): it builds, and `env` says what is there and why."""
    pytest.importorskip("setuptools")
    (tmp_path / "bin").mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("CUDA_HOME", "CUDA_PATH")}
    env |= {"PATH": str(tmp_path / "bin"), "OMP_NUM_THREADS": "1"}
    if case != "no nvcc":
        (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "bin" / "nvcc").chmod(0o755)
    if case == "CUDA_HOME is a list":
        env["CUDA_HOME"] = "/usr/local/cuda:/opt/cuda"
    build = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "build")]
    done = subprocess.run(build, cwd=tree, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    built = next((tmp_path / "build").glob("lib*"))
    assert (built / "cortiq_kernels" / "cli.py").is_file()
    say = [sys.executable, "-m", "cortiq_kernels.env", "--json"]
    done = subprocess.run(say, cwd=built, env=env, capture_output=True, text=True, timeout=120)
    native = json.loads(done.stdout)["native"]
    assert "CUDA" in native["reason"] or not native["present"]
    assert native["present"] or native["reason"]
