"""Windows -> batches of `batch` consecutive windows, as tensors of one fixed shape per set.

The composition of a batch never changes; only the order of the batches is shuffled (`order.Shuffler`). Of a set of
batches, `cu_seqlens` has the same length in every batch: the largest number of sequences in any of them, padded by
repeating N (empty sequences), so one captured step serves them all. `row_index` holds only the rows that are scored,
in rising order; its length differs from batch to batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from cortiq_kernels.data.record import DataError, Record
from cortiq_kernels.data.windows import Window, filler_window, join


@dataclass(frozen=True, eq=False)
class Batch:
    """N = batch * max_seqlen tokens, token-major; window i is rows [i * max_seqlen, (i+1) * max_seqlen).

    tokens     [N] int64
    next_ids   [N] int64, the token that each row predicts
    row_index  [R] int32, the scored rows (weight > 0), rising
    row_weight [R] float32
    cu_seqlens [capacity + 1] int32, non-decreasing, first 0, last N; every multiple of max_seqlen is in it
    weight_sum sum of row_weight in float64 (0.0 only for a batch of fillers)
    n_scored   R
    n_tokens   real tokens of each window: rows [i * max_seqlen, i * max_seqlen + n_tokens[i]) are not padding
    row_record [R] int32, index of each scored row's record in the list given; only in `score_batches`
    """

    tokens: Tensor
    next_ids: Tensor
    row_index: Tensor
    row_weight: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    weight_sum: float
    n_scored: int
    n_tokens: tuple[int, ...]
    row_record: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch with every tensor on `device`; host numbers stay host numbers."""
        moved: dict[str, Any] = {
            f.name: value.to(device, non_blocking=non_blocking)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return dataclasses.replace(self, **moved)


def make_batch(windows: Sequence[Window], capacity: int | None = None) -> Batch:
    """One batch of the given windows (all of one length). `capacity`: sequences that cu_seqlens has room for."""
    t = len(windows[0].tokens)
    n = t * len(windows)
    starts = [i * t + s for i, w in enumerate(windows) for s in w.starts]
    capacity = len(starts) if capacity is None else capacity
    if len(starts) > capacity:
        raise DataError(f"make_batch: {len(starts)} sequences do not fit a capacity of {capacity}")
    cu_seqlens = np.full(capacity + 1, n, dtype=np.int32)
    cu_seqlens[: len(starts)] = starts
    weights = np.concatenate([w.weights for w in windows])
    rows = np.flatnonzero(weights)
    row_weight = weights[rows]
    return Batch(
        tokens=torch.from_numpy(np.concatenate([w.tokens for w in windows]).astype(np.int64)),
        next_ids=torch.from_numpy(np.concatenate([w.next_ids for w in windows]).astype(np.int64)),
        row_index=torch.from_numpy(rows.astype(np.int32)),
        row_weight=torch.from_numpy(row_weight),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=t,
        weight_sum=math.fsum(row_weight.tolist()),
        n_scored=len(rows),
        n_tokens=tuple(w.n_tokens for w in windows),
    )


class Batches(Sequence[Batch]):
    """A fixed list of batches, each built when it is asked for (`batches[i]`), so any rank can address any index.

    capacity  sequences that every batch's cu_seqlens has room for: the maximum over the set, or more if asked
    dropped   windows beyond the last full batch (train only)
    fillers   padding windows that complete the last batch (evaluation only)
    """

    def __init__(self, windows: Sequence[Window], batch: int, *, capacity: int = 0, dropped: int = 0, fillers: int = 0):
        self._windows, self.batch, self.dropped, self.fillers = list(windows), batch, dropped, fillers
        counts = [len(w.starts) for w in self._windows]
        needed = max((sum(counts[i : i + batch]) for i in range(0, len(counts), batch)), default=0)
        self.capacity = max(capacity, needed)

    @property
    def window(self) -> int:
        return len(self._windows[0].tokens)

    def __len__(self) -> int:
        return len(self._windows) // self.batch

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...

    def __getitem__(self, index: int | slice) -> Batch | list[Batch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = index + len(self) if index < 0 else index
        if not 0 <= i < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        return make_batch(self._windows[i * self.batch : (i + 1) * self.batch], self.capacity)

    def __iter__(self) -> Iterator[Batch]:
        return (self[i] for i in range(len(self)))


def train_batches(windows: Sequence[Window], batch: int, *, capacity: int = 0) -> Batches:
    """floor(W / batch) batches; the windows beyond them are dropped and counted. Fewer than one batch is an error."""
    _check_batch(batch)
    if len(windows) < batch:
        raise DataError(
            f"train_batches: {len(windows)} train windows do not fill one batch of {batch}; "
            "use a smaller batch, a smaller window, or more train records"
        )
    whole = len(windows) // batch * batch
    return Batches(windows[:whole], batch, capacity=capacity, dropped=len(windows) - whole)


def eval_batches(
    windows: Sequence[Window], batch: int, *, pad_id: int = 0, capacity: int = 0, split: str = "val"
) -> Batches:
    """ceil(V / batch) batches, the last completed with filler windows of weight 0. No windows at all is an error."""
    _check_batch(batch)
    if not windows:
        raise DataError(
            f"eval_batches: no {split} windows, so there is nothing to measure; expected at least one {split} record "
            f'with a scored token: set "split": "{split}" on some records, or let the split come from their rids'
        )
    fillers = -len(windows) % batch
    filler = filler_window(len(windows[0].tokens), pad_id)
    return Batches([*windows, *[filler] * fillers], batch, capacity=capacity, fillers=fillers)


def score_batches(records: Sequence[Record], window: int, batch: int, *, pad_id: int = 0) -> Iterator[Batch]:
    """Batches in which every record is one whole sequence from position 0: scores do not depend on the batching.

    Scored are the tokens i >= max(first_target, 1), each with weight 1 (a score counts tokens; `Record.weight` only
    matters in training); records with nothing to score are left out, and none left is an error. `row_record` says to
    which entry of `records` each scored row belongs. Shapes: records are taken by falling length (ties in the order
    given); those longer than `window` are packed first, in batches of one row of their own length rounded up to a
    multiple of `window`; the others fill batches [batch, window], the last one completed with fillers. Within each
    shape `cu_seqlens` has one capacity.
    """
    _check_batch(batch)
    if window < 1:
        raise DataError(f"score_batches: window must be at least 1 token, got {window}")
    order = sorted((i for i, r in enumerate(records) if r.n_targets), key=lambda i: -len(records[i].ids))
    if not order:
        raise DataError(
            f"score_batches: none of the {len(records)} records has a scored token; expected at least one with "
            "first_target below its length (an empty completion scores nothing)"
        )
    return _score_batches(records, order, window, batch, pad_id)


def _score_batches(
    records: Sequence[Record], order: Sequence[int], window: int, batch: int, pad_id: int
) -> Iterator[Batch]:
    long = [i for i in order if len(records[i].ids) > window]
    for i in long:
        length = -(-len(records[i].ids) // window) * window
        one, owners = _score_window(records, [i], length, pad_id)
        yield _with_owners([one], [owners], 2)
    groups: list[list[int]] = []
    used = window
    for i in order[len(long) :]:
        if used + len(records[i].ids) > window:
            groups.append([])
            used = 0
        groups[-1].append(i)
        used += len(records[i].ids)
    if not groups:
        return
    made = [_score_window(records, group, window, pad_id) for group in groups]
    empty = (filler_window(window, pad_id), np.zeros(window, dtype=np.int32))
    made += [empty] * (-len(made) % batch)
    capacity = max(sum(len(w.starts) for w, _ in made[k : k + batch]) for k in range(0, len(made), batch))
    for k in range(0, len(made), batch):
        yield _with_owners([w for w, _ in made[k : k + batch]], [o for _, o in made[k : k + batch]], capacity)


def _score_window(records: Sequence[Record], group: list[int], window: int, pad_id: int) -> tuple[Window, np.ndarray]:
    pieces = []
    owners = np.zeros(window, dtype=np.int32)
    at = 0
    for i in group:
        ids = records[i].ids
        rows = dataclasses.replace(records[i], weight=1.0).row_weights()
        pieces.append((ids, np.append(ids[1:], np.int32(pad_id)), rows))
        owners[at : at + len(ids)] = i
        at += len(ids)
    return join(pieces, window, pad_id), owners


def _with_owners(windows: Sequence[Window], owners: Sequence[np.ndarray], capacity: int) -> Batch:
    batch = make_batch(windows, capacity)
    owner = np.concatenate(list(owners))[batch.row_index.numpy()]
    return dataclasses.replace(batch, row_record=torch.from_numpy(owner))


def _check_batch(batch: int) -> None:
    if batch < 1:
        raise DataError(f"batch must be at least 1 window, got {batch}")
