"""The head loss and the teacher's top-k as PyTorch operators, for code that uses autograd or torch.compile.

    torch.ops.cortiq.topk_softmax(logits, k, valid_vocab, return_lse) -> (ids, probs, lse, mass)
    torch.ops.cortiq.head_topk_kl(hidden, head_weight, topk_ids, topk_probs, row_weight, temperature, softcap, tail,
                                  need_dhead, need_dhidden) -> (loss, total, dhidden, dhead)

Importing this module registers them; nothing else in the package imports it, and the package's own training step calls
the plain functions. Call `topk_softmax` and `head_topk_kl_loss` below: they choose what to compute and refuse what has
no gradient. Formulas, shapes and dtypes are those of ops/topk.py and ops/topk_kl.py.

Under torch.compile each operator is one opaque call: no graph break, nothing of it is fused with its surroundings.

The head operator computes its gradients in the forward, for an incoming gradient of 1, and the backward multiplies them
by the incoming gradient g of `total`:
    dhidden = g·Σ_r w_r·∂loss_r/∂hidden,  dhead likewise;  nothing flows from `loss`, which is for display
so the logits [N, V] never exist at once, neither in the forward nor in the backward. What is kept in between is dhidden
[N, H] in the working dtype and dhead [V, H] in f32 (f64 for f64), each only if it is asked for: the other is an empty
[0, H]. The backward leaves both as they are, so it may run again with retain_graph. A gradient of the gradient is an
error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cortiq_kernels.ops import checks, topk
from cortiq_kernels.ops.topk_kl import head_topk_kl_fwd_bwd


def topk_softmax(logits: Tensor, k: int, *, valid_vocab: int | None = None, return_lse: bool = False) -> topk.TopK:
    """Top-k ids [n, k] int32 and renormalised probabilities [n, k] f32 of every row of logits [n, V].

    `ops.topk.topk_softmax` as one operator: exact, by (value descending, id ascending), columns at and past valid_vocab
    (default V) do not exist, lse and mass [n] f32 are None unless `return_lse`. No gradient: logits count as detached,
    so a teacher needs no torch.no_grad() for its targets. Errors as there.
    """
    ids, probs, lse, mass = torch.ops.cortiq.topk_softmax(logits.detach(), k, valid_vocab, return_lse)
    return topk.TopK(ids, probs, lse, mass) if return_lse else topk.TopK(ids, probs, None, None)


def head_topk_kl_loss(
    hidden: Tensor,
    head_weight: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    row_weight: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float = 0.0,
    tail: bool = False,
) -> tuple[Tensor, Tensor]:
    """(total 0-d f64, loss [N]): KL(top-k targets ‖ softmax(hidden·head_weightᵀ)); differentiate `total`.

        loss_r = Σ_v t_v·(log t_v − log q_v),  total = Σ_r row_weight_r·loss_r

    | tensor | shape | dtype |
    |---|---|---|
    | hidden | [N, H] | bf16, f16, f32, f64; any strides |
    | head_weight | [V, H] | that of hidden |
    | topk_ids | [N, K] | int32 or int64; −1 is an empty slot |
    | topk_probs | [N, K] | f32 or f64 |
    | row_weight | [N] | f32 or f64; 0 leaves the row out, 1/N everywhere is the mean |
    | total | 0-d | f64 |
    | loss | [N] | f32 (f64 for f64) |

    Gradients, in the dtype of what they belong to: total.backward() gives hidden.grad and head_weight.grad, where these
    require one, times the incoming gradient. They are computed here, in the forward, and only under enabled gradients.
    `loss` has none (requires_grad is False: summing or weighing it yourself trains nothing), because row weights must
    be known before the gradient of the head is summed: put them in row_weight. Probabilities and weights that
    require a gradient are refused.

    In f16 the gradient is rounded before the incoming gradient multiplies it, so a loss scale (GradScaler) arrives too
    late against underflow: put it in row_weight, or use bf16. temperature, softcap and tail bend the loss as in
    ops/topk_kl.py. For a vocabulary padded beyond the tokenizer's pass head_weight[:valid]. ValueError: shapes, dtypes
    and devices that do not fit.
    """
    for name, t in (("topk_probs", topk_probs), ("row_weight", row_weight)):
        if t.requires_grad:
            checks.fail("head_topk_kl_loss", name, "without requires_grad", "a tensor that requires it", "detach() it")
    grad = torch.is_grad_enabled()
    loss, total, _, _ = torch.ops.cortiq.head_topk_kl(
        hidden, head_weight, topk_ids, topk_probs, row_weight, temperature, softcap, tail,
        need_dhead=grad and head_weight.requires_grad, need_dhidden=grad and hidden.requires_grad,
    )  # fmt: skip
    return total, loss


@torch.library.custom_op(
    "cortiq::topk_softmax",
    mutates_args=(),
    schema="(Tensor logits, SymInt k, SymInt? valid_vocab=None, bool return_lse=False)"
    " -> (Tensor ids, Tensor probs, Tensor lse, Tensor mass)",
)
def _topk(
    logits: Tensor, k: int, valid_vocab: int | None = None, return_lse: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operator behind `topk_softmax`; without return_lse, lse and mass are empty [0]."""
    ids, probs, lse, mass = topk.topk_softmax(logits, k, valid_vocab=valid_vocab, return_lse=return_lse)
    if lse is None or mass is None:
        # Two tensors, because an operator may not return the same memory twice.
        lse, mass = (logits.new_empty((0,), dtype=torch.float32) for _ in range(2))
    return ids, probs, lse, mass


@_topk.register_fake
def _(
    logits: Tensor, k: int, valid_vocab: int | None = None, return_lse: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = logits.shape[0]
    ids = logits.new_empty((n, k), dtype=torch.int32)
    probs = logits.new_empty((n, k), dtype=torch.float32)
    lse, mass = (logits.new_empty((n if return_lse else 0,), dtype=torch.float32) for _ in range(2))
    return ids, probs, lse, mass


@torch.library.custom_op(
    "cortiq::head_topk_kl",
    mutates_args=(),
    schema="(Tensor hidden, Tensor head_weight, Tensor topk_ids, Tensor topk_probs, Tensor row_weight,"
    " float temperature=1.0, float softcap=0.0, bool tail=False, bool need_dhead=True, bool need_dhidden=True)"
    " -> (Tensor loss, Tensor total, Tensor dhidden, Tensor dhead)",
)
def _head(
    hidden: Tensor,
    head_weight: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    row_weight: Tensor,
    temperature: float = 1.0,
    softcap: float = 0.0,
    tail: bool = False,
    need_dhead: bool = True,
    need_dhidden: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operator behind `head_topk_kl_loss`; a gradient that is not needed is an empty [0, H]."""
    dhidden, dhead = _gradients(hidden, head_weight, need_dhead, need_dhidden)
    loss, total = head_topk_kl_fwd_bwd(
        hidden, head_weight, topk_ids, topk_probs, row_weight,
        dhidden=dhidden if need_dhidden else None, dhead=dhead if need_dhead else None,
        need_grad=need_dhead or need_dhidden, temperature=temperature, softcap=softcap, tail=tail,
    )  # fmt: skip
    return loss, total, dhidden, dhead


@_head.register_fake
def _(
    hidden: Tensor,
    head_weight: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    row_weight: Tensor,
    temperature: float = 1.0,
    softcap: float = 0.0,
    tail: bool = False,
    need_dhead: bool = True,
    need_dhidden: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((topk_ids.shape[0],), dtype=checks.acc_dtype(hidden.dtype))
    total = hidden.new_empty((), dtype=torch.float64)
    return loss, total, *_gradients(hidden, head_weight, need_dhead, need_dhidden)


def _gradients(hidden: Tensor, head_weight: Tensor, need_dhead: bool, need_dhidden: bool) -> tuple[Tensor, Tensor]:
    """dhidden [N, H] and dhead [V, H], contiguous whatever the inputs' strides, to be written; [0, H] if unneeded."""
    width = hidden.shape[-1]
    dhidden = hidden.new_empty((hidden.shape[0] if need_dhidden else 0, width))
    rows = head_weight.shape[0] if need_dhead else 0
    return dhidden, hidden.new_empty((rows, width), dtype=checks.acc_dtype(hidden.dtype))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    loss, _, dhidden, dhead = output
    ctx.mark_non_differentiable(loss, dhidden, dhead)
    ctx.save_for_backward(dhidden, dhead)
    ctx.computed = (inputs[9], inputs[8], False, False, False)  # of hidden, head_weight, ids, probs, weight


@once_differentiable
def _scale(ctx: Any, _loss: Tensor, total: Tensor, _dhidden: Tensor, _dhead: Tensor) -> tuple[Tensor | None, ...]:
    """The kept gradients times `total`, the incoming one."""
    names = ("hidden", "head_weight", "topk_ids", "topk_probs", "row_weight")
    for name, wanted, computed in zip(names, ctx.needs_input_grad, ctx.computed, strict=False):
        if wanted and not computed:
            checks.fail("cortiq::head_topk_kl", name, "without requires_grad", "a tensor that requires it",
                        "pass need_dhidden or need_dhead for these two, detach() the others")  # fmt: skip
    dhidden, dhead = ctx.saved_tensors
    g = total.to(dhead.dtype).reshape(1)  # [1], because a 0-d tensor would be rounded to a 16-bit gradient's dtype
    want_hidden, want_head = ctx.needs_input_grad[:2]
    return (
        (dhidden * g).to(dhidden.dtype) if want_hidden else None,
        (dhead * g).to(dhidden.dtype) if want_head else None,  # hidden and head_weight have the same dtype
        *(None,) * 8,
    )


_head.register_autograd(_scale, setup_context=_keep)
