"""Every file that a command reads or writes, as what it should not be: nothing there, a directory, links to nothing or
in a circle, a pipe without a writer, a socket, a device, 0 bytes, a file that may not be read, one that changes while
it is read. One line names the place and says what is there; no command waits, and nothing is written.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from directories import cortiq, load_conftest, refused, tensors_of, write_dir
from directories import records as write_records
from fuzz_lane import CONFIG as TEXT_CONFIG
from fuzz_lane import build_world
from report_world import CONFIG, TRAIN, fold, heal, score

from cortiq_kernels.data.record import DataError
from cortiq_kernels.data.tokens import Tokenizer
from cortiq_kernels.model import shard
from cortiq_kernels.model.geometry import ModelError
from cortiq_kernels.model.hf import open_model, write_model
from cortiq_kernels.reading import Unreadable, read_object

HERE = Path(__file__).parents[1]


def gone(p: Path) -> None:
    pass


def directory(p: Path) -> None:
    p.mkdir()


def dangling(p: Path) -> None:
    p.symlink_to(p.with_name("not-there"))


def circle(p: Path) -> None:
    p.symlink_to(p.with_name("circle-b"))
    p.with_name("circle-b").symlink_to(p)


def pipe(p: Path) -> None:
    os.mkfifo(p)


def unix_socket(p: Path) -> None:
    with contextlib.chdir(p.parent) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
        s = socket.socket(socket.AF_UNIX)
        s.bind(p.name if hasattr(contextlib, "chdir") else str(p))
        s.close()


def null(p: Path) -> None:
    p.symlink_to("/dev/null")


def zeros(p: Path) -> None:
    p.symlink_to("/dev/zero")


def empty(p: Path) -> None:
    p.write_bytes(b"")


KINDS: dict[Callable[[Path], None], str] = {
    gone: "no such", directory: "a directory", dangling: "a symlink to a missing file", circle: "a circle of symlinks",
    pipe: "a pipe", unix_socket: "a socket", null: "a device", zeros: "a device", empty: "0 bytes",
}  # fmt: skip
OTHER_WORDS = {circle: os.strerror(errno.ELOOP)}  # of a setting whose path cannot be followed
INPUTS = [
    "m", "m/config.json", "m/model.safetensors.index.json", "m/model-00001-of-00002.safetensors", "m/tokenizer.json",
    "m/tokenizer_config.json", "m/generation_config.json", "m/special_tokens_map.json", "m/chat_template.jinja",
    "m/chat_template.json", "m/cortiq.json", "d.jsonl", "c.toml",
]  # fmt: skip
OPTIONAL = {
    "tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "chat_template.json", "cortiq.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Path:
    return build_world(tmp_path_factory.mktemp("origin"))


@contextlib.contextmanager
def no_waiting(seconds: int = 20) -> Iterator[None]:
    """Fail instead of waiting for a writer that never comes."""

    def late(*_: object) -> None:
        raise AssertionError(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_are_something_else(tmp_path, origin, name, kind):
    shutil.copytree(origin / "m", tmp_path / "m")
    shutil.copy(origin / "d.jsonl", tmp_path)
    place = tmp_path / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    kind(place)
    model, data = tmp_path / "m", tmp_path / "d.jsonl"
    args = score(model, data) if name != "c.toml" else (*score(model, data), "--config", place)
    with no_waiting():
        if kind is gone and place.name in OPTIONAL or kind is empty and name == "c.toml":
            assert cortiq(*args).status == 0
            return
        line = refused(tmp_path, *args)
    if kind is gone and place.name == "model.safetensors.index.json":
        assert str(model) in line and "model-00001-of-00002.safetensors" in line
    elif kind is gone and place.name == "tokenizer.json":
        assert str(model) in line and "no tokenizer.json" in line
    elif kind is gone and place.name == "chat_template.jinja":
        assert str(model) in line and "no chat template" in line
    elif kind in (gone, dangling, circle) and place.suffix == ".safetensors":
        assert place.name in line and "1 of 2 shards" in line
    elif kind is empty and name == "m":
        assert str(model) in line and "a file" in line
    elif kind is directory and name == "m":
        assert str(model) in line and "config.json: got no such file" in line
    elif kind is empty and name == "d.jsonl":
        assert str(place) in line and "no records" in line
    else:
        assert str(place) in line and any(words in line for words in (KINDS[kind], OTHER_WORDS.get(kind, "?"))), line
    assert "expected" in line


@pytest.mark.parametrize("kind", [circle, dangling])
def test_other_files_of_a_model_directory(tmp_path, kind):
    """What is only copied is looked at before any work, too."""
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    kind(path / "notes.txt")
    data = write_records(tmp_path / "d.jsonl", TRAIN)
    for args in (heal(path, data, tmp_path / "o"), fold(path, data, tmp_path / "o")):
        line = refused(tmp_path, *args)
        assert str(path / "notes.txt") in line or str(path / "circle-b") in line
        assert "symlink" in line


def test_pipes_and_sockets_in_a_model_directory_are_not_copied(tmp_path):
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    for name, kind in (("a", pipe), ("b", unix_socket), ("c", null)):
        kind(path / name)
    data = write_records(tmp_path / "d.jsonl", TRAIN)
    with no_waiting():
        assert cortiq(*fold(path, data, tmp_path / "o")).status == 0
    assert {p.name for p in (tmp_path / "o").iterdir()} == {"config.json", "cortiq.json", "model.safetensors"}


@pytest.mark.parametrize("kind", [directory, circle, pipe, unix_socket, zeros], ids=lambda k: k.__name__)
@pytest.mark.parametrize("flag", ["--out", "--log"])
def test_results_never_replace_a_pipe_or_a_device(tmp_path, kind, flag):
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    data = write_records(tmp_path / "d.jsonl", TRAIN)
    kind(tmp_path / "place")
    with no_waiting():
        line = refused(tmp_path, *score(path, data), "--splits", "val", flag, tmp_path / "place")
        assert str(tmp_path / "place") in line
        assert any(words in line for words in (KINDS[kind].removeprefix("a "), OTHER_WORDS.get(kind, "?")))
        if flag == "--log":
            refused(tmp_path, *fold(path, data, tmp_path / "o"), flag, tmp_path / "place")


def test_dev_null_stays_a_device(tmp_path):
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    data = write_records(tmp_path / "d.jsonl", TRAIN)
    assert "a device at '/dev/null'" in refused(tmp_path, *score(path, data), "--splits", "val", "--out", "/dev/null")
    if os.access("/dev/null", os.W_OK):
        assert cortiq(*score(path, data), "--splits", "val", "--log", "/dev/null").status == 0
    assert not os.path.isfile("/dev/null") and not os.path.isdir("/dev/null")


@pytest.mark.parametrize("kind", [empty, circle, pipe, null], ids=lambda k: k.__name__)
def test_outputs_that_are_something_else(tmp_path, kind):
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    data = write_records(tmp_path / "d.jsonl", TRAIN)
    kind(tmp_path / "o")
    with no_waiting():
        for args in (heal(path, data, tmp_path / "o"), fold(path, data, tmp_path / "o")):
            line = refused(tmp_path, *args)
            assert str(tmp_path / "o") in line and "expected" in line


@contextlib.contextmanager
def somebody_else() -> Iterator[Path]:
    """A directory that everybody may search, and no rights of root's within the context."""
    codecs.lookup("utf-8-sig")  # its module may be out of reach for somebody else
    root = Path(tempfile.mkdtemp(dir="/tmp"))
    root.chmod(0o777)
    was_root = os.geteuid() == 0
    try:
        if was_root:
            os.setresuid(65534, 65534, 0)
        yield root
    finally:
        if was_root:
            os.setresuid(0, 0, 0)
        subprocess.run(["chmod", "-R", "u+rwx", str(root)], check=False)
        shutil.rmtree(root, ignore_errors=True)


PRIVATE = ["m", "m/config.json", "m/model.safetensors", "m/README.md", "m/assets", "d.jsonl", "c.toml", "place"]


@pytest.mark.parametrize("name", PRIVATE)
def test_files_that_may_not_be_read_or_written(name):
    with somebody_else() as root:
        path = write_dir(root / "m", CONFIG, tensors_of(CONFIG))
        (path / "README.md").write_text("x")
        (path / "assets").mkdir()
        data = write_records(root / "d.jsonl", TRAIN)
        (root / "c.toml").write_text("batch = 1\n")
        (root / "place").mkdir()
        (root / name).chmod(0)
        if os.access(root / name, os.R_OK, effective_ids=True):
            pytest.skip("this user may read everything")
        out = root / "place" / "o" if name == "place" else root / "o"
        args = (*fold(path, data, out), *(("--config", root / "c.toml") if name == "c.toml" else ()))
        done = cortiq(*args)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1), done
        assert str(root / name) in done.err and "expected" in done.err
        assert "permission denied" in done.err.lower() or name == "place"
        assert not (root / "o").exists() and not list(root.glob("*.log*"))


# ------------------------------------------------------------------------------------------ files that change under us


@pytest.fixture
def model(tmp_path):
    return open_model(write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG)))


def rewritten(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    os.utime(file, ns=(1, 1))  # a clock may be too coarse to tell


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("change", [rewritten, cut, Path.unlink])
def test_weights_that_change_after_they_were_opened(tmp_path, model, change):
    name = "model.norm.weight"
    value = model.read(name)
    change(model.path / "model.safetensors")
    for read in (lambda: model.read(name), lambda: list(shard.raw_blocks(model.shards["model.safetensors"], name))):
        with pytest.raises(ModelError, match="changed since it was opened|no such file"):
            read()
    for replace in ({}, {name: value + 1}):
        with pytest.raises(ModelError, match="changed since it was opened|no such file"):
            write_model(model, tmp_path / "o", replace=replace, provenance={})
        assert {p.name for p in tmp_path.iterdir()} == {"m"}


def test_config_that_changes_after_it_was_opened(tmp_path, model):
    (model.path / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 5.0}))
    with pytest.raises(ModelError, match=r"config.json: got a file that changed"):
        write_model(model, tmp_path / "o", replace={}, provenance={})
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


def test_a_tensor_outlives_its_file(tmp_path):
    """A mapped file that is cut short ends the process with a bus error, so tensors are read into memory."""
    tensors = tensors_of(CONFIG)
    path = write_dir(tmp_path / "m", CONFIG, tensors)
    code = (
        "import sys, os; from cortiq_kernels.model.hf import open_model; m = open_model(sys.argv[1]);"
        "t = [m.read(n) for n in m.tensors]; os.truncate(m.path / 'model.safetensors', 0);"
        "print(sum(float(x.double().sum()) for x in t))"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, path], cwd=HERE, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done
    assert float(done.stdout) == pytest.approx(sum(float(t.double().sum()) for t in tensors.values()))


# ------------------------------------------------------------------------------------------------------ strict reading


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"a": 1, "b": 2, "a": 1}', "the key 'a' twice"),
        (b'{"x": {"a": 1, "a": 2}}', "the key 'a' twice"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "nested deeper than 64 levels"),
        (b"[" * 200_000, "nested deeper than 64 levels"),
        (b'{"a": "\\ud800"}', "a lone surrogate"),
        (b'{"a": "\\ud83d\\ude00"}', None),
        (b'\xef\xbb\xbf{"a": 1}', None),
        (b'{"a":' * 63 + b"1" + b"}" * 63, None),
        (b'{"a": "\xff"}', "byte 0xff at 7, which is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "UTF-16"),
        (b'{"a": 1}\x00', "not JSON"),
        (b"[1]", "a JSON list"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_json_is_read_strictly(tmp_path, raw, words):
    (tmp_path / "x.json").write_bytes(raw)
    if words is None:
        assert read_object(tmp_path / "x.json")
        return
    with pytest.raises(Unreadable, match=words) as e:
        read_object(tmp_path / "x.json")
    assert len(str(e.value)) < 400


def test_a_file_larger_than_its_kind_is_not_read(tmp_path, monkeypatch):
    """A sparse terabyte under the name of a small file."""
    with open(tmp_path / "x.json", "wb") as f:
        f.truncate(1 << 40)
    with pytest.raises(Unreadable, match="more than the 512 MiB"):
        read_object(tmp_path / "x.json")


BAD_REGEX = {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}}
NO_UNKNOWN = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}


@pytest.mark.parametrize(
    ("change", "words"),
    [(BAD_REGEX, "cannot be read as a tokenizer"), (NO_UNKNOWN, "cannot encode the records")],
)
def test_tokenizers_that_fail_in_their_own_code(tmp_path, change, words):
    """The library raises bare exceptions, when it reads a file and when it meets a text."""
    builders = load_conftest("data")
    model = builders.write_model_dir(tmp_path / "m")
    write_dir(model, TEXT_CONFIG, tensors_of(TEXT_CONFIG))
    spec = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(spec | change))
    data = write_records(tmp_path / "d.jsonl", [{"text": "the fox", "split": "test"}])
    line = refused(tmp_path, *score(model, data))
    assert f"tokenizer.json: {words} (" in line


def test_a_native_panic_is_a_refusal_and_a_stop_is_none(tmp_path):
    """A panic of native code is no Exception; what else is none (a signal, Ctrl-C) goes its way."""
    tok = Tokenizer(load_conftest("data").write_model_dir(tmp_path / "m"))
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    with pytest.raises(DataError, match="cannot encode"), tok._native("cannot encode", "mend it"):
        raise panic("index out of bounds")
    with pytest.raises(KeyboardInterrupt), tok._native("cannot encode", "mend it"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "body", ["{{ 10 ** (10 ** 10) }}", "{{ 'a' * 10 ** 11 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
)
def test_templates_that_never_end_or_fill_the_memory(tmp_path, body):
    builders = load_conftest("data")
    model = builders.write_model_dir(tmp_path / "m", template=body)
    write_dir(model, TEXT_CONFIG, tensors_of(TEXT_CONFIG))
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data = write_records(tmp_path / "d.jsonl", [{"messages": chat, "split": "test"}])
    with no_waiting():
        line = refused(tmp_path, *score(model, data))
    assert "line 1: is refused by the chat template of" in line
    assert torch.get_num_threads() >= 1
