"""The same work by other means: plain PyTorch, torch.compile, and kernels by other people.

A peer is built when it is asked for. One that is not installed, refuses the shape or fails is a reported result and no
error of the run. Peers go through autograd, so their backward is only timed together with a forward.

Traps that were met with them:
- FLA's public chunk_gated_delta_rule runs FlashQLA's kernels once flash-qla is installed (FLA_FLASH_QLA=0 gives FLA's
  own), and FlashQLA compiles for 60 to 90 s on the first call of a head shape.
- FLA's gated backward refuses Triton 3.4 to 3.7.0 on Hopper.
- Liger's SwiGLU backward overwrites the inputs it saved.
- Liger's linear cross entropy and cut-cross-entropy take one target a row (K = 1): less work than a top-k target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench.registry import Calls, Inputs, Op, Results, Sizes
from bench.verify import cast, differentiate

Forward = Callable[[Inputs, Sizes], Results]


def builders(op: Op) -> dict[str, Callable[[Inputs, Sizes], Calls]]:
    """All peers of an op: torch eager and torch.compile of its plain forward, then the entry's own."""
    found: dict[str, Callable[[Inputs, Sizes], Calls]] = {}
    if op.eager is not False:
        forward: Forward = op.reference if op.eager is None else op.eager  # type: ignore[assignment]
        found["torch eager"] = lambda inputs, sizes: through_entry(op, forward, inputs, sizes)
        found["torch.compile"] = lambda inputs, sizes: through_entry(
            op, torch.compile(forward, dynamic=False), inputs, sizes
        )
    return found | dict(op.peers)


def through_entry(op: Op, forward: Forward, inputs: Inputs, sizes: Sizes) -> Calls:
    """fwd, and fwd+bwd to the gradients that the entry names, of a plain forward in the working dtype."""
    own = cast(inputs, None)

    def fwd() -> Results:
        with torch.no_grad():
            return forward(own, sizes)

    if not op.grads:
        return {"fwd": fwd}
    return {"fwd": fwd, "fwd+bwd": lambda: differentiate(op, own, sizes, forward)}


def through_autograd(forward: Callable[..., Tensor], inputs: Sequence[Tensor], dout: Tensor) -> Calls:
    """fwd, and fwd+bwd to every one of `inputs`, of a function with its own autograd."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]

    def fwd() -> Results:
        with torch.no_grad():
            return {"out": forward(*leaves)}

    def fwd_bwd() -> Results:
        out = forward(*leaves)
        grads = torch.autograd.grad(out, leaves, dout, allow_unused=True)
        return {str(i): g for i, g in enumerate(grads) if g is not None}

    return {"fwd": fwd, "fwd+bwd": fwd_bwd}
