"""What the student should predict, computed once per batch and kept on the host.

For a scored row let (ids, p) be the teacher's k most likely next tokens and y the true one; alpha in [0, 1] is the
share of the true token:

    alpha = 1        target = [y]; no teacher is needed, K = 1
    alpha = 0        target = b = p / max(sum p, 1e-12), K = k
    0 < alpha < 1    K = k + 1 tokens are asked for. If y is among them all stay; else y replaces the weakest, with p
    = 0.
                     b = p / max(sum p, 1e-12);  target = (1 - alpha) * b + alpha * [y]

The ids of a row are distinct. Training minimises KL(target || q). What is reported is alpha * CE + (1 - alpha) *
KL(b || q) = KL(target || q) + H(target) - (1 - alpha) * H(b); those last two, times the rows' weights, are
`Targets.const` of a batch (0 for alpha 0 and 1). H is the entropy, with 0 * log 0 = 0.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from cortiq_kernels.data.batches import Batch
from cortiq_kernels.ops.topk import topk_softmax
from cortiq_kernels.recipes.rows import logits_of
from cortiq_kernels.step import Evaluator
from cortiq_kernels.step.loss import Targets, next_token_targets


def mix_true_token(ids: Tensor, p: Tensor, true: Tensor, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """The mixed target of 0 < alpha < 1 and the constant of its reported loss.

    ids [n, K] int32 by falling p [n, K] float32 (any positive multiple of probabilities); true [n] integer. Returns
    (ids [n, K] int32, target [n, K] float32, const [n] float64 = H(target) - (1 - alpha) * H(b)). Inputs are left
    alone.
    """
    true = true.to(ids.dtype)
    ids, p = ids.clone(), p.double()
    found = (ids == true[:, None]).any(1)
    ids[:, -1] = torch.where(found, ids[:, -1], true)
    p[:, -1] = torch.where(found, p[:, -1], 0.0)
    b = p / p.sum(1, keepdim=True).clamp(min=1e-12)
    target = ((1.0 - alpha) * b + alpha * (ids == true[:, None])).float()
    entropy = torch.special.entr(target.double()).sum(1)  # of the float32 target, which is what the loss sees
    return ids, target, entropy - (1.0 - alpha) * torch.special.entr(b).sum(1)


class TargetStore:
    """Targets of a list of batches in two flat host tensors; `store[i]` are those of batch i, as views.

    ids [sum of R, K] int32, probs [sum of R, K] float32. Above `spill_bytes` they lie in an unnamed temporary file in
    `spill_dir` (gone with this object, or with the process; `OSError` at once if the disk has no room); else in
    memory, pinned when `pin` (for a GPU).
    """

    def __init__(
        self,
        rows: Sequence[int],
        k: int,
        *,
        pin: bool = False,
        spill_bytes: int | None = None,
        spill_dir: Path | None = None,
    ):
        self.starts = [0]
        for r in rows:
            self.starts.append(self.starts[-1] + r)
        total = self.starts[-1]
        self.nbytes = self.bytes_for(total, k)
        self.spilled = spill_bytes is not None and self.nbytes > spill_bytes and total > 0
        self.const = [0.0] * len(rows)
        if self.spilled:
            with tempfile.NamedTemporaryFile(dir=spill_dir, prefix=".targets-") as file:
                # A sparse file on a disk that fills up later would end the process at the write (SIGBUS).
                os.posix_fallocate(file.fileno(), 0, self.nbytes)
                mapped = torch.from_file(file.name, shared=True, size=self.nbytes, dtype=torch.uint8)
            half = self.nbytes // 2
            self.ids = mapped[:half].view(torch.int32).view(total, k)
            self.probs = mapped[half:].view(torch.float32).view(total, k)
        else:
            self.ids = torch.zeros(total, k, dtype=torch.int32, pin_memory=pin)
            self.probs = torch.zeros(total, k, dtype=torch.float32, pin_memory=pin)

    @staticmethod
    def bytes_for(rows: int, k: int) -> int:
        """Host bytes of the targets of `rows` rows."""
        return 8 * rows * k

    def __len__(self) -> int:
        return len(self.const)

    def __getitem__(self, i: int) -> Targets:
        a, b = self.starts[i], self.starts[i + 1]
        return Targets(self.ids[a:b], self.probs[a:b], self.const[i])


def asked_topk(topk: int, alpha: float, vocab: int) -> int:
    """K: slots of a target row."""
    if alpha >= 1.0:
        return 1
    return min(topk + (alpha > 0.0), vocab)


def teacher_targets(
    teacher: Evaluator,
    batches: Sequence[Batch],
    store: TargetStore,
    alpha: float,
    *,
    chunk_rows: int | None = None,
    done: Callable[[int], None] = lambda n: None,
) -> None:
    """Fill `store` (K from `asked_topk`) with the teacher's targets of `batches`, alpha < 1.

    Only scored rows pass through the head, `chunk_rows` at a time. `done(n)` is called after batch n (1-based).
    """
    w = teacher.weights
    k = store.ids.shape[1]
    for i, host in enumerate(batches):
        batch = host.to(w.device)
        rows = teacher.hidden(batch).index_select(0, batch.row_index)
        true = batch.next_ids.index_select(0, batch.row_index)
        out = store[i]
        const = torch.zeros((), dtype=torch.float64, device=w.device)
        for a, b, logits in logits_of(rows, w["head"], chunk_rows):
            top = topk_softmax(logits, k)
            ids, probs = top.ids, top.probs
            if alpha > 0.0:
                ids, probs, c = mix_true_token(ids, probs, true[a:b], alpha)
                const += (c * batch.row_weight[a:b].double()).sum()
            else:
                probs = probs / probs.sum(1, keepdim=True).clamp(min=1e-12)
            out.ids[a:b].copy_(ids)
            out.probs[a:b].copy_(probs)
        store.const[i] = float(const)
        done(i + 1)


class TrueTokens:
    """Targets of alpha = 1: the true next token of every scored row of `batches`, built when asked for."""

    def __init__(self, batches: Sequence[Batch]):
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> Targets:
        return next_token_targets(self.batches[i])
