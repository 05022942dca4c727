"""Settings of `score`. No torch here: the command line reads this before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cortiq_kernels.recipes.errors import need
from cortiq_kernels.recipes.settings import check_least, check_values

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class ScoreConfig:
    """Measure models on records: negative log-likelihood and perplexity per split and category.

    With several models the first is the source: the others also get their top-1 agreement with it and the KL divergence
    from it. Every record is its own sequence, so the result does not depend on window or batch.
    """

    models: tuple[Path, ...]
    """model directories; the first is the source that the others are compared with"""
    data: Path
    """records, JSONL or parquet"""
    splits: tuple[str, ...] = ("test",)
    """splits to measure: train, val, test"""
    loss_on: Literal["completion", "all"] = "completion"
    """which tokens are scored"""
    window: int = 2048
    """tokens of a window that short records share; longer records get one of their own"""
    batch: int = 4
    """windows of a batch"""
    dtype: Literal["bf16", "f16", "f32", "f64"] | None = None
    """working precision; default bf16 on a GPU, f32 on a CPU"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    out: Path | None = None
    """write the result as JSON to this file, too"""
    log: Path | None = None
    """run log (JSONL); default none"""

    def check(self) -> None:
        """Refuse settings that no data or model could make right; raises `InputError`."""
        check_values("score", self)
        need(len(self.models) > 0, "score: models", "none", "at least one model directory", "Set --models.")
        need(len(self.splits) > 0, "score: splits", "none", "some of train, val, test", "Set --splits.")
        for split in self.splits:
            need(split in SPLITS, "score: splits", repr(split), "train, val or test", "Set --splits.")
        need(
            self.loss_on in ("completion", "all"),
            "score: loss_on",
            repr(self.loss_on),
            "completion | all",
            "Set --loss-on.",
        )
        check_least("score", self, {"window": 2, "batch": 1})
