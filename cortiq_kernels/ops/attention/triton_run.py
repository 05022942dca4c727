"""The attention mixer on kernels: preparation, softmax attention, gate, in their order. Shapes are checked by mixer.py.

    forward    prep (q~ | k~, with a bias also v), softmax with the gate as its epilogue
    backward   prep again, gate (do, dgate, delta), softmax backward, prep backward

Softmax attention is one of SDPA's kernels, called directly, where `sdpa.choose` takes one; it then has the gate as a
kernel of its own, computes delta itself, and hands dv back in memory of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import configs
from ..parts_triton import sum_parts
from . import gate_triton as gate
from . import prep_triton as prep
from . import sdpa
from . import softmax_bwd_triton as bwd
from . import softmax_triton as fwd
from .blocks import AttnBlocks
from .dims import AttnDims, AttnSaved, Given, VectorGrads, columns, pack, tile_width

LOG2E = 1.4426950408889634


def mixer_fwd(a: Given, via: str, blocks: AttnBlocks | None, out: Tensor, save: bool) -> AttnSaved | None:
    """out [N, nq*hd] `=`; returns what the backward needs, None without `save`. `via`: see `sdpa.choose`; our own
    softmax ("triton") takes `blocks`.
    """
    dims, gated = a.dims, columns(a.proj, a.dims).gate
    q, k, v = prepare(a)
    if blocks is not None and via == "triton":
        o, lse = softmax(q, k, v, gated, blocks.forward, out, dims, save)
        return AttnSaved(a.proj, o, lse, via) if save else None
    o, lse, rest = sdpa.attend(q, k, v, a.window)
    if gated is None:
        o = out.copy_(o)
    else:
        gate_forward(o, gated, out, dims)
    return AttnSaved(a.proj, o, lse, via, rest) if save else None


def mixer_bwd(
    dout: Tensor, saved: AttnSaved, a: Given, blocks: AttnBlocks | None, dproj: Tensor, grads: VectorGrads
) -> None:
    """dproj [N, width] `=`, and the vectors' gradients; by the way of the forward."""
    n, dims, own = a.proj.shape[0], a.dims, blocks is not None and saved.via == "triton"
    cols, dcols = columns(a.proj, dims), columns(dproj, dims)
    q, k, v = prepare(a)
    do, delta = gate_backward(dout, saved.o, cols.gate, dcols.gate, dims, delta=own)
    dv: Tensor | None = None
    if blocks is not None and own:
        dq, dk = q.new_empty(n, dims.nq * dims.hd), q.new_empty(n, dims.nkv * dims.hd)
        dv = None if a.bias is None else q.new_empty(n, dims.nkv * dims.hd)
        to = dcols.v if dv is None else dv.unflatten(1, (dims.nkv, dims.hd))
        softmax_backward(q, k, v, do, saved.lse, delta, blocks, dq, dk, to, dims)
    else:
        dq, dk, dv = sdpa.attend_bwd(saved, do, q, k, v, a.window)
    prep_backward(a, dq, dk, dv, dproj, grads)


def power(size: int) -> int:
    """Columns of a tile that enters no product: the next power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def _launch(dims: AttnDims, name: str) -> dict[str, int]:
    return configs.launch("attention", tile_width(dims.hd), name)


def _prep_sizes(a: Given) -> dict[str, Any]:
    """Constexprs of the preparation."""
    d = a.dims
    sizes = {"NQ": d.nq, "NKV": d.nkv, "HD": d.hd, "PAD": power(d.hd), "ROT": d.rot}
    return {**sizes, "NORM": a.q_norm is not None, "CENTERED": a.zero_centered, "BIAS": a.bias is not None}


def _vectors(a: Given) -> list[Tensor]:
    """The norms and the bias (any tensor where there is none: it is not read), the angles and positions."""
    vectors = [a.cos if x is None else x.contiguous() for x in (a.q_norm, a.k_norm, a.bias)]
    return [*vectors, a.cos.contiguous(), a.sin.contiguous(), a.positions.contiguous()]


def prepare(a: Given) -> tuple[Tensor, Tensor, Tensor]:
    """q~ [N, nq, hd] and k~, v [N, nkv, hd], views: v of the projection where there is no bias."""
    n, d = a.proj.shape[0], a.dims
    heads = d.nq + d.nkv * (1 if a.bias is None else 2)
    y = a.proj.new_empty(n, heads * d.hd)
    launch = _launch(d, "prep")
    prep.attn_prep_kernel[(-(-n // launch["ROWS"]),)](
        a.proj, *_vectors(a), y, n, a.eps, a.proj.stride(0), y.stride(0), d.q_width // d.nq, d.q_width,
        **_prep_sizes(a), **launch,
    )  # fmt: skip
    by_head = y.view(n, heads, d.hd)
    q, k = by_head[:, : d.nq], by_head[:, d.nq : d.nq + d.nkv]
    return q, k, columns(a.proj, d).v if a.bias is None else by_head[:, d.nq + d.nkv :]


def prep_backward(a: Given, dq: Tensor, dk: Tensor, dv: Tensor | None, dproj: Tensor, grads: VectorGrads) -> None:
    """Columns q and k of dproj `=` from dq~ and dk~ [N, heads*hd], those of v from dv unless None; and the vectors'."""
    n, d = a.proj.shape[0], a.dims
    launch = _launch(d, "prep_bwd")
    parts = -(-n // launch["ROWS"])
    dnorm = None if a.q_norm is None else a.cos.new_empty(parts, 2, d.hd)
    dbias = None if a.bias is None else a.cos.new_empty(parts, d.width)
    values = dq if dv is None else dv
    prep.attn_prep_bwd_kernel[(parts,)](
        a.proj, *_vectors(a), dq, dk, values, dproj,
        a.cos if dnorm is None else dnorm, a.cos if dbias is None else dbias, n, a.eps,
        a.proj.stride(0), dq.stride(0), dk.stride(0), values.stride(0), dproj.stride(0), d.q_width // d.nq, d.q_width,
        **_prep_sizes(a), VALUES=dv is not None, **launch,
    )  # fmt: skip
    for out, part in (
        (grads.dq_norm, None if dnorm is None else dnorm[:, 0]),
        (grads.dk_norm, None if dnorm is None else dnorm[:, 1]),
        (grads.dbias, dbias),
    ):
        if out is not None and part is not None:
            sum_parts(part, out, grads.accumulate)


def _tile(dims: AttnDims) -> dict[str, int]:
    """Constexprs of softmax attention."""
    return {"NKV": dims.nkv, "GROUP": dims.group, "HD": dims.hd, "PAD": tile_width(dims.hd), "PACK": pack(dims)}


def softmax(
    q: Tensor, k: Tensor, v: Tensor, gated: Tensor | None, blocks: Tensor, out: Tensor, dims: AttnDims, save: bool
) -> tuple[Tensor, Tensor]:
    """out `=` with its gate. Returns o before the gate (out itself without one) and lse; neither means anything without
    `save`."""
    n = q.shape[0]
    o = q.new_empty(n, dims.nq * dims.hd) if save and gated is not None else out
    lse = torch.empty(dims.nq if save else 0, n, dtype=torch.float32, device=q.device)
    g = q if gated is None else gated
    fwd.attn_fwd_kernel[(blocks.shape[0] * (dims.nq // pack(dims)),)](
        q, k, v, g, blocks, o, out, lse if save else blocks, n, dims.hd**-0.5 * LOG2E,
        q.stride(0), v.stride(0), g.stride(0), g.stride(1), out.stride(0),
        **_tile(dims), GATE=gated is not None, SAVE=save, **_launch(dims, "softmax"),
    )  # fmt: skip
    return o, lse


def softmax_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, blocks: AttnBlocks, dq: Tensor, dk: Tensor,
    dv: Tensor, dims: AttnDims,
) -> None:  # fmt: skip
    """dq~ and dk~ [N, heads*hd], dv [N, nkv, hd] `=`; do [N, nq*hd]."""
    launch = _launch(dims, "softmax_bwd")
    key_programs = blocks.keys.shape[0] * dims.nkv * (1 if launch["BOTH"] else 2)
    programs = key_programs + blocks.queries.shape[0] * (dims.nq // pack(dims))
    bwd.attn_bwd_kernel[(programs,)](
        q, k, v, do, lse, delta, blocks.keys, blocks.queries, dq, dk, dv,
        q.shape[0], dims.hd**-0.5, key_programs,
        q.stride(0), v.stride(0), do.stride(0), dq.stride(0), dk.stride(0), dv.stride(0),
        **_tile(dims), **launch,
    )  # fmt: skip


def _gate_sizes(n: int, dims: AttnDims, launch: dict[str, int]) -> tuple[tuple[int], dict[str, Any]]:
    return (-(-n * dims.nq // launch["ROWS"]),), {"NQ": dims.nq, "HD": dims.hd, "PAD": power(dims.hd), **launch}


def gate_forward(o: Tensor, gated: Tensor, out: Tensor, dims: AttnDims) -> None:
    """out [N, nq*hd] = o sigmoid(gate)."""
    n = o.shape[0]
    grid, sizes = _gate_sizes(n, dims, _launch(dims, "gate"))
    gate.attn_gate_kernel[grid](o, gated, out, n, o.stride(0), gated.stride(0), gated.stride(1), out.stride(0), **sizes)


def gate_backward(
    dout: Tensor, o: Tensor, gated: Tensor | None, dgate: Tensor | None, dims: AttnDims, *, delta: bool
) -> tuple[Tensor, Tensor]:
    """(do [N, nq*hd], which is dout without a gate; delta [nq, N] f32, empty unless asked for); dgate `=`."""
    n = o.shape[0]
    do = dout if gated is None else torch.empty(n, o.shape[1], dtype=o.dtype, device=o.device)
    sums = torch.empty(dims.nq if delta else 0, n, dtype=torch.float32, device=o.device)
    if gated is None and not delta:
        return do, sums
    g = o.unflatten(1, (dims.nq, dims.hd)) if gated is None else gated
    dg = g if dgate is None else dgate
    grid, sizes = _gate_sizes(n, dims, _launch(dims, "gate_bwd"))
    gate.attn_gate_bwd_kernel[grid](
        dout, o, g, do, dg, sums if delta else do, n,
        dout.stride(0), o.stride(0), g.stride(0), g.stride(1), dg.stride(0),
        GATE=gated is not None, DELTA=delta, **sizes,
    )  # fmt: skip
    return do, sums
