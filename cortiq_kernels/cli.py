"""The command line: `cortiq bake | masks | capture | fold | heal | score`, `cortiq report` and `cortiq env`.

    cortiq heal --student fold/ --teacher source/ --data records.jsonl --out healed/
    cortiq heal --config heal.toml --lr 2e-5 --dry-run

Flags come from the fields of a recipe's config. `--config FILE.toml` gives them values, which flags on the command line
override. Progress goes to stderr, the result to stdout (`--json`: one JSON object). Exit status: 0 done; 2 the
request was refused (one line on stderr says why, nothing was written); 1 the run failed; 128 + n stopped by signal n.
An error of the program itself keeps its traceback.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cortiq_kernels import cli_config, cli_flags
from cortiq_kernels._version import __version__
from cortiq_kernels.cli_flags import Flags
from cortiq_kernels.recipes.bake_config import BakeConfig
from cortiq_kernels.recipes.capture_config import CaptureConfig
from cortiq_kernels.recipes.errors import TrainingFailed
from cortiq_kernels.recipes.fold_config import FoldConfig
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.masks_config import MasksConfig
from cortiq_kernels.recipes.outputs import log_path, page_path
from cortiq_kernels.recipes.score_config import ScoreConfig
from cortiq_kernels.recipes.stopping import Stopped, shielded, stop_on_signals
from cortiq_kernels.report.console import clean


class Recipe(NamedTuple):
    """A subcommand: its config class; the module with `run`, and where its plan is made."""

    config: type
    run: str
    plan: str


_PACKAGE = "cortiq_kernels.recipes."
RECIPES = {  # in the order of use
    "bake": Recipe(BakeConfig, _PACKAGE + "bake:run", _PACKAGE + "bake_plan:plan_bake"),
    "masks": Recipe(MasksConfig, _PACKAGE + "masks:run", _PACKAGE + "masks_plan:plan_masks"),
    "capture": Recipe(CaptureConfig, _PACKAGE + "capture:run", _PACKAGE + "capture:plan_capture"),
    "fold": Recipe(FoldConfig, _PACKAGE + "fold:run", _PACKAGE + "fold:plan_fold"),
    "heal": Recipe(HealConfig, _PACKAGE + "heal:run", _PACKAGE + "heal_plan:plan_heal"),
    "score": Recipe(ScoreConfig, _PACKAGE + "score:run", _PACKAGE + "score:plan_score"),
}
LARGEST_LOG = 16 << 20  # bytes whose page takes well under a second
TOOLS = {  # subcommands with a parser of their own: function and summary
    "report": ("cortiq_kernels.cli_report:main", "Make a run's page (HTML) from its log."),
    "env": ("cortiq_kernels.env:main", "What this machine offers and what the package will use."),
}


class Run:
    """What is known of a recipe's run when it ends early: its config, and whether work had begun."""

    def __init__(self, name: str):
        self.name, self.began = name, False
        self.cfg: Any = None

    def left(self) -> str:
        """What the run left: outputs appear whole or not at all, perhaps just before it was stopped."""
        out = getattr(self.cfg, "out", None)
        with contextlib.suppress(OSError):
            if out is not None and (out.is_file() or out.is_dir() and any(out.iterdir())):
                return f"{out} is complete, or as it was before"
        return "no output was written"

    def again(self) -> str:
        """How to go on."""
        if hasattr(self.cfg, "resume"):
            step = _load("cortiq_kernels.recipes.checkpoint_place:last_step")(self.cfg.out)
            if step is not None:
                return f"Go on after step {step} with the same command and --resume."
        return "Start it again with the same command."


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's); returns the exit status."""
    args = sys.argv[1:] if argv is None else list(argv)
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        print(__version__)
        return 0
    names = [*RECIPES, *TOOLS]
    if args[0] not in names:
        near = difflib.get_close_matches(args[0], names, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return fail(f"cortiq: got {args[0]!r}; expected one of {', '.join(names)}.{hint} See cortiq --help.", 2)
    # Read when torch loads its OpenMP: threads that wait for each other sleep instead of spinning, which on a machine
    # with another busy process makes a step several times longer.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    run = Run(args[0])
    try:
        with stop_on_signals():
            if run.name in TOOLS:
                return _load(TOOLS[run.name][0])(args[1:])
            run.cfg, flags = parse(run.name, args[1:])
            return execute(run, run.cfg, flags)
    except SystemExit as e:  # help was printed
        return e.code if isinstance(e.code, int) else 2
    except Stopped as e:
        line = f"cortiq {run.name}: stopped by {e}; {run.left()}. {run.again()}"
        return fail(line + curves(run), 128 + e.number)
    except TrainingFailed as e:
        return fail(str(e) + curves(run), 1)  # they say where it went wrong
    except BrokenPipeError:  # whoever read the result went away; what was to be written is written
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - or the interpreter complains when it flushes at exit
        return 1
    except PermissionError as e:
        needed = "expected a file that you may read, or a place that you may write to. Check its owner and mode"
        line = f"cortiq {run.name}: {e.filename}: got 'permission denied'; {needed}; {run.left()}."
        return fail(line, 1 if run.began else 2)
    except OSError as e:
        if run.began:
            return fail(f"cortiq {run.name}: {e}; {run.left()}", 1)
        got = f"{e.filename}: got {e.strerror!r}" if e.filename else f"got {e.strerror or str(e)!r} from the system"
        needed = "expected inputs that can be read, and a place that can be written to. Check the paths"
        return fail(f"cortiq {run.name}: {got}; {needed}; {run.left()}.", 2)
    except (ValueError, RuntimeError, MemoryError) as e:
        if is_refusal(e):
            return fail(str(e), 2)
        from cortiq_kernels import backend

        if backend.is_out_of_memory(e):
            why = str(e).split("\n")[0]
            fix = "lower --batch or --window"
            return fail(f"cortiq {run.name}: out of memory ({why}); {fix}. No output was written.", 1)
        raise


def is_refusal(error: BaseException) -> bool:
    """Whether an error is one of the package's own ValueErrors, which say in a line what cannot be used and why."""
    return isinstance(error, ValueError) and type(error).__module__.startswith("cortiq_kernels.")


def parse(name: str, args: list[str]) -> tuple[Any, Flags]:
    """(config, flags) of a recipe's arguments; imports no torch. As `cli_flags.parse`."""
    return cli_flags.parse(name, RECIPES[name].config, args, RECIPES)


def execute(run: Run, cfg: Any, flags: Flags) -> int:
    """Run a recipe (or show its plan or settings) with progress, run log, page and result; returns 0."""
    recipe = RECIPES[run.name]
    if flags.print_config:
        print(cli_config.toml_text(run.name, cfg))
        return 0
    if flags.dry_run:
        plan = _load(recipe.plan)(cfg).describe()
        from cortiq_kernels import env
        from cortiq_kernels.report import results

        models = [m for m in (plan.get("student"), plan.get("model"), *plan.get("models", {}).values()) if m]
        heads = max((m["delta_heads"] for m in models), key=max)  # kernels that take these take smaller ones, too
        attention = max(m["attention_head"] for m in models)
        plan["backends"] = env.backends(plan["device"], plan["dtype"], heads, attention)
        print(json.dumps(_plain(plan), indent=2) if flags.json else results.plan_text(plan))
        return 0
    work = _load(recipe.run)
    from cortiq_kernels import backend
    from cortiq_kernels.recipes.provenance import settings
    from cortiq_kernels.report import results
    from cortiq_kernels.report.console import view_for
    from cortiq_kernels.report.runlog import RunLog

    path = log_path(run.name, cfg)
    log: RunLog | None = None
    with contextlib.ExitStack() as stack:
        listeners: list[Any] = [] if flags.quiet else [stack.enter_context(view_for(sys.stderr))]
        if path is not None:
            first = {
                "version": __version__, "recipe": run.name, "settings": settings(cfg), "versions": backend.versions(),
            }  # fmt: skip
            log = stack.enter_context(RunLog(path, first))
            listeners.append(log)

        def progress(event: Mapping[str, Any]) -> None:
            for listener in listeners:
                listener(dict(event))
            run.began = True  # after the log was opened

        report = dataclasses.asdict(work(cfg, progress))
        if report.get("already_done"):
            path = None  # the log is that of the run that did it
        if path is not None:
            listeners[-1]({"event": "done", **report})
    if log is not None and log.lost:
        fail(f"note: the last {log.lost} lines of {path} are missing: its disk is full", 0)
    page = page_after(path) if path is not None else None
    if flags.json:
        files = {"log": str(path) if path else None, "page": str(page) if page else None}
        print(json.dumps(_plain({**report, **files}), indent=2))
    else:
        print(results.result_text(run.name, cfg, report, [str(p) for p in (path, page) if p]))
    return 0


def page_after(log: Path) -> Path | None:
    """Write the page of a run that has ended. None where its log is no file, and, with a line on stderr, where the page
    cannot be written: the run itself went well.
    """
    from cortiq_kernels import cli_report

    place = page_path(log)
    try:
        return cli_report.write_page(log, place) if place is not None else None
    except (OSError, ValueError) as e:
        fail(f"note: no page was written ({e}); cortiq report {shlex.quote(str(log))} makes it from the log", 0)
        return None


def curves(run: Run) -> str:
    """" Curves: PAGE" with the page of a run that ended early, now written; "" where it had not begun, and where its
    page would take seconds.
    """
    log = log_path(run.name, run.cfg) if run.began else None
    page = None
    with contextlib.suppress(OSError, Stopped), stop_on_signals(), shielded():
        if log is not None and log.stat().st_size <= LARGEST_LOG:
            page = page_after(log)
    return f" Curves: {page}" if page else ""


def fail(text: str, status: int) -> int:
    """One line on stderr; returns the status."""
    line = "; ".join(part.strip() for part in text.split("\n") if part.strip())
    with contextlib.suppress(OSError):  # nobody reads it any more
        print(clean(line), file=sys.stderr)
    return status


def usage() -> str:
    """Text of `cortiq --help`."""
    lines = ["cortiq COMMAND [flags]      (cortiq COMMAND --help lists the flags)", ""]
    for name, recipe in RECIPES.items():
        lines.append(f"  {name:8}{(recipe.config.__doc__ or '').split(chr(10))[0]}")
    lines += [f"  {name:8}{summary}" for name, (_, summary) in TOOLS.items()]
    return "\n".join([*lines, "", "  --version"])


def _load(where: str) -> Any:
    module, name = where.split(":")
    with shielded():  # a signal in the middle of loading a C extension would become some other error
        return getattr(importlib.import_module(module), name)


def _plain(value: Any) -> Any:
    from cortiq_kernels.report.runlog import finite

    return finite(value)


if __name__ == "__main__":
    sys.exit(main())
