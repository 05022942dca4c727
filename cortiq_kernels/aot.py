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
from typing import NamedTuple

from cortiq_kernels.aot_variants import Variant, variants
from cortiq_kernels.ops.triton_cache import usable_cache

ARCHS = (80, 90, 100)


class Resources(NamedTuple):
    """What one thread or program takes."""

    registers: int
    stack: int
    shared: int


def compile_variant(v: Variant, arch: int) -> Resources:
    """Compile for sm_<arch>; raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(v.kernel.arg_names)
    signature = {n: v.types.get(n, "constexpr") for n in names}
    constants = {(names.index(n),): value for n, value in v.constexprs.items()}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in v.aligned}
    function = getattr(v.kernel, "function", v.kernel)
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": v.warps, "num_stages": v.stages} | ({"maxnreg": v.maxnreg} if v.maxnreg else {})
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
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
    registers, stack, static = map(int, found.groups())
    return Resources(registers, stack, max(static, made.metadata.shared))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 when everything compiled."""
    parser = argparse.ArgumentParser(prog="python -m cortiq_kernels.aot", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHS), help="compute capabilities, as 90")
    parser.add_argument("--only", default="", help="variants whose name holds this")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("triton") is None:
        why = "aot: got no triton package; expected one. Install it: pip install triton (make test does)."
        print(why, file=sys.stderr)
        return 2
    usable_cache()
    failed = 0
    print(f"{'kernel':36}{'sm':>5}{'registers':>11}{'stack':>7}{'shared':>8}")
    for arch in args.arch:
        for v in variants(arch):
            if args.only not in v.name:
                continue
            try:
                r = compile_variant(v, arch)
                print(f"{v.name:36}{arch:5}{r.registers:11}{r.stack:7}{r.shared:8}", flush=True)
            except Exception as e:  # noqa: BLE001 - a compiler error of any kind is a result here
                failed += 1
                print(f"{v.name:36}{arch:5} FAILED {type(e).__name__}: {str(e).splitlines()[0][:120]}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
