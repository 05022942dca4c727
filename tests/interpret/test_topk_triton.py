"""The top-k kernels under Triton's interpreter, held against the torch path: the same ids, whatever a row holds.

A row takes half a second there (the sort, and a search bit by bit), so most cases are one row.
"""

from __future__ import annotations

import pytest
import torch
from interpreter import unfit
from ops_close import bits, same

from cortiq_kernels.ops.topk import topk_softmax

INF, NAN = float("inf"), float("nan")

pytestmark = [pytest.mark.interpret, pytest.mark.skipif(bool(unfit()), reason=unfit())]
DTYPES = [torch.float32, torch.float16]


def check(z, k, **kw):
    """Ids exactly those of the torch path, the rest close; returns what the kernel gave."""
    got, want = (topk_softmax(z, k, return_lse=True, backend=b, **kw) for b in ("triton", "torch"))
    assert (got.ids.dtype, got.probs.dtype) == (torch.int32, torch.float32)
    assert torch.equal(got.ids, want.ids), (got.ids - want.ids).nonzero()[:5]
    # z·log2(e) of the sweep is good to a rounding of its size, and the share inherits that
    tol = 3e-6 + 2**-24 * min(1e4, z.float().abs().nan_to_num(0, 0).amax().item() if z.numel() else 0)
    for a, b in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol, equal_nan=True)
    return got


F32, F16 = DTYPES
SIZES = [
    *((1, 1, F32), (2, 2, F16), (37, 5, F32), (200, 200, F32), (255, 17, F16), (256, 1, F32), (257, 64, F32)),
    *((257, 64, F16), (600, 256, F32), (4097, 1, F16), (4097, 16, F32), (4097, 16, F16), (16640, 64, F32)),
]


@pytest.mark.parametrize("v,k,dtype", SIZES)
def test_gives_the_ids_of_the_torch_path(v, k, dtype, rng):
    check((3 * torch.randn(1, v, generator=rng)).to(dtype), k)  # an f16 row holds many ties


def test_runs_repeat_and_do_not_depend_on_what_is_asked(rng):
    z = torch.randn(2, 700, generator=rng)
    got = check(z, 5)
    assert bits(*topk_softmax(z, 5, return_lse=True, backend="triton")) == bits(*got)
    plain = topk_softmax(z, 5, backend="triton")
    assert plain.lse is None and plain.mass is None and bits(plain.ids, plain.probs) == bits(got.ids, got.probs)


@pytest.mark.parametrize("k", [63, 65, 128, 129, 255])
def test_every_size_of_the_sort(k, rng):
    check(torch.randn(1, 1501, generator=rng), k)
    check(torch.randint(-3, 4, (1, 700), generator=rng).float(), k)


ORDERED = {
    "all equal": lambda v: torch.zeros(v),
    "rising": lambda v: torch.arange(v) / 8,
    "falling": lambda v: torch.arange(v, 0, -1) / 8,
    "rising then flat": lambda v: torch.arange(v).clamp(max=v // 2) / 8,
    "two values": lambda v: (torch.arange(v) % 3 == 1).float(),
    "winners in one tile": lambda v: ((torch.arange(v) >= 512) & (torch.arange(v) < 768)).float(),
    "a late winner": lambda v: (torch.arange(v) == v - 1).float(),
    "blocks": lambda v: (torch.arange(v) // 256).float(),
}


@pytest.mark.parametrize("row", ORDERED)
def test_crowded_rows(row):
    """More values reach the first threshold than fit the sort: the k-th value is searched for, ties by column."""
    z = ORDERED[row](1300)
    check(torch.stack((z, -z - 1)), 64)  # fewer tiles than k
    check(z.half().unsqueeze(0), 4)


@pytest.mark.parametrize("row", ["all equal", "rising", "falling", "two values"])
def test_crowded_rows_of_many_tiles(row):
    check(ORDERED[row](4500).unsqueeze(0), 17)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_infinities_and_nan(dtype, rng):
    z = torch.tensor(
        [[-0.0, 0.0, -0.0, 0.0], [-INF, 1, -INF, 1], [NAN, -INF, 2, NAN], [-INF] * 4, [NAN] * 4], dtype=dtype
    )
    got = check(z, 4)
    assert got.ids.tolist() == [[0, 1, 2, 3], [1, 3, 0, 2], [2, 0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert got.probs[3:].tolist() == [[0] * 4] * 2 and got.lse[3:].tolist() == [-INF] * 2
    assert got.mass.tolist() == pytest.approx([1, 1, 1, 0, 0])
    check(z[:3], 3)
    long = torch.randn(3, 700, generator=rng).to(dtype)
    long[0, torch.randperm(700, generator=rng)[:690]] = -INF  # fewer finite ones than k
    long[1, ::2] = NAN
    long[1, 300:400] = -0.0
    long[2] = -INF
    long[2, 699] = -5
    check(long, 17)
    infinite = torch.randn(1, 700, generator=rng).to(dtype)
    infinite[0, [650, 20]] = INF
    got = topk_softmax(infinite, 3, return_lse=True, backend="triton")
    assert got.ids[0].tolist() == topk_softmax(infinite, 3, backend="torch").ids[0].tolist()
    assert got.probs.isnan().any() and not torch.isfinite(got.lse).any()  # +inf stays visible


def test_extreme_logits(rng):
    check(torch.tensor([[1e38, -3e38, 0.0], [1e-45, 0.0, -1e-45], [90.0, -90.0, 89.0]]), 3)
    steps = torch.arange(3000) // 256 * 100.0  # every tile is more than 60 above the one before
    check(torch.stack((steps, steps.flip(0))) + torch.randn(2, 3000, generator=rng), 9)


def test_mass_is_a_share(rng):
    """Not the exponential of a difference of logarithms, which passes 1 and is off by their spacing."""
    z = 1e4 + torch.randn(3, 60, generator=rng)
    assert (topk_softmax(z, 60, return_lse=True, backend="triton").mass <= 1).all()
    z = 60 + torch.randn(3, 300, generator=rng)
    want = torch.softmax(z.double(), -1).topk(7).values.sum(-1)
    same(topk_softmax(z, 7, return_lse=True, backend="triton").mass, want, 3e-6)


def test_strides_and_padded_vocabulary(rng):
    wide = torch.randn(2, 900, generator=rng).half()
    z = wide[:, 11:611]
    want = check(z.contiguous(), 6)
    assert bits(*check(z, 6)) == bits(*want)
    assert bits(*check(z.t().contiguous().t(), 6)) == bits(*want)
    every_other = torch.stack((z, torch.full_like(z, INF)), 1).flatten(0, 1)[::2]
    assert bits(*check(every_other, 6)) == bits(*want)
    rows = check(z[:1].expand(2, 600), 6)
    assert bits(rows.ids[1], rows.probs[1]) == bits(want.ids[0], want.probs[0])
    padded = torch.cat((z, torch.tensor([INF, NAN, 6e4]).half().expand(2, 3)), 1)
    assert bits(*check(padded, 6, valid_vocab=600)) == bits(*want)
    assert check(padded[:0], 6).ids.shape == (0, 6)
