"""Which ranking leaves the better model? A quarter of the MLP neurons of the small model that ships here go by each
ranking, the fold is healed the same way, and the test records decide; over several seeds.

    python examples/results.py [--out results] [--seeds 0 1 2]

And how fast should the pressure of the masks grow? The same masks with growth by a factor and with linear growth, one
seed.

Every step is a `cortiq` command. What is there already is not made again, so seeds may run in processes of their own
and the last call prints the table (docs/results.md). A seed is that of the masks, of the random ranking and of the
order of the records in healing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from pathlib import Path

from safetensors import safe_open

from cortiq_kernels import cli

HERE = Path(__file__).resolve().parent / "small_model"
MODEL, DATA = HERE / "model", HERE / "data.jsonl"
RANKINGS = {
    "learned masks": ["--masks", "MASKS"],
    "activation": ["--rank", "activation"],
    "magnitude": ["--rank", "magnitude"],
    "random": ["--rank", "random"],
}
SHAPE = ["--window", "512", "--batch", "2", "--device", "cpu"]
MASKS = ["--keep-frac", "0.75", "--l1-init", "0.3", "--eval-every", "20", "--max-steps", "300"]
GROWTH = ("1.5", "1.0")
HEAL = ["--lr", "1e-3", "--epochs", "0.25", "--eval-every", "35"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results"), help="directory for models, masks and scores")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds to run")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        masks = args.out / f"masks-{seed}.safetensors"
        if not masks.exists():
            cortiq("masks", "--model", MODEL, "--data", DATA, "--out", masks, "--seed", seed, *MASKS, *SHAPE)
        for name, rank in RANKINGS.items():
            score(args.out, name, seed, [masks if word == "MASKS" else word for word in rank])
    print(table(args.out, args.seeds))
    print(growth(args.out))
    return 0


def growth(out: Path) -> str:
    """Markdown: what growing pressure closes, by the factor (1: linear growth), from the settings' own start of it."""
    lines = ["| growth | closed after 100 | 200 | 300 | 400 | 1000 steps | target of 25 % |", "|" + "---|" * 7]
    for factor in GROWTH:
        file = out / f"growth-{factor}.safetensors"
        if not file.exists():
            more = ["--l1-grow", factor, "--max-steps", "1000"]
            cortiq("masks", "--model", MODEL, "--data", DATA, "--out", file, *more, *SHAPE)
        with safe_open(file, "pt") as f:
            made = json.loads(f.metadata()["cortiq"])
        at = {int(t["step"]): t["pruned"] for t in made["trace"]}
        shown = [f"{at[d]:.1%}" if d in at else "ended" for d in (100, 200, 300, 400, 1000)]
        reached = next((int(t["step"]) for t in made["trace"] if t["pruned"] >= 0.25), None)
        when = f"after {reached} steps" if reached else "not reached"
        best = f"{when}; val NLL {made['loss_best']:.4f} of {made['loss_open']:.4f}"
        lines.append(f"| {'linear' if factor == '1.0' else 'times ' + factor} | {' | '.join(shown)} | {best} |")
    return "\n".join(lines)


def score(out: Path, name: str, seed: int, rank: list[object]) -> None:
    """Fold, heal and score one ranking and seed, unless that is done."""
    stem = out / f"{name.replace(' ', '-')}-{seed}"
    scores = Path(f"{stem}.json")
    if scores.exists():
        return
    fold, healed = Path(f"{stem}-fold"), Path(f"{stem}-healed")
    # masks and weights know the neurons themselves; what a fold measures on records is for its report then
    cortiq("fold", "--model", MODEL, "--data", DATA, "--out", fold, "--keep", "0.75", "--seed", seed, *rank, *SHAPE)
    taught = ["--targets", out / f"targets-{seed}"]  # the teacher's, made once
    cortiq("heal", "--student", fold, "--teacher", MODEL, "--data", DATA, "--out", healed, "--seed", seed, *taught)
    cortiq("score", "--models", MODEL, fold, healed, "--data", DATA, "--out", scores, *SHAPE)


def cortiq(recipe: str, *words: object) -> None:
    """Run a command, shown before it runs; SystemExit with its status when it fails."""
    if recipe == "heal":
        words = (*words, *HEAL, *SHAPE)
    line = [recipe, *(str(w) for w in words)]
    print(f"$ cortiq {shlex.join(line)}", flush=True)
    if status := cli.main([*line, "--quiet"]):
        raise SystemExit(status)


def table(out: Path, seeds: list[int]) -> str:
    """Markdown: mean test NLL (and the range over seeds) after the fold and after healing, best first."""
    rows = []
    for name in RANKINGS:
        runs = [json.loads((out / f"{name.replace(' ', '-')}-{s}.json").read_text())["rows"] for s in seeds]
        nll = [[r["nll"] for r in run if r["category"] is None] for run in runs]
        source, fold, healed = zip(*nll, strict=True)
        rows.append((statistics.mean(healed), name, source[0], fold, healed))
    lines = [f"| ranking | folded | folded and healed | lost to the source ({rows[0][2]:.4f}) |", "|---|---|---|---|"]
    for mean, name, source, fold, healed in sorted(rows):
        lines.append(f"| {name} | {spread(fold)} | {spread(healed)} | {mean - source:.4f} |")
    return "\n".join(lines)


def spread(values: tuple[float, ...]) -> str:
    return f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


if __name__ == "__main__":
    raise SystemExit(main())
