"""Builds the native module, cortiq_kernels._C, from csrc/; everything else about the package is in pyproject.toml.

pybind11 and ninja, no torch: one build serves every torch. The build prints one line that says what it made and why,
and where it made nothing it leaves that line in cortiq_kernels/_C_missing.txt, which `cortiq env` shows.

No C++ compiler, no pybind11, no ninja, or a compiler that fails: the package is built without the module, whose ops
then run on torch. CORTIQ_FORCE_CPU=1 asks for the CPU module, and not having it is an error. CORTIQ_FORCE_CUDA=1
asks for CUDA kernels in it, which it does not have yet: an error. CXX, CXXFLAGS and LDFLAGS are heeded.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

SOURCES = ["csrc/bindings.cpp", "csrc/gram_cpu.cpp"]
HEADERS = ["csrc/gram.h"]
# Multiply-adds are fused where the target has them. No -march: csrc/ looks at the processor at run time.
FLAGS = "-O3 -std=c++17 -fPIC -fvisibility=hidden -ffp-contract=fast -pthread -Wall -Wextra"
LINK = "-bundle -undefined dynamic_lookup" if sys.platform == "darwin" else "-shared -pthread"
MISSING = "_C_missing.txt"
NINJA = """\
ninja_required_version = 1.5
rule compile
  command = {cxx} {flags} -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $in
rule link
  command = {cxx} $in {link} -o $out
  description = link $out
"""


class CannotBuild(Exception):
    """Why there is no native module."""


class NativeBuild(build_ext):
    """`build_ext` through ninja, which compiles only what changed."""

    def run(self) -> None:
        cpu, cuda = (os.environ.get(f"CORTIQ_FORCE_{kind}", "0") not in ("", "0") for kind in ("CPU", "CUDA"))
        if cuda:
            also = " and CORTIQ_FORCE_CPU, which contradicts it," if cpu else ""
            raise SetupError(
                f"native module: got CORTIQ_FORCE_CUDA{also} but this version has no CUDA sources; expected a build "
                "for the CPU. Unset CORTIQ_FORCE_CUDA: on a GPU the ops run on Triton and torch."
            )
        (extension,) = self.extensions
        target = Path(self.get_ext_fullpath(extension.name))
        note = target.with_name(MISSING)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            say = self.build(target)
        except CannotBuild as why:
            if cpu:
                raise SetupError(
                    f"native module: got CORTIQ_FORCE_CPU, but {why}; expected a C++17 compiler, pybind11 and ninja. "
                    "Install what is missing, or unset CORTIQ_FORCE_CPU to go without the module."
                ) from None
            target.unlink(missing_ok=True)  # of an earlier build, from other sources
            note.write_text(f"{why}\n", encoding="utf-8")
            say = f"not built: {why}; its ops run on torch"
        else:
            note.unlink(missing_ok=True)
        print(f"cortiq_kernels: native module {say}", flush=True)

    def build(self, target: Path) -> str:
        """Compile and link `target`; returns what was built and why, raises CannotBuild."""
        cxx, ninja = compiler(), program_ninja()
        if importlib.util.find_spec("pybind11") is None:
            raise CannotBuild("pybind11 is not installed in the build's environment")
        import pybind11

        # An editable build's own directory is new each time; this one lets ninja see that nothing changed.
        base = "build" if self.inplace or getattr(self, "editable_mode", False) else self.build_temp
        work = Path(base, f"native-{sys.implementation.cache_tag}-{sysconfig.get_platform()}").resolve()
        work.mkdir(parents=True, exist_ok=True)
        includes = [sysconfig.get_path("include"), pybind11.get_include()]
        flags = [FLAGS, *(f"-isystem {shlex.quote(i)}" for i in includes), os.environ.get("CXXFLAGS", "")]
        link = f"{LINK} {os.environ.get('LDFLAGS', '')}"
        text = NINJA.format(cxx=cxx, flags=" ".join(flags).replace("$", "$$"), link=link.replace("$", "$$"))
        objects = []
        for source in SOURCES:
            objects.append(Path(source).stem + ".o")
            text += f"build {objects[-1]}: compile {escaped(Path(source).resolve())}\n"
        text += f"build {target.name}: link {' '.join(objects)}\n"
        (work / "build.ninja").write_text(text, encoding="utf-8")
        done = subprocess.run([ninja, "-C", str(work)], capture_output=True, text=True)
        if done.returncode:
            print(done.stdout + done.stderr, file=sys.stderr)
            wrong = [line.strip() for line in done.stdout.splitlines() if "error" in line.lower()]
            raise CannotBuild(f"{cxx} failed: {wrong[0] if wrong else 'its output is above'}")
        shutil.copy2(work / target.name, target)
        nvcc = shutil.which("nvcc")
        why = "CORTIQ_FORCE_CPU" if os.environ.get("CORTIQ_FORCE_CPU", "0") not in ("", "0") else "no CUDA sources yet"
        return f"built for the CPU by {cxx} ({why}{f'; {nvcc} is not used' if nvcc else ''})"

    def get_outputs(self) -> list[str]:
        """Files in the build directory, of which the note is one where the module is not."""
        return [
            path if Path(path).exists() else str(Path(path).with_name(MISSING)) for path in super().get_outputs()
        ]  # fmt: skip


def compiler() -> str:
    """The C++ compiler's command: CXX, or the first of c++, g++ and clang++ that is there."""
    asked = os.environ.get("CXX", "")
    tried = [asked] if asked else ["c++", "g++", "clang++"]
    for command in tried:
        if shutil.which((shlex.split(command) or [""])[0]):
            return command
    raise CannotBuild(f"no C++ compiler was found (looked for {', '.join(tried)})")


def program_ninja() -> str:
    """Path of ninja: the Python package's, or the system's."""
    if importlib.util.find_spec("ninja") is not None:
        import ninja

        name = Path(ninja.BIN_DIR, "ninja")
        if name.is_file():
            return str(name)
    if found := shutil.which("ninja"):
        return found
    raise CannotBuild("ninja is not installed in the build's environment")


def escaped(path: Path) -> str:
    """A path as ninja writes one."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


setup(
    ext_modules=[Extension("cortiq_kernels._C", SOURCES, depends=HEADERS)],
    cmdclass={"build_ext": NativeBuild},
)
