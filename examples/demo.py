"""The whole road on the small model that ships here: fold it to half its FFN width, heal the fold, score all three.

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

    source, data, fold, healed = HERE / "model", HERE / "data.jsonl", out / "fold", out / "healed"
    shape = ["--window", "1024", "--batch", "2", "--device", args.device]
    commands = [
        ["fold", "--model", source, "--data", data, "--out", fold, "--keep", "0.5", "--max-batches", "64", *shape],
        ["heal", "--student", fold, "--teacher", source, "--data", data, "--out", healed]
        + ["--lr", "1e-3", "--epochs", args.epochs, *shape],
        ["score", "--models", source, fold, healed, "--data", data, "--out", out / "score.json", *shape],
    ]
    began = time.time()
    for number, command in enumerate(commands, 1):
        words = [str(shorten(c)) for c in command]
        print(f"\n[{number}/{len(commands)}] $ cortiq {shlex.join(words)}", flush=True)
        status = cli.main(words)
        if status:
            return status
    summary(json.loads((out / "score.json").read_text()), (source, fold, healed), out, time.time() - began)
    return 0


def shorten(word: object) -> object:
    """A path below the working directory as the user would type it."""
    if isinstance(word, Path) and word.is_relative_to(Path.cwd()):
        return word.relative_to(Path.cwd())
    return word


def summary(score: dict, models: tuple[Path, ...], out: Path, seconds: float) -> None:
    """Table of the three models on the test records, what healing recovered, and what to type next."""
    rows = [r for r in score["rows"] if r["category"] is None]
    table = Table(title=f"{rows[0]['records']} test records, {rows[0]['count']:,} tokens, never trained on")
    for name in ("model", "weights on disk", "NLL", "perplexity", "top-1 agreement", "KL to source"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for label, row, path in zip(("source", "fold (half the FFN)", "healed"), rows, models, strict=True):
        size = sum(f.stat().st_size for f in path.glob("*.safetensors"))
        same = "" if row["agreement"] is None else f"{row['agreement']:.1%}"
        kl = "" if row["kl"] is None else f"{row['kl']:.4f}"
        table.add_row(label, f"{size / 1e6:.2f} MB", f"{row['nll']:.4f}", f"{row['perplexity']:.2f}", same, kl)
    source, fold, healed = (r["nll"] for r in rows)
    print()
    Console(width=100).print(table)
    won = (fold - healed) / (fold - source)
    print(f"The fold lost {fold - source:.4f} nat a token; healing won back {won:.0%} of it.")
    print(f"{seconds:.0f} s in all. Healed model: {shorten(models[2])}   its curves: {out / 'healed.html'}")
    print("Next, your own: cortiq fold --model MODEL_DIR --data RECORDS.jsonl --out FOLD_DIR   (more: cortiq --help)")


if __name__ == "__main__":
    raise SystemExit(main())
