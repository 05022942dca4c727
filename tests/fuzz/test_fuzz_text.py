"""Tokenizer and generation files, records, and settings files, as anybody may have damaged them."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from fuzz_lane import RUN, Lane, build_world, fuzzed
from fuzz_mutations import NASTY, Raw, damaged, deep, documents, files, render
from hypothesis import strategies as st

COMMANDS = st.sampled_from(["score", "heal", "fold"])


@functools.cache
def original(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return (build_world(Path(folder)) / name).read_bytes()


TEMPLATES = (
    b"{{ messages[0].content }}", b"{{ 10 ** (10 ** 10) }}", b"{{ 'a' * 10 ** 11 }}",
    b"{% for x in range(10**9) %}a{% endfor %}", b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", b"{% if %}",
    b"{{ messages.x.y }}", b"{{ raise_exception(3) }}", b"{{ ''.__class__.__mro__ }}", b"{% include 'x' %}",
    b"{{ messages | tojson(indent=-1) }}", b"{{ 1 // 0 }}", b"\xff\xfe", b"{{ strftime_now(5) }}", b"",
    b"{{ " + b"(" * 500 + b")" * 500 + b" }}", b"{{ '%d' % 'x' }}", b"{{ '{:>99999999999}'.format(1) }}",
)  # fmt: skip


TOKENIZER_FILES = [
    "tokenizer.json", "tokenizer.json", "tokenizer.json", "tokenizer_config.json", "tokenizer_config.json",
    "generation_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
]  # fmt: skip


@st.composite
def tokenizer_files(draw: st.DrawFn) -> tuple[dict[str, bytes | None], str]:
    name = draw(st.sampled_from(TOKENIZER_FILES))
    changed: dict[str, bytes | None] = {}
    if name == "tokenizer.json":
        own = ("BPE", "WordLevel", "Unigram", "WordPiece", "ByteLevel", "Sequence", {"type": "Lowercase"}, "<|im_end|>",
               ["a", "b"], {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated",
                            "invert": False})  # fmt: skip
        changed["m/tokenizer.json"] = draw(files(json.loads(original("m/tokenizer.json")), own))
    elif name == "chat_template.jinja":
        changed["m/" + name] = draw(st.one_of(st.sampled_from(TEMPLATES), damaged(original("m/chat_template.jinja"))))
    else:
        template = original("m/chat_template.jinja").decode()
        base: dict[str, Any] = {
            "tokenizer_config.json": json.loads(original("m/tokenizer_config.json")) | {
                "chat_template": [{"name": "default", "template": template}, {"name": "tool_use", "template": "x"}],
                "eos_token": {"content": "<|im_end|>"}},
            "generation_config.json": json.loads(original("m/generation_config.json")),
            "special_tokens_map.json": {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}},
            "chat_template.json": {"chat_template": template},
        }[name]  # fmt: skip
        own = (template, {"default": template}, {"default": 5}, [{"name": "default"}], "<|im_end|>", 383, 384, -1)
        changed["m/" + name] = draw(files(base, own))
        if "template" in name or draw(st.booleans()):
            changed["m/chat_template.jinja"] = None
    return changed, draw(COMMANDS)


@fuzzed(tokenizer_files())
def test_tokenizer_files(lane: Lane, case: tuple[dict[str, bytes | None], str]) -> None:
    """tokenizer.json, tokenizer_config.json, generation_config.json, special tokens and chat templates."""
    outcome = lane(*case)
    assert outcome.fault is None, outcome.fault


@st.composite
def record_files(draw: st.DrawFn) -> tuple[dict[str, bytes | None], str]:
    lines = [json.loads(line) for line in original("d.jsonl").splitlines()]
    lines += [{"prompt": "the fox", "completion": "jumps", "rid": "p", "weight": 0.5, "split": "val", "category": "c"},
              {"messages": [{"role": "user", "content": [{"type": "text", "text": "the fox"}]},
                            {"role": "assistant", "content": "x", "reasoning_content": "y", "tool_calls": [
                                {"function": {"name": "f", "arguments": {"a": 1}}}]}],
               "tools": [{"type": "function", "function": {"name": "f"}}], "split": "test"}]  # fmt: skip
    own = ("train", "val", "test", "assistant", "user", "system", "tool", "<|im_end|>", "</think>", [5] * 500, 384)
    texts = [json.dumps(row).encode() for row in lines]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        texts[at] = draw(files(lines[at], own))
    raw = draw(st.sampled_from([b"\n", b"\n", b"\r\n", b"\n\n", b"\r"])).join(texts)
    if draw(st.integers(0, 4)) == 0:
        raw = draw(damaged(raw))
    return {"d.jsonl": raw}, draw(COMMANDS)


@fuzzed(record_files())
def test_record_files(lane: Lane, case: tuple[dict[str, bytes | None], str]) -> None:
    """JSONL records of every kind."""
    outcome = lane(*case)
    assert outcome.fault is None, outcome.fault


def toml(doc: dict[str, Any]) -> bytes:
    """TOML of a flat document; a value that TOML writes differently from JSON is left to be refused."""
    words = {Raw("NaN"): "nan", Raw("Infinity"): "inf", Raw("-Infinity"): "-inf", Raw("1e999"): "1e308"}
    lines = []
    for k, v in doc.items():
        text = words[v] if isinstance(v, Raw) and v in words else render(v)
        key = k if k.replace("_", "").replace("-", "").isalnum() and k.isascii() else json.dumps(k)
        lines.append(f"{key} = {text}")
    return "\n".join(lines).encode("utf-8", "surrogatepass")


@st.composite
def settings_files(draw: st.DrawFn) -> tuple[dict[str, bytes | None], str]:
    base = {"student": "@/m", "teacher": "@/m", "data": "@/d.jsonl", "out": "@/out", "train": "layers", "train_from": 0,
            "epochs": 1.0, "lr": 1e-5, "warm": 0.1, "genesis": False, "ce": 0.0, "topk": 8, "window": 32, "batch": 1,
            "accumulate": 1, "packing": "records", "loss_on": "completion", "eval_every": 25, "clip": 1.0,
            "weight_decay": 0.0, "dtype": "f32", "device": "cpu", "deterministic": False, "seed": 0}  # fmt: skip
    own = ("all", "mlp", "layers", "stream", "cuda", "cuda:99", "cuda:-1", "bf16", "@/m", "@/nowhere", "@/d.jsonl", "@",
           1e-9, 1e9, 10**9, 10**6, Raw("nan"), Raw("inf"), Raw("1979-05-27"), Raw("{ x = 1 }"), Raw("[1, 2]"),
           deep(500))  # fmt: skip
    doc = draw(documents(base, own))
    raw = toml(doc)
    if draw(st.integers(0, 4)) == 0:
        raw = draw(damaged(raw))
    return {"c.toml": raw}, "toml"


@fuzzed(settings_files())
def test_settings_files(lane: Lane, case: tuple[dict[str, bytes | None], str]) -> None:
    """TOML files behind --config, on a dry run of heal."""
    outcome = lane(*case)
    assert outcome.fault is None, outcome.fault


def test_the_kinds_reach_what_they_fuzz(lane: Lane) -> None:
    """The lane's own check: an unchanged file of each kind is accepted, and one bad value is refused."""
    for command in ("score", "heal", "fold"):
        assert lane({}, command).status == 0
    assert NASTY and RUN
    line = lane({"d.jsonl": b'{"text": 5}\n'}, "score")
    assert line.status == 2 and line.fault is None and "line 1" in line.err
