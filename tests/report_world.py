"""The small world of the report tests on files and models: its records, its model, and the commands on them."""

from __future__ import annotations

from pathlib import Path

from directories import SMALL, id_rows
from tiny import config

V = 23
ROWS = id_rows(V, (20, 31, 7))
TRAIN = id_rows(V, (30, 25, 32, 28), "train", seed=1) + id_rows(V, (26, 9), "val", seed=2)
CONFIG = config("LF", hidden=16, ffn=24, vocab=V, nq=2, nkv=1, hd=16, nk=1, nv=2)
HEAL = (*SMALL, "--lr", "1e-3", "--eval-every", "4", "--ce", "1", "--topk", "8")


def heal(model: Path, data: Path, out: Path, *more: object) -> tuple:
    return ("heal", "--student", model, "--data", data, "--out", out, *HEAL, *more)


def fold(model: Path, data: Path, out: Path, *more: object) -> tuple:
    return ("fold", "--model", model, "--data", data, "--out", out, *SMALL, "--align", "4", *more)


def capture(model: Path, data: Path, out: Path, *more: object) -> tuple:
    return ("capture", "--model", model, "--data", data, "--out", out, *SMALL, *more)


def masks(model: Path, data: Path, out: Path, *more: object) -> tuple:
    return ("masks", "--model", model, "--data", data, "--out", out, *SMALL, "--max-steps", "4", "--topk", "8", *more)


def bake(model: Path, data: Path, out: Path, *more: object) -> tuple:
    fast = ("--steps-a", "4", "--steps-b", "4", "--eval-every", "2", "--chunk", "4", "--held", "2", "--calib", "12")
    return ("bake", "--model", model, "--data", data, "--out", out, "--device", "cpu", *fast, "--align", "4", *more)


def score(model: Path, data: Path, *more: object) -> tuple:
    return ("score", "--models", model, "--data", data, *SMALL, *more)
