"""A `progress` that knows how many lines the run log holds: a resumed run continues the log from its checkpoint."""

from __future__ import annotations

from typing import Any

from cortiq_kernels.recipes.inputs import Progress
from cortiq_kernels.report.runlog import is_logged


class Logged:
    """Passes events on. `lines` counts those that the run log keeps, from the start of the run, resumed or not.

    While `again` is set, events are marked as told before (the plan of a resumed run, and what it works out anew):
    people see them, the log has them already.
    """

    def __init__(self, progress: Progress, lines: int = 0, again: bool = False):
        self.progress, self.lines, self.again = progress, lines, again

    def __call__(self, event: dict[str, Any]) -> None:
        if self.again:
            event = {**event, "again": True}
        self.progress(event)
        self.lines += is_logged(event)
