"""The native Gram accumulator (csrc/) against X^T diag(w) X in float64, and its promises about bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cortiq_kernels import native

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=f"no native module: {native.missing()}")
TILE = 128


def tiles(n: int) -> Tensor:
    count = -(-n // TILE)
    return torch.zeros(count * (count + 1) // 2, TILE, TILE)


def unpack(gram: Tensor, n: int) -> Tensor:
    """[n, n] from the tiles; whatever is not zero beyond n is an error."""
    count = -(-n // TILE)
    full = torch.zeros(count * TILE, count * TILE)
    for i in range(count):
        for j in range(i, count):
            tile = gram[i * count - i * (i - 1) // 2 + (j - i)]
            full[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE] = tile
            full[j * TILE : (j + 1) * TILE, i * TILE : (i + 1) * TILE] = tile.T
    assert not full[n:].any() and not full[:, n:].any()
    return full[:n, :n]


def gram_of(x: Tensor, index: Tensor | None = None, weight: Tensor | None = None, **how) -> Tensor:
    gram = tiles(x.shape[1])
    assert native.gram_accumulate_cpu(gram, x, index, weight, **how)
    return gram


def truth(x: Tensor, index: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    x = x if index is None else x[index]
    w = torch.ones(len(x)) if weight is None else weight
    return (x.double() * w.double()[:, None]).T @ x.double()


def off(gram: Tensor, x: Tensor, index: Tensor | None = None, weight: Tensor | None = None) -> float:
    """Largest error relative to the size of the sum's terms, sqrt(G_ii G_jj) with weights taken positive."""
    n = x.shape[1]
    size = truth(x, index, None if weight is None else weight.abs()).diagonal().sqrt()
    error = (unpack(gram, n).double() - truth(x, index, weight)).abs()
    return float((error / (size[:, None] * size + 1e-30)).max()) if error.numel() else 0.0


def random(rows: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(rows * 1000 + n))
    return (x * torch.linspace(0.1, 3, n)).to(dtype)


# 128 rows of fused multiply-adds in f32, the rest in f64: 128 eps / 2 is the bound, a random walk stays far below.
CLOSE = 2e-6


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("n", [1, 2, 7, 16, 31, 33, 63, 64, 65, 127, 128, 129, 160, 255, 257, 431])
def test_odd_widths(n: int, isa: str):
    x = random(131, n)
    assert off(gram_of(x, isa=isa), x) < CLOSE


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 127, 128, 129, 255, 257, 1000])
def test_odd_numbers_of_rows(rows: int, isa: str):
    x = random(rows, 150)
    assert off(gram_of(x, isa=isa), x) < CLOSE


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_input_is_exact(dtype: torch.dtype, isa: str):
    x = random(300, 137, dtype)
    gram = gram_of(x, isa=isa)
    assert off(gram, x) < CLOSE
    assert torch.equal(gram, gram_of(x.float(), isa=isa))


def test_every_16_bit_value_is_widened_exactly():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = every.view(dtype)
        x = x[torch.isfinite(x) & (x.float().abs() < 1e15) & ((x == 0) | (x.float().abs() > 1e-8))]
        x = torch.stack([torch.ones_like(x), x], 1)  # G[0, 1] of one row is the value itself
        for row in range(0, len(x), 509):
            assert unpack(gram_of(x[row : row + 1]), 2)[0, 1] == x[row, 1].float()
        assert torch.equal(gram_of(x), gram_of(x.float()))


@pytest.mark.parametrize("isa", native.isas())
def test_small_integers_are_exact(isa: str):
    x = torch.randint(-8, 9, (3000, 140), generator=torch.Generator().manual_seed(1)).float()
    gram = gram_of(x, isa=isa)
    assert torch.equal(unpack(gram, 140).double(), truth(x))
    assert torch.equal(gram[0], gram[0].T) and torch.equal(gram[2], gram[2].T)


def test_it_adds():
    x = random(200, 130)
    gram = gram_of(x[:77])
    before = gram.clone()
    assert native.gram_accumulate_cpu(gram, x[:0]) and torch.equal(gram, before)
    assert native.gram_accumulate_cpu(gram, x[77:])
    assert off(gram, x) < CLOSE


def test_strides():
    wide = random(90, 300)
    for x in (wide[:, 11:150], wide[::3, :139], wide[:1].expand(50, 300)[:, 5:140], wide.T[:139, :88]):
        assert torch.equal(gram_of(x), gram_of(x.contiguous()))
        assert off(gram_of(x), x) < CLOSE


@pytest.mark.parametrize("isa", native.isas())
def test_weights_and_index(isa: str):
    x = random(310, 139)
    gen = torch.Generator().manual_seed(3)
    weight = torch.randn(310, generator=gen)
    index = torch.randint(0, 310, (205,), generator=gen)
    for i, w in ((index, None), (None, weight), (index, weight[:205]), (index.int(), None), (index[:0], None)):
        gram = gram_of(x, i, w, isa=isa)
        assert off(gram, x, i, w) < CLOSE
        assert torch.equal(gram[0], gram[0].T)


def test_padding_never_enters():
    x = random(300, 200)
    real = torch.rand(300, generator=torch.Generator().manual_seed(4)) < 0.6
    x[~real] = float("nan")
    alone = gram_of(x[real])
    assert off(alone, x[real]) < CLOSE
    for weight in (real.float(), real, real.double()):
        assert torch.equal(gram_of(x, None, weight), alone)
    assert torch.equal(gram_of(x, real.nonzero().flatten()), alone)
    assert torch.equal(gram_of(x, None, torch.zeros(300)), tiles(200))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", native.DTYPES)
def test_what_is_not_finite_is_said_and_can_be_kept_out(bad: float, dtype: torch.dtype):
    x = random(400, 150, dtype)
    gram = gram_of(x)
    before = gram.clone()
    for row, column in ((0, 0), (399, 149), (200, 127)):
        spoiled = x.clone()
        spoiled[row, column] = bad
        assert not native.gram_accumulate_cpu(gram, spoiled, keep=True) and torch.equal(gram, before)
        for clean in (x, spoiled[:row], spoiled[row + 1 :]):
            assert native.gram_accumulate_cpu(before.clone(), clean, keep=True)
        into = before.clone()
        assert not native.gram_accumulate_cpu(into, spoiled)
        broken = ~torch.isfinite(unpack(into, 150))
        want = torch.zeros(150, dtype=torch.bool)
        want[column] = True
        assert torch.equal(broken, want | want[:, None]), "its row and its column, and nothing else"
    weight = torch.ones(400)
    weight[7] = bad
    assert not native.gram_accumulate_cpu(gram, x, None, weight, keep=True) and torch.equal(gram, before)
    assert not native.gram_accumulate_cpu(gram, x, None, weight) and not torch.isfinite(unpack(gram, 150)).any()


def test_sums_beyond_float32_are_said():
    x = torch.full((3, 5), 1e18)
    gram = tiles(5)
    assert native.gram_accumulate_cpu(gram, x)
    x[:, 4] = 3e19
    assert not native.gram_accumulate_cpu(gram, x) and gram[0, 4, 4] == float("inf")
    assert not native.gram_accumulate_cpu(gram, random(3, 5)), "what is broken already is said too"


def test_bits_do_not_depend_on_threads():
    x = random(700, 530)
    weight = torch.rand(700, generator=torch.Generator().manual_seed(5))
    for w in (None, weight):
        one = gram_of(x, None, w, threads=1)
        assert all(torch.equal(gram_of(x, None, w, threads=t), one) for t in (1, 2, 3, 4, 16))


def test_fused_instruction_sets_agree_bit_for_bit():
    fused = [isa for isa in native.isas() if isa != "plain"]
    x = random(500, 300)
    first, *rest = [gram_of(x, isa=isa) for isa in fused] or [None]
    assert all(torch.equal(first, other) for other in rest)


def test_rows_that_do_not_fit_the_workspace_at_once():
    """128 MiB hold 8,192 rows of 4,096 columns; of one column (a whole tile) they hold 262,144."""
    rows = 262_144 + 1000
    x = (torch.arange(rows) % 7).float()[:, None]
    gram = gram_of(x)
    assert float(gram[0, 0, 0]) == float(torch.tensor(float((x.double() ** 2).sum())))
    x[-1] = float("nan")
    before = gram.clone()
    assert not native.gram_accumulate_cpu(gram, x, keep=True) and torch.equal(gram, before)


def test_many_rows_lose_nothing():
    """In one f32 sum, 1e5 rows of 1.1 drift by 1e-4 and more; blocks that meet in f64 do not."""
    x = torch.full((100_000, 1), 1.1)
    got, want = float(gram_of(x)[0, 0, 0]), float((x.double() ** 2).sum())
    assert abs(got / want - 1) < 2e-6


def test_refusals():
    x = random(4, 3)
    gram = tiles(3)
    for index in (torch.tensor([0, 4]), torch.tensor([-1])):
        with pytest.raises(IndexError, match=r"row_index must be in 0 \.\. 3"):
            native.gram_accumulate_cpu(gram, x, index)
    with pytest.raises(ValueError, match="isa must be one of"):
        native.gram_accumulate_cpu(gram, x, isa="mmx")
    assert not gram.any()
