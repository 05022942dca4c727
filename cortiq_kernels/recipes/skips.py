"""When training is given up: too many steps whose loss or gradient is not finite."""

from __future__ import annotations

from cortiq_kernels.recipes.errors import TrainingFailed
from cortiq_kernels.recipes.inputs import Progress
from cortiq_kernels.step import StepStats

MAX_SKIPS_IN_ROW = 20


def report_skip(recipe: str, progress: Progress, stats: StepStats, *, done: int, of: int, fix: str) -> None:
    """Event "skip" for a step after `done` accepted ones of `of`; TrainingFailed after 20 skips in a row, or more than
    max(20, 5 % of `of`) in all.
    """
    progress({
        "event": "skip", "step": done + 1, "loss": stats.loss, "norm": stats.norm, "skipped": stats.skipped,
        "in_row": stats.in_row, "scale": stats.scale,
    })  # fmt: skip
    in_all = max(MAX_SKIPS_IN_ROW, 0.05 * of)
    if stats.in_row >= MAX_SKIPS_IN_ROW or stats.skipped > in_all:
        raise TrainingFailed(
            f"{recipe}: got {stats.in_row} steps in a row ({stats.skipped} in all) with a loss or gradient that is not "
            f"finite; expected fewer than {MAX_SKIPS_IN_ROW} in a row and at most {in_all:g} in all. Nothing was "
            f"written. {fix}"
        )
