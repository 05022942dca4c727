"""Choose launch configurations on this GPU: `python -m bench.tune [--heads 16/16 16/32] [--size 128] [--write FILE]`.

Every kernel of the gated delta rule is timed alone, by CUDA-graph replay, on the inputs that the forward and backward
give it, once for every candidate below (none narrower than 64 columns: `triton_run.padded` says why). A candidate that
does not compile, does not fit, or whose results differ from the shipped configuration's by more than rounding is left
out, and the table says so. The choice is the least sum over the head counts asked for. A choice is not shipped before
compute-sanitizer has run the GPU tests with it.
`--write` puts it into a file for `cortiq_kernels/ops/configs/`.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.ops.gdn_mixer import VECTORS, inputs
from bench.report import headline, pick_device
from bench.timing import measure
from cortiq_kernels.ops import configs
from cortiq_kernels.ops.gated_delta import GdnDims, triton_run
from cortiq_kernels.ops.gated_delta.chunks import chunk_index
from cortiq_kernels.ops.sequences import sequence_index

Config = dict[str, int]
CLOSE = 2e-2  # relative L2: bf16 results whose sums were taken in another order


def grid(**choices: Sequence[int]) -> list[Config]:
    """Every combination."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def candidates(size: int) -> dict[str, list[Config]]:
    """What is tried, by kernel."""
    widths = [w for w in (64, 128) if w <= size]
    one = {"num_stages": (1,)}
    return {
        "conv": grid(ROWS=(16, 32, 64), num_warps=(2, 4, 8), **one),
        "wy": grid(BK=(32, 64, 128), num_warps=(1, 2), **one),
        "state": grid(BV=widths, STAGES=(1, 2, 3), num_warps=(4,), **one),
        "output": grid(num_warps=(4, 8), **one),
        "norm_bwd": grid(ROWS=(16, 32, 64), num_warps=(2, 4, 8), **one),
        "advance": grid(BV=widths, num_warps=(4, 8), **one),
        "dstate": grid(BV=widths, STAGES=(1, 2, 3), num_warps=(4,), **one),
        "input": grid(BK=widths, num_warps=(4, 8), **one),
        "gates_bwd": grid(num_warps=(2, 4, 8), **one),
        "conv_bwd": grid(STRIPS=(4, 8, 16), STEPS=(8, 16, 32), num_warps=(2, 4), **one),
    }


class Case(NamedTuple):
    """One kernel with its inputs: a call that launches it and returns what it made."""

    kernel: str
    call: Callable[[], list[Tensor]]


def cases(heads: tuple[int, int], size: int, batch: int, window: int, device: torch.device) -> list[Case]:
    """The kernels of a mixer in their order, each on what those before it made with the shipped configuration."""
    d, n = GdnDims(*heads, size, size, 4), batch * window
    sizes = {"n": n, "window": window, **d._asdict()}
    t = inputs(sizes, torch.bfloat16, device, torch.Generator(device).manual_seed(0))
    conv, a_log, dt, weight = (t[name] for name in VECTORS)
    proj, dout = t["proj"], t["dout"]
    chunks, positions = chunk_index(t["cu_seqlens"], n), sequence_index(t["cu_seqlens"], n).positions
    a, b = proj[:, d.ab].split(d.nv, dim=1)
    source = triton_run.Gates(a, b, a_log, dt)
    norm = triton_run.Norm(proj[:, d.z], weight, 1e-6)
    out, dproj = torch.empty_like(t["dout"]), torch.empty_like(proj)
    da, db = dproj[:, d.ab].split(d.nv, dim=1)

    q, k, v = triton_run.conv_forward(proj, conv, positions, d)
    rule = triton_run.prepare(q, k, v, source, chunks, 1.0)
    h, vn, _ = triton_run.states(rule, v, None, final=False)
    kept = triton_run.outputs(rule, h, vn, out, norm, keep=True)
    assert kept is not None
    made = triton_run.norm_backward(kept, norm, b, dout, dproj[:, d.z], out)
    do = made.do.transpose(0, 1)
    dh, y, _ = triton_run.dstates(rule, do, None, want_dh0=False)
    grads = triton_run.input_grads(rule, h, vn, dh, do, y)
    used = int(chunks.offsets[-1])
    used_states = (chunks.table[:used, 2] // 2).unique()  # windows of whole pairs of chunks

    def states() -> list[Tensor]:
        h, vn, _ = triton_run.states(rule, v, None, final=False)
        return [*(x[used_states] for x in h), vn]

    def output() -> list[Tensor]:
        kept = triton_run.outputs(rule, h, vn, out, norm, keep=True)
        assert kept is not None
        return [out, *kept]

    def norm_bwd() -> list[Tensor]:
        made = triton_run.norm_backward(kept, norm, b, dout, dproj[:, d.z], out)
        return [made.do, made.beta, made.dnorm.sum(0), dproj[:, d.z], out]

    def dstates() -> list[Tensor]:
        dh, y, _ = triton_run.dstates(rule, do, None, want_dh0=False)
        return [dh[:used], y]

    def gates() -> list[Tensor]:
        parts = triton_run.gate_grads(rule, grads, source, da, db)
        assert parts is not None
        return [da, db, parts]

    def conv_bwd() -> list[Tensor]:
        dw = triton_run.conv_backward(proj, conv, positions, d, grads.dqk, y, rule.beta, dproj)
        return [dw.sum(0), dproj[:, d.qkv]]

    return [
        Case("conv", lambda: list(triton_run.conv_forward(proj, conv, positions, d))),
        Case("wy", lambda: list(triton_run.prepare(q, k, v, source, chunks, 1.0)[3:6])),
        Case("state", states),
        Case("output", output),
        Case("norm_bwd", norm_bwd),
        Case("advance", lambda: [triton_run.advance(rule, h.even, vn).odd[used_states]]),
        Case("dstate", dstates),
        Case("input", lambda: list(triton_run.input_grads(rule, h, vn, dh, do, y))),
        Case("gates_bwd", gates),
        Case("conv_bwd", conv_bwd),
    ]


def try_one(
    case: Case, size: int, config: Config, want: list[Tensor], device: torch.device, compile_only: bool
) -> float | str:
    """Milliseconds, or why the configuration is left out."""
    with configs.trying("gated_delta", size, case.kernel, config):
        try:
            got = [x.double() for x in case.call()]
            for a, b in zip(got, want, strict=True):
                error = ((a - b).norm() / b.norm().clamp(min=1e-30)).item()
                if not error <= CLOSE:
                    return f"wrong by {error:.1e}"
            del got
            if compile_only:
                return "compiled"
            return measure([case.call], device, budget_ms=100).median
        except Exception as e:  # noqa: BLE001 - a configuration that cannot run is a result here
            return f"{type(e).__name__}: {str(e).splitlines()[0][:60]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--heads", nargs="+", default=["16/16", "16/32"], help="key/value heads")
    parser.add_argument("--size", type=int, default=128, help="head size")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--kernels", nargs="+", help="only these")
    parser.add_argument("--shipped", action="store_true", help="time the shipped configurations only")
    parser.add_argument("--compile", action="store_true", help="fill the compiler's cache, time nothing")
    parser.add_argument("--write", type=Path, help="JSON file to put the choice into")
    args = parser.parse_args(argv)
    device = pick_device("cuda")
    print(headline(device))
    total: dict[str, dict[str, float]] = {}
    for heads in args.heads:
        nk, nv = map(int, heads.split("/"))
        for case in cases((nk, nv), args.size, args.batch, args.window, device):
            if args.kernels and case.kernel not in args.kernels:
                continue
            shipped = dict(configs.launch("gated_delta", args.size, case.kernel))
            want = [x.double() for x in case.call()]
            tried = [shipped] if args.shipped else [shipped, *candidates(args.size)[case.kernel]]
            for config in tried:
                key = json.dumps(config, sort_keys=True)
                found = try_one(case, args.size, config, want, device, args.compile)
                known = total.setdefault(case.kernel, {})
                known[key] = known.get(key, 0.0) + (found if isinstance(found, float) else float("inf"))
                shown = f"{found:.4f} ms" if isinstance(found, float) else found
                print(f"{heads} {case.kernel:10} {shown:14} {key}", flush=True)
            del want
    best: dict[str, Any] = {}
    for kernel, known in total.items():
        key = min(known, key=lambda k: known[k])
        best[kernel] = json.loads(key)
        print(f"best {kernel:10} {known[key]:.4f} ms {key}")
    if args.write:
        content = json.loads(args.write.read_text()) if args.write.exists() else {}
        content.setdefault("gated_delta", {}).setdefault(str(args.size), {}).update(best)
        args.write.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
