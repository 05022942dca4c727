"""Opening what every recipe reads: a model directory's tokenizer, its records, and whether two models can be
compared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from cortiq_kernels.data.batches import Batches, eval_batches, train_batches
from cortiq_kernels.data.encode import NoTokenizer
from cortiq_kernels.data.record import Record
from cortiq_kernels.data.records import Dataset, load_records
from cortiq_kernels.data.tokens import Tokenizer
from cortiq_kernels.data.windows import pack
from cortiq_kernels.model import names
from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.hf import ModelDir
from cortiq_kernels.reading import brief
from cortiq_kernels.recipes.errors import need, refuse
from cortiq_kernels.recipes.stopping import check

Progress = Callable[[dict[str, Any]], None]
T = TypeVar("T")


def silent(event: dict[str, Any]) -> None:
    """A `progress` that says nothing."""


class Ticks:
    """Progress of one phase: emits {"event": "tick", "phase", "done", "of"} for every call with the number done so
    far. Between two batches a run may be stopped (`stopping.check`).
    """

    def __init__(self, progress: Progress, phase: str, of: int):
        self.progress, self.phase, self.of = progress, phase, of

    def __call__(self, done: int) -> None:
        self.progress({"event": "tick", "phase": self.phase, "done": done, "of": self.of})
        check()


class Joined(Sequence[T]):
    """Two sequences as one, without building either."""

    def __init__(self, first: Sequence[T], second: Sequence[T]):
        self.first, self.second = first, second

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < len(self):
            raise IndexError(i)
        n = len(self.first)
        return self.first[i] if i < n else self.second[i - n]


class Packed(NamedTuple):
    """Records in batches, and sentences about them."""

    dataset: Dataset
    train: Batches
    val: Batches
    notes: list[str]


class Packing(Protocol):
    """The settings that decide the batches."""

    @property
    def recipe(self) -> str: ...
    @property
    def data(self) -> Path: ...
    @property
    def loss_on(self) -> str: ...
    @property
    def window(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def packing(self) -> str: ...


def packed_for(model: ModelDir, cfg: Packing) -> Packed:
    """Train and val records of `cfg.data`, tokenised for `model` and packed into batches. InputError or DataError."""
    dataset, pad_id = load_for(model, cfg.data, cfg.loss_on, ("train", "val"))
    packed = {s: pack(dataset.split(s), cfg.window, cfg.packing, pad_id) for s in ("train", "val")}
    windows = len(packed["train"].windows)
    need(
        not 0 < windows < cfg.batch, f"{cfg.recipe}: batch", f"{cfg.batch} windows of {cfg.window} tokens",
        f"at most {windows}, which is what the train records fill",
        f"Set --batch {windows}, or lower --window for more windows.",
    )  # fmt: skip
    train = train_batches(packed["train"].windows, cfg.batch)
    val = eval_batches(packed["val"].windows, cfg.batch, pad_id=pad_id)
    notes = list(dataset.notes)
    if cfg.packing == "records" and (cut := packed["train"].cut + packed["val"].cut):
        notes.append(
            f"{cut} records are longer than the window of {cfg.window} tokens and were cut; each piece starts fresh"
        )
    if train.dropped:
        notes.append(f"{train.dropped} train windows beyond the last full batch are not used")
    return Packed(dataset, train, val, notes)


class Records(NamedTuple):
    """Loaded records and the id that pads them."""

    dataset: Dataset
    pad_id: int


def load_for(model: ModelDir, data: Path, loss_on: str, splits: Sequence[str]) -> Records:
    """Records of `splits`, tokenised for `model`; a directory without a tokenizer does for records of ids."""
    tokenizer, vocab = tokenizer_of(model), model.geometry.vocab
    eos = tokenizer.eos_ids if tokenizer else model.geometry.eos_ids
    for i in eos:
        need(
            0 <= i < vocab, f"model {str(model.path)!r}: eos_token_id", brief(i), f"an id below its {vocab} tokens",
            "Mend generation_config.json, or take the tokenizer of this model.",
        )  # fmt: skip
    try:
        dataset = load_records(data, tokenizer, loss_on=loss_on, splits=splits, vocab=vocab)
    except NoTokenizer as e:
        raise refuse(
            f"model {str(model.path)!r}",
            "no tokenizer.json",
            f"one, since {data} holds text ({str(e).split(':')[0]})",
            "Copy the tokenizer's files into the directory, or use records of token ids.",
        ) from None
    return Records(dataset, eos[0] if eos else 0)


def fit_shape(records: Sequence[Record], window: int, batch: int) -> tuple[int, int]:
    """(window, batch) no larger than the records can fill: what is beyond them would be padding only.

    For passes whose result does not depend on either (fold, score). The window is kept at a multiple of 64.
    """
    tokens = sum(len(r.ids) for r in records)
    window = min(window, max(64, -(-tokens // 64) * 64))
    return window, min(batch, max(1, 2 * -(-tokens // window)))  # a window that is left is more than half full


def tokenizer_of(model: ModelDir) -> Tokenizer | None:
    """The directory's tokenizer, or None without a tokenizer.json."""
    return Tokenizer(model.path) if os.path.lexists(model.path / "tokenizer.json") else None


def check_same_tokens(a: ModelDir, b: ModelDir, a_name: str, b_name: str) -> None:
    """Refuse two models whose token ids do not mean the same: sizes of vocabularies, and tokenizers."""
    if a.geometry.vocab != b.geometry.vocab:
        raise refuse(
            f"{a_name} and {b_name}",
            f"vocabularies of {a.geometry.vocab} ({a.path}) and {b.geometry.vocab} ({b.path})",
            "one vocabulary",
            "Use models of one family.",
        )
    ours, theirs = tokenizer_of(a), tokenizer_of(b)
    if ours and theirs and ours.fingerprint != theirs.fingerprint:
        raise refuse(
            f"{a_name} and {b_name}",
            f"different tokenizers ({a.path / 'tokenizer.json'} and {b.path / 'tokenizer.json'})",
            "the same one",
            "Their token ids would not mean the same. Use models of one family.",
        )


def layer_parameters(g: Geometry, i: int) -> int:
    """Parameters of layer i."""
    return sum(math.prod(s.shape) for s in names.layer_slots(g, i))


def geometry_summary(g: Geometry) -> dict[str, Any]:
    """Sizes for people and logs."""
    f = sorted(set(g.intermediate))
    return {
        "layers": g.n_layers,
        "loops": g.num_loops,
        "full_attention_layers": sum(g.is_full(i) for i in range(g.n_layers)),
        "hidden": g.hidden,
        "ffn": f[0] if len(f) == 1 else list(g.intermediate),
        "vocab": g.vocab,
        "tied": g.tied,
        "delta_heads": [g.dk, g.dv],
        "attention_head": g.hd,
        "parameters": names.parameter_count(g),
    }
