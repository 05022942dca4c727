"""What each policy of activations takes, against what `--dry-run` says of it, and how long a step is.

    python -m bench.step_memory --size 0.8B [--train mlp --train-from 48] [--policy keep] [--json [F]]

Random weights of a published geometry, one fixed batch of random tokens with random top-k targets. With `--train-from`
the layers below are not held: a random residual stream enters, as from a cached prefix. For each policy a trainer of
its own takes the same steps from the same weights; losses that are not the same bits in all of them, or that do not
fall, end it with exit status 1. The prediction is that of `heal`: weights and optimizer, and the step
(`step/memory.py`); the batch is left out of both.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.geometries import geometry
from bench.report import results_path, write_json
from bench.setting import begin, options, parsed
from bench.step import random_micro, red, run_steps
from bench.timing import summary
from cortiq_kernels import backend
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import POLICIES, Micro, Policy, Trainer
from cortiq_kernels.step.memory import train_bytes
from cortiq_kernels.step.spare import spare_elements


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when every policy's losses fell and were the same."""
    args = _parse(argv)
    device, dtype, g, n = begin(args, f"{args.train} trained from layer {args.train_from}")
    micro = random_micro(g, args.batch, args.window, args.topk, device)
    if args.train_from:
        gen = torch.Generator(device=device).manual_seed(0)
        micro = micro._replace(x=torch.randn(n, g.hidden, generator=gen, device=device).to(dtype))
    rows, seen = [], []
    for policy in args.policy or POLICIES:
        row, losses = measure(args, policy, micro, device, dtype)
        if reason := row.pop("red"):
            print(f"gate RED, no figures of {policy}: {reason}")
            return 1
        rows.append(row)
        seen.append(losses)
        print(said(row))
        backend.release(device)
    # The first loss is the same bits. Later ones are, too, with deterministic algorithms: else dq of cuDNN's attention
    # differs between any two runs in its last bits.
    exact = device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
    apart = max(abs(a / b - 1) for losses in seen for a, b in zip(losses, seen[0], strict=True))
    if any(losses[0] != seen[0][0] for losses in seen) or apart > (0 if exact else 1e-3):
        print(f"gate RED: the losses differ between policies: {seen}")
        return 1
    if args.json is not None:
        name = f"step-memory-{args.size}-{args.train}.json"
        path = Path(args.json) if args.json else results_path(device, name)
        names = ("size", "batch", "window", "topk", "train", "train_from")
        content = {"step": {k: getattr(args, k) for k in names}, "dtype": backend.dtype_name(dtype), "policies": rows}
        write_json(path, device, args.commit, content)
        print(f"wrote {path}")
    return 0


def measure(
    args: argparse.Namespace, policy: Policy, micro: Micro, device: torch.device, dtype: torch.dtype
) -> tuple[dict, list[float]]:
    """(figures of a policy, with why they are none in "red"; the losses)."""
    g, n, b = geometry(args.size), args.batch * args.window, micro.batch
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0  # the batch, which all policies share
    weights = Weights.random(
        g, dtype=dtype, device=device, train=args.train, train_from=args.train_from, first_layer=args.train_from,
        generate_on=device,
    )  # fmt: skip
    trainer = Trainer(weights, n, args.window, policy=policy)
    step = train_bytes(
        g, n, args.window, b.n_scored, dtype, device.type, first=args.train_from, train_from=args.train_from,
        trained=weights.layout.trained_numel, policy=policy, train=args.train,
        spare=spare_elements(weights.layout, train=args.train, train_from=args.train_from),
    )  # fmt: skip
    student = weights.layout.nbytes(dtype.itemsize)
    backend.reset_peak(device)
    losses: list[torch.Tensor] = []
    run_steps(trainer, micro, args.rate, 2, device, losses)
    timing = summary(run_steps(trainer, micro, args.rate, args.steps, device, losses), "step by step")
    stats, values = trainer.read(), [float(x) for x in losses]
    peak = backend.peak_bytes(device)
    if peak is not None:
        peak -= held
    row = {
        "policy": policy, "weights_and_optimizer": student, **step._asdict(), "predicted_peak": student + step.peak,
        "measured_peak": peak, "median_ms": timing.median, "p20_ms": timing.p20, "p80_ms": timing.p80,
        "red": red(values, stats.steps, stats.skipped),
    }  # fmt: skip
    return row, values


def said(row: dict) -> str:
    """A line of the table."""
    peak, says = row["measured_peak"], row["predicted_peak"]
    had = "not counted on a CPU" if peak is None else f"{peak / 2**30:.2f} GiB ({100 * (says / peak - 1):+.1f} %)"
    parts = ", ".join(
        f"{k} {row[k] / 2**30:.2f}" for k in ("weights_and_optimizer", "buffers", "saved", "workspace", "head")
    )
    time = f"step {row['median_ms']:.2f} ms (p20 {row['p20_ms']:.2f}, p80 {row['p80_ms']:.2f})"
    return f"  {row['policy']:<6} {time}; peak predicted {says / 2**30:.2f} GiB, measured {had}; {parts}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options("bench.step_memory", __doc__ or "", "measured steps, after two", 5)
    parser.add_argument("--train", default="layers", choices=("layers", "mlp"), help="what trains")
    parser.add_argument("--train-from", type=int, default=0, help="first layer that trains, and is held")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="one of them (may be given again); all")
    args = parsed(parser, argv)
    layers = geometry(args.size).n_layers
    if args.train_from >= layers:
        parser.error(f"--train-from: got {args.train_from}; expected less than the {layers} layers")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
