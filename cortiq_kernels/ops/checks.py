"""Argument checks that the ops share: one clear error before any work, nothing else.

Every message reads `op: what must be expected; got this; how to fix it`. Messages are built only when a check
fails, because the step makes dozens of these calls a layer. Nothing here reads a tensor's values, so nothing waits
for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a working dtype accumulates in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fail(op: str, what: str, expected: str, got: object, fix: str) -> NoReturn:
    """Raise the ValueError that every check raises."""
    raise ValueError(f"{op}: {what} must be {expected}; got {got}; {fix}")


def shape(op: str, name: str, t: Tensor, sizes: Sequence[int | None], expected: str, fix: str) -> None:
    """`t` has these sizes; None accepts any size of that dimension."""
    if t.dim() != len(sizes) or any(s is not None and s != got for s, got in zip(sizes, t.shape, strict=True)):
        fail(op, name, expected, tuple(t.shape), fix)


def same_shape(op: str, name: str, t: Tensor, like_name: str, like: Tensor, fix: str) -> None:
    """`t` has the shape of `like`."""
    if t.shape != like.shape:
        fail(op, name, f"the shape of {like_name}, {tuple(like.shape)}", tuple(t.shape), fix)


def dtype(op: str, name: str, t: Tensor, allowed: Sequence[torch.dtype], fix: str) -> None:
    """`t` has one of these dtypes."""
    if t.dtype not in allowed:
        fail(op, name, " or ".join(str(d).removeprefix("torch.") for d in allowed), t.dtype, fix)


def alike(op: str, name: str, t: Tensor, like_name: str, like: Tensor) -> None:
    """`t` has the dtype of `like` and lies on its device."""
    if t.dtype != like.dtype:
        fail(op, name, f"the dtype of {like_name}, {like.dtype}", t.dtype, f"convert {name} with .to({like.dtype})")
    same_device(op, name, t, like_name, like)


def same_device(op: str, name: str, t: Tensor, like_name: str, like: Tensor) -> None:
    """`t` lies on the device of `like`."""
    if t.device != like.device:
        fail(op, name, f"on {like_name}'s device, {like.device}", t.device, f"move {name} there with .to()")


def vector(op: str, name: str, t: Tensor, size: int, like_name: str, like: Tensor) -> None:
    """`t` is a vector of `size` in the accumulation dtype of `like`, on its device."""
    shape(op, name, t, (size,), f"[{size}]", f"it goes with {like_name} {tuple(like.shape)}")
    dtype(op, name, t, (acc_dtype(like.dtype),), "vectors are held in the accumulation dtype; convert with .to()")
    same_device(op, name, t, like_name, like)


def writable(op: str, name: str, out: Tensor) -> None:
    """`out` has a memory cell of its own for every element: an expanded tensor cannot be written."""
    if out.numel() and any(step == 0 and size > 1 for size, step in zip(out.shape, out.stride(), strict=True)):
        fix = f"allocate {name} in full; an expanded tensor can only be read"
        fail(op, name, "a tensor whose elements do not share memory", f"strides {out.stride()}", fix)


def apart(op: str, name: str, out: Tensor, inputs: Sequence[tuple[str, Tensor]]) -> None:
    """`out` does not begin in the memory of an input, which would be overwritten while it is read."""
    for like_name, like in inputs:
        if out.numel() and like.numel() and out.data_ptr() == like.data_ptr():
            fail(op, name, f"apart from {like_name}", f"the memory of {like_name}", f"pass another {name}, or none")


def output(
    op: str,
    name: str,
    out: Tensor | None,
    sizes: Sequence[int],
    out_dtype: torch.dtype,
    like: Tensor,
    *,
    accumulate: bool = False,
) -> Tensor:
    """The output tensor: `out` when it fits, a new uninitialised one when it is None.

    With `accumulate` there must be a tensor to add to.
    """
    if out is None:
        if accumulate:
            fail(op, name, "given with accumulate=True", None, f"pass the tensor to add to as {name}=")
        return like.new_empty(tuple(sizes), dtype=out_dtype)
    fix = f"allocate {name} with this shape and dtype, or leave it out"
    shape(op, name, out, tuple(sizes), str(list(sizes)), fix)
    dtype(op, name, out, (out_dtype,), fix)
    same_device(op, name, out, "the input", like)
    writable(op, name, out)
    return out
