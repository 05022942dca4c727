"""Every flag of every recipe with values that cannot be used: one line, status 2, before any work, nothing written."""

from __future__ import annotations

import os
import typing
from pathlib import Path

import pytest
from directories import cortiq, records, refused, snapshot, tensors_of, write_dir
from report_world import CONFIG, ROWS, TRAIN, bake, capture, fold, heal, masks, score

from cortiq_kernels import cli
from cortiq_kernels.recipes.settings import flag_of, kinds, optional

COUNTS = ("-1", "1.5", "1e3", "nan", "inf", "x", "", "2147483648", "99999999999999999999")
SIZES = ("-1", "x", "", "nan", "inf", "-inf", "1e400", "0x10", "1,5")
WORDS = ("", "x", "-1", "\x1b[31m")
NO_PATH = ("", "x" * 300, "circle", "circle/x", "caf\udce9", "~nobody-of-that-name/x")
NO_MODEL = (*NO_PATH, "nowhere", "empty_dir", "text", "text/below", "pipe", "/dev/null", "dangling")
NO_DATA = (*NO_PATH, "nowhere", "empty_dir", "m", "text", "text/below", "pipe", "/dev/null", "dangling", "empty")
NO_OUT = (*NO_PATH, "m", "m/below", "text", "text/below", "d.jsonl", "full_dir", "/", "pipe", "/dev/null")
NO_FILE = (*NO_PATH, "m", "m/log", "text", "text/below", "d.jsonl", "empty_dir", "pipe", "/")
NO_TARGETS = (*NO_PATH, "text", "text/below", "m", "t", "pipe", "/dev/null", "d.jsonl")

PATHS = {
    "student": NO_MODEL, "teacher": NO_MODEL, "model": NO_MODEL, "models": NO_MODEL, "data": NO_DATA, "out": NO_OUT,
    "log": NO_FILE, "targets": NO_TARGETS, "grams": NO_DATA, "masks": NO_MODEL,
}  # fmt: skip
FITS = {("heal", "ce", "-1")}  # clamped
FITS |= {(recipe, "seed", value) for recipe in ("heal", "fold", "masks") for value in ("-1", "2147483648")}  # any seed
SCORE_OUT = {"full_dir"} | set(NO_FILE)
FILES = {("score", "out"), ("masks", "out")}  # outputs that are files


def bad(recipe: str, field: str, kind: object) -> tuple[str, ...]:
    kind, _ = optional(kind)
    kind = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind
    if kind is Path:
        return tuple(SCORE_OUT) if (recipe, field) in FILES else PATHS[field]
    return {int: COUNTS, float: SIZES, bool: ("1", "true", "")}.get(kind, WORDS)


CASES = [
    pytest.param(recipe, field, value, id=f"{recipe}-{field}-{ascii(value)[1:-1][:24]}")
    for recipe, r in cli.RECIPES.items()
    for field, kind in kinds(r.config).items()
    for value in sorted(bad(recipe, field, kind))
    if (recipe, field, value) not in FITS
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("values")
    write_dir(root / "m", CONFIG, tensors_of(CONFIG))
    write_dir(root / "t", CONFIG, tensors_of(CONFIG, seed=1))
    records(root / "d.jsonl", TRAIN + ROWS)
    (root / "text").write_text("precious\n")
    (root / "empty").write_text("")
    (root / "empty_dir").mkdir()
    (root / "full_dir").mkdir()
    (root / "full_dir" / "mine").write_text("precious\n")
    (root / "circle").symlink_to("circle")
    (root / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    return root


def command(recipe: str, place: Path) -> list[str]:
    whole = {
        "bake": bake(place / "m", place / "d.jsonl", place / "o"),
        "heal": heal(place / "m", place / "d.jsonl", place / "o", "--teacher", place / "t", "--ce", "0"),
        "fold": fold(place / "m", place / "d.jsonl", place / "o"),
        "capture": capture(place / "m", place / "d.jsonl", place / "o"),
        "score": score(place / "m", place / "d.jsonl"),
        "masks": masks(place / "m", place / "d.jsonl", place / "o", "--teacher", place / "t", "--loss", "kl"),
    }[recipe]
    return [str(w) for w in whole]


def without(args: list[str], flag: str) -> list[str]:
    """`args` less every `flag value`: a list may not be given twice."""
    while flag in args:
        i = args.index(flag)
        args = args[:i] + args[i + 2 :]
    return args


@pytest.mark.parametrize(("recipe", "field", "value"), CASES)
def test_refused(place, monkeypatch, recipe, field, value):
    monkeypatch.chdir(place)
    line = refused(place, *without(command(recipe, place), flag_of(field)), f"{flag_of(field)}={value}")
    assert line[:-1].isprintable() and len(line) < 1000 and "expected" in line, line
    assert any(words in line for words in ("got", "no such", "do not fill", "no records", "cannot be used")), line


@pytest.mark.parametrize("recipe", list(cli.RECIPES))
def test_the_commands_of_these_tests_are_fine_without(place, recipe):
    """The test of the test: it is the one bad value that is refused."""
    before = snapshot(place)
    done = cortiq(*command(recipe, place), "--dry-run")
    assert done.status == 0 and snapshot(place) == before, done.err


@pytest.mark.parametrize("flags", [
    ("--epochs", "1e300"), ("--window", "2147483647"), ("--batch", "2147483647"), ("--topk", "2147483647"),
    ("--train-from", "2147483647"), ("--checkpoint-every", "0"), ("--checkpoint-every", "nan"), ("--warm", "1.5"),
    ("--device", "cuda:99"), ("--dtype", "bf16"),
])  # fmt: skip
def test_values_that_the_data_or_the_machine_cannot_meet(place, flags):
    line = refused(place, *command("heal", place), *flags)
    assert "expected" in line or "do not fill" in line, line


@pytest.mark.parametrize(("args", "words"), [
    (["--stdent", "x"], "got '--stdent'; expected a flag of heal. Did you mean --student?"),
    (["--lr"], "--lr: got no value; expected one"),
    (["--lr", "--json"], "--lr: got no value"),
    (["stray"], "got 'stray'; expected a flag after --topk 8"),
    (["--genesis", "yes"], "--genesis: got 'yes'; expected no value. Write --genesis alone, or --no-genesis."),
    (["--json=1"], "--json: got '1'; expected no value. Write --json alone."),
    (["--no-json"], "got '--no-json'"),
    (["-x"], "got '-x'"),
    (["--"], "got '--'"),
    (["--lr", "1", "2"], "got '2'; expected a flag after --lr 1"),
    (["--config"], "--config: got no value"),
    (["--config", "a", "--config", "b"], "got the flag twice; expected it once. Put all settings into one file."),
    (["--config", "nowhere.toml"], "o such file"),
    (["--config", "/"], "got a directory; expected a TOML file"),
    (["--config", ""], "--config: got ''; expected a path"),
])  # fmt: skip
def test_words_that_are_no_flags(place, args, words):
    line = refused(place, *heal(place / "m", place / "d.jsonl", place / "o"), *args)
    assert words in line


@pytest.mark.parametrize(("args", "words"), [
    ([], "RUN.jsonl"),
    (["nowhere.jsonl"], "got no such file; expected a run log"),
    (["/"], "got a directory"),
    ([""], "got an empty path"),
    (["text"], "line 1, 'precious'"),
    (["empty"], "got no whole line"),
    (["log.jsonl", "--out", "text"], "which is no run's page"),
    (["log.jsonl", "--out", "log.jsonl"], "the log itself"),
    (["log.jsonl", "--out", "empty_dir"], "expected a file"),
    (["log.jsonl", "--out", "text/below"], "expected a directory that can be written to"),
    (["log.jsonl", "--oot", "x"], "Did you mean --out?"),
])  # fmt: skip
def test_report_refuses(place, monkeypatch, args, words):
    monkeypatch.chdir(place)
    (place / "log.jsonl").write_text('{"event": "start", "recipe": "heal"}\n')
    line = refused(place, "report", *args)
    assert words in line and "expected" in line, line
    assert "got '--jsn'" in refused(place, "env", "--jsn").replace("unrecognized arguments: --jsn", "got '--jsn'")


def test_home_is_expanded(place, monkeypatch, tmp_path):
    """Shells leave the ~ of --out=~/x as it is; nobody wants a directory of that name."""
    monkeypatch.setenv("HOME", str(place))
    cfg, _ = cli.parse("score", ["--models=~/m", "--data", "~/d.jsonl"])
    assert cfg.models == (place / "m",) and cfg.data == place / "d.jsonl"
