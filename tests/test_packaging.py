"""What is shipped: metadata, typing marker, data files, and a docstring on everything public."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
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
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, because a build writes beside what it builds."""
    source = tmp_path_factory.mktemp("source")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    return source


def build(source: Path, kind: str, out: Path) -> Path:
    """The wheel or sdist of `source`, as pip asks for it."""
    code = f"import sys; from setuptools.build_meta import build_{kind} as build; print(build(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build(source, "wheel", tmp_path_factory.mktemp("wheel")))


def test_the_wheel_holds_the_package_and_only_that(wheel: zipfile.ZipFile):
    files = (p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    expected = {str(p.relative_to(ROOT)) for p in files if not p.name.startswith("_C")}  # _C: what was built here
    names = set(wheel.namelist())
    assert expected <= names, sorted(expected - names)
    assert "cortiq_kernels/py.typed" in names
    roots = {name.split("/")[0] for name in names}
    assert roots == {"cortiq_kernels", f"cortiq_kernels-{version()}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler here; the next test has what a build says then")
def test_the_wheel_has_the_native_module_and_it_works(wheel: zipfile.ZipFile, tmp_path: Path):
    wheel.extractall(tmp_path)
    code = (
        "import torch; from cortiq_kernels import native; print(native.describe());"
        "g = torch.zeros(1, 128, 128); assert native.gram_accumulate_cpu(g, torch.ones(3, 2));"
        "assert g.sum() == 12 == g[0, :2, :2].sum()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "built for the CPU" in done.stdout, done.stdout + done.stderr


def native_build(source: Path, out: Path, **settings: str) -> subprocess.CompletedProcess:
    """`setup.py build_ext` with these environment variables, everything it writes under `out`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("CORTIQ_FORCE")} | settings
    command = [sys.executable, "setup.py", "-q", "build_ext", "-b", str(out / "lib"), "-t", str(out / "temp")]
    return subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "broken"])
def test_without_a_working_compiler_the_package_says_so(source: Path, tmp_path: Path, compiler: str):
    said = "no C++ compiler was found (looked for no-such-compiler)"
    if compiler == "broken":
        compiler, said = str(tmp_path / "cc"), "error: it is broken"
        Path(compiler).write_text("#!/bin/sh\necho 'error: it is broken'; exit 1\n")
        Path(compiler).chmod(0o755)
    done = native_build(source, tmp_path, CXX=compiler)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cortiq_kernels: native module not built: ") and done.stdout.count("\n") == 1
    assert said in done.stdout
    (note,) = (tmp_path / "lib" / "cortiq_kernels").iterdir()
    assert note.name == "_C_missing.txt" and said in note.read_text()
    done = native_build(source, tmp_path / "forced", CXX=compiler, CORTIQ_FORCE_CPU="1")
    assert done.returncode == 1 and "got CORTIQ_FORCE_CPU, but" in done.stderr and said in done.stderr


NVCC = """#!/bin/sh
case "$1" in
  --list-gpu-code) echo sm_80; echo sm_90 ;;
  --dryrun) echo '#$ LIBRARIES= "-L{lib}/stubs" "-L{lib}"' >&2 ;;
  *) echo 'error: this nvcc is only for show'; exit 1 ;;
esac
"""


CXX = """#!/bin/sh
while [ $# -gt 1 ]; do
  case "$1" in -o) echo > "$2" ;; -MF) echo > "$2" ;; esac
  shift
done
"""


@pytest.mark.parametrize(("nvcc", "said"), [
    (None, "nvcc was not found"),
    ("#!/bin/sh\nexit 3\n", "--list-gpu-code failed with status 3"),
    (NVCC, "has no libcudart_static.a beside it"),
    ("its library, too", "error: this nvcc is only for show"),
])  # fmt: skip
def test_where_cuda_cannot_be_built_it_is_said_and_what_insists_is_an_error(
    source: Path, tmp_path: Path, nvcc: str | None, said: str
):
    (tmp_path / "bin").mkdir()
    if nvcc == "its library, too":
        nvcc = NVCC
        (tmp_path / "libcudart_static.a").touch()
    if nvcc:
        (tmp_path / "bin" / "nvcc").write_text(nvcc.replace("{lib}", str(tmp_path)))
        (tmp_path / "bin" / "nvcc").chmod(0o755)
    (tmp_path / "cxx").write_text(CXX)
    (tmp_path / "cxx").chmod(0o755)
    path = [str(tmp_path / "bin"), *(d for d in os.environ["PATH"].split(":") if not Path(d, "nvcc").exists())]
    env = {"PATH": ":".join(path), "CUDA_HOME": "/nowhere", "CUDA_PATH": "", "CXX": str(tmp_path / "cxx")}
    done = native_build(source, tmp_path, CORTIQ_FORCE_CUDA="1", **env)
    assert done.returncode == 1 and not list((tmp_path / "lib").rglob("_C*"))
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: native module: got CORTIQ_FORCE_CUDA, but ") and said in line, done.stderr
    done = native_build(source, tmp_path, **env)
    assert done.returncode == 0 and "native module built for the CPU by " in done.stdout, done.stdout + done.stderr
    assert "(no CUDA: " in done.stdout and said in done.stdout


def test_cpu_and_cuda_at_once_are_refused(source: Path, tmp_path: Path):
    done = native_build(source, tmp_path, CORTIQ_FORCE_CUDA="1", CORTIQ_FORCE_CPU="1")
    assert done.returncode == 1 and not (tmp_path / "lib").exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: native module: got CORTIQ_FORCE_CPU and CORTIQ_FORCE_CUDA, which contradict")


def test_the_source_distribution_is_the_repository(source: Path, tmp_path: Path):
    with tarfile.open(build(source, "sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    built = {"build", "cortiq_kernels.egg-info"}
    files = {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()}
    wanted = {f for f in files if f.split("/")[0] not in built and "__pycache__" not in f} - {".gitignore"}
    assert wanted <= names, sorted(wanted - names)
    assert {f"csrc/{p.name}" for p in (ROOT / "csrc").iterdir()} <= names


def test_the_build_lists_every_native_source():
    """One that setup.py does not name is not compiled, or its change compiles nothing."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    lists = {ast.unparse(n.targets[0]): n.value for n in tree.body if isinstance(n, ast.Assign)}
    named = [name for kind in ("SOURCES", "CUDA_SOURCES", "HEADERS") for name in ast.literal_eval(lists[kind])]
    assert sorted(named) == sorted(f"csrc/{p.name}" for p in (ROOT / "csrc").iterdir())
    python = [p.name for p in (ROOT / "csrc").iterdir() if re.search(r"pybind11|Python\.h|torch/", p.read_text())]
    assert python == ["bindings.cpp"], "the only file that knows Python; none knows torch"
