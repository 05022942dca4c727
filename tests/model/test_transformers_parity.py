"""Directories as transformers sees them: what it saves we open, and what we write it loads, equal in every tensor."""

from __future__ import annotations

import json

import pytest
import torch

from cortiq_kernels.model import Weights, create_model, names, open_model, width_changed_updates, write_model
from cortiq_kernels.model.geometry import Geometry

transformers = pytest.importorskip("transformers")


def hf_load(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def assert_same(hf, d) -> None:
    """Parameters and config of a loaded transformers model against an opened directory."""
    g, c = d.geometry, hf.config
    params = dict(hf.state_dict())
    for s in names.slots(g):
        name = s.published.replace(g.prefix, "model.", 1)
        assert torch.equal(params[name], d.read(s.published).float()), name
    assert (g.tied, g.hidden, g.n_layers, max(g.intermediate)) == (
        c.tie_word_embeddings, c.hidden_size, c.num_hidden_layers, c.intermediate_size,
    )  # fmt: skip
    assert g.layer_types == tuple(c.layer_types) and g.rope_theta == c.rope_parameters["rope_theta"]
    assert g.rot == 2 * hf.model.rotary_emb.inv_freq.numel()
    assert list(g.eos_ids) == c.eos_token_id


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("is_nested", [False, True])
def test_what_we_write_loads(model, tmp_path, is_nested, tied):
    m = model(nested=is_nested, tied=tied, extra=True)
    src = open_model(m.save(tmp_path / "src", 2))
    w = Weights.load(src, train="all")
    w.trained.master.add_(0.01)
    change = width_changed_updates(src, [16] * 3)
    replace = w.export()
    for i in range(3):
        p = f"{m.prefix}layers.{i}.mlp."
        for part in ("gate_proj", "up_proj"):
            replace[f"{p}{part}.weight"] = replace[f"{p}{part}.weight"][:16]
        replace[f"{p}down_proj.weight"] = replace[f"{p}down_proj.weight"][:, :16]
    write_model(
        src, tmp_path / "dst", replace=replace, drop=change.drop, config_updates=change.config_updates, provenance={}
    )
    dst = open_model(tmp_path / "dst")
    assert_same(hf_load(tmp_path / "dst"), dst)
    assert torch.equal(dst.read(f"{m.prefix}norm.weight"), replace[f"{m.prefix}norm.weight"].bfloat16())


def test_created_model_loads(text_config, tmp_path):
    w = Weights.random(Geometry.from_config(text_config), seed=1)
    create_model(tmp_path / "new", text_config, w.export(w.names), shard_bytes=3000)
    d = open_model(tmp_path / "new")
    hf = hf_load(tmp_path / "new")
    assert_same(hf, d)
    assert bool(torch.isfinite(hf(torch.arange(6)[None]).logits).all())


def test_what_transformers_saves_we_open(text_config, tmp_path):
    config = transformers.Qwen3_5TextConfig(**{k: v for k, v in text_config.items() if k != "model_type"})
    torch.manual_seed(0)
    hf = transformers.Qwen3_5ForCausalLM(config)
    hf.save_pretrained(tmp_path / "hf")
    assert_same(hf, open_model(tmp_path / "hf"))
    write_model(open_model(tmp_path / "hf"), tmp_path / "copy", replace={}, provenance={})
    assert (tmp_path / "copy" / "config.json").read_bytes() == (tmp_path / "hf" / "config.json").read_bytes()


@pytest.mark.parametrize("where", ["rope_parameters", "top-level"])
def test_theta_is_the_one_transformers_uses(model, tmp_path, where):
    m = model()
    if where == "top-level":
        rope = m.config.pop("rope_parameters")
        m.config |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"]}
    path = m.save(tmp_path / "m")
    g, hf = open_model(path).geometry, hf_load(path)
    want = 1 / g.rope_theta ** (torch.arange(0, g.rot, 2) / g.rot)
    assert torch.allclose(hf.model.rotary_emb.inv_freq, want)


def test_untied_head_in_a_nested_file(model, tmp_path):
    m = model(nested=True)
    path = m.save(tmp_path / "m")
    assert json.loads((path / "config.json").read_text())["text_config"]["tie_word_embeddings"] is False
    assert torch.equal(hf_load(path).lm_head.weight, Weights.load(open_model(path))["head"].float())
