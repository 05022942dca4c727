"""A record: the tokens of one example, where its scored part starts, and which split it belongs to.

Token i of a record is scored when i >= max(first_target, 1): token 0 has nothing before it to be predicted from. Row
j of a window predicts token j + 1, so a scored token i is charged to row i - 1, and the last row of a record has
nothing to predict. A record without any scored token ("unscored": an empty completion, first_target >= len(ids),
weight 0) is kept as context but trains and measures nothing.

A split comes from the record, or from FNV-1a-64 of its rid: h mod 10 = 8 is val, 9 is test, the rest train. The same
hash orders the train records, so neither depends on the order of the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cortiq_kernels.reading import Refusal

SPLITS = ("train", "val", "test")

_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3
_MASK64 = 0xFFFFFFFFFFFFFFFF


class DataError(Refusal):
    """Records, tokenizer files or windows that cannot be used; the message says where, why and how to fix it."""


def fnv1a64(text: str) -> int:
    """FNV-1a-64 of the UTF-8 bytes: h <- (h xor byte) * 0x100000001b3 mod 2^64, from 0xcbf29ce484222325."""
    h = _FNV_OFFSET
    for byte in text.encode("utf-8"):
        h = ((h ^ byte) * _FNV_PRIME) & _MASK64
    return h


def split_of(rid: str) -> str:
    """The split of a record that names none: FNV-1a-64(rid) mod 10 = 8 -> val, 9 -> test, else train."""
    return {8: "val", 9: "test"}.get(fnv1a64(rid) % 10, "train")


@dataclass(frozen=True, eq=False)
class Record:
    """One example.

    rid          unique in its file; the line number (1-based, blank lines counted) where the file gives none
    ids          [n] int32
    first_target index of the first scored token; anything >= n means that nothing is scored
    weight       multiplies the loss of every scored token of the record in training (not in `score`)
    line         line of the JSONL file, or row of the parquet file, 1-based
    """

    rid: str
    split: str
    ids: np.ndarray = field(repr=False)
    first_target: int
    category: str | None = None
    weight: float = 1.0
    line: int = 0

    @property
    def n_targets(self) -> int:
        """Number of scored tokens; 0 when the weight is 0."""
        return 0 if self.weight == 0 else max(0, len(self.ids) - max(self.first_target, 1))

    def row_weights(self) -> np.ndarray:
        """[n] float32: row j holds the weight of token j + 1; the last row is 0."""
        rows = np.zeros(len(self.ids), dtype=np.float32)
        if self.n_targets:
            rows[max(self.first_target, 1) - 1 : -1] = self.weight
        return rows
