"""One row of a file -> an Example: the fields checked, nothing tokenised yet.

A row is exactly one of
    {"text"}                     everything from token 1 on is scored
    {"prompt", "completion"}     the completion is scored
    {"messages": [...]}          the last assistant message is scored; optional "tools" go to the chat template
    {"ids", "first_target"}      token ids, scored from first_target on
with optional "rid", "split" (train, val or test), "category", "weight" (>= 0). Fields that are null count as absent;
any other field is ignored, and the report names it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cortiq_kernels.data.files import Row, shown
from cortiq_kernels.data.record import SPLITS, split_of

KINDS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "completion": ("prompt", "completion"),
    "messages": ("messages",),
    "ids": ("ids", "first_target"),
}
_CONTENT = frozenset(f for fields in KINDS.values() for f in fields) | {"tools"}
_META = frozenset(("rid", "split", "category", "weight"))
_EXPECTED = '{"text"}, {"prompt", "completion"}, {"messages"} or {"ids", "first_target"}'


class Problem(ValueError):
    """What is wrong with one line, and how to fix it."""


class Example(NamedTuple):
    """One checked line of the input: its fields, and its content by kind (text, prompt, messages or ids)."""

    line: int
    rid: str
    split: str
    category: str | None
    weight: float
    kind: str
    content: dict[str, Any]

    def canonical(self) -> bytes:
        """The record as the data hash sees it: sorted-key JSON of what it means, whatever file format it came from."""
        meta = [self.rid, self.split, self.category, self.weight, self.content]
        return json.dumps(meta, sort_keys=True, separators=(",", ":")).encode() + b"\n"

    def content_digest(self) -> bytes:
        """16 bytes that are equal for equal content, under whatever rid, split, category or weight."""
        content = {k: v for k, v in self.content.items() if k != "first_target"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()[:16]


def parse(row: Row) -> Example:
    """Check one row. Problem says what, got, expected and how to fix."""
    if row.problem:
        raise Problem(row.problem)
    fields = {k: v for k, v in row.fields.items() if v is not None}
    kind = _kind(fields)
    rid = fields.get("rid", str(row.line))
    if not isinstance(rid, str) or not rid:
        raise Problem(f'"rid" is {shown(rid)}; expected a non-empty string: write it in quotes')
    split = fields.get("split")
    if split is not None and split not in SPLITS:
        raise Problem(f'"split" is {shown(split)}; expected train, val or test, or no such field')
    category = fields.get("category")
    if category is not None and not isinstance(category, str):
        raise Problem(f'"category" is {shown(category)}; expected a string')
    for name, text in (("rid", rid), ("category", category or ""), *(("field name", k) for k in fields)):
        _check_text(name, text)
    content = _CHECKS[kind](fields)
    return Example(row.line, rid, split or split_of(rid), category, _weight(fields.get("weight", 1.0)), kind, content)


def ignored_fields(row: Row) -> set[str]:
    """Names of fields that mean nothing here."""
    return {k for k, v in row.fields.items() if v is not None} - _CONTENT - _META


def _kind(fields: dict[str, Any]) -> str:
    kinds = [kind for kind, names in KINDS.items() if any(n in fields for n in names)]
    if not kinds:
        got = ", ".join(sorted(fields)) or "none"
        raise Problem(f"has no content field (fields: {got}); expected {_EXPECTED}")
    if len(kinds) > 1:
        got = ", ".join(n for kind in kinds for n in KINDS[kind] if n in fields)
        raise Problem(f"is ambiguous: it has {got}; expected only one of {_EXPECTED}: remove the others")
    return kinds[0]


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        raise Problem(f'has no "{name}"; expected {_EXPECTED}')
    if not isinstance(value, str):
        hint = '; a conversation goes into "messages"' if isinstance(value, list) else ""
        raise Problem(f'"{name}" is {shown(value)}; expected a string{hint}')
    _check_text(name, value)
    return value


def _check_text(name: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as e:
        raise Problem(f'"{name}" holds a lone surrogate at character {e.start}; expected valid Unicode') from None


def _weight(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise Problem(f'"weight" is {shown(value)}; expected a finite number >= 0')
    if value > float(np.finfo(np.float32).max) or (np.float32(value) == 0) != (value == 0):
        raise Problem(f'"weight" is {shown(value)}; expected a number that float32 can hold')
    return float(value)


def _check_messages(fields: dict[str, Any]) -> dict[str, Any]:
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise Problem(f'"messages" is {shown(messages)}; expected a non-empty list of {{"role", "content"}}')
    for i, m in enumerate(messages):
        if not isinstance(m, dict):
            raise Problem(f'"messages"[{i}] is {shown(m)}; expected an object with "role" and "content"')
        if not isinstance(m.get("role"), str):
            raise Problem(f'"messages"[{i}] has role {shown(m.get("role"))}; expected a string such as "user"')
        if not isinstance(m.get("content"), (str, list, type(None))):
            raise Problem(f'"messages"[{i}] has content {shown(m["content"])}; expected a string or a list of parts')
    content: dict[str, Any] = {"messages": [{k: v for k, v in m.items() if v is not None} for m in messages]}
    if tools := fields.get("tools"):
        if not isinstance(tools, list):
            raise Problem(f'"tools" is {shown(tools)}; expected a list of JSON schemas')
        content["tools"] = tools
    try:
        json.dumps(content)
    except (TypeError, ValueError) as e:  # parquet can hold bytes and dates
        raise Problem(
            f'"messages" or "tools" hold a value that is not JSON ({e}); expected strings, numbers, lists'
        ) from e
    return content


def _check_ids(fields: dict[str, Any]) -> dict[str, Any]:
    ids, first = fields.get("ids"), fields.get("first_target")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise Problem(f'"ids" is {shown(ids)}; expected a list of token ids (integers)')
    if type(first) is not int or first < 0:
        raise Problem(
            f'"first_target" is {shown(first)}; expected an integer >= 0: the index of the first scored token '
            "(0 scores all that can be predicted)"
        )
    return {"ids": ids, "first_target": first}


_CHECKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "text": lambda f: {"text": _text(f, "text")},
    "completion": lambda f: {"prompt": _text(f, "prompt"), "completion": _text(f, "completion")},
    "messages": _check_messages,
    "ids": _check_ids,
}
