"""A recipe's settings as TOML: read for `--config FILE`, written by `--print-config`.

    lr = 2e-5                      a file with the settings of one recipe; or
    [heal]                         tables, one a recipe, of which the command takes its own
    lr = 2e-5

Keys are the fields of the recipe's config (`-` and `_` are the same). Paths are relative to the directory the command
runs in, as they are on the command line. TOML has no null: "None" stands for it where a setting may be none.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cortiq_kernels._version import __version__
from cortiq_kernels.reading import Unreadable, read_text
from cortiq_kernels.recipes.errors import refuse
from cortiq_kernels.recipes.settings import convert, kinds

LARGEST = 1 << 20  # bytes of a settings file


def read_toml(path: Path | None, name: str, config: type, recipes: Collection[str]) -> dict[str, Any]:
    """Settings of recipe `name` from a TOML file; {} without one.

    Raises InputError for a file that cannot be read, for a key that is unknown (with the nearest one) or given twice,
    for a value of the wrong kind (with file, key and what is expected), and for a file without a table for `name`.
    """
    if path is None:
        return {}
    fields = kinds(config)
    values: dict[str, Any] = {}
    for key, value in _table(path, _parse(path), name, recipes).items():
        field, where = key.replace("-", "_"), f"{path}: {key}"
        if field not in fields:
            near = difflib.get_close_matches(field, fields, 1, 0.0)
            raise refuse(where, "an unknown setting", f"a setting of {name}", f"Did you mean {near[0]}?")
        if field in values:
            raise refuse(where, "a setting for the second time", "it once", "Remove one.")
        values[field] = convert(value, fields[field], where, "Mend the value.")
    return values


def _parse(path: Path) -> dict[str, Any]:
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        return tomllib.loads(read_text(path, LARGEST, may_be_empty=True))
    except Unreadable as e:
        raise refuse(f"--config {path}", e.got, "a TOML file that can be read", "Name another.") from None
    except (ValueError, RecursionError) as e:
        raise refuse(f"--config {path}", f"a file that cannot be read ({e})", "TOML", "Mend it.") from None


def _table(path: Path, whole: dict[str, Any], name: str, recipes: Collection[str]) -> dict[str, Any]:
    """The settings of `name`: its table, or all of a file without tables."""
    tables = [k for k, v in whole.items() if isinstance(v, dict)]
    loose = [k for k in whole if k not in tables]
    for table in tables:
        if table not in recipes:
            near = difflib.get_close_matches(table, recipes, 1, 0.0)[0]
            raise refuse(f"{path}: [{table}]", "an unknown table", ", ".join(recipes), f"Did you mean [{near}]?")
    if not tables:
        return whole
    if loose:
        got = f"{loose[0]} outside of the tables"
        raise refuse(str(path), got, f"every setting in a table such as [{name}]", "Move it into one.")
    if name not in tables:
        got = f"no table [{name}], only {', '.join(f'[{t}]' for t in tables)}"
        raise refuse(str(path), got, f"settings of {name}", f"Add [{name}], or leave --config out.")
    return whole[name]


def toml_text(name: str, cfg: Any) -> str:
    """A TOML file with every setting of `cfg`, which `read_toml` turns into an equal config."""
    lines = [f"# cortiq {name} --config THIS_FILE      (cortiq_kernels {__version__})", f"[{name}]"]
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if value is None and f.default is None:  # absent is None
            lines.append(f"# {f.name} is not set")
        else:
            lines.append(f"{f.name} = {_toml(value)}")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    # A TOML basic string is a JSON string, but for DEL, which JSON leaves as it is.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
