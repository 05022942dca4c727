"""The SwiGLU kernels under Triton's interpreter, held against float64 as the op's own tests hold the torch path."""

from __future__ import annotations

import contextlib

import pytest
import torch
from interpreter import addresses_checked, unfit
from ops_close import bits, nan, not_worse, same

from cortiq_kernels.ops import configs
from cortiq_kernels.ops.swiglu import swiglu_mlp_bwd, swiglu_mlp_fwd, swiglu_ref

pytestmark = [pytest.mark.interpret, pytest.mark.skipif(bool(unfit()), reason=unfit())]
F32, F16, F64 = torch.float32, torch.float16, torch.float64
NAMES = ("act", "sum_abs", "sum_square", "dgate_up", "again", "dmask", "mask_dmask")


@pytest.fixture(autouse=True)
def small_tiles():
    """Three tiles a program and several programs a strip, at sizes that the interpreter can do."""
    tiles = {
        "fwd": dict(ROWS=4, COLS=16, STEPS=1),
        "fwd_sums": dict(ROWS=4, COLS=16, STEPS=3),
        "bwd": dict(ROWS=2, COLS=16, STEPS=4),
        "sum": dict(ROWS=4, COLS=16),
    }
    with contextlib.ExitStack() as stack:
        for size in (16, 32):
            for kernel, config in tiles.items():
                stack.enter_context(configs.trying("swiglu", size, kernel, {**config, "num_warps": 1, "num_stages": 1}))
        yield


def make(n, f, dtype, rng):
    gate_up = (2 * torch.randn(n, 2 * f, generator=rng)).to(dtype)
    return gate_up, torch.randn(n, f, generator=rng).to(dtype), torch.rand(f, generator=rng)


def run(gate_up, dact, mask, counted=None, backend="triton", start=None, wide=0):
    """Everything the two passes give, by name. `start`: what the sums begin with, and are added to; `wide`: outputs
    are columns of matrices that much wider."""
    n, f = dact.shape
    dtype, acc = gate_up.dtype, torch.float64 if gate_up.dtype == F64 else F32
    again = start is not None
    sums = {k: torch.full((f,), start if again else float("nan"), dtype=acc) for k in NAMES if "_" in k or k == "dmask"}
    del sums["dgate_up"]
    act, back = (nan(n, f + wide, dtype=dtype)[:, wide // 2 : wide // 2 + f] for _ in range(2))
    dgate_up = nan(n, 2 * f + wide, dtype=dtype)[:, wide // 2 : wide // 2 + 2 * f]
    common = dict(accumulate=again, backend=backend)
    swiglu_mlp_fwd(
        gate_up, mask, out=act, sum_abs=sums["sum_abs"], sum_square=sums["sum_square"], counted=counted, **common
    )
    swiglu_mlp_bwd(
        dact, gate_up, mask, dgate_up=dgate_up, act=back, dmask=sums["dmask"], mask_dmask=sums["mask_dmask"], **common
    )
    return {"act": act, "dgate_up": dgate_up, "again": back, **sums}


def check(gate_up, dact, mask, **kw):
    """Kernels against float64, no worse than the torch path; every address inside its tensor."""
    with addresses_checked() as seen:
        got = run(gate_up, dact, mask, **kw)
    assert set(seen) == ({"fwd_kernel", "bwd_kernel", "sum_kernel"} if dact.numel() else set())
    wide = [None if t is None else t.double() for t in (gate_up, dact, mask)]
    exact = run(*wide, backend="torch", **{k: v for k, v in kw.items() if k != "wide"})
    plain = run(gate_up, dact, mask, backend="torch", **{k: v for k, v in kw.items() if k != "wide"})
    for name, t in got.items():
        not_worse(t, exact[name], plain[name], ulps=4.0 if t.dtype == F32 else 1.0)
    assert bits(got["act"]) == bits(got["again"])
    return got


SIZES = [(1, 1, F32), (1, 7, F16), (3, 16, F32), (4, 33, F16), (13, 17, F32), (25, 32, F16), (26, 50, F32)]


@pytest.mark.parametrize("n,f,dtype", SIZES)
def test_matches_float64(n, f, dtype, rng):
    gate_up, dact, mask = make(n, f, dtype, rng)
    got = check(gate_up, dact, mask)
    assert bits(*got.values()) == bits(*run(gate_up, dact, mask).values())
    check(gate_up, dact, mask, start=3.0)


@pytest.mark.parametrize("dtype", [F32, F16])
def test_no_mask_is_a_mask_of_ones(dtype, rng):
    gate_up, dact, _ = make(14, 19, dtype, rng)
    open_, ones = check(gate_up, dact, None), run(gate_up, dact, torch.ones(19))
    assert bits(*open_.values()) == bits(*ones.values())
    assert bits(open_["dmask"]) == bits(open_["mask_dmask"])


def test_strides(rng):
    gate_up, dact, mask = make(14, 19, F32, rng)
    want = run(gate_up, dact, mask)
    apart = torch.full((28, 50), float("nan"))
    apart[::2, 5:43] = gate_up
    wide = torch.full((14, 21), float("nan"))
    wide[:, 1:20] = dact
    got = check(apart[::2, 5:43], wide[:, 1:20], torch.stack([mask, mask], 1)[:, 0], wide=4)
    assert bits(*got.values()) == bits(*want.values())
    half = torch.full((1,), 0.5).expand(19)
    row = dact[:1].expand(14, 19)  # one gradient for every row: row stride 0
    same(run(gate_up, row, half)["dgate_up"], run(gate_up, row.contiguous(), half.contiguous())["dgate_up"], 0)
    with pytest.raises(ValueError, match="columns 14 elements apart"):
        run(gate_up, dact.t().contiguous().t(), mask)
    with pytest.raises(ValueError, match="columns 0 elements apart"):
        run(gate_up, torch.ones(()).expand(14, 19), mask)


def test_only_what_is_asked_for(rng):
    gate_up, dact, mask = make(14, 19, F32, rng)
    want = run(gate_up, dact, mask)
    with addresses_checked() as seen:
        act = swiglu_mlp_fwd(gate_up, mask, backend="triton")
        back = swiglu_mlp_bwd(dact, gate_up, mask, backend="triton")
    assert set(seen) == {"fwd_kernel", "bwd_kernel"} and back[2] is None
    assert bits(act, *back[:2]) == bits(want["act"], want["dgate_up"], want["again"])
    for name in ("sum_abs", "sum_square"):
        out = nan(19, dtype=F32)
        swiglu_mlp_fwd(gate_up, mask, **{name: out}, backend="triton")
        assert bits(out) == bits(want[name])
    for name in ("dmask", "mask_dmask"):
        out = nan(19, dtype=F32)
        swiglu_mlp_bwd(dact, gate_up, mask, **{name: out}, backend="triton")
        assert bits(out) == bits(want[name])


def test_rows_that_do_not_count_may_hold_anything(rng):
    gate_up, dact, mask = make(27, 19, F32, rng)
    counted = torch.rand(27, generator=rng) < 0.5
    got = check(gate_up, dact, mask, counted=counted)
    real = run(gate_up[counted], dact[counted], mask, backend="torch")
    for name in ("sum_abs", "sum_square"):
        same(got[name], real[name].double(), 1e-6)
    gate_up[~counted] = float("nan")
    bad = run(gate_up, dact, mask, counted=counted)
    assert bits(bad["sum_abs"], bad["sum_square"]) == bits(got["sum_abs"], got["sum_square"])
    every_other = torch.zeros(54, dtype=torch.bool)
    every_other[::2] = counted
    strided = run(gate_up, dact, mask, counted=every_other[::2])
    assert bits(strided["sum_abs"]) == bits(got["sum_abs"])


@pytest.mark.parametrize("dtype", [F32, F16])
def test_nothing_is_lost_where_silu_times_up_overflows(dtype):
    big = torch.finfo(dtype).max
    gate_up, mask = torch.tensor([[big, big], [1e4, -1e4], [-big, big], [1.0, big]]).to(dtype), torch.zeros(1)
    got = run(gate_up, torch.full((4, 1), 2.0, dtype=dtype), mask)
    for name in ("act", "again", "dgate_up", "sum_abs", "sum_square"):
        assert (got[name] == 0).all(), name


@pytest.mark.parametrize("dtype", [F32, F16])
def test_extreme_gates(dtype):
    gate_up = torch.tensor([[-3e4, 3e4, -80.0, 0.0, 1.0, 1.0, 1.0, 1.0]], dtype=dtype)
    got = run(gate_up, torch.ones(1, 4, dtype=dtype), None)
    assert got["act"][0, 0] == 0 and got["act"][0, 3] == 0 and got["act"][0, 1] == gate_up[0, 1]
    assert got["dgate_up"][0, :4].tolist() == pytest.approx([0.0, 1.0, 0.0, 0.5], abs=1e-6)


def test_buffers_may_be_the_inputs(rng):
    """Also where another program's rows or columns are next to a program's own."""
    gate_up, dact, mask = make(27, 37, F16, rng)
    want = run(gate_up, dact, mask)
    g, a, dmask = gate_up.clone(), dact.clone(), nan(37, dtype=F32)
    swiglu_mlp_bwd(a, g, mask, dgate_up=g, act=a, dmask=dmask, backend="triton")
    assert bits(g, a, dmask) == bits(want["dgate_up"], want["again"], want["dmask"])


def test_no_rows(rng):
    gate_up, dact, mask = make(0, 19, F32, rng)
    got, more = check(gate_up, dact, mask), check(gate_up, dact, mask, start=3.0)
    for name in ("sum_abs", "sum_square", "dmask", "mask_dmask"):
        assert (got[name] == 0).all() and (more[name] == 3).all()


def test_columns_keep_their_places(rng):
    """A kernel that writes some columns twice and others never has the right sums but not the right order."""
    n, f = 9, 45
    gate_up = torch.arange(2 * n * f, dtype=F32).view(n, 2 * f) / (n * f) - 1
    mask, dact = torch.arange(1, f + 1) / f, torch.ones(n, f)
    got = run(gate_up, dact, mask)
    same(got["act"], swiglu_ref(gate_up.double(), mask.double()), 1e-6)
    order = torch.randperm(f, generator=rng)
    moved = run(gate_up[:, torch.cat([order, order + f])], dact, mask[order])
    assert bits(moved["act"], moved["dmask"]) == bits(got["act"][:, order], got["dmask"][order])
