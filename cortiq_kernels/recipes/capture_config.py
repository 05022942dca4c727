"""Settings of `capture`. No torch here: the command line reads this before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cortiq_kernels.recipes.errors import need
from cortiq_kernels.recipes.settings import check_least, check_values


@dataclass(frozen=True)
class CaptureConfig:
    """Measure how the neurons of every MLP act together on your train records, for a fold that repairs.

    For each layer the Gram of the down projection's input (the gated activation), summed over real tokens, goes into
    one safetensors file. Grams that do not fit in memory take several passes, which give the same bits.
    """

    model: Path
    """model directory to measure"""
    data: Path
    """records, JSONL or parquet; the train split is used"""
    out: Path
    """safetensors file to write; must not exist"""
    layers: tuple[int, ...] = ()
    """layers to measure, from 0; default all, which is what `fold` needs"""
    max_batches: int | None = None
    """stop measuring after so many batches; default all"""
    window: int = 2048
    """tokens of a window"""
    batch: int = 4
    """windows of a batch"""
    room_mb: int | None = None
    """most MiB for the Grams of a pass; default what memory leaves"""
    dtype: Literal["bf16", "f16", "f32", "f64"] | None = None
    """working precision of the forward pass; default bf16 on a GPU, f32 on a CPU"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    log: Path | None = None
    """run log (JSONL); default OUT.log.jsonl"""

    def check(self) -> None:
        """Refuse settings that no data or model could make right; raises `InputError`."""
        check_values("capture", self)
        check_least("capture", self, {"window": 2, "batch": 1, "max_batches": 1, "room_mb": 1})
        for layer in self.layers:
            need(layer >= 0, "capture: layers", layer, "layers from 0 on", "Set --layers.")
