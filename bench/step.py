"""Measure a whole training step: `python -m bench.step --size 0.8B --batch 4 --window 2048 --topk 64 [--json [F]]`.

Random weights of a published geometry, one fixed batch of random tokens with random top-k targets, all layers trained,
the head frozen (what healing does by default). The loss of that batch has to fall over the steps, every step has to be
accepted, and nothing may be NaN: otherwise no time is reported and the exit status is 1. "of floor" holds the step
against the time that its matrix products alone would take at this device's rate for one large product, measured in the
same run.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.floor import measure_floor
from bench.geometries import PUBLISHED, SMALL, geometry
from bench.registry import Work
from bench.report import headline, pick_device, results_path, write_json
from bench.timing import summary
from cortiq_kernels import backend
from cortiq_kernels.data.batches import Batch
from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import Micro, Trainer
from cortiq_kernels.step.loss import Targets


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when the loss fell."""
    args = _parse(argv)
    device = pick_device(args.device)
    dtype = backend.DTYPES[args.dtype or ("bf16" if device.type == "cuda" else "f32")]
    g = geometry(args.size)
    print(headline(device, args.commit))
    floor = measure_floor(device, dtype)
    print(f"floor: copy {floor.copy_gbs:.0f} GB/s, {floor.dtype} GEMM {floor.gemm_tflops:.3g} TFLOP/s")
    backend.release(device)

    n = args.batch * args.window
    weights = Weights.random(g, dtype=dtype, device=device, train="layers", generate_on=device)
    trainer = Trainer(weights, n, args.window)
    micro = random_micro(g, args.batch, args.window, args.topk, device)
    backend.reset_peak(device)
    start = time.perf_counter()
    trainer.step([micro], args.rate)
    losses = [trainer.loss.clone()]
    backend.synchronize(device)
    cold = time.perf_counter() - start
    times = run_steps(trainer, micro, args.rate, args.steps, device, losses)
    stats = trainer.read()
    values = [float(x) for x in losses]

    size = f"{args.size} batch {args.batch} window {args.window} top-k {args.topk}"
    print(f"{size} {backend.dtype_name(dtype)}, layers trained")
    print("loss by step: " + " ".join(f"{x:.4f}" for x in values))
    if reason := red(values, stats.steps, stats.skipped):
        print(f"gate RED, no time reported: {reason}")
        return 1
    timing = summary(times, "events" if device.type == "cuda" else "host clock")
    work = gemm_work(g, n)
    best = floor.ms(work)
    peak = backend.peak_bytes(device)
    memory = "not counted on a CPU" if peak is None else f"{peak / 2**30:.2f} GiB"
    print(
        f"step {timing.median:.2f} ms (p20 {timing.p20:.2f}, p80 {timing.p80:.2f}), "
        f"{n / timing.median * 1e3:.0f} tokens/s, {100 * best / timing.median:.1f} % of floor "
        f"({best:.2f} ms of matrix products), peak {memory}, first step {cold:.1f} s"
    )
    if args.json is not None:
        path = Path(args.json) if args.json else results_path(device, f"step-{args.size}.json")
        shape = {"size": args.size, "batch": args.batch, "window": args.window, "topk": args.topk, "train": "layers"}
        figures = {
            "dtype": floor.dtype,
            "rate": args.rate,
            "median_ms": timing.median,
            "p20_ms": timing.p20,
            "p80_ms": timing.p80,
            "repeats": timing.repeats,
            "method": timing.method,
            "tokens_per_s": n / timing.median * 1e3,
            "gemm_floor_ms": best,
            "floor_percent": 100 * best / timing.median,
            "peak_bytes": peak,
            "first_step_s": cold,
            "loss_by_step": values,
        }
        write_json(path, device, args.commit, {"floor": vars(floor), "step": shape | figures})
        print(f"wrote {path}")
    return 0


def random_micro(g: Geometry, batch: int, window: int, topk: int, device: torch.device) -> Micro:
    """Full windows of random tokens; every row but a window's last is scored against random targets of distinct ids."""
    gen = torch.Generator().manual_seed(0)
    n = batch * window
    tokens = torch.randint(0, g.vocab, (n,), generator=gen)
    rows = torch.arange(n).view(batch, window)[:, :-1].reshape(-1)
    place = torch.randint(0, g.vocab, (len(rows), 1), generator=gen)
    ids = ((place + torch.arange(topk)) % g.vocab).to(torch.int32)
    probs = torch.softmax(torch.randn(len(rows), topk, generator=gen), dim=-1)
    made = Batch(
        tokens=tokens,
        next_ids=tokens.roll(-1),
        row_index=rows.to(torch.int32),
        row_weight=torch.ones(len(rows)),
        cu_seqlens=torch.arange(0, n + 1, window, dtype=torch.int32),
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


def gemm_work(g: Geometry, n: int) -> Work:
    """Matrix products of a step: forward, dx and dW of every projection, forward and dx of the frozen head."""
    numel = 0
    for i, width in enumerate(g.intermediate):
        mixer, out = (g.attn_width, g.nq * g.hd) if g.is_full(i) else (g.gdn_width, g.nv * g.dv)
        numel += g.hidden * (mixer + out + 3 * width)
    return Work(6 * n * numel + 4 * n * g.hidden * g.vocab, 0)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("--size", default="0.8B", choices=(SMALL, *PUBLISHED), help="geometry; small runs on a CPU")
    parser.add_argument("--batch", type=int, default=4, help="windows a step")
    parser.add_argument("--window", type=int, default=2048, help="tokens a window")
    parser.add_argument("--topk", type=int, default=64, help="target tokens a row")
    parser.add_argument("--dtype", choices=list(backend.DTYPES), help="default: bf16 on a GPU, f32 on a CPU")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--steps", type=int, default=10, help="measured steps, after the first")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    json_help = "write the figures to F; without F to bench/results/<device>/step-<size>.json"
    parser.add_argument("--json", nargs="?", const="", metavar="F", help=json_help)
    parser.add_argument("--commit", default="", help="commit to record, where there is no git checkout to ask")
    args = parser.parse_args(argv)
    for name, least in (("batch", 1), ("window", 2), ("topk", 1), ("steps", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name}: got {getattr(args, name)}; expected at least {least}")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
