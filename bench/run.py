"""Measure ops: `python -m bench.run [OP ...] [--shapes ..] [--dtype bf16] [--peers] [--json [F]] [--device cpu]`.

Each op is first held against its reference in float64, on this device, in this dtype, at the sizes that are measured
(with few tokens). Where that gate is red no speed is measured, and the exit status is 1. Every table is preceded by the
floor of this device as measured in this run; "of floor" is the floor's time for the same work as a share of the median,
"MiB" the most memory that one call holds beyond its inputs and outputs.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench import peers as peer
from bench.floor import Floor, measure_floor
from bench.registry import Calls, Inputs, Op, Work, entries
from bench.report import (
    HEADER,
    OURS,
    Row,
    device_name,
    headline,
    line,
    pick_device,
    results_path,
    timed,
    write_json,
)
from bench.timing import measure, peak_bytes, rotation
from bench.verify import gate
from cortiq_kernels.backend import DTYPES


def main(argv: Sequence[str] | None = None, ops: dict[str, Op] | None = None) -> int:
    """Run the command line; 0 when every gate was green and every one of our calls was measured."""
    known = entries() if ops is None else ops
    args = _parse(argv, known)
    device = pick_device(args.device)
    dtype = DTYPES[args.dtype or ("bf16" if device.type == "cuda" else "f32")]
    floor = measure_floor(device, dtype)
    print(headline(device, args.commit))
    print(f"floor: copy {floor.copy_gbs:.0f} GB/s, {floor.dtype} GEMM {floor.gemm_tflops:.3g} TFLOP/s")
    rows: list[Row] = []
    red: list[dict[str, str]] = []
    for op in (known[name] for name in args.ops or known):
        for shape in _shapes(op, args.shapes, device):
            row = Row(op.name, "", OURS, shape, dict(op.shapes[shape]), floor.dtype)
            verdict = gate(op, row.sizes, dtype, device)
            print(f"\n{op.name} {shape} {' '.join(f'{k}={v}' for k, v in row.sizes.items())} {floor.dtype}")
            if not verdict.ok:
                red.append({"op": op.name, "shape": shape, "dtype": floor.dtype, "reason": str(verdict)})
                print(f"  gate RED, not measured: {verdict}")
                continue
            print(f"  gate green: {verdict}\n{HEADER}")
            for found in measure_op(op, row, dtype, device, floor, with_peers=args.peers):
                print(line(found), flush=True)
                rows.append(found)
    failed = [r for r in rows if r.failed and r.who == OURS]
    if args.json is not None:
        path = Path(args.json) if args.json else results_path(device, "ops.json")
        content = {"floor": vars(floor), "red": red}
        write_json(path, device, args.commit, content, rows)
        print(f"\nwrote {path}")
    if red or failed:
        print(f"\n{len(red)} red gate(s), {len(failed)} failed measurement(s) on {device_name(device)}")
    return 1 if red or failed else 0


def measure_op(op: Op, row: Row, dtype: torch.dtype, device: torch.device, floor: Floor, *, with_peers: bool):
    """Yield a row for each call of the op, for forward and backward together, and for each peer."""
    work = op.work(row.sizes, dtype)
    if len(work) > 1 and "fwd" in work:
        work["fwd+bwd"] = sum(work.values(), Work(0, 0))
    gen = torch.Generator(device).manual_seed(1)
    try:
        first = op.inputs(row.sizes, dtype, device, gen)
        nbytes = sum(t.nbytes for t in first.values() if isinstance(t, torch.Tensor))
        sets = [first] + [op.inputs(row.sizes, dtype, device, gen) for _ in range(rotation(nbytes, device) - 1)]
    except torch.OutOfMemoryError as e:
        yield replace(row, part="inputs", failed=_reason(e))
        return
    yield from _measure_calls(op.calls, row, sets, work, floor, device)
    if with_peers:
        for name, build in peer.builders(op).items():
            yield from _measure_calls(build, replace(row, who=name), sets, work, floor, device)
    del first, sets
    _release(device)


def _measure_calls(build, row: Row, sets: Sequence[Inputs], work: dict[str, Work], floor: Floor, device: torch.device):
    """Rows of one provider. A failure is a row too: peers may fail in any way they like, ours makes the run exit 1."""
    part = ""
    try:
        built = [with_total(build(inputs, row.sizes)) for inputs in sets]
        for part in built[0]:
            thunks = [calls[part] for calls in built]
            peak = peak_bytes(thunks[0], device)
            timing = measure(thunks, device)
            yield timed(replace(row, part=part), timing, work.get(part), floor, peak)
    except Exception as e:
        yield replace(row, part=part, failed=_reason(e))
    finally:
        built = []
        _release(device)


def with_total(calls: Calls) -> Calls:
    """The calls, and where they are a forward and its backward also all of them in a row."""
    if "fwd" not in calls or len(calls) < 2 or "fwd+bwd" in calls:
        return calls
    parts = list(calls.values())

    def total():
        for part in parts:
            part()

    return {**calls, "fwd+bwd": total}


def _shapes(op: Op, asked: Sequence[str], device: torch.device) -> list[str]:
    """Asked-for shapes that the op has; by default "small" on a CPU and all others on a GPU."""
    if asked:
        return [s for s in op.shapes if s in asked]
    return [s for s in op.shapes if (s == "small") == (device.type == "cpu")]


def _parse(argv: Sequence[str] | None, known: dict[str, Op]) -> argparse.Namespace:
    shapes = sorted({s for op in known.values() for s in op.shapes})
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"one of {', '.join(known)}; default: all")
    shape_help = "default: small on a CPU, all others on a GPU"
    parser.add_argument("--shapes", nargs="+", default=[], choices=shapes, help=shape_help)
    parser.add_argument("--dtype", choices=list(DTYPES), help="working dtype; default: bf16 on a GPU, f32 on a CPU")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--peers", action="store_true", help="also torch eager, torch.compile and other libraries")
    json_help = "write the figures to F; without F to bench/results/<device>/ops.json"
    parser.add_argument("--json", nargs="?", const="", metavar="F", help=json_help)
    parser.add_argument("--commit", default="", help="commit to record, where there is no git checkout to ask")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.ops if name not in known]:
        parser.error(f"OP: got {', '.join(unknown)}; expected some of {', '.join(known)}")
    return args


def _reason(e: Exception) -> str:
    text = str(e).strip().splitlines()
    return f"{type(e).__name__}: {text[0][:160] if text else ''}"


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(main())
