"""Hypothesis strategies of files that are almost right: documents with nasty values at random places, damaged bytes.

A document is edited as a tree (keys removed, renamed, doubled; values replaced by `NASTY` ones, wrapped in depth), then
written by `render`, which can also say what no JSON library would: a key twice, NaN, half a surrogate pair, a number of
5,000 digits, lists 100,000 deep.
"""

from __future__ import annotations

import copy
import json
from typing import Any, NamedTuple

from hypothesis import strategies as st


class Raw(NamedTuple):
    """A piece of a document, as it is written."""

    text: str


class Twice(NamedTuple):
    """The value of a key that is written a second time, with `again`."""

    value: Any
    again: Any


def deep(n: int, inside: str = "") -> Raw:
    """Lists, `n` levels deep."""
    return Raw("[" * n + inside + "]" * n)


NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**63) - 1,
    10**12, 10**30, 10**400, -(10**400), 0.0, -0.0, 0.5, 1.5, -2.5, 1e-300, 1e-46, 1e38, 1e300, 5e-324, Raw("1e999"),
    Raw("-1e999"), Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("-" + "1" * 4200),
    Raw("1.0"), "", " ", "0", "1", "none", "null", "default", "\x00", "a\x00b", "../x", "/dev/zero", "/", ".",
    "..", "x" * 300, "x" * 100_000, "\u2028\u0085", "\ufeff", "\u202e", "\x1b[31m", "a\nb", "a\r\nb", Raw('"\\ud800"'),
    Raw('"\\udfff\\ud800x"'), "\U0001f600", "é", [], {}, [[]], [{}], [None], [1], ["a"], {"a": 1}, {"": {}},
    {"type": "x"}, {"content": 5}, [1, "a", None, {}], [0] * 1000, {str(i): i for i in range(300)}, deep(30), deep(70),
    deep(900), Raw('{"a":' * 200 + "1" + "}" * 200),
]  # fmt: skip
#: what no parser can read
BROKEN = [Raw(""), Raw("["), Raw("undefined"), Raw("'a'"), Raw("/*x*/1"), Raw("01"), Raw("0x10"), Raw("9" * 5000),
          deep(100_000), Raw('{"a":' * 3000 + "1" + "}" * 3000)]  # fmt: skip
KEYS = ("", "a", "__metadata__", "__class__", "\x00", "type", "content", "x" * 300, "y" * 100_000, "\u2028", "é", "0")


def render(value: Any) -> str:
    """JSON text, with the liberties of `Raw` and `Twice`."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        parts = []
        for k, v in value.items():
            for one in v if isinstance(v, Twice) else (v,):
                parts.append(f"{json.dumps(k)}: {render(one)}")
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, Twice):
        return render(value.value)
    if isinstance(value, list):
        return "[" + ", ".join(map(render, value)) + "]"
    return json.dumps(value)


def _places(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """(container, key or index) of every value in a tree; of a long container only some."""
    if depth > 6 or not isinstance(value, dict | list) or isinstance(value, tuple):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if len(keys) > 40:
        keys = keys[:15] + keys[-15:]
    here = [(value, k) for k in keys]
    return here + [p for k in keys for p in _places(value[k], depth + 1)]


@st.composite
def documents(draw: st.DrawFn, base: Any, values: tuple[Any, ...] = ()) -> Any:
    """`base` with one to three edits; `values` are nasty ones of its own."""
    doc = copy.deepcopy(base)
    pool = [*NASTY, *values * 4]
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        places = _places(doc)
        if not places:
            break
        box, key = places[draw(st.integers(0, len(places) - 1))]
        from_pool = BROKEN if draw(st.integers(0, 19)) == 0 else pool
        new = copy.deepcopy(from_pool[draw(st.integers(0, len(from_pool) - 1))])
        how = draw(st.integers(0, 9))
        if how <= 5:
            box[key] = new
        elif how == 6:
            del box[key]
        elif isinstance(box, list):
            box[key : key + 1] = [box[key], new] if how == 7 else [[box[key]]]
        elif how == 7:
            box[key] = Twice(box[key], draw(st.sampled_from([new, box[key]])))
        elif how == 8:
            box[KEYS[draw(st.integers(0, len(KEYS) - 1))]] = box.pop(key)
        else:
            box[KEYS[draw(st.integers(0, len(KEYS) - 1))]] = new
    return doc


_INSERTED = (b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\n", b"\r", b"\xe2\x80\xa8", b"[" * 2000,
             b"}", b'"')  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, raw: bytes) -> bytes:
    """`raw` with its bytes damaged: flipped, cut, doubled, others between, as UTF-16, behind a mark, or nothing."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(raw) - 1, 0)))
        how = draw(st.integers(0, 9))
        if how <= 3 and raw:
            raw = raw[:at] + bytes([raw[at] ^ (1 << draw(st.integers(0, 7)))]) + raw[at + 1 :]
        elif how == 4:
            raw = raw[:at]
        elif how == 5:
            raw = raw[:at] + _INSERTED[draw(st.integers(0, len(_INSERTED) - 1))] + raw[at:]
        elif how == 6:
            raw = raw[:at] + raw[at + draw(st.integers(1, 20)) :]
        elif how == 7:
            raw = raw + raw[at:]
        elif how == 8:
            raw = b"\xef\xbb\xbf" + raw
        else:
            choice = (b"", b"\x00" * 64, raw.decode("utf-8", "replace").encode("utf-16"),
                      b"version https://git-lfs.github.com/spec/v1\n")  # fmt: skip
            raw = choice[draw(st.integers(0, len(choice) - 1))]
    return raw


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
ANY_JSON = st.recursive(
    _SCALARS, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=8), v, max_size=4), max_leaves=12
)


def files(base: Any, values: tuple[Any, ...] = ()) -> st.SearchStrategy[bytes]:
    """Bytes of a JSON file: mostly an edited `base`, sometimes with damaged bytes, seldom any JSON at all."""
    whole = render(base).encode()
    edited = documents(base, values).map(lambda d: render(d).encode("utf-8", "surrogatepass"))
    anything = ANY_JSON.map(lambda v: json.dumps(v).encode())
    return st.one_of(edited, edited, edited, damaged(whole), edited.flatmap(damaged), anything)
