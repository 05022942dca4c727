"""What the plans of recipes that learn from a teacher have in common (`heal_targets.Taught`)."""

from __future__ import annotations

from typing import Any

from cortiq_kernels.data.batches import Batch, Batches
from cortiq_kernels.model.hf import ModelDir
from cortiq_kernels.recipes.inputs import Joined
from cortiq_kernels.recipes.targets import TargetStore

HOST_SHARE = 0.3  # of the host memory available, for the targets, and again for a prefix cache


class TaughtPlan:
    """Base of a frozen dataclass with these fields: `rows` are the scored rows of each of `batches`."""

    cfg: Any
    teacher: ModelDir | None
    train: Batches
    val: Batches
    topk: int
    rows: list[int]

    @property
    def batches(self) -> Joined[Batch]:
        """Train batches, then val batches: the order of targets and prefix streams."""
        return Joined(self.train, self.val)

    @property
    def n(self) -> int:
        """Tokens of a batch."""
        return int(self.cfg.batch * self.cfg.window)

    @property
    def target_bytes(self) -> int:
        """Bytes of the teacher's targets of all batches; 0 without a teacher."""
        return TargetStore.bytes_for(sum(self.rows), self.topk) if self.teacher else 0
