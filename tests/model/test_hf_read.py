"""Opening directories: what is read, and every refusal (cause, file, numbers), before any work."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from cortiq_kernels.model import ModelError, Weights, open_model


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_reads_every_tensor_in_its_own_dtype(model, tmp_path, is_nested, shards):
    m = model(nested=is_nested, extra=True)
    d = open_model(m.save(tmp_path / "m", shards))
    assert d.tensors.keys() == m.tensors.keys() and d.geometry.prefix == m.prefix
    for name, t in m.tensors.items():
        assert same(d.read(name), t) and d.tensors[name].shape == tuple(t.shape)
    assert d.total_bytes() > sum(t.numel() * t.element_size() for t in m.tensors.values())
    with pytest.raises(KeyError, match="nothing"):
        d.read("nothing")


def test_flat_and_nested_hold_the_same_weights(model, tmp_path):
    flat = Weights.load(open_model(model().save(tmp_path / "flat")))
    deep = Weights.load(open_model(model(nested=True).save(tmp_path / "deep")))
    assert torch.equal(flat.plane, deep.plane) and torch.equal(flat.vectors, deep.vectors)


def test_dtype_entries_change_nothing(model, tmp_path):
    want = Weights.load(open_model(model().save(tmp_path / "m")), dtype=torch.float32)
    for i, entry in enumerate(({"torch_dtype": "float16"}, {"dtype": "float32"}, {"torch_dtype": "x", "dtype": "y"})):
        m = model()
        m.config |= entry
        got = Weights.load(open_model(m.save(tmp_path / f"m{i}")), dtype=torch.float32)
        assert torch.equal(got.plane, want.plane) and torch.equal(got.vectors, want.vectors)


def test_hub_cache_snapshot(model, tmp_path):
    blobs = model().save(tmp_path / "blobs", 2)
    snap = tmp_path / "snapshots" / "abc"
    snap.mkdir(parents=True)
    for f in blobs.iterdir():
        (snap / f.name).symlink_to(os.path.relpath(f, snap))
    assert open_model(snap).geometry.n_layers == 3
    assert open_model(str(snap)).read("model.norm.weight").shape == (16,)
    (blobs / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="1 of 2 shards; expected also model-00002-of-00002.safetensors"):
        open_model(snap)


def test_tied_with_an_equal_head_and_with_another(model, tmp_path):
    m = model(tied=True)
    m.tensors["lm_head.weight"] = m.tensors["model.embed_tokens.weight"].clone()
    assert open_model(m.save(tmp_path / "equal")).geometry.tied
    m.tensors["lm_head.weight"][3, 3] += 1
    with pytest.raises(ModelError, match="tie_word_embeddings true.*lm_head.weight that differs"):
        open_model(m.save(tmp_path / "different"))
    m.tensors["lm_head.weight"] = m.tensors["model.embed_tokens.weight"].float()
    with pytest.raises(ModelError, match="differs"):
        open_model(m.save(tmp_path / "dtype"))


def test_untied_without_a_head(model, tmp_path):
    m = model()
    del m.tensors["lm_head.weight"]
    with pytest.raises(ModelError, match="without lm_head.weight.*tie_word_embeddings"):
        open_model(m.save(tmp_path / "m"))


def test_missing_shard_names_file_and_count(model, tmp_path):
    path = model().save(tmp_path / "m", 3)
    gone = path / "model-00002-of-00003.safetensors"
    n = len(load_file(gone))
    gone.unlink()
    with pytest.raises(ModelError, match=rf"2 of 3 shards; expected also {gone.name} \({n} tensors, such as model"):
        open_model(path)


def test_missing_tensor_names_it_and_its_layer(model, tmp_path):
    m = model()
    del m.tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ModelError, match=r"layer 1 \(full_attention\) without model.layers.1.self_attn.k_proj.weight"):
        open_model(m.save(tmp_path / "m"))


def test_missing_layer_counts(model, tmp_path):
    m = model()
    m.tensors = {n: t for n, t in m.tensors.items() if ".layers.2." not in n}
    with pytest.raises(ModelError, match=r"layer 2 \(linear_attention\) without .*14 tensors missing in all"):
        open_model(m.save(tmp_path / "m"))


def test_strangers_in_the_text_model(model, tmp_path):
    m = model()
    m.tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(64)
    with pytest.raises(ModelError, match="1 tensors that a 3-layer.*q_proj.bias"):
        open_model(m.save(tmp_path / "bias"))
    m = model()
    m.text["num_hidden_layers"], m.text["layer_types"] = 2, m.text["layer_types"][:2]
    with pytest.raises(ModelError, match="2-layer"):
        open_model(m.save(tmp_path / "fewer"))


def test_wrong_shape_and_type(model, tmp_path):
    m = model()
    m.tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(32, 16)  # no output gate
    with pytest.raises(ModelError, match=r"q_proj.weight of shape \[32, 16\]; expected \[64, 16\]"):
        open_model(m.save(tmp_path / "shape"))
    m = model()
    m.tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(24, 16, dtype=torch.int8)
    with pytest.raises(ModelError, match="up_proj.weight of type I8"):
        open_model(m.save(tmp_path / "type"))


def test_widths_must_agree(model, tmp_path):
    m = model()
    for part in ("gate_proj", "up_proj"):
        m.tensors[f"model.layers.1.mlp.{part}.weight"] = torch.zeros(8, 16)
    m.tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(16, 8)
    path = m.save(tmp_path / "m")
    with pytest.raises(ModelError, match=r"layers.1.mlp.gate_proj.weight of shape \[8, 16\]; expected \[24, 16\]"):
        open_model(path)
    (path / "cortiq.json").write_text(json.dumps({"intermediate_size": [24, 8, 24]}))
    assert open_model(path).geometry.intermediate == (24, 8, 24)
    (path / "cortiq.json").write_text(json.dumps({"intermediate_size": [24, 16, 24]}))
    with pytest.raises(ModelError, match="8 rows; expected 16 .layer 1 in cortiq.json"):
        open_model(path)
    (path / "cortiq.json").write_text(json.dumps({"intermediate_size": [24]}))
    with pytest.raises(ModelError, match="expected 3 widths"):
        open_model(path)
    m.text["intermediate_size"] = 32  # must be the largest width
    path = m.save(tmp_path / "max")
    (path / "cortiq.json").write_text(json.dumps({"intermediate_size": [24, 8, 24]}))
    with pytest.raises(ModelError, match="intermediate_size: got 32"):
        open_model(path)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1234\n"


@pytest.mark.parametrize(
    "damage,match",
    [
        (lambda b: POINTER, "Git LFS pointer.*git lfs pull"),
        (lambda b: b"", "got 0 bytes"),
        (lambda b: b[:-100], "truncated, [0-9]+ of [0-9]+ tensors cut"),
        (lambda b: b[:200], "end inside the header.*truncated"),
        (lambda b: b[:5], "not safetensors"),
        (lambda b: b"PK\x03\x04\x14\x00\x00\x00\x08" + b[9:], "not safetensors"),
        (lambda b: b + b"xx", "2 bytes belong to no tensor"),
        (lambda b: b[:9] + b"\x00" + b[10:], "header that cannot be parsed"),
        (lambda b: b.replace(b'"BF16"', b'"BF17"', 1), "element type 'BF17'"),
        (lambda b: b.replace(b'"BF16"', b'"F32" ', 1), "header that cannot be parsed"),
    ],
    ids=["lfs", "empty", "truncated", "header", "tiny", "zip", "trailing", "json", "type", "size"],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_damaged_shards_say_which_file_and_why(model, tmp_path, damage, match, shards):
    path = model().save(tmp_path / "m", shards)
    file = sorted(path.glob("*.safetensors"))[-1]
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=match) as e:
        open_model(path)
    assert file.name in str(e.value)


def test_overlapping_tensors(model, tmp_path):
    path = model().save(tmp_path / "m")
    file = path / "model.safetensors"
    data = file.read_bytes()
    n = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + n])
    a, b = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    head[a]["data_offsets"] = head[b]["data_offsets"]
    text = json.dumps(head).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + n :])
    with pytest.raises(ModelError, match="no gap, no overlap"):
        open_model(path)


def test_directories_that_are_no_models(model, tmp_path):
    with pytest.raises(ModelError, match="no such directory.*hf download"):
        open_model("Qwen/Qwen3.5-0.8B")
    file = tmp_path / "f.gguf"
    file.write_text("x")
    with pytest.raises(ModelError, match="got a file"):
        open_model(file)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match="config.json: got no such file"):
        open_model(empty)
    path = model().save(tmp_path / "m")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pytorch_model.bin.*Convert"):
        open_model(path)
    for text, match in (("{", "not JSON"), ("[]", "JSON list"), (POINTER.decode(), "Git LFS pointer")):
        (path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=match):
            open_model(path)


def test_index_that_disagrees(model, tmp_path):
    path = model().save(tmp_path / "m", 2)
    index_file = path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"]["model.ghost"] = "model-00001-of-00002.safetensors"
    index_file.write_text(json.dumps(index))
    with pytest.raises(ModelError, match="without 1 tensors that .* lists .model.ghost"):
        open_model(path)
    index["weight_map"]["model.ghost"] = "../m/model-00001-of-00002.safetensors"
    index_file.write_text(json.dumps(index))
    with pytest.raises(ModelError, match="safetensors file in this directory"):
        open_model(path)
    index_file.write_text("{}")
    with pytest.raises(ModelError, match="no weight_map"):
        open_model(path)


def test_two_sets_of_weights(model, tmp_path):
    path = model().save(tmp_path / "m", 2)
    save_file({"x": torch.zeros(2)}, path / "model.safetensors")
    with pytest.raises(ModelError, match="both model.safetensors and model.safetensors.index.json"):
        open_model(path)
    path = model().save(tmp_path / "twice", 2)
    shard = load_file(path / "model-00001-of-00002.safetensors")
    shard["model.norm.weight"] = torch.zeros(16)
    other = load_file(path / "model-00002-of-00002.safetensors")
    other["model.norm.weight"] = torch.ones(16)
    save_file(shard, path / "model-00001-of-00002.safetensors")
    save_file(other, path / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match="model.norm.weight in .* and .*; expected it once"):
        open_model(path)


def test_unsupported_geometry_is_named_before_its_tensors(model, tmp_path):
    m = model()
    m.config["model_type"] = "qwen3_5_moe_text"
    m.tensors = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 2)}
    with pytest.raises(ModelError, match="MoE"):
        open_model(m.save(tmp_path / "m"))
