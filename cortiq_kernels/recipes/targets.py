"""What the student should predict, computed once per batch and kept on the host (heal_targets.py).

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

from collections.abc import Callable, Sequence
from typing import Protocol

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


class Store(Protocol):
    """What `teacher_targets` fills: in memory (`TargetStore`) or on disk (`target_file.TargetFile`)."""

    k: int

    def put(self, i: int, ids: Tensor, probs: Tensor, const: float) -> None: ...


class TargetStore:
    """Targets of a list of batches in two flat host tensors, pinned when `pin`; `store[i]` are those of batch i.

    ids [sum of R, K] int32, probs [sum of R, K] float32; what `store[i]` returns are views of them.
    """

    def __init__(self, rows: Sequence[int], k: int, *, pin: bool = False):
        self.starts = [0]
        for r in rows:
            self.starts.append(self.starts[-1] + r)
        self.k = k
        self.const = [0.0] * len(rows)
        self.ids = torch.zeros(self.starts[-1], k, dtype=torch.int32, pin_memory=pin)
        self.probs = torch.zeros(self.starts[-1], k, dtype=torch.float32, pin_memory=pin)

    @staticmethod
    def bytes_for(rows: int, k: int) -> int:
        """Host bytes of the targets of `rows` rows."""
        return 8 * rows * k

    def __len__(self) -> int:
        return len(self.const)

    def __getitem__(self, i: int) -> Targets:
        if not 0 <= i < len(self):
            raise IndexError(i)
        a, b = self.starts[i], self.starts[i + 1]
        return Targets(self.ids[a:b], self.probs[a:b], self.const[i])

    def put(self, i: int, ids: Tensor, probs: Tensor, const: float) -> None:
        """Keep the targets of batch i."""
        out = self[i]
        out.ids.copy_(ids)
        out.probs.copy_(probs)
        self.const[i] = const


def asked_topk(topk: int, alpha: float, vocab: int) -> int:
    """K: slots of a target row. With topk the whole vocabulary every token is ranked, and there is no slot more."""
    if alpha >= 1.0:
        return 1
    return min(topk + (alpha > 0.0), vocab)


def teacher_targets(
    teacher: Evaluator,
    batches: Sequence[Batch],
    store: Store,
    alpha: float,
    *,
    only: Sequence[int] | None = None,
    chunk_rows: int | None = None,
    done: Callable[[int], None] = lambda n: None,
) -> None:
    """Put the teacher's targets of `batches` (of the indices `only`, if given) into `store`, alpha < 1.

    K slots a row, K = `store.k` from `asked_topk`. Only scored rows pass through the head, `chunk_rows` at a time.
    `done(n)` is called when n batches are in the store, those counted that `only` leaves out.
    """
    w = teacher.weights
    todo = range(len(batches)) if only is None else only
    for done_before, i in enumerate(todo, len(batches) - len(todo)):
        batch = batches[i].to(w.device)
        rows = teacher.hidden(batch).index_select(0, batch.row_index)
        true = batch.next_ids.index_select(0, batch.row_index)
        shape = (rows.shape[0], store.k)
        out_ids, out_probs = torch.empty(shape, dtype=torch.int32), torch.empty(shape, dtype=torch.float32)
        const = torch.zeros((), dtype=torch.float64, device=w.device)
        for a, b, logits in logits_of(rows, w["head"], chunk_rows):
            top = topk_softmax(logits, store.k)
            ids, probs = top.ids, top.probs
            if alpha > 0.0:
                ids, probs, c = mix_true_token(ids, probs, true[a:b], alpha)
                const += (c * batch.row_weight[a:b].double()).sum()
            else:
                probs = probs / probs.sum(1, keepdim=True).clamp(min=1e-12)
            out_ids[a:b].copy_(ids)
            out_probs[a:b].copy_(probs)
            del logits, top  # or two slabs, of 2 GB each on a GPU, are alive while the next one is made
        store.put(i, out_ids, out_probs, float(const))
        done(done_before + 1)


class TrueTokens:
    """Targets of alpha = 1: the true next token of every scored row of `batches`, built when asked for."""

    def __init__(self, batches: Sequence[Batch]):
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> Targets:
        return next_token_targets(self.batches[i])
