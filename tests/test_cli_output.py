"""What a command writes where: plain bounded lines off a terminal, help within a second, tracebacks for bugs alone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import pytest
import torch
from directories import cortiq, id_rows, records, tensors_of, write_dir
from report_world import CONFIG, TRAIN, V, fold, heal, score

from cortiq_kernels import backend, cli, env
from cortiq_kernels.ops import triton_gate
from cortiq_kernels.recipes import heal as heal_recipe
from cortiq_kernels.report import console
from cortiq_kernels.report.runlog import LogError, RunLog, read_log
from cortiq_kernels.step import Trainer

MODULE = [sys.executable, "-m", "cortiq_kernels"]
STEP = {"event": "step", "of": 10**6, "loss": 1.0, "loss_name": "KL", "norm": 1.0, "rate": 1e-5, "seconds": 0.1,
        "tokens_per_s": 10.0, "left_s": 3.0, "skipped": 0}  # fmt: skip
EVAL = {"event": "eval", "of": 10**6, "loss": 1.0, "loss_name": "KL", "best": 1.0, "best_step": 3, "improved": False}
SKIP = {"event": "skip", "loss": None, "norm": None, "skipped": 1, "in_row": 1, "scale": 1.0}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("output")
    write_dir(root / "m", CONFIG, tensors_of(CONFIG))
    return root, records(root / "d.jsonl", TRAIN)


def controls(text: str) -> list[str]:
    """Characters that move a cursor, start a line elsewhere or hide something; a newline is none."""
    return [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Zl", "Zp")]


@pytest.mark.parametrize("args", [["--help"], ["heal", "--help"], ["score", "-h"], ["report", "--help"], ["--version"]])
def test_help_within_a_second(args):
    """Also on a busy machine: the best of three, after a first one that fills the file cache. No torch."""
    times = []
    for _ in range(4):
        began = time.perf_counter()
        done = subprocess.run([*MODULE, *args], capture_output=True, text=True, timeout=60)
        times.append(time.perf_counter() - began)
        assert done.returncode == 0 and done.stdout and done.stderr == ""
        assert not controls(done.stdout)
        if min(times[1:], default=9.0) < 1.0:
            break
    assert min(times[1:]) < 1.0, times


def test_help_imports_no_torch():
    code = (
        "import sys, runpy; from cortiq_kernels import cli; assert cli.main(['heal', '--help']) == 0;"
        "assert cli.main(['--help']) == 0; assert cli.main(['heal', '--lr', 'x']) == 2;"
        "heavy = {'torch', 'numpy', 'tokenizers'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_module_is_the_command(place):
    """`python -m cortiq_kernels` is `cortiq`: same words, same status; a pipe gets no control character."""
    root, data = place
    lines = {}
    for words in (MODULE, [sys.executable, "-m", "cortiq_kernels.cli"]):
        done = subprocess.run([*words, "heal", "--lr", "x"], capture_output=True, text=True)
        lines[words[-1]] = (done.returncode, done.stdout, done.stderr)
    assert len(set(lines.values())) == 1 and lines["cortiq_kernels"][0] == 2
    assert "usage" not in lines["cortiq_kernels"][2]


def test_a_run_piped_to_a_file(place, tmp_path):
    """As `cortiq heal ... 2> log > result`, with names that try to move the cursor."""
    root, _ = place
    strange = "a\x1b[2Jb\rc\u2028d"
    rows = id_rows(V, (30, 25, 32), "train") + id_rows(V, (26,), "val", seed=2)
    rows += [{**r, "category": strange} for r in id_rows(V, (9, 12), "test", seed=3)]
    data = records(tmp_path / "d.jsonl", rows)
    env_ = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "FORCE_COLOR": "1"}
    commands = (heal(root / "m", data, tmp_path / "o", "--epochs", "40"), score(root / "m", data))
    for args in commands:
        with open(tmp_path / "err", "w") as err, open(tmp_path / "out", "w") as out:
            subprocess.run([*MODULE, *map(str, args)], stdout=out, stderr=err, env=env_, check=True, timeout=120)
        err_text, out_text = (tmp_path / "err").read_text(), (tmp_path / "out").read_text()
        assert not controls(err_text) and not controls(out_text)
        assert 2 <= err_text.count("\n") <= 40
    assert "\\x1b[2Jb" in out_text


@pytest.mark.parametrize("days", [0.01, 1.0, 30.0])
def test_lines_are_bounded_however_long_a_run(days):
    """Ten steps, one evaluation and one skip a second, for up to a month."""
    now = [0.0]
    stream = io.StringIO()
    view = console.PlainView(stream, clock=lambda: now[0])
    ticks = int(min(days * 86400, 20000))
    for d in range(1, ticks + 1):
        now[0] = d * days * 86400 / ticks
        view(STEP | {"step": d})
        view(EVAL | {"step": d})
        view(SKIP | {"step": d})
    kinds = ["skip" if " skipped:" in line else line.split()[0] for line in stream.getvalue().splitlines()]
    assert all(kinds.count(k) <= 1000 for k in set(kinds)) and len(kinds) >= 100


def test_the_last_of_each_kind_is_shown():
    stream = io.StringIO()
    view = console.PlainView(stream, clock=lambda: 0.0)
    for d in range(1, 1001):
        view(STEP | {"step": d, "of": 1000})
        view(EVAL | {"step": d, "of": 1000})
    lines = stream.getvalue().splitlines()
    assert sum("step 1000/1000" in line for line in lines) == 2 and len(lines) <= 210


@pytest.mark.parametrize(("term", "live"), [("xterm", True), ("dumb", False), ("", False), (None, False)])
def test_live_only_where_the_cursor_moves(monkeypatch, term, live):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    if term is None:
        monkeypatch.delenv("TERM", raising=False)
    else:
        monkeypatch.setenv("TERM", term)
    assert isinstance(console.view_for(Terminal()), console.LiveView) == live


def test_live_step_says_everything(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with console.view_for(terminal) as view:
        view({"event": "tick", "phase": "a model [/red]", "done": 1, "of": 2})
        view.live.refresh()
        view(STEP | {"step": 123456, "of": 200000, "left_s": 7200.0, "norm": 2.5, "tokens_per_s": 123456.0})
        view.live.refresh()
        view(EVAL | {"step": 5, "of": 10})
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    for words in ("KL 1.0000", "|g| 2.500", "rate 1.00e-05", "0.10 s/step", "123,456 tokens/s", "2h00m left",
                  "123456/200000", "a model [/red]"):  # fmt: skip
        assert words in text, words
    assert "held-out KL 1.0000 after step 5/10" in text and "…" not in text


@pytest.mark.parametrize("view", [console.PlainView, console.LiveView])
def test_a_run_outlives_whoever_watched_it(view, monkeypatch):
    """`cortiq heal 2>&1 | head`, a closed terminal: hours of work are not lost with their progress."""
    monkeypatch.setenv("TERM", "xterm")
    calls = []

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            calls.append(text)
            raise BrokenPipeError(32, "Broken pipe")

        def isatty(self) -> bool:
            return view is console.LiveView

    with contextlib.suppress(OSError), view(Gone()) as shown:
        for d in range(1, 4):
            shown(EVAL | {"step": d})
        d = 0
    assert calls and d == 0


def test_a_run_whose_progress_nobody_reads(place, tmp_path):
    root, data = place
    args = [*MODULE, *map(str, heal(root / "m", data, tmp_path / "o", "--epochs", "40"))]
    env_ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env_) as process:
        process.stderr.close()
        assert process.wait(60) == 0
    assert (tmp_path / "o" / "config.json").exists() and (tmp_path / "o.html").exists()


def test_quiet(place, tmp_path):
    root, data = place
    done = cortiq(*heal(root / "m", data, tmp_path / "o", "--epochs", "0.1"), "--quiet")
    assert done.status == 0 and done.err == "" and "wrote" in done.out
    done = cortiq(*heal(root / "m", data, tmp_path / "p", "--epochs", "0.1"), "--quiet", "--json")
    assert done.err == "" and done.json["page"] == str(tmp_path / "p.html")
    assert (tmp_path / "p.html").is_file() and (tmp_path / "p.log.jsonl").is_file()
    done = cortiq(*heal(root / "m", data, tmp_path / "p"), "--quiet")
    assert done.status == 2 and done.err.count("\n") == 1


def test_a_bug_keeps_its_traceback(place, tmp_path, monkeypatch):
    root, data = place
    for error in (ValueError("a bug"), KeyError("a bug"), RuntimeError("a bug"), TypeError("a bug")):

        def broken(cfg, error=error):
            raise error

        monkeypatch.setattr(heal_recipe, "plan_heal", broken)
        with pytest.raises(type(error), match="a bug"):
            cortiq(*heal(root / "m", data, tmp_path / "o"))
    assert list(tmp_path.iterdir()) == []


def test_failed_training_leaves_its_curves(place, tmp_path, monkeypatch):
    root, data = place
    tensors = tensors_of(CONFIG)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 1e38)
    write_dir(tmp_path / "sick", CONFIG, tensors)
    done = cortiq(*heal(tmp_path / "sick", data, tmp_path / "o", "--epochs", "30"))
    assert done.status == 1 and f"Curves: {tmp_path / 'o.html'}" in done.err.splitlines()[-1]
    assert "ended early: TrainingFailed" in (tmp_path / "o.html").read_text() and not (tmp_path / "o").exists()


def test_report_makes_the_same_page_again(place, tmp_path):
    root, data = place
    done = cortiq(*fold(root / "m", data, tmp_path / "f"))
    page = tmp_path / "f.html"
    assert str(page) in done.out
    first = page.read_bytes()
    assert cortiq("report", tmp_path / "f.log.jsonl").out == f"wrote {page}\n" and page.read_bytes() == first
    assert cortiq("report", tmp_path / "f.log.jsonl", "--out", tmp_path / "deep" / "x.html").status == 0
    assert (tmp_path / "deep" / "x.html").read_bytes() == first
    shutil.rmtree(tmp_path / "f")
    page.write_text("my own page\n")
    done = cortiq(*fold(root / "m", data, tmp_path / "f"))
    assert done.status == 2 and "which is no run's page" in done.err and page.read_text() == "my own page\n"


def test_no_page_for_a_log_that_is_no_file(place, tmp_path):
    root, data = place
    done = cortiq(*score(root / "m", data, "--splits", "val", "--log", "/dev/null"), "--json")
    assert done.json["page"] is None and not os.path.exists("/dev/null.html")
    done = cortiq(*score(root / "m", data, "--splits", "val", "--log", tmp_path / "s.jsonl"))
    assert done.status == 0 and "Scores" in (tmp_path / "s.html").read_text()


def test_a_page_that_cannot_be_written_is_no_failure(place, tmp_path, monkeypatch):
    from cortiq_kernels import cli_report

    root, data = place

    def full(log, out):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli_report, "write_page", full)
    done = cortiq(*heal(root / "m", data, tmp_path / "o", "--epochs", "0.1"))
    assert done.status == 0 and (tmp_path / "o" / "config.json").exists()
    assert "no page was written" in done.err.splitlines()[-1] and "cortiq report" in done.err.splitlines()[-1]


@pytest.mark.parametrize("echo", [False, True])
def test_a_stopped_run_has_its_page(place, tmp_path, monkeypatch, echo):
    """Also where the signal comes twice, as from launchers that pass on what their children already have."""
    from cortiq_kernels import cli_report

    root, data = place
    real, write, calls = Trainer.apply, cli_report.write_page, []

    def apply(self, *args, **more):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        real(self, *args, **more)

    def write_page(log, out):
        if echo:
            signal.raise_signal(signal.SIGTERM)
        return write(log, out)

    monkeypatch.setattr(Trainer, "apply", apply)
    monkeypatch.setattr(cli_report, "write_page", write_page)
    done = cortiq(*heal(root / "m", data, tmp_path / "o"))
    assert done.status == 143 and f"Curves: {tmp_path / 'o.html'}" in done.err.splitlines()[-1]
    assert "ended early: Stopped: SIGTERM" in (tmp_path / "o.html").read_text()
    (tmp_path / "o.html").unlink()
    monkeypatch.setattr(cli, "LARGEST_LOG", 10)
    calls.clear()
    done = cortiq(*heal(root / "m", data, tmp_path / "o", "--resume"))
    assert done.status == 143 and "Curves" not in done.err and not (tmp_path / "o.html").exists()


def test_a_log_has_one_writer(place, tmp_path):
    """Two runs with one --log: the second is refused before it works, and the first one's log stays whole."""
    root, data = place
    path = tmp_path / "shared.jsonl"
    for started in ({"event": "plan"}, {"event": "resume", "log": str(path), "lines": 1}):
        path.unlink(missing_ok=True)
        with RunLog(path, {"recipe": "heal"}) as log:
            log({"event": "plan"})
            before = path.read_bytes()
            with pytest.raises(LogError, match="another run is writing"), RunLog(path, {"recipe": "heal"}) as second:
                second(started)
            done = cortiq(*heal(root / "m", data, tmp_path / "deep" / "o", "--log", path))
            assert done.status == 2 and "another run is writing; expected" in done.err and path.read_bytes() == before
            assert not (tmp_path / "deep").exists()
            log({"event": "note", "text": "more"})
        assert [e["event"] for e in read_log(path)] == ["start", "plan", "note"]
    assert cortiq(*heal(root / "m", data, tmp_path / "o", "--log", path)).status == 0
    for _ in range(2):
        with RunLog("/dev/null") as a, RunLog("/dev/null") as b:
            a({"event": "plan"}), b({"event": "plan"})


def test_dry_run_says_which_backend_and_why(place, tmp_path):
    root, data = place
    args = heal(root / "m", data, tmp_path / "o", "--dry-run")
    plan = cortiq(*args, "--json").json
    assert set(plan["backends"]) == set(env.OPS)
    here = {"native", "torch"}  # Grams have a module in C++, where it is built
    assert all(set(b) == {"backend", "reason"} and b["backend"] in here for b in plan["backends"].values())
    assert all(b["reason"] for b in plan["backends"].values())
    text = cortiq(*args).out
    assert "backend" in text and "torch: add_rms_norm" in text and "BLAS through torch" in text


def test_every_op_that_has_kernels_says_so():
    """Which ops ask for Triton is read from their sources, so that `cortiq env` cannot fall behind them."""
    folder = Path(env.__file__).parent / "ops"
    named = {"topk.py": "topk_softmax", "topk_kl.py": "head_topk_kl", "gated_delta/mixer.py": "gdn_mixer",
             "gated_delta/chunks.py": "gdn_mixer",  # what the mixer and the rule share
             "gated_delta/chunk.py": "chunk_gated_delta_rule", "attention/mixer.py": "attention_mixer",
             "rms_norm.py": "add_rms_norm", "embedding.py": "embedding", "swiglu.py": "swiglu_mlp",
             "adam.py": "adam"}  # fmt: skip
    asking = {f.relative_to(folder).as_posix() for f in folder.rglob("*.py") if "use_triton(" in f.read_text()}
    asking = {name for name in asking if name != "triton_gate.py" and not name.startswith("library")}  # the same ops
    assert {named[name] for name in asking} == set(env.WITH_KERNELS)


def test_backends_of_a_gpu(monkeypatch):
    monkeypatch.setattr(backend, "no_gpu_reason", lambda: None)
    found = env.backends("cuda:0 (a GPU)", "bf16")
    assert found["head_topk_kl"]["backend"] == "triton" and found["linear"]["backend"] == "torch"
    if triton_gate.missing() is None:
        assert found["gdn_mixer"]["backend"] == found["chunk_gated_delta_rule"]["backend"] == "triton"
        assert env.backends("cuda:0 (a GPU)", "f32", (128, 128))["gdn_mixer"]["backend"] == "torch"
        wide = env.backends("cuda:0 (a GPU)", "bf16", (128, 256))["gdn_mixer"]
        assert wide["backend"] == "torch" and "head sizes 128 and 256" in wide["reason"]
        assert env.backends("cuda:0 (a GPU)", "bf16", (128, 128))["gdn_mixer"]["backend"] == "triton"
        assert env.backends("cuda:0 (a GPU)", "bf16", (0, 0), 256)["attention_mixer"]["backend"] == "triton"
        wide = env.backends("cuda:0 (a GPU)", "bf16", (0, 0), 512)["attention_mixer"]
        assert wide["backend"] == "torch" and "head size of 512" in wide["reason"]
    exact = env.backends("cuda:0 (a GPU)", "f64")["head_topk_kl"]
    assert exact["backend"] == "torch" and "float64" in exact["reason"]


def test_env_says_what_would_change_it(capsys):
    assert cli.main(["env", "--json"]) == 0
    ops = {o["op"]: o for o in json.loads(capsys.readouterr().out)["ops"]}
    for o in ops.values():
        assert o["cpu_reason"] and o["reason"] and o["change"], o
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert "what would change it" in text and not controls(text)
    if not torch.cuda.is_available():
        assert "a GPU" in ops["topk_softmax"]["change"] and ops["topk_softmax"]["cuda"] is None
