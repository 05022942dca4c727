"""A file of records -> Dataset: every line checked, tokenised and counted before any work starts.

All lines that cannot be used are found first and named together in one DataError (the first few with their reasons).
A repeated rid is refused. What is legal but worth knowing is counted and said in `notes`: records with nothing
scored, the same content in two splits, control tokens in message text, boundaries found by character offsets, fields
that were ignored.

Test records are opened by `score` alone: only the splits asked for are tokenised and kept, the others are just
counted and compared. The data hash is the sha256 over all records of the file, in file order, of their canonical
content (rid, split, category, weight, content as sorted-key JSON): a byte order mark, CRLF, spacing, key order,
ignored fields and the file format do not change it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from cortiq_kernels.data.encode import LOSS_ON, Encoded, encode_examples
from cortiq_kernels.data.examples import Example, Problem, ignored_fields, parse
from cortiq_kernels.data.files import Row, read_rows
from cortiq_kernels.data.record import SPLITS, DataError, Record, fnv1a64
from cortiq_kernels.data.tokens import Tokenizer
from cortiq_kernels.reading import brief

_SHOWN = 5  # problems spelled out in one error
_CHUNK = 256  # records tokenised together

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Dataset:
    """records of the splits that were asked for, in file order; `split(name)` gives one of them in its own order.

    data_hash  sha256, hex, of the file's records
    token_hash sha256, hex, of the loaded records as tokens (rid, weight, first_target, ids): a tokenizer or template
               that changed, or a template that writes today's date, changes this one alone
    notes      sentences for the report
    counts     of the file: records, train, val, test, overlap (records whose content is also in an earlier split);
               of the loaded records: tokens, targets, unscored, by_characters, control_tokens, no_reply
    """

    path: str
    records: list[Record]
    splits: tuple[str, ...]
    data_hash: str
    token_hash: str
    notes: list[str]
    counts: dict[str, int]

    def split(self, name: str) -> list[Record]:
        """train: by FNV-1a-64(rid), stable; val and test: in file order."""
        if name not in self.splits:
            raise DataError(
                f"{self.path}: split {name!r} was not loaded; load_records(..., splits={self.splits + (name,)})"
            )
        found = [r for r in self.records if r.split == name]
        return sorted(found, key=lambda r: fnv1a64(r.rid)) if name == "train" else found


def load_records(
    path: str | Path,
    tokenizer: Tokenizer | None,
    *,
    loss_on: str = "completion",
    splits: Sequence[str] = ("train", "val"),
    vocab: int | None = None,
) -> Dataset:
    """Read one file.

    tokenizer  may be None when every record is {"ids", "first_target"}
    loss_on    "completion": what examples.py says is scored; "all": everything from token 1 on
    splits     which splits to tokenise and keep
    vocab      the model's vocabulary; ids at or above it are refused. Default: the tokenizer's
    """
    path = Path(path)
    if loss_on not in LOSS_ON:
        raise DataError(f"load_records: loss_on is {loss_on!r}; expected one of {', '.join(LOSS_ON)}")
    if unknown := [s for s in splits if s not in SPLITS]:
        raise DataError(f"load_records: unknown split {unknown[0]!r}; expected {', '.join(SPLITS)}")
    if vocab is None and tokenizer is not None:
        vocab = tokenizer.vocab
    reader = _Reader(path)
    records: list[Record] = []
    tally = _Tally()
    for chunk in _chunks(reader.examples(), _CHUNK):
        wanted = [e for e in chunk if e.split in splits]
        for example, result in zip(wanted, encode_examples(wanted, tokenizer, loss_on, vocab), strict=True):
            if isinstance(result, Problem):
                reader.problems.append((example.line, str(result)))
                continue
            record = Record(
                example.rid,
                example.split,
                result.ids,
                result.first_target,
                example.category,
                example.weight,
                example.line,
            )
            records.append(record)
            tally.add(record, result)
    reader.raise_problems()
    if records and not tally.counts["targets"]:
        raise DataError(
            f"{path}: none of the {len(records)} records has a scored token, so there is nothing to learn or measure; "
            "expected a first_target below the record's length, a completion that is not empty, and a weight above 0"
        )
    notes = reader.notes() + tally.notes()
    if tokenizer is not None and not tokenizer.eos_ids and any(len(r.ids) for r in records):
        notes.append("the model directory names no eos token, so none was appended")
    return Dataset(
        path=str(path),
        records=records,
        splits=tuple(splits),
        data_hash=reader.hash.hexdigest(),
        token_hash=tally.hash.hexdigest(),
        notes=notes,
        counts={**reader.counts, **tally.counts},
    )


class _Reader:
    """Parses rows, and keeps what is known of the whole file: hash, problems, rids, contents per split."""

    def __init__(self, path: Path):
        self.path = path
        self.hash = hashlib.sha256()
        self.problems: list[tuple[int, str]] = []
        self.counts = dict.fromkeys(("records", *SPLITS, "overlap"), 0)
        self._lines: dict[str, int] = {}
        self._ignored: set[str] = set()
        self._contents: dict[str, dict[bytes, str]] = {s: {} for s in SPLITS}  # digest -> a rid

    def examples(self) -> Iterator[Example]:
        for row in read_rows(self.path):
            self.counts["records"] += 1
            if (example := self._parse(row)) is not None:
                yield example
        if not self.counts["records"]:
            raise DataError(f"{self.path}: holds no records; expected at least one JSON object a line")

    def _parse(self, row: Row) -> Example | None:
        try:
            example = parse(row)
        except Problem as problem:
            self.problems.append((row.line, str(problem)))
            return None
        if (first := self._lines.setdefault(example.rid, row.line)) != row.line:
            self.problems.append((row.line, f"repeats the rid {example.rid!r} of line {first}; expected unique rids"))
            return None
        self._ignored |= ignored_fields(row)
        self.hash.update(example.canonical())
        self.counts[example.split] += 1
        self._contents[example.split].setdefault(example.content_digest(), example.rid)
        return example

    def raise_problems(self) -> None:
        if not self.problems:
            return
        self.problems.sort()
        lines = [f"line {line}: {brief(what, 500)}" for line, what in self.problems[:_SHOWN]]
        if (more := len(self.problems) - _SHOWN) > 0:
            lines.append(f"and {more} more")
        n = len(self.problems)
        head = f"{self.path}: {n} of {self.counts['records']} records cannot be used; fix or remove the lines"
        raise DataError("\n  ".join([head, *lines]))

    def notes(self) -> list[str]:
        notes = []
        for a, b in (("train", "val"), ("train", "test"), ("val", "test")):
            both = [rid for digest, rid in self._contents[b].items() if digest in self._contents[a]]
            self.counts["overlap"] += len(both)
            if both:
                notes.append(
                    f"{len(both)} {b} {_records(both)} the same content as a {a} record, "
                    f"so {b} is not held out from {a}"
                )
        if self._ignored:
            notes.append(f"fields that mean nothing here were ignored: {', '.join(sorted(self._ignored))}")
        return notes


class _Tally:
    """Counts over the loaded records, and the sentences that they deserve."""

    def __init__(self) -> None:
        names = ("tokens", "targets", "unscored", "by_characters", "control_tokens", "no_reply")
        self.counts = dict.fromkeys(names, 0)
        self.hash = hashlib.sha256()
        self._unscored: list[str] = []
        self._control: list[str] = []
        self._no_reply: list[str] = []

    def add(self, record: Record, encoded: Encoded) -> None:
        self.hash.update(f"{record.rid}\0{record.weight!r}\0{record.first_target}\0{len(record.ids)}\0".encode())
        self.hash.update(record.ids.astype("<i4").tobytes())
        self.counts["tokens"] += len(record.ids)
        self.counts["targets"] += record.n_targets
        self.counts["by_characters"] += encoded.by_characters
        if not record.n_targets:
            self._unscored.append(record.rid)
        if encoded.no_reply:
            self._no_reply.append(record.rid)
        if encoded.control_tokens:
            self._control.append(record.rid)

    def notes(self) -> list[str]:
        self.counts["unscored"], self.counts["control_tokens"] = len(self._unscored), len(self._control)
        self.counts["no_reply"] = len(self._no_reply)
        notes = []
        if self._unscored:
            notes.append(f"{len(self._unscored)} {_records(self._unscored)} no scored token and only count as context")
        if self._control:
            notes.append(
                f"{len(self._control)} {_records(self._control)} control tokens in the text of a message; "
                "they become real tokens, as Hugging Face does by default, and do not move the scored part"
            )
        if self._no_reply:
            notes.append(
                f"{len(self._no_reply)} {_records(self._no_reply)} no reply at the end: where only replies are scored, "
                "the default of heal and score, they are refused"
            )
        if n := self.counts["by_characters"]:
            notes.append(
                f"in {n} record{'s' if n > 1 else ''} the prompt's tokens are not the first tokens of the whole; the "
                "scored part was found by character offsets"
            )
        return notes


def _records(rids: Sequence[str]) -> str:
    """'records (rids 'a', 'b', ...) have' for a sentence."""
    names = ", ".join(repr(r) for r in rids[:3]) + (", ..." if len(rids) > 3 else "")
    return f"record (rid {names}) has" if len(rids) == 1 else f"records (rids {names}) have"


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    it = iter(items)
    while chunk := list(islice(it, size)):
        yield chunk
