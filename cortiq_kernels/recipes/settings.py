"""What a recipe's setting may hold, by the type of its field: the same rules for flags, TOML files and Python.

No torch here: the command line needs it before anything heavy is imported.
"""

from __future__ import annotations

import ast
import dataclasses
import errno
import inspect
import itertools
import math
import os
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cortiq_kernels.recipes.errors import refuse

LARGEST = 2**31 - 1  # of sizes and counts: rows are numbered in int32
LARGEST_SEED = 2**63 - 1

_EXPECTED = {
    Path: "a path",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
}


def kinds(config: type) -> dict[str, Any]:
    """Field name -> type of a config dataclass."""
    return typing.get_type_hints(config)


def about(config: type) -> dict[str, str]:
    """Field name -> the docstring below it, in one line. Every field of a config has one."""
    body = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0]
    assert isinstance(body, ast.ClassDef)
    said = {}
    for field, text in itertools.pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            said[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return said


def optional(kind: Any) -> tuple[Any, bool]:
    """(`kind` without None, whether None was allowed)."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        parts = typing.get_args(kind)
        return next(p for p in parts if p is not type(None)), type(None) in parts
    return kind, False


def expected(kind: Any) -> str:
    """A type in words: "an integer", "'layers' | 'mlp'"."""
    kind, _ = optional(kind)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " | ".join(map(repr, parts))
    if origin is tuple:
        return f"a list (each {expected(parts[0])})"
    return _EXPECTED.get(kind, str(kind))


def convert(value: Any, kind: Any, where: str, fix: str, *, text: bool = False) -> Any:
    """`value`, from a TOML file or (`text`) from a flag, as a setting of type `kind`.

    Text becomes a path (a ~ in front the home directory: shells leave it in --out=~/x and in files); text of a flag
    also a number; an integer becomes a float where one is wanted; "None" is None where that is allowed. Raises
    InputError, which names `where`, for anything else, and for an empty path.
    """
    kind, none = optional(kind)
    if none and value == "None":
        return None
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(convert(v, parts[0], where, fix, text=text) for v in value)
    made = value
    if kind is Path and isinstance(value, str):
        if not value or "\0" in value:
            raise refuse(where, repr(value), expected(kind), fix)
        try:
            made = Path(value).expanduser() if value.startswith("~") else Path(value)
        except RuntimeError:
            raise refuse(where, f"{value!r}, the home of nobody known", expected(kind), fix) from None
    elif text and kind in (int, float):
        try:
            made = kind(value)
        except ValueError:
            raise refuse(where, repr(value), expected(kind), fix) from None
    elif kind is float and type(value) is int:
        made = float(value) if abs(value) <= LARGEST_SEED else math.inf
    if not fits(made, kind):
        raise refuse(where, repr(value), expected(kind), fix)
    return made


def fits(value: Any, kind: Any) -> bool:
    """Whether a value has the type `kind`; an integer does for a number, a boolean for neither."""
    kind, none = optional(kind)
    if value is None:
        return none
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return isinstance(value, str | int) and value in parts
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(v, parts[0]) for v in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def check_values(recipe: str, cfg: Any, *, seeds: Sequence[str] = ("seed",)) -> None:
    """Refuse what no setting takes: another type than the field's, a number that is not finite, an integer beyond
    int32 (beyond int64 in `seeds`), text or a path that is empty, a path that no system takes (not UTF-8, too long, a
    circle of symlinks). Raises `InputError` with the flag's name.
    """
    for name, kind in kinds(type(cfg)).items():
        value, flag = getattr(cfg, name), flag_of(name)
        what, fix = f"{recipe}: {name}", f"Set {flag}."
        if not fits(value, kind):
            raise refuse(what, repr(value), expected(kind), fix)
        for v in value if isinstance(value, tuple) else (value,):
            if isinstance(v, float) and not math.isfinite(v):
                raise refuse(what, v, "a finite number", fix)
            most = LARGEST_SEED if name in seeds else LARGEST
            if isinstance(v, int) and abs(v) > most:
                raise refuse(what, v, f"at most {most}", fix)
            if isinstance(v, str | Path) and (not str(v).strip() or "\0" in str(v)):
                raise refuse(what, repr(str(v)), expected(kind), fix)
            if isinstance(v, Path) and (why := _no_path(v)):
                raise refuse(what, f"{str(v)[:100]!r} ({why})", expected(kind), fix)


def check_least(recipe: str, cfg: Any, least: Mapping[str, float]) -> None:
    """Refuse a setting below its least value (None is no setting). Raises `InputError` with the flag's name."""
    for name, low in least.items():
        value = getattr(cfg, name)
        if value is not None and value < low:
            raise refuse(f"{recipe}: {name}", value, f"at least {low:g}", f"Set {flag_of(name)}.")


def _no_path(path: Path) -> str | None:
    """Why the system takes no such path, whether or not there is something; None when it does."""
    try:
        str(path).encode()
        path.stat()
    except UnicodeEncodeError:
        return "not UTF-8"
    except OSError as e:
        return os.strerror(e.errno) if e.errno in (errno.ENAMETOOLONG, errno.ELOOP) else None
    return None


def flag_of(name: str) -> str:
    """The flag of a field: train_from -> --train-from."""
    return "--" + name.replace("_", "-")


def required(config: type) -> list[str]:
    """Fields without a default."""
    return [
        f.name
        for f in dataclasses.fields(config)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
