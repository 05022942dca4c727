"""Settings from flags and TOML files, and back: --print-config reproduces a run."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path

import pytest
from directories import cortiq, read_dir, records, refused, tensors_of, write_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from report_world import CONFIG, TRAIN, fold, heal

from cortiq_kernels import cli, cli_config, cli_flags
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.settings import LARGEST, about, check_values, flag_of, kinds, optional

TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=12)


def values(kind: object) -> st.SearchStrategy:
    """Anything that a setting of this type may hold."""
    kind, none = optional(kind)
    if typing.get_origin(kind) is typing.Literal:
        made: st.SearchStrategy = st.sampled_from(typing.get_args(kind))
    elif typing.get_origin(kind) is tuple:
        made = st.lists(values(typing.get_args(kind)[0]), min_size=1, max_size=3).map(tuple)
    else:
        made = {
            Path: TEXT.filter(lambda t: not t.startswith("~") and t != "None").map(Path),
            str: TEXT.filter(lambda t: t != "None"),
            int: st.integers(-LARGEST, LARGEST),
            float: st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9).map(float),
            bool: st.booleans(),
        }[kind]
    return st.none() | made if none else made


@pytest.mark.parametrize("name", list(cli.RECIPES))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_print_config_round_trip(tmp_path_factory, name, data):
    """Every field, whatever its value: the printed file gives an equal config."""
    config = cli.RECIPES[name].config
    cfg = config(**{f: data.draw(values(kind), f) for f, kind in kinds(config).items()})
    file = tmp_path_factory.getbasetemp() / f"{name}.toml"
    file.write_text(cli_config.toml_text(name, cfg), encoding="utf-8")
    assert config(**cli_config.read_toml(file, name, config, cli.RECIPES)) == cfg


def test_none_where_the_default_is_another(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Config:
        width: int | None = 5
        place: Path | None = None

    file = tmp_path / "c.toml"
    for cfg in (Config(None), Config(7, Path("x"))):
        file.write_text(cli_config.toml_text("x", cfg))
        assert Config(**cli_config.read_toml(file, "x", Config, ["x"])) == cfg


def test_a_printed_config_reproduces_the_run(tmp_path, monkeypatch):
    write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    data = records(tmp_path / "d.jsonl", TRAIN)
    args = heal(tmp_path / "m", data, tmp_path / "a", "--lr", "3e-3", "--seed", "7", "--genesis")
    printed = cortiq(*args, "--print-config")
    assert printed.status == 0 and printed.err == "" and not (tmp_path / "a").exists()
    file = tmp_path / "run.toml"
    file.write_text(printed.out)
    assert cortiq("heal", "--config", file, "--print-config").out == printed.out
    assert cortiq(*args).status == 0
    assert cortiq("heal", "--config", file, "--out", tmp_path / "b").status == 0
    a, b = read_dir(tmp_path / "a"), read_dir(tmp_path / "b")
    assert a.keys() == b.keys() and all(bool((a[n] == b[n]).all()) for n in a)
    off = cortiq("heal", "--config", file, "--no-genesis", "--print-config").out
    assert "genesis = false" in off and "genesis = true" in printed.out


def test_printing_refuses_what_a_run_would(tmp_path):
    assert "warm" in refused(tmp_path, *heal(tmp_path, tmp_path, tmp_path), "--warm", "2", "--print-config")
    assert "no --student and no --data and no --out" in refused(tmp_path, "heal", "--print-config")


@pytest.mark.parametrize(("text", "words"), [
    ("[heel]\nlr = 1", "got an unknown table; expected bake, masks, capture, fold, heal, score. Did you mean [heal]?"),
    ("[score]\nbatch = 1", "got no table [heal], only [score]; expected settings of heal"),
    ("lr = 1\n[heal]\nlr = 2", "got lr outside of the tables"),
    ("train-from = 1\ntrain_from = 2", "train_from: got a setting for the second time"),
    ("lr = 1\nlr = 2", "c.toml"),
    ("lr = true", "lr: got True; expected a number"),
    ("topk = true", "topk: got True; expected an integer"),
    ('genesis = "true"', "genesis: got 'true'; expected true or false"),
    ("student = 5", "student: got 5; expected a path"),
    ('student = ""', "student: got ''; expected a path"),
    ('student = "a\\u0000b"', "student: got 'a\\x00b'; expected a path"),
    ("device = 0", "device: got 0; expected text"),
    ("dtype = 16", "dtype: got 16; expected 'bf16' | 'f16' | 'f32' | 'f64'"),
    ("lr = [1]", "lr: got [1]; expected a number"),
    ("lr = 1979-05-27", "expected a number"),
    ("lr = nan", "heal: lr: got nan; expected a finite number"),
    ("topk = 99999999999999999999", "heal: topk"),
    ("epochs = " + "9" * 400, "heal: epochs: got inf; expected a finite number"),
    ("config = 'x'", "config: got an unknown setting"),
    ("json = true", "json: got an unknown setting"),
    ("\xff", "not UTF-8"),
    ("a = " + "[" * 3000, "cannot be read"),
])  # fmt: skip
def test_files_that_cannot_be_used(tmp_path, text, words):
    file = tmp_path / "c.toml"
    file.write_bytes(text.encode("latin-1"))
    line = refused(tmp_path, "heal", "--student", "s", "--data", "d", "--out", "o", "--ce", "1", "--config", file)
    assert words in line, line


def test_a_list_of_the_wrong_kind(tmp_path):
    file = tmp_path / "c.toml"
    for text, words in (('models = "a"', "a list (each a path)"), ("models = [1]", "expected a path")):
        file.write_text(text)
        assert words in refused(tmp_path, "score", "--data", "d", "--config", file)


def test_the_file_in_the_documentation_works(tmp_path):
    text = (Path(__file__).parents[1] / "docs" / "command_line.md").read_text(encoding="utf-8")
    file = tmp_path / "heal.toml"
    file.write_text(text.split("```toml\n")[1].split("```")[0])
    cfg, _ = cli.parse("heal", ["--config", str(file), "--lr", "2e-5"])
    assert cfg.student == Path("fold") and cfg.train_from == 4 and cfg.lr == 2e-5


def test_byte_order_mark_and_windows_lines(tmp_path):
    file = tmp_path / "c.toml"
    file.write_bytes(b'\xef\xbb\xbflr = 1e-4\r\nstudent = "s"\r\n')
    assert cli_config.read_toml(file, "heal", cli.RECIPES["heal"].config, cli.RECIPES)["lr"] == 1e-4


def test_every_setting_says_what_it_is():
    for recipe in cli.RECIPES.values():
        said = about(recipe.config)
        assert list(said) == list(kinds(recipe.config)) and all(said.values())


@pytest.mark.parametrize("name", list(cli.RECIPES))
def test_help_names_every_flag_and_no_other(name):
    """tyro writes the help, and this package reads the words: both know the same flags."""
    done = cortiq(name, "--help")
    assert done.status == 0 and done.err == "" and "None" not in done.out
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", done.out.replace("\n", " "))) - {"--help"}
    config = cli.RECIPES[name].config
    known = {**kinds(config), **kinds(cli_flags.Flags)}
    assert {flag_of(f) for f in known} <= named
    for flag in named:
        cli_flags._field(name, flag, known)


def test_values_are_checked_in_python_too():
    config = cli.RECIPES["heal"].config
    good = dict(student=Path("s"), data=Path("d"), out=Path("o"), ce=1.0)
    config(**good).check()
    for bad in ({"window": "2048"}, {"window": 2048.0}, {"lr": True}, {"lr": float("nan")}, {"student": "s"},
                {"batch": 2**31}, {"device": " "}, {"genesis": 1}, {"seed": 2**63}):  # fmt: skip
        with pytest.raises(InputError, match=f"heal: {next(iter(bad))}"):
            check_values("heal", config(**good | bad))
        with pytest.raises(InputError):
            config(**good | bad).check()
    config(**good, seed=2**63 - 1, log=None).check()
    with pytest.raises(InputError, match="fold: window"):
        cli.RECIPES["fold"].config(Path("a"), Path("b"), Path("c"), window=None).check()


def test_a_list_given_twice_is_a_mistake(tmp_path):
    """`--models a --models b` would score b alone."""
    assert "got the flag twice" in refused(tmp_path, "score", "--models", "a", "--models", "b", "--data", "d")
    args = [str(a) for a in fold(tmp_path, tmp_path, tmp_path, "--keep", "0.5", "--keep", "0.25")]
    assert cli.parse("fold", args[1:])[0].keep == 0.25
