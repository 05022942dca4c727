"""The norm's kernels under Triton's interpreter, held against the torch path in float64."""

from __future__ import annotations

import contextlib

import pytest
import torch
from interpreter import addresses_checked, unfit
from ops_close import bits, nan, same

from cortiq_kernels.ops import configs
from cortiq_kernels.ops.rms_norm import add_rms_norm_bwd, add_rms_norm_fwd

pytestmark = [pytest.mark.interpret, pytest.mark.skipif(bool(unfit()), reason=unfit())]
F32, F16, F64 = torch.float32, torch.float16, torch.float64
EPS = 1e-6
TOL = {F32: 2e-6, F16: 2e-3}


def make(n, h, dtype, rng):
    x, r, dn, dx = (torch.randn(n, h, generator=rng).to(dtype) for _ in range(4))
    return x, r, dn, dx, 0.3 * torch.randn(h, generator=rng)


def rows(t, gap):
    """The same values, rows `gap` elements further apart, NaN in between."""
    wide = nan(t.shape[0], t.shape[1] + gap, dtype=t.dtype)
    wide[:, : t.shape[1]] = t
    return wide[:, : t.shape[1]]


@contextlib.contextmanager
def programs(count):
    """The backward with `count` programs, so that a few rows make each walk several groups."""
    with contextlib.ExitStack() as stack:
        for width in (1024, 2048, 4096):
            config = {**configs.launch("rms_norm", width, "bwd"), "PROGRAMS": count}
            stack.enter_context(configs.trying("rms_norm", width, "bwd", config))
        yield


CASES = [
    *((0, 64, F32), (1, 64, F16), (70, 64, F32), (131, 65, F16), (5, 1, F32), (3, 1024, F16), (7, 1025, F32)),
    *((2, 2560, F16), (9, 100, F32)),
]


@pytest.mark.parametrize("n,h,dtype", CASES)
def test_forward_and_backward(n, h, dtype, rng):
    x, r, dn, dx, weight = make(n, h, dtype, rng)
    total = (x.double() + r.double()).to(dtype)
    for centered, add in ((True, True), (False, False)):
        y64, saved64 = add_rms_norm_fwd(total.double(), None, weight.double(), EPS, zero_centered=centered)
        dx64, dw64 = (dx if add else torch.zeros_like(dx)).double(), nan(h, dtype=F64)
        add_rms_norm_bwd(dn.double(), saved64, weight.double(), dx=dx64, zero_centered=centered, dweight=dw64)

        tensors = [rows(t, 3 if h % 2 else 16) for t in (x, r, dn, dx, torch.full_like(x, float("nan")))]
        xs, rs, dns, got, y = tensors
        again = nan(n, h, dtype=dtype)
        dw = nan(h, dtype=F32)
        with addresses_checked(), programs(3):
            kw = dict(zero_centered=centered, backend="triton")
            _, saved = add_rms_norm_fwd(xs, rs, weight, EPS, out=y, **kw)
            add_rms_norm_bwd(dns, saved, weight, dx=got, dweight=dw, add_dx=add, out=again, **kw)
            assert saved.x is xs and torch.equal(xs, total)
            same(y, y64, TOL[dtype])
            same(got, dx64, TOL[dtype])
            same(dw, dw64, 2e-6)
            assert bits(again) == bits(y)
            add_rms_norm_bwd(dns, saved, weight, dx=dns, dweight=dw, accumulate=True, add_dx=False, **kw)
        if not add:
            assert bits(dns) == bits(got)  # in place over dn
        same(dw, 2 * dw64, 2e-6)
        for t in tensors:  # nothing beside the rows is touched
            assert t.storage_offset() == 0 and torch.as_strided(t, (n, 1), t.stride(), h).isnan().all()


def test_recomputing_the_norm_reads_x_alone(rng):
    x, r, _, _, weight = make(6, 48, F16, rng)
    x_out = nan(6, 48, dtype=F16)
    before = bits(x, r)
    with addresses_checked():
        y, saved = add_rms_norm_fwd(x, r, weight, EPS, x_out=x_out, backend="triton")
        again, saved2 = add_rms_norm_fwd(x_out, None, weight, EPS, backend="triton")
        copy = nan(6, 48, dtype=F16)
        third, _ = add_rms_norm_fwd(x_out, None, weight, EPS, x_out=copy, backend="triton")
    assert saved.x is x_out and saved2.x is x_out and bits(x, r) == before
    assert bits(y) == bits(again) == bits(third) and bits(saved.rstd) == bits(saved2.rstd) and bits(copy) == bits(x_out)


def test_shared_rows_and_repeats(rng):
    x, r, dn, dx, weight = make(40, 33, F32, rng)
    runs = []
    for _ in range(2):
        got, dw = dx.clone(), nan(33, dtype=F32)
        with programs(2):
            y, saved = add_rms_norm_fwd(x.clone(), r[:1].expand(40, 33), weight, EPS, backend="triton")
            add_rms_norm_bwd(dn[:1].expand(40, 33), saved, weight, dx=got, dweight=dw, backend="triton")
            without = dx.clone()
            add_rms_norm_bwd(dn[:1].expand(40, 33), saved, weight, dx=without, backend="triton")
        assert bits(without) == bits(got)
        runs.append(bits(y, got, dw, saved.rstd))
    assert runs[0] == runs[1]


def test_what_the_kernels_do_not_take():
    x, w = torch.zeros(2, 8), torch.zeros(8)
    with pytest.raises(ValueError, match="backend must be one that can run here; got 'triton', but the elements of a"):
        add_rms_norm_fwd(torch.zeros(8, 2).t(), None, w, EPS, backend="triton")
    with pytest.raises(ValueError, match="but rows of 16385 elements"):
        add_rms_norm_fwd(torch.zeros(1, 16385), None, torch.zeros(16385), EPS, backend="triton")
    _, saved = add_rms_norm_fwd(x, None, w, EPS, backend="triton")
    with pytest.raises(ValueError, match="dx must be apart from dn"):
        add_rms_norm_bwd(x, saved, w, dx=x, backend="triton")
