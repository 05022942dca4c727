"""Builds the native module, cortiq_kernels._C, from csrc/; everything else about the package is in pyproject.toml.

pybind11 and ninja, no torch: one build serves every torch. The build prints one line that says what it made and why,
and where it made nothing it leaves that line in cortiq_kernels/_C_missing.txt, which `cortiq env` shows.

With CUDA's compiler (nvcc on the path, or under CUDA_HOME or CUDA_PATH, with its headers and libcudart beside it) the
module has CUDA kernels for sm_80, sm_90a and sm_100, or for those that CUDA_ARCH_LIST names ("8.0 9.0a", or "80;90a").
It links libcudart statically and finds the driver at run time, so it is built and loaded without a GPU, and without a
torch for CUDA. No nvcc, or one that does not compile and link: the module is for the CPU. No C++ compiler, no pybind11,
no ninja, or a compiler that fails: the package is built without the module, whose ops then run on torch.

CORTIQ_FORCE_CPU=1 asks for the CPU module and CORTIQ_FORCE_CUDA=1 for the one with CUDA kernels; not having it is then
an error. CXX, CXXFLAGS, NVCCFLAGS and LDFLAGS are heeded.
"""

from __future__ import annotations

import importlib.util
import os
import re
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
CUDA_SOURCES = ["csrc/gram_cuda.cu"]
HEADERS = ["csrc/gram.h", "csrc/gram_mma.cuh", "csrc/gram_sm90.cuh", "csrc/gram_stage.cuh", "csrc/gram_tiles.cuh"]
CUDA_ARCHS = "8.0 9.0a 10.0"
# Multiply-adds are fused where the target has them. No -march: csrc/ looks at the processor at run time.
FLAGS = "-O3 -std=c++17 -fPIC -fvisibility=hidden -ffp-contract=fast -pthread -Wall -Wextra"
NVCC_FLAGS = "-O3 -std=c++17 -Xcompiler=-fPIC,-fvisibility=hidden"
LINK = "-bundle -undefined dynamic_lookup" if sys.platform == "darwin" else "-shared -pthread"
MISSING = "_C_missing.txt"
NINJA = """\
ninja_required_version = 1.5
rule compile
  command = {cxx} {flags} -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $in
rule compile_cuda
  command = {nvcc} -MD -MF $out.d -c $in -o $out
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
        cpu, cuda = forced("CPU"), forced("CUDA")
        if cpu and cuda:
            raise SetupError(
                "native module: got CORTIQ_FORCE_CPU and CORTIQ_FORCE_CUDA, which contradict each other; expected one "
                "of them. Unset the other."
            )
        (extension,) = self.extensions
        target = Path(self.get_ext_fullpath(extension.name))
        note = target.with_name(MISSING)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            say = self.build_best(target)
        except CannotBuild as why:
            if cpu or cuda:
                kind, also = ("CUDA", ", nvcc with headers and libcudart") if cuda else ("CPU", "")
                raise SetupError(
                    f"native module: got CORTIQ_FORCE_{kind}, but {why}; expected a C++17 compiler, pybind11, ninja"
                    f"{also}. Install what is missing, or unset CORTIQ_FORCE_{kind} to go without."
                ) from None
            target.unlink(missing_ok=True)  # of an earlier build, from other sources
            note.write_text(f"{why}\n", encoding="utf-8")
            say = f"not built: {why}; its ops run on torch"
        else:
            note.unlink(missing_ok=True)
        print(f"cortiq_kernels: native module {say}", flush=True)

    def build_best(self, target: Path) -> str:
        """Build `target` with CUDA kernels, or without where that cannot be; returns what was built and why."""
        if forced("CPU"):
            return f"built for the CPU by {self.build(target)} (CORTIQ_FORCE_CPU)"
        try:
            cuda = Cuda.find()
            return f"built for the CPU and CUDA ({cuda.archs}) by {self.build(target, cuda)} and {cuda.nvcc}"
        except CannotBuild as why:
            if forced("CUDA"):
                raise
            return f"built for the CPU by {self.build(target)} (no CUDA: {why})"

    def build(self, target: Path, cuda: Cuda | None = None) -> str:
        """Compile and link `target`; returns the C++ compiler, raises CannotBuild."""
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
        if cuda:
            flags.append("-DCORTIQ_CUDA")
        link = [LINK, *(cuda.link if cuda else []), os.environ.get("LDFLAGS", "")]
        nvcc = cuda.command(cxx) if cuda else "false"
        text = NINJA.format(cxx=cxx, flags=dollars(flags), link=dollars(link), nvcc=dollars([nvcc]))
        objects = []
        for source in SOURCES + (CUDA_SOURCES if cuda else []):
            objects.append(Path(source).stem + ".o")
            rule = "compile_cuda" if source in CUDA_SOURCES else "compile"
            text += f"build {objects[-1]}: {rule} {escaped(Path(source).resolve())}\n"
        text += f"build {target.name}: link {' '.join(objects)}\n"
        (work / "build.ninja").write_text(text, encoding="utf-8")
        done = subprocess.run([ninja, "-C", str(work)], capture_output=True, text=True)
        (work / "build.log").write_text(done.stdout + done.stderr, encoding="utf-8")
        if done.returncode:
            print(done.stdout + done.stderr, file=sys.stderr)
            wrong = [line.strip() for line in done.stdout.splitlines() if re.search("error|cannot find", line.lower())]
            who = f"{cxx} or {cuda.nvcc}" if cuda else cxx
            raise CannotBuild(f"{who} failed: {wrong[0] if wrong else 'its output is above'}")
        shutil.copy2(work / target.name, target)
        return cxx

    def get_outputs(self) -> list[str]:
        """Files in the build directory, of which the note is one where the module is not."""
        return [
            path if Path(path).exists() else str(Path(path).with_name(MISSING)) for path in super().get_outputs()
        ]  # fmt: skip


class Cuda:
    """CUDA's compiler, and what it is asked for."""

    def __init__(self, nvcc: str, archs: str, link: list[str]):
        self.nvcc, self.archs, self.link = nvcc, archs, link

    @classmethod
    def find(cls) -> Cuda:
        """The compiler that is there, and the architectures that it knows; raises CannotBuild."""
        homes = [Path(os.environ[name], "bin", "nvcc") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
        nvcc = next((str(path) for path in homes if path.is_file()), shutil.which("nvcc"))
        if nvcc is None:
            raise CannotBuild("nvcc was not found (looked on the path, and under CUDA_HOME and CUDA_PATH)")
        known = {code.removeprefix("sm_") for code in asked(nvcc, "--list-gpu-code").split()}
        if not known:
            raise CannotBuild(f"{nvcc} lists no architectures")
        wanted = os.environ.get("CUDA_ARCH_LIST", "").replace(";", " ").replace(",", " ").split()
        archs = wanted or [a for a in CUDA_ARCHS.split() if a.replace(".", "").rstrip("a") in known]
        # Where its libraries are, nvcc alone knows: what is on the path is often a link or a script.
        found = re.search(r"^#\$ LIBRARIES=(.*)$", asked(nvcc, "--dryrun", "-x", "cu", "/dev/null"), re.M)
        places = [p for p in shlex.split(found[1]) if not p.endswith("stubs")] if found else []
        if not any(Path(place[2:], "libcudart_static.a").is_file() for place in places):
            raise CannotBuild(f"{nvcc} has no libcudart_static.a beside it")
        return cls(nvcc, " ".join(archs), [*map(shlex.quote, places), "-lcudart_static", "-ldl", "-lrt"])

    def command(self, cxx: str) -> str:
        """What compiles a .cu file."""
        codes = [a.replace(".", "").removeprefix("sm_") for a in self.archs.split()]
        targets = [f"-gencode arch=compute_{c},code=sm_{c}" for c in codes]
        if later := [c for c in codes if c.isdigit()]:  # for GPUs that are newer than all of them
            newest = max(later, key=int)
            targets.append(f"-gencode arch=compute_{newest},code=compute_{newest}")
        with_wgmma = "-DCORTIQ_SM90A" if "90a" in codes else ""
        host = f"-ccbin {shlex.quote(cxx)}" if shutil.which(cxx) else ""
        more = os.environ.get("NVCCFLAGS", "")
        return " ".join([shlex.quote(self.nvcc), NVCC_FLAGS, with_wgmma, host, *targets, more])


def asked(*command: str) -> str:
    """What a program prints, on either stream; raises CannotBuild when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise CannotBuild(f"{command[0]} cannot be run ({e})") from None
    if done.returncode:
        raise CannotBuild(f"{command[0]} {command[1]} failed with status {done.returncode}")
    return done.stdout + done.stderr


def forced(kind: str) -> bool:
    """Whether CORTIQ_FORCE_<kind> is set."""
    return os.environ.get(f"CORTIQ_FORCE_{kind}", "0") not in ("", "0")


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


def dollars(words: list[str]) -> str:
    """A command as ninja writes one."""
    return " ".join(words).replace("$", "$$")


setup(
    ext_modules=[Extension("cortiq_kernels._C", SOURCES + CUDA_SOURCES, depends=HEADERS)],
    cmdclass={"build_ext": NativeBuild},
)
