"""The whole road on the small model that ships here: capture how its neurons act, fold it to half its FFN width with
and without repair, heal the repaired fold, score all four. Then bake one kind of record into it, and see what that
costs the others.

    make demo            or            python examples/demo.py [--out demo] [--device auto]

It runs the commands that you would type for your own model and records, and prints each before it runs it. On two CPU
cores it takes a few minutes; where there is a GPU it is used.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cortiq_kernels import cli

CATEGORY = "email"  # whose records the second part bakes
HERE = Path(__file__).resolve().parent / "small_model"
MARK = "cortiq-demo.json"  # says that a directory is an earlier demo's, so that the next one may replace it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory for the fold, the healed model, logs")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--epochs", default="1.0", help="passes over the train records while healing")
    args = parser.parse_args()
    out: Path = args.out
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        print(f"demo: {out} is not empty and no earlier demo made it; choose another --out", file=sys.stderr)
        return 2
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARK).write_text("{}\n")

    source, data, grams = HERE / "model", HERE / "data.jsonl", out / "grams.safetensors"
    cut, fold, healed = out / "cut", out / "fold", out / "healed"
    shape = ["--window", "1024", "--batch", "2", "--device", args.device]
    commands = [
        ["capture", "--model", source, "--data", data, "--out", grams, "--max-batches", "64", *shape],
        ["fold", "--model", source, "--grams", grams, "--out", cut, "--keep", "0.5", "--no-repair", *shape[4:]],
        ["fold", "--model", source, "--grams", grams, "--out", fold, "--keep", "0.5", *shape[4:]],
        ["heal", "--student", fold, "--teacher", source, "--data", data, "--out", healed]
        + ["--lr", "1e-3", "--epochs", args.epochs, *shape],
        ["score", "--models", source, cut, fold, healed, "--data", data, "--out", out / "score.json", *shape],
    ]
    baked = out / "baked"
    skill = [
        ["bake", "--model", source, "--data", data, "--out", baked, "--category", CATEGORY, "--target-sparsity", "0.1"]
        + ["--l1-mult", "10", "--lr-b", "3e-4", "--align", "8", "--device", args.device],
        ["score", "--models", source, baked, "--data", data, "--out", out / "skill.json", *shape],
    ]
    began, total = time.time(), len(commands) + len(skill)
    if status := run(commands, 1, total):
        return status
    summary(json.loads((out / "score.json").read_text()), (source, cut, fold, healed), out, time.time() - began)
    if status := run(skill, len(commands) + 1, total):
        return status
    skill_summary(json.loads((out / "skill.json").read_text()))
    print("Next, your own: cortiq capture --model MODEL_DIR --data RECORDS.jsonl --out FILE   (more: cortiq --help)")
    return 0


def run(commands: list[list[object]], first: int, total: int) -> int:
    """Run commands one after another, each shown before it runs; the status of the first that fails, else 0."""
    for number, command in enumerate(commands, first):
        words = [str(shorten(c)) for c in command]
        print(f"\n[{number}/{total}] $ cortiq {shlex.join(words)}", flush=True)
        if status := cli.main(words):
            return status
    return 0


def shorten(word: object) -> object:
    """A path below the working directory as the user would type it."""
    if isinstance(word, Path) and word.is_relative_to(Path.cwd()):
        return word.relative_to(Path.cwd())
    return word


def summary(score: dict, models: tuple[Path, ...], out: Path, seconds: float) -> None:
    """Table of the models on the test records, what repair and healing recovered, and what to type next."""
    rows = [r for r in score["rows"] if r["category"] is None]
    table = Table(title=f"{rows[0]['records']} test records, {rows[0]['count']:,} tokens, never trained on")
    for name in ("model", "weights on disk", "NLL", "perplexity", "top-1 agreement", "KL to source"):
        table.add_column(name, justify="left" if name == "model" else "right")
    labels = ("source", "half the FFN cut", "the same, repaired", "repaired and healed")
    for label, row, path in zip(labels, rows, models, strict=True):
        size = sum(f.stat().st_size for f in path.glob("*.safetensors"))
        same = "" if row["agreement"] is None else f"{row['agreement']:.1%}"
        kl = "" if row["kl"] is None else f"{row['kl']:.4f}"
        table.add_row(label, f"{size / 1e6:.2f} MB", f"{row['nll']:.4f}", f"{row['perplexity']:.2f}", same, kl)
    source, cut, fold, healed = (r["nll"] for r in rows)
    print()
    Console(width=100).print(table)
    repaired, won = ((cut - x) / (cut - source) for x in (fold, healed))
    print(f"Cutting lost {cut - source:.4f} nat a token. Repair, before any healing, won back {repaired:.0%} of it;")
    print(f"repair and healing won back {won:.0%}.")
    print(f"{seconds:.0f} s in all. Healed model: {shorten(models[-1])}   its curves: {out / 'healed.html'}")


def skill_summary(score: dict) -> None:
    """What baking a category cost on its own test records, and on all the others."""
    table = Table(title=f"Baked on {CATEGORY!r}: NLL on test records")
    for name in ("model", CATEGORY, "the other categories"):
        table.add_column(name, justify="left" if name == "model" else "right")
    lost = []
    models = list(dict.fromkeys(r["model"] for r in score["rows"]))
    for label, model in zip(("source", "baked"), models, strict=True):
        rows = [r for r in score["rows"] if r["model"] == model and r["category"] is not None]
        own = [r for r in rows if r["category"] == CATEGORY]
        rest = [r for r in rows if r["category"] != CATEGORY]
        means = [sum(r["nll"] * r["count"] for r in part) / sum(r["count"] for r in part) for part in (own, rest)]
        table.add_row(label, *(f"{x:.4f}" for x in means))
        lost.append(means)
    print()
    Console(width=100).print(table)
    here, there = (lost[1][i] - lost[0][i] for i in range(2))
    print(f"A tenth of the neurons closed cost {here:.4f} nat a token on {CATEGORY!r} and {there:.4f} on the others.")


if __name__ == "__main__":
    raise SystemExit(main())
