"""LM head and distillation loss on top-k targets: loss and hidden gradient in one call, the head frozen or trained."""

from __future__ import annotations

import torch

from bench.geometries import by_geometry
from bench.peers import through_autograd
from bench.registry import Calls, Inputs, Op, Results, Sizes, Work, acc_dtype, blank, normal
from cortiq_kernels.ops.linear import linear_bwd_w, linear_bwd_x, linear_fwd
from cortiq_kernels.ops.topk_kl import CHUNK_ROWS, head_topk_kl_fwd_bwd, head_topk_kl_ref, rows_for

SHAPES = by_geometry(lambda g: {"h": g.hidden, "vocab": g.vocab, "k": 64})


def inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Inputs:
    n, h, v, k = sizes["n"], sizes["h"], sizes["vocab"], sizes["k"]
    # distinct ids in each row: k neighbours, wrapped, from a random place
    place = torch.randint(0, v, (n, 1), generator=gen, device=device)
    return {
        "hidden": normal(gen, (n, h), dtype, 0.5),
        "head": normal(gen, (v, h), dtype, h**-0.5),
        "topk_ids": ((place + torch.arange(k, device=device)) % v).to(torch.int32),
        "topk_probs": torch.softmax(normal(gen, (n, k), acc_dtype(dtype)), dim=-1),
        "row_weight": torch.rand((n,), generator=gen, device=device).to(acc_dtype(dtype)),
        "dtotal": torch.ones((), dtype=torch.float64, device=device),
    }


def calls(t: Inputs, sizes: Sizes) -> Calls:
    hidden, head = t["hidden"], t["head"]
    args = (hidden, head, t["topk_ids"], t["topk_probs"], t["row_weight"])
    dhidden = blank(hidden.shape, hidden)
    half = torch.arange(0, sizes["n"], 2, dtype=torch.int32, device=hidden.device)
    part = [t[name][::2].contiguous() for name in ("topk_ids", "topk_probs", "row_weight")]
    small = min(sizes["n"], rows_for(512 << 20, sizes["vocab"], hidden.element_size()))
    dhead: list[torch.Tensor] = []  # [V, H] f32 is gigabytes: made when a call first needs it

    def frozen() -> Results:
        result = head_topk_kl_fwd_bwd(*args, dhidden=dhidden)
        return {"loss": result.loss, "total": result.total, "dhidden": dhidden}

    def trained() -> Results:
        if not dhead:
            dhead.append(blank(head.shape, head, acc_dtype(head.dtype)))
        head_topk_kl_fwd_bwd(*args, dhidden=dhidden, dhead=dhead[0])
        return {"dhidden": dhidden, "dhead": dhead[0]}

    def scored() -> Results:
        head_topk_kl_fwd_bwd(hidden, head, *part, row_index=half, dhidden=dhidden)
        return {}

    def budget() -> Results:
        head_topk_kl_fwd_bwd(*args, dhidden=dhidden, chunk_rows=small)
        return {"dhidden": dhidden}

    def loss() -> Results:
        result = head_topk_kl_fwd_bwd(*args, need_grad=False)
        return {"loss": result.loss, "total": result.total}

    return {
        "loss": loss,
        "fwd+dH half": scored,
        "fwd+dH 512M": budget,
        "fwd+dH": frozen,
        "fwd+dH+dW": trained,
    }


def reference(t: Inputs, sizes: Sizes) -> Results:
    loss, total = head_topk_kl_ref(t["hidden"], t["head"], t["topk_ids"], t["topk_probs"], t["row_weight"])
    return {"loss": loss, "total": total}


def work(sizes: Sizes, dtype: torch.dtype) -> dict[str, Work]:
    """The GEMMs; logits need not touch memory, so only the head and the hidden states count as traffic."""
    n, h, v, e = sizes["n"], sizes["h"], sizes["vocab"], dtype.itemsize
    gemm, head, rows = 2 * n * h * v, v * h * e, 2 * n * h * e
    return {
        "loss": Work(gemm, head + rows // 2),
        "fwd+dH half": Work(gemm, head + rows),
        "fwd+dH 512M": Work(2 * gemm, head + rows),
        "fwd+dH": Work(2 * gemm, head + rows),
        "fwd+dH+dW": Work(3 * gemm, head + rows + v * h * acc_dtype(dtype).itemsize),
    }


def gemms(t: Inputs, sizes: Sizes) -> Calls:
    """The matrix products alone, in the same slabs and with the same f32 head gradient: what the rest is judged by."""
    hidden, head = t["hidden"], t["head"]
    n, rows = sizes["n"], min(CHUNK_ROWS, sizes["n"])
    slab = normal(torch.Generator(hidden.device).manual_seed(2), (rows, sizes["vocab"]), hidden.dtype)
    dhidden = blank(hidden.shape, hidden)
    dhead: list[torch.Tensor] = []

    def run(trained: bool) -> Results:
        for a in range(0, n, rows):
            b = min(a + rows, n)
            linear_fwd(hidden[a:b], head, out=slab[: b - a])
            linear_bwd_x(slab[: b - a], head, out=dhidden[a:b])
            if trained:
                linear_bwd_w(slab[: b - a], hidden[a:b], out=dhead[0], accumulate=True)
        return {"dhidden": dhidden}

    def with_dhead() -> Results:
        if not dhead:
            dhead.append(torch.zeros(head.shape, dtype=acc_dtype(head.dtype), device=head.device))
        return run(True)

    return {"fwd+dH": lambda: run(False), "fwd+dH+dW": with_dhead}


def chunked(compiled: bool):
    """Plain PyTorch over 8 slices of the rows, as people write it; the head frozen."""

    def build(t: Inputs, sizes: Sizes) -> Calls:
        def part(h, head, ids, p, w):
            z = (h @ head.t()).float()
            log_q = z.gather(1, ids) - torch.logsumexp(z, dim=-1, keepdim=True)
            return ((p * (p.log() - log_q)).sum(-1) * w).sum()

        run = torch.compile(part, dynamic=False) if compiled else part
        ids = t["topk_ids"].long()

        def fwd_dh() -> Results:
            hidden = t["hidden"].detach().requires_grad_()
            slices = (x.chunk(8) for x in (hidden, ids, t["topk_probs"], t["row_weight"]))
            for h, i, p, w in zip(*slices, strict=True):
                run(h, t["head"], i, p, w).backward()
            assert hidden.grad is not None
            return {"dhidden": hidden.grad}

        return {"fwd+dH": fwd_dh}

    return build


def liger(t: Inputs, sizes: Sizes) -> Calls:
    """Cross entropy on one target a row: less work than ours."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    target = t["topk_ids"][:, 0].long()
    built = through_autograd(
        lambda h: liger_fused_linear_cross_entropy(h, t["head"], target), [t["hidden"]], t["hidden"].new_ones(())
    )
    return {"fwd+dH": built["fwd+bwd"]}


def cut_cross_entropy(t: Inputs, sizes: Sizes) -> Calls:
    """Cross entropy on one target a row: less work than ours."""
    from cut_cross_entropy import linear_cross_entropy

    target = t["topk_ids"][:, 0].long()
    built = through_autograd(
        lambda h: linear_cross_entropy(h, t["head"], target), [t["hidden"]], t["hidden"].new_ones(())
    )
    return {"fwd+dH": built["fwd+bwd"]}


ENTRY = Op(
    name="head_topk_kl",
    shapes=SHAPES | {f"0.8B-k{k}": {**SHAPES["0.8B"], "k": k} for k in (1, 128)},
    gate={"n": 65, "vocab": 1009},
    inputs=inputs,
    calls=calls,
    reference=reference,
    grads={"dhidden": "hidden", "dhead": "head"},
    work=work,
    eager=False,  # whole logits in autograd: the chunked peers are what people run
    peers={
        "its GEMMs alone": gemms,
        "torch eager, 8 chunks": chunked(False),
        "torch.compile, 8 chunks": chunked(True),
        "liger CE, K=1": liger,
        "cut-cross-entropy, K=1": cut_cross_entropy,
    },
)
