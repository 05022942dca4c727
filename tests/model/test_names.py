"""Names: published <-> internal, both ways, with shapes that cover every fused row once."""

from __future__ import annotations

import math

import pytest

from cortiq_kernels.model import names
from cortiq_kernels.model.geometry import Geometry


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_slots_are_exactly_the_published_tensors(model, is_nested, tied):
    m = model(nested=is_nested, tied=tied)
    g = Geometry.from_config(m.config, m.tensors)
    assert {s.published: s.shape for s in names.slots(g)} == {n: tuple(t.shape) for n, t in m.tensors.items()}
    assert names.parameter_count(g) == sum(t.numel() for t in m.tensors.values())


def test_rows_tile_the_fused_matrices_in_the_documented_order(text_config):
    g = Geometry.from_config(text_config)
    shapes = names.internal_shapes(g)
    for internal, slots in names.by_internal(g).items():
        ends = [0] + [s.rows[1] for s in slots]
        assert [s.rows[0] for s in slots] == ends[:-1] and ends[-1] == shapes[internal][0]
        assert sum(math.prod(s.shape) for s in slots) == math.prod(shapes[internal])
    order = [s.published.split("linear_attn.")[1] for s in names.by_internal(g)["layers.0.in_proj"]]
    assert order == ["in_proj_qkv.weight", "in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight"]
    assert [s.published[-13:-7] for s in names.by_internal(g)["layers.1.qkv_proj"]] == ["q_proj", "k_proj", "v_proj"]
    assert shapes["layers.0.in_proj"] == (g.gdn_width, 16) and shapes["layers.1.qkv_proj"] == (g.attn_width, 16)
    assert shapes["layers.0.conv"] == (g.conv_channels, 4) and shapes["layers.2.gate_up"] == (48, 16)


def test_both_ways(text_config):
    g = Geometry.from_config(text_config).with_widths([8, 24, 16])
    back = names.by_published(g)
    for slots in names.by_internal(g).values():
        assert all(back[s.published] == s for s in slots)
    assert back["model.layers.0.mlp.up_proj.weight"].rows == (8, 16)
    assert names.layer_of("layers.12.down") == 12 and names.layer_of("embed") == -1
    assert names.is_vector("layers.0.conv") and names.is_vector("final_norm") and not names.is_vector("layers.0.down")
