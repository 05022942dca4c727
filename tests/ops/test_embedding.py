from __future__ import annotations

import pytest
import torch
from ops_close import GPU_TOL, bits, nan, no_sync, same

from cortiq_kernels.ops.checks import acc_dtype
from cortiq_kernels.ops.embedding import embedding_bwd, embedding_fwd, embedding_ref

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n,v,h", [(0, 3, 4), (1, 1, 1), (40, 7, 5), (65, 300, 33)])
def test_matches_float64(n, v, h, dtype, ids_dtype, rng):
    ids = torch.randint(v, (n,), generator=rng).to(ids_dtype)
    weight = torch.randn(v, h, generator=rng, dtype=torch.float64).to(dtype)
    dy = torch.randn(n, h, generator=rng, dtype=torch.float64).to(dtype)
    assert bits(embedding_fwd(ids, weight, out=nan(n, h, dtype=dtype))) == bits(weight[ids.long()])
    w64 = weight.double().requires_grad_()
    (want,) = torch.autograd.grad(embedding_ref(ids, w64), w64, dy.double())
    acc = acc_dtype(dtype)
    got = embedding_bwd(dy, ids, out=nan(v, h, dtype=acc))
    same(got, want, 1e-12 if acc == torch.float64 else 2e-6)
    same(embedding_bwd(dy, ids, out=got.clone(), accumulate=True), 2 * want, 1e-12 if acc == torch.float64 else 2e-6)


def test_rows_without_a_token_are_zero_or_stay():
    dy, ids = torch.ones(3, 2), torch.tensor([1, 1, 3])
    assert embedding_bwd(dy, ids, out=nan(5, 2, dtype=torch.float32))[:, 0].tolist() == [0, 2, 0, 1, 0]
    assert embedding_bwd(dy, ids, out=torch.ones(5, 2), accumulate=True)[:, 0].tolist() == [1, 3, 1, 2, 1]


def test_strided_expanded_and_bitwise(rng):
    weight = torch.randn(9, 30, generator=rng)[:, 3:10]
    ids = torch.randint(9, (50,), generator=rng)
    assert torch.equal(embedding_fwd(ids, weight), weight[ids])
    dy = torch.randn(50, 30, generator=rng)[:, 3:10]
    runs = [bits(embedding_bwd(dy, ids, out=torch.zeros(9, 7))) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]
    ones = torch.ones(()).expand(50, 7)
    assert torch.equal(embedding_bwd(ones, ids, out=torch.zeros(9, 7))[:, 0], ids.bincount(minlength=9).float())
    assert torch.equal(embedding_fwd(torch.tensor(4).expand(3), weight), weight[[4, 4, 4]])


def test_errors():
    weight = torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"embedding_fwd: ids must be \[N\]; got \(2, 3\)"):
        embedding_fwd(torch.zeros(2, 3, dtype=torch.int64), weight)
    with pytest.raises(ValueError, match="ids must be int32 or int64; got torch.float32"):
        embedding_fwd(torch.zeros(2), weight)
    with pytest.raises(ValueError, match="weight must be bfloat16 or"):
        embedding_fwd(torch.tensor([0]), weight.int())
    with pytest.raises(ValueError, match="out must be apart from weight"):
        embedding_fwd(torch.tensor([1, 0, 1, 0]), weight, out=weight)
    with pytest.raises(ValueError, match="out must be a tensor whose elements do not share memory"):
        embedding_bwd(torch.zeros(1, 2), torch.tensor([0]), out=torch.zeros(1, 2).expand(4, 2))
    with pytest.raises(ValueError, match=r"embedding_bwd: out must be \[V, 2\]"):
        embedding_bwd(torch.zeros(1, 2), torch.tensor([0]), out=torch.zeros(4, 3))
    with pytest.raises(ValueError, match="embedding_bwd: out must be float32"):
        embedding_bwd(torch.zeros(1, 2), torch.tensor([0]), out=torch.zeros(4, 2, dtype=torch.bfloat16))


@pytest.mark.parametrize("wrong", [-1, 4, 2**31])
def test_id_out_of_range_is_an_index_error_and_nothing_is_written(wrong):
    ids, weight = torch.tensor([0, wrong]), torch.zeros(4, 2)
    out, grad = torch.full((2, 2), 7.0), torch.full((4, 2), 7.0)
    with pytest.raises(IndexError, match=rf"embedding_fwd: ids must be in \[0, 4\); got {wrong}"):
        embedding_fwd(ids, weight, out=out)
    for accumulate in (False, True):
        with pytest.raises(IndexError, match=rf"embedding_bwd: ids must be in \[0, 4\); got {wrong}"):
            embedding_bwd(torch.ones(2, 2), ids, out=grad, accumulate=accumulate)
    assert (out == 7).all() and (grad == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_TOL)
def test_gpu(dtype, rng):
    ids = torch.randint(7, (3000,), generator=rng).to(torch.int32)  # hundreds of tokens a row
    weight = torch.randn(300, 65, generator=rng).to(dtype)
    dy = torch.randn(3000, 65, generator=rng).to(dtype)
    want = torch.zeros(300, 65, dtype=torch.float64).index_add_(0, ids, dy.double())
    runs = []
    for _ in range(5):
        ids, dy, out = ids.cuda(), dy.cuda(), nan(300, 65, dtype=torch.float32).cuda()
        table = weight.cuda()
        with no_sync():
            y = embedding_fwd(ids, table)
            embedding_bwd(dy, ids, out=out)
        assert bits(y) == bits(weight[ids.long().cpu()])
        same(out.cpu(), want, 1e-5)
        runs.append(bits(out))
    assert all(r == runs[0] for r in runs)
