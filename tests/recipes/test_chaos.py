"""Kills at random moments of a heal, each followed by --resume: the result is that of a run that nobody touched.

The default is a tiny model in forked processes. CORTIQ_CHAOS=30 does 30 kills of the shipped small model, each run a
process of its own (minutes); CORTIQ_CHAOS_SEED repeats one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cortiq_kernels import cli
from cortiq_kernels.report.runlog import read_log

KILLS = int(os.environ.get("CORTIQ_CHAOS", "0"))
SEED = int(os.environ.get("CORTIQ_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
SHIPPED = Path(__file__).parents[2] / "examples" / "small_model"
TIMES = {"time", "seconds", "tokens_per_s", "left_s", "seconds_per_step", "tokens_per_second", "teacher_seconds"}
#: and what depends on the memory that is free
PLACES = {"out", "log", "targets", "checkpoint", "memory", "prefix", "activations", "activation_peaks"}


class Process:
    """A run of the command line: forked here (quick), or started as a user would."""

    def __init__(self, args: list[str], stderr: Path, forked: bool):
        self.popen = None
        if not forked:
            with open(stderr, "w") as err:
                command = [sys.executable, "-m", "cortiq_kernels", *args]
                self.popen = subprocess.Popen(command, stderr=err, stdout=subprocess.DEVNULL)
            self.pid = self.popen.pid
            return
        self.pid = os.fork()
        if self.pid == 0:
            status = 99
            try:
                with open(stderr, "w") as err, open(os.devnull, "w") as out:
                    sys.stderr, sys.stdout = err, out
                    status = cli.main(args)
            finally:
                os._exit(status)

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> int | None:
        """Exit status (negative: the signal that ended it), or None when it is still running after that time, or when
        `until` holds.
        """
        end = time.monotonic() + seconds
        while not until():
            if self.popen is not None:
                status = self.popen.poll()
                if status is not None:
                    return status
            else:
                done, raw = os.waitpid(self.pid, os.WNOHANG)
                if done:
                    return os.waitstatus_to_exitcode(raw)
            if time.monotonic() >= end:
                break
            time.sleep(0.002)
        return None


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def without_times(log: Path) -> list[dict]:
    """A run log less times, places, free memory, and what was found of the teacher's targets."""
    varies = ("targets of", "GiB allowed")
    events = [e for e in read_log(log) if not (e["event"] == "note" and any(v in e["text"] for v in varies))]

    def plain(value):
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items() if k not in TIMES | PLACES}
        return [plain(v) for v in value] if isinstance(value, list) else value

    return [plain(e) for e in events]


def chaos(folder: Path, args: Callable[[Path], list[str]], kills: int, forked: bool, patience: float) -> dict:
    """Kill and resume until there were `kills` kills, and compare; returns what happened."""
    rng = random.Random(SEED)
    print(f"CORTIQ_CHAOS_SEED={SEED}")
    (folder / "calm").mkdir()
    began = time.monotonic()
    assert Process(args(folder / "calm"), folder / "calm.err", forked).wait(patience) == 0, (
        folder / "calm.err"
    ).read_text()
    whole = time.monotonic() - began
    want, log = contents(folder / "calm" / "out"), without_times(folder / "calm" / "out.log.jsonl")
    seen: dict = {"kills": 0, "SIGKILL": 0, "SIGTERM": 0, "finished": 0, "steps": [], "seconds": round(whole, 1)}
    place = folder / "chaos"
    place.mkdir()
    while True:
        before = {p.name for p in place.iterdir()}  # a SIGKILL leaves what the next run cleans up
        run = Process(args(place), folder / "chaos.err", forked)
        state = place / "out.resume" / "state.json"
        last, status = seen["kills"] == kills, None
        if last:
            status = run.wait(patience)
        elif seen["kills"] % 2:  # while it trains, however little of the whole that is on this machine
            status = run.wait(patience, until=state.exists)
        if status is None and not last:
            status = run.wait(rng.uniform(0.0, whole / 10 if seen["kills"] % 2 else whole))
        text = f"seed {SEED}, after {seen['kills']} kills: "
        if status is None:
            assert not last, text + "the run hangs"
            name = rng.choice(("SIGKILL", "SIGTERM"))
            os.kill(run.pid, getattr(signal, name))
            status = run.wait(patience)
            err = (folder / "chaos.err").read_text()
            expected = (-9, 0) if name == "SIGKILL" else (143, -15, 0)  # 0: it had just finished
            assert status in expected, text + f"{name} gave {status}: {err}"
            seen["kills"] += 1
            seen[name] += 1
            if name == "SIGTERM" and status == 143:
                left = {p.name for p in place.iterdir()}
                allowed = {"out", "out.resume", "out.targets", "out.log.jsonl", "out.html"}
                assert left - before <= allowed, text + str(left)
        if (place / "out").exists():
            assert contents(place / "out") == want, text + "another result"
        step = json.loads(state.read_text())["step"] if state.exists() else 0
        seen["steps"].append(step)
        if status == 0:
            if "nothing to resume: " not in (folder / "chaos.err").read_text():  # killed before the log's last line
                assert without_times(place / "out.log.jsonl") == log, text + "another log"
            assert {p.name for p in place.iterdir()} <= {"out", "out.log.jsonl", "out.html"}, text
            seen["finished"] += 1
            if last:
                return seen
        if status == 0:
            shutil.rmtree(place)
            place.mkdir()
        elif status not in (-9, -15, 143):
            raise AssertionError(text + f"status {status}: " + (folder / "chaos.err").read_text())


@pytest.mark.skipif(KILLS > 0, reason="the shipped model is killed instead")
def test_killed_at_random_and_resumed(world, tmp_path):
    def args(place: Path) -> list[str]:
        inputs = ["--student", str(world.student), "--teacher", str(world.teacher), "--data", str(world.data)]
        sizes = ["--window", "32", "--batch", "1", "--topk", "8", "--epochs", "1.5", "--train-from", "1"]
        more = ["--eval-every", "4", "--lr", "2e-3", "--device", "cpu", "--checkpoint-every", "1", "--resume"]
        return ["heal", *inputs, "--out", str(place / "out"), *sizes, *more]

    seen = chaos(tmp_path, args, kills=8, forked=True, patience=60)
    assert any(seen["steps"]), seen


@pytest.mark.skipif(KILLS == 0, reason="CORTIQ_CHAOS says how many kills")
def test_killed_at_random_and_resumed_on_the_shipped_model(tmp_path):
    shape = ["--window", "512", "--batch", "2", "--device", "cpu"]
    lines = (SHIPPED / "data.jsonl").read_text().splitlines(keepends=True)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(lines[::12]))  # enough for every phase, and a run in half a minute
    fold = ["fold", "--model", str(SHIPPED / "model"), "--data", str(SHIPPED / "data.jsonl"), "--out"]
    assert cli.main([*fold, str(tmp_path / "fold"), "--keep", "0.5", "--max-batches", "4", *shape]) == 0

    def args(place: Path) -> list[str]:
        inputs = ["--student", str(tmp_path / "fold"), "--teacher", str(SHIPPED / "model")]
        more = ["--lr", "1e-3", "--epochs", "1", "--eval-every", "5", "--checkpoint-every", "2s", "--resume"]
        return ["heal", *inputs, "--data", str(data), "--out", str(place / "out"), *shape, *more]

    seen = chaos(tmp_path, args, kills=KILLS, forked=False, patience=900)
    print(seen)
