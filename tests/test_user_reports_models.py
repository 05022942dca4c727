"""Model directories, files and disks as users of such packages met them, through the command line from end to end.

Each test names the public report that it is modelled on; transformers is the judge where the report is about values.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from directories import (
    SMALL,
    cortiq,
    id_rows,
    nested,
    nll,
    read_dir,
    records,
    refused,
    snapshot,
    tensors_of,
    transformers_nll,
    write_dir,
)
from tiny import config

os.environ.setdefault("HF_HUB_OFFLINE", "1")
V = 23
ROWS = id_rows(V, (20, 31, 7))
TRAIN = id_rows(V, (30, 25, 32, 28), "train", seed=1) + id_rows(V, (26, 9), "val", seed=2)
CONFIG = config("LF", hidden=16, ffn=24, vocab=V, nq=2, nkv=1, hd=16, nk=1, nv=2)
HEAL = (*SMALL, "--lr", "1e-3", "--eval-every", "4", "--ce", "1")


@pytest.fixture
def data(tmp_path) -> Path:
    return records(tmp_path / "d.jsonl", ROWS + TRAIN)


def heal(model: Path, data: Path, out: Path, *more: object) -> tuple:
    return ("heal", "--student", model, "--data", data, "--out", out, *HEAL, *more)


def fold(model: Path, data: Path, out: Path, *more: object) -> tuple:
    return ("fold", "--model", model, "--data", data, "--out", out, *SMALL, "--align", "4", *more)


def score(model: Path, data: Path, *more: object) -> tuple:
    return ("score", "--models", model, "--data", data, *SMALL, *more)


# ---------------------------------------------------------------------------------------------- what config.json says


@pytest.mark.parametrize("where", ["root", "text_config", "both"])
def test_untied_head_is_used(tmp_path, data, where):
    """Modelled on pegainfer-project/pegainfer#544: tie flag at the root, in text_config, or in both."""
    whole, tensors = nested(CONFIG, tensors_of({**CONFIG, "tie_word_embeddings": False}))
    for level, name in ((whole, "root"), (whole["text_config"], "text_config")):
        level["tie_word_embeddings"] = False
        if where not in (name, "both"):
            del level["tie_word_embeddings"]
    path = write_dir(tmp_path / "m", whole, tensors)
    assert nll(model=path, data=data)[0] == pytest.approx(transformers_nll(path, ROWS), rel=1e-5)
    tied = {n: t for n, t in tensors.items() if n != "lm_head.weight"}
    tied_path = write_dir(tmp_path / "tied", *nested(CONFIG, {}))
    write_dir(tied_path, json.loads((tied_path / "config.json").read_text()), tied)
    assert abs(nll(model=tied_path, data=data)[0] - nll(model=path, data=data)[0]) > 1e-2


def test_tie_flags_that_disagree(tmp_path, data):
    """Modelled on pegainfer-project/pegainfer#544."""
    whole, tensors = nested(CONFIG, tensors_of({**CONFIG, "tie_word_embeddings": False}))
    whole["text_config"]["tie_word_embeddings"], whole["tie_word_embeddings"] = False, True
    path = write_dir(tmp_path / "m", whole, tensors)
    for args in (score(path, data), heal(path, data, tmp_path / "o"), fold(path, data, tmp_path / "o")):
        assert "tie_word_embeddings: got False in text_config and True at the root" in refused(tmp_path, *args)


def test_float32_decay_is_never_rounded(tmp_path, data):
    """Modelled on NVIDIA-NeMo/Automodel#2484: A_log and dt_bias in f32 in a bf16 file."""
    exact = ("A_log", "dt_bias")
    tensors = {n: t if n.endswith(exact) else t.bfloat16() for n, t in tensors_of(CONFIG).items()}
    name = "model.layers.0.linear_attn.A_log"
    tensors[name] = torch.tensor([-3.0017, 1.2345678])
    tensors[name.replace("A_log", "dt_bias")] = torch.tensor([1.0003, -2.0009])
    path = write_dir(tmp_path / "m", CONFIG, tensors)
    got = nll(model=path, data=data)[0]
    assert got == pytest.approx(transformers_nll(path, ROWS), rel=1e-6)
    rounded = {n: t.bfloat16().float() if n.endswith(exact) else t for n, t in tensors.items()}
    assert abs(nll(model=write_dir(tmp_path / "r", CONFIG, rounded), data=data)[0] - got) > 1e-6
    assert cortiq(*heal(path, data, tmp_path / "mlp", "--train", "mlp")).status == 0
    assert cortiq(*fold(path, data, tmp_path / "fold")).status == 0
    for out in ("mlp", "fold"):
        after = read_dir(tmp_path / out)
        assert all(torch.equal(after[n], t) for n, t in tensors.items() if n.endswith(exact))
    done = cortiq(*heal(path, data, tmp_path / "layers", "--json")).json
    assert done["best_step"] > 0
    after = read_dir(tmp_path / "layers")
    assert {n: t.dtype for n, t in after.items()} == {n: t.dtype for n, t in tensors.items()}
    assert all(not torch.equal(after[n], after[n].bfloat16().float()) for n in tensors if n.endswith(exact))


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("shipped", [False, True])
def test_declared_mtp_and_its_tensors_agree_after_a_fold(tmp_path, data, is_nested, shipped):
    """Modelled on unslothai/unsloth#11042: with and without mtp.* tensors; the report says what became of them."""
    cfg, tensors = {**CONFIG, "mtp_num_hidden_layers": 1}, tensors_of(CONFIG)
    if is_nested:
        cfg, tensors = nested(cfg, tensors)
    if shipped:
        tensors |= {"mtp.fc.weight": torch.ones(16, 32), "mtp.layers.0.mlp.down_proj.weight": torch.ones(16, 24)}
    path = write_dir(tmp_path / "m", cfg, tensors)
    done = cortiq(*fold(path, data, tmp_path / "fold"))
    assert done.status == 0 and "MTP removed" in done.out
    assert ("its 2 tensors were dropped" if shipped else "it had no tensors") in done.out
    after = json.loads((tmp_path / "fold" / "config.json").read_text())
    text = after.get("text_config", after)
    assert (text["mtp_num_hidden_layers"], text["intermediate_size"]) == (0, 12)
    assert not any(n.startswith("mtp.") for n in read_dir(tmp_path / "fold"))
    assert nll(model=tmp_path / "fold", data=data)[0] == pytest.approx(
        transformers_nll(tmp_path / "fold", ROWS), rel=1e-5
    )
    healed = cortiq(*heal(path, data, tmp_path / "healed"))
    assert healed.status == 0
    after = json.loads((tmp_path / "healed" / "config.json").read_text())
    kept = {n: t for n, t in read_dir(tmp_path / "healed").items() if n.startswith("mtp.")}
    assert after.get("text_config", after)["mtp_num_hidden_layers"] == (1 if shipped else 0)
    assert kept.keys() == {n for n in tensors if n.startswith("mtp.")}
    assert all(torch.equal(t, tensors[n]) for n, t in kept.items())
    assert ("note: MTP" in healed.err) != shipped


@pytest.mark.parametrize("shards", [1, 3])
def test_tied_checkpoint_that_ships_its_head(tmp_path, data, shards):
    """Modelled on meta-pytorch/torchtune#2669: both tensors are written, equal; different ones are refused."""
    tensors = tensors_of(CONFIG)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    path = write_dir(tmp_path / "m", CONFIG, tensors, shards=shards)
    report = cortiq(*heal(path, data, tmp_path / "out", "--train", "all", "--json")).json
    after = read_dir(tmp_path / "out")
    assert report["best_step"] > 0 and after.keys() == tensors.keys()
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    assert not torch.equal(after["lm_head.weight"], tensors["lm_head.weight"])
    assert nll(model=tmp_path / "out", data=data)[0] == pytest.approx(
        transformers_nll(tmp_path / "out", ROWS), rel=1e-5
    )
    tensors["lm_head.weight"][3, 5] += 1e-3
    bad = write_dir(tmp_path / "bad", CONFIG, tensors, shards=shards)
    line = refused(tmp_path, *heal(bad, data, tmp_path / "out2", "--train", "all"))
    assert "lm_head.weight that differs from model.embed_tokens.weight" in line


def test_rope_theta_wherever_it_is(tmp_path, data):
    """Modelled on vllm-project/vllm#42624: in rope_parameters, at the top level, or different in both."""
    rope = {"rope_type": "default", "rope_theta": 333.0, "partial_rotary_factor": 0.25}
    top = {k: v for k, v in CONFIG.items() if k != "rope_parameters"}
    configs = {
        "inside": {**top, "rope_parameters": rope},
        "top": {**top, "rope_theta": 333.0, "partial_rotary_factor": 0.25},
        "differ": {**top, "rope_parameters": rope, "rope_theta": 10000.0},
    }
    tensors = tensors_of(CONFIG)
    paths = {name: write_dir(tmp_path / name, c, tensors) for name, c in configs.items()}
    got = nll(model=paths["inside"], data=data)
    assert got == nll(model=paths["top"], data=data)
    assert got[0] == pytest.approx(transformers_nll(paths["top"], ROWS), rel=1e-5)
    assert abs(got[0] - nll(model=write_dir(tmp_path / "other", CONFIG, tensors), data=data)[0]) > 1e-6
    line = refused(tmp_path, *score(paths["differ"], data))
    assert "rope_theta: got 333.0 in rope_parameters" in line and "10000.0" in line


def test_layer_types_that_follow_no_interval(tmp_path, data):
    """Modelled on ggml-org/llama.cpp#28207: the list wins over full_attention_interval; a wrong length is refused."""
    cfg = config("LLFLFF", hidden=16, ffn=24, vocab=V, nq=2, nkv=1, nk=1, nv=2, full_attention_interval=4)
    path = write_dir(tmp_path / "m", cfg, tensors_of(cfg))
    assert nll(model=path, data=data)[0] == pytest.approx(transformers_nll(path, ROWS), rel=1e-5)
    short = copy.deepcopy(cfg)
    short["layer_types"].pop()
    line = refused(tmp_path, *score(write_dir(tmp_path / "short", short, tensors_of(cfg)), data))
    assert "layer_types: got 5 entries; expected 6" in line


def test_flat_and_nested_are_one_model(tmp_path, data):
    """Modelled on alibaba/MNN#4686: bitwise equal NLL, and each is written in its own layout."""
    tensors = tensors_of(CONFIG)
    flat = write_dir(tmp_path / "flat", CONFIG, tensors)
    deep = write_dir(tmp_path / "deep", *nested(CONFIG, tensors))
    assert nll(model=flat, data=data) == nll(model=deep, data=data)
    after = {}
    for path in (flat, deep):
        out = tmp_path / f"{path.name}-healed"
        assert cortiq(*heal(path, data, out)).status == 0
        after[path.name] = read_dir(out)
        assert after[path.name].keys() == read_dir(path).keys()
        assert (out / "config.json").read_bytes() == (path / "config.json").read_bytes()
    same = {n.replace("model.", "model.language_model.", 1): t for n, t in after["flat"].items()}
    assert all(torch.equal(after["deep"][n], t) for n, t in same.items())


def test_dtype_entries_mean_nothing(tmp_path, data):
    """Modelled on huggingface/transformers#34919: torch_dtype, dtype, neither, or one that contradicts the tensors."""
    tensors = {n: t.bfloat16() for n, t in tensors_of(CONFIG).items()}
    plain = {k: v for k, v in CONFIG.items() if k != "dtype"}
    cases = [{}, {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, {"dtype": "float32"}, {"torch_dtype": "float16"}]
    paths = [write_dir(tmp_path / f"m{i}", plain | c, tensors) for i, c in enumerate(cases)]
    stored = {str(k): {n: t.to(k) for n, t in tensors.items()} for k in (torch.float32, torch.float64)}
    paths += [write_dir(tmp_path / name, plain, t) for name, t in stored.items()]  # the same values in wider types
    assert len({nll(model=p, data=data) for p in paths}) == 1
    for p in (paths[3], paths[-1]):
        assert cortiq(*heal(p, data, tmp_path / f"{p.name}-out")).status == 0
        want = {n: t.dtype for n, t in read_dir(p).items()}
        assert {n: t.dtype for n, t in read_dir(tmp_path / f"{p.name}-out").items()} == want


# --------------------------------------------------------------------------------------------------- files and shards


def test_missing_shard(tmp_path, data):
    """Modelled on sgl-project/sglang#32279: the file and its tensor count are named."""
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG), shards=3)
    gone = path / "model-00002-of-00003.safetensors"
    n = len(read_dir(path)) - sum(len(read_one(path / f"model-0000{i}-of-00003.safetensors")) for i in (1, 3))
    gone.unlink()
    for args in (score(path, data), heal(path, data, tmp_path / "o"), fold(path, data, tmp_path / "o")):
        line = refused(tmp_path, *args)
        assert f"{gone.name} ({n} tensors" in line and "2 of 3 shards" in line


def read_one(file: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(file)


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
    # the default log of the output `d` is d.log.jsonl: no data file of that name is overwritten
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


# ------------------------------------------------------------------------------------------------------- widths, speed


def test_odd_width_is_warned_about_and_speed_is_measured(tmp_path):
    """Modelled on microsoft/TransformerCompression#179: widths 2503 and 2528 are right; speed is measured, not
    inferred from the parameter count."""
    cfg = config("LF", hidden=16, ffn=2560, vocab=V, nq=2, nkv=1, hd=16, nk=1, nv=2)
    path = write_dir(tmp_path / "m", cfg, tensors_of(cfg))
    data = records(tmp_path / "d.jsonl", ROWS + TRAIN)
    for width, odd in ((2503, True), (2528, False)):
        out = tmp_path / f"w{width}"
        done = cortiq("fold", "--model", path, "--data", data, "--out", out, *SMALL, "--width", width)
        assert done.status == 0 and (f"width {width} is not a multiple of 32" in done.out) == odd
        assert nll(model=out, data=data)[0] == pytest.approx(transformers_nll(out, ROWS), rel=1e-5)
    models = (tmp_path / "w2503", tmp_path / "w2528")
    report = cortiq("score", "--models", path, *models, "--data", data, *SMALL, "--json").json
    assert report["tokens_per_s"].keys() == {"m", "w2503", "w2528"}
    assert all(10 < s < 1e9 for s in report["tokens_per_s"].values())
    table = cortiq("score", "--models", path, *models, "--data", data, *SMALL).out.splitlines()
    assert table[0].rstrip().endswith("tokens/s")
