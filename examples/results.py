"""Which ranking leaves the better model? A quarter of the MLP neurons of the small model that ships here go by each
ranking, the fold is healed the same way, and the test records decide; over several seeds.

    python examples/results.py [--out results] [--seeds 0 1 2] [--save results.json]

By default every layer keeps three quarters of its neurons. With "own widths" three quarters of the whole model's stay,
those with the largest logits, however many of a layer that are; and another ranking is given those widths, to tell what
the widths bring from what the choice of neurons does.

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
from typing import Any

from safetensors import safe_open

from cortiq_kernels import cli
from cortiq_kernels.model.hf import open_model

HERE = Path(__file__).resolve().parent / "small_model"
MODEL, DATA = HERE / "model", HERE / "data.jsonl"
EQUAL = ["--keep", "0.75"]
OWN = "learned masks, own widths"
RANKINGS = {
    "learned masks": ["--masks", "MASKS", *EQUAL],
    "activation": ["--rank", "activation", *EQUAL],
    "magnitude": ["--rank", "magnitude", *EQUAL],
    "random": ["--rank", "random", *EQUAL],
    OWN: ["--masks", "MASKS", "--per-layer", "--align", "1", *EQUAL],
    "activation at those widths": ["--rank", "activation", "--widths", "WIDTHS"],
}
SHAPE = ["--window", "512", "--batch", "2", "--device", "cpu"]
MASKS = ["--keep-frac", "0.75", "--l1-init", "0.3", "--eval-every", "20", "--max-steps", "300"]
GROWTH = ("1.5", "1.0")
HEAL = ["--lr", "1e-3", "--epochs", "0.25", "--eval-every", "35"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results"), help="directory for models, masks and scores")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds to run")
    parser.add_argument("--save", type=Path, help="file for the figures behind the tables (JSON)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        masks = args.out / f"masks-{seed}.safetensors"
        if not masks.exists():
            cortiq("masks", "--model", MODEL, "--data", DATA, "--out", masks, "--seed", seed, *MASKS, *SHAPE)
        for name, rank in RANKINGS.items():
            words = [masks if word == "MASKS" else word for word in rank]
            if "WIDTHS" in words:
                words[-1:] = open_model(stem(args.out, OWN, seed, "-fold")).geometry.intermediate
            score(args.out, name, seed, words)
    print(table(args.out, args.seeds))
    print(growth(args.out))
    if args.save:
        args.save.write_text(json.dumps(figures(args.out, args.seeds), indent=1) + "\n")
    return 0


def stem(out: Path, name: str, seed: int, suffix: str) -> Path:
    """Where a ranking's fold, healed model or scores lie."""
    return out / f"{name.replace(',', '').replace(' ', '-')}-{seed}{suffix}"


def figures(out: Path, seeds: list[int]) -> dict[str, object]:
    """Everything that the tables are made of."""
    found: dict[str, object] = {"seeds": seeds}
    for name in RANKINGS:
        rows = [scores(out, name, seed) for seed in seeds]
        widths = [open_model(stem(out, name, seed, "-fold")).geometry.intermediate for seed in seeds]
        found[name] = [{"widths": w, "scores": r} for w, r in zip(widths, rows, strict=True)]
    for file in (*(f"masks-{seed}" for seed in seeds), *(f"growth-{factor}" for factor in GROWTH)):
        made = provenance(out / f"{file}.safetensors")
        keys = ("settings", "versions", "loss_open", "loss_best", "best_step", "steps", "pruned", "kept", "trace")
        found[file] = {key: made[key] for key in keys if key in made}
    return found


def provenance(file: Path) -> dict[str, Any]:
    """How a mask file was made."""
    with safe_open(file, "pt") as f:
        return json.loads(f.metadata()["cortiq"])


def scores(out: Path, name: str, seed: int) -> list[dict[str, Any]]:
    """Source, fold and healed model on all test records."""
    rows = json.loads(stem(out, name, seed, ".json").read_text())["rows"]
    return [r for r in rows if r["category"] is None]


def growth(out: Path) -> str:
    """Markdown: what growing pressure closes, by the factor (1: linear growth), from the settings' own start of it."""
    lines = ["| growth | closed after 100 | 200 | 300 | 400 | 1000 steps | target of 25 % |", "|" + "---|" * 7]
    for factor in GROWTH:
        file = out / f"growth-{factor}.safetensors"
        if not file.exists():
            more = ["--l1-grow", factor, "--max-steps", "1000"]
            cortiq("masks", "--model", MODEL, "--data", DATA, "--out", file, *more, *SHAPE)
        made = provenance(file)
        at = {int(t["step"]): t["pruned"] for t in made["trace"]}
        shown = [f"{at[d]:.1%}" if d in at else "ended" for d in (100, 200, 300, 400, 1000)]
        reached = next((int(t["step"]) for t in made["trace"] if t["pruned"] >= 0.25), None)
        when = f"after {reached} steps" if reached else "not reached"
        best = f"{when}; val NLL {made['loss_best']:.4f} of {made['loss_open']:.4f}"
        lines.append(f"| {'linear' if factor == '1.0' else 'times ' + factor} | {' | '.join(shown)} | {best} |")
    return "\n".join(lines)


def score(out: Path, name: str, seed: int, rank: list[object]) -> None:
    """Fold, heal and score one ranking and seed, unless that is done."""
    made, fold, healed = (stem(out, name, seed, suffix) for suffix in (".json", "-fold", "-healed"))
    if made.exists():
        return
    # masks and weights know the neurons themselves; what a fold measures on records is for its report then
    cortiq("fold", "--model", MODEL, "--data", DATA, "--out", fold, "--seed", seed, *rank, *SHAPE)
    taught = ["--targets", out / f"targets-{seed}"]  # the teacher's, made once
    cortiq("heal", "--student", fold, "--teacher", MODEL, "--data", DATA, "--out", healed, "--seed", seed, *taught)
    cortiq("score", "--models", MODEL, fold, healed, "--data", DATA, "--out", made, *SHAPE)


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
        nll = [[r["nll"] for r in scores(out, name, s)] for s in seeds]
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
