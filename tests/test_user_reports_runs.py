"""Interrupted runs, full disks, redirected output and missing GPUs as users of such packages met them, end to end.

Each test names the public report that it is modelled on.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from directories import SMALL, cortiq, id_rows, nll, records, refused, snapshot, tensors_of, write_dir
from tiny import config

from cortiq_kernels import cli
from cortiq_kernels.model import destination, hf_write
from cortiq_kernels.recipes import checkpoint_dir, prefix
from cortiq_kernels.report.runlog import read_log
from cortiq_kernels.step import Evaluator, Trainer

V = 384
CONFIG = config("LF", hidden=16, ffn=24, vocab=V, nq=2, nkv=1, hd=16, nk=1, nv=2)


def heal(model: Path, data: Path, out: Path, *more: object) -> tuple:
    inputs = ("--student", model, "--data", data, "--out", out, "--ce", "1")
    return ("heal", *inputs, "--device", "cpu", "--window", "32", "--batch", "1", "--lr", "1e-3", *more)


@pytest.fixture
def world(tmp_path) -> Path:
    """`m`, `t`: student and teacher; `d.jsonl`."""
    write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    write_dir(tmp_path / "t", CONFIG, tensors_of(CONFIG, seed=1))
    records(tmp_path / "d.jsonl", id_rows(V, (30,) * 6, "train") + id_rows(V, (30,) * 2, "val", seed=1))
    return tmp_path


def child(args: tuple, folder: Path, hook: Callable[[Callable[[], None]], None] = lambda ready: None) -> tuple:
    """Run the command line in a forked process, `hook(ready)` first; (pid, pipe that `ready` writes to)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            os.close(read)
            with open(folder / "stderr", "w") as err, open(folder / "stdout", "w") as out:
                sys.stderr, sys.stdout = err, out
                hook(lambda: os.write(write, b"x") and None)
                status = cli.main([str(a) for a in args])
        finally:
            os._exit(status)
    os.close(write)
    return pid, read


def finish(pid: int, seconds: float = 20.0) -> int:
    """Exit status of a child that must end soon (negative: the signal that killed it)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"still running after {seconds} s")


def in_targets(ready: Callable[[], None]) -> None:
    real = Evaluator.hidden

    def hidden(self, batch, x=None):
        ready()
        while True:
            real(self, batch, x)

    Evaluator.hidden = hidden


def in_eval(ready: Callable[[], None]) -> None:
    real = Evaluator.loss

    def loss(self, micros):
        ready()
        return real(self, itertools.cycle(list(micros)))

    Evaluator.loss = loss


def in_export(ready: Callable[[], None]) -> None:
    real, calls = hf_write.shard.write_tensor, []

    def write(f, tensor, dtype, name):
        calls.append(name)
        if len(calls) == 3:
            ready()
            while True:
                real(f, tensor, dtype, name)
                f.seek(0)
        real(f, tensor, dtype, name)

    hf_write.shard.write_tensor = write


def in_prefix(ready: Callable[[], None]) -> None:
    real = prefix.layers_forward

    def forward(*args):
        ready()
        while True:
            real(*args)

    prefix.layers_forward = forward


def in_training(ready: Callable[[], None]) -> None:
    real, calls = Trainer.gradients, []

    def gradients(self, micros, **more):
        calls.append(1)
        while len(calls) == 3:
            ready()
            real(self, micros, **more)
        return real(self, micros, **more)

    Trainer.gradients = gradients


def in_checkpoint(ready: Callable[[], None]) -> None:
    real, calls = checkpoint_dir._write_tensors, []

    def write(path, tensors):
        calls.append(1)
        real(path, tensors)
        while len(calls) == 2:
            ready()
            real(path, tensors)

    checkpoint_dir._write_tensors = write


HOOKS = {  # the step whose checkpoint stays
    in_targets: None,
    in_prefix: None,
    in_eval: None,
    in_training: 2,
    in_checkpoint: 2,
    in_export: 6,
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_honoured_in_every_phase(world, hook, number, tmp_path_factory):
    """Modelled on goodfire-ai/spd#741: a prompt exit in every phase, no half output, and the run can go on.

    Whole targets stay for the next try, and a checkpoint once a step is done.
    """
    io = tmp_path_factory.mktemp("io")
    before = snapshot(world)
    out = world / "deep" / "o"
    args = heal(world / "m", world / "d.jsonl", out, "--teacher", world / "t", "--ce", "0", "--train-from", "1",
                "--checkpoint-every", "1", "--log", io / "log")  # fmt: skip
    pid, pipe = child(args, io, hook)
    try:
        assert select.select([pipe], [], [], 60)[0] and os.read(pipe, 1) == b"x", (io / "stderr").read_text()
        time.sleep(0.05)
        sent = time.monotonic()
        os.kill(pid, number)
        assert finish(pid) == 128 + number
        assert time.monotonic() - sent < 5
    finally:
        os.close(pipe)
    step, last = HOOKS[hook], (io / "stderr").read_text().splitlines()[-1]
    go_on = "Start it again with the same command." if step is None else f"Go on after step {step} with the same "
    assert f"stopped by {number.name}; no output was written. {go_on}" in last
    assert read_log(io / "log")[-1]["event"] == "error" and (io / "stdout").read_text() == ""
    left = {p.name: sorted(f.suffix for f in p.iterdir()) for p in out.parent.glob("*")}
    assert left.pop("o.targets", None) == (None if hook is in_targets else [".targets"])
    assert left == ({} if step is None else {"o.resume": [".json", ".safetensors"]})
    assert cortiq(*args, "--resume").status == 0
    assert [p.name for p in out.parent.iterdir()] == ["o"]
    shutil.rmtree(out.parent)
    assert snapshot(world) == before


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB, where this process may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def plenty(monkeypatch) -> None:
    """The disk says that it has room, so that it fills up in the middle."""
    monkeypatch.setattr(destination.shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(2**40, 0, 2**40))


def big_model(path: Path) -> Path:
    cfg = {**CONFIG, "intermediate_size": 9000}
    return write_dir(path, cfg, tensors_of(cfg))


def test_full_disk_is_found_at_the_start(world, small_disk):
    """Modelled on mlfoundations/open_lm#154: the output, or targets that spill, do not fit on a 1 MiB tmpfs."""
    model, out = big_model(world / "big"), small_disk / "o"
    line = refused(small_disk, *heal(model, world / "d.jsonl", out))
    assert "free on" in line and "expected at least" in line
    line = refused(small_disk, "fold", "--model", model, "--data", world / "d.jsonl", "--out", out, *SMALL,
                   "--keep", "0.9")  # fmt: skip
    assert "expected at least" in line


def test_targets_need_room_too(world, small_disk, monkeypatch):
    """The kind of mlfoundations/open_lm#154: found at the start, and where the disk fills up later, an error and not
    a SIGBUS."""
    data = records(world / "long.jsonl", id_rows(V, (400,) * 20, "train") + id_rows(V, (30,), "val"))
    args = heal(world / "m", data, small_disk / "o", "--teacher", world / "t", "--ce", "0", "--window", "400")
    elsewhere = ("--targets", world / "kept")
    assert cortiq(*args, *elsewhere, "--dry-run", "--json").json["steps"] == 20

    def run() -> tuple[int, list[str]]:
        pid, pipe = child((*args, "--log", world / "log"), world)  # a process of its own, which a SIGBUS may end
        os.close(pipe)
        return finish(pid, 60), (world / "stderr").read_text().splitlines()

    status, lines = run()
    assert (status, len(lines)) == (2, 1) and "MiB" in lines[0] and "expected at least" in lines[0]
    assert not (world / "log").exists()
    plenty(monkeypatch)
    status, lines = run()
    assert status == 2 and "targets: got No space left on device" in lines[-1] and "--targets" in lines[-1]
    assert list(small_disk.iterdir()) == []


def test_full_disk_while_writing_keeps_the_previous_output(world, small_disk, monkeypatch):
    """Modelled on mlfoundations/open_lm#154: ENOSPC in the middle of a write, the log on the same disk."""
    assert cortiq(*heal(world / "m", world / "d.jsonl", small_disk / "first", "--epochs", "0.1")).status == 0
    assert cortiq("score", "--models", world / "m", "--data", world / "d.jsonl", *SMALL, "--splits", "val",
                  "--out", small_disk / "s.json").status == 0  # fmt: skip
    before = snapshot(small_disk)
    plenty(monkeypatch)
    done = cortiq(*heal(big_model(world / "big"), world / "d.jsonl", small_disk / "o", "--epochs", "0.1"))
    assert (done.status, done.out) == (1, "")
    last = done.err.splitlines()[-1]
    assert "No space left on device" in last and "no output was written" in last
    after = snapshot(small_disk)
    assert {k: v for k, v in after.items() if not k.startswith(("o.log", "o.resume"))} == before
    nll(model=small_disk / "first", data=world / "d.jsonl", split="val")
    (small_disk / "filler").write_bytes(b"x" * (shutil.os.statvfs(small_disk).f_bavail * 4096))
    args = ("score", "--models", world / "m", "--data", world / "d.jsonl", *SMALL, "--splits", "val")
    done = cortiq(*args, "--out", small_disk / "s.json")
    assert done.status == 1 and "No space left" in done.err
    assert snapshot(small_disk)["s.json"] == before["s.json"]


def test_full_disk_without_a_disk(world, monkeypatch):
    """The same where no file system can be mounted: the third tensor finds no space."""
    real, calls = hf_write.shard.write_tensor, []

    def write(*args):
        calls.append(args)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*args)

    monkeypatch.setattr(hf_write.shard, "write_tensor", write)
    before = snapshot(world)
    done = cortiq(*heal(world / "m", world / "d.jsonl", world / "a" / "o", "--log", world / "log"))
    last = done.err.splitlines()[-1]
    assert done.status == 1 and "No space left on device: writing" in last and "MiB are free; free some space" in last
    assert last.endswith("--resume; no output was written") and sorted(p.name for p in (world / "a").iterdir()) == [
        "o.resume"
    ]
    monkeypatch.undo()
    assert cortiq(*heal(world / "m", world / "d.jsonl", world / "a" / "o", "--log", world / "log"), "--resume")[0] == 0
    assert [p.name for p in (world / "a").iterdir()] == ["o"]
    shutil.rmtree(world / "a")
    (world / "log").unlink()
    (world / "log.html").unlink(missing_ok=True)
    assert snapshot(world) == before


def test_redirected_progress_is_plain_and_short(world):
    """Modelled on tqdm/tqdm#1342: `2>log` of a whole run in its own process."""
    data = records(world / "many.jsonl", id_rows(V, (30,) * 150, "train") + id_rows(V, (30,) * 2, "val", seed=1))
    args = [*heal(world / "m", data, world / "o", "--teacher", world / "t", "--ce", "0", "--eval-every", "50")]
    with open(world / "log", "wb") as log:
        done = subprocess.run([sys.executable, "-m", "cortiq_kernels.cli", *map(str, args)], stderr=log,
                              stdout=subprocess.PIPE, cwd=Path(__file__).parents[1],
                              env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"})  # fmt: skip
    text = (world / "log").read_bytes()
    assert done.returncode == 0 and b"\r" not in text + done.stdout and b"\x1b" not in text + done.stdout
    lines = text.decode().splitlines()
    assert len(lines) < 30 and all(len(line) < 400 for line in lines) and "Warning" not in text.decode()
    assert sum(line.startswith("held-out") for line in lines) == 4
    assert done.stdout.decode().startswith(("healed: ", "not healed: "))


# --------------------------------------------------------------------------------------------------- install, devices


def test_ops_import_on_a_machine_with_triton_and_no_gpu():
    """Modelled on triton-lang/triton#6150: importing every op asks Triton for no driver."""
    pytest.importorskip("triton")
    code = """
import importlib, pkgutil, sys
import triton.runtime.driver
def driver(*args): raise RuntimeError("0 active drivers ([]). There should only be one.")
module = sys.modules["triton.runtime.driver"]
assert hasattr(module, "_create_driver")
module._create_driver = driver
import cortiq_kernels.ops
for m in pkgutil.walk_packages(cortiq_kernels.ops.__path__, "cortiq_kernels.ops."):
    importlib.import_module(m.name)
import torch
from cortiq_kernels.ops.topk import topk_softmax
print(topk_softmax(torch.tensor([[1.0, 3.0, 2.0]]), 2).ids.tolist())
"""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=root)
    assert (done.returncode, done.stdout) == (0, "[[1, 2]]\n"), done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda:1", "cuda"])
def test_asking_for_a_gpu_without_one(world, device):
    """The CPU side of triton-lang/triton#2441: an explicit request is refused, never run on another device."""
    line = refused(world, *heal(world / "m", world / "d.jsonl", world / "o"), "--device", device)
    assert f"got '{device}'" in line and "expected a GPU" in line
