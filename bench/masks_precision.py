"""Which neurons do 16-bit operands close that float32 does not? `python -m bench.masks_precision [--json [F]]`.

Learns masks for the small model that ships here three times over: strict (float32 steps), fast (steps in the working
dtype, bf16 on a GPU), and strict with another seed, which takes the records in another order: what would differ anyway.
Held against the first: the neurons that one mask closes and the other leaves open, by layer, and how many of the
quarter with the lowest logits are others. Masks are compared as they were chosen, each at its own step. Settings of
`cortiq masks` may follow `--`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.report import headline, pick_device, results_path, write_json
from cortiq_kernels import cli
from cortiq_kernels.model.hf import open_model
from cortiq_kernels.recipes.mask_file import Masks, read_masks

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "small_model"
STRICT, FAST, OTHER = "strict", "fast", "strict, another seed"
RUNS = {
    STRICT: ("--precision", "strict"),
    FAST: ("--precision", "fast"),
    OTHER: ("--precision", "strict", "--seed", "1"),
}
SETTINGS = ("--keep-frac", "0.75", "--window", "512", "--batch", "2", "--l1-init", "0.5", "--l1-grow", "1.08",
            "--l1-step", "0", "--eval-every", "10", "--settle", "1", "--max-steps", "400")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    about = (__doc__ or "").split("\n\n", 1)[1]
    parser = argparse.ArgumentParser(prog="python -m bench.masks_precision", description=about)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--json", nargs="?", const="", metavar="F", help="write the figures to F, or where results lie")
    parser.add_argument("--commit", default="", help="commit to record, where there is no git checkout to ask")
    parser.add_argument("settings", nargs="*", help="settings of cortiq masks, after --")
    args = parser.parse_args(argv)
    device = pick_device(args.device)
    print(headline(device, args.commit))
    g = open_model(EXAMPLE / "model").geometry
    made: dict[str, Masks] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, more in RUNS.items():
            out = Path(folder) / f"{len(made)}.safetensors"
            line = ["masks", "--model", EXAMPLE / "model", "--data", EXAMPLE / "data.jsonl", "--out", out, "--device",
                    str(device), *SETTINGS, *more, *args.settings, "--quiet"]  # fmt: skip
            if status := cli.main([str(word) for word in line]):
                return status
            made[name] = read_masks(out, g, "masks")
    rows = {name: {**_said(m), **differences(made[STRICT], m)} for name, m in made.items()}
    for name, row in rows.items():
        print(
            f"  {name:<21} steps in {row['dtype']}, chosen at {row['best_step']}: closed {row['pruned']:.1%} (held-out "
            f"NLL {row['loss']:.4f}); closes {row['closed_here_only']} that strict leaves open, leaves open "
            f"{row['open_here_only']}; lowest quarter: {row['lowest_quarter_differs']} of {row['quarter']} differ"
        )
    if args.json is not None:
        path = Path(args.json) if args.json else results_path(device, "masks-precision.json")
        settings = made[STRICT].provenance["settings"]
        write_json(path, device, args.commit, {"masks_precision": {"settings": settings, "runs": rows}})
        print(f"wrote {path}")
    return 0


def _said(m: Masks) -> dict[str, Any]:
    """What a run came to, by its own provenance."""
    p: Mapping[str, Any] = m.provenance
    return {"dtype": p["dtype"], "evaluated_in": p["evaluated_in"], "best_step": p["best_step"], "steps": p["steps"],
            "pruned": p["pruned"], "loss": p["loss_best"], "loss_open": p["loss_open"], "kept": p["kept"]}  # fmt: skip


def differences(a: Masks, b: Masks) -> dict[str, Any]:
    """Where the masks `b` are not those of `a`: counts, by layer and in all."""
    closed = [int((x & ~y).sum()) for x, y in zip(a.kept, b.kept, strict=True)]
    opened = [int((~x & y).sum()) for x, y in zip(a.kept, b.kept, strict=True)]
    low_a, low_b = lowest_quarter(a.logits), lowest_quarter(b.logits)
    return {"closed_here_only": sum(closed), "open_here_only": sum(opened), "closed_here_only_by_layer": closed,
            "open_here_only_by_layer": opened, "quarter": int(low_a.sum()),
            "lowest_quarter_differs": int((low_a & ~low_b).sum())}  # fmt: skip


def lowest_quarter(logits: Sequence[Tensor]) -> Tensor:
    """[n_all] bool: the quarter of all gates with the lowest logits, of equals the first."""
    flat = torch.cat(list(logits))
    lowest = torch.sort(flat, stable=True).indices[: len(flat) // 4]
    return torch.zeros(len(flat), dtype=torch.bool).index_fill_(0, lowest, True)


if __name__ == "__main__":
    raise SystemExit(main())
