"""The command line: `cortiq heal | score | fold`, and `cortiq env`.

    cortiq heal --student fold/ --teacher source/ --data records.jsonl --out healed/
    cortiq heal --config heal.toml --lr 2e-5 --dry-run

Flags come from the fields of a recipe's config. `--config FILE.toml` gives them values, which flags on the command line
override. Progress goes to stderr, the result to stdout (`--json`: one JSON object). Exit status: 0 done; 2 the
request was refused (one line on stderr says why, nothing was written); 1 the run failed; 128 + n stopped by signal n.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import json
import os
import signal
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cortiq_kernels._version import __version__
from cortiq_kernels.recipes.errors import TrainingFailed, refuse
from cortiq_kernels.recipes.fold_config import FoldConfig
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.outputs import log_path
from cortiq_kernels.recipes.score_config import ScoreConfig


class Recipe(NamedTuple):
    """A subcommand: its config class; the module with `run`, and where its plan is made."""

    config: type
    run: str
    plan: str


_PACKAGE = "cortiq_kernels.recipes."
RECIPES = {
    "heal": Recipe(HealConfig, _PACKAGE + "heal:run", _PACKAGE + "heal_plan:plan_heal"),
    "score": Recipe(ScoreConfig, _PACKAGE + "score:run", _PACKAGE + "score:plan_score"),
    "fold": Recipe(FoldConfig, _PACKAGE + "fold:run", _PACKAGE + "fold:plan_fold"),
}


class Stopped(BaseException):
    """SIGTERM or SIGINT arrived. Not an Exception, so nothing on the way swallows it."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's); returns the exit status."""
    args = sys.argv[1:] if argv is None else list(argv)
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        print(__version__)
        return 0
    if args[0] == "env":
        from cortiq_kernels import env

        return env.main(args[1:])
    if args[0] not in RECIPES:
        near = difflib.get_close_matches(args[0], [*RECIPES, "env"], 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return fail(f"cortiq: got {args[0]!r}; expected one of {', '.join(RECIPES)}, env.{hint} See cortiq --help.", 2)
    name, cfg = args[0], None
    # Read when torch loads its OpenMP: threads that wait for each other sleep instead of spinning, which on a machine
    # with another busy process makes a step several times longer.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        cfg, flags = parse(name, args[1:])
        with stop_on_signals():
            return execute(name, cfg, flags)
    except SystemExit as e:  # tyro printed its help, or what is wrong with a flag
        return e.code if isinstance(e.code, int) else 2
    except ValueError as e:
        return fail(str(e), 2)
    except Stopped as e:
        again = "Start it again with the same command."
        return fail(f"cortiq {name}: stopped by {e}; {output_state(cfg)}. {again}", 128 + e.number)
    except TrainingFailed as e:
        return fail(str(e), 1)
    except BrokenPipeError:  # whoever read the result went away; what was to be written is written
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - or the interpreter complains when it flushes at exit
        return 1
    except PermissionError as e:
        needed = "expected a file that you may read, or a place that you may write to. Check its owner and mode"
        return fail(f"cortiq {name}: {e.filename}: got 'permission denied'; {needed}; {output_state(cfg)}.", 2)
    except OSError as e:
        return fail(f"cortiq {name}: {e}; {output_state(cfg)}", 1)
    except (RuntimeError, MemoryError) as e:
        from cortiq_kernels import backend

        if backend.is_out_of_memory(e):
            why = str(e).split("\n")[0]
            return fail(f"cortiq {name}: out of memory ({why}); lower --batch or --window. No output was written.", 1)
        raise


class Flags(NamedTuple):
    """The flags that every recipe has."""

    dry_run: bool
    json: bool


def parse(name: str, args: list[str]) -> tuple[Any, Flags]:
    """(config, flags) of a recipe's arguments; imports no torch. SystemExit for --help and for unknown flags."""
    import tyro

    config, without_prefix = RECIPES[name].config, typing.cast(Any, tyro.conf.OmitArgPrefixes)
    values = read_toml(_config_file(args), name, config)
    required = {f.name for f in dataclasses.fields(config) if f.default is dataclasses.MISSING}
    defaults = config(**{f: tyro.MISSING for f in required} | values)
    fields: list[Any] = [
        ("settings", without_prefix[config], dataclasses.field(default=defaults)),
        _option("config", Path | None, None, "TOML file with any of these settings; flags override it", tyro),
        _option("dry_run", bool, False, "check everything, show sizes, memory, steps and device, and stop", tyro),
        _option("json", bool, False, "print the result as one JSON object", tyro),
    ]
    command = dataclasses.make_dataclass("Command", fields, frozen=True)
    markers = (tyro.conf.FlagCreatePairsOff,)
    summary = (config.__doc__ or "").split("\n")[0]
    parsed: Any = tyro.cli(command, prog=f"cortiq {name}", description=summary, args=args, config=markers)
    return parsed.settings, Flags(parsed.dry_run, parsed.json)


def _option(name: str, kind: Any, default: Any, text: str, tyro: Any) -> Any:
    return name, typing.Annotated[kind, tyro.conf.arg(help=text)], dataclasses.field(default=default)


def _config_file(args: list[str]) -> Path | None:
    """The value of --config, which must be known before the flags that it gives defaults to are parsed."""
    for i, arg in enumerate(args):
        if arg == "--config":
            if i + 1 == len(args):
                raise refuse("--config", "nothing", "a TOML file", "Name it after --config.")
            return Path(args[i + 1])
        if arg.startswith("--config="):
            return Path(arg.removeprefix("--config="))
    return None


def read_toml(path: Path | None, name: str, config: type) -> dict[str, Any]:
    """Settings of recipe `name` from a TOML file: its top level, or its table [name] where it has one.

    Keys are the config's fields (`-` and `_` are the same). InputError for a file that cannot be read, for an unknown
    key (with the nearest one), and for a value of the wrong kind.
    """
    if path is None:
        return {}
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise refuse(f"--config {path}", f"a file that cannot be read ({e})", "TOML", "Mend it.") from None
    table = table[name] if isinstance(table.get(name), dict) else {k: v for k, v in table.items() if k not in RECIPES}
    hints = typing.get_type_hints(config)
    values: dict[str, Any] = {}
    for key, value in table.items():
        field = key.replace("-", "_")
        if field not in hints:
            near = difflib.get_close_matches(field, hints, 1, 0.0)
            raise refuse(f"{path}: {key}", "an unknown setting", f"a setting of {name}", f"Did you mean {near[0]}?")
        values[field] = _convert(value, hints[field], f"{path}: {key}")
    return values


def _convert(value: Any, kind: Any, where: str) -> Any:
    """A TOML value as a config field of type `kind`."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _convert(value, next(p for p in parts if p is not type(None)), where)
    if origin is typing.Literal:
        if value in parts:
            return value
        raise refuse(where, repr(value), " | ".join(map(repr, parts)), "Choose one.")
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(v, parts[0], where) for v in value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    names = {
        Path: "a path in quotes",
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text in quotes",
    }
    expected = "a list" if origin is tuple else names.get(kind, str(kind))
    raise refuse(where, repr(value), expected, "Mend the value.")


def execute(name: str, cfg: Any, flags: Flags) -> int:
    """Run a recipe (or show its plan) with progress, run log and result; returns 0."""
    recipe = RECIPES[name]
    if flags.dry_run:
        plan = _load(recipe.plan)(cfg).describe()
        from cortiq_kernels.report import results

        print(json.dumps(_plain(plan), indent=2) if flags.json else results.plan_text(plan))
        return 0
    run = _load(recipe.run)
    from cortiq_kernels.recipes.provenance import settings
    from cortiq_kernels.report import results
    from cortiq_kernels.report.console import view_for
    from cortiq_kernels.report.runlog import RunLog

    path = log_path(name, cfg)
    with contextlib.ExitStack() as stack:
        listeners: list[Any] = [stack.enter_context(view_for(sys.stderr))]
        if path is not None:
            first = {"version": __version__, "recipe": name, "settings": settings(cfg)}
            listeners.append(stack.enter_context(RunLog(path, first)))

        def progress(event: Mapping[str, Any]) -> None:
            for listener in listeners:
                listener(dict(event))

        report = dataclasses.asdict(run(cfg, progress))
        if path is not None:
            listeners[-1]({"event": "done", **report})
    if flags.json:
        print(json.dumps(_plain({**report, "log": str(path) if path else None}), indent=2))
    else:
        print(results.result_text(name, cfg, report, str(path) if path else None))
    return 0


def output_state(cfg: Any) -> str:
    """What a run that ended early left: outputs appear whole or not at all, perhaps just before it was stopped."""
    out = getattr(cfg, "out", None)
    if out is not None and (out.is_file() or out.is_dir() and any(out.iterdir())):
        return f"{out} is complete, or as it was before"
    return "no output was written"


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Within the context SIGINT and SIGTERM raise `Stopped`, so that every `finally` cleans up."""

    def stop(number: int, frame: object) -> None:
        for s in before:  # a second signal while cleaning up must not interrupt the cleaning
            signal.signal(s, signal.SIG_IGN)
        raise Stopped(number)

    before = {}
    try:
        for s in (signal.SIGINT, signal.SIGTERM):
            before[s] = signal.signal(s, stop)
    except ValueError:  # not the main thread: the program around us handles signals
        pass
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def fail(text: str, status: int) -> int:
    """One line on stderr; returns the status."""
    line = "; ".join(part.strip() for part in text.split("\n") if part.strip())
    print(line, file=sys.stderr)
    return status


def usage() -> str:
    """Text of `cortiq --help`."""
    lines = ["cortiq RECIPE [flags]      (cortiq RECIPE --help lists the flags)", ""]
    for name, recipe in RECIPES.items():
        lines.append(f"  {name:7}{(recipe.config.__doc__ or '').split(chr(10))[0]}")
    lines += ["  env    What this machine offers and what the package will use.", "", "  --version"]
    return "\n".join(lines)


def _load(where: str) -> Any:
    module, name = where.split(":")
    return getattr(importlib.import_module(module), name)


def _plain(value: Any) -> Any:
    from cortiq_kernels.report.runlog import finite

    return finite(value)


if __name__ == "__main__":
    sys.exit(main())
