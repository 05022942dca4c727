"""Files, shards, links and permissions as users of such packages met them, through the command line from end to end.

Each test names the public report that it is modelled on.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from directories import (
    cortiq,
    nll,
    read_dir,
    records,
    refused,
    snapshot,
    tensors_of,
    write_dir,
)
from report_world import CONFIG, ROWS, TRAIN, fold, heal, score
from safetensors.torch import load_file

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def data(tmp_path) -> Path:
    return records(tmp_path / "d.jsonl", ROWS + TRAIN)


def test_missing_shard(tmp_path, data):
    """Modelled on sgl-project/sglang#32279: the file and its tensor count are named."""
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG), shards=3)
    gone = path / "model-00002-of-00003.safetensors"
    n = len(read_dir(path)) - sum(len(load_file(path / f"model-0000{i}-of-00003.safetensors")) for i in (1, 3))
    gone.unlink()
    for args in (score(path, data), heal(path, data, tmp_path / "o"), fold(path, data, tmp_path / "o")):
        line = refused(tmp_path, *args)
        assert f"{gone.name} ({n} tensors" in line and "2 of 3 shards" in line


def test_older_output_is_not_mixed_with(tmp_path, data):
    """Modelled on mflux-community/mflux#603: a place that holds three old shards."""
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    old = write_dir(tmp_path / "old", CONFIG, tensors_of(CONFIG, seed=5), shards=3)
    for args in (heal(path, data, old), fold(path, data, old)):
        assert "got an existing directory with 5 entries" in refused(tmp_path, *args)


@pytest.mark.parametrize("case", ["same", "symlink", "symlinked source", "inside", "teacher", "dotted"])
def test_output_is_never_the_source(tmp_path, data, case):
    """Modelled on bghira/SimpleTuner#2714: the source is mapped while the output is written."""
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    other = write_dir(tmp_path / "t", CONFIG, tensors_of(CONFIG, seed=1))
    (tmp_path / "link").symlink_to(path)
    source, out = path, path
    if case == "symlink":
        out = tmp_path / "link"
    elif case == "symlinked source":
        source = tmp_path / "link"
    elif case == "inside":
        out = path / "healed"
    elif case == "teacher":
        out = other
    elif case == "dotted":
        out = tmp_path / "t" / ".." / "m"
    line = refused(tmp_path, *heal(source, data, out, "--teacher", other, "--ce", "0"))
    assert "the source" in line
    if case != "teacher":
        refused(tmp_path, *fold(source, data, out))


@pytest.mark.parametrize("place", ["data", "link to data", "weights", "in the source", "hard link"])
def test_result_and_log_never_land_on_an_input(tmp_path, data, place):
    """The kind of bghira/SimpleTuner#2714: every file that a run writes, not only its directory."""
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    (tmp_path / "link").symlink_to(data)
    os.link(data, tmp_path / "hard")
    file = {"data": data, "link to data": tmp_path / "link", "weights": path / "model.safetensors",
            "in the source": path / "new.json", "hard link": tmp_path / "hard"}[place]  # fmt: skip
    assert "input" in refused(tmp_path, *score(path, data, "--out", file))
    assert "input" in refused(tmp_path, *score(path, data, "--log", file))
    assert "input" in refused(tmp_path, *heal(path, data, tmp_path / "o", "--log", file))
    assert "input" in refused(tmp_path, *fold(path, data, tmp_path / "o", "--log", file, "--dry-run"))


def test_log_inside_the_output_is_refused_at_the_start(tmp_path, data):
    """A log in the output directory would make it exist, so that the finished model could not be put there."""
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    for args in (heal(path, data, tmp_path / "o"), fold(path, data, tmp_path / "o")):
        assert "outside --out" in refused(tmp_path, *args, "--log", tmp_path / "o" / "run.jsonl")
    file = records(tmp_path / "notes.txt", [])
    assert "can be written to" in refused(tmp_path, *heal(path, data, tmp_path / "o", "--log", file / "run.jsonl"))
    # the default log of the output `x` is x.log.jsonl: no data file of that name is overwritten
    trap = records(tmp_path / "x.log.jsonl", TRAIN)
    assert "x.log.jsonl" in refused(tmp_path, *heal(path, trap, tmp_path / "x"))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("damage", ["lfs", "empty", "truncated", "header"])
def test_damaged_shard(tmp_path, data, damage, shards):
    """Modelled on huggingface/transformers#27923: the file is named and the cause stated."""
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG), shards=shards)
    file = sorted(path.glob("*.safetensors"))[-1]
    whole = file.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    contents, words = {
        "lfs": (pointer, "Git LFS pointer"),
        "empty": (b"", "0 bytes"),
        "truncated": (whole[:-100], "truncated"),
        "header": (whole[:40], "truncated"),
    }[damage]
    file.write_bytes(contents)
    for args in (score(path, data), heal(path, data, tmp_path / "o"), fold(path, data, tmp_path / "o")):
        line = refused(tmp_path, *args)
        assert str(file) in line and words in line


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "d.jsonl"])
@pytest.mark.parametrize("contents", [b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n", b""])
def test_damaged_other_files(tmp_path, data, file, contents):
    """The kind of huggingface/transformers#27923: everything else that is read can be a pointer or empty, too."""
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    place = data if file == "d.jsonl" else path / file
    place.write_bytes(contents)
    for args in (score(path, data), heal(path, data, tmp_path / "o")):
        line = refused(tmp_path, *args)
        assert str(place) in line and ("Git LFS pointer" in line or not contents)


def test_values_that_are_not_finite(tmp_path, data):
    """The kind of huggingface/transformers#27923: file and tensor are named, the student first."""
    tensors, name = tensors_of(CONFIG), "model.layers.1.mlp.down_proj.weight"
    good = write_dir(tmp_path / "good", CONFIG, tensors)
    tensors[name][3, 2] = float("nan")
    bad = write_dir(tmp_path / "bad", CONFIG, tensors, shards=2)
    file = next(f for f in bad.glob("*.safetensors") if name in load_file(f))
    line = refused(tmp_path, *heal(bad, data, tmp_path / "o", "--teacher", good, "--ce", "0"))
    assert f"{file}: {name}: got values not finite" in line
    for args in (
        heal(good, data, tmp_path / "o", "--teacher", bad, "--ce", "0"),
        heal(bad, data, tmp_path / "o"),
        fold(bad, data, tmp_path / "o"),
        score(bad, data),
    ):
        done = cortiq(*args)
        assert done.status == 2 and f"{file}: {name}: got values not finite" in done.err.splitlines()[-1]
        assert not (tmp_path / "o").exists()


def test_hub_cache_snapshot_as_input(tmp_path, data):
    """Modelled on keiretsu-labs/kubernetes-manifests#2517: outputs are regular files, the blobs stay as they are."""
    plain = write_dir(tmp_path / "plain", CONFIG, tensors_of(CONFIG), shards=2)
    (plain / "special_tokens_map.json").write_text("{}")
    blobs, snap = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snap.mkdir(parents=True)
    for i, file in enumerate(sorted(plain.iterdir())):
        shutil.copy(file, blobs / f"blob{i}")
        (snap / file.name).symlink_to(Path("..") / ".." / "blobs" / f"blob{i}")
    (tmp_path / "model").symlink_to(snap)  # and the directory itself through a link
    (tmp_path / "data").symlink_to(data)
    (tmp_path / "target").symlink_to(tmp_path / "real")
    before = snapshot(tmp_path / "hub")
    more = ("--teacher", snap, "--ce", "0")
    assert cortiq(*heal(tmp_path / "model", tmp_path / "data", tmp_path / "target", *more)).status == 0
    assert cortiq(*fold(snap, data, tmp_path / "fold")).status == 0
    assert snapshot(tmp_path / "hub") == before
    assert (tmp_path / "target").is_symlink()
    for out in (tmp_path / "real", tmp_path / "fold"):
        files = [p for p in out.rglob("*") if not p.is_dir()]
        assert {p.name for p in files} == {*(p.name for p in plain.iterdir()), "cortiq.json"}
        assert all(p.is_file() and not p.is_symlink() and p.stat().st_nlink == 1 for p in files)
    assert nll(model=tmp_path / "model", data=data) == nll(model=plain, data=data)


@pytest.mark.parametrize(("umask", "file_mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_ordinary_permissions(tmp_path, data, umask, file_mode):
    """Modelled on safetensors/safetensors#782: outputs get what the umask leaves, like config.json."""
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    path.joinpath("model.safetensors").chmod(0o600)
    before = os.umask(umask)
    try:
        assert cortiq(*heal(path, data, tmp_path / "healed")).status == 0
        assert cortiq(*fold(path, data, tmp_path / "fold")).status == 0
        assert cortiq(*score(path, data, "--out", tmp_path / "s.json")).status == 0
    finally:
        os.umask(before)
    for out in (tmp_path / "healed", tmp_path / "fold"):
        assert stat.S_IMODE(out.stat().st_mode) == file_mode | (file_mode & 0o444) >> 2
        assert {stat.S_IMODE(p.stat().st_mode) for p in out.iterdir()} == {file_mode}
    for file in ("healed.log.jsonl", "fold.log.jsonl", "s.json"):
        assert stat.S_IMODE((tmp_path / file).stat().st_mode) == file_mode


def test_views_are_written_as_their_values(tmp_path, data):
    """Modelled on safetensors/safetensors#469: fused rows and selected columns come out as the plain tensors."""
    tensors = tensors_of(CONFIG)
    path = write_dir(tmp_path / "m", CONFIG, tensors)
    done = cortiq(*heal(path, data, tmp_path / "same", "--lr", "9", "--train", "all", "--json")).json
    assert done["best_step"] == 0  # the untouched student was the best: every fused view is exported as it came in
    after = read_dir(tmp_path / "same")
    assert all(torch.equal(after[n], t) for n, t in tensors.items())
    assert cortiq(*fold(path, data, tmp_path / "fold")).status == 0
    narrow = read_dir(tmp_path / "fold")
    for i in range(2):
        at = f"model.layers.{i}.mlp."
        gate, up, down = (tensors[f"{at}{p}_proj.weight"] for p in ("gate", "up", "down"))
        keep = [int((gate == row).all(1).nonzero()) for row in narrow[at + "gate_proj.weight"]]
        assert len(keep) == 12 and torch.equal(narrow[at + "up_proj.weight"], up[keep])
        assert torch.equal(narrow[at + "down_proj.weight"], down[:, keep])
