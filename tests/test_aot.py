"""Every shipped Triton kernel compiles without a GPU, and for Hopper its loops do not spill.

Hopper gets every variant; the other architectures get one variant of each kernel, which keeps this under half a minute.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from cortiq_kernels import aot


def tools() -> str:
    """What is missing of what `aot` needs; "" for nothing."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return "triton is not installed"
    there = Path(spec.origin).parent / "backends/nvidia/bin"
    lacking = [name for name in ("ptxas", "cuobjdump") if not (there / name).exists()]
    if lacking:
        return f"triton comes without {' and '.join(lacking)}"
    return "TRITON_INTERPRET=1 leaves nothing to compile" if os.environ.get("TRITON_INTERPRET") == "1" else ""


if tools():
    pytest.skip(tools(), allow_module_level=True)

VARIANTS = aot.variants(90)
ONE_OF_EACH = {v.kernel.fn.__name__: v for v in VARIANTS}.values()


# Bytes. ptxas of some Triton versions (3.6, 3.8) spills up to four registers of the selection at 72 to 90 of the 255 it
# may take; nothing that runs over every element spills.
# The backward's kernels of the gated delta rule spill: with fewer programs an SM, which would not, they are slower.
STACK = {"select_kernel": 16, "wy_kernel": 1024, "state_kernel": 512, "dstate_kernel": 768}
STACK |= {"input_kernel": 1536}
STACK |= {"norm_bwd_kernel": 192}  # at 16384 columns alone
# Attention with heads of 256: a program's sums take half of its registers, and the rest some row offsets too many.
STACK |= {"attn_fwd_kernel": 128, "attn_bwd_kernel": 512, "attn_prep_bwd_kernel": 128}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_compiles_for_hopper_without_spills(variant):
    made = aot.compile_variant(variant, 90)
    assert made.stack <= STACK.get(variant.kernel.fn.__name__, 0), made
    assert made.registers * 32 * variant.warps <= 65536, made  # one program fits


@pytest.mark.parametrize("arch", [a for a in aot.ARCHS if a != 90])
@pytest.mark.parametrize("variant", ONE_OF_EACH, ids=lambda v: v.name)
def test_compiles_for_other_architectures(variant, arch):
    made = aot.compile_variant(variant, arch)
    assert made.registers * 32 * variant.warps <= 65536, made
    assert made.registers > 8, "a kernel that only traps: its products do not fit the tensor memory"


def test_names_are_distinct_and_every_kernel_is_listed():
    import importlib
    import pkgutil

    from cortiq_kernels import ops

    assert len({v.name for v in VARIANTS}) == len(VARIANTS)
    found = (m.name for m in pkgutil.walk_packages(ops.__path__, ops.__name__ + "."))
    modules = [importlib.import_module(name) for name in found if name.endswith("_triton")]
    kernels = {n for m in modules for n in vars(m) if n.endswith("_kernel")}
    assert kernels == {v.kernel.fn.__name__ for v in VARIANTS}


def test_command_line_fails_when_a_kernel_does(capsys, monkeypatch):
    def compile_variant(v, arch):
        if arch == 80:
            raise RuntimeError("no such thing\nand more")
        return aot.Resources(1, 2, 3)

    monkeypatch.setattr(aot, "variants", lambda arch: VARIANTS[:1])
    monkeypatch.setattr(aot, "compile_variant", compile_variant)
    assert aot.main(["--arch", "90"]) == 0
    assert aot.main(["--arch", "90", "80"]) == 1
    assert "80 FAILED RuntimeError: no such thing\n" in capsys.readouterr().out


def test_row_counts_are_not_specialised():
    """Triton makes an argument of 1 a plain Python number; the first one-row call would then fail to compile."""
    for v in VARIANTS:
        if "gated_delta" in v.kernel.fn.__module__:
            assert all(p.do_not_specialize for p in v.kernel.params if p.name == "n"), v.name
