"""Settings of `fold`. No torch here: the command line reads this before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cortiq_kernels.recipes.errors import need
from cortiq_kernels.recipes.settings import check_least, check_values


@dataclass(frozen=True)
class FoldConfig:
    """Narrow every MLP to the neurons that your task uses most, and write the smaller directory.

    With the Grams of `cortiq capture` down_proj is repaired, so that the neurons that stay stand in for those that go.
    Without, they are ranked on records and nothing is repaired. All layers get the same width unless you say
    otherwise, so any runtime loads the result. Heal it afterwards.
    """

    model: Path
    """model directory to fold"""
    out: Path
    """directory to write; must not exist, or be empty"""
    data: Path | None = None
    """records, JSONL or parquet, to rank neurons on where there are no Grams, or for a `rank` that Grams cannot give;
    the train split is used"""
    grams: tuple[Path, ...] = ()
    """files of cortiq capture on this model; several of them (other records each) are added up"""
    rank: Literal["importance", "activation", "absolute", "first_order", "magnitude", "random", "gram"] = "importance"
    """which neurons stay: importance is E[act^2] * |its column of down_proj|^2, activation E[act^2], absolute E|act|,
    first_order how much of the loss it carries (a backward pass over the records), magnitude its weights, gram what the
    others explain least; absolute and first_order need --data, with --grams too if down_proj is to be repaired"""
    repair: bool = True
    """repair down_proj; only with Grams"""
    ridge: float = 1e-3
    """weight of the repair's regularisation, in units of the kept neurons' mean square"""
    seed: int = 0
    """of --rank random"""
    masks: Path | None = None
    """mask file of cortiq masks for this model: neurons are ranked by its logits, instead of `rank`"""
    per_layer: bool = False
    """with masks: every layer keeps its own open gates, or with `keep` those of its gates that are among this share of
    the whole model's, rounded up to `align`; only this package loads the result"""
    keep: float | None = None
    """share of the neurons to keep, in (0, 1]; the width is rounded up to a multiple of `align`; default 0.5, and with
    masks what the layer with most open gates needs"""
    width: int | None = None
    """width to keep exactly, instead of `keep`"""
    widths: tuple[int, ...] = ()
    """width of each layer, instead of `keep`; where they differ only this package loads the result"""
    align: int = 32
    """multiple that GPUs like the width to be"""
    max_batches: int | None = None
    """stop measuring after so many batches; default all"""
    window: int = 2048
    """tokens of a window"""
    batch: int = 4
    """windows of a batch"""
    dtype: Literal["bf16", "f16", "f32", "f64"] | None = None
    """working precision of the measurement; default bf16 on a GPU, f32 on a CPU"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    log: Path | None = None
    """run log (JSONL); default OUT.log.jsonl"""

    def check(self) -> None:
        """Refuse settings that no data or model could make right; raises `InputError`."""
        check_values("fold", self)
        need(
            self.keep is None or 0 < self.keep <= 1, "fold: keep", self.keep, "a fraction in (0, 1]",
            "Set --keep, for instance 0.5.",
        )  # fmt: skip
        need(
            self.masks is None or self.rank == "importance", "fold: masks", f"masks with rank {self.rank!r}",
            "one of them", "Drop --rank or --masks.",
        )  # fmt: skip
        need(
            not self.per_layer or self.masks is not None, "fold: per_layer", "per_layer without masks", "a mask file",
            "Name it with --masks, or drop --per-layer.",
        )  # fmt: skip
        need(
            not self.per_layer or (self.width is None and not self.widths), "fold: per_layer", "per_layer with a width",
            "one of them", "Drop --per-layer, or --width and --widths.",
        )  # fmt: skip
        check_least("fold", self, {"align": 1, "window": 2, "batch": 1, "width": 1, "max_batches": 1})
        need(0 < self.ridge <= 1, "fold: ridge", self.ridge, "a number in (0, 1]", "Set --ridge, for instance 1e-3.")
        looks = self.rank in ("absolute", "first_order")
        need(
            bool(self.grams) or self.data is not None, "fold: grams and data", "neither",
            "--grams of cortiq capture, or --data to rank neurons on", "Give one of the two.",
        )  # fmt: skip
        need(
            looks or not (self.grams and self.data is not None), "fold: grams and data", "both",
            "one, as Grams have what this ranking needs", "Drop --data.",
        )  # fmt: skip
        need(not looks or self.data is not None, "fold: rank", f"{self.rank!r} without records", "them", "Set --data.")
        need(self.rank != "gram" or bool(self.grams), "fold: rank", "'gram' without Grams", "them", "Set --grams.")
        need(self.width is None or not self.widths, "fold: width", "width and widths", "one of them", "Leave one out.")
        for width in self.widths:
            need(width >= 1, "fold: widths", width, "at least 1 each", "Set --widths.")

    def target_width(self, f: int) -> int:
        """Width to keep of `f` neurons: `width` as it is, or keep (0.5) * f rounded up to `align`, at most f."""
        if self.width is not None:
            return self.width
        wanted = max(1, round((0.5 if self.keep is None else self.keep) * f))
        return min(-(-wanted // self.align) * self.align, f)
