"""Token embedding: gather rows, and the deterministic scatter of their gradients.

Maths
    forward     y[n]  = w[ids[n]]
    backward    dw[v] = Σ_{n: ids[n] = v} dy[n]          (`=` or `+=`)

| tensor | shape | dtype |
|---|---|---|
| ids | [N] | int32 or int64, each in [0, V) |
| w | [V, H] | working: bf16, f16, f32, f64 |
| y, dy | [N, H] | working |
| dw | [V, H] | f32 (f64 for f64) |

Precision and order: dy is added in f32 (f64 for f64), in the order of n on the CPU. On CUDA the ids are sorted, stably,
and one program sums the tokens of an id in the order of n, a few at a time: no atomics, so the same inputs give the
same bits, and nothing waits for the device. Rows of dw that no id names get 0 (`=`) or stay (`+=`). Padding tokens are
gathered like any other, and their gradient counts; they add nothing when dy is 0 there.
An id outside [0, V) is an IndexError on the CPU, before anything is written. On CUDA, where the host reads no ids, it
is a device-side assertion in the forward; the backward trusts ids that went through the forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortiq_kernels.ops import checks
from cortiq_kernels.ops.triton_gate import launching_on, use_triton


def embedding_ref(ids: Tensor, weight: Tensor) -> Tensor:
    """weight[ids]. [N], [V, H] -> [N, H]."""
    return weight[ids.long()]


def embedding_fwd(ids: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """y = weight[ids]. [N], [V, H] -> [N, H]; `out` is written with `=`, None allocates."""
    op = "embedding_fwd"
    _check_ids(op, ids)
    checks.shape(op, "weight", weight, (None, None), "[V, H]", "one row a token id")
    checks.dtype(op, "weight", weight, checks.FLOATS, "convert it with .to()")
    checks.same_device(op, "ids", ids, "weight", weight)
    out = checks.output(op, "out", out, (ids.shape[0], weight.shape[1]), weight.dtype, weight)
    checks.apart(op, "out", out, (("weight", weight),))
    _check_range(op, ids, weight.shape[0])
    return torch.index_select(weight, 0, ids, out=out)


def embedding_bwd(
    dy: Tensor, ids: Tensor, *, out: Tensor, accumulate: bool = False, backend: str = "auto"
) -> Tensor:
    """out[v] `=` (or `+=` with `accumulate`) the sum of dy[n] over ids[n] = v.

    dy [N, H] working dtype, ids [N], out [V, H] in the accumulation dtype. backend: "auto" (Triton for CUDA tensors
    below float64 whose rows have no gaps), "triton" or "torch".
    """
    op = "embedding_bwd"
    _check_ids(op, ids)
    checks.shape(op, "dy", dy, (ids.shape[0], None), f"[{ids.shape[0]}, H]", "one row a token")
    checks.dtype(op, "dy", dy, checks.FLOATS, "convert it with .to()")
    checks.same_device(op, "ids", ids, "dy", dy)
    acc = checks.acc_dtype(dy.dtype)
    checks.shape(op, "out", out, (None, dy.shape[1]), f"[V, {dy.shape[1]}]", "it is the gradient of the whole table")
    checks.dtype(op, "out", out, (acc,), "gradients of weights are held in the accumulation dtype")
    checks.same_device(op, "out", out, "dy", dy)
    checks.writable(op, "out", out)
    checks.apart(op, "out", out, (("dy", dy),))
    _check_range(op, ids, out.shape[0])
    if not accumulate:
        out.zero_()
    gaps = any(t.shape[1] > 1 and t.stride(1) != 1 for t in (dy, out))
    if use_triton(op, dy, backend, "the elements of a row do not lie beside one another" if gaps else ""):
        from cortiq_kernels.ops import rows_triton

        ordered = ids.to(torch.int32).sort(stable=True)  # half the passes of int64
        with launching_on(dy):
            rows_triton.sum_by_id(dy, ordered.values, ordered.indices, out, accumulate)
        return out
    if dy.is_cuda:
        # index_put_ sorts the ids; index_add_ and scatter_add_ would use atomics.
        return out.index_put_((ids.long(),), dy.to(acc), accumulate=True)
    # The other way round on the CPU: index_add_ walks the ids in order, index_put_ splits them over threads.
    return out.index_add_(0, ids, dy.to(acc))


def _check_ids(op: str, ids: Tensor) -> None:
    checks.shape(op, "ids", ids, (None,), "[N]", "flatten batch and time into one dimension first")
    checks.dtype(op, "ids", ids, checks.INTS, "convert them with .to(torch.int64)")


def _check_range(op: str, ids: Tensor, vocab: int) -> None:
    """Every id names a row of the table. Only on the CPU, where reading them waits for nothing."""
    if ids.device.type != "cpu" or ids.numel() == 0:
        return
    low, high = (int(t) for t in ids.aminmax())
    if low < 0 or high >= vocab:
        got = low if low < 0 else high
        raise IndexError(f"{op}: ids must be in [0, {vocab}); got {got}; is it the tokenizer of this model?")
