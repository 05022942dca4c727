from __future__ import annotations

import pytest
import torch
from ops_close import GPU_TOL, bits, nan, no_sync, not_worse, same

from cortiq_kernels.ops.checks import acc_dtype
from cortiq_kernels.ops.rms_norm import add_rms_norm_bwd, add_rms_norm_fwd, rms_norm_ref

EPS = 1e-6
SHAPES = [(0, 4), (1, 3), (1, 7), (5, 33), (130, 64)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def make(n, h, dtype, rng):
    x, r, dn, dx = (torch.randn(n, h, generator=rng, dtype=torch.float64).to(dtype) for _ in range(4))
    weight = (0.3 * torch.randn(h, generator=rng, dtype=torch.float64)).to(acc_dtype(dtype))
    return x, r, weight, dn, dx


def oracle(total, weight, dn, dx, dtype=torch.float64, zero_centered=True):
    """Forward and gradients through the reference, from the rounded sum."""
    total, weight, dn, dx = (t.to(dtype, copy=True) for t in (total, weight, dn, dx))
    total.requires_grad_()
    weight.requires_grad_()
    y = rms_norm_ref(total, weight, EPS, zero_centered)
    gx, gw = torch.autograd.grad(y, (total, weight), dn)
    return y.detach(), dx + gx, gw


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n,h", SHAPES)
@pytest.mark.parametrize("zero_centered", [True, False])
def test_matches_float64(n, h, dtype, zero_centered, rng):
    x, r, weight, dn, dx = make(n, h, dtype, rng)
    total = (x.double() + r.double()).to(dtype)
    want = oracle(total, weight, dn, dx, zero_centered=zero_centered)
    eager = oracle(total, weight, dn, dx, dtype, zero_centered)
    y, saved = add_rms_norm_fwd(x, r, weight, EPS, zero_centered=zero_centered, out=nan(n, h, dtype=dtype))
    assert saved.x is x and torch.equal(x, total)  # in place, rounded once
    dw = nan(h, dtype=weight.dtype)
    add_rms_norm_bwd(dn, saved, weight, dx=dx, zero_centered=zero_centered, dweight=dw)
    for got, exact, base in zip((y, dx, dw), want, eager, strict=True):
        if dtype == torch.float64:
            same(got, exact)
        else:
            not_worse(got, exact, base)


def test_width_one_is_the_sign(rng):
    """x / |x|: the gradient is 0 but for eps."""
    x, _, weight, dn, _ = make(5, 1, torch.float64, rng)
    y, saved = add_rms_norm_fwd(x, None, weight, EPS)
    same(y, x.sign() * (1 + weight), 1e-3)
    dx = torch.zeros_like(x)
    add_rms_norm_bwd(dn, saved, weight, dx=dx)
    same(dx, oracle(x, weight, dn, torch.zeros_like(x))[1])


def test_x_out_and_no_residual(rng):
    x, r, weight, _, _ = make(4, 6, torch.float32, rng)
    before = bits(x, r)
    x_out = nan(4, 6, dtype=torch.float32)
    y, saved = add_rms_norm_fwd(x, r, weight, EPS, x_out=x_out)
    assert saved.x is x_out and torch.equal(x_out, x + r) and bits(x, r) == before
    y0, saved0 = add_rms_norm_fwd(x, None, weight, EPS)
    assert saved0.x is x and bits(x) == before[:1]
    same(y0, rms_norm_ref(x, weight, EPS), 1e-6)
    copy = nan(4, 6, dtype=torch.float32)
    y1, saved1 = add_rms_norm_fwd(x, None, weight, EPS, x_out=copy)
    assert torch.equal(copy, x) and saved1.x is copy and bits(y1) == bits(y0)


def test_accumulate_and_skip(rng):
    x, r, weight, dn, dx = make(6, 5, torch.float64, rng)
    _, saved = add_rms_norm_fwd(x, r, weight, EPS)
    first = nan(5, dtype=torch.float64)
    add_rms_norm_bwd(dn, saved, weight, dx=dx.clone(), dweight=first)
    twice = first.clone()
    without = dx.clone()
    add_rms_norm_bwd(dn, saved, weight, dx=dx, dweight=twice, accumulate=True)
    same(twice, 2 * first)
    add_rms_norm_bwd(dn, saved, weight, dx=without)
    assert bits(without) == bits(dx)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centered", [True, False])
def test_dx_without_what_was_there_and_the_norm_again(dtype, zero_centered, rng):
    x, r, weight, dn, dx = make(9, 17, dtype, rng)
    kw = dict(zero_centered=zero_centered)
    y, saved = add_rms_norm_fwd(x, r, weight, EPS, **kw)
    want, dw = torch.zeros_like(dx), nan(17, dtype=weight.dtype)
    add_rms_norm_bwd(dn, saved, weight, dx=want, dweight=dw, **kw)
    got, again, own = nan(9, 17, dtype=dtype), nan(9, 17, dtype=dtype), nan(17, dtype=weight.dtype)
    add_rms_norm_bwd(dn, saved, weight, dx=got, dweight=own, add_dx=False, out=again, **kw)
    assert torch.equal(got, want) and bits(again, own) == bits(y, dw)
    add_rms_norm_bwd(dn, saved, weight, dx=dn, dweight=own, add_dx=False, **kw)  # in place
    assert torch.equal(dn, want) and bits(own) == bits(dw)


def test_strided_and_expanded(rng):
    wide = torch.randn(5, 20, generator=rng, dtype=torch.float64)
    weight = torch.randn(6, generator=rng, dtype=torch.float64)
    x, r = wide[:, 2:8], torch.randn(6, generator=rng, dtype=torch.float64).expand(5, 6)
    want = rms_norm_ref(x + r, weight, EPS)
    edges = wide[:, :2].clone()
    buffer = nan(5, 9, dtype=torch.float64)
    y, saved = add_rms_norm_fwd(x, r, weight, EPS, out=buffer[:, 1:7])
    same(y, want)
    assert torch.equal(wide[:, :2], edges)
    dn = torch.ones((), dtype=torch.float64).expand(5, 6)
    dx = torch.zeros(5, 12, dtype=torch.float64)
    add_rms_norm_bwd(dn, saved, weight, dx=dx[:, 3:9])
    same(dx[:, 3:9], oracle(saved.x, weight, dn, torch.zeros(5, 6))[1])
    assert (dx[:, :3] == 0).all() and (dx[:, 9:] == 0).all()


@pytest.mark.parametrize("dtype,value", [(torch.bfloat16, 1e15), (torch.float16, 6e4), (torch.float32, 1e-30)])
def test_extreme_values_stay_finite(dtype, value):
    x = torch.full((2, 8), value, dtype=dtype)
    weight = torch.zeros(8)
    y, saved = add_rms_norm_fwd(x, None, weight, EPS)
    exact = rms_norm_ref(x.double(), weight, EPS)
    same(y, exact, 2 * torch.finfo(dtype).eps)
    dx = torch.zeros_like(x)
    add_rms_norm_bwd(torch.ones_like(x), saved, weight, dx=dx)
    assert torch.isfinite(dx).all()


def test_zero_row_is_zero_and_adds_zero():
    x = torch.zeros(3, 4)
    y, saved = add_rms_norm_fwd(x, None, torch.ones(4), EPS)
    dx, dw = torch.full((3, 4), 7.0), nan(4, dtype=torch.float32)
    add_rms_norm_bwd(torch.zeros(3, 4), saved, torch.ones(4), dx=dx, dweight=dw)
    assert (y == 0).all() and (dx == 7).all() and (dw == 0).all()


def test_second_run_is_bitwise_equal(rng):
    x, r, weight, dn, dx = make(65, 33, torch.bfloat16, rng)
    runs = []
    for _ in range(2):
        y, saved = add_rms_norm_fwd(x.clone(), r, weight, EPS)
        g, dw = dx.clone(), torch.zeros(33)
        add_rms_norm_bwd(dn, saved, weight, dx=g, dweight=dw)
        runs.append(bits(y, *saved, g, dw))
    assert runs[0] == runs[1]


def test_errors():
    x, w = torch.zeros(2, 4), torch.zeros(4)
    with pytest.raises(ValueError, match=r"add_rms_norm_fwd: x must be \[N, H\]; got \(4,\)"):
        add_rms_norm_fwd(w, None, w, EPS)
    with pytest.raises(ValueError, match=r"add_rms_norm_fwd: weight must be \[4\]; got \(3,\)"):
        add_rms_norm_fwd(x, None, torch.zeros(3), EPS)
    with pytest.raises(ValueError, match="weight must be float32; got torch.bfloat16"):
        add_rms_norm_fwd(x, None, w.bfloat16(), EPS)
    with pytest.raises(ValueError, match="r must be the shape of x"):
        add_rms_norm_fwd(x, torch.zeros(3, 4), w, EPS)
    _, saved = add_rms_norm_fwd(x, None, w, EPS)
    with pytest.raises(ValueError, match="add_rms_norm_bwd: dx must be"):
        add_rms_norm_bwd(x, saved, w, dx=torch.zeros(2, 5))
    with pytest.raises(ValueError, match="add_rms_norm_bwd: dweight must be"):
        add_rms_norm_bwd(x, saved, w, dx=torch.zeros(2, 4), dweight=torch.zeros(5))
    with pytest.raises(ValueError, match="add_rms_norm_bwd: dx must be apart from dn"):
        add_rms_norm_bwd(x, saved, w, dx=x)
    with pytest.raises(ValueError, match="add_rms_norm_bwd: out must be apart from dx"):
        add_rms_norm_bwd(x + 1, saved, w, dx=(dx := torch.zeros(2, 4)), out=dx)
    dx = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="dweight must be a tensor whose elements do not share memory"):
        add_rms_norm_bwd(x + 1, saved, w, dx=dx, dweight=torch.zeros(1).expand(4))
    assert (dx == 0).all()
    row = torch.ones(1, 4).expand(2, 4)
    with pytest.raises(ValueError, match="x_out must be a tensor whose elements do not share memory"):
        add_rms_norm_fwd(row, x, w, EPS)
    assert add_rms_norm_fwd(row, None, w, EPS)[0].shape == (2, 4)  # nothing is written to x here


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_TOL)
def test_gpu(dtype, rng):
    x, r, weight, dn, dx = make(130, 65, dtype, rng)
    want = oracle((x.double() + r.double()).to(dtype), weight, dn, dx)
    x, r, weight, dn, dx = (t.cuda() for t in (x, r, weight, dn, dx))
    runs = []
    for _ in range(2):
        dw, g = nan(65, dtype=torch.float32).cuda(), dx.clone()
        with no_sync():
            y, saved = add_rms_norm_fwd(x, r, weight, EPS, x_out=torch.full_like(x, float("nan")))
            add_rms_norm_bwd(dn, saved, weight, dx=g, dweight=dw)
        for got, exact in zip((y, g, dw), want, strict=True):
            same(got.cpu(), exact, 1e-5 if got is dw else GPU_TOL[dtype])
        runs.append(bits(y, g, dw))
    assert runs[0] == runs[1]
