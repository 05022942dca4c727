"""Arguments of a recipe -> its config and the flags that every recipe has.

The flags are the fields of the config; a boolean is --name or --no-name, a list takes the words up to the next flag.
tyro writes the help from the same fields. Values follow the rules of `settings.convert`, those of TOML files too, and
every refusal is one line: what, got, expected, how to fix.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import typing
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cortiq_kernels.cli_config import read_toml
from cortiq_kernels.recipes.errors import refuse
from cortiq_kernels.recipes.settings import about, check_values, convert, flag_of, kinds, optional, required


class Flags(NamedTuple):
    """The flags that every recipe has; the order is that of the help."""

    config: Path | None = None
    print_config: bool = False
    dry_run: bool = False
    json: bool = False
    quiet: bool = False


_HELP = {
    "config": "TOML file with any of these settings; flags override it",
    "print_config": "print a TOML file of all settings, which --config takes, and stop",
    "dry_run": "check everything, show sizes, memory, steps, device and backends, and stop",
    "json": "print the result as one JSON object",
    "quiet": "no progress on stderr",
}


def parse(name: str, config: type, args: list[str], recipes: Collection[str]) -> tuple[Any, Flags]:
    """(config, flags) of a recipe's arguments; imports no torch.

    SystemExit(0) for --help. InputError for everything that cannot be used, and for what `config.check` refuses.
    """
    if {"-h", "--help"} & set(args):
        show_help(name, config)
    given = check_flags(name, config, args)
    values = read_toml(given.get("config"), name, config, recipes)
    flags = Flags(**{option: given.pop(option) for option in Flags._fields if option in given})
    missing = [flag_of(f) for f in required(config) if f not in values and f not in given]
    if missing:
        fix = f"Give it, on the command line or with --config. See cortiq {name} --help."
        raise refuse(f"cortiq {name}", f"no {' and no '.join(missing)}", "a value for each", fix)
    settings = config(**values | given)
    check_values(name, settings)
    settings.check()
    return settings, flags


def show_help(name: str, config: type) -> NoReturn:
    """Print the help, which tyro lays out from the config's fields and what their docstrings say; SystemExit(0)."""
    import tyro

    def field(name: str, kind: Any, text: str, default: Any, marker: Any = None) -> tuple[str, Any, Any]:
        without, none = optional(kind)
        arg = tyro.conf.arg(
            help=text,
            metavar=_metavar(without) if none else None,  # tyro's own is {None}|PATH
            help_behavior_hint="" if default in (None, False) else None,  # the text says what happens then
        )
        annotated: Any = typing.Annotated[kind, arg]
        return name, marker[annotated] if marker else annotated, dataclasses.field(default=default)

    said, types = about(config), kinds(config)
    alone = typing.cast(Any, tyro.conf.FlagCreatePairsOff)  # no --no-json
    fields = [
        field(f.name, types[f.name], said[f.name], tyro.MISSING if f.name in required(config) else f.default)
        for f in dataclasses.fields(config)
    ]
    fields += [field(f, kind, _HELP[f], Flags._field_defaults[f], alone) for f, kind in kinds(Flags).items()]
    command = dataclasses.make_dataclass("Command", fields, frozen=True)
    tyro.cli(command, prog=f"cortiq {name}", description=inspect.cleandoc(config.__doc__ or ""), args=["--help"])
    raise AssertionError("tyro returned from --help")


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    return {Path: "PATH", int: "INT", float: "FLOAT"}.get(kind, "TEXT")


def check_flags(name: str, config: type, args: list[str]) -> dict[str, Any]:
    """Field -> value of every flag in `args`, a field's last one where it is given twice.

    Raises InputError for an unknown flag (with the nearest), a word that belongs to no flag, a value that is missing
    or of the wrong kind, and for a list or --config given twice.
    """
    settings, common = kinds(config), kinds(Flags)
    given: dict[str, Any] = {}
    for flag, values in _words(name, args):
        field, inline = _field(name, flag, {**settings, **common})
        kind = optional({**settings, **common}[field])[0]
        values = [*inline, *values]
        if kind is bool:
            if values:
                off = f", or {flag_of('no_' + field)}" if field in settings else ""
                raise refuse(flag_of(field), repr(values[0]), "no value", f"Write {flag_of(field)} alone{off}.")
            given[field] = not flag.startswith("--no")
            continue
        listed = typing.get_origin(kind) is tuple
        if not values:
            raise refuse(flag_of(field), "no value", "one or more" if listed else "one", "Write it after the flag.")
        if (listed or field == "config") and field in given:
            fix = "Write all values after one." if listed else "Put all settings into one file."
            raise refuse(flag_of(field), "the flag twice", "it once", fix)
        if not listed and len(values) > 1:
            fix = "Put a value with spaces in quotes; every other value follows its own flag."
            raise refuse(f"cortiq {name}", repr(values[1]), f"a flag after {flag_of(field)} {values[0]}", fix)
        fix = f"See cortiq {name} --help."
        value = values if listed else values[0]
        given[field] = convert(value, {**settings, **common}[field], flag_of(field), fix, text=True)
    return given


def _words(name: str, args: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(flag, the words up to the next flag); a negative number is no flag."""
    flag, values = "", []
    for word in [*args, "--"]:
        if not word.startswith("-") or word == "-" or re.match(r"-(\d|\.\d|inf|nan)", word.lower()):
            if not flag:
                fix = f"Values follow their flag. See cortiq {name} --help."
                raise refuse(f"cortiq {name}", repr(word), "a flag", fix)
            values.append(word)
            continue
        if flag:
            yield flag, values
        flag, values = word, []


def _field(name: str, word: str, known: dict[str, Any]) -> tuple[str, list[str]]:
    """(field, [value]) of `--flag=value`, (field, []) of `--flag`."""
    flag, equals, value = word.partition("=")
    field = flag.removeprefix("--").replace("-", "_")
    inline = [value] if equals else []
    if flag.startswith("--") and field in known:
        return field, inline
    positive = field.removeprefix("no_")
    switch = positive in known and optional(known[positive])[0] is bool and positive not in Flags._fields
    if flag.startswith("--no") and switch:
        return positive, inline
    near = difflib.get_close_matches(field.lstrip("_"), known, 1, 0.4)
    fix = f"Did you mean {flag_of(near[0])}?" if near else f"See cortiq {name} --help."
    raise refuse(f"cortiq {name}", repr(flag), f"a flag of {name}", fix)
