"""One run at a time for an output, and outputs that never land on an input."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cortiq_kernels.model.geometry import ModelError
from cortiq_kernels.recipes import fold, heal, score
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.fold_config import FoldConfig
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.lock import lock_name, locked
from cortiq_kernels.recipes.outputs import check_files
from cortiq_kernels.recipes.score_config import ScoreConfig


def test_second_holder_is_refused_by_name(tmp_path):
    out = tmp_path / "deep" / "o"
    with locked("heal", out):
        mine = re.escape(f"process {os.getpid()} on {socket.gethostname()} (since ")
        with pytest.raises(InputError, match=rf"heal: out: got '.*o', which {mine}.* is writing; expected"):  # noqa: SIM117
            with locked("heal", out):
                pass
        (tmp_path / "alias").symlink_to(tmp_path / "deep")
        with pytest.raises(InputError, match="is writing"), locked("heal", tmp_path / "alias" / "o"):
            pass
    assert list(tmp_path.iterdir()) == [tmp_path / "alias"]
    with locked("heal", out):
        pass


def test_lock_of_a_killed_process_blocks_nobody(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from cortiq_kernels.recipes.lock import locked\n"
        "with locked('heal', Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "o")], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match=f"process {holder.pid} on "), locked("heal", tmp_path / "o"):
            pass
        holder.send_signal(signal.SIGKILL)
    assert lock_name(tmp_path / "o").exists()
    with locked("heal", tmp_path / "o"):
        pass
    assert not list(tmp_path.iterdir())


def test_many_takers_one_holder(tmp_path):
    """Lock, work, remove the lock file, from eight threads at once: never two inside."""
    inside, most, refused = [], [], []

    def take() -> None:
        for _ in range(50):
            try:
                with locked("heal", tmp_path / "o"):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()
            except InputError:
                refused.append(1)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert set(most) == {1} and len(most) + len(refused) == 400


@pytest.mark.parametrize("recipe", ["heal", "fold", "score"])
def test_every_recipe_takes_it(world, tmp_path, recipe):
    out = tmp_path / "o"
    cfg, run = {
        "heal": (HealConfig(world.student, world.data, out, world.teacher, topk=8), heal.run),
        "fold": (FoldConfig(world.teacher, out, world.data), fold.run),
        "score": (ScoreConfig((world.teacher,), world.data, out=out), score.run),
    }[recipe]
    cfg = dataclasses.replace(cfg, device="cpu", window=32, batch=2)
    with locked(recipe, out), pytest.raises(InputError, match=f"{recipe}: out: .*{os.getpid()}.* is writing"):
        run(cfg)
    assert not list(tmp_path.iterdir())
    seen: list[bool] = []
    run(cfg, lambda event: seen.append(lock_name(out).exists()))
    assert all(seen) and not lock_name(out).exists()


@pytest.fixture
def twice(tmp_path, world):
    """A copy of the student, and a second mount of it."""
    source, mounted = tmp_path / "m", tmp_path / "bind"
    shutil.copytree(world.student, source)
    mounted.mkdir()
    mount = ["mount", "--bind", str(source), str(mounted)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot bind a directory")
    yield source, mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def test_second_mount_of_an_input_is_the_input(world, tmp_path, twice):
    """The kind of bghira/SimpleTuner#2714: the source under another name that no symlink tells."""
    source, mounted = twice
    before = {p.name: p.read_bytes() for p in source.iterdir()}
    cfg = HealConfig(source, world.data, mounted / "new", world.teacher, device="cpu", window=32, batch=2)
    with pytest.raises(ModelError, match="is inside the source"):
        heal.run(cfg)
    with pytest.raises(InputError, match="not \\(in\\) the input"):
        check_files("heal", dataclasses.replace(cfg, out=tmp_path / "o", log=mounted / "log"))
    assert {p.name: p.read_bytes() for p in source.iterdir()} == before


def test_hard_link_of_an_input_is_the_input(world, tmp_path):
    data = tmp_path / "d.jsonl"
    data.write_bytes(b'{"event": 1}\n')
    linked = tmp_path / "log"
    os.link(data, linked)
    cfg = HealConfig(world.student, data, tmp_path / "o", world.teacher, log=linked)
    with pytest.raises(InputError, match="not \\(in\\) the input"):
        check_files("heal", cfg)
    assert Path(data).read_bytes() == b'{"event": 1}\n'
