"""A shard that was not written by the reference library: its order is kept, and its tensors stay aligned."""

from __future__ import annotations

import json

import torch
from safetensors import safe_open

from cortiq_kernels.model import shard

A, B, C = torch.arange(6).bfloat16(), torch.arange(4).float() / 3, torch.arange(3, dtype=torch.int64)


def unsorted(path):
    """Header order b, c, a with metadata last and loose spacing; data order a (16 bit), b (32 bit), c (64 bit)."""
    entries = {
        "b": {"dtype": "F32", "shape": [4], "data_offsets": [12, 28]},
        "c": {"dtype": "I64", "shape": [3], "data_offsets": [28, 52]},
        "a": {"dtype": "BF16", "shape": [6], "data_offsets": [0, 12]},
        "__metadata__": {"format": "pt", "note": "käse"},
    }
    header = json.dumps(entries, indent=1).encode()
    data = b"".join(t.view(torch.uint8).numpy().tobytes() for t in (A, B, C))
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return shard.read_shard(path)


def copy(s, path, replace, drop=frozenset()):
    header, placed = shard.plan_copy(s, {n: tuple(t.shape) for n, t in replace.items()}, set(drop))
    with open(path, "wb") as f:
        shard.write_copy(f, s, header, placed, replace)
    return shard.read_shard(path)


def test_same_shapes_keep_the_header_to_the_byte(tmp_path):
    s = unsorted(tmp_path / "x.safetensors")
    out = copy(s, tmp_path / "y.safetensors", {"a": A.float() + 1})
    assert out.header == s.header and out.size == s.size and list(out.tensors) == ["b", "c", "a"]
    assert b"".join(shard.raw_blocks(out, "c")) == C.view(torch.uint8).numpy().tobytes()
    assert b"".join(shard.raw_blocks(out, "a")) == (A + 1).view(torch.uint8).numpy().tobytes()


def test_another_shape_keeps_order_metadata_bytes_and_alignment(tmp_path):
    s = unsorted(tmp_path / "x.safetensors")
    out = copy(s, tmp_path / "y.safetensors", {"a": A[:5]})
    assert list(out.tensors) == ["b", "c", "a"] and out.metadata == {"format": "pt", "note": "käse"}
    assert all(t.start % size == 0 for t, size in zip(out.tensors.values(), (4, 8, 2), strict=True))
    assert out.data_start % 8 == 0
    for name, want in (("b", B), ("c", C)):
        assert b"".join(shard.raw_blocks(out, name)) == want.view(torch.uint8).numpy().tobytes()
    with safe_open(out.path, "pt") as f:
        assert torch.equal(f.get_tensor("a"), A[:5]) and torch.equal(f.get_tensor("b"), B)
    less = copy(out, tmp_path / "z.safetensors", {}, drop={"c"})
    assert list(less.tensors) == ["b", "a"] and less.size < out.size


def test_rounding_of_a_float64_value_goes_through_float32(tmp_path):
    s = unsorted(tmp_path / "x.safetensors")
    almost_tie = torch.tensor([1 + 1 / 256 + 2.0**-40], dtype=torch.float64).expand(6)  # a tie once it is float32
    out = copy(s, tmp_path / "y.safetensors", {"a": almost_tie})
    assert shard.read_tensor(out, "a").tolist() == [1.0] * 6


def test_blocks_cover_a_tensor_larger_than_one(tmp_path, monkeypatch):
    monkeypatch.setattr(shard, "_BLOCK", 5)
    s = unsorted(tmp_path / "x.safetensors")
    blocks = list(shard.raw_blocks(s, "a"))
    assert [len(b) for b in blocks] == [5, 5, 2] and b"".join(blocks) == A.view(torch.uint8).numpy().tobytes()
