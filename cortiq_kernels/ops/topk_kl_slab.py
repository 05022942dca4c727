"""`head_topk_kl_fwd_bwd` on a GPU: cuBLAS GEMMs around one Triton pass over a slab of logits, `chunk_rows` rows at a
time.

    z   = x·Wᵀ           into the slab, in its dtype
    z  <- pass           RATIO: E and r with dz = r·E;  SCALED: dz                                topk_kl_triton.py
    dh  = r·(E·W)        the GEMM leaves in f32, so that r costs no second rounding; or dz·W
    dW += Eᵀ·(r·x)       r·x rounded once; or dzᵀ·x; f32, straight into the caller's gradient

SCALED is for a float16 slab, a tail bucket, and a float32 slab of a 16-bit run (whose dz is then rounded to 16 bit for
the GEMMs); everything else, float32 runs included, takes RATIO.

x are the gathered rows, those that do not count replaced by 0, so nothing that they hold reaches a product. A slab of
its own takes chunk_rows·V·2 bytes: 2.03 GB for 4096 rows of 248,320. `rows_for` picks the rows of a smaller budget so
that the dh GEMM (few rows, long inner dimension) fills whole waves of the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    drows: Tensor | None,
    dhead: Tensor | None,
    accumulate: bool,
    need_grad: bool,
    slab: Tensor,
    options: LossOptions,
) -> None:
    """Loss of rows 0 .. active-1 into `loss` [R] f32; gradient rows into `drows` [active, H]; dhead `=`/`+=` f32.

    `head` [V, H] holds the valid columns only. `slab` [C, slab_stride(V)] bounds what is in flight and may hold
    anything. `weight` [R] f32 is 0 where a row does not count, padding slots of `row_index` included. `grad_scale` is
    0-d f64.
    """
    vocab, half = head.shape[0], hidden.dtype != torch.float32
    strict = half and slab.dtype == torch.float32
    ratio_mode = slab.dtype != torch.float16 and not options.tail and not strict
    mode = (kernels.RATIO if ratio_mode else kernels.SCALED).value if need_grad else kernels.FORWARD.value
    step = slab.shape[0]
    for a in range(0, active, step):
        b = min(a + step, active)
        x = hidden[a:b] if row_index is None else hidden.index_select(0, row_index[a:b].clamp(min=0))
        x = x.masked_fill((weight[a:b] == 0).unsqueeze(1), 0)
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
            if drows is not None:
                linear_bwd_x(dz, head, out=drows[a:b])
            if dhead is not None:
                linear_bwd_w(dz, x, out=dhead, accumulate=accumulate or a > 0)
            continue
        r = ratio.unsqueeze(1)
        if dhead is not None:
            scaled = torch.mul(x, r, out=torch.empty_like(x))
            linear_bwd_w(z, scaled, out=dhead, accumulate=accumulate or a > 0)
            del scaled
        del x  # 42 MB for 4096 rows of 5120, while the product below takes twice that
        if drows is not None:
            product = torch.mm(z, head, out_dtype=torch.float32) if half else torch.mm(z, head)
            torch.mul(product, r, out=drows[a:b])
            del product
