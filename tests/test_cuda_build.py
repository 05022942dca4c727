"""The CUDA kernels compile for every architecture, keep everything in registers, and the module loads without a driver.

Needs nvcc with headers and libcudart, and no GPU. What ptxas says of registers and spills is printed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST = {"sm90": 168, "mma": 128, "stage": 40}  # registers; 65,536 of an SM over its threads is the limit of the first


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the build says of its kernels, and its folder."""
    pytest.importorskip("pybind11")
    out = tmp_path_factory.mktemp("cuda")
    source = out / "source"
    shutil.copytree(ROOT / "csrc", source / "csrc")
    (source / "cortiq_kernels").mkdir()
    shutil.copy(ROOT / "setup.py", source)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CORTIQ_FORCE", "CUDA_ARCH"))}
    env |= {"NVCCFLAGS": "-Xptxas -v", "CXXFLAGS": "-O0"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "-b", str(out / "lib"), "-t", str(out / "temp")]
    done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    if "built for the CPU and CUDA" not in done.stdout:
        pytest.skip(done.stdout.strip())
    (log,) = (out / "temp").rglob("build.log")
    return log.read_text(encoding="utf-8"), out / "lib" / "cortiq_kernels"


def test_every_kernel_of_every_architecture_stays_in_registers(built: tuple[str, Path], capsys):
    entry = r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    entry += r"(\d+) bytes spill loads.*?Used (\d+) registers"
    found = re.findall(entry, built[0], re.S)
    archs: dict[str, list[str]] = {}
    for name, arch, *numbers in found:
        stack, stores, loads, registers = map(int, numbers)
        kind = next(k for k in MOST if f"cortiq{len(k)}{k}" in name)
        archs.setdefault(arch, []).append(f"{kind} {registers}")
        assert not stack and not stores and not loads and registers <= MOST[kind], (name, arch, *numbers)
    assert set(archs) >= {"80", "90a"} and len(set(map(len, archs.values()))) == 1, archs
    with capsys.disabled():
        for arch, registers in archs.items():
            print(f"\nsm_{arch}: nothing spilled; registers: {', '.join(sorted(registers))}", end="")


def test_no_performance_is_lost_to_serialised_products(built: tuple[str, Path]):
    assert "warning" not in built[0].lower(), built[0]


def test_the_module_loads_where_there_is_no_driver(built: tuple[str, Path]):
    """It links neither libcuda nor a shared libcudart: one build serves every torch."""
    code = (
        f"import sys; sys.path.insert(0, {str(built[1])!r}); import _C; assert _C.CUDA and _C.isas();"
        "maps = open('/proc/self/maps').read(); assert 'libcuda' not in maps, maps"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
