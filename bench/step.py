"""Measure a whole training step: `python -m bench.step --size 0.8B --batch 4 --window 2048 --topk 64 [--json [F]]`.

Random weights of a published geometry, one fixed batch of random tokens with random top-k targets, all layers trained,
the head frozen (what healing does by default). `--packing records` fills every window with 8 records of uneven length
instead of one. The step is timed as the trainer runs it, replayed from CUDA graphs on a GPU, and beside it as plain
launches, and replayed with deterministic algorithms. The loss of the batch has to fall over the steps, every step has
to be accepted, and nothing may be NaN: otherwise no time is reported and the exit status is 1. "of floor" holds the
step against its own matrix products, called in the same order on the same memory in the same run, weight gradients in
float32. `--teacher` adds the teacher's pass: forward, head and top-k of every scored row; `--peer` the step of compiled
transformers (`bench/step_peer.py`), and how many times as fast ours is.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.report import results_path, write_json
from bench.setting import begin, options, parsed
from bench.step_gemms import measure_products
from bench.step_peer import measure_peer
from bench.timing import Timing, measure, summary
from cortiq_kernels import backend
from cortiq_kernels.data.batches import Batch
from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.ops.topk import topk_softmax
from cortiq_kernels.recipes.rows import logits_of
from cortiq_kernels.step import Evaluator, Micro, Trainer
from cortiq_kernels.step.loss import Targets

RECORDS = 8  # of a window, with --packing records


class Run(NamedTuple):
    """The steps of one trainer."""

    timing: Timing
    losses: list[float]
    why_red: str
    first_s: float
    peak: int | None
    reason: str  # why nothing was replayed; "" when it was


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when the loss fell."""
    args = parse(argv, "bench.step", __doc__ or "")
    device, dtype, g, n = begin(args, f"top-k {args.topk}, {args.packing}, layers trained")
    micro = micro_of(args, g, device)
    weights = Weights.random(g, dtype=dtype, device=device, train="layers", generate_on=device)

    trainer = Trainer(weights, n, args.window)
    run = measured(trainer, micro, args, device)
    runs = {"graph": run} if not run.reason else {"eager": run}
    floor, sound = measure_products(trainer, micro.batch.n_scored, device)
    del trainer
    backend.release(device)
    if not run.reason:
        runs["eager"] = measured(Trainer(weights, n, args.window, graph=False), micro, args, device)
        backend.release(device)
        with backend.deterministic(True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
            runs["deterministic"] = measured(Trainer(weights, n, args.window), micro, args, device)
        backend.release(device)
    figures: dict[str, object] = {"gemm_floor_ms": floor.median}
    status = 0
    for name, r in runs.items():
        print(f"{name}: loss by step " + " ".join(f"{x:.4f}" for x in r.losses))
        if r.why_red or not sound:
            print(f"{name}: gate RED, no time reported: {r.why_red or 'a matrix product is not finite'}")
            status = 1
            continue
        memory = "not counted on a CPU" if r.peak is None else f"{r.peak / 2**30:.2f} GiB"
        print(
            f"{name}: step {r.timing.median:.2f} ms (p20 {r.timing.p20:.2f}, p80 {r.timing.p80:.2f}), "
            f"{n / r.timing.median * 1e3:.0f} tokens/s, {r.timing.median / floor.median:.2f} x its matrix products "
            f"({floor.median:.2f} ms), peak {memory}, first step {r.first_s:.1f} s"
            + (f" (no graph: {r.reason})" if r.reason and name == "eager" and len(runs) == 1 else "")
        )
        figures[name] = {
            "median_ms": r.timing.median,
            "p20_ms": r.timing.p20,
            "p80_ms": r.timing.p80,
            "repeats": r.timing.repeats,
            "method": r.timing.method,
            "tokens_per_s": n / r.timing.median * 1e3,
            "of_floor": r.timing.median / floor.median,
            "peak_bytes": r.peak,
            "first_step_s": r.first_s,
            "loss_by_step": r.losses,
        }
    if args.teacher:
        figures["teacher"] = teacher_pass(weights, micro, args, device)
    if args.peer:
        del weights
        backend.release(device)
        figures["peer"] = peer = peer_step(g, micro, args, device, dtype)
        ours = next(iter(runs.values())).timing.median
        if not status and "median_ms" in peer:
            figures["speedup"] = speedup = peer["median_ms"] / ours
            print(f"{speedup:.2f} x as fast as the peer")
    if args.json is not None and status == 0:
        kind = "" if args.packing == "stream" else f"-{args.packing}"
        path = Path(args.json) if args.json else results_path(device, f"step-{args.size}{kind}.json")
        shape = {"size": args.size, "batch": args.batch, "window": args.window, "topk": args.topk, "train": "layers"}
        shape |= {"packing": args.packing, "dtype": backend.dtype_name(dtype), "rate": args.rate}
        write_json(path, device, args.commit, {"step": shape | figures})
        print(f"wrote {path}")
    return status


def measured(trainer: Trainer, micro: Micro, args: argparse.Namespace, device: torch.device) -> Run:
    """The first step, one more (in which a graph is recorded), and `args.steps` that are timed."""
    backend.reset_peak(device)
    start = time.perf_counter()
    trainer.step([micro], args.rate)
    losses = [trainer.loss.clone()]
    backend.synchronize(device)
    first = time.perf_counter() - start
    for _ in range(2):
        trainer.step([micro], args.rate)
        losses.append(trainer.loss.clone())
    times = run_steps(trainer, micro, args.rate, args.steps, device, losses)
    stats, values = trainer.read(), [float(x) for x in losses]
    timing = summary(times, "events" if device.type == "cuda" else "host clock")
    skipped, steps = stats.skipped, stats.steps
    return Run(timing, values, red(values, steps, skipped), first, backend.peak_bytes(device), trainer.programs.reason)


def teacher_pass(
    weights: Weights, micro: Micro, args: argparse.Namespace, device: torch.device
) -> dict[str, object]:
    """The forward pass, the head and the top-k of every scored row: what computing a batch of targets takes."""
    evaluator = Evaluator(weights, args.batch * args.window, args.window)

    def once() -> None:
        hidden = evaluator.hidden(micro.batch)
        rows = hidden.index_select(0, micro.batch.row_index)
        for _, _, logits in logits_of(rows, weights["head"]):
            topk_softmax(logits, args.topk)

    timing = measure([once], device)
    print(f"teacher pass {timing.median:.2f} ms (p20 {timing.p20:.2f}, p80 {timing.p80:.2f})")
    return {"median_ms": timing.median, "p20_ms": timing.p20, "p80_ms": timing.p80, "method": timing.method}


def peer_step(
    g: Geometry, micro: Micro, args: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """The peer's figures, or why there are none: a peer may fail in any way it likes."""
    try:
        timing, losses, first, peak = measure_peer(g, micro, args.rate, device, dtype, compiled=device.type == "cuda")
    except Exception as e:
        print(f"peer failed: {type(e).__name__}: {str(e)[:300]}")
        return {"failed": f"{type(e).__name__}: {str(e)[:300]}"}
    if why := red(losses, len(losses), 0):
        print(f"peer: gate RED, no time reported: {why}")
        return {"failed": why}
    memory = "not counted on a CPU" if peak is None else f"{peak / 2**30:.2f} GiB"
    print(
        f"peer: step {timing.median:.2f} ms (p20 {timing.p20:.2f}, p80 {timing.p80:.2f}), peak {memory}, first step "
        f"{first:.0f} s"
    )
    return {
        "what": "transformers compiled, FLA, compiled loss, fused Adam", "median_ms": timing.median,
        "p20_ms": timing.p20, "p80_ms": timing.p80, "repeats": timing.repeats, "method": timing.method,
        "peak_bytes": peak, "first_step_s": first, "loss_by_step": losses,
        "versions": {name: _version(name) for name in ("transformers", "fla-core", "flash-qla")},
    }  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def micro_of(args: argparse.Namespace, g: Geometry, device: torch.device) -> Micro:
    """The batch that the arguments describe."""
    records = RECORDS if args.packing == "records" else 1
    return random_micro(g, args.batch, args.window, args.topk, device, records)


def random_micro(g: Geometry, batch: int, window: int, topk: int, device: torch.device, records: int = 1) -> Micro:
    """Full windows of `records` records of random tokens (the longest 8 times the shortest); every row but a record's
    last is scored against random targets of distinct ids."""
    gen = torch.Generator().manual_seed(0)
    n = batch * window
    tokens = torch.randint(0, g.vocab, (n,), generator=gen)
    share = torch.linspace(1, 8, records, dtype=torch.float64).cumsum(0)
    ends = (share / share[-1] * window).round().long().clamp(max=window)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), ends[:-1]))
    starts = (torch.arange(batch).unsqueeze(1) * window + starts).reshape(-1)
    last = torch.cat((starts[1:], torch.tensor([n]))) - 1
    scored = torch.ones(n, dtype=torch.bool)
    scored[last] = False
    rows = torch.arange(n)[scored]
    place = torch.randint(0, g.vocab, (len(rows), 1), generator=gen)
    ids = ((place + torch.arange(topk)) % g.vocab).to(torch.int32)
    probs = torch.softmax(torch.randn(len(rows), topk, generator=gen), dim=-1)
    made = Batch(
        tokens=tokens,
        next_ids=tokens.roll(-1),
        row_index=rows.to(torch.int32),
        row_weight=torch.ones(len(rows)),
        cu_seqlens=torch.cat((starts, torch.tensor([n]))).to(torch.int32),
        max_seqlen=window,
        weight_sum=float(len(rows)),
        n_scored=len(rows),
        n_tokens=(window,) * batch,
    )
    return Micro(made.to(device), Targets(ids, probs).to(device))


def run_steps(
    trainer: Trainer, micro: Micro, rate: float, steps: int, device: torch.device, losses: list[Tensor]
) -> list[float]:
    """Milliseconds of each of `steps` steps, all queued before the first time is read; losses stay on the device."""
    if device.type != "cuda":
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            trainer.step([micro], rate)
            times.append((time.perf_counter() - start) * 1e3)
            losses.append(trainer.loss.clone())
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        trainer.step([micro], rate)
        losses.append(trainer.loss.clone())
        mark.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]


def red(losses: Sequence[float], accepted: int, skipped: int) -> str:
    """Why these losses are no training, or nothing."""
    if not all(math.isfinite(x) for x in losses):
        return "a loss is not finite"
    if skipped or accepted != len(losses):
        return f"{accepted} of {len(losses)} steps accepted, {skipped} skipped"
    if not losses[-1] < losses[0]:
        return f"the loss did not fall: {losses[0]:.4f} -> {losses[-1]:.4f}"
    return ""


def parse(argv: Sequence[str] | None, program: str, about: str) -> argparse.Namespace:
    """Which step to run, and how it is reported."""
    parser = options(program, about, "measured steps, after the first three")
    parser.add_argument("--packing", default="stream", choices=("stream", "records"), help="records a window: 1, or 8")
    parser.add_argument("--teacher", action="store_true", help="time the teacher's pass too")
    parser.add_argument("--peer", action="store_true", help="time compiled transformers' step too (minutes to compile)")
    return parsed(parser, argv)


if __name__ == "__main__":
    raise SystemExit(main())
