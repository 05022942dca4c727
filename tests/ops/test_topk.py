from __future__ import annotations

import pytest
import torch
from ops_close import GPU_TOL, bits, no_sync, same

from cortiq_kernels.ops import topk
from cortiq_kernels.ops.topk import topk_softmax, topk_softmax_ref

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n,v,k", [(0, 5, 2), (1, 1, 1), (3, 7, 7), (5, 300, 1), (9, 1031, 64)])
def test_matches_a_full_sort(n, v, k, dtype, rng):
    z = (3 * torch.randn(n, v, generator=rng)).to(dtype)  # 16-bit rows of 1031 hold many ties
    got = topk_softmax(z, k, return_lse=True)
    ids, probs = topk_softmax_ref(z.double(), k)
    assert (got.ids.dtype, got.probs.dtype, got.ids.shape) == (torch.int32, torch.float32, (n, k))
    assert torch.equal(got.ids.long(), ids)
    same(got.probs, probs, 1e-6)
    same(got.lse, torch.logsumexp(z.double(), -1), 1e-6)
    same(got.mass, torch.softmax(z.double(), -1).gather(1, ids).sum(-1), 1e-6)
    plain = topk_softmax(z, k)
    assert plain.lse is None and plain.mass is None and bits(plain.ids, plain.probs) == bits(got.ids, got.probs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_id(dtype):
    z = torch.tensor([[1, 2, 2, 0, 2, 1], [0, 0, 0, 0, 0, 0], [-1, -1, -2, -1, -3, -1]], dtype=dtype)
    assert topk_softmax(z, 4).ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [0, 1, 3, 5]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_infinities_and_nan(dtype):
    z = torch.tensor(
        [[-0.0, 0.0, -0.0, 0.0], [-INF, 1, -INF, 1], [NAN, -INF, 2, NAN], [-INF] * 4, [NAN] * 4, [1, INF, 0, 0]],
        dtype=dtype,
    )
    got = topk_softmax(z, 4, return_lse=True)
    assert got.ids[:5].tolist() == [[0, 1, 2, 3], [1, 3, 0, 2], [2, 0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert got.probs[:5].tolist() == [[0.25] * 4, [0.5, 0.5, 0, 0], [1, 0, 0, 0], [0] * 4, [0] * 4]
    assert got.lse is not None and got.mass is not None
    assert got.lse[2].item() == 2 and got.lse[3].item() == -INF and got.lse[4].item() == -INF
    assert got.mass[:5].tolist() == pytest.approx([1, 1, 1, 0, 0])
    assert got.ids[5, 0] == 1 and got.probs[5].isnan().any()  # +inf stays visible
    negative_nan = -z[2:3]
    assert topk_softmax(negative_nan, 2).ids.tolist() == [[1, 2]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_vocabulary_is_never_read(dtype, rng):
    z = torch.randn(4, 40, generator=rng).to(dtype)
    padded = z.clone()
    padded[:, 37:] = torch.tensor([INF, NAN, 60000.0]).to(dtype)
    want, got = topk_softmax(z[:, :37], 5, return_lse=True), topk_softmax(padded, 5, valid_vocab=37, return_lse=True)
    assert bits(*want) == bits(*got)


def test_strides_expansion_and_chunks_do_not_matter(rng, monkeypatch):
    wide = torch.randn(7, 90, generator=rng)
    z = wide[:, 11:71]
    want = topk_softmax(z.contiguous(), 6, return_lse=True)
    assert bits(*topk_softmax(z, 6, return_lse=True)) == bits(*want)
    assert bits(*topk_softmax(z.t().contiguous().t(), 6, return_lse=True)) == bits(*want)
    row = topk_softmax(z[:1].expand(3, 60), 6)
    assert bits(row.ids[2], row.probs[2]) == bits(want.ids[0], want.probs[0])
    monkeypatch.setattr(topk, "_ELEMENTS", {"cpu": 130})  # two rows at a time
    assert bits(*topk_softmax(z, 6, return_lse=True)) == bits(*want)


def test_extreme_logits():
    z = torch.tensor([[3e38, -3e38, 0.0], [1e-45, 0.0, -1e-45], [90.0, -90.0, 89.0]])
    got = topk_softmax(z, 3, return_lse=True)
    assert got.ids.tolist() == [[0, 2, 1], [0, 1, 2], [0, 2, 1]]
    assert torch.isfinite(got.probs).all() and torch.isfinite(got.lse).all()
    same(got.probs.sum(-1), torch.ones(3), 1e-6)


def test_mass_is_a_share_however_large_the_logits(rng):
    """exp(lse of the k − lse of all) would be off by the spacing of floats at 1e4, a thousandth, and could pass 1."""
    z = 1e4 + torch.randn(20, 30, generator=rng)
    want = torch.softmax(z.double(), -1).topk(7).values.sum(-1)
    same(topk_softmax(z, 7, return_lse=True).mass, want, 1e-6)
    assert (topk_softmax(z, 30, return_lse=True).mass <= 1).all()


def test_errors():
    z = torch.zeros(2, 5)
    with pytest.raises(
        ValueError, match="topk_softmax: k must be between 1 and the vocabulary, 5; got 6; ask for fewer"
    ):
        topk_softmax(z, 6)
    with pytest.raises(ValueError, match="the vocabulary, 4; got 5"):
        topk_softmax(z, 5, valid_vocab=4)
    with pytest.raises(ValueError, match="k must be"):
        topk_softmax(z, 0)
    with pytest.raises(ValueError, match="valid_vocab must be between 1 and V = 5; got 6"):
        topk_softmax(z, 1, valid_vocab=6)
    with pytest.raises(ValueError, match=r"logits must be \[n, V\]"):
        topk_softmax(z[0], 1)
    with pytest.raises(ValueError, match="logits must be bfloat16 or"):
        topk_softmax(z.int(), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_TOL)
def test_gpu_gives_the_ids_of_the_cpu(dtype, rng):
    z = (3 * torch.randn(300, 9001, generator=rng)).to(dtype)
    z[5, 17], z[6] = NAN, -INF
    want, there = topk_softmax(z, 64, return_lse=True), z.cuda()
    with no_sync():
        got = topk_softmax(there, 64, return_lse=True)
        again = topk_softmax(there, 64, return_lse=True)
    assert bits(got.ids) == bits(want.ids) and bits(*got) == bits(*again)
    live = [r for r in range(300) if r != 6]
    for a, b in zip(got[1:], want[1:], strict=True):
        same(a[live].cpu(), b[live], 1e-5)
