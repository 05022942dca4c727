"""What a fuzz case may end in, and the process that it runs in.

A case is a set of files laid over a small world (a model directory with a tokenizer, and records), and one command. It
may be accepted (status 0; what it wrote is whole) or refused: status 2, nothing on stdout, one printable line on
stderr, an error of the package's own kinds, nothing written. Anything else is a fault: another status, a traceback, an
error of Python's own that happened to be a ValueError, a changed file, no end within `SECONDS`, more than `ROOM` bytes
of memory, a crash.

Cases run one after the other in a forked process, so that a hang or a crash is one case's, and with a limit on its
memory, so that an allocation that only the file asked for is seen.

    CORTIQ_FUZZ_CASES   cases of each kind (default: a few, the same in every run)
    CORTIQ_FUZZ_SEED    seed of a longer run (printed by it); default: a new one
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import resource
import shutil
import sys
import traceback
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from directories import id_rows, load_conftest, records, tensors_of, write_dir
from tiny import config

from cortiq_kernels import cli
from cortiq_kernels.reading import Refusal

SECONDS = 30
ROOM = 2 << 30
LONGEST = 4000  # characters of a refusal
CONTROL = ("Cc", "Cs", "Zl", "Zp")  # what no line on a terminal may hold
QUICK = 30
V = 384
CONFIG = config("LF", hidden=16, ffn=24, vocab=V, nq=2, nkv=1, hd=16, nk=1, nv=2)
RUN = ("--device", "cpu", "--window", "32", "--batch", "1")


class Outcome(NamedTuple):
    """How a case ended: exit status, the texts, and what is wrong with it (None: nothing)."""

    status: int
    out: str
    err: str
    fault: str | None


def commands(root: Path) -> dict[str, tuple[str, ...]]:
    """The commands that a case may run on the world at `root`."""
    m, d, out = str(root / "m"), str(root / "d.jsonl"), str(root / "out")
    return {
        "score": ("score", "--models", m, "--data", d, *RUN),
        "heal": ("heal", "--student", m, "--teacher", m, "--data", d, "--out", out, *RUN, "--dry-run"),
        "fold": ("fold", "--model", m, "--data", d, "--out", out, *RUN, "--align", "4"),
        "toml": ("heal", "--config", str(root / "c.toml"), "--dry-run"),
    }


def build_world(root: Path) -> Path:
    """`m`: a model directory with a tokenizer and a template; `d.jsonl`: records of every kind."""
    builders = load_conftest("data")
    builders.write_model_dir(root / "m")
    write_dir(root / "m", CONFIG, tensors_of(CONFIG), shards=2)
    chat = [{"role": "user", "content": "What is the answer?"}, {"role": "assistant", "content": "The answer is 42."}]
    rows: list[dict[str, Any]] = []
    for split in ("train", "val", "test"):
        rows += id_rows(V, (30, 20), split)
        rows += [{"messages": chat, "split": split}, {"text": "the quick brown fox", "split": split}]
    records(root / "d.jsonl", rows)
    return root


def _files(root: Path) -> dict[str, tuple[int, int]]:
    """Every path below `root`, with its kind and size."""
    return {str(p.relative_to(root)): (p.lstat().st_mode, p.lstat().st_size if p.is_file() else 0)
            for p in root.rglob("*")}  # fmt: skip


class _Run:
    """Runs cases, in the child."""

    def __init__(self, root: Path):
        self.root = root
        self.commands = commands(root)
        self.originals = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}

    def __call__(self, files: Mapping[str, bytes | None], command: str, more: tuple[str, ...]) -> Outcome:
        for name, raw in files.items():
            place = self.root / name
            place.unlink(missing_ok=True)
            if raw is not None:
                place.write_bytes(raw.replace(b"@", bytes(self.root)) if name.endswith(".toml") else raw)
        try:
            return self._judged((*self.commands[command], *more))
        finally:
            for name in files:
                (self.root / name).unlink(missing_ok=True)
                if name in self.originals:
                    (self.root / name).write_bytes(self.originals[name])
            shutil.rmtree(self.root / "out", ignore_errors=True)
            (self.root / "out.log.jsonl").unlink(missing_ok=True)

    def _judged(self, args: tuple[str, ...]) -> Outcome:
        raised: list[BaseException | None] = []
        real = cli.fail

        def fail(text: str, status: int) -> int:
            raised.append(sys.exc_info()[1])
            return real(text, status)

        cli.fail = fail
        before = _files(self.root)
        out, err = io.StringIO(), io.StringIO()
        fault = None
        status = -1
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = cli.main(list(args))
        except BaseException:
            fault = traceback.format_exc()[-3000:]
        finally:
            cli.fail = real
        new = {k: v for k, v in _files(self.root).items() if before.get(k) != v}
        if fault is None:
            fault = self._refusal(out.getvalue(), err.getvalue(), raised, new) if status else self._accepted(args, out)
        where = f"\n(status {status}: {err.getvalue()[-800:]})"
        return Outcome(status, out.getvalue(), err.getvalue(), fault and fault + where)

    def _accepted(self, args: tuple[str, ...], out: io.StringIO) -> str | None:
        out.getvalue().encode()
        if "--dry-run" in args and (self.root / "out").exists():
            return "a dry run wrote something"
        if args[0] == "fold" and "--dry-run" not in args:
            from cortiq_kernels.model.hf import open_model

            open_model(self.root / "out")
        return None

    def _refusal(self, out: str, err: str, raised: list, new: Mapping[str, object]) -> str | None:
        if not raised:
            return "no refusal of the package's own"
        if not isinstance(raised[0], Refusal):
            return f"refused by {type(raised[0]).__name__}, which is not a refusal of ours"
        if new:
            return f"left {sorted(new)}"
        last = err.removesuffix("\n").split("\n")[-1]
        if out or not last or any(unicodedata.category(c) in CONTROL for c in last) or len(last) > LONGEST:
            return f"not one printable line of at most {LONGEST} characters, but {len(last)}, on stdout {out[:100]!r}"
        return None


def _child(pipe: Any, root: Path) -> None:
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)  # panics of native libraries write there
    run = _Run(root)
    found = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found:
        resource.setrlimit(resource.RLIMIT_AS, (int(found[1]) * 1024 + ROOM, resource.RLIM_INFINITY))
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(run(*case))


class Lane:
    """The process that runs cases, started again after a hang or a crash; counts what came of them."""

    def __init__(self, make_root: Callable[[], Path]):
        self.make_root = make_root
        self.process: Any = None
        self.counts = {"accepted": 0, "refused": 0, "faults": 0}

    def __call__(self, files: Mapping[str, bytes | None], command: str, more: tuple[str, ...] = ()) -> Outcome:
        """Run one case."""
        if self.process is None:
            here, there = multiprocessing.get_context("fork").Pipe()
            self.pipe = here
            self.process = multiprocessing.get_context("fork").Process(
                target=_child, args=(there, build_world(self.make_root())), daemon=True
            )
            self.process.start()
            there.close()
        self.pipe.send((dict(files), command, more))
        outcome = Outcome(-1, "", "", f"no end within {SECONDS} s")
        if self.pipe.poll(SECONDS):
            try:
                outcome = self.pipe.recv()
            except EOFError:
                self.process.join(5)
                outcome = Outcome(-1, "", "", f"the process crashed (exit code {self.process.exitcode})")
        if outcome.status == -1:
            self.close()
        self.counts["faults" if outcome.fault else "refused" if outcome.status else "accepted"] += 1
        return outcome

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None


def cases() -> int:
    """How many cases of each kind."""
    return int(os.environ.get("CORTIQ_FUZZ_CASES", QUICK))


def fuzzed(strategy: Any) -> Callable[[Callable[[Lane, Any], None]], Any]:
    """Make a test of `check(lane, case)`, for cases of `strategy`."""

    def decorate(check: Callable[[Lane, Any], None]) -> Any:
        seed = os.environ.get("CORTIQ_FUZZ_SEED")

        @pytest.mark.fuzz
        def test(lane: Lane) -> None:
            @hypothesis.settings(
                max_examples=cases(), deadline=None, database=None, derandomize=seed is None,
                suppress_health_check=list(hypothesis.HealthCheck), print_blob=True, report_multiple_bugs=False,
            )  # fmt: skip
            @hypothesis.given(strategy)
            def run(case: Any) -> None:
                check(lane, case)

            lane.counts = dict.fromkeys(lane.counts, 0)
            began = "the same cases in every run" if seed is None else f"CORTIQ_FUZZ_SEED={seed}"
            try:
                (hypothesis.seed(int(seed))(run) if seed is not None else run)()
            finally:  # shrinking a fault runs more cases than were asked for
                print(f"{check.__name__}: {', '.join(f'{n} {what}' for what, n in lane.counts.items())}; {began}")

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate
