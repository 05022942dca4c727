"""The Adam kernels under Triton's interpreter, held against the torch path and the float64 reference."""

from __future__ import annotations

import contextlib

import pytest
import torch
from interpreter import addresses_checked, unfit
from ops_close import bits, same

from cortiq_kernels.ops import configs
from cortiq_kernels.ops.adam import AdamRange, AdamRanges, AdamState, adam_ref, adam_step_

pytestmark = [pytest.mark.interpret, pytest.mark.skipif(bool(unfit()), reason=unfit())]
F32, F64 = torch.float32, torch.float64


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 64 elements and parts of 128: every loop and every cut is met with few elements."""
    from cortiq_kernels.ops import adam_triton

    monkeypatch.setattr(adam_triton, "TILE", 128)
    with contextlib.ExitStack() as stack:
        for size in (32, 64):
            for kernel in ("norm", "decide", "update"):
                stack.enter_context(configs.trying("adam", size, kernel, {"BLOCK": 64, "num_warps": 1}))
        yield


def flat(n, rng, moments=F32):
    """param, grad, m, v and a plane that is not the rounded param."""
    p, g = (torch.randn(n, generator=rng) for _ in range(2))
    m, v = torch.randn(n, generator=rng).to(moments), torch.rand(n, generator=rng).to(moments)
    return [p, g, m, v, torch.full((n,), 3.0).half()]


def run(tensors, backend, state=None, plane=True, **kw):
    """One step on copies -> (tensors, state)."""
    t = [x.clone() for x in tensors]
    state = state or AdamState.new("cpu")
    with addresses_checked() if backend == "triton" else contextlib.nullcontext():
        adam_step_(state, *t[:4], plane=t[4] if plane else None, backend=backend, **kw)
    return t, state


def close(got, want):
    for a, b in zip(got, want, strict=True):
        same(a, b, 1e-3 if a.dtype == torch.float16 else 1e-6)


@pytest.mark.parametrize("moments", [F32, F64])
@pytest.mark.parametrize("n", [0, 1, 63, 64, 129, 500])
def test_equals_the_torch_path(n, moments, rng):
    t = flat(n, rng, moments)
    kw = {"rate": 1e-2, "weight_decay": 0.1, "loss": torch.tensor(1.0)}
    scaled = [AdamState.new("cpu", 4.0) for _ in range(2)]
    for s in scaled:
        s.step.fill_(6)
    (got, a), (want, b) = (run(t, backend, s, **kw) for backend, s in zip(("triton", "torch"), scaled, strict=True))
    close(got, want)
    assert bits(got[4]) == bits(got[0].half())  # the plane is the rounded master, bit for bit
    assert a.read()[:4] == b.read()[:4] == (7, 0, 0, 4.0) and a.read().ok
    assert a.read().norm == pytest.approx(b.read().norm, rel=1e-12)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_float64_moments_follow_the_reference(clip, rng):
    t = [x.double() if i in (2, 3) else x for i, x in enumerate(flat(70, rng))]
    state, p, m, v = AdamState.new("cpu"), t[0].double(), t[2], t[3]
    for i in range(3):
        want = adam_ref(p, t[1], m, v, i, rate=1e-2, clip=clip, weight_decay=0.01)
        t, _ = run(t, "triton", state, rate=1e-2, clip=clip, weight_decay=0.01)
        for got, exact in zip(t[2:4], want[1:], strict=True):
            same(got, exact, 1e-14)
        same(t[0], want[0], 1e-7)
        p, m, v = t[0].double(), t[2], t[3]  # the master is rounded in every step


RANGES = [
    AdamRange(3, 70, 1, 0.5),  # odd starts: no vector loads
    AdamRange(70, 70, None, 9.0),  # empty
    AdamRange(300, 429, None, 2.0),
    AdamRange(128, 256, 160, 1.0),
]


@pytest.mark.parametrize("aligned", [False, True])
def test_ranges_have_their_own_factors_and_nothing_else_is_touched(aligned, rng):
    t = flat(500, rng)
    ranges = [AdamRange(128, 256, 160, 0.25), AdamRange(304, 432)] if aligned else RANGES
    inside = torch.zeros(500, dtype=torch.bool)
    mirrored = torch.zeros(500, dtype=torch.bool)
    for r in ranges:
        inside[r.start : r.stop] = True
        if r.plane_start is not None:
            mirrored[r.plane_start : r.plane_start + r.stop - r.start] = True
    t[1][~inside] = float("nan")  # what is outside does not count
    kw = {"ranges": AdamRanges(ranges), "rate": torch.tensor(1e-2, dtype=F64), "clip": 1.0}
    (got, a), (want, b) = (run(t, backend, **kw) for backend in ("triton", "torch"))
    close([x[inside] for x in got[:4]], [x[inside] for x in want[:4]])
    same(got[4], want[4], 1e-3)
    assert a.read().ok and a.read().norm == pytest.approx(float(t[1][inside].double().norm()), rel=1e-12)
    assert b.read().norm == pytest.approx(a.read().norm, rel=1e-12)
    for x, before in zip(got[:4], t[:4], strict=True):
        assert bits(x[~inside]) == bits(before[~inside])
    assert bits(got[4][~mirrored]) == bits(t[4][~mirrored])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_a_refused_step_changes_no_bit(bad, where, rng):
    t, loss = flat(200, rng), torch.tensor(1.0, dtype=F64)
    if where == "gradient":
        t[1][137] = bad
    else:
        loss = torch.tensor(bad)
    state = AdamState.new("cpu", 5.0)
    for wanted in ((0, 1, 1, 2.5), (0, 2, 2, 1.25), (0, 3, 3, 1.0), (0, 4, 4, 1.0)):
        got, _ = run(t, "triton", state, rate=1e-2, loss=loss)
        assert bits(*got) == bits(*t)
        assert state.read()[:4] == wanted and not state.read().ok
    good = [x.nan_to_num(0, 0, 0) for x in t]
    run(good, "triton", state, rate=1e-2)
    assert state.read()[:4] == (1, 4, 0, 1.0) and state.read().ok


def test_huge_and_tiny_gradients(rng):
    t = flat(130, rng)
    t[1].fill_(1e20)  # the norm is no f32 matter: clipped, not refused
    state = AdamState.new("cpu")
    got, _ = run(t, "triton", state, rate=1e-2)
    want, _ = run(t, "torch", rate=1e-2)
    close(got, want)
    assert state.read().norm == pytest.approx(1e20 * 130**0.5, rel=1e-6)
    t[1].zero_()
    got, _ = run(t, "triton", state, rate=1e-2, plane=False)
    assert state.read().ok and state.read().norm == 0 and bits(got[4]) == bits(t[4])


def test_runs_repeat_and_the_arguments_of_a_slice_do_not_matter(rng):
    wide = flat(408, rng)
    part = [x[3:403].clone() for x in wide]
    first, a = run(part, "triton", rate=1e-2)
    again, b = run(part, "triton", rate=1e-2)
    assert bits(*first) == bits(*again) and a.read() == b.read()
    t = [x.clone() for x in wide]
    adam_step_(AdamState.new("cpu"), *(x[3:403] for x in t[:4]), plane=t[4][3:403], rate=1e-2, backend="triton")
    assert bits(*(x[3:403] for x in t)) == bits(*first)
    assert bits(*(x[:3] for x in t), *(x[403:] for x in t)) == bits(*(x[:3] for x in wide), *(x[403:] for x in wide))
