"""Rows moved by an index and sums of parts, under Triton's interpreter: gather, scatter, the embedding's gradient."""

from __future__ import annotations

import pytest
import torch
from interpreter import addresses_checked, unfit
from ops_close import bits, nan, same

from cortiq_kernels.ops import rows_triton
from cortiq_kernels.ops.embedding import embedding_bwd
from cortiq_kernels.ops.parts_triton import sum_parts

pytestmark = [pytest.mark.interpret, pytest.mark.skipif(bool(unfit()), reason=unfit())]
F32, F16 = torch.float32, torch.float16


@pytest.mark.parametrize("n,v,h,dtype", [(0, 3, 4, F32), (1, 1, 1, F32), (40, 7, 5, F16), (65, 300, 33, F32)])
def test_embedding_gradient(n, v, h, dtype, rng):
    ids = torch.randint(v, (n,), generator=rng)
    ids[: n // 2] = v - 1  # a run longer than a program takes at a time
    dy = torch.randn(n, h + 3, generator=rng).to(dtype)[:, 1 : h + 1]
    want = torch.zeros(v, h, dtype=torch.float64).index_add_(0, ids, dy.double())
    for kind in (torch.int32, torch.int64):
        with addresses_checked():
            got = embedding_bwd(dy, ids.to(kind), out=nan(v, h, dtype=F32), backend="triton")
            same(got, want, 2e-6)
            first = got.clone()
            embedding_bwd(dy, ids.to(kind), out=got, accumulate=True, backend="triton")
        same(got, 2 * want, 2e-6)
        assert bits(embedding_bwd(dy, ids, out=nan(v, h, dtype=F32), backend="triton")) == bits(first)
        untouched = torch.ones(v, dtype=torch.bool).index_fill_(0, ids, False)
        assert (first[untouched] == 0).all()


@pytest.mark.parametrize("r,n,h,dtype", [(0, 5, 8, F32), (9, 5, 33, F16), (6, 40, 1030, F32)])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_gather(r, n, h, dtype, kind, rng):
    src = torch.randn(n, h, generator=rng).to(dtype)
    index = torch.randint(n, (r,), generator=rng).to(kind)
    weight = torch.rand(r, generator=rng) + 0.1
    if r:
        src[0] = float("nan")
        index[index == 0] = 1
        index[0], weight[0] = 0, 0.0  # does not count, whatever it reads
        index[1] = -1
    keep = (weight != 0) & (index >= 0)
    want = torch.where(keep[:, None], src[index.long().clamp(min=0)], 0.0)
    out = nan(r, h + 5, dtype=dtype)
    with addresses_checked():
        rows_triton.gather(src, index, weight, out[:, :h])
        assert torch.equal(out[:, :h], want) and out[:, h:].isnan().all()
        if 0 < r <= n:
            rows_triton.gather(src, None, weight, out[:, :h])
            assert torch.equal(out[1:r, :h], src[1:r]) and (out[0, :h] == 0).all()
        if r:
            index[2] = n
            rows_triton.gather(src, index, weight, out[:, :h])
            assert out[2, :h].isnan().all() and torch.equal(out[3:, :h], want[3:])


@pytest.mark.parametrize("r,n,h", [(0, 5, 8), (9, 12, 33), (6, 40, 1030)])
def test_scatter(r, n, h, rng):
    rows = torch.randn(r, h, generator=rng)
    factor = torch.randn(r, generator=rng)
    index = torch.randperm(n, generator=rng)[:r].to(torch.int32)
    if r:
        index[1], index[2] = -1, n
    real = (index >= 0) & (index < n)
    for scaled in (True, False):
        want = torch.full((n, h), 7.0, dtype=F16)
        want[index[real].long()] = (rows * factor[:, None] if scaled else rows)[real].half()
        out = torch.full((n, h), 7.0, dtype=F16)
        with addresses_checked():
            rows_triton.scatter(rows, factor if scaled else None, index, out)
        assert torch.equal(out, want)


@pytest.mark.parametrize("p,shape,gaps", [(1, (5,), 0), (33, (16,), 3), (700, (17,), 0), (20, (1030, 4), 0)])
def test_sum_of_parts(p, shape, gaps, rng):
    parts = torch.randn(p, 1 + gaps, *shape, generator=rng)[:, 0]
    want = parts.double().sum(0)
    out = nan(*shape, dtype=F32)
    with addresses_checked():
        sum_parts(parts, out, False)
        same(out, want, 1e-6)
        sum_parts(parts, out, True)
    same(out, 2 * want, 1e-6)
    wide = nan(*shape, 2, dtype=F32)
    sum_parts(parts, wide[..., 0], False)
    same(wide[..., 0], want, 1e-6)
    assert wide[..., 1].isnan().all()
