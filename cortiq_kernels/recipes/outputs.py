"""Files that a recipe writes beside its output: where they go, and that they never land on what it reads.

No torch here: the command line needs `log_path` before anything heavy is imported.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from cortiq_kernels.reading import Unreadable, kind_of, open_file
from cortiq_kernels.recipes.errors import need, refuse
from cortiq_kernels.report.page import MARK as PAGE_MARK


def log_path(recipe: str, cfg: Any) -> Path | None:
    """Where the run log goes: `cfg.log`, else beside the output directory, else nowhere."""
    if cfg.log is not None:
        return Path(cfg.log)
    if recipe == "score":
        return None
    out = cfg.out.absolute() if cfg.out.name != ".." else _real(cfg.out)
    what = "file" if recipe == "masks" else "directory"
    need(out.name != "", f"{recipe}: out", repr(str(cfg.out)), f"a {what} to create", "Set --out.")
    name = (out.name.removesuffix(".safetensors") if recipe == "masks" else "") or out.name
    return out.with_name(name + ".log.jsonl")


def page_path(log: Path) -> Path | None:
    """Where the page (HTML) of a run goes: beside its log, OUT.html for OUT.log.jsonl and X.html for X.jsonl; nowhere
    when the log is a device or a pipe.
    """
    if log.exists() and not log.is_file():
        return None
    return log.with_name(log.name.removesuffix(".jsonl").removesuffix(".log") + ".html")


def check_files(recipe: str, cfg: Any, *, done: bool = False) -> None:
    """Refuse, before any work, a run log or result file that would overwrite an input or get in the output's way.

    Such a file needs a writable place; it must not be a directory, nor an input file, nor lie inside an input or output
    directory (symlinks resolved). Inputs are the paths in `cfg` other than `out`, `log`, `targets`. `done`: the output
    is there, made by this run. Raises `InputError`.
    """
    given = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    inputs = [p for name, v in given.items() if name not in ("out", "log", "targets") for p in _paths(v)]
    log = log_path(recipe, cfg)
    files = {"log": log, "page": page_path(log) if log is not None else None}
    folders = []
    if recipe == "score":
        if cfg.out is not None and _real(cfg.out) in [_real(f) for f in files.values() if f is not None]:
            raise refuse("score: log", repr(str(log)), "another file than --out, and another name", "Set --log.")
        files["out"] = cfg.out
    elif recipe == "masks":
        files["out"] = cfg.out
    else:
        folders.append(cfg.out)
    for name, file in files.items():
        if file is None:
            continue
        what, fix = f"{recipe}: {name}", f"Set --{'log' if name == 'page' else name} to another place."
        _check_place(what, file, fix)
        for place in inputs:
            if _inside(file, place):
                raise refuse(what, repr(str(file)), f"a file that is not (in) the input {str(place)!r}", fix)
        for place in folders:
            if _inside(file, place):
                raise refuse(what, repr(str(file)), f"a file outside --out {str(place)!r}", fix)
        if name == "log" and not _is_run_log(file):
            raise refuse(what, f"{str(file)!r}, which is no run log", "a new file, or an earlier run log", fix)
        if name == "page":
            check_page(what, file, fix)
        if name == "out" and recipe == "masks":
            need(done or not os.path.lexists(file), what, f"{str(file)!r}, which is there already", "a new file", fix)
        elif name == "out" and (first := _start(file)) and not (first.startswith(b"{") and b'"rows"' in first):
            raise refuse(what, f"{str(file)!r}, which is no result", "a new file, or an earlier result", fix)


def check_page(what: str, file: Path, fix: str) -> None:
    """Refuse a place for a run's page (HTML) that cannot be written, or that holds something else. `InputError`."""
    _check_place(what, file, fix)
    first = _start(file)
    if first and PAGE_MARK.encode() not in first:
        raise refuse(what, f"{str(file)!r}, which is no run's page", "a new file, or an earlier page", fix)


def _check_place(what: str, file: Path, fix: str) -> None:
    kind = kind_of(file)
    if kind == "a directory":
        raise refuse(what, f"the directory {str(file)!r}", "a file", fix)
    if what.endswith(": log") and file.is_absolute() and file.parts[1] == "dev" and kind in ("a device", "a pipe"):
        need(os.access(file, os.W_OK), what, repr(str(file)), "a place that can be written to", fix)
        return
    if kind not in (None, "a symlink to a missing file") and not kind.startswith("no such file"):
        raise refuse(what, f"{kind} at {str(file)!r}", "a regular file, or none yet", fix)
    if kind is None and not os.access(file, os.W_OK):
        raise refuse(what, f"{str(file)!r}, which may not be written to", "a file that may", fix)
    parent = next(p for p in _real(file).parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise refuse(what, f"{str(file)!r} below {str(parent)!r}", "a directory that can be written to", fix)


def _is_run_log(file: Path) -> bool:
    """Whether a run log may take this file's place: it does not exist, is empty, or starts as a run log does."""
    first = _start(file)
    return not first or (first.startswith(b"{") and b'"event"' in first)


def _start(file: Path) -> bytes:
    """The first bytes of a file; none where it is absent or unreadable: the place is checked for being writable."""
    try:
        with open_file(file) as f:
            return f.read(256).strip()
    except (OSError, Unreadable):
        return b""


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file (text as UTF-8) beside its place and rename it, so that an error leaves an earlier one as it was."""
    place = _real(path)
    partial = place.with_name(f".{place.name}.partial")
    try:
        with open(partial, "wb") as f:
            f.write(content.encode() if isinstance(content, str) else content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, place)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _paths(value: Any) -> list[Path]:
    """Paths in a setting: one, or a tuple of them."""
    return [v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, Path)]


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _inside(file: Path, place: Path) -> bool:
    """Whether `file` is `place` or lies inside it: by name (symlinks resolved), or because one of its parents is the
    same file under another name (a hard link, a second mount of the same directory).
    """
    real, other = _real(file), _real(place)
    if real == other or other in real.parents:
        return True
    try:
        target = other.stat()
    except OSError:
        return False
    return any(p.exists() and os.path.samestat(p.stat(), target) for p in (real, *real.parents))
