"""What is shipped: metadata, typing marker, data files, and a docstring on everything public."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cortiq_kernels"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCUMENTED = ("ops", "model", "data", "step", "recipes", "report")
SOURCES = sorted(p for p in PACKAGE.rglob("*.py") if p.stat().st_size)


def version() -> str:
    found = re.search(r'__version__ = "([^"]+)"', (PACKAGE / "_version.py").read_text())
    assert found
    return found[1]


def test_metadata():
    project = PROJECT["project"]
    assert project["name"] == "cortiq_kernels" and project["license"] == "Apache-2.0"
    assert re.fullmatch(r"\d+\.\d+\.\d+", version())
    assert f"## {version()}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for name in ("README.md", "LICENSE", "CONTRIBUTING.md", "AGENTS.md"):
        assert (ROOT / name).stat().st_size > 500, name
    module, function = project["scripts"]["cortiq"].split(":")
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}


def test_python_in_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert len(blocks) >= 2
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_what_is_imported_is_declared():
    """Every third-party import of the package is a dependency, or one of an extra."""
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(d for group in ("data", "bench") for d in extras[group])]
    names = {re.split(r"[<>=;!\[ ]", d)[0] for d in wanted} | {"triton"}  # torch brings triton
    declared = {name.lower().replace("-", "_") for name in names}
    found: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {a.name.split(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.split(".")[0])
    foreign = found - set(sys.stdlib_module_names) - {"cortiq_kernels"}
    assert foreign <= declared, f"{sorted(foreign - declared)} imported, but not in pyproject.toml"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_everything_public_has_a_docstring(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "the module says nothing"
    if path.relative_to(PACKAGE).parts[0] not in DOCUMENTED:
        return
    silent = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not silent, f"no docstring: {silent}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel built from a copy of the sources (a build writes beside what it builds)."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    code = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = out.glob("*.whl")
    return set(zipfile.ZipFile(built).namelist())


def test_the_wheel_holds_the_package_and_only_that(wheel: set[str]):
    expected = {str(p.relative_to(ROOT)) for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert expected <= wheel, sorted(expected - wheel)
    assert "cortiq_kernels/py.typed" in wheel
    roots = {name.split("/")[0] for name in wheel}
    assert roots == {"cortiq_kernels", f"cortiq_kernels-{version()}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel)
