"""What closed neurons save: `python -m bench.step_widths --size 0.8B [--keep 1 0.75 0.5 0.25] [--json [F]]`.

Random weights under random hard masks, cut to the neurons that are open (cortiq_kernels/model/compact.py), as a folded,
baked or healed directory holds them; by share of the neurons that stay:

    heal       a step, all layers trained, float32 masters (bench.step)
    forward    a pass over the batch up to the head, without it: what an evaluation or a score takes
    bytes      of the model file in this dtype, and the peak of the step

All widths take turns, round after round; a ratio is the median of those within the rounds. The loss of each cut model
has to be that of the whole one under its mask, within a thousandth, and to fall over the steps: otherwise no time is
reported and the exit status is 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.report import results_path, write_json
from bench.setting import begin, parsed
from bench.step import random_micro
from bench.step_masks import Runner, options, rounds, show, timed
from cortiq_kernels import backend
from cortiq_kernels.model import names
from cortiq_kernels.model.compact import compact
from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import Evaluator, Trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when every loss was right and fell."""
    args = _parse(argv)
    device, dtype, g, n = begin(args, f"policy {args.policy}")
    micro = random_micro(g, args.batch, args.window, args.topk, device)
    whole = Weights.random(g, dtype=dtype, device=device, generate_on=device)
    dense = Evaluator(whole, n, args.window)
    runners: dict[str, Runner] = {}
    passes: dict[str, Any] = {}
    facts: dict[str, dict[str, Any]] = {}
    for keep in args.keep:
        name = f"{keep:.0%}"
        dense.masks = random_masks(g, keep, whole.acc_dtype, device)
        want = dense.loss([micro])
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        cut = compact(whole, dense.masks, train="layers")
        trainer = Trainer(cut.weights, n, args.window, policy=args.policy, masks=cut.masks or None)
        evaluator = Evaluator(cut.weights, n, args.window, trainer.buffers, cut.masks or None, trainer.programs)
        got = evaluator.loss([micro])
        if not abs(got / want - 1) <= 1e-3:
            print(f"{name}: gate RED, no time reported: loss {got:.6f}, of the whole model under the mask {want:.6f}")
            return 1
        runners[name] = runner = Runner(trainer, micro, args.rate, device)
        runner.warm(before)
        passes[name] = _Pass(evaluator, runner)
        count = names.parameter_count(cut.weights.geometry)
        facts[name] = {"keep": keep, "width": cut.weights.geometry.intermediate[0], "parameters": count,
                       "file_bytes": count * dtype.itemsize, "loss": got, "loss_of_whole": want}  # fmt: skip
        backend.release(device)
    first = next(iter(runners))
    forward = rounds(passes, args.steps, device)
    found = timed(runners, args.steps, device, first)
    if not found:
        return 1
    for name, row in found.items():
        ratio = median(a / b for a, b in zip(forward[name], forward[first], strict=True))
        row |= facts[name] | {"forward_ms": median(forward[name]), f"forward_of_{first}": ratio}
        about = f"{row[f'of_{first}']:.3f} x, forward {row['forward_ms']:.2f} ms ({ratio:.3f} x), file "
        show(name, row, f"{about}{row['file_bytes'] / 2**20:.0f} MiB")
    if args.json is not None:
        path = Path(args.json) if args.json else results_path(device, f"step-widths-{args.size}.json")
        shape = {k: getattr(args, k) for k in ("size", "batch", "window", "topk", "policy")}
        write_json(path, device, args.commit, {"widths": {**shape, "dtype": backend.dtype_name(dtype), "steps": found}})
        print(f"wrote {path}")
    return 0


class _Pass:
    """A forward pass, in the place of a runner's step."""

    def __init__(self, evaluator: Evaluator, runner: Runner):
        self.evaluator, self.batch = evaluator, runner.micro.batch
        for _ in range(3):
            self.once()

    def once(self) -> None:
        self.evaluator.hidden(self.batch)


def random_masks(g: Geometry, keep: float, dtype: torch.dtype, device: torch.device) -> dict[int, Tensor]:
    """Hard masks that leave this share of every layer's neurons open."""
    gen, masks = torch.Generator().manual_seed(0), {}
    for i, f in enumerate(g.intermediate):
        masks[i] = torch.zeros(f, dtype=dtype)
        masks[i][torch.randperm(f, generator=gen)[: round(keep * f)]] = 1
    return {i: m.to(device) for i, m in masks.items()}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options("bench.step_widths", __doc__ or "")
    parser.add_argument("--keep", type=float, nargs="+", default=[1.0, 0.75, 0.5, 0.25], help="shares that stay")
    args = parsed(parser, argv)
    if bad := [k for k in args.keep if not 0 < k <= 1]:
        parser.error(f"--keep: got {bad[0]}; expected a fraction in (0, 1]")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
