"""Which neurons hard masks leave, the narrower weights, and the way back."""

from __future__ import annotations

import pytest
import torch
from ops_close import bits
from tiny import geometry

from cortiq_kernels.model.compact import carried, compact
from cortiq_kernels.model.weights import Weights

F = 48


def gates(*open_: int, f: int = F, dtype=torch.bool) -> torch.Tensor:
    mask = torch.zeros(f, dtype=dtype)
    mask[list(open_)] = 1
    return mask


def test_carried_neurons():
    g = geometry("LLF")
    some = carried(g, {0: gates(3, 7, 40), 2: gates()}, align=1)
    assert [k.tolist() for k in some] == [[3, 7, 40], list(range(F)), [0]]  # a layer has a neuron, if a closed one
    padded = carried(g, {0: gates(3, 7, 40, dtype=torch.float64)}, align=8)
    assert padded[0].tolist() == [0, 1, 2, 3, 4, 5, 7, 40]
    full = carried(g, {0: gates(*range(1, 48)), 1: gates(5)}, align=64)
    assert len(full[0]) == len(full[1]) == F  # at most F, a multiple or not
    assert all(k.dtype == torch.int64 for k in (*some, *padded))


def test_a_looped_layer_carries_what_any_visit_opens():
    g = geometry("LF", num_loops=2)
    masks = {0: gates(1, 2), 2: gates(2, 9), 1: gates(4)}  # layer 1's second visit is open
    keep = carried(g, masks, align=1)
    assert keep[0].tolist() == [1, 2, 9] and len(keep[1]) == F
    c = compact(Weights.random(g, dtype=torch.float32), masks, align=1)
    assert {i: m.tolist() for i, m in c.masks.items()} == {0: [1, 1, 0], 2: [0, 1, 1], 1: masks[1].tolist()}
    assert all(m.dtype == torch.float32 for m in c.masks.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("train", [None, "all"])
def test_values_are_gathered_exactly(dtype, train):
    g = geometry("LF")
    w = Weights.random(g, dtype=dtype, train=train, vector_noise=0.1)
    c = compact(w, {0: gates(3, 7, 40)}, align=2, train="mlp", train_from=1)
    keep = [0, 3, 7, 40]
    assert c.weights.geometry.intermediate == (4, F) and c.weights.dtype == dtype
    assert c.masks[0].tolist() == [0, 1, 1, 1] and set(c.masks) == {0}
    assert bits(c.weights["layers.0.gate_up"]) == bits(w["layers.0.gate_up"][keep + [k + F for k in keep]])
    assert bits(c.weights["layers.0.down"]) == bits(w["layers.0.down"][:, keep])
    for name in c.weights.names:
        if not name.startswith("layers.0.") or name.endswith("norm"):
            assert bits(c.weights[name]) == bits(w[name]), name
    assert c.weights.trained is not None and c.weights.trained.names == ["layers.1.gate_up", "layers.1.down"]
    if train == "all":  # masters too, which hold more than the working dtype
        assert bits(c.weights.trained.master_view("layers.1.down")) == bits(w.trained.master_view("layers.1.down"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_written_back_in_their_places(dtype, rng):
    g = geometry("LF")
    w = Weights.random(g, dtype=dtype, train="layers")
    c = compact(w, {0: gates(3, 7), 1: gates(0, 47)}, align=1, train="layers")
    t = c.weights.trained
    for flat in (t.master, t.grad, t.m, t.v):
        flat.copy_(torch.randn(flat.shape, generator=rng, dtype=torch.float64))
    t.refresh_plane()
    for flat in (w.trained.grad, w.trained.m, w.trained.v):
        flat.fill_(float("nan"))  # of another step: none of it may stay
    before = {name: w[name].clone() for name in w.names}
    masters = {name: w.trained.master_view(name).clone() for name in w.trained.names}
    c.write_back(w)
    for layer, keep in enumerate(([3, 7], [0, 47])):
        up, down = f"layers.{layer}.gate_up", f"layers.{layer}.down"
        rows, gone = keep + [k + F for k in keep], [j for j in range(F) if j not in keep]
        gone_rows = gone + [j + F for j in gone]
        assert bits(w[up][rows], w[down][:, keep]) == bits(c.weights[up], c.weights[down])
        assert bits(w[up][gone_rows], w[down][:, gone]) == bits(before[up][gone_rows], before[down][:, gone])
        assert bits(w.trained.master_view(up)[gone_rows]) == bits(masters[up][gone_rows])
        assert bits(w.trained.master_view(up)[rows]) == bits(t.master_view(up))
        for mine, theirs in ((t.grad, w.trained.grad), (t.m, w.trained.m), (t.v, w.trained.v)):
            for name, kept, dim in ((up, rows, 0), (down, keep, 1)):
                span, narrow = w.trained.spans[name], t.spans[name]
                dense = theirs[span.start : span.stop].view(span.shape)
                assert bits(dense.index_select(dim, torch.tensor(kept))) == bits(
                    mine[narrow.start : narrow.stop].view(narrow.shape)
                )
                rest = torch.tensor(gone_rows if dim == 0 else gone)
                assert (dense.index_select(dim, rest) == 0).all()
    name = "layers.0.in_proj"
    assert bits(w[name], w.grad(name)) == bits(c.weights[name], c.weights.grad(name))


def test_written_back_into_weights_that_do_not_train(rng):
    w = Weights.random(geometry("LF"), dtype=torch.bfloat16)
    c = compact(w, {1: gates(5, 6)}, align=1, train="mlp", train_from=1)
    other = w["layers.0.down"].clone()
    c.weights.trained.master.normal_(generator=rng)
    c.weights.trained.refresh_plane()
    c.write_back(w)
    assert bits(w["layers.1.down"][:, [5, 6]]) == bits(c.weights["layers.1.down"])
    assert bits(w["layers.0.down"]) == bits(other)


def test_nothing_is_lost_on_the_way_there_and_back():
    w = Weights.random(geometry("LF"), dtype=torch.bfloat16, train="all")
    w.trained.master.add_(1e-4 * torch.rand(w.trained.master.shape))
    w.trained.refresh_plane()
    before = bits(w.trained.master, w.plane)
    compact(w, {0: gates(1, 5)}, align=4, train="all").write_back(w)
    assert bits(w.trained.master, w.plane) == before


def test_later_layers_alone():
    w = Weights.random(geometry("LLF"), first_layer=1, train="mlp", train_from=1)
    c = compact(w, {2: gates(1, 2)}, align=1, train="mlp", train_from=1)
    assert c.weights.first_layer == 1 and c.weights["layers.2.down"].shape == (32, 2)
    c.write_back(w)


def test_the_narrow_model_is_exported_by_its_widths():
    c = compact(Weights.random(geometry("LF")), {0: gates(1, 2), 1: gates(3)}, align=1)
    shapes = {k: tuple(v.shape) for k, v in c.weights.export(c.weights.names).items() if ".mlp." in k}
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (2, 32)
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (32, 1)


def test_errors():
    g = geometry("LF")
    w = Weights.random(g)
    for masks, message in (
        ({2: gates(1)}, "masks: got layer 2; expected 0 to 1"),
        ({0: gates(1, f=47)}, r"masks: layer 0: got \(47,\); expected \[48\]"),
        ({0: torch.full((F,), 0.5)}, "masks: layer 0: got gates besides 0 and 1"),
        ({0: torch.full((F,), float("nan"))}, "masks: layer 0: got gates besides 0 and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            compact(w, masks)
    with pytest.raises(ValueError, match="align: got 0"):
        carried(g, {}, align=0)
    c = compact(w, {0: gates(1)}, train="mlp")
    with pytest.raises(ValueError, match="write_back: got another model"):
        c.write_back(Weights.random(geometry("LF", hidden=16)))
    with pytest.raises(ValueError, match="write_back: got weights without layers.0.gate_up"):
        c.write_back(Weights.random(g, first_layer=1))
    with pytest.raises(ValueError, match="write_back: got weights that do not train"):
        compact(w, {}).write_back(w)
