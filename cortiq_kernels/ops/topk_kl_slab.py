"""`head_topk_kl_fwd_bwd` on a GPU: cuBLAS GEMMs around one Triton pass over a slab of logits, `chunk_rows` rows at a
time.

    z   = x·Wᵀ           into the slab, in its dtype
    z  <- pass           RATIO: E and r with dz = r·E;  SCALED: dz                                topk_kl_triton.py
    dh  = r·(E·W)        the GEMM leaves in f32, so that r costs no second rounding; or dz·W
    dW += Eᵀ·(r·x)       r·x rounded once; or dzᵀ·x; f32, straight into the caller's gradient

SCALED is for a float16 slab, a tail bucket, and a float32 slab of a 16-bit run (whose dz is then rounded to 16 bit for
the GEMMs); everything else, float32 runs included, takes RATIO.

x are the gathered rows, those that do not count replaced by 0, so nothing that they hold reaches a product; the rows of
dh go straight to their places in dhidden, which is 0 elsewhere (`rows_triton.py`). A slab of its own takes
chunk_rows·V·2 bytes: 2.03 GB for 4096 rows of 248,320. `rows_for` picks the rows of a smaller budget so that the dh
GEMM (few rows, long inner dimension) fills whole waves of the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortiq_kernels.ops import rows_triton
from cortiq_kernels.ops import topk_kl_triton as kernels
from cortiq_kernels.ops.linear import linear_bwd_w, linear_bwd_x, linear_fwd
from cortiq_kernels.ops.topk_kl_torch import LossOptions


def head_topk_kl_slab(
    hidden: Tensor,
    head: Tensor,
    ids: Tensor,
    probs: Tensor,
    weight: Tensor,
    row_index: Tensor | None,
    *,
    active: int,
    grad_scale: Tensor,
    loss: Tensor,
    dhidden: Tensor | None,
    dhead: Tensor | None,
    accumulate: bool,
    need_grad: bool,
    slab: Tensor,
    options: LossOptions,
) -> None:
    """Loss of rows 0 .. active-1 into `loss` [R] f32; dhidden [N, H] `=`; dhead `=`/`+=` f32.

    `head` [V, H] holds the valid columns only. `slab` [C, slab_stride(V)] bounds what is in flight and may hold
    anything. `weight` [R] f32 is 0 where a row does not count, padding slots of `row_index` included. `grad_scale` is
    0-d f64.
    """
    vocab, half = head.shape[0], hidden.dtype != torch.float32
    strict = half and slab.dtype == torch.float32
    ratio_mode = slab.dtype != torch.float16 and not options.tail and not strict
    mode = (kernels.RATIO if ratio_mode else kernels.SCALED).value if need_grad else kernels.FORWARD.value
    step = slab.shape[0]
    hidden, dh = _unit(hidden), dhidden if dhidden is None else _unit(dhidden)
    if dh is not None:
        (dh if row_index is not None else dh[active:]).zero_()
    for a in range(0, active, step):
        b = min(a + step, active)
        chosen = None if row_index is None else row_index[a:b]
        x = hidden.new_empty((b - a, hidden.shape[1]))
        rows_triton.gather(hidden if chosen is not None else hidden[a:b], chosen, weight[a:b], x)
        z = slab[: b - a, :vocab]
        if strict:
            torch.mm(x, head.t(), out_dtype=torch.float32, out=z)
        else:
            linear_fwd(x, head, out=z)
        ratio = torch.empty(b - a, dtype=torch.float32, device=x.device)
        kernels.launch(
            z, ids[a:b], probs[a:b], weight[a:b], grad_scale, loss[a:b], ratio,
            mode=mode, temperature=options.temperature, softcap=options.softcap, tail=options.tail,
        )  # fmt: skip
        if not need_grad:
            continue
        dz = z.to(hidden.dtype) if strict else z
        if not ratio_mode:
            if dh is not None and chosen is None:
                linear_bwd_x(dz, head, out=dh[a:b])
            elif dh is not None and chosen is not None:
                rows_triton.scatter(linear_bwd_x(dz, head), None, chosen, dh)
            if dhead is not None:
                linear_bwd_w(dz, x, out=dhead, accumulate=accumulate or a > 0)
            continue
        if dhead is not None:
            scaled = torch.mul(x, ratio.unsqueeze(1), out=torch.empty_like(x))
            linear_bwd_w(z, scaled, out=dhead, accumulate=accumulate or a > 0)
            del scaled
        del x  # 42 MB for 4096 rows of 5120, while the product below takes twice that
        if dh is not None:
            product = torch.mm(z, head, out_dtype=torch.float32) if half else torch.mm(z, head)
            if chosen is None:
                torch.mul(product, ratio.unsqueeze(1), out=dh[a:b])
            else:
                rows_triton.scatter(product, ratio, chosen, dh)
            del product
    if dh is not None and dhidden is not dh:
        assert dhidden is not None
        dhidden.copy_(dh)


def _unit(t: Tensor) -> Tensor:
    """`t` where its rows have no gaps, else a copy."""
    return t if t.shape[1] == 1 or t.stride(1) == 1 else t.contiguous()
