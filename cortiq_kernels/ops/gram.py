"""Gram matrix of activations, summed over many calls: G += sum_r w_r · x_rᵀ x_r.

Maths
    G_jk  +=  sum over the rows r of row_index of  row_weight_r · x_rj · x_rk        (all rows, weight 1, by default)

G is symmetric, so only the upper triangle is kept, as 128 x 128 tiles, row-major. With nt = ceil(n / 128) tiles a side,
tile (i, j), i <= j, holds G[128 i : 128 i + 128, 128 j : 128 j + 128] and is number

    i * nt - i * (i - 1) / 2 + (j - i)

of nt * (nt + 1) / 2. Tiles on the diagonal are whole (their lower half is computed, and not read); beyond row or column
n a tile holds zeros. Files, CPU and GPU share this layout.

| tensor | shape | dtype |
|---|---|---|
| gram | [tiles, 128, 128] (`gram_tiles(n)`), contiguous | f32, or f64 |
| x | [T, n] | bf16, f16, f32, f64 |
| row_index | [R] rows of x, each in [0, T); may repeat | i32, i64 |
| row_weight | [R], or [T] without row_index | f32, f64 |

Backends: the native module (csrc/gram_cpu.cpp, gram_cuda.cu), where it is built for the device and all is f32 or less;
else torch.

Precision: on a CPU the native module sums 128 rows in f32 and these sums in f64, torch up to 4096 rows in f64; on a GPU
the native module and torch sum up to 4096 rows in the matrix units' f32. What comes of it is added to `gram`
with one rounding. On a GPU f32 values, and weights that are not all 0 or 1, enter as sums of two bf16 numbers, which
keep 16 bits; torch's products keep them whole. Nothing is summed in 16 bit, and no sum of a matrix unit runs on from
call to call: that loses half a percent over millions of rows. The order is fixed, so two runs give the same bits;
cutting the same rows into other calls changes the last bits only. Small integers come out exact.
`gram` is `+=`, always. Rows that row_index leaves out are never read, and rows of weight 0 enter as zeros, whatever
either holds (NaN too). A NaN or infinity in a row that counts makes its row and column of G not finite. T = 0 or R = 0
leaves `gram` as it is. An index outside x is an IndexError, and makes `gram` NaN in a GPU's kernels. No temporary has
n² elements: torch's products are made 512 columns of x at a time, the native module copies at most 8192 rows of x on a
GPU and 128 MiB of them on a CPU. Nothing waits for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortiq_kernels import native
from cortiq_kernels.ops import checks
from cortiq_kernels.ops.triton_gate import say_once

TILE = 128
_ROWS = 4096  # of x in one product
_PANEL = 4  # rows of tiles in one product
_HALF = (torch.bfloat16, torch.float16)


def gram_tiles(n: int) -> int:
    """Number of tiles of the upper triangle of an n x n Gram."""
    side = -(-n // TILE)
    return side * (side + 1) // 2


def gram_zeros(n: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """An empty Gram of n neurons: zeros [tiles, 128, 128]."""
    return torch.zeros(gram_tiles(n), TILE, TILE, dtype=dtype, device=device)


def gram_ref(x: Tensor, *, row_index: Tensor | None = None, row_weight: Tensor | None = None) -> Tensor:
    """The whole symmetric G [n, n] of one call, in the dtype of x."""
    x, w = _counted(x, row_index, row_weight)
    return x.T @ (x if w is None else x * w[:, None].to(x.dtype))


def gram_accumulate_(
    gram: Tensor, x: Tensor, *, row_index: Tensor | None = None, row_weight: Tensor | None = None
) -> Tensor:
    """gram += the Gram of x, as the module says; returns `gram`.

    Raises ValueError when shapes, dtypes or devices do not fit, or `gram` is not contiguous.
    """
    _check(gram, x, row_index, row_weight)
    if _native_takes(gram, x, row_weight):
        run = native.gram_accumulate_cuda if x.is_cuda else native.gram_accumulate_cpu
        run(gram, x, row_index, row_weight)
        return gram
    rows = x.shape[0] if row_index is None else row_index.shape[0]
    for a in range(0, rows, _ROWS):
        part = slice(a, min(a + _ROWS, rows))
        index = None if row_index is None else row_index[part]
        weight = None if row_weight is None else row_weight[part]
        _add(gram, *_counted(x[part] if index is None else x, index, weight))
    return gram


def gram_finalize(gram: Tensor, n: int) -> Tensor:
    """The whole matrix G [n, n] in the dtype of `gram`, exactly symmetric."""
    _check_gram("gram_finalize", gram, n)
    out = torch.empty(n, n, dtype=gram.dtype, device=gram.device)
    side, at = -(-n // TILE), 0
    for i in range(side):
        a, b = i * TILE, min((i + 1) * TILE, n)
        rows = gram[at : at + side - i, : b - a].transpose(0, 1).reshape(b - a, -1)[:, : n - a]
        upper = rows[:, : b - a].triu()
        out[a:b, a:b] = upper + upper.triu(1).T
        out[a:b, b:] = rows[:, b - a :]
        out[b:, a:b] = rows[:, b - a :].T
        at += side - i
    return out


def gram_diagonal(gram: Tensor, n: int) -> Tensor:
    """The diagonal of G, sums of squares [n], in the dtype of `gram`."""
    _check_gram("gram_diagonal", gram, n)
    side = -(-n // TILE)
    first = [i * side - i * (i - 1) // 2 for i in range(side)]
    return gram[first].diagonal(dim1=1, dim2=2).reshape(-1)[:n].clone()


def _native_takes(gram: Tensor, x: Tensor, row_weight: Tensor | None) -> bool:
    small = gram.dtype == torch.float32 and x.dtype in native.DTYPES
    small = small and (row_weight is None or row_weight.dtype == torch.float32)
    if not small or not (x.is_cuda or x.is_cpu):
        return False
    if not x.is_cuda:
        return native.missing() is None
    why = native.cuda_missing(x.device.index)
    if why is None and gram.data_ptr() % 16:
        why = "gram does not begin at a multiple of 16 bytes"
    if why:
        say_once("gram_accumulate_", why)
    return not why


def _counted(x: Tensor, row_index: Tensor | None, row_weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The rows that count, those of weight 0 as zeros, and their weights."""
    if row_index is not None:
        x = x.index_select(0, row_index)
    if row_weight is not None:
        x = torch.where(row_weight[:, None] == 0, torch.zeros((), dtype=x.dtype, device=x.device), x)
    return x, row_weight


def _add(gram: Tensor, x: Tensor, weight: Tensor | None) -> None:
    """gram += xᵀ · diag(weight) · x for at most `_ROWS` rows.

    This is the seam of the backends: a kernel for a device takes over here, with these arguments.
    """
    inside = torch.float64 if not x.is_cuda or x.dtype == torch.float64 else torch.float32
    fused = x.is_cuda and x.dtype in _HALF and weight is None  # 16-bit operands whose products leave in f32
    if not fused:
        x = x.to(inside)
    left = x if weight is None else x * weight[:, None].to(inside)
    n = x.shape[1]
    side = -(-n // TILE)
    at = 0  # the tile (i, i) of the row of tiles i
    for i in range(0, side, _PANEL):
        columns = slice(i * TILE, min((i + _PANEL) * TILE, n))
        a, b = left[:, columns].t(), x[:, columns.start :]
        block = torch.mm(a, b, out_dtype=torch.float32) if fused else torch.mm(a, b)
        for start in range(0, columns.stop - columns.start, TILE):
            row = block[start : start + TILE, start:]  # [<= 128, n - 128 i]
            high, wide = row.shape
            whole, rest = divmod(wide, TILE)
            if whole:
                tiles = row[:, : whole * TILE].unflatten(1, (whole, TILE)).transpose(0, 1)
                gram[at : at + whole, :high].add_(tiles)
            if rest:
                gram[at + whole, :high, :rest].add_(row[:, whole * TILE :])
            at += -(-wide // TILE)


def _check(gram: Tensor, x: Tensor, row_index: Tensor | None, row_weight: Tensor | None) -> None:
    op = "gram_accumulate_"
    checks.shape(op, "x", x, (None, None), "[T, n]", "flatten batch and time into rows")
    checks.dtype(op, "x", x, checks.FLOATS, "convert it with .to()")
    _check_gram(op, gram, x.shape[1])
    checks.same_device(op, "gram", gram, "x", x)
    rows = x.shape[0]
    if row_index is not None:
        checks.shape(op, "row_index", row_index, (None,), "[R]", "give the numbers of the rows that count")
        checks.dtype(op, "row_index", row_index, checks.INTS, "convert it with .to()")
        checks.same_device(op, "row_index", row_index, "x", x)
        rows = row_index.shape[0]
    if row_weight is not None:
        checks.shape(op, "row_weight", row_weight, (rows,), f"[{rows}]", "one weight for each row that counts")
        checks.dtype(op, "row_weight", row_weight, (torch.float32, torch.float64), "convert it with .to()")
        checks.same_device(op, "row_weight", row_weight, "x", x)


def _check_gram(op: str, gram: Tensor, n: int) -> None:
    sizes = (gram_tiles(n), TILE, TILE)
    checks.shape(op, "gram", gram, sizes, f"{list(sizes)} for n = {n}", "make it with gram_zeros(n)")
    checks.dtype(op, "gram", gram, (torch.float32, torch.float64), "make it with gram_zeros(n)")
    if not gram.is_contiguous():
        checks.fail(op, "gram", "contiguous", f"strides {gram.stride()}", "make it with gram_zeros(n)")
