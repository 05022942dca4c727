"""config.json, cortiq.json, the index and the headers of safetensors files, as anybody may have damaged them."""

from __future__ import annotations

import functools
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

from directories import nested
from fuzz_lane import CONFIG, Lane, build_world, fuzzed
from fuzz_mutations import damaged, files, render
from hypothesis import strategies as st

SHARD = "m/model-00001-of-00002.safetensors"
NAMES = (
    "qwen3_5", "qwen3_5_moe", "llama", "linear_attention", "full_attention", "sliding_attention", "yarn", "silu",
    "gelu", [24, 24], [24, 25], {"rope_theta": 1e4}, {"rope_type": "yarn"}, {"text_config": {}}, 0, 16, 24, 384,
)  # fmt: skip


@functools.cache
def original(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return (build_world(Path(folder)) / name).read_bytes()


def configs() -> st.SearchStrategy[bytes]:
    extra = {"mtp_num_hidden_layers": 1, "num_loops": 1, "quantization_config": None, "attention_bias": False}
    return st.one_of(files(CONFIG, NAMES), files(CONFIG | extra, NAMES), files(nested(CONFIG, {})[0], NAMES))


def cortiqs() -> st.SearchStrategy[bytes]:
    return files({"format": 1, "intermediate_size": [24, 24], "provenance": {"a": 1}, "history": [{"b": 2}]}, NAMES)


@st.composite
def model_files(draw: st.DrawFn) -> tuple[dict[str, bytes], str]:
    name = draw(st.sampled_from(["config.json"] * 4 + ["cortiq.json"]))
    raw = draw(configs() if name == "config.json" else cortiqs())
    return {f"m/{name}": raw}, draw(st.sampled_from(["score", "heal", "fold"]))


@fuzzed(model_files())
def test_config_files(lane: Lane, case: tuple[dict[str, bytes], str]) -> None:
    """config.json (flat and nested) and cortiq.json."""
    outcome = lane(*case)
    assert outcome.fault is None, outcome.fault


def header_of(raw: bytes) -> tuple[dict[str, Any], bytes]:
    n = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + n]), raw[8 + n :]


@st.composite
def shards(draw: st.DrawFn) -> bytes:
    raw = original(SHARD)
    header, data = header_of(raw)
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged(raw))
    own = ("F32", "BF16", "F4", "I64", [16, 16], [0], [0, 10**30], [-1, -16], [0, 4], [4, 0], [10**9, 10**9])
    text = draw(files(header, own))
    length = draw(st.sampled_from([len(text)] * 8 + [0, 1, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1]))
    cut = draw(st.sampled_from([0] * 8 + [1, 4, 100, len(data)]))
    return struct.pack("<Q", length) + text + data[: len(data) - cut]


@st.composite
def weight_files(draw: st.DrawFn) -> tuple[dict[str, bytes | None], str]:
    changed: dict[str, bytes | None] = {}
    if draw(st.booleans()):
        changed[SHARD] = draw(shards())
    else:
        index = json.loads(original("m/model.safetensors.index.json"))
        places = ("m", "", ".", "..", "config.json", "/etc/passwd", "a/b.safetensors", "x\x00.safetensors",
                  "y" * 300 + ".safetensors", Path(SHARD).name)  # fmt: skip
        changed["m/model.safetensors.index.json"] = draw(files(index, places))
    return changed, draw(st.sampled_from(["score", "heal", "fold"]))


@fuzzed(weight_files())
def test_weight_files(lane: Lane, case: tuple[dict[str, bytes | None], str]) -> None:
    """Headers of safetensors files, their lengths, and index files."""
    outcome = lane(*case)
    assert outcome.fault is None, outcome.fault


def test_the_unchanged_world_is_accepted(lane: Lane) -> None:
    """The lane's own check: nothing is wrong with what the cases change."""
    for command in ("score", "heal", "fold"):
        outcome = lane({"m/config.json": render(CONFIG).encode()}, command)
        assert outcome.status == 0 and outcome.fault is None, outcome
