from __future__ import annotations

import pytest
import torch
from ops_close import bits, no_sync, not_worse

from cortiq_kernels import native
from cortiq_kernels.ops import gram as module
from cortiq_kernels.ops.gram import (
    TILE,
    gram_accumulate_,
    gram_diagonal,
    gram_finalize,
    gram_ref,
    gram_tiles,
    gram_zeros,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 5, 127, 128, 129, 300, 513, 700]


@pytest.fixture(autouse=True, params=["native", "torch"])
def kind(request, monkeypatch):
    """Every test with the native module, where it is built, and without."""
    if request.param == "torch":
        monkeypatch.setattr(module, "_native_takes", lambda *_: False)
    elif why := native.missing():
        pytest.skip(f"no native module: {why}")
    return request.param


def total(x, **rows):
    return gram_finalize(gram_accumulate_(gram_zeros(x.shape[1]), x, **rows), x.shape[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", WIDTHS)
def test_matches_float64(n, dtype, rng):
    x = torch.randn(70, n, generator=rng).to(dtype)
    exact = gram_ref(x.double())
    got = total(x)
    not_worse(got, exact, gram_ref(x.float()))
    assert torch.equal(got, got.T)
    wide = gram_accumulate_(gram_zeros(n, dtype=torch.float64), x)
    torch.testing.assert_close(gram_finalize(wide, n), exact, rtol=1e-12, atol=1e-12)
    assert torch.equal(gram_diagonal(wide, n), gram_finalize(wide, n).diagonal())


@pytest.mark.parametrize("n", WIDTHS)
def test_layout_of_the_tiles(n, rng):
    """Tile (i, j) is number i * nt - i (i - 1) / 2 + (j - i), and zero where the matrix ends."""
    x = torch.randint(-8, 9, (9, n), generator=rng).float()
    packed, whole = gram_accumulate_(gram_zeros(n), x), x.T @ x
    side = -(-n // TILE)
    assert packed.shape == (gram_tiles(n), TILE, TILE) and gram_tiles(n) == side * (side + 1) // 2
    padded = torch.zeros(side * TILE, side * TILE)
    padded[:n, :n] = whole
    for i in range(side):
        for j in range(i, side):
            tile = packed[i * side - i * (i - 1) // 2 + (j - i)]
            assert torch.equal(tile, padded[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]), (i, j)


def test_integers_are_exact_however_the_rows_are_cut(rng):
    x = torch.randint(-8, 9, (9000, 131), generator=rng).to(torch.bfloat16)
    want = (x.double().T @ x.double()).float()
    assert torch.equal(total(x), want)  # more rows than one product takes
    packed = gram_zeros(131)
    for part in x.split(777):
        gram_accumulate_(packed, part)
    assert torch.equal(gram_finalize(packed, 131), want)
    doubled = gram_finalize(gram_accumulate_(packed, x), 131)
    assert torch.equal(doubled, 2 * want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_do_not_count_are_never_seen(dtype, rng):
    x = torch.randn(40, 140, generator=rng).to(dtype)
    index = torch.randperm(40, generator=rng)[:17].sort().values
    want = total(x.index_select(0, index))
    dirty = torch.full_like(x, float("nan"))
    dirty[index] = x[index]
    for kind in (torch.int32, torch.int64):
        assert bits(total(dirty, row_index=index.to(kind))) == bits(want)
    weight = torch.zeros(40)
    weight[index] = 1.0
    torch.testing.assert_close(total(dirty, row_weight=weight), want, rtol=1e-6, atol=1e-5)
    assert torch.isfinite(gram_ref(dirty.double(), row_weight=weight)).all()


def test_weights(rng):
    x, w = torch.randn(50, 133, generator=rng), torch.rand(50, generator=rng)
    w[::7] = 0
    want = x.double().T @ (x.double() * w.double()[:, None])
    not_worse(total(x, row_weight=w), want, gram_ref(x, row_weight=w))
    exact = total(x, row_weight=w.double())  # weights in f64 take torch's f64 products
    torch.testing.assert_close(exact.double(), want, rtol=1e-6, atol=1e-6)
    index = torch.tensor([3, 3, 0, 21])
    got = total(x, row_index=index, row_weight=torch.tensor([1.0, 1.0, 0.5, 2.0]))
    want = gram_ref(x.double(), row_index=index, row_weight=torch.tensor([1.0, 1.0, 0.5, 2.0]))
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_nothing_to_add_and_bad_values(rng):
    packed = gram_zeros(130)
    gram_accumulate_(packed, torch.zeros(0, 130))
    gram_accumulate_(packed, torch.full((3, 130), float("nan")), row_index=torch.zeros(0, dtype=torch.int64))
    assert not packed.any()
    x = torch.randn(6, 130, generator=rng)
    x[2, 129] = float("inf")
    whole = total(x)
    assert torch.isfinite(whole[:129, :129]).all() and not torch.isfinite(whole[129]).any()


def test_strided_and_repeated_inputs_and_two_runs(rng):
    wide = torch.randn(40, 300, generator=rng)
    x = wide[::2, 10:160]
    assert bits(total(x)) == bits(total(x.contiguous())) == bits(total(x))
    one = torch.randn(1, 200, generator=rng)
    torch.testing.assert_close(total(one.expand(4, 200)), 4 * total(one))


def test_no_temporary_of_the_size_of_the_matrix(rng, monkeypatch, kind):
    """torch's products are panels of 512 rows, whatever n; the native module takes no memory from torch."""
    if kind == "native":
        monkeypatch.setattr(torch, "mm", None)
        total(torch.randn(3, 2000, generator=rng))
        return
    made, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **k: made.append((a.shape[0], b.shape[1])) or mm(a, b, **k))
    total(torch.randn(3, 2000, generator=rng))
    assert max(a for a, _ in made) <= module._PANEL * TILE and max(b for _, b in made) <= 2000
    assert sum(a * b for a, b in made) < 0.7 * 2000**2  # half of the matrix, and the diagonal panels' lower parts


@pytest.mark.parametrize(("change", "words"), [
    ({"gram": torch.zeros(2, TILE, TILE)}, r"gram must be \[3, 128, 128\] for n = 200"),
    ({"gram": torch.zeros(3, TILE, TILE, dtype=torch.float16)}, "gram must be float32 or float64"),
    ({"gram": torch.zeros(3, TILE, 2 * TILE)[:, :, ::2]}, "gram must be contiguous"),
    ({"x": torch.zeros(4, 200, dtype=torch.int32)}, "x must be"),
    ({"x": torch.zeros(200)}, r"x must be \[T, n\]"),
    ({"row_index": torch.zeros(2)}, "row_index must be int32 or int64"),
    ({"row_index": torch.zeros(2, 1, dtype=torch.int64)}, r"row_index must be \[R\]"),
    ({"row_weight": torch.zeros(3)}, r"row_weight must be \[4\]"),
    ({"row_weight": torch.zeros(4, dtype=torch.float16)}, "row_weight must be float32 or float64"),
])  # fmt: skip
def test_refusals(change, words):
    args = {"gram": gram_zeros(200), "x": torch.zeros(4, 200)} | change
    with pytest.raises(ValueError, match=words):
        gram_accumulate_(args.pop("gram"), args.pop("x"), **args)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu(dtype, rng):
    x = torch.randn(5000, 700, generator=rng).to(dtype)
    index = torch.arange(0, 5000, 3)
    want = gram_ref(x.double(), row_index=index)
    packed, xd, at = gram_zeros(700, device="cuda"), x.cuda(), index.cuda()
    gram_accumulate_(packed, xd, row_index=at)
    packed.zero_()
    with no_sync():
        gram_accumulate_(packed, xd, row_index=at)
    got = gram_finalize(packed, 700).cpu().double()
    scale = want.diagonal().sqrt()
    assert ((got - want).abs() <= 2e-5 * scale[:, None] * scale).all()
