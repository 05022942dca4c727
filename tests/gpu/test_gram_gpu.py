"""The Gram accumulator on a GPU (csrc/gram_cuda.cu): every size against float64, and its promises about bits."""

from __future__ import annotations

import pytest
import torch
from ops_close import bits, no_sync
from torch import Tensor

from cortiq_kernels import native
from cortiq_kernels.ops.gram import TILE, gram_accumulate_, gram_diagonal, gram_finalize, gram_zeros

pytestmark = pytest.mark.gpu
WIDTHS = [1, 7, 8, 9, 63, 64, 65, 129, 431, 768, 1504, 3584, 9216, 17408]
ROWS = [0, 1, 127, 8192, 130000]
HALF = [torch.bfloat16, torch.float16]
DTYPES = [*HALF, torch.float32]


@pytest.fixture(autouse=True)
def kernels():
    if why := native.cuda_missing(torch.cuda.current_device()):
        pytest.skip(why)
    yield
    torch.cuda.empty_cache()


@pytest.fixture(params=["best", "mma.sync"])
def isa(request) -> str | None:
    return None if request.param == "best" else request.param


def normal(rows: int, n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    gen = torch.Generator("cuda").manual_seed(seed)
    x = torch.empty(rows, n, dtype=dtype, device="cuda")
    for part in x.split(8192):
        part.copy_(torch.randn(part.shape, generator=gen, device="cuda"))
    return x


def integers(rows: int, n: int, dtype: torch.dtype) -> Tensor:
    gen = torch.Generator("cuda").manual_seed(1)
    return torch.randint(-8, 9, (rows, n), generator=gen, device="cuda").to(dtype)


def gram_of(x: Tensor, index: Tensor | None = None, weight: Tensor | None = None, **how) -> Tensor:
    gram = gram_zeros(x.shape[1], device="cuda")
    native.gram_accumulate_cuda(gram, x, index, weight, **how)
    return gram


def band(gram: Tensor, n: int, i: int) -> Tensor:
    """Rows 128 i .. of G from column 128 i on, in f64; what a tile holds beyond n is an error if it is not zero."""
    side = -(-n // TILE)
    first = i * side - i * (i - 1) // 2
    rows = gram[first : first + side - i].transpose(0, 1).reshape(TILE, -1)
    high, wide = min(TILE, n - TILE * i), n - TILE * i
    assert not rows[high:].any() and not rows[:, wide:].any()
    return rows[:high, :wide].double()


def truth(x: Tensor, i: int, weight: Tensor | None = None) -> Tensor:
    """The same rows in float64, 8192 rows of x at a time."""
    n = x.shape[1]
    left, right = slice(TILE * i, min(TILE * (i + 1), n)), slice(TILE * i, n)
    total = torch.zeros(left.stop - left.start, n - TILE * i, dtype=torch.float64, device="cuda")
    for a in range(0, len(x), 8192):
        part = x[a : a + 8192]
        w = 1 if weight is None else weight[a : a + 8192, None].double()
        total += (part[:, left].double() * w).T @ part[:, right].double()
    return total


def off(gram: Tensor, x: Tensor, weight: Tensor | None = None) -> float:
    """Largest error relative to sqrt(G_ii G_jj), in the first, the middle and the last rows of tiles."""
    n, worst = x.shape[1], 0.0
    size = torch.zeros(n, dtype=torch.float64, device="cuda")
    for a in range(0, len(x), 8192):
        w = 1 if weight is None else weight[a : a + 8192, None].double().abs()
        size += (x[a : a + 8192].double().square() * w).sum(0)
    size = size.sqrt() + 1e-30
    for i in sorted({0, (n - 1) // TILE // 2, (n - 1) // TILE}):
        got, want = band(gram, n, i), truth(x, i, weight)
        error = (got - want).abs() / (size[TILE * i :][: len(want), None] * size[TILE * i :])
        worst = max(worst, float(error.nan_to_num(float("inf")).max()))
    return worst


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_every_size(rows: int, n: int):
    """Up to 130,000 x 17,408 elements: more than 2^31."""
    x = normal(rows, n, torch.bfloat16)
    assert off(gram_of(x), x) <= (2e-5 if rows <= 8192 else 3e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 7, 64, 65, 129, 431, 768, 3584])
def test_every_dtype_and_kernel(n: int, dtype: torch.dtype, isa: str | None):
    for rows in (1, 63, 64, 65, 127, 1000, 9000):
        x = normal(rows, n, dtype)
        # f32: both halves leave 2^-17 of a value, and the product of the lower ones is left out: 2^-16. Over many rows
        # these do not add up; in one row they do.
        most = 2**-15 if dtype == torch.float32 and rows == 1 else 2e-5
        assert off(gram_of(x, isa=isa), x) <= most, rows


@pytest.mark.parametrize("dtype", HALF)
def test_sums_of_one_sign(dtype: torch.dtype, isa: str | None):
    """Matrix units cut what a running sum cannot hold, always towards zero: the same sign, all in one direction."""
    for rows in (8192, 16384):
        x = normal(rows, 640, dtype).abs()
        assert off(gram_of(x, isa=isa), x) <= (2e-5 if rows == 8192 else 3e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [9, 431, 3584])
def test_small_integers_are_exact(n: int, dtype: torch.dtype, isa: str | None):
    for rows in (1, 127, 8192, 20000):
        x = integers(rows, n, dtype)
        gram = gram_of(x, isa=isa)
        for i in range(-(-n // TILE)):
            assert torch.equal(band(gram, n, i), truth(x, i)), (rows, i)


def test_it_adds(isa: str | None):
    x = integers(3000, 300, torch.bfloat16)
    gram = gram_of(x[:1024], isa=isa)
    native.gram_accumulate_cuda(gram, x[1024:], isa=isa)
    assert bits(gram) == bits(gram_of(x, isa=isa))
    before = gram.clone()
    native.gram_accumulate_cuda(gram, x[:0], isa=isa)
    native.gram_accumulate_cuda(gram, x, torch.zeros(0, dtype=torch.int64, device="cuda"), isa=isa)
    assert bits(gram) == bits(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [65, 768, 3584])
def test_twenty_runs_give_the_same_bits(n: int, dtype: torch.dtype, isa: str | None):
    x = normal(8192, n, dtype)
    first = gram_of(x, isa=isa)
    assert all(torch.equal(gram_of(x, isa=isa), first) for _ in range(20))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [64, 431, 768])
def test_rows_that_do_not_count_are_never_seen(n: int, dtype: torch.dtype, isa: str | None):
    """By an index or by weights of 0: the bits of the rows that stay, whatever the others hold."""
    for rows in (50, 3000, 20000):
        x = normal(rows, n, dtype)
        real = torch.rand(rows, generator=torch.Generator("cuda").manual_seed(3), device="cuda") < 0.7
        x[~real] = float("nan")
        alone, index = gram_of(x[real], isa=isa), real.nonzero().flatten()
        for kind in (torch.int32, torch.int64):
            assert torch.equal(gram_of(x, index.to(kind), isa=isa), alone)
        assert torch.equal(gram_of(x, None, real.float(), isa=isa), alone)
        assert torch.equal(gram_of(x, index, torch.ones(len(index), device="cuda"), isa=isa), alone)
        assert not gram_of(x, None, torch.zeros(rows, device="cuda"), isa=isa).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights(dtype: torch.dtype, isa: str | None):
    x = normal(5000, 300, dtype)
    gen = torch.Generator("cuda").manual_seed(4)
    weight = torch.randn(5000, generator=gen, device="cuda")
    weight[::3] = 0
    assert off(gram_of(x, None, weight, isa=isa), x, weight) <= 2e-5
    index = torch.randint(0, 5000, (777,), generator=gen, device="cuda")
    got = gram_of(x, index, weight[:777], isa=isa)
    assert off(got, x[index], weight[:777]) <= 2e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype: torch.dtype, isa: str | None):
    wide = normal(400, 700, dtype)
    views = (wide[:, 11:311], wide[:, 8:308], wide[::3, :300], wide[:1].expand(90, 700), wide.T[:300])
    for x in views:
        assert torch.equal(gram_of(x, isa=isa), gram_of(x.contiguous(), isa=isa))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_flagged(dtype: torch.dtype, bad: float, isa: str | None):
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    x = normal(900, 300, dtype)
    gram_of(x, nonfinite=flag, isa=isa)
    assert not flag.any()
    for row, column in ((0, 0), (899, 299), (500, 129)):
        spoiled = x.clone()
        spoiled[row, column] = bad
        flag.zero_()
        gram = gram_of(spoiled, nonfinite=flag, isa=isa)
        assert int(flag) == 1
        broken = ~torch.isfinite(gram_finalize(gram, 300))
        want = torch.zeros(300, dtype=torch.bool, device="cuda")
        want[column] = True
        assert torch.equal(broken, want | want[:, None]), "its row and its column, and nothing else"
        for tile in (gram[2], gram[4], gram[5]):
            assert not tile[:, 44:].any(), "what lies beyond n stays zero"


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_can_be_kept_out(dtype: torch.dtype):
    x, flag = normal(900, 300, dtype), torch.zeros(1, dtype=torch.int32, device="cuda")
    gram, ones = gram_of(x), torch.ones(900, device="cuda")
    before = gram.clone()
    for row, column in ((0, 0), (899, 299), (500, 129)):
        spoiled, others = x.clone(), torch.arange(900, device="cuda") != row
        spoiled[row, column] = float("nan")
        for index, weight in ((None, None), (None, ones), (torch.tensor([3, row], device="cuda"), None)):
            native.gram_accumulate_cuda(gram, spoiled, index, weight, nonfinite=flag.zero_(), keep=True)
            assert int(flag) == 1 and bits(gram) == bits(before)
        clean = before.clone()
        native.gram_accumulate_cuda(clean, spoiled, None, others.float(), nonfinite=flag.zero_(), keep=True)
        want = before.clone()
        native.gram_accumulate_cuda(want, x[others])
        assert int(flag) == 0 and bits(clean) == bits(want)
    ones[7] = float("inf")
    native.gram_accumulate_cuda(gram, x, None, ones, nonfinite=flag.zero_(), keep=True)
    assert int(flag) == 1 and bits(gram) == bits(before)


def test_an_index_outside_x_reads_nothing(isa: str | None):
    x = normal(10, 70, torch.bfloat16)
    for outside in (10, -1, 2**40):
        flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        gram = gram_of(x, torch.tensor([1, outside], device="cuda"), nonfinite=flag, isa=isa)
        assert int(flag) == 1 and torch.isnan(gram_diagonal(gram, 70)).all()


def test_no_temporary_of_the_size_of_the_matrix():
    n = 9216
    x, gram = normal(8192, n, torch.bfloat16), gram_zeros(n, device="cuda")
    real = torch.arange(0, 8192, 2, device="cuda")
    for most, rows in ((1 << 20, {}), (4096 * n * 2 + (1 << 20), {"row_index": real})):
        gram_accumulate_(gram, x, **rows)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gram_accumulate_(gram, x, **rows)
        assert torch.cuda.max_memory_allocated() - before <= most < 4 * n * n / 3


@pytest.mark.parametrize("how", ["all", "index", "weight"])
def test_a_graph_gives_the_same_bits_and_nothing_waits(how: str):
    x, gram = normal(3000, 700, torch.bfloat16), gram_zeros(700, device="cuda")
    real = torch.arange(3000, device="cuda") % 5 != 0
    rows: dict[str, Tensor] = {}
    if how == "index":
        rows = {"row_index": real.nonzero().flatten()}
    elif how == "weight":
        rows = {"row_weight": real.float()}
    gram_accumulate_(gram, x, **rows)
    want = gram.clone()
    graph = torch.cuda.CUDAGraph()
    with no_sync():
        gram_accumulate_(gram.zero_(), x, **rows)
    with torch.cuda.graph(graph):
        gram_accumulate_(gram, x, **rows)
    for _ in range(2):
        gram.zero_()
        graph.replay()
        assert torch.equal(gram, want)


def test_two_streams_at_once():
    x = normal(8192, 1504, torch.bfloat16)
    want, streams = gram_of(x), [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    grams = [gram_zeros(1504, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for stream, gram in zip(streams, grams, strict=True):
        with torch.cuda.stream(stream):
            for _ in range(3):
                native.gram_accumulate_cuda(gram.zero_(), x)
    torch.cuda.synchronize()
    assert all(torch.equal(gram, want) for gram in grams)


def test_a_gram_that_is_not_aligned_takes_torch():
    x = integers(100, 70, torch.bfloat16)
    gram = torch.zeros(TILE * TILE + 1, device="cuda")[1:].view(1, TILE, TILE)
    assert gram.data_ptr() % 16
    assert torch.equal(gram_finalize(gram_accumulate_(gram, x), 70), gram_finalize(gram_of(x), 70))


def test_float64_and_its_weights_take_torch():
    x = normal(100, 70, torch.float32)
    wide = gram_accumulate_(gram_zeros(70, device="cuda", dtype=torch.float64), x.double())
    assert torch.allclose(gram_finalize(wide, 70), x.double().T @ x.double(), rtol=1e-12)
