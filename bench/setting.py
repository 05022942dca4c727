"""What benchmarks of whole steps share: their command line, and the lines in which they begin."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bench.geometries import PUBLISHED, SMALL, geometry
from bench.report import headline, pick_device
from cortiq_kernels import backend
from cortiq_kernels.model.geometry import Geometry

LEAST = {"batch": 1, "window": 2, "topk": 1, "steps": 1, "train_from": 0}  # of the options that are there


class Setting(NamedTuple):
    """Where a benchmark runs, and on what."""

    device: torch.device
    dtype: torch.dtype
    g: Geometry
    n: int  # tokens of a step


def options(program: str, about: str, steps: str, default: int = 10) -> argparse.ArgumentParser:
    """The options of all. `about`: a docstring, of which the first paragraph is left out; `steps`: what --steps
    says."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=about.split("\n\n", 1)[1])
    parser.add_argument("--size", default="0.8B", choices=(SMALL, *PUBLISHED), help="geometry; small runs on a CPU")
    parser.add_argument("--batch", type=int, default=4, help="windows a step")
    parser.add_argument("--window", type=int, default=2048, help="tokens a window")
    parser.add_argument("--topk", type=int, default=64, help="target tokens a row")
    parser.add_argument("--dtype", choices=list(backend.DTYPES), help="default: bf16 on a GPU, f32 on a CPU")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate of the weights")
    parser.add_argument("--steps", type=int, default=default, help=steps)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--json", nargs="?", const="", metavar="F", help="write the figures to F, or where results lie")
    parser.add_argument("--commit", default="", help="commit to record, where there is no git checkout to ask")
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; too small a number ends the program."""
    args = parser.parse_args(argv)
    for name, least in LEAST.items():
        if getattr(args, name, least) < least:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(args, name)}; expected at least {least}")
    return args


def begin(args: argparse.Namespace, what: str) -> Setting:
    """The headline and one line of what is measured, on the screen."""
    device = pick_device(args.device)
    dtype = backend.DTYPES[args.dtype or ("bf16" if device.type == "cuda" else "f32")]
    print(headline(device, args.commit))
    print(f"{args.size} batch {args.batch} window {args.window}, {backend.dtype_name(dtype)}, {what}")
    return Setting(device, dtype, geometry(args.size), args.batch * args.window)
