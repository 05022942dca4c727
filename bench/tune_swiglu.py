"""Choose the SwiGLU launch configurations on this GPU: `python -m bench.tune_swiglu [--shapes 0.8B 4B ..]`.

Each candidate is timed by CUDA-graph replay: the forward with a mask, the backward with a mask and dmask (its sum of
parts included), and the sum alone. A candidate whose results differ from the shipped configuration's by more than
rounding is left out. The best by its geometric mean over the shapes is printed as it stands in
`cortiq_kernels/ops/configs/`.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable, Sequence

import torch

from bench.geometries import PUBLISHED
from bench.ops import swiglu as entry
from bench.report import headline, pick_device
from bench.timing import measure
from cortiq_kernels.backend import DTYPES
from cortiq_kernels.ops import configs, jit, swiglu_triton

Config = dict[str, int]
CLOSE = 1e-2


def candidates(bits: int) -> dict[str, list[Config]]:
    """What is tried, by kernel: one or two 16-byte vectors a thread and tensor."""
    vector = 128 // bits
    found: dict[str, list[Config]] = {"fwd": [], "bwd": [], "sum": []}
    for kernel, steps in (("fwd", (1, 4, 16)), ("bwd", (4, 8, 16, 32))):
        for warps, vectors in ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (8, 2)):
            size = 32 * warps * vector * vectors
            for cols in (vector * 8, vector * 16, vector * 32, vector * 64):
                if cols <= size <= 16 * cols:
                    found[kernel] += [_config(size // cols, cols, s, warps) for s in steps]
    for rows in (16, 32, 64, 128):
        for cols in (16, 32, 64):
            for warps in (2, 4, 8):
                config = _config(rows, cols, 0, warps)
                del config["STEPS"]
                found["sum"].append(config)
    return found


def _config(rows: int, cols: int, steps: int, warps: int) -> Config:
    return {"ROWS": rows, "COLS": cols, "STEPS": steps, "num_warps": warps, "num_stages": 1}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune_swiglu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=list(PUBLISHED), choices=list(entry.ENTRY.shapes))
    parser.add_argument("--dtype", choices=["bf16", "f16", "f32"], default="bf16")
    parser.add_argument("--kernels", nargs="+", default=["fwd", "bwd", "sum"])
    parser.add_argument("--compile", action="store_true", help="fill the compiler's cache, time nothing")
    parser.add_argument("--budget", type=float, default=40.0, help="milliseconds of one candidate")
    args = parser.parse_args(argv)
    device, dtype = pick_device("cuda"), DTYPES[args.dtype]
    bits = 8 * dtype.itemsize
    print(headline(device))
    tried = candidates(bits)
    total: dict[str, dict[str, list[float]]] = {k: {} for k in args.kernels}
    for shape in args.shapes:
        sizes = dict(entry.ENTRY.shapes[shape])
        t = entry.inputs(sizes, dtype, device, torch.Generator(device).manual_seed(0))
        made = entry.calls(t, sizes)
        part = torch.randn(sizes["n"] // 64, sizes["f"], device=device)
        out = torch.empty(sizes["f"], device=device)

        def add(part=part, out=out, like=t["gate_up"]):
            swiglu_triton.add_parts(like, part, out, None, None, False)
            return {"dmask": out}

        calls: dict[str, Callable] = {"fwd": made["fwd"], "bwd": made["bwd"], "sum": add}
        if args.compile:
            jit.compile_ahead(functools.partial(every, calls, tried, args.kernels, bits))
            return 0
        for kernel in args.kernels:
            want = {k: x.double() for k, x in calls[kernel]().items()}
            shipped = dict(configs.launch("swiglu", bits, kernel))
            nbytes = entry.work(sizes, dtype).get(kernel)
            for config in [shipped, *tried[kernel]]:
                key = json.dumps(config)
                with configs.trying("swiglu", bits, kernel, config):
                    try:
                        got = calls[kernel]()
                        off = max(((got[k].double() - x).norm() / x.norm()).item() for k, x in want.items())
                        ms = measure([calls[kernel]], device, budget_ms=args.budget).median
                    except Exception as e:  # noqa: BLE001 - a configuration that cannot run is a result here
                        print(f"{shape} {kernel} {key} {type(e).__name__}: {str(e).splitlines()[0][:60]}")
                        continue
                rate = f"{nbytes.nbytes / ms / 1e6:6.0f} GB/s" if nbytes else ""
                print(f"{shape:5} {kernel} {ms:.4f} ms {rate} {'' if off <= CLOSE else f'WRONG {off:.1e}'} {key}")
                if off <= CLOSE:
                    total[kernel].setdefault(key, []).append(ms)
    for kernel, known in total.items():
        mean = {k: math.prod(v) ** (1 / len(v)) for k, v in known.items() if len(v) >= len(args.shapes)}
        for key in sorted(mean, key=mean.__getitem__)[:5]:
            print(f"best {kernel} {mean[key]:.4f} ms {key}")
    return 0


def every(calls: dict[str, Callable], tried: dict[str, list[Config]], kernels: Sequence[str], bits: int) -> None:
    """One launch of every candidate."""
    for kernel in kernels:
        for config in tried[kernel]:
            with configs.trying("swiglu", bits, kernel, config):
                calls[kernel]()


if __name__ == "__main__":
    raise SystemExit(main())
