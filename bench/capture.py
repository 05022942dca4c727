"""Measure capture: `python -m bench.capture --size 0.8B --batch 4 --window 2048 [--json [F]]`.

Random weights of a published geometry and batches of random tokens; the Grams of all layers, in one pass, as `cortiq
capture` forms them (`recipes/capture_pass.py`): batches on the host, one after another. It is held against the forward
pass of the same layers, replayed from a CUDA graph on a GPU, plus half of the Grams' products at the rate of one large
matrix product, both of the same run. Windows are full (one record each, or 8 of even length), or end in padding.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.floor import measure_floor
from bench.geometries import PUBLISHED, SMALL, geometry
from bench.report import headline, pick_device, results_path, write_json
from bench.step import random_micro
from bench.timing import Timing, measure, summary
from cortiq_kernels import backend
from cortiq_kernels.data.batches import Batch
from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.ops.gram import gram_diagonal
from cortiq_kernels.recipes.capture_pass import capture
from cortiq_kernels.step import Buffers
from cortiq_kernels.step.forward import Sequences, embed, layers_forward, rope_for

KINDS = ("one record", "8 records", "padded")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when every Gram was finite and alive."""
    args = _parse(argv)
    device = pick_device(args.device)
    dtype = backend.DTYPES[args.dtype or ("bf16" if device.type == "cuda" else "f32")]
    g, n = geometry(args.size), args.batch * args.window
    floor = measure_floor(device, dtype)
    print(headline(device, args.commit))
    weights = Weights.random(g, dtype=dtype, device=device, generate_on=device)
    rows: list[dict] = []
    for kind in KINDS:
        batch = batch_of(g, args.batch, args.window, kind)
        forward = measure([forward_of(weights, batch, args.window)], device)
        products = sum(f * f for f in g.intermediate) * sum(batch.n_tokens) / floor.gemm_tflops / 1e9
        took, sound = captures(weights, [batch] * args.batches, args.window, device)
        share = 100 * (forward.median + products) / took.median
        row = {
            "windows": kind, "tokens": n, "real_tokens": sum(batch.n_tokens), "batches": args.batches,
            "capture_ms": took.median, "p20_ms": took.p20, "p80_ms": took.p80, "forward_ms": forward.median,
            "forward_by": forward.method, "half_gram_ms": products, "floor_percent": share,
            "tokens_per_s": 1e3 * sum(batch.n_tokens) / took.median, "red": "" if sound else "a Gram is not sound",
        }  # fmt: skip
        rows.append(row)
        print(
            f"  {kind:<11} capture {took.median:.2f} ms a batch (p20 {took.p20:.2f}, p80 {took.p80:.2f}), "
            f"{row['tokens_per_s']:.0f} tokens/s; forward {forward.median:.2f} ({forward.method}) + half-Gram "
            f"{products:.2f}: {share:.1f} % of floor{'' if sound else '; RED: ' + row['red']}",
            flush=True,
        )
    if args.json is not None:
        path = Path(args.json) if args.json else results_path(device, f"capture-{args.size}.json")
        shape = {"size": args.size, "batch": args.batch, "window": args.window, "dtype": backend.dtype_name(dtype)}
        write_json(path, device, args.commit, {**shape, "floor": vars(floor), "captures": rows})
        print(f"wrote {path}")
    return 1 if any(row["red"] for row in rows) else 0


def batch_of(g: Geometry, batch: int, window: int, kind: str) -> Batch:
    """One batch on the host. Padding is a twentieth of the first window, two of the second, and so on."""
    made = random_micro(g, batch, window, 1, torch.device("cpu"), 8 if kind == "8 records" else 1).batch
    if kind != "padded":
        return made
    real = [max(1, window - window * (i + 1) // 20) for i in range(batch)]
    starts = sorted({i * window + at for i in range(batch) for at in (0, real[i])} | {batch * window})
    return dataclasses.replace(made, cu_seqlens=torch.tensor(starts, dtype=torch.int32), n_tokens=tuple(real))


def forward_of(w: Weights, host: Batch, window: int):
    """All layers of one batch that is on the device, without a Gram."""
    g, n, batch = w.geometry, len(host.tokens), host.to(w.device)
    buf, seqs = Buffers(g, n, w.dtype, w.device), Sequences.build(g, batch.cu_seqlens, window, n, rope_for(w, window))
    return lambda: layers_forward(w, buf, embed(w, buf, batch.tokens), seqs, 0, g.n_layers)


def captures(w: Weights, batches: list[Batch], window: int, device: torch.device) -> tuple[Timing, bool]:
    """Milliseconds a batch of whole captures, by the host's clock; whether all sums of squares are finite, none 0."""
    widths, times, sound = w.geometry.intermediate, [], True
    for _ in range(4):
        backend.synchronize(device)
        start = time.perf_counter()
        grams = dict(capture(w, batches, range(w.geometry.n_layers), window=window))
        backend.synchronize(device)
        times.append(1e3 * (time.perf_counter() - start) / len(batches))
        for layer, gram in grams.items():
            square = gram_diagonal(gram, widths[layer])
            sound &= bool(torch.isfinite(square).all() and (square > 0).all())
        del grams
    return summary(times[1:], "host clock"), sound


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.capture", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="0.8B", choices=(SMALL, *PUBLISHED), help="geometry; small runs on a CPU")
    parser.add_argument("--batch", type=int, default=4, help="windows of a batch")
    parser.add_argument("--window", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--batches", type=int, default=16, help="batches of a capture")
    parser.add_argument("--dtype", choices=list(backend.DTYPES), help="default: bf16 on a GPU, f32 on a CPU")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--json", nargs="?", const="", metavar="F", help="write the figures to F, or where results lie")
    parser.add_argument("--commit", default="", help="commit to record, where there is no git checkout to ask")
    args = parser.parse_args(argv)
    for name, least in (("batch", 1), ("window", 16), ("batches", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name}: got {getattr(args, name)}; expected at least {least}")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
