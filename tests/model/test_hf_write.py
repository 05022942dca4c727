"""Writing directories: what is kept byte for byte, rounding, widths, MTP, tied heads, refusals that leave nothing."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from cortiq_kernels.model import ModelError, create_model, open_model, width_changed_updates, write_model

NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


def header(path: Path) -> dict:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def raw(path: Path, name: str) -> bytes:
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    start, stop = json.loads(data[8 : 8 + n])[name]["data_offsets"]
    return data[8 + n + start : 8 + n + stop]


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def config_of(path: Path) -> dict:
    config = json.loads((path / "config.json").read_text())
    return config.get("text_config", config)


def narrowed(src, widths) -> dict[str, torch.Tensor]:
    """Replacements that cut every MLP to its first rows."""
    out = {}
    for i, w in enumerate(widths):
        p = f"{src.geometry.prefix}layers.{i}.mlp."
        out[p + "gate_proj.weight"] = src.read(p + "gate_proj.weight")[:w]
        out[p + "up_proj.weight"] = src.read(p + "up_proj.weight")[:w]
        out[p + "down_proj.weight"] = src.read(p + "down_proj.weight")[:, :w]  # not contiguous
    return out


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_only_what_is_replaced_changes(model, tmp_path, is_nested, shards):
    m = model(nested=is_nested, extra=True)
    path = m.save(tmp_path / "src", shards, metadata={"format": "pt", "note": "käse"})
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool.jinja").write_text("{{ x }}")
    (path / ".gitattributes").write_text("*.safetensors filter=lfs")
    (path / ".cache").mkdir()
    (path / ".cache" / "x").write_text("x")
    before = contents(path)
    src = open_model(path)
    name = f"{m.prefix}layers.1.self_attn.o_proj.weight"
    new = torch.randn(src.tensors[name].shape)
    written = write_model(src, tmp_path / "dst", replace={name: new}, provenance={"recipe": "heal"})
    assert written.path == tmp_path / "dst" and written.notes == []
    assert contents(path) == before
    after = contents(tmp_path / "dst")
    changed = src.tensors[name].file
    assert after.keys() == before.keys() - {".cache/x"} | {"cortiq.json"}
    assert all(after[f] == before[f] for f in after if f not in (changed, "cortiq.json"))
    assert header(path / changed) == header(tmp_path / "dst" / changed)
    assert list(header(path / changed)) == list(header(tmp_path / "dst" / changed))
    for other in load_file(path / changed):
        if other != name:
            assert raw(path / changed, other) == raw(tmp_path / "dst" / changed, other)
    assert torch.equal(open_model(tmp_path / "dst").read(name), new.bfloat16())
    cortiq = json.loads(after["cortiq.json"])
    assert cortiq["provenance"] == {"recipe": "heal"} and cortiq["intermediate_size"] == [24] * 3


def test_each_tensor_keeps_its_stored_dtype_rounded_to_nearest_even(model, tmp_path):
    m = model()
    m.tensors["model.layers.0.linear_attn.A_log"] = torch.tensor([-3.0017, 0.1, 1.2345678, 2.0])
    m.tensors[NORM] = m.tensors[NORM].half()
    src = open_model(m.save(tmp_path / "src"))
    # halfway cases of bfloat16 (8 bits) and float16 (11 bits), one below, one above, and exact values in float32
    ties = torch.tensor([1 + 1 / 256, 1 + 3 / 256, 1 + 1 / 256 + 2**-20, 1.0, -1 - 1 / 256, 3e-39, 0.0, 1e30] * 2)
    half = torch.tensor([1 + 1 / 2048, 1 + 3 / 2048, 65504.0, -0.0] * 4)
    a_log = torch.tensor([-3.0017, 0.1, 1.2345678, 2.0000002])
    name = "model.layers.0.input_layernorm.weight"
    replace = {name: ties, NORM: half, "model.layers.0.linear_attn.A_log": a_log}
    write_model(src, tmp_path / "dst", replace=replace, provenance={})
    dst = open_model(tmp_path / "dst")
    assert [dst.tensors[n].dtype for n in replace] == ["BF16", "F16", "F32"]
    assert dst.read(name)[:6].tolist() == [1.0, 1 + 4 / 256, 1 + 2 / 256, 1.0, -1.0, ties[5].bfloat16().item()]
    assert dst.read(NORM)[:4].tolist() == [1.0, 1 + 4 / 2048, 65504.0, 0.0]
    assert torch.equal(dst.read("model.layers.0.linear_attn.A_log"), a_log)
    assert torch.equal(dst.read("model.layers.0.linear_attn.dt_bias"), m.tensors["model.layers.0.linear_attn.dt_bias"])


def test_views_of_any_strides(model, tmp_path):
    """Modelled on safetensors/safetensors#469: views of a fused matrix, a transposed one, columns, one number."""
    src = open_model(model().save(tmp_path / "src"))
    fused = torch.randn(48, 16).bfloat16()
    gram = torch.randn(24, 16).bfloat16()
    up, down = GATE.replace("gate", "up"), GATE.replace("gate", "down")
    wide = torch.randn(24, 40).bfloat16()
    write_model(src, tmp_path / "a", replace={GATE: fused[:24], up: fused[24:], down: gram.t()}, provenance={})
    write_model(src, tmp_path / "b", replace={GATE: wide[:, 1:33:2], up: torch.ones(1).expand(24, 16)}, provenance={})
    a, b = open_model(tmp_path / "a"), open_model(tmp_path / "b")
    assert torch.equal(a.read(GATE), fused[:24]) and torch.equal(a.read(up), fused[24:])
    assert torch.equal(a.read(down), gram.t().contiguous())
    assert torch.equal(b.read(GATE), wide[:, 1:33:2].contiguous()) and torch.equal(
        b.read(up).float(), torch.ones(24, 16)
    )


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("declared", [0, 1])
@pytest.mark.parametrize("extra", [False, True])
def test_uniform_narrowing_and_mtp(model, tmp_path, is_nested, declared, extra):
    m = model(nested=is_nested, extra=extra)
    m.text["mtp_num_hidden_layers"] = declared
    src = open_model(m.save(tmp_path / "src", 2))
    change = width_changed_updates(src, [16, 16, 16])
    assert change.drop == {n for n in m.tensors if n.startswith("mtp.")}
    out = write_model(
        src, tmp_path / "dst", replace=narrowed(src, [16] * 3), drop=change.drop,
        config_updates=change.config_updates, provenance={},
    )  # fmt: skip
    assert out.notes == [] and bool(change.notes) == bool(declared or extra)
    dst = open_model(tmp_path / "dst")
    config = config_of(tmp_path / "dst")
    assert config["intermediate_size"] == 16 and not config["mtp_num_hidden_layers"]
    assert dst.geometry.intermediate == (16,) * 3 and not any(n.startswith("mtp.") for n in dst.tensors)
    for n in dst.tensors:
        if ".mlp." not in n:
            assert torch.equal(dst.read(n), src.read(n))
    down = f"{m.prefix}layers.2.mlp.down_proj.weight"
    assert torch.equal(dst.read(down), src.read(down)[:, :16])
    index = json.loads((tmp_path / "dst" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == dst.tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in dst.tensors.values())
    if is_nested:
        root = json.loads((tmp_path / "dst" / "config.json").read_text())
        assert "intermediate_size" not in root and root["vision_config"] == m.config["vision_config"]


def test_declared_mtp_without_tensors_agrees_after_any_write(model, tmp_path):
    m = model(nested=True)
    m.text["mtp_num_hidden_layers"] = 1
    src = open_model(m.save(tmp_path / "src"))
    out = write_model(src, tmp_path / "dst", replace={}, provenance={})
    assert config_of(tmp_path / "dst")["mtp_num_hidden_layers"] == 0 and "MTP" in out.notes[0]
    m = model(nested=True, extra=True)
    m.text["mtp_num_hidden_layers"] = 1
    out = write_model(open_model(m.save(tmp_path / "s2")), tmp_path / "d2", replace={}, provenance={})
    assert config_of(tmp_path / "d2")["mtp_num_hidden_layers"] == 1 and out.notes == []


def test_widths_per_layer_and_history(model, tmp_path):
    src = open_model(model(extra=True).save(tmp_path / "src"))
    widths = [8, 24, 11]  # an odd width: float32 tensors after it must stay aligned
    change = width_changed_updates(src, widths)
    assert any("differ per layer (8 to 24)" in n for n in change.notes)
    write_model(
        src, tmp_path / "dst", replace=narrowed(src, widths), drop=change.drop, config_updates=change.config_updates,
        provenance={"recipe": "fold", "where": tmp_path},
    )  # fmt: skip
    dst = open_model(tmp_path / "dst")
    assert dst.geometry.intermediate == tuple(widths) and config_of(tmp_path / "dst")["intermediate_size"] == 24
    with safe_open(tmp_path / "dst" / "model.safetensors", "pt") as f:
        assert all(torch.equal(f.get_tensor(n), dst.read(n)) for n in f.keys())  # noqa: SIM118
    write_model(dst, tmp_path / "again", replace={}, provenance={"recipe": "heal"})
    cortiq = json.loads((tmp_path / "again" / "cortiq.json").read_text())
    assert cortiq["provenance"] == {"recipe": "heal"} and cortiq["intermediate_size"] == widths
    assert cortiq["history"] == [{"recipe": "fold", "where": str(tmp_path)}]
    assert open_model(tmp_path / "again").geometry == dst.geometry
    assert width_changed_updates(dst, widths) == (set(), {}, [])


def test_a_shard_that_loses_all_tensors_goes(model, tmp_path):
    m = model()
    m.tensors = {"mtp.a": torch.zeros(2)} | m.tensors  # the first of n shards for n tensors
    src = open_model(m.save(tmp_path / "src", len(m.tensors)))
    write_model(src, tmp_path / "dst", replace={}, drop={"mtp.a"}, provenance={})
    dst = open_model(tmp_path / "dst")
    assert src.tensors["mtp.a"].file not in dst.shards and len(dst.shards) == len(src.shards) - 1


def test_tied_model_that_ships_its_head(model, tmp_path):
    m = model(tied=True)
    m.tensors["lm_head.weight"] = m.tensors[EMBED].clone()
    src = open_model(m.save(tmp_path / "src", 2))
    new = torch.randn(40, 16)
    out = write_model(src, tmp_path / "dst", replace={EMBED: new}, provenance={})
    dst = open_model(tmp_path / "dst")
    assert torch.equal(dst.read(EMBED), new.bfloat16()) and torch.equal(dst.read("lm_head.weight"), new.bfloat16())
    assert "tied" in out.notes[0]
    write_model(src, tmp_path / "less", replace={EMBED: new}, drop={"lm_head.weight"}, provenance={})
    assert "lm_head.weight" not in open_model(tmp_path / "less").tensors
    with pytest.raises(ModelError, match="lm_head.weight of a tied model alone"):
        write_model(src, tmp_path / "no", replace={"lm_head.weight": new}, provenance={})


def test_other_weights_are_left_out_and_said(model, tmp_path):
    path = model().save(tmp_path / "src")
    for name in ("pytorch_model.bin", "old-00001-of-00002.safetensors", "model.gguf"):
        (path / name).write_text("stale")
    out = write_model(open_model(path), tmp_path / "dst", replace={}, provenance={})
    stale = "model.gguf, old-00001-of-00002.safetensors, pytorch_model.bin"
    assert out.notes == [f"not copied (weights that the model does not use): {stale}"]
    assert not {"pytorch_model.bin", "model.gguf"} & {p.name for p in (tmp_path / "dst").iterdir()}


def test_cache_symlinks_become_files_with_ordinary_modes(model, tmp_path):
    blobs = model().save(tmp_path / "blobs")
    for f in blobs.iterdir():
        f.chmod(0o600)
    snap = tmp_path / "snap"
    snap.mkdir()
    for f in blobs.iterdir():
        (snap / f.name).symlink_to(f)
    before = contents(blobs)
    old = os.umask(0o022)
    try:
        write_model(open_model(snap), tmp_path / "out" / "dst", replace={NORM: torch.ones(16)}, provenance={})
    finally:
        os.umask(old)
    files = list((tmp_path / "out" / "dst").iterdir())
    assert {f.name for f in files} == before.keys() | {"cortiq.json"}
    assert all(not f.is_symlink() and stat.S_IMODE(f.stat().st_mode) == 0o644 for f in files)
    assert stat.S_IMODE((tmp_path / "out" / "dst").stat().st_mode) == 0o755
    assert contents(blobs) == before and all(p.is_symlink() for p in snap.iterdir())


def refused(src, dst: Path, match: str, **kw) -> None:
    """write_model raises, and nothing appears beside or under dst."""
    before = sorted(map(str, dst.parent.rglob("*")))
    kw.setdefault("replace", {})
    with pytest.raises(ModelError, match=match):
        write_model(src, dst, provenance={}, **kw)
    assert sorted(map(str, dst.parent.rglob("*"))) == before


def test_refusals_leave_nothing(model, tmp_path):
    src = open_model(model(extra=True).save(tmp_path / "in" / "src"))
    dst = tmp_path / "out" / "dst"
    dst.parent.mkdir()
    good = torch.zeros(16)
    refused(src, dst, "replace: got .'model.nrm.weight'", replace={"model.nrm.weight": good})
    refused(src, dst, "drop: got .'mtp.no'", drop={"mtp.no"})
    refused(src, dst, "also replaced", replace={NORM: good}, drop={NORM})
    refused(src, dst, "without model.norm.weight", drop={NORM})
    refused(src, dst, r"model.norm.weight of shape \[8\]; expected \[16\]", replace={NORM: torch.zeros(8)})
    refused(src, dst, "floating-point", replace={NORM: torch.zeros(16, dtype=torch.int32)})
    refused(src, dst, "width_changed_updates", replace=narrowed(src, [16] * 3))
    part = narrowed(src, [16] * 3)
    change = width_changed_updates(src, [16] * 3)
    refused(src, dst, "mtp.. tensors kept", replace=part, config_updates=change.config_updates)
    del part["model.layers.2.mlp.down_proj.weight"]
    refused(
        src, dst, r"layers.2.mlp.down_proj.weight of shape \[16, 24\]; expected \[16, 16\]", replace=part,
        drop=change.drop, config_updates=change.config_updates,
    )  # fmt: skip
    for bad in (float("nan"), float("inf"), 1e39):
        values = good.double().clone()
        values[5] = bad
        refused(src, dst, "model.norm.weight: got values that are not finite", replace={NORM: values})
    refused(src, dst, "hidden_act", config_updates={"hidden_act": "gelu"})
    write_model(src, dst, replace={NORM: good}, provenance={})  # and the same place still works


def test_float16_overflow_is_refused(model, tmp_path):
    m = model()
    m.tensors[NORM] = m.tensors[NORM].half()
    refused(open_model(m.save(tmp_path / "src")), tmp_path / "dst", "float16", replace={NORM: torch.full((16,), 7e4)})


def test_broken_link_in_the_source(model, tmp_path):
    path = model().save(tmp_path / "src")
    (path / "merges.txt").symlink_to(tmp_path / "gone")
    refused(open_model(path), tmp_path / "dst", "merges.txt: got a symlink to a missing file")


@pytest.mark.parametrize("shard_bytes", [None, 4000])
@pytest.mark.parametrize("is_nested", [False, True])
def test_create_model(model, tmp_path, shard_bytes, is_nested):
    m = model(nested=is_nested, extra=False)
    tok = model().save(tmp_path / "tok")
    out = create_model(tmp_path / "new", m.config, m.tensors, tok, shard_bytes=shard_bytes)
    d = open_model(out.path)
    assert d.config == m.config and (d.index is None) == (shard_bytes is None)
    assert all(torch.equal(d.read(n), t) and d.read(n).dtype == t.dtype for n, t in m.tensors.items())
    assert (out.path / "tokenizer.json").read_text() == "{}" and d.cortiq == {}
    assert stat.S_IMODE((out.path / "config.json").stat().st_mode) & 0o400


def test_create_model_widths_and_refusals(model, tmp_path):
    m = model(tied=True)
    for n in list(m.tensors):
        if ".layers.1.mlp." in n:
            m.tensors[n] = m.tensors[n][:, :9] if "down" in n else m.tensors[n][:9]
    create_model(tmp_path / "new", m.config, m.tensors)
    assert open_model(tmp_path / "new").geometry.intermediate == (24, 9, 24)
    head = {"lm_head.weight": torch.zeros(40, 16)}
    before = sorted(tmp_path.iterdir())
    for tensors, match in ((m.tensors | head, "tied"), ({EMBED: m.tensors[EMBED]}, "layer 0 .* without")):
        with pytest.raises(ModelError, match=match):
            create_model(tmp_path / "no", m.config, tensors)
    with pytest.raises(ModelError, match="existing directory"):
        create_model(tmp_path / "new", m.config, m.tensors)
    with pytest.raises(ModelError, match="expected a tokenizer"):
        create_model(tmp_path / "no", m.config, m.tensors, tmp_path)
    assert sorted(tmp_path.iterdir()) == before
