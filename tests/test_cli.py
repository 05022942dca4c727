"""The command line: flags, files, refusals, output that pipes well, and signals."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cortiq_kernels import cli, cli_config
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.score_config import ScoreConfig
from cortiq_kernels.report import console, runlog

_spec = importlib.util.spec_from_file_location("recipes_world", Path(__file__).parent / "recipes" / "conftest.py")
assert _spec and _spec.loader
recipes_world = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(recipes_world)
world = recipes_world.world
one_thread = recipes_world.one_thread

NEED = ["--student", "s", "--teacher", "t", "--data", "d", "--out", "o"]
SMALL = ["--device", "cpu", "--window", "32", "--batch", "2"]


def heal_args(world, out: Path, *more: str) -> list[str]:
    inputs = ["--student", str(world.student), "--teacher", str(world.teacher), "--data", str(world.data)]
    return ["heal", *inputs, "--out", str(out), *SMALL, "--lr", "2e-3", "--topk", "8", "--eval-every", "4", *more]


def test_parsing_needs_no_torch():
    code = (
        "import sys; from cortiq_kernels import cli;"
        f"cfg, flags = cli.parse('heal', {NEED!r}); assert cfg.topk == 64 and not flags.json, cfg;"
        "heavy = {'torch', 'numpy', 'tokenizers', 'rich.progress'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flags():
    cfg, flags = cli.parse(
        "heal", [*NEED, "--lr", "1e-4", "--genesis", "--train-from", "3", "--dtype", "f32", "--json"]
    )
    assert cfg == HealConfig(
        Path("s"), Path("d"), Path("o"), Path("t"), lr=1e-4, genesis=True, train_from=3, dtype="f32"
    )
    assert flags.json and not flags.dry_run and flags.config is None
    cfg, _ = cli.parse("score", ["--models", "a", "b", "c", "--data", "d", "--splits", "val", "test"])
    assert cfg == ScoreConfig((Path("a"), Path("b"), Path("c")), Path("d"), splits=("val", "test"))


def test_toml_lies_below_flags(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('student = "s"\nteacher = "t"\ndata = "d"\nout = "o"\nlr = 3e-4\ntrain-from = 2\nepochs = 2\n')
    cfg, _ = cli.parse("heal", ["--config", str(file), "--lr", "5e-4"])
    assert cfg == HealConfig(Path("s"), Path("d"), Path("o"), Path("t"), lr=5e-4, train_from=2, epochs=2.0)
    file.write_text('[score]\nmodels = ["a", "b"]\ndata = "d"\n[heal]\nstudent = "other"\n')
    cfg, _ = cli.parse("score", [f"--config={file}"])
    assert cfg.models == (Path("a"), Path("b"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rat = 1", "learning_rat: got an unknown setting"),
        ("widow = 8", "Did you mean window?"),
        ('lr = "fast"', "expected a number"),
        ("topk = 1.5", "expected an integer"),
        ('train = "some"', "'layers' | 'mlp' | 'all'"),
        ("genesis = 1", "expected true or false"),
        ("lr = ", "cannot be read"),
    ],
)
def test_toml_mistakes(tmp_path, text, words, capsys):
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(InputError) as e:
        cli_config.read_toml(file, "heal", HealConfig, cli.RECIPES)
    assert words in str(e.value)
    assert cli.main(["heal", "--config", str(file), *NEED]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_help_and_unknown_words(capsys):
    assert cli.main(["--help"]) == 0 and "heal" in capsys.readouterr().out
    assert cli.main([]) == 2
    assert cli.main(["heel"]) == 2 and "Did you mean heal?" in capsys.readouterr().err
    assert cli.main(["heal", "--help"]) == 0 and "--train-from" in capsys.readouterr().out
    assert cli.main(["heal", *NEED, "--stdent", "x"]) == 2
    assert cli.main(["heal", "--data", "d"]) == 2 and "--student" in capsys.readouterr().err


REFUSED = {
    "no model": lambda w, out: ["heal", "--student", "nowhere", "--ce", "1", "--data", str(w.data), "--out", str(out)],
    "no data": lambda w, out: [*heal_args(w, out), "--data", "nowhere.jsonl"],
    "bad setting": lambda w, out: heal_args(w, out, "--warm", "0"),
    "half on a CPU": lambda w, out: heal_args(w, out, "--dtype", "f16"),
    "output is input": lambda w, out: [*heal_args(w, out), "--out", str(w.student)],
    "fold too wide": lambda w, out: ["fold", "--model", str(w.teacher), "--data", str(w.data), "--out", str(out),
                                     "--width", "4000", "--device", "cpu"],
    "score nothing": lambda w, out: ["score", "--models", str(w.teacher), "--data", str(w.data), "--splits", "dev"],
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_one_line_and_nothing_written(world, tmp_path, capsys, case):
    (tmp_path / "in").mkdir()
    assert cli.main(REFUSED[case](world, tmp_path / "in" / "out")) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "got" in captured.err or "expected" in captured.err or "no such file" in captured.err
    assert list((tmp_path / "in").iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(world, tmp_path, capsys):
    assert cli.main(heal_args(world, tmp_path / "o", "--device", "cuda")) == 2
    assert "expected a GPU" in capsys.readouterr().err


def test_several_bad_records_are_still_one_line(world, tmp_path, capsys):
    data = tmp_path / "bad.jsonl"
    data.write_text('{"x": 1}\n{"ids": "no"}\n')
    assert cli.main([*heal_args(world, tmp_path / "o"), "--data", str(data)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "line 1" in err and "line 2" in err


def test_dry_run(world, tmp_path, capsys):
    before = set(tmp_path.iterdir())
    assert cli.main(heal_args(world, tmp_path / "o", "--dry-run", "--train-from", "1")) == 0
    text = capsys.readouterr().out
    for word in (
        "nothing was written",
        "3 layers",
        "steps",
        "weights train",
        "asked for",
        "memory",
        "run once per batch",
    ):
        assert word in text
    assert cli.main(heal_args(world, tmp_path / "o", "--dry-run", "--json")) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["steps"] > 0 and plan["memory"]["activations"] > 0 and plan["device_reason"] == "asked for"
    fold = ["fold", "--model", str(world.teacher), "--data", str(world.data), "--out", str(tmp_path / "f")]
    assert cli.main([*fold, "--dry-run"]) == 0 and "parameters remain" in capsys.readouterr().out
    score = ["score", "--models", str(world.teacher), "--data", str(world.data)]
    assert cli.main([*score, "--dry-run"]) == 0 and "scored tokens" in capsys.readouterr().out
    assert set(tmp_path.iterdir()) == before


def test_the_road_by_the_next_commands(world, tmp_path, capsys):
    """fold prints the heal command, heal prints the score command: typed as printed, they work."""

    def go(args: list[str]) -> tuple[str, str]:
        assert cli.main(args) == 0
        captured = capsys.readouterr()
        assert "\r" not in captured.err and "\x1b" not in captured.err + captured.out
        return captured.out, captured.out.splitlines()[-1].split("next: cortiq ")[-1]

    model = ["--model", str(world.teacher), "--data", str(world.data), "--out", str(tmp_path / "fold")]
    out, following = go(["fold", *model, "--align", "4", *SMALL])
    assert "MLP width 40 -> 20" in out
    out, following = go([*shlex.split(following), *SMALL, "--lr", "2e-3", "--topk", "8", "--epochs", "2"])
    assert out.startswith("healed: held-out KL")
    log = runlog.read_log(tmp_path / "fold-healed.log.jsonl")
    kinds = [e["event"] for e in log]
    assert kinds[:2] == ["start", "plan"] and kinds[-2:] == ["write", "done"] and {"step", "eval"} <= set(kinds)
    assert log[0]["settings"]["lr"] == 2e-3 and all("time" in e for e in log)
    out, _ = go([*shlex.split(following), *SMALL])
    table = out.splitlines()
    assert table[0].split()[:2] == ["model", "split"] and "KL to source" in table[0]
    nll = {row.split()[0]: float(row.split()[3]) for row in table[1:] if row.split()[2] == "all"}
    assert set(nll) == {"teacher", "fold", "fold-healed"}


def test_json_is_the_only_thing_on_stdout(world, tmp_path, capsys):
    assert cli.main(heal_args(world, tmp_path / "o", "--json", "--epochs", "0.1")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] == 1 and report["out"] == str(tmp_path / "o") and report["log"].endswith("o.log.jsonl")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_leave_nothing_half_written(world, tmp_path, number, status):
    out = tmp_path / "o"
    args = heal_args(world, out, "--epochs", "5000")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "cortiq_kernels.cli", *args], stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as process:
        log = tmp_path / "o.log.jsonl"
        end = time.monotonic() + 60
        while time.monotonic() < end and not (log.exists() and '"step"' in log.read_text()):
            time.sleep(0.05)
        sent = time.monotonic()
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == status
    assert time.monotonic() - sent < 10
    assert stdout == b"" and b"\r" not in stderr and b"\x1b" not in stderr
    assert f"stopped by {signal.Signals(number).name}" in stderr.decode().splitlines()[-1]
    assert not out.exists() and not [p for p in tmp_path.iterdir() if "partial" in p.name]
    assert runlog.read_log(log)[-1]["event"] == "error"


def test_plain_lines_are_few(capsys):
    view = console.PlainView(sys.stderr, every=1000.0)
    for d in range(1, 501):
        view(
            {"event": "step", "step": d, "of": 500, "loss": 1.0, "loss_name": "KL", "norm": 1.0, "rate": 1e-5,
             "seconds": 0.1, "tokens_per_s": 10.0, "left_s": 3.0, "skipped": 0}
        )  # fmt: skip
    view({"event": "eval", "step": 500, "of": 500, "loss": float("nan"), "loss_name": "KL", "best": 1.0,
          "best_step": 3, "improved": False})  # fmt: skip
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 4 and lines[-1] == "held-out KL not finite after step 500/500 (best 1.0000 at step 3)"


def test_live_view_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with console.view_for(terminal) as view:
        assert isinstance(view, console.LiveView)
        for done in (1, 2):
            view({"event": "tick", "phase": "teacher", "done": done, "of": 2})
        view({"event": "note", "text": "a [bracket] survives"})
    assert "a [bracket] survives" in terminal.getvalue()


def test_run_log_has_no_nan_and_survives_a_cut(tmp_path):
    path = tmp_path / "deep" / "r.jsonl"
    with runlog.RunLog(path, {"recipe": "heal"}) as log:
        assert not path.exists()
        log({"event": "tick", "phase": "x", "done": 1, "of": 2})
        assert not path.exists()
        log({"event": "step", "loss": float("nan"), "rates": (1.0, float("inf"))})
    path.write_text(path.read_text() + '{"event": "st')
    events = runlog.read_log(path)
    assert [e["event"] for e in events] == ["start", "step"]
    assert events[1]["loss"] is None and events[1]["rates"] == [1.0, None]


def test_plan_that_cannot_fit_is_refused(world, tmp_path, capsys):
    huge = ["--window", "50000000", "--batch", "1", "--packing", "stream"]
    assert cli.main(heal_args(world, tmp_path / "o", *huge)) == 2
    err = capsys.readouterr().err
    assert "heal: memory: got a plan that needs at least" in err and "Lower --batch or --window." in err
    assert not list(tmp_path.iterdir())


def test_window_and_batch_beyond_the_data_cost_nothing(world, tmp_path, capsys):
    """Half a terabyte of padding, were they taken as they are."""
    wide = ["--window", "1000000", "--batch", "100000", "--device", "cpu"]
    data = ["--data", str(world.data)]
    assert cli.main(["fold", "--model", str(world.teacher), *data, "--out", str(tmp_path / "f"), *wide]) == 0
    assert cli.main(["score", "--models", str(world.teacher), *data, "--splits", "val", *wide]) == 0


def test_log_never_replaces_a_file_of_another_kind(world, tmp_path, capsys):
    mine = tmp_path / "mine.txt"
    mine.write_text("precious\n")
    assert cli.main(heal_args(world, tmp_path / "o", "--log", str(mine), "--dry-run")) == 2
    assert "which is no run log" in capsys.readouterr().err
    assert mine.read_text() == "precious\n" and not (tmp_path / "o").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_refused(world, tmp_path, capsys):
    data = tmp_path / "d.jsonl"
    data.write_bytes(world.data.read_bytes())
    data.chmod(0)
    assert cli.main(["score", "--models", str(world.teacher), "--data", str(data)]) == 2
    assert "permission denied" in capsys.readouterr().err
