"""Geometry: what config.json means, against transformers, and what is refused by name."""

from __future__ import annotations

import copy

import pytest
from tiny import plain_config

from cortiq_kernels.model.geometry import Geometry, ModelError

L, F = "linear_attention", "full_attention"


def nested(text, **root):
    return {"model_type": "qwen3_5", "text_config": text, "vision_config": {"hidden_size": 8}, **root}


def test_fields_and_widths(text_config):
    g = Geometry.from_config(text_config)
    assert (g.hidden, g.intermediate, g.vocab, g.n_layers) == (16, (24, 24, 24), 40, 3)
    assert (g.nq, g.nkv, g.hd, g.rot, g.rope_theta) == (4, 2, 8, 2, 5e5)
    assert (g.nk, g.nv, g.dk, g.dv, g.conv, g.eps) == (2, 4, 4, 4, 4, 1e-6)
    assert (g.tied, g.max_position, g.eos_ids, g.prefix, g.num_loops) == (False, 512, (7, 3), "model.", 1)
    assert g.conv_channels == 2 * 8 + 16 and g.gdn_width == 32 + 16 + 8 and g.attn_width == 2 * 32 + 2 * 16
    assert [g.is_full(i) for i in range(3)] == [False, True, False]
    assert hash(g) == hash(Geometry.from_config(text_config))


def test_nested_equals_flat(text_config):
    flat = Geometry.from_config(text_config)
    deep = Geometry.from_config(nested(text_config))
    assert deep.prefix == "model.language_model."
    assert {**vars(deep), "prefix": ""} == {**vars(flat), "prefix": ""}


def test_defaults_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    short = {
        "model_type": "qwen3_5_text", "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 2, "rope_theta": 1e7,
    }  # fmt: skip
    g = Geometry.from_config(short)
    t = transformers.Qwen3_5TextConfig(**{k: v for k, v in short.items() if k != "model_type"})
    assert g.layer_types == tuple(t.layer_types) == (L, L, L, F, L)
    assert (g.hd, g.eps, g.tied, g.max_position) == (
        t.head_dim, t.rms_norm_eps, t.tie_word_embeddings, t.max_position_embeddings,
    )  # fmt: skip
    assert (g.nk, g.nv, g.dk, g.dv, g.conv) == (
        t.linear_num_key_heads, t.linear_num_value_heads, t.linear_key_head_dim, t.linear_value_head_dim,
        t.linear_conv_kernel_dim,
    )  # fmt: skip
    assert g.rope_theta == t.rope_parameters["rope_theta"] == 1e7
    assert g.rot == int(t.head_dim * t.rope_parameters["partial_rotary_factor"])


def test_list_of_layer_types_wins_over_interval(text_config):
    types = [L, L, F, L, F, F]
    text_config.update(layer_types=types, num_hidden_layers=6, full_attention_interval=4)
    assert Geometry.from_config(text_config).layer_types == tuple(types)
    del text_config["layer_types"]
    assert Geometry.from_config(text_config).layer_types == (L, L, L, F, L, L)


def test_theta_and_factor_wherever_they_are(text_config):
    want = Geometry.from_config(text_config)
    rope = text_config.pop("rope_parameters")
    top = {**text_config, "rope_theta": rope["rope_theta"], "partial_rotary_factor": 0.25}
    both = {**top, "rope_parameters": rope}
    older = {**text_config, "rope_scaling": {"type": "default", "mrope_section": [1, 1, 1]}, "rope_theta": 5e5}
    for config in (top, both, older, nested(text_config, rope_theta=5e5), nested(text_config, rope_parameters=rope)):
        g = Geometry.from_config(config)
        assert (g.rope_theta, g.rot) == (want.rope_theta, want.rot)


def test_tie_flag_at_either_level(text_config):
    del text_config["tie_word_embeddings"]
    assert Geometry.from_config(nested(text_config, tie_word_embeddings=True)).tied
    assert Geometry.from_config(nested({**text_config, "tie_word_embeddings": True})).tied
    assert not Geometry.from_config(nested(text_config)).tied


def test_prefix_follows_the_tensors(text_config):
    assert (
        Geometry.from_config(text_config, ["model.language_model.embed_tokens.weight"]).prefix
        == "model.language_model."
    )
    assert Geometry.from_config(nested(text_config), ["model.layers.0.A", "mtp.layers.0.x"]).prefix == "model."
    for names in (["transformer.wte"], ["model.layers.0.x", "model.language_model.layers.0.x"]):
        with pytest.raises(ModelError, match="exactly one of"):
            Geometry.from_config(text_config, names)


def test_eos_text_config_wins(text_config):
    assert Geometry.from_config(nested(text_config, eos_token_id=1)).eos_ids == (7, 3)
    del text_config["eos_token_id"]
    assert Geometry.from_config(nested(text_config, eos_token_id=1)).eos_ids == (1,)
    assert Geometry.from_config(text_config).eos_ids == ()


def test_empty_lists_of_the_dense_files_are_not_moe(text_config):
    text_config.update(mlp_only_layers=[], num_experts=0, attn_output_gate=True, mtp_num_hidden_layers=1)
    Geometry.from_config(text_config)


def test_looped_stacks(text_config):
    once = Geometry.from_config(text_config)
    assert (once.num_loops, once.n_virtual, once.norm_between_loops) == (1, 3, False)
    g = Geometry.from_config({**text_config, "num_loops": 3, "norm_between_loops": True})
    assert (g.n_layers, g.n_virtual) == (3, 9) and [g.physical(i) for i in (0, 2, 3, 8)] == [0, 2, 0, 2]
    assert [i for i in range(9) if g.norm_after(i)] == [2, 5]
    assert [g.is_full(i) for i in range(9)] == [False, True, False] * 3
    g = Geometry.from_config({**text_config, "num_loops": 3})
    assert not any(map(g.norm_after, range(9)))


def test_dtype_entries_are_ignored(text_config):
    g = Geometry.from_config(text_config)
    assert Geometry.from_config({**text_config, "torch_dtype": "float16", "dtype": "bfloat16"}) == g


def test_widths(text_config):
    assert Geometry.from_config(text_config, widths=[8, 24, 16]).intermediate == (8, 24, 16)
    assert not Geometry.from_config(text_config, widths=[8, 24, 16]).uniform
    with pytest.raises(ModelError, match="intermediate_size: got 24.*largest"):
        Geometry.from_config(text_config, widths=[8, 16, 16])
    with pytest.raises(ModelError, match="got 2; expected 3"):
        Geometry.from_config(text_config).with_widths([1, 2])


REFUSED = {
    "model_type": ({"model_type": "mistral"}, "model_type.*'mistral'.*qwen2, llama"),
    "no model_type": ({"model_type": None}, "model_type: got nothing"),
    "moe type": ({"model_type": "qwen3_5_moe_text"}, "MoE"),
    "moe experts": ({"num_experts": 8}, "num_experts.*MoE"),
    "flat type without text_config": ({"model_type": "qwen3_5"}, "without text_config"),
    "layer_types short": ({"layer_types": [L, F]}, "2 entries; expected 3"),
    "layer_types unknown": ({"layer_types": [L, "sliding_attention", L]}, r"layer_types\[1\].*sliding_attention"),
    "rope type": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'.*'default'"),
    "rope scaling": ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear'.*'default'"),
    "theta differs": ({"rope_theta": 1e4}, "rope_theta.*500000.0.*10000.0"),
    "factor differs": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor.*0.25.*0.5"),
    "no theta": ({"rope_parameters": None}, "rope_theta: got nothing"),
    "odd rotary dims": ({"head_dim": 12, "rope_parameters": {"rope_theta": 1e4}}, "partial_rotary_factor.*3 of 12"),
    "bias": ({"attention_bias": True}, "attention_bias"),
    "gate off": ({"attn_output_gate": False}, "attn_output_gate"),
    "llama3 rope in Qwen3.5": ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "'llama3'.*'default'"),
    "sliding windows": ({"use_sliding_window": True}, "use_sliding_window"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act.*'gelu'"),
    "no loops": ({"num_loops": 0}, "num_loops: got 0"),
    "too many loops": ({"num_loops": 1366}, "num_loops: got 1366; expected.*at most 1365"),
    "half a loop": ({"num_loops": 1.5}, "num_loops: got 1.5"),
    "loop norm": ({"num_loops": 2, "norm_between_loops": 1}, "norm_between_loops: got 1"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "missing size": ({"hidden_size": None}, "hidden_size: got nothing"),
    "size is text": ({"vocab_size": "40"}, "vocab_size: got '40'"),
    "size is bool": ({"num_hidden_layers": True}, "num_hidden_layers: got True"),
    "heads": ({"num_key_value_heads": 3}, "num_attention_heads: got 4 over 3"),
    "gdn heads": ({"linear_num_key_heads": 3}, "linear_num_value_heads: got 4 over 3"),
    "flag": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: got 'yes'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(text_config, case):
    change, match = REFUSED[case]
    with pytest.raises(ModelError, match=match) as e:
        Geometry.from_config({**text_config, **change})
    assert "expected" in str(e.value) and "got" in str(e.value)


PLAIN_REFUSED = {
    "mistral": ("llama", {"model_type": "mistral"}, "'mistral'"),
    "moe": ("qwen3", {"model_type": "qwen3_moe"}, "qwen3_moe.*MoE"),
    "experts": ("qwen2", {"num_experts": 60}, "num_experts.*MoE"),
    "a bias": ("llama", {"attention_bias": True}, "attention_bias: got true; expected false"),
    "a bias in the output too": ("qwen3", {"attention_bias": True}, "attention_bias: got true"),
    "a bias in the MLP": ("llama", {"mlp_bias": True}, "mlp_bias: got true"),
    "sliding windows": ("qwen2", {"use_sliding_window": True}, "use_sliding_window: got true"),
    "sliding layers": ("qwen3", {"layer_types": [F, "sliding_attention"]}, r"layer_types\[1\].*sliding"),
    "delta layers": ("qwen3", {"layer_types": [L, F]}, r"layer_types\[0\].*expected 'full_attention'"),
    "an output gate": ("qwen3", {"attn_output_gate": True}, "attn_output_gate: got true.*Qwen3"),
    "part of a head": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5; expected 1"),
    "odd heads": ("qwen3", {"head_dim": 9}, "head_dim.*9 of 9"),
    "more heads than width": ("llama", {"hidden_size": 2}, "head_dim: got nothing"),
    "no theta": ("llama", {"rope_theta": None}, "rope_theta: got nothing"),
    "yarn": ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'.*'default'"),
    "llama3 elsewhere": ("qwen2", {"rope_scaling": {"rope_type": "llama3"}}, "'llama3'.*'default'"),
    "llama3 in part": ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor: got nothing"),
    "llama3 upside down": (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
                          "original_max_position_embeddings": 64}},
        "high_freq_factor: got 4.0; expected more",
    ),
    "activation": ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    "nested": ("qwen3", {"text_config": {"model_type": "qwen3"}}, "model_type.*qwen3_5 with text_config"),
}  # fmt: skip


@pytest.mark.parametrize("case", PLAIN_REFUSED)
def test_plain_families_refuse_by_name(case):
    family, change, match = PLAIN_REFUSED[case]
    with pytest.raises(ModelError, match=match):
        Geometry.from_config(plain_config(family) | change)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_defaults_of_the_plain_families_are_those_of_transformers(family):
    transformers = pytest.importorskip("transformers")
    config = {k: v for k, v in plain_config(family).items() if k not in ("head_dim", "rms_norm_eps", "eos_token_id")}
    g = Geometry.from_config(config)
    t = transformers.AutoConfig.for_model(**config)
    assert (g.eps, g.tied, g.rope_theta) == (t.rms_norm_eps, t.tie_word_embeddings, t.rope_parameters["rope_theta"])
    assert g.hd == g.rot == (getattr(t, "head_dim", None) or 32 // 4)
    assert g.layer_types == (F, F) and (g.nk, g.nv, g.dk, g.dv, g.conv) == (0,) * 5
    assert (g.zero_centered, g.attn_gate) == (False, False)
    assert (g.qk_norm, g.qkv_bias) == {"qwen3": (True, False), "qwen2": (False, True), "llama": (False, False)}[family]
    assert g.attn_width == g.hd * (4 + 2 + 2) and g.rope_llama3 is None


def test_qwen2_has_its_bias_whatever_the_key_says():
    for value in (True, False):
        assert Geometry.from_config(plain_config("qwen2", attention_bias=value)).qkv_bias


@pytest.mark.parametrize(
    "key,root", [("tie_word_embeddings", True), ("rope_theta", 1e4), ("num_hidden_layers", 4), ("hidden_act", "gelu")]
)
def test_levels_that_disagree_are_refused(text_config, key, root):
    before = copy.deepcopy(text_config)
    with pytest.raises(ModelError, match=f"{key}.*text_config.*root"):
        Geometry.from_config(nested(text_config, **{key: root}))
    assert text_config == before


def test_nested_moe_is_refused(text_config):
    with pytest.raises(ModelError, match="MoE"):
        Geometry.from_config({"model_type": "qwen3_5_moe", "text_config": {**text_config, "model_type": None}})
