"""Records -> windows of exactly `window` tokens.

Row j of a window predicts the token after it, with the weight of that token. Two packings:

"records"  whole records, in order, into a window until one does not fit; the rest of the window is padding. Each
           record is its own sequence (attention, convolution, recurrent state and positions restart at its first
           token), so a record computes what it would compute alone. A record longer than a window is cut at 0, t,
           2t, ...: every piece starts fresh, and the last row of a piece that is not the final one predicts the first
           token of the next piece, so a record of n tokens always gives n - 1 rows that predict something. The last
           row of a record weighs 0.
"stream"   all records one after another, cut at 0, t, 2t, ... One sequence per window: state and positions restart at
           each window and nowhere else. The last row of a window predicts the first token of the next window. The
           first token of a record is never scored, so the row before it weighs 0.

In both: padding is a sequence of its own at the end of the window and weighs 0 (no record's row ever looks at it),
`next_ids` of a row that predicts nothing is the pad id, and a window whose rows all weigh 0 is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cortiq_kernels.data.record import DataError, Record

PACKINGS = ("records", "stream")


@dataclass(frozen=True, eq=False)
class Window:
    """`window` tokens of one batch row.

    tokens   [t] int32
    next_ids [t] int32, the token that row j predicts
    weights  [t] float32, the weight of that token; 0 = not scored
    starts   where sequences start, strictly rising, first 0; a padded tail is the last sequence
    n_tokens how many leading rows are real tokens (the rest is padding)
    """

    tokens: np.ndarray
    next_ids: np.ndarray
    weights: np.ndarray
    starts: tuple[int, ...]
    n_tokens: int

    @property
    def scored(self) -> bool:
        return bool(np.any(self.weights))


@dataclass(frozen=True, eq=False)
class Packed:
    """windows; `cut`: records that cross a window's edge; `dropped`: windows left out because every row weighs 0."""

    windows: list[Window]
    cut: int
    dropped: int


def filler_window(window: int, pad_id: int) -> Window:
    """A window of padding only: one sequence, every weight 0. Completes the last evaluation batch."""
    ids = np.full(window, pad_id, dtype=np.int32)
    return Window(ids, ids, np.zeros(window, dtype=np.float32), (0,), 0)


def pack(records: Sequence[Record], window: int, packing: str = "records", pad_id: int = 0) -> Packed:
    """Pack records, in the order given, as the module docstring says.

    Nothing is lost: the weights of all windows sum to the weights of all records, and every scored token is predicted
    by exactly one row. Raises DataError for an unknown packing or a window below 1.
    """
    if packing not in PACKINGS:
        raise DataError(f"pack: unknown packing {packing!r}; expected one of {', '.join(PACKINGS)}")
    if window < 1:
        raise DataError(f"pack: window must be at least 1 token, got {window}")
    whole = [r for r in records if len(r.ids)]
    windows, cut = (_pack_records if packing == "records" else _pack_stream)(whole, window, pad_id)
    kept = [w for w in windows if w.scored]
    return Packed(kept, cut, len(windows) - len(kept))


def _next_ids(ids: np.ndarray, pad_id: int) -> np.ndarray:
    return np.append(ids[1:], np.int32(pad_id)).astype(np.int32, copy=False)


def _pack_records(records: Sequence[Record], window: int, pad_id: int) -> tuple[list[Window], int]:
    windows: list[Window] = []
    pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # (ids, next_ids, weights) of the open window
    used = cut = 0
    for record in records:
        rows = (record.ids.astype(np.int32, copy=False), _next_ids(record.ids, pad_id), record.row_weights())
        cut += len(record.ids) > window
        for at in range(0, len(record.ids), window):
            piece = (rows[0][at : at + window], rows[1][at : at + window], rows[2][at : at + window])
            if used + len(piece[0]) > window:
                windows.append(join(pieces, window, pad_id))
                pieces, used = [], 0
            pieces.append(piece)
            used += len(piece[0])
    if pieces:
        windows.append(join(pieces, window, pad_id))
    return windows, cut


def join(pieces: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], window: int, pad_id: int) -> Window:
    """Pieces (ids, next_ids, weights), each its own sequence, then padding up to `window` rows."""
    tokens = np.full(window, pad_id, dtype=np.int32)
    next_ids = np.full(window, pad_id, dtype=np.int32)
    weights = np.zeros(window, dtype=np.float32)
    starts, at = [], 0
    for ids, nxt, w in pieces:
        starts.append(at)
        end = at + len(ids)
        tokens[at:end], next_ids[at:end], weights[at:end] = ids, nxt, w
        at = end
    if at < window:
        starts.append(at)
    return Window(tokens, next_ids, weights, tuple(starts), at)


def _pack_stream(records: Sequence[Record], window: int, pad_id: int) -> tuple[list[Window], int]:
    if not records:
        return [], 0
    ids = np.concatenate([r.ids for r in records]).astype(np.int32, copy=False)
    weights = np.concatenate([r.row_weights() for r in records])
    rows = (ids, _next_ids(ids, pad_id), weights)
    ends = np.cumsum([len(r.ids) for r in records])
    firsts = ends - [len(r.ids) for r in records]
    cut = int(np.sum(firsts // window != (ends - 1) // window))
    windows = [
        join([(rows[0][at : at + window], rows[1][at : at + window], rows[2][at : at + window])], window, pad_id)
        for at in range(0, len(ids), window)
    ]
    return windows, cut
