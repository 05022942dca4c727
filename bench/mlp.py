"""The gated MLP against its matrix products alone: `python -m bench.mlp [--shapes 0.8B 4B ..] [--peers] [--json [F]]`.

Forward, and backward with the gradients of gates and weights, all in the step's order. The floor is the same products
called directly, their weight gradients in float32 too. A hard mask that closes half of the neurons is measured as the
step runs it, compacted (cortiq_kernels/model/compact.py): products and passes at half the width.
Everything is captured into CUDA graphs and replayed in turn, round after round, so that a change of clock meets all of
them alike; a row says the median of its own times and of its ratios within the rounds. The correctness gate of
bench/ops/mlp.py comes first; where it is red nothing is measured and the exit status is 1.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.ops import mlp
from bench.peers import builders
from bench.registry import Calls, Inputs
from bench.report import headline, pick_device, results_path, write_json
from bench.run import with_total
from bench.verify import gate
from cortiq_kernels.backend import DTYPES

FLOOR, OURS, HALF = "matrix products", "cortiq_kernels", "cortiq_kernels, half of the neurons"
Thunk = Callable[[], object]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when every gate was green."""
    args = _parse(argv)
    device = pick_device(args.device)
    dtype = DTYPES[args.dtype or ("bf16" if device.type == "cuda" else "f32")]
    name = str(dtype).removeprefix("torch.")
    print(headline(device, args.commit))
    shapes = args.shapes or [s for s in mlp.ENTRY.shapes if (s == "small") == (device.type == "cpu")]
    results: list[dict[str, Any]] = []
    bad = 0
    for shape in shapes:
        sizes = dict(mlp.ENTRY.shapes[shape])
        verdict = gate(mlp.ENTRY, sizes, dtype, device)
        print(f"\n{shape} {' '.join(f'{k}={v}' for k, v in sizes.items())} {name}: gate {verdict}", flush=True)
        if not verdict.ok:
            bad += 1
            continue
        for row in measure_shape(sizes, dtype, device, args):
            print(
                f"  {row['part']:8} {row['who']:40}{row['median_ms']:9.4f} ms  {row['of_products']:6.3f} x products"
                f"{row['of_ours']:8.3f} x {OURS}",
                flush=True,
            )
            results.append({"shape": shape, "sizes": sizes, "dtype": name, **row})
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if args.json is not None:
        path = Path(args.json) if args.json else results_path(device, "mlp.json")
        write_json(path, device, args.commit, {"rounds": args.rounds, "results": results})
        print(f"\nwrote {path}")
    return 1 if bad else 0


def measure_shape(sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device, args: argparse.Namespace):
    """Rows of one shape: forward, backward, both, of everyone."""
    t = mlp.inputs(sizes, dtype, device, torch.Generator(device).manual_seed(1))
    built: dict[str, Calls] = {
        FLOOR: with_total(mlp.products(t, sizes)),
        OURS: with_total(mlp.calls(t, sizes)),
        HALF: with_total(mlp.calls(halved(t), sizes)),
    }
    if args.peers:
        for who, build in builders(mlp.ENTRY).items():
            try:
                built[who] = build(t, sizes)
            except Exception as e:  # noqa: BLE001 - a peer that is not there is no error of ours
                print(f"  {who}: {type(e).__name__}: {str(e).splitlines()[0][:100]}")
    for part in ("fwd", "bwd", "fwd+bwd"):
        thunks = {who: calls[part] for who, calls in built.items() if part in calls}
        times = in_turn(thunks, device, args.rounds)
        for who, mine in times.items():
            ratio = median(a / b for a, b in zip(mine, times[FLOOR], strict=True))
            dense = median(a / b for a, b in zip(mine, times[OURS], strict=True))
            yield {"part": part, "who": who, "median_ms": median(mine), "of_products": ratio, "of_ours": dense}


def halved(t: Inputs) -> Inputs:
    """The same MLP with every other neuron: what compacting under a hard mask leaves."""
    f = t["mask"].shape[0]
    keep = torch.arange(0, f, 2, device=t["mask"].device)
    return {
        **t,
        "gate_up_weight": t["gate_up_weight"][torch.cat([keep, keep + f])],
        "down_weight": t["down_weight"][:, keep].contiguous(),
        "mask": torch.ones_like(t["mask"][keep]),
    }


def in_turn(thunks: Mapping[str, Thunk], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each thunk in every round; one that fails is left out, with its reason printed."""
    if device.type != "cuda":
        from bench.timing import measure

        return {who: [measure([thunk], device, budget_ms=200).median] * rounds for who, thunk in thunks.items()}
    ready: dict[str, Thunk] = {}
    for who, thunk in thunks.items():
        try:
            for _ in range(2):
                thunk()
            torch.cuda.synchronize(device)
            ready[who] = captured(thunk, device)
        except Exception as e:  # noqa: BLE001 - likewise
            if who in (FLOOR, OURS, HALF):
                raise
            print(f"  {who}: {type(e).__name__}: {str(e).splitlines()[0][:100]}")
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {who: [] for who in ready}
    for turn in range(rounds + 2):  # the first two warm up
        for who, thunk in ready.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            thunk()
            stop.record()
            if turn >= 2:
                marks[who].append((start, stop))
    torch.cuda.synchronize(device)
    return {who: [a.elapsed_time(b) for a, b in pairs] for who, pairs in marks.items()}


def captured(thunk: Thunk, device: torch.device) -> Thunk:
    """The thunk as one CUDA graph; itself where it cannot be captured (a peer of autograd's)."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        thunk()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            thunk()
    except RuntimeError:
        torch.cuda.synchronize(device)
        return thunk
    return graph.replay


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.mlp", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("--shapes", nargs="+", default=[], choices=list(mlp.ENTRY.shapes))
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: bf16 on a GPU, f32 on a CPU")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--peers", action="store_true", help="also torch eager, torch.compile and Liger")
    json_help = "write the figures to F; without F to bench/results/<device>/mlp.json"
    parser.add_argument("--json", nargs="?", const="", metavar="F", help=json_help)
    parser.add_argument("--commit", default="", help="commit to record, where there is no git checkout to ask")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
