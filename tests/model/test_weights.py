"""Weights: the flat stores, their aliasing, alignment, ranges, export and snapshots."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny import plain_config

from cortiq_kernels.model import ModelError, Weights, names, open_model, plan_layout, write_model
from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.layout import ALIGN

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MODES = (None, "layers", "mlp", "all")


@pytest.fixture
def opened(model, tmp_path):
    def make(**kw):
        return open_model(model(**kw).save(tmp_path / f"m{len(list(tmp_path.iterdir()))}"))

    return make


def acc(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def stored(src, internal: str) -> torch.Tensor:
    """The internal tensor put together by hand from the file."""
    parts = [src.read(s.published) for s in names.by_internal(src.geometry)[internal]]
    whole = torch.cat(parts)
    return whole.squeeze(1) if internal.endswith(".conv") else whole


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("train", MODES)
def test_values_dtypes_and_masters(opened, dtype, train):
    src = opened()
    w = Weights.load(src, dtype=dtype, train=train)
    assert w.names == list(names.internal_shapes(src.geometry))
    for name in w.names:
        want = stored(src, name)
        kind = acc(dtype) if names.is_vector(name) else dtype
        assert w[name].dtype == kind and torch.equal(w[name], want.to(kind)), name
        if w.trains(name):
            assert torch.equal(w.trained.master_view(name), want.to(acc(dtype)))
            assert w.trained.grad_view(name).shape == want.shape
    assert torch.equal(w["layers.0.A_log"].float(), src.read("model.layers.0.linear_attn.A_log"))
    assert w["layers.0.gate_up"].is_contiguous() and (w.trained is None) == (train is None)


@pytest.mark.parametrize("train,train_from,want", [
    ("layers", 1, lambda n: names.layer_of(n) >= 1),
    ("mlp", 2, lambda n: names.layer_of(n) == 2 and n.endswith(("gate_up", "down"))),
    ("all", 0, lambda n: True),
])  # fmt: skip
def test_what_trains_and_in_which_order(opened, train, train_from, want):
    w = Weights.load(opened(), train=train, train_from=train_from)
    assert set(w.trained.names) == {n for n in w.names if want(n)}
    place = {"embed": 90, "head": 91, "final_norm": 90}
    order = sorted(w.trained.names, key=lambda n: (names.is_vector(n), place.get(n, names.layer_of(n))))
    assert order == w.trained.names


@pytest.mark.parametrize("dtype,train,tied,world", itertools.product(DTYPES, MODES, (False, True), (1, 3)))
def test_stores_are_aligned_padded_and_disjoint(text_config, dtype, train, tied, world):
    text_config["tie_word_embeddings"] = tied
    g = Geometry.from_config(text_config).with_widths([5, 24, 7])
    w = Weights(g, dtype=dtype, train=train, world=world)
    unit = ALIGN * world
    lay = w.layout
    assert all(n % unit == 0 for n in (lay.frozen_numel, lay.matrix_numel, lay.vector_numel, lay.frozen_vector_numel))
    assert w.plane.numel() == lay.plane_numel and w.plane.numel() % unit == 0
    for i, name in enumerate(w.names):
        w[name].fill_(i + 1)
    for i, name in enumerate(w.names):  # nobody overwrote anybody
        assert bool((w[name] == i + 1).all())
        assert w[name].storage_offset() % ALIGN == 0 or w[name].untyped_storage().data_ptr() != w.plane.data_ptr()
    held = sum(w[n].numel() for n in w.names)
    stores = [w.plane, w.vectors] + ([w.trained.master[lay.matrix_numel :]] if train else [])
    assert sum(int((s != 0).sum()) for s in stores) == held
    tensors = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [w.plane, w.vectors] + (
        [w.trained.master, w.trained.grad, w.trained.m, w.trained.v] if train else [])}  # fmt: skip
    assert sum(tensors.values()) == lay.nbytes(dtype.itemsize)
    if tied:
        assert w["head"] is w["embed"] and "head" not in w.names


@pytest.mark.parametrize("dtype", DTYPES)
def test_master_and_plane_mirror(opened, dtype):
    w = Weights.load(opened(), dtype=dtype, train="layers", train_from=1)
    t = w.trained
    assert t.matrix_numel == w.layout.matrix_numel and t.master.dtype == acc(dtype)
    if dtype in (torch.float32, torch.float64):
        assert t.plane is None
        t.master_view("layers.1.down").fill_(3)
        assert bool((w["layers.1.down"] == 3).all())
        assert w["layers.1.down"].data_ptr() == t.master_view("layers.1.down").data_ptr()
    else:
        assert t.plane.data_ptr() == w.plane[w.layout.frozen_numel :].data_ptr()
        t.master.add_(0.001)
        t.refresh_plane()
        assert torch.equal(t.plane, t.master[: t.matrix_numel].to(dtype))
        assert torch.equal(w["layers.1.down"], t.master_view("layers.1.down").to(dtype))
    t.master_view("layers.1.input_norm").fill_(5)
    assert bool((w["layers.1.input_norm"] == 5).all())


@pytest.mark.parametrize("train", ["layers", "mlp", "all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ranges_cover_each_layer_once(opened, train, dtype):
    w = Weights.load(opened(), dtype=dtype, train=train)
    for from_layer in range(4):
        mark = torch.full((w.trained.master.numel(),), -2)
        for r in w.ranges(from_layer):
            assert bool((mark[r.start : r.stop] == -2).all()) and r.start % ALIGN == 0 and r.stop % ALIGN == 0
            mark[r.start : r.stop] = r.layer
            matrices = r.stop <= w.trained.matrix_numel
            assert r.plane_start == (r.start if matrices and dtype == torch.bfloat16 else None)
        for name, span in w.trained.spans.items():
            layer = names.layer_of(name)
            out = 0 <= layer < from_layer or (name == "embed" and from_layer > 0)
            assert bool((mark[span.start : span.stop] == (-2 if out else layer)).all()), name
    ranges = w.ranges(0)
    assert [r.layer for r in ranges if r.start < w.trained.matrix_numel][:3] == [0, 1, 2]
    assert len(ranges) == {"layers": 6, "mlp": 3, "all": 9}[train]
    assert Weights.load(opened()).ranges() == []


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_export_after_an_update_is_the_rounded_master(opened, tmp_path, is_nested, dtype):
    src = opened(nested=is_nested, extra=True)
    w = Weights.load(src, dtype=dtype, train="all")
    gen = torch.Generator().manual_seed(1)
    w.trained.master.add_(torch.randn(w.trained.master.shape, generator=gen), alpha=0.01)
    w.trained.refresh_plane()
    out = w.export()
    assert out.keys() == {s.published for s in names.slots(src.geometry)}
    assert all(t.dtype == acc(dtype) and t.shape == src.tensors[n].shape for n, t in out.items())
    write_model(src, tmp_path / "dst", replace=out, provenance={})
    dst = open_model(tmp_path / "dst")
    for name, t in dst.tensors.items():
        want = out[name].float().to(t.torch_dtype) if name in out else src.read(name)
        assert torch.equal(dst.read(name), want), name
    again = Weights.load(dst, dtype=dtype, train="all")
    if dtype == torch.bfloat16:
        assert torch.equal(again["layers.0.in_proj"], w["layers.0.in_proj"])


def test_round_trip_without_an_update_changes_no_byte(opened, tmp_path):
    src = opened(extra=True)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        w = Weights.load(src, dtype=dtype, train="all")
        write_model(src, tmp_path / str(dtype), replace=w.export(), provenance={})
        same = (tmp_path / str(dtype) / "model.safetensors").read_bytes()
        assert same == (src.path / "model.safetensors").read_bytes()


def test_float32_files_are_exact_in_the_master_of_a_bfloat16_run(model, tmp_path):
    m = model()
    m.tensors = {n: t.float() * 1.0001 for n, t in m.tensors.items()}
    src = open_model(m.save(tmp_path / "src"))
    w = Weights.load(src, dtype=torch.bfloat16, train="all")
    write_model(src, tmp_path / "dst", replace=w.export(), provenance={})
    assert (tmp_path / "dst" / "model.safetensors").read_bytes() == (src.path / "model.safetensors").read_bytes()


def test_export_of_chosen_and_frozen_names(opened):
    src = opened(tied=True)
    w = Weights.load(src, train="mlp", train_from=2)
    assert len(w.export()) == 3
    out = w.export(["layers.0.in_proj", "layers.0.conv", "head", "layers.2.down"])
    assert [t.dtype for t in out.values()] == [torch.bfloat16] * 4 + [torch.float32, torch.bfloat16, torch.float32]
    assert all(torch.equal(t.to(src.read(n).dtype), src.read(n)) for n, t in out.items())
    assert Weights.load(src).export() == {}


def test_a_tail_holds_its_layers_and_the_head(opened):
    w = Weights.load(opened(), train="layers", train_from=2, first_layer=1)
    assert {names.layer_of(n) for n in w.names} == {1, 2, -1} and "embed" not in w and "head" in w
    with pytest.raises(KeyError, match="layers.0.down.*layers from 1"):
        w["layers.0.down"]
    full = Weights.load(opened())
    assert all(torch.equal(w[n], full[n]) for n in w.names)
    tied = Weights.load(opened(tied=True), first_layer=2)
    assert tied["head"] is tied["embed"]


def test_snapshots(opened):
    w = Weights.load(opened(), train="all")
    best = w.state()
    before = {n: w[n].clone() for n in w.names}
    assert best.device.type == "cpu" and best.data_ptr() != w.trained.master.data_ptr()
    w.trained.master.mul_(3)
    w.trained.refresh_plane()
    kept = w.state(torch.empty_like(best))
    w.load_state(best)
    assert all(torch.equal(w[n], before[n]) for n in w.names) and torch.equal(kept, 3 * best)
    with pytest.raises(ValueError, match="expected"):
        w.load_state(best[:-1])
    with pytest.raises(ValueError, match="do not train"):
        Weights.load(opened()).state()


def test_random_is_the_same_however_it_is_held(text_config):
    g = Geometry.from_config(text_config)
    a = Weights.random(g, seed=3, dtype=torch.float32)
    for kw in ({"dtype": torch.float64}, {"train": "all", "world": 2}, {"first_layer": 2}, {"train": "mlp"}):
        b = Weights.random(g, seed=3, **{"dtype": torch.float32, **kw})
        assert all(torch.equal(a[n].to(b[n].dtype), b[n]) for n in b.names)
    c = Weights.random(g, seed=3, dtype=torch.bfloat16, train="layers")
    assert all(torch.equal(c.trained.master_view(n), a[n]) for n in c.trained.names)
    assert not torch.equal(Weights.random(g, seed=4, dtype=torch.float32)["embed"], a["embed"])
    assert bool((a["layers.0.gdn_norm"] == 1).all()) and bool((a["final_norm"] == 0).all())
    assert bool((a["layers.0.dt_bias"] == 1).all()) and bool((a["layers.0.A_log"].exp() <= 16).all())
    assert 0.015 < a["embed"].std() < 0.025 and bool((a["layers.0.conv"].abs() <= 0.5).all())
    noisy = Weights.random(g, seed=3, dtype=torch.float32, vector_noise=0.1)
    assert torch.equal(noisy["embed"], a["embed"]) and 0 < noisy["final_norm"].abs().max() < 1


def test_assign_reaches_plane_and_master(text_config):
    w = Weights(Geometry.from_config(text_config), dtype=torch.bfloat16, train="layers")
    w.assign("layers.0.gate_up", torch.full((24, 16), 1.003), rows=(24, 48))
    assert w["layers.0.gate_up"][24:].float().unique().tolist() == [1.0]
    assert w.trained.master_view("layers.0.gate_up")[24:].unique().tolist() == [torch.tensor(1.003).item()]
    assert not w["layers.0.gate_up"][:24].any()


def test_random_plain_models_begin_as_the_identity_of_their_norms():
    g = Geometry.from_config(plain_config("qwen3"))
    w = Weights.random(g, dtype=torch.float32)
    norms = [n for n in w.names if n.endswith("_norm")]
    assert len(norms) == 4 * 2 + 1 and all(torch.equal(w[n], torch.ones_like(w[n])) for n in norms)
    w = Weights.random(Geometry.from_config(plain_config("qwen2")), dtype=torch.float32)
    assert not w["layers.1.qkv_bias"].any() and w["layers.1.qkv_bias"].shape == (4 * 8 + 2 * 2 * 8,)
    assert "layers.1.q_norm" not in w


@pytest.mark.parametrize("train", [None, "layers"])
def test_values_that_do_not_fit_are_named(model, tmp_path, train):
    name = "model.layers.1.mlp.down_proj.weight"
    m = model()
    m.tensors[name][2, 2] = 1e5
    src = open_model(m.save(tmp_path / "big"))
    Weights.load(src, dtype=torch.bfloat16, train=train)
    with pytest.raises(ModelError, match=f"{name}: got values beyond the range of torch.float16"):
        Weights.load(src, dtype=torch.float16, train=train)
    for i, bad in enumerate((float("nan"), float("-inf"))):
        m.tensors[name][2, 2] = bad
        with pytest.raises(ModelError, match=f"{name}: got values not finite"):
            Weights.load(open_model(m.save(tmp_path / f"bad{i}")), train=train)


@pytest.mark.parametrize(
    "kw,match",
    [
        ({"train": "some"}, "train: got 'some'"),
        ({"train": "layers", "train_from": 3}, "expected 0 to 2"),
        ({"first_layer": -1}, "expected 0 to 2"),
        ({"train": "layers", "train_from": 0, "first_layer": 1}, "at least first_layer 1"),
        ({"train": "all", "train_from": 1}, "'all'; expected 0"),
        ({"world": 0}, "world: got 0"),
    ],
)
def test_layouts_that_make_no_sense(text_config, kw, match):
    with pytest.raises(ValueError, match=match):
        plan_layout(Geometry.from_config(text_config), **kw)
    with pytest.raises(ValueError, match="dtype: got torch.int8"):
        Weights(Geometry.from_config(text_config), dtype=torch.int8)
