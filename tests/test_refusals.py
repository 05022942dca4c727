"""What is refused, in the order of the specification: models, data, heal, fold, score. Each refusal is one line with
what, got, expected and how to fix it, raised before a weight is read or a step is made, with nothing written.

Bakes are not there yet; their refusals come with them.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from directories import id_rows, load_conftest, nested, records, refused, tensors_of, write_dir
from fuzz_lane import CONFIG as TEXT_CONFIG
from report_world import CONFIG, TRAIN, V, fold, heal, score

from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import Evaluator, Trainer

Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    """Weights, evaluators and trainers may not even be made."""

    def work(*_: object, **__: object) -> None:
        raise AssertionError("work began before the refusal")

    monkeypatch.setattr(Weights, "load", work)
    monkeypatch.setattr(Trainer, "__init__", work)
    monkeypatch.setattr(Evaluator, "__init__", work)


@pytest.fixture
def data(tmp_path) -> Path:
    return records(tmp_path / "d.jsonl", TRAIN + id_rows(V, (20, 9), "test", seed=3))


def check(line: str, *words: str) -> None:
    """The line names what, got, expected and how to fix it."""
    for word in words:
        assert word in line, (word, line)
    assert re.search(r"\bgot\b|\bis\b|\bhas\b|\bholds\b|\brepeats\b|records|windows", line), line
    assert "expected" in line or ";" in line, line
    assert line.count("\n") == 1 and len(line) < 2000


def drop(*names: str) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for n in names:
            del tensors[n]

    return edit


def put(**values: Any) -> Edit:
    return lambda config, tensors: config.update(values)


def rope(**values: Any) -> Edit:
    return lambda config, tensors: config["rope_parameters"].update(values)


def without(key: str) -> Edit:
    return lambda config, tensors: config.pop(key)


def shaped(name: str, *shape: int) -> Edit:
    return lambda config, tensors: tensors.update({name: torch.zeros(shape)})


def typed(name: str, dtype: torch.dtype) -> Edit:
    return lambda config, tensors: tensors.update({name: tensors[name].to(dtype)})


LAYER = "model.layers.1."
#: section 1: geometry and tensors
MODELS: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "mixture of experts": (put(num_experts=8), ("num_experts", "mixture of experts", "dense")),
    "MoE by its type": (put(model_type="qwen3_5_moe"), ("qwen3_5_moe", "mixture of experts")),
    "another family": (put(model_type="mistral"), ("model_type", "'mistral'", "Qwen3.5, Qwen3, Qwen2 or Llama")),
    "Qwen3's type on hybrid layers": (put(model_type="qwen3"), ("partial_rotary_factor", "Qwen3")),
    "a vision model of another family": (put(model_type="qwen2_5_vl"), ("'qwen2_5_vl'", "Qwen3.5")),
    "sliding windows": (put(use_sliding_window=True), ("use_sliding_window", "true", "Sliding windows")),
    "an MLP with a bias": (put(mlp_bias=True), ("mlp_bias", "true")),
    "Llama 3's RoPE elsewhere": (rope(rope_type="llama3"), ("rope_type", "'llama3'", "'default'")),
    "no type": (without("model_type"), ("model_type", "got nothing")),
    "nested type, flat file": (put(model_type="qwen3_5"), ("text_config",)),
    "scaled RoPE": (rope(rope_type="yarn"), ("rope_type", "'yarn'", "'default'")),
    "scaled RoPE, the older name": (put(rope_scaling={"type": "linear", "factor": 2.0}), ("type", "'linear'")),
    "no theta": (lambda c, t: c["rope_parameters"].pop("rope_theta"), ("rope_theta", "nothing", "no default")),
    "two thetas": (put(rope_theta=1e6), ("rope_theta", "10000.0", "1000000.0", "one value")),
    "odd partial factor": (rope(partial_rotary_factor=0.2), ("partial_rotary_factor", "even")),
    "quantised": (put(quantization_config={"bits": 4}), ("quantization_config", "quantised")),
    "no passes": (put(num_loops=0), ("num_loops", "got 0", "positive")),
    "projections with a bias": (put(attention_bias=True), ("attention_bias",)),
    "no output gate": (put(attn_output_gate=False), ("attn_output_gate",)),
    "another activation": (put(hidden_act="gelu"), ("hidden_act", "'gelu'")),
    "layer types too short": (put(layer_types=["full_attention"]), ("layer_types", "1 entries", "2")),
    "unknown layer type": (put(layer_types=["full_attention", "sliding"]), ("layer_types[1]", "'sliding'")),
    "no hidden size": (without("hidden_size"), ("hidden_size", "nothing")),
    "negative size": (put(vocab_size=-1), ("vocab_size", "-1")),
    "size that is text": (put(hidden_size="16"), ("hidden_size", "'16'")),
    "more layers than any model": (put(num_hidden_layers=10**9), ("num_hidden_layers", "1000000000", "at most")),
    "number beyond all floats": (rope(rope_theta=10**400), ("rope_theta", "positive")),
    "infinite epsilon": (put(rms_norm_eps=float("inf")), ("rms_norm_eps", "inf")),
    "heads that do not divide": (put(num_key_value_heads=3), ("num_attention_heads", "multiple")),
    "value heads that do not divide": (put(linear_num_value_heads=3, linear_num_key_heads=2), ("linear_num_value",)),
    "eos beyond the vocabulary": (put(eos_token_id=[0, V]), ("eos_token_id", f"below {V}")),
    "a layer without a tensor": (
        drop(LAYER + "mlp.up_proj.weight"), ("layer 1 (full_attention)", "mlp.up_proj.weight", "1 tensors missing"),
    ),
    "a layer without all": (
        drop(LAYER + "self_attn.q_proj.weight", LAYER + "self_attn.k_proj.weight"), ("layer 1", "q_proj", "k_proj"),
    ),
    "no final norm": (drop("model.norm.weight"), ("model.norm.weight",)),
    "no embedding": (drop("model.embed_tokens.weight"), ("model.embed_tokens.weight",)),
    "a head that is not there": (put(tie_word_embeddings=False), ("lm_head.weight", "tie_word_embeddings to true")),
    "another shape": (shaped(LAYER + "self_attn.o_proj.weight", 16, 31), ("o_proj.weight", "[16, 31]", "[16, 32]")),
    "another width": (put(intermediate_size=25), ("gate_proj", "[24, 16]", "[25, 16]")),
    "integer weights": (typed(LAYER + "mlp.up_proj.weight", torch.int8), ("up_proj", "I8", "unquantised")),
    "a tensor too many": (shaped("model.layers.7.mlp.up_proj.weight", 24, 16), ("model.layers.7.", "2-layer")),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_models(tmp_path, data, case):
    edit, words = MODELS[case]
    config, tensors = copy.deepcopy(CONFIG), tensors_of(CONFIG)
    edit(config, tensors)
    path = write_dir(tmp_path / "m", config, tensors)
    good = write_dir(tmp_path / "t", CONFIG, tensors_of(CONFIG))
    commands = (
        score(path, data), ("score", "--models", good, path, "--data", data), fold(path, data, tmp_path / "o"),
        heal(path, data, tmp_path / "o"), heal(good, data, tmp_path / "o", "--teacher", path, "--ce", "0"),
    )  # fmt: skip
    for args in commands:
        check(refused(tmp_path, *args), *words)


def test_models_whose_levels_disagree(tmp_path, data):
    whole, tensors = nested(CONFIG, tensors_of(CONFIG))
    for key, value in (("tie_word_embeddings", False), ("vocab_size", 7), ("eos_token_id", [V])):
        bad = copy.deepcopy(whole)
        bad[key] = value
        if key == "eos_token_id":
            del bad["text_config"][key]
        path = write_dir(tmp_path / f"m{key}", bad, tensors)
        check(refused(tmp_path, *score(path, data)), key)


TEXT = {"text": "the quick brown fox"}
USER, REPLY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
#: section 2: (line, words)
LINES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "nothing in it": ({}, ("no content field",)),
    "two contents": ({**TEXT, "ids": [1], "first_target": 0}, ("ambiguous",)),
    "a prompt alone": ({"prompt": "a"}, ('no "completion"',)),
    "text that is a list": ({"text": [USER]}, ('"text"', '"messages"')),
    "no messages": ({"messages": []}, ("non-empty list",)),
    "a message without a role": ({"messages": [{"content": "a"}]}, ("role",)),
    "content of a number": ({"messages": [{"role": "user", "content": 5}]}, ("content",)),
    "user has the last word": ({"messages": [USER, REPLY, USER]}, ("last message", "'user'", "loss_on")),
    "only a system message": ({"messages": [{"role": "system", "content": "a"}]}, ("chat template",)),
    "a late system message": ({"messages": [USER, {"role": "system", "content": "a"}, REPLY]}, ("chat template",)),
    "a split of its own": ({**TEXT, "split": "dev"}, ('"split"', "train, val or test")),
    "a rid that is a number": ({**TEXT, "rid": 5}, ('"rid"', "string")),
    "an empty rid": ({**TEXT, "rid": ""}, ('"rid"',)),
    "a category that is a list": ({**TEXT, "category": []}, ('"category"',)),
    "a negative weight": ({**TEXT, "weight": -1}, ('"weight"', "-1")),
    "a weight that vanishes": ({**TEXT, "weight": 1e-60}, ('"weight"', "float32")),
    "ids of text": ({"ids": ["1"], "first_target": 0}, ('"ids"', "integers")),
    "an id beyond the vocabulary": ({"ids": [1, 384], "first_target": 0}, ("384", "outside the vocabulary")),
    "a negative id": ({"ids": [-1], "first_target": 0}, ("-1",)),
    "a negative first target": ({"ids": [1], "first_target": -1}, ('"first_target"', ">= 0")),
    "no first target": ({"ids": [1]}, ('"first_target"',)),
    "an array": ([1], ("array", "jq")),
    "a string": ("a", ("JSON object",)),
}


@pytest.fixture(scope="module")
def text_model(tmp_path_factory) -> Path:
    builders = load_conftest("data")
    path = builders.write_model_dir(tmp_path_factory.mktemp("text") / "m")
    return write_dir(path, TEXT_CONFIG, tensors_of(TEXT_CONFIG))


@pytest.mark.parametrize("case", LINES)
def test_lines(tmp_path, text_model, case):
    row, words = LINES[case]
    row = {"split": "test", **row} if isinstance(row, dict) else row
    data = records(tmp_path / "d.jsonl", [row, {**TEXT, "rid": "good", "split": "test"}])
    line = refused(tmp_path, *score(text_model, data))
    check(line, "1 of 2 records cannot be used; fix or remove the lines", "line 1:", *words)


def splits(*names: str, **more: Any) -> list[dict]:
    return [{"ids": [1, 2, 3, 4], "first_target": 1, **more, "split": s} for s in names]


#: section 2: (rows, words of heal, or None where heal takes them)
FILES: dict[str, tuple[list[dict], tuple[str, ...]]] = {
    "no records": ([], ("no records",)),
    "no val windows": (splits("train"), ("no val windows", "nothing to measure")),
    "no train windows": (splits("val"), ("0 train windows", "batch of 1")),
    "nothing scored": (splits("train", "val", first_target=4), ("none of the 2 records has a scored token",)),
    "weights of zero": (splits("train", "val", weight=0), ("scored token",)),
    "val unscored": (splits("train") + splits("val", first_target=9), ("no val windows",)),
    "a rid twice": (splits("train", "val", rid="a"), ("line 2: repeats the rid 'a' of line 1",)),
}


@pytest.mark.parametrize("case", FILES)
def test_files_of_records(tmp_path, case):
    rows, words = FILES[case]
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    data = records(tmp_path / "d.jsonl", rows)
    check(refused(tmp_path, *heal(path, data, tmp_path / "o")), *words)


def test_fewer_windows_than_a_batch_says_both_numbers(tmp_path, data):
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    line = refused(tmp_path, *heal(path, data, tmp_path / "o"), "--batch", "9")
    check(line, "got 9 windows", "at most 4", "--batch 4")


def test_text_without_a_tokenizer_is_the_directory_s_fault(tmp_path, text_model):
    path = shutil.copytree(text_model, tmp_path / "m")
    (path / "tokenizer.json").unlink()
    data = records(tmp_path / "d.jsonl", splits("train", "val", "test") + [{**TEXT, "split": "val"}])
    for args in (score(path, data, "--splits", "val"), heal(path, data, tmp_path / "o")):
        line = refused(tmp_path, *args)
        check(line, f"model '{path}': got no tokenizer.json", f"since {data} holds text (line 4)", "Copy")
        assert "cannot be used" not in line and "fix or remove" not in line


@pytest.mark.parametrize(
    ("file", "contents", "words"),
    [
        ("generation_config.json", {"eos_token_id": [384]}, ("eos_token_id", "got 384", "below its 384")),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, ("chat_template", "template")),
        ("tokenizer_config.json", {"chat_template": {"rag": "x"}}, ("only templates named rag",)),
        ("tokenizer_config.json", {"chat_template": "{% if %}"}, ("not valid Jinja",)),
        ("tokenizer.json", {}, ("cannot be read as a tokenizer",)),
        ("tokenizer.json", [], ("JSON list",)),
    ],
)
def test_tokenizers_and_templates(tmp_path, text_model, file, contents, words):
    path = shutil.copytree(text_model, tmp_path / "m")
    (path / "chat_template.jinja").unlink()
    (path / file).write_text(json.dumps(contents))
    data = records(tmp_path / "d.jsonl", [{"messages": [USER, REPLY], "split": "test"}])
    check(refused(tmp_path, *score(path, data)), str(path), *words)


#: section 3: (flags, words)
HEAL: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no evaluations": (("--eval-every", "0"), ("eval_every", "0", "at least 1")),
    "no warm-up": (("--warm", "0"), ("warm", "(0, 1]")),
    "all warm-up and more": (("--warm", "1.5"), ("warm", "1.5")),
    "a share that is no number": (("--ce", "nan"), ("ce", "nan")),
    "no rate": (("--lr", "0"), ("lr", "more than 0")),
    "no passes": (("--epochs", "0"), ("epochs",)),
    "no end": (("--epochs", "inf"), ("epochs", "inf")),
    "no batch": (("--batch", "0"), ("batch", "at least 1")),
    "one token": (("--window", "1"), ("window", "at least 2")),
    "no targets": (("--topk", "0"), ("topk", "at least 1")),
    "no accumulation": (("--accumulate", "0"), ("accumulate",)),
    "all from a layer on": (("--train", "all", "--train-from", "1"), ("train_from", "1 with train 'all'")),
    "genesis of all": (("--train", "all", "--genesis"), ("genesis",)),
    "a layer beyond the last": (("--train-from", "2"), ("train_from", "2", "0 .. 1")),
    "no teacher": (("--ce", "0"), ("teacher", "--ce 1")),
    "half precision on a CPU": (("--dtype", "f16"), ("f16",)),
    "an unknown device": (("--device", "tpu"), ("device", "'tpu'")),
    "a memory no machine has": (("--window", "2000000000"), ("window",)),
}


@pytest.mark.parametrize("case", HEAL)
def test_heal(tmp_path, data, case):
    flags, words = HEAL[case]
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    check(refused(tmp_path, *heal(path, data, tmp_path / "o", *flags)), *words)


def test_teachers_that_speak_another_language(tmp_path, data, text_model):
    small = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    line = refused(tmp_path, *heal(small, data, tmp_path / "o", "--teacher", text_model, "--ce", "0"))
    check(line, f"vocabularies of {TEXT_CONFIG['vocab_size']}", f"and {V}")
    other = shutil.copytree(text_model, tmp_path / "other")
    spec = json.loads((other / "tokenizer.json").read_text())
    spec["model"]["merges"].pop()
    (other / "tokenizer.json").write_text(json.dumps(spec))
    ids = records(tmp_path / "ids.jsonl", splits("train", "val", "test"))
    check(refused(tmp_path, *heal(text_model, ids, tmp_path / "o", "--teacher", other, "--ce", "0")), "tokenizers")
    check(refused(tmp_path, "score", "--models", text_model, other, "--data", ids), "tokenizers")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path, data):
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    for args in (heal(path, data, tmp_path / "o"), fold(path, data, tmp_path / "o"), score(path, data)):
        for device in ("cuda", "cuda:3"):
            check(refused(tmp_path, *args, "--device", device), f"'{device}'", "expected a GPU")


#: sections 6 and 7
FOLD = {
    "keep nothing": (("--keep", "0"), ("keep", "(0, 1]")),
    "keep more than all": (("--keep", "1.5"), ("keep", "1.5")),
    "no width": (("--width", "0"), ("width", "at least 1")),
    "wider than it is": (("--width", "25"), ("width", "25", "at most 24")),
    "no multiple": (("--align", "0"), ("align",)),
    "no batches": (("--max-batches", "0"), ("max_batches",)),
}
SCORE = {
    "an unknown split": (("--splits", "dev"), ("splits", "'dev'")),
    "a split without records": (("--splits", "train"), ("train",)),
}


@pytest.mark.parametrize("case", FOLD)
def test_fold(tmp_path, data, case):
    flags, words = FOLD[case]
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    check(refused(tmp_path, *fold(path, data, tmp_path / "o", *flags)), *words)


@pytest.mark.parametrize("case", SCORE)
def test_score(tmp_path, case):
    flags, words = SCORE[case]
    path = write_dir(tmp_path / "m", CONFIG, tensors_of(CONFIG))
    data = records(tmp_path / "d.jsonl", splits("test"))
    check(refused(tmp_path, *score(path, data, *flags)), *words)
