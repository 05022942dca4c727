"""The op `chunk_gated_delta_rule` on Triton. Formulas and shapes in chunk.py, checked there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import triton_run as run
from .chunks import ChunkIndex, chunk_index
from .layout import unit_stride


class TritonChunkSaved(NamedTuple):
    """What the Triton forward keeps: its inputs (views, no copies where they allow it), T, decay sums and states."""

    rule: run.Rule
    source: run.Gates
    h: run.States
    vn: Tensor  # [HV, N, DV]
    shape: tuple[int, ...]  # of v
    dtypes: tuple[torch.dtype, ...]  # of q, k, v, g, beta
    has_state: bool

    @property
    def k(self) -> Tensor:
        return self.rule.k

    @property
    def o_shape(self) -> tuple[int, ...]:
        """[B, T, HV, DV]"""
        return self.shape

    @property
    def state_shape(self) -> tuple[int, ...]:
        """[S, HV, DK, DV]"""
        hv, dv, dk = self.h.even.shape[1:]
        return (self.rule.chunks.sequences, hv, dk, dv)


def rows(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B*T, ...] with unit last stride; a copy only where strides do not allow a view."""
    return unit_stride(x.reshape(-1, *x.shape[2:]))


def starts(q: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[S+1] int32 starts of the sequences in the packed row: the caller's, or those of the rows of q [B, T, HK, DK]."""
    if cu_seqlens is not None:
        return cu_seqlens.to(torch.int32).contiguous()
    batch, length = q.shape[:2]
    return torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length


def chunk_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    final: bool,
    save: bool,
) -> tuple[Tensor, Tensor | None, TritonChunkSaved | None]:
    """o, the final state in f32, and what the backward needs."""
    dtypes = tuple(x.dtype for x in (q, k, v, g, beta))
    batch, length = q.shape[:2]
    chunks = chunk_index(starts(q, cu_seqlens), batch * length)
    q_rows, k_rows, v_rows = (rows(x.to(v.dtype)) for x in (q, k, v))
    h0 = None if h0 is None else h0.float().contiguous()
    source = _gates(g, beta)
    rule = run.prepare(q_rows, k_rows, v_rows, source, chunks, scale)
    h, vn, ht = run.states(rule, v_rows, h0, final=final)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    run.outputs(rule, h, vn, o.view(batch * length, v.shape[2] * v.shape[3]), None)
    saved = TritonChunkSaved(rule, source, h, vn, tuple(v.shape), dtypes, h0 is not None) if save else None
    return o, ht, saved


def _gates(g: Tensor, beta: Tensor) -> run.Gates:
    return run.Gates(*(rows(x.float()).contiguous() for x in (g, beta)))


def restored(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    scale: float,
    cu_seqlens: Tensor | None,
    kept: Sequence[Tensor],
    *,
    has_state: bool,
) -> TritonChunkSaved:
    """What `chunk_fwd` returned, from its inputs q, k, v, g, beta and, of it, T, decay sums, beta, the states of even
    and odd chunks, V' and the chunk index's table and offsets."""
    q, k, v, g, beta = inputs
    t, sums, used, even, odd, vn, table, offsets = kept
    q_rows, k_rows = (rows(x.to(v.dtype)) for x in (q, k))
    shape = (q_rows.shape[0], v.shape[2], v.shape[3])
    rule = run.Rule(q_rows, k_rows, shape, t, sums, used, ChunkIndex(table, offsets, starts(q, cu_seqlens)), scale)
    dtypes = tuple(x.dtype for x in inputs)
    return TritonChunkSaved(rule, _gates(g, beta), run.States(even, odd), vn, tuple(v.shape), dtypes, has_state)


def chunk_bwd(
    do: Tensor, saved: TritonChunkSaved, dht: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv, dg, dbeta in the shapes and dtypes of the inputs, and dh0 in f32."""
    rule, (batch, length, hv, dv_size) = saved.rule, saved.shape
    n, hk, dk_size = rule.q.shape
    do = rows(do.to(rule.q.dtype))
    dht = None if dht is None else dht.float().contiguous()
    dh, y, dh0 = run.dstates(rule, do, dht, want_dh0=saved.has_state)
    parts = run.input_grads(rule, saved.h, saved.vn, dh, do, y)
    # [N, HK, DK], each in memory of its own: with one head they lie in one piece already, and views may not leave.
    dq, dk = (x.clone(memory_format=torch.contiguous_format) for x in parts.dqk.transpose(1, 2))
    dv = torch.empty(n, hv, dv_size, dtype=saved.dtypes[2], device=do.device)
    torch.mul(y.transpose(0, 1), rule.beta.t()[:, :, None], out=dv)
    dg, dbeta = (torch.empty(n, hv, dtype=torch.float32, device=do.device) for _ in range(2))
    run.gate_grads(rule, parts, saved.source, dg, dbeta)
    grads = (dq, dk, dv, dg, dbeta)
    sizes = ((hk, dk_size), (hk, dk_size), (hv, dv_size), (hv,), (hv,))
    shaped = (x.reshape(batch, length, *s).to(t) for x, s, t in zip(grads, sizes, saved.dtypes, strict=True))
    out = [x.contiguous() for x in shaped]
    return out[0], out[1], out[2], out[3], out[4], dh0
