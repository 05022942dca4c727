"""Importing the package defines names: no environment, no threads, no device, and no torch before it is needed."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import cortiq_kernels  # noqa: E402

MODULES = sorted(
    m.name
    for m in pkgutil.walk_packages(cortiq_kernels.__path__, "cortiq_kernels.")
    if not m.name.endswith("__main__") and ".assets" not in m.name
)
#: modules that a command line imports before it knows what was asked for
LIGHT = ["cortiq_kernels", "cortiq_kernels.cli", "cortiq_kernels.env"] + [
    m for m in MODULES if m.endswith("_config") and ".recipes." in m
]


def python(code: str, *args: str, **env: str) -> str:
    """Output of a fresh interpreter; what it cannot do is an error of the test."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_modules_import_and_leave_the_process_alone():
    """Every module in one process: torch itself is imported first, so that only what we add is seen."""
    code = """
import importlib, os, sys, threading, warnings
import torch, numpy, rich.console, tyro, jinja2, safetensors, tokenizers
env, threads, numpy_state = dict(os.environ), threading.active_count(), numpy.random.get_state()[1].sum()
settings = lambda: (
    warnings.filters[:], torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed(),
    torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_tf32,
)
before = settings()
for name in sys.argv[1:]:
    importlib.import_module(name)
assert dict(os.environ) == env, set(os.environ.items()) ^ set(env.items())
assert threading.active_count() == threads, threading.enumerate()
assert not torch.cuda.is_initialized()
assert settings() == before, (settings(), before)
assert numpy.random.get_state()[1].sum() == numpy_state
print("pure")
"""
    assert python(code, *MODULES) == "pure"


@pytest.mark.parametrize("module", LIGHT)
def test_no_torch_before_it_is_needed(module: str):
    code = "import importlib, sys; importlib.import_module(sys.argv[1]); print('torch' in sys.modules)"
    assert python(code, module) == "False"


@pytest.mark.parametrize("args", ["--help", "heal --help", "fold --help", "score --help", "--version"])
def test_help_needs_no_torch(args: str):
    code = """
import sys
from cortiq_kernels.cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as e:
    status = e.code
assert not status, status
assert "torch" not in sys.modules
"""
    assert python(code, *args.split())


def test_ops_import_where_no_gpu_is_visible():
    assert python("import cortiq_kernels.ops, cortiq_kernels.step; print('ok')", CUDA_VISIBLE_DEVICES="") == "ok"
