"""Imports go one way, and a few habits that a reader of the tree relies on.

ops/  model/  data/   know nothing of each other, nor of what is above; ops/ may call native.py, the compiled module
step/                 ops, model, data
report/               nothing else of the package but its foundation
recipes/              all of these
cli.py, cli_*.py      recipes
arguments.py          argparse, its refusals in one line
env.py, aot.py        what an op runs on, and its kernels compiled ahead of time
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "cortiq_kernels"
ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / PACKAGE).rglob("*.py"))

#: what the modules of a layer may import of the package, besides their own layer and the package's bare name
FOUNDATION = {"_version", "arguments", "reading"}
MAY_IMPORT = {
    "_version": set(),
    "reading": set(),
    "arguments": set(),
    "__main__": {"cli"},
    "backend": set(),
    "native": set(),
    "env": {"backend", "native", "ops"},
    "aot_variants": {"ops"},
    "aot": {"aot_variants", "ops"},
    "ops": {"native"},
    "model": set(),
    "data": set(),
    "step": {"ops", "model", "data", "backend"},
    "report": {"backend"},
    "recipes": {"ops", "model", "data", "step", "report", "backend"},
    "cli_config": {"recipes"},
    "cli_flags": {"cli_config", "recipes"},
    "cli_report": {"recipes", "report"},
    "cli": {"cli_config", "cli_flags", "cli_report", "recipes", "report", "backend", "env"},
}


def layer(path: Path) -> str:
    """First component below the package: `ops`, `step`, `cli`, ...; "" is the package's own __init__."""
    first = path.relative_to(ROOT / PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imported(tree: ast.Module, path: Path) -> Iterator[str]:
    """Absolute dotted names of everything a file imports, inside functions too."""
    package = (PACKAGE, *path.relative_to(ROOT / PACKAGE).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(package[: len(package) - node.level + 1]) + (f".{base}" if base else "")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def layers_imported(tree: ast.Module, path: Path) -> set[str]:
    names = {tuple(name.split(".")) for name in imported(tree, path)}
    known = {layer(p) for p in SOURCES} - {""}
    return {parts[1] for parts in names if parts[0] == PACKAGE and len(parts) > 1 and parts[1] in known}


def attributes(tree: ast.Module) -> Iterator[str]:
    """Dotted attribute accesses such as torch.cuda, as written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


TREES = {p: ast.parse(p.read_text(encoding="utf-8"), str(p)) for p in SOURCES}
each_source = pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / PACKAGE)))


def test_every_layer_has_its_rule():
    assert {layer(p) for p in SOURCES} - {""} <= set(MAY_IMPORT)


@each_source
def test_imports_go_one_way(path: Path):
    own = layer(path)
    allowed = MAY_IMPORT.get(own, set()) | FOUNDATION | {own}
    up = layers_imported(TREES[path], path) - allowed
    assert not up, f"{own or 'the package'} must not import {sorted(up)}; it may import {sorted(allowed - {''})}"


@each_source
def test_only_backend_asks_about_devices(path: Path):
    if layer(path) == "backend":
        return
    asked = [a for a in attributes(TREES[path]) if a.startswith("torch.cuda") or a.startswith("torch.backends.cuda")]
    asked += [m for m in imported(TREES[path], path) if m.startswith("torch.cuda")]
    assert not asked, f"{asked}: ask cortiq_kernels.backend, or go by tensor.device"


@each_source
def test_only_the_command_line_parses(path: Path):
    names = {m.split(".")[0] for m in imported(TREES[path], path)}
    assert layer(path).startswith("cli") or "tyro" not in names


@each_source
def test_no_environment_is_written_and_nothing_is_patched(path: Path):
    for node in ast.walk(TREES[path]):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for t in targets:
                assert not (t is not None and ast.unparse(t).startswith("os.environ")), ast.unparse(node)
        if isinstance(node, ast.Call):
            # The command's own process may set a default of OpenMP's, before it loads torch; a library may not.
            if layer(path) == "cli" and ast.unparse(node).startswith("os.environ.setdefault('OMP_WAIT_POLICY'"):
                continue
            assert ast.unparse(node.func) not in ("os.putenv", "os.environ.setdefault", "os.environ.update")


@each_source
def test_no_block_pointers(path: Path):
    assert not [a for a in attributes(TREES[path]) if a.endswith(("make_block_ptr", "make_tensor_descriptor"))]


@each_source
def test_no_autograd_in_the_step(path: Path):
    """The step is explicit; references may be differentiated by tests, the package itself never is."""
    names = list(attributes(TREES[path]))
    used = [a for a in names if a.startswith(("torch.autograd", "torch.nn.Module")) or a == "nn.Module"]
    used += [a for a in names if a.endswith((".backward", ".requires_grad_"))]
    assert layer(path) not in ("ops", "step") or not used, used


@pytest.mark.parametrize("folder", [PACKAGE, "bench", "examples", "tests"])
def test_files_stay_small(folder: str):
    long = {
        str(p.relative_to(ROOT)): n
        for p in sorted((ROOT / folder).rglob("*.py"))
        if (n := len(p.read_text(encoding="utf-8").splitlines())) > 500
    }
    assert not long, f"over 500 lines: {long}; one idea a file, or a folder"


def test_the_rules_see_what_they_forbid():
    """The test of the test: each rule fires on a line that breaks it."""
    path = ROOT / PACKAGE / "ops" / "x.py"
    tree = ast.parse("def f():\n    from ..step import train\n    from cortiq_kernels import model\n")
    assert layers_imported(tree, path) == {"step", "model"}
    assert "torch.cuda.is_available" in set(attributes(ast.parse("torch.cuda.is_available()")))
