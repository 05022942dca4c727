"""What a step of `masks` takes beside a step of `heal`: `python -m bench.step_masks --size 0.8B [--json [F]]`.

One process, the same batch, weights and policy of activations (`keep` is what the recipes take where it fits):

    heal            all layers trained, float32 masters (bench.step)
    full            soft gates on every neuron, every weight frozen, the gradient of the whole model
    ffn             the same along the residual stream and through the MLPs only
    full, strict    with float32 weights and activations
    ffn, strict     likewise

The first three take turns, round after round, so that a change of clock meets them alike; a ratio is the median of
those within the rounds. The float32 steps are many times longer, and are timed by themselves. Losses have to be finite
and to fall, steps to be accepted, and the first losses of both precisions to agree within a hundredth: otherwise no
time is reported and the exit status is 1. `--shares` adds where the time of each goes, by op (bench.profile).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench import setting
from bench.profile import measure_shares
from bench.report import results_path, write_json
from bench.step import random_micro, red
from bench.timing import summary
from cortiq_kernels import backend
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import POLICIES, GateTrainer, Micro, Trainer

HEAL = "heal"
L1 = 0.01  # what masks starts with
STRICT_STEPS = 3


class Runner:
    """One trainer, stepping on one batch. `once` is a step; losses are kept on the device."""

    def __init__(self, trainer: Trainer | GateTrainer, micro: Micro, rate: float, device: torch.device):
        self.trainer, self.micro, self.rate, self.device = trainer, micro, rate, device
        self.losses: list[Tensor] = []
        self.peak: int | None = None

    def once(self) -> None:
        if isinstance(self.trainer, Trainer):
            self.trainer.step([self.micro], self.rate)
        else:
            self.trainer.step([self.micro], L1)
        self.losses.append(self.trainer.loss.clone())

    def warm(self, before: int) -> None:
        """The first step, and two more: kernels are compiled, and a graph is recorded. `before`: bytes that are held
        already and are no part of its peak."""
        backend.reset_peak(self.device)
        for _ in range(3):
            self.once()
        backend.synchronize(self.device)
        peak = backend.peak_bytes(self.device)
        self.peak = None if peak is None else peak - before

    def why_red(self) -> str:
        """Why these steps are no training, or nothing."""
        stats = self.trainer.read()
        return red([float(x) for x in self.losses], stats.steps, stats.skipped)


def rounds(runners: Mapping[str, Runner], count: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of a step of each in every round, in turn."""
    if device.type != "cuda":
        times: dict[str, list[float]] = {name: [] for name in runners}
        for _ in range(count):
            for name, r in runners.items():
                start = time.perf_counter()
                r.once()
                times[name].append((time.perf_counter() - start) * 1e3)
        return times
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runners}
    for _ in range(count):
        for name, r in runners.items():
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            r.once()
            pair[1].record()
            marks[name].append(pair)
    torch.cuda.synchronize(device)
    return {name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in marks.items()}


def timed(runners: Mapping[str, Runner], count: int, device: torch.device, beside: str = "") -> dict[str, dict]:
    """Figures of each runner, with the ratio to the one called `beside`; {} when one is no training (which is said)."""
    times = rounds(runners, count, device)
    bad = {name: why for name, r in runners.items() if (why := r.why_red())}
    for name, why in bad.items():
        print(f"{name}: gate RED, no time reported: {why}")
    if bad:
        return {}
    found = {}
    for name, mine in times.items():
        t, r = summary(mine, "events" if device.type == "cuda" else "host clock"), runners[name]
        tokens = r.trainer.n / t.median * 1e3
        row = {"median_ms": t.median, "p20_ms": t.p20, "p80_ms": t.p80, "repeats": t.repeats, "method": t.method,
               "tokens_per_s": tokens, "peak_bytes": r.peak, "replayed": not r.trainer.programs.reason,
               "loss_by_step": [float(x) for x in r.losses]}  # fmt: skip
        if beside:
            row[f"of_{beside}"] = median(a / b for a, b in zip(mine, times[beside], strict=True))
        found[name] = row
    return found


def show(name: str, row: Mapping[str, Any], ratio: str) -> None:
    """A line of the table."""
    peak = "not counted on a CPU" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f} GiB"
    print(
        f"  {name:<14} {row['median_ms']:9.2f} ms (p20 {row['p20_ms']:.2f}, p80 {row['p80_ms']:.2f})  {ratio}, "
        f"{row['tokens_per_s']:.0f} tokens/s, peak {peak}{'' if row['replayed'] else ', plain launches'}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when every loss fell."""
    args = _parse(argv)
    device, dtype, g, n = setting.begin(args, f"policy {args.policy}")
    micro = random_micro(g, args.batch, args.window, args.topk, device)

    def runner(make: Callable[[], Trainer | GateTrainer], own: int = 0) -> Runner:
        """Warmed up; its peak is that of its own memory, `own` bytes of which are there already."""
        before = torch.cuda.memory_allocated(device) - own if device.type == "cuda" else 0
        made = Runner(make(), micro, args.rate, device)
        made.warm(before)
        return made

    def gates(weights: Weights, kind: Any, graph: bool = True) -> Callable[[], GateTrainer]:
        return lambda: GateTrainer(weights, n, args.window, gradient=kind, policy=args.policy, graph=graph)

    def heal(graph: bool = True) -> Trainer:
        made = Weights.random(g, dtype=dtype, device=device, train="layers", generate_on=device)
        return Trainer(made, n, args.window, policy=args.policy, graph=graph)

    runners = {HEAL: runner(heal)}
    frozen = Weights.random(g, dtype=dtype, device=device, generate_on=device)
    for kind in ("full", "ffn"):
        runners[kind] = runner(gates(frozen, kind), frozen.layout.nbytes(dtype.itemsize))
    found = timed(runners, args.steps, device, HEAL)
    runners.clear()
    backend.release(device)
    shares = {}
    plain: dict[str, Callable[[], Trainer | GateTrainer]] = {
        HEAL: lambda: heal(False),
        **{kind: gates(frozen, kind, False) for kind in ("full", "ffn")},
    }
    for name, make in plain.items() if args.shares and found else ():
        r = Runner(make(), micro, args.rate, device)
        r.once()
        shares[name] = measure_shares(r.once, device, 3)
        print(f"  {name:<14} " + ", ".join(f"{k} {ms:.2f}" for k, ms in shares[name].items()), flush=True)
        del r
        backend.release(device)
    del frozen, plain
    backend.release(device)
    strict: dict[str, dict] = {}
    if found:
        exact = Weights.random(g, dtype=torch.float32, device=device, generate_on=device)
        for kind in ("full", "ffn"):
            one = {f"{kind}, strict": runner(gates(exact, kind), exact.layout.nbytes(4))}
            strict |= timed(one, min(args.steps, STRICT_STEPS), device)
            one.clear()
            backend.release(device)
    rows = found | strict
    first = {name: row["loss_by_step"][0] for name, row in rows.items()}
    if len(rows) < 5 or abs(first["full"] / first["full, strict"] - 1) > 0.01:
        print("gate RED, no time reported" + (f": the first losses differ: {first}" if len(rows) == 5 else ""))
        return 1
    for name, row in rows.items():
        row.setdefault(f"of_{HEAL}", row["median_ms"] / rows[HEAL]["median_ms"])
        show(name, row, f"{row[f'of_{HEAL}']:.3f} x {HEAL}")
    if args.json is not None:
        path = Path(args.json) if args.json else results_path(device, f"step-masks-{args.size}.json")
        shape = {k: getattr(args, k) for k in ("size", "batch", "window", "topk", "policy")}
        body = {**shape, "dtype": backend.dtype_name(dtype), "steps": rows, "shares_ms": shares}
        write_json(path, device, args.commit, {"masks": body})
        print(f"wrote {path}")
    return 0


def options(program: str, about: str) -> argparse.ArgumentParser:
    """What a benchmark of several trainers beside each other takes."""
    parser = setting.options(program, about, "measured rounds, after three steps of each")
    parser.add_argument("--policy", default="keep", choices=POLICIES, help="what a layer keeps for its backward")
    return parser


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options("bench.step_masks", __doc__ or "")
    parser.add_argument("--shares", action="store_true", help="the time of each by op, too")
    return setting.parsed(parser, argv)


if __name__ == "__main__":
    raise SystemExit(main())
