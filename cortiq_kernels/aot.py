"""Compile every shipped Triton kernel for a GPU that need not be there: `python -m cortiq_kernels.aot [--arch 80 90]`.

Prints registers a thread, stack bytes (spills) and static shared memory of each variant, read from the cubin, and exits
with 1 when one does not compile. Needs the triton package and no GPU; the launch configurations are those of the ops.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ARCHS = (80, 90, 100)


class Variant(NamedTuple):
    """One kernel with the types of its run-time arguments, its constexprs and its warps."""

    name: str
    kernel: Any
    types: dict[str, str]
    constexprs: dict[str, Any]
    warps: int


class Resources(NamedTuple):
    """What one thread or program takes."""

    registers: int
    stack: int
    shared: int


def variants() -> list[Variant]:
    """Every variant that the ops launch, up to sizes."""
    from cortiq_kernels.ops import topk_kl_triton as kl
    from cortiq_kernels.ops import topk_triton as top

    out = []
    modes = {"forward": kl.FORWARD.value, "ratio": kl.RATIO.value, "scaled": kl.SCALED.value}
    cases = [("bf16", m, 64, False, False) for m in modes]
    cases += [
        ("bf16", "ratio", 16, False, False),
        ("bf16", "ratio", 256, False, False),
        ("fp16", "scaled", 64, False, False),
    ]
    cases += [
        ("fp32", "ratio", 64, False, False),
        ("bf16", "ratio", 64, True, False),
        ("bf16", "scaled", 64, True, True),
    ]
    for z, mode, k_pad, cap, tail in cases:
        out.append(
            Variant(
                f"head_kl {z} {mode} k{k_pad}" + (" softcap" if cap else "") + (" tail" if tail else ""),
                kl.head_kl_kernel,
                {
                    "z_ptr": "*" + z, "ids_ptr": "*i32", "probs_ptr": "*fp32", "weight_ptr": "*fp32",
                    "scale_ptr": "*fp64", "loss_ptr": "*fp32", "ratio_ptr": "*fp32", "vocab": "i32", "k": "i32",
                    "z_stride": "i32", "ids_stride": "i32", "probs_stride": "i32", "inv_temperature": "fp32",
                    "softcap": "fp32",
                },
                {"MODE": modes[mode], "SOFTCAP": cap, "TAIL": tail, "K_PAD": k_pad, "BLOCK": kl.BLOCK},
                kl.WARPS,
            )
        )  # fmt: skip
    for z, bits in (("bf16", 16), ("fp32", 32)):
        types = {"z_ptr": "*" + z, "tile_ptr": "*fp32", "lse_ptr": "*fp32", "mass_ptr": "*fp32"}
        types |= {"vocab": "i32", "z_stride": "i32"}
        shape = {"WITH_LSE": True, "TILES": 1024, "TILE": top.TILE}
        group, warps = top.SWEEP
        out.append(Variant(f"topk sweep {z}", top.sweep_kernel, types, shape | {"GROUP": group}, warps))
        group, warps = top.SELECT
        for sort in (128, 512):
            types = {
                "z_ptr": "*" + z, "ids_ptr": "*i32", "probs_ptr": "*fp32", "lse_ptr": "*fp32", "mass_ptr": "*fp32",
                "tile_ptr": "*fp32", "list_ptr": "*i32", "found_ptr": "*i32", "vocab": "i32", "k": "i32",
                "z_stride": "i32",
            }  # fmt: skip
            made = {"BITS": bits, "WITH_LSE": True, "TILES": 1024, "SORT": sort, "TILE": top.TILE, "GROUP": group}
            out.append(Variant(f"topk select {z} sort {sort}", top.select_kernel, types, made, warps))
    return out


def compile_variant(v: Variant, arch: int) -> Resources:
    """Compile for sm_<arch>; raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(v.kernel.arg_names)
    signature = {n: v.types.get(n, "constexpr") for n in names}
    constants = {(names.index(n),): value for n, value in v.constexprs.items()}
    source = ASTSource(fn=v.kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": v.warps})
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(made.asm["cubin"])
        f.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", f.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    if found is None:
        raise RuntimeError(f"{v.name}: cuobjdump told no resources: {text[-200:]!r}")
    return Resources(*map(int, found.groups()))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 when everything compiled."""
    parser = argparse.ArgumentParser(prog="python -m cortiq_kernels.aot", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHS), help="compute capabilities, as 90")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("triton") is None:
        why = "aot: got no triton package; expected one. Install it: pip install triton (make test does)."
        print(why, file=sys.stderr)
        return 2
    failed = 0
    print(f"{'kernel':36}{'sm':>5}{'registers':>11}{'stack':>7}{'shared':>8}")
    for v in variants():
        for arch in args.arch:
            try:
                r = compile_variant(v, arch)
                print(f"{v.name:36}{arch:5}{r.registers:11}{r.stack:7}{r.shared:8}", flush=True)
            except Exception as e:  # noqa: BLE001 - a compiler error of any kind is a result here
                failed += 1
                print(f"{v.name:36}{arch:5} FAILED {type(e).__name__}: {str(e).splitlines()[0][:120]}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
