"""The native module `cortiq_kernels._C` (csrc/): whether it is there, why not, and its functions over tensors.

It is loaded when it is first asked for. Its ops have a torch path, so a missing module is no error here; `missing()`
says why, in words that `cortiq env` prints.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

INTERFACE = 2  # of csrc/bindings.cpp
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NOTE = Path(__file__).with_name("_C_missing.txt")  # left by setup.py where it built nothing


def missing() -> str | None:
    """None when the native module can be used, else why not."""
    return _load()[1]


def describe() -> str:
    """The native module in words, or why there is none."""
    module, why = _load()
    if module is None:
        return str(why)
    return f"built for the CPU ({', '.join(isas())}){' and CUDA' if module.CUDA else ', without CUDA kernels'}"


@functools.cache
def cuda_missing(device: int) -> str | None:
    """None when the module's CUDA kernels run on this GPU, else why not."""
    module, why = _load()
    if module is None:
        return f"no native module: {why}"
    if not module.CUDA:
        return "the native module is built without CUDA kernels (nvcc, its headers and libcudart_static build them)"
    try:
        with torch.accelerator.device_index(device):
            module.gram_cuda_kernel(device)
    except RuntimeError as e:
        return f"its kernels do not run on this GPU ({e})"
    return None


def isas() -> tuple[str, ...]:
    """Instruction sets it can use on this processor, best first: of "avx512", "avx2" and "plain"; () without it."""
    module, _ = _load()
    return tuple(module.isas()) if module else ()


def gram_accumulate_cpu(
    gram: Tensor,
    x: Tensor,
    row_index: Tensor | None = None,
    row_weight: Tensor | None = None,
    *,
    keep: bool = False,
    threads: int | None = None,
    isa: str | None = None,
) -> bool:
    """gram += X^T diag(w) X on packed tiles of the upper triangle, on the CPU; True when everything was finite.

    | tensor       | shape               | dtype              |                                                   |
    |--------------|---------------------|--------------------|---------------------------------------------------|
    | `gram`       | `[tiles, 128, 128]` | f32, contiguous    | `+=`                                              |
    | `x`          | `[T, n]`            | f32, bf16, f16     | a row stride of its own; columns apart are copied |
    | `row_index`  | `[R]`               | int32, int64       | which rows of x enter, repeats and all; None: all |
    | `row_weight` | `[R]` or `[T]`      | float, bool or int | of each row that enters, taken in f32; None: 1    |

    With nt = ceil(n / 128), tile (i, j), i <= j, is number i·nt - i(i-1)/2 + (j-i). A diagonal tile holds both halves,
    equal bit for bit; what lies beyond n in an edge tile stays as it is (zero). A row of weight 0 is not read, so what
    it holds never enters.

    Sums are f32 within 128 rows, f64 from there to the end of the call (or of 128 MiB of rows in f32, the most that is
    copied at a time), and rounded once into `gram`. The bits do not depend on `threads` (default: torch's), nor on
    whether rows are picked by weights of 0 and 1, by an index, or lie alone; avx2 and avx512 give the same, "plain"
    others.

    False when `gram` now holds a NaN or an infinity: from x, from a weight, from a sum beyond float32, or from before.
    With `keep`, x and the weights are looked at first, and where they are not finite `gram` stays as it was: False too.

    The caller checks shapes, dtypes and devices. Raises RuntimeError without the native module (ask `missing()`),
    IndexError for an index outside x, ValueError for an instruction set that is not in `isas()`.
    """
    module, why = _load()
    if module is None:
        raise RuntimeError(f"native module: got none: {why}")
    x, row_index, row_weight = _as_read(x, row_index, row_weight)
    status = module.gram_accumulate(
        gram.data_ptr(),
        x.data_ptr(),
        DTYPES[x.dtype],
        *x.shape,
        x.stride(0),
        # An empty tensor's address may be null, which would mean "no index": any other does, as nothing is read there.
        0 if row_index is None else row_index.data_ptr() or gram.data_ptr(),
        0 if row_index is None else len(row_index),
        0 if row_weight is None else row_weight.data_ptr(),
        keep,
        threads or torch.get_num_threads(),
        isa or "",
    )
    if status == 3:
        raise IndexError(f"gram: row_index must be in 0 .. {len(x) - 1}; got others; index the rows of x")
    if status == 4:
        raise ValueError(f"gram: isa must be one of {', '.join(isas())}; got {isa!r}; leave it out for the best")
    return status == 0


def gram_accumulate_cuda(
    gram: Tensor,
    x: Tensor,
    row_index: Tensor | None = None,
    row_weight: Tensor | None = None,
    *,
    nonfinite: Tensor | None = None,
    keep: bool = False,
    isa: str | None = None,
) -> None:
    """gram += X^T diag(w) X as `gram_accumulate_cpu`, on the GPU that holds all of them; nothing waits for it.

    Tensors as there, `gram` from a multiple of 16 bytes on, and `nonfinite` [1] int32, which becomes 1 when what is
    added is not finite, and else stays. With `keep`, x and the weights are looked at first (one more read of x), and
    where they are not finite `gram` stays as it was. A row_index outside x reads nothing and makes `gram` NaN, with
    `keep` leaves it. A CUDA graph may capture it, after a first call that is none of it.

    Sums are f32 in the matrix units over at most 4096 rows, then rounded into `gram`; f32 x, and weights that are not
    all 0 or 1, enter as sums of two bf16 numbers, in three products: to 2^-15 of each x_rj x_rk. The bits are the same
    in every call on one kind of GPU, and the same for rows that are picked by weights of 0 and 1, by an index, or lie
    alone. It takes 16 KB of memory, and up to 8192 rows of n 16-bit numbers where x is not read in place: f32, a
    row_index, a row_weight, or rows that do not begin at multiples of 16 bytes.

    `isa`: "mma.sync" instead of "wgmma", which a Hopper takes. Raises RuntimeError where `cuda_missing(device)` has a
    reason, and for what CUDA refuses.
    """
    module, _ = _load()
    index = x.device.index
    if module is None or (why := cuda_missing(index)):
        raise RuntimeError(f"gram: expected CUDA kernels; got none: {why if module else missing()}")
    x, row_index, row_weight = _as_read(x, row_index, row_weight)
    if not (x.numel() if row_index is None else row_index.numel()):
        return
    arguments = (
        x.data_ptr(),
        DTYPES[x.dtype],
        *x.shape,
        x.stride(0),
        0 if row_index is None else row_index.data_ptr(),
        0 if row_index is None else len(row_index),
        0 if row_weight is None else row_weight.data_ptr(),
    )
    workspace = torch.empty(module.gram_cuda_workspace(*arguments), dtype=torch.uint8, device=x.device)
    flag = 0 if nonfinite is None else nonfinite.data_ptr()
    stream = torch._C._cuda_getCurrentRawStream(index)
    with torch.accelerator.device_index(index):
        module.gram_cuda(*arguments, gram.data_ptr(), workspace.data_ptr(), flag, keep, index, stream, isa or "")


def _as_read(
    x: Tensor, row_index: Tensor | None, row_weight: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The three as the module reads them: rows of adjacent elements, int64, float32."""
    if x.stride(1) != 1 and x.shape[1] > 1:
        x = x.contiguous()
    if row_index is not None:
        row_index = row_index.to(torch.int64).contiguous()
    if row_weight is not None:
        row_weight = row_weight.to(torch.float32).contiguous()
    return x, row_index, row_weight


@functools.cache
def _load() -> tuple[ModuleType | None, str | None]:
    """The module, or why it cannot be used."""
    try:
        module = importlib.import_module("cortiq_kernels._C")
    except ImportError as e:
        if not (isinstance(e, ModuleNotFoundError) and e.name == "cortiq_kernels._C"):
            return None, f"it cannot be loaded ({e}); build it again with `pip install .`"
        try:
            return None, f"the build left it out: {NOTE.read_text(encoding='utf-8').strip()}"
        except OSError:
            return None, "it has not been built; `pip install -e .` in the source tree builds it"
    if (found := getattr(module, "INTERFACE", None)) != INTERFACE:
        return None, f"it was built from other sources (interface {found}, not {INTERFACE}); build it again"
    return module, None
