"""Model directories, files and disks as users of such packages met them, through the command line from end to end.

Each test names the public report that it is modelled on; transformers is the judge where the report is about values.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from directories import (
    SMALL,
    cortiq,
    nested,
    nll,
    read_dir,
    records,
    refused,
    tensors_of,
    transformers_nll,
    write_dir,
)
from report_world import CONFIG, ROWS, TRAIN, V, fold, heal, score
from tiny import config

from cortiq_kernels.model.hf import open_model
from cortiq_kernels.model.weights import Weights

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def data(tmp_path) -> Path:
    return records(tmp_path / "d.jsonl", ROWS + TRAIN)


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
    held = Weights.load(open_model(path), dtype=torch.bfloat16)  # a forward pass in bfloat16 takes them as they are
    assert torch.equal(held["layers.0.A_log"], tensors[name])
    assert torch.equal(held["layers.0.dt_bias"], tensors[name.replace("A_log", "dt_bias")])
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
