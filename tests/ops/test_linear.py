from __future__ import annotations

import pytest
import torch
from ops_close import GPU_TOL, bits, nan, no_sync, not_worse, same

from cortiq_kernels.ops.checks import acc_dtype
from cortiq_kernels.ops.linear import linear_bwd_w, linear_bwd_x, linear_fwd, linear_ref

SHAPES = [(0, 3, 5), (1, 1, 1), (1, 7, 5), (33, 17, 29), (65, 64, 3)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def make(n, i, o, dtype, rng):
    x, w, dy = (torch.randn(*s, generator=rng, dtype=torch.float64).to(dtype) for s in ((n, i), (o, i), (n, o)))
    return x, w, dy


def oracle(x, w, dy, dtype=torch.float64):
    x, w, dy = (t.to(dtype, copy=True) for t in (x, w, dy))
    x.requires_grad_()
    w.requires_grad_()
    y = linear_ref(x, w)
    return (y.detach(), *torch.autograd.grad(y, (x, w), dy))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n,i,o", SHAPES)
def test_matches_float64(n, i, o, dtype, rng):
    x, w, dy = make(n, i, o, dtype, rng)
    acc = acc_dtype(dtype)
    got = (
        linear_fwd(x, w, out=nan(n, o, dtype=dtype)),
        linear_bwd_x(dy, w, out=nan(n, i, dtype=dtype)),
        linear_bwd_w(dy, x, out=nan(o, i, dtype=acc)),
    )
    assert [t.dtype for t in got] == [dtype, dtype, acc]
    for mine, exact, eager in zip(got, oracle(x, w, dy), oracle(x, w, dy, dtype), strict=True):
        if dtype == torch.float64:
            same(mine, exact)
        else:
            not_worse(mine, exact, eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradient_never_rounds_to_16_bit(dtype, rng):
    x, _, dy = make(50, 6, 7, dtype, rng)
    dw = torch.zeros(7, 6)
    for _ in range(16):
        linear_bwd_w(dy, x, out=dw, accumulate=True)
    same(dw, 16 * (dy.double().t() @ x.double()), 2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate_adds(dtype, rng):
    x, w, dy = make(9, 5, 4, dtype, rng)
    dx0 = torch.randn(9, 5, generator=rng).to(dtype)
    dw0 = torch.randn(4, 5, generator=rng).to(acc_dtype(dtype))
    dx = linear_bwd_x(dy, w, out=dx0.clone(), accumulate=True)
    dw = linear_bwd_w(dy, x, out=dw0.clone(), accumulate=True)
    eps = torch.finfo(dtype).eps
    same(dx, dx0.double() + dy.double() @ w.double(), 2 * eps)
    same(dw, dw0.double() + dy.double().t() @ x.double(), 4 * torch.finfo(dw.dtype).eps)


def test_no_rows_leave_the_sum_or_zero_it():
    x, dy = torch.empty(0, 3), torch.empty(0, 2)
    assert torch.equal(linear_bwd_w(dy, x, out=nan(2, 3, dtype=torch.float32)), torch.zeros(2, 3))
    assert torch.equal(linear_bwd_w(dy, x, out=torch.ones(2, 3), accumulate=True), torch.ones(2, 3))


def test_strided_expanded_and_strided_out(rng):
    wide = torch.randn(6, 20, generator=rng, dtype=torch.float64)
    w = torch.randn(4, 5, generator=rng, dtype=torch.float64)
    x = wide[:, 3:8]
    target = nan(6, 9, dtype=torch.float64)
    same(linear_fwd(x, w, out=target[:, 2:6]), x @ w.t())
    assert target[:, :2].isnan().all() and target[:, 6:].isnan().all()
    dy = torch.ones((), dtype=torch.float64).expand(6, 4)  # what sum().backward() hands over
    same(linear_bwd_x(dy, w), dy.contiguous() @ w)
    same(linear_bwd_w(dy, x, out=nan(4, 5, dtype=torch.float64)), dy.contiguous().t() @ x)


def test_second_run_is_bitwise_equal(rng):
    x, w, dy = make(37, 19, 23, torch.float32, rng)
    runs = [bits(linear_fwd(x, w), linear_bwd_x(dy, w), linear_bwd_w(dy, x, out=torch.zeros(23, 19))) for _ in range(2)]
    assert runs[0] == runs[1]


def test_errors():
    x, w = torch.zeros(3, 4), torch.zeros(5, 6)
    with pytest.raises(ValueError, match=r"linear_fwd: w must be \[O, 4\].*got \(5, 6\); w is stored \[out, in\]"):
        linear_fwd(x, w)
    with pytest.raises(ValueError, match="linear_fwd: x must be a matrix"):
        linear_fwd(torch.zeros(2, 3, 4), w)
    with pytest.raises(ValueError, match="linear_fwd: w must be the dtype of x"):
        linear_fwd(x, torch.zeros(5, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="linear_fwd: x must be bfloat16 or"):
        linear_fwd(x.long(), w.long())
    with pytest.raises(ValueError, match=r"linear_bwd_x: w must be \[4, I\]"):
        linear_bwd_x(x, w)
    with pytest.raises(ValueError, match="linear_bwd_x: out must be given with accumulate=True"):
        linear_bwd_x(torch.zeros(3, 5), w, accumulate=True)
    with pytest.raises(ValueError, match=r"linear_bwd_w: x must be \[3, I\]"):
        linear_bwd_w(torch.zeros(3, 5), torch.zeros(2, 4), out=torch.zeros(5, 4))
    with pytest.raises(ValueError, match="linear_bwd_w: out must be float32; got torch.bfloat16"):
        linear_bwd_w(torch.zeros(3, 5), x, out=torch.zeros(5, 4, dtype=torch.bfloat16))


def test_out_that_cannot_hold_the_result_is_refused(rng):
    """Torch computes into the memory of an operand without a word, and wrongly."""
    a = torch.randn(4, 4, generator=rng)
    before = bits(a)
    for call in (
        lambda: linear_fwd(a, a.clone(), out=a),
        lambda: linear_fwd(a.clone(), a, out=a),
        lambda: linear_bwd_x(a, a.clone(), out=a),
        lambda: linear_bwd_w(a.clone(), a, out=a),
    ):
        with pytest.raises(ValueError, match="out must be apart from"):
            call()
    assert bits(a) == before
    row = torch.zeros(1, 4)
    for call in (
        lambda: linear_fwd(a, a, out=row.expand(4, 4)),
        lambda: linear_bwd_x(a, a, out=row.expand(4, 4), accumulate=True),
        lambda: linear_bwd_w(a, a, out=row.expand(4, 4)),
    ):
        with pytest.raises(ValueError, match="out must be a tensor whose elements do not share memory"):
            call()
    assert (row == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_TOL)
def test_gpu(dtype, rng):
    x, w, dy = make(130, 72, 40, dtype, rng)
    want = oracle(x, w, dy)
    x, w, dy = x.cuda(), w.cuda(), dy.cuda()
    runs = []
    for _ in range(2):
        dw = nan(40, 72, dtype=torch.float32).cuda()
        with no_sync():
            y, dx = linear_fwd(x, w), linear_bwd_x(dy, w)
            linear_bwd_w(dy, x, out=dw)
            twice = linear_bwd_w(dy, x, out=dw.clone(), accumulate=True)
            empty = linear_bwd_w(dy[:0], x[:0], out=torch.full_like(dw, float("nan")))
        for got, exact in zip((y, dx, dw), want, strict=True):
            same(got.cpu(), exact, 1e-5 if got is dw else GPU_TOL[dtype])
        same(twice.cpu(), 2 * want[2], 1e-5)
        assert (empty == 0).all()
        runs.append(bits(y, dx, dw, twice))
    assert runs[0] == runs[1]
