"""Chunked gated delta rule as an op of its own: forward, and backward to q, k, v, g, beta and the initial state.

Per value head h (key head h // (HV/HK)), state S [DK, DV], s = scale (reference.py is the definition):

    S <- exp(g_t) S ;  d_t = beta_t (v_t - S^T k_t) ;  S <- S + k_t d_t^T ;  o_t = s S^T q_t

The chunked form of both directions is in core.py.  q and k are used as they are (no l2 norm here), g = 0 is the plain
delta rule.

| tensor | shape | dtype | |
|---|---|---|---|
| q, k (dq, dk) | [B, T, HK, DK] | working | any strides |
| v, o (dv, do) | [B, T, HV, DV] | working | HV a multiple of HK |
| g, beta (dg, dbeta) | [B, T, HV] | any float | g <= 0, log decay; gradients in the dtype of each |
| initial_state, dh0 | [S, HV, DK, DV] | any float; dh0 acc | S = B, or the number of sequences |
| final_state, dht | [S, HV, DK, DV] | acc; any float | |
| cu_seqlens | [S+1] | int32 or int64 | B must be 1 |

acc is float64 for float64 v, else float32: everything computes in it and is rounded once, in o, dq, dk, dv, dg, dbeta.
Outputs and gradients are fresh tensors; nothing passed in is written.

With `cu_seqlens` the sequences are spread over a batch as long as the longest, so the host reads the lengths once (a
synchronisation) and memory is S * longest; the mixer (mixer.py) does neither.  An empty sequence hands its initial
state through.

Kept for the backward, acc: q, k, v, g, beta on the grid, and `CoreSaved`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..checks import acc_dtype
from ..sequences import SeqIndex, check_cu_seqlens, sequence_index
from ..triton_gate import launching_on, use_triton
from .core import CoreSaved, core_bwd, core_fwd
from .layout import causal_masks, chunk_size, from_chunks, to_chunks, unfit_for_kernels

if TYPE_CHECKING:
    from .chunk_triton import TritonChunkSaved


class ChunkSaved(NamedTuple):
    """What `chunk_gated_delta_rule_fwd` keeps."""

    q: Tensor  # [NC, B, HK, C, DK] acc, scaled
    k: Tensor  # [NC, B, HK, C, DK] acc
    v: Tensor  # [NC, B, HV, C, DV] acc
    g: Tensor  # [NC, B, HV, C] acc
    beta: Tensor  # [NC, B, HV, C] acc
    core: CoreSaved
    packed: SeqIndex | None  # of the packed tokens; None without cu_seqlens
    length: int  # tokens a row of the grid
    scale: float
    dtypes: tuple[torch.dtype, ...]  # of q, k, v, g, beta
    has_state: bool  # an initial state was given

    @property
    def o_shape(self) -> tuple[int, ...]:
        """[B, T, HV, DV]"""
        heads = (self.v.shape[2], self.v.shape[4])
        rows = (self.v.shape[1], self.length) if self.packed is None else (1, self.packed.positions.numel())
        return (*rows, *heads)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """[S, HV, DK, DV]"""
        return (*self.v.shape[1:3], self.k.shape[4], self.v.shape[4])


def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    save: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None, ChunkSaved | TritonChunkSaved | None]:
    """Gated delta rule over whole sequences; formulas and shapes in the module docstring.

    Args:
        scale: factor of q, default DK**-0.5.
        initial_state: state before the first token of each sequence, None = zero.
        output_final_state: return the state after the last token too.
        cu_seqlens: starts of packed sequences, values non-decreasing from 0 to T.
        save: keep what the backward needs.
        backend: "auto" takes the Triton kernels for CUDA tensors that fit them, "torch" and "triton" insist.

    Returns:
        o [B, T, HV, DV] in v's dtype, the final state (None unless asked for), `ChunkSaved` (None with save=False).

    Raises:
        ValueError: a shape that does not fit the table.
    """
    _check_inputs(q, k, v, g, beta, initial_state, cu_seqlens)
    acc = acc_dtype(v.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    unfit = unfit_for_kernels(v.dtype, q.shape[-1], v.shape[-1], gpu=v.is_cuda)
    if use_triton("chunk_gated_delta_rule_fwd", v, backend, unfit):
        from .chunk_triton import chunk_fwd

        with launching_on(v):
            return chunk_fwd(q, k, v, g, beta, scale, initial_state, cu_seqlens, final=output_final_state, save=save)
    tokens = tuple(x.to(acc) for x in (q, k, v, g.unsqueeze(-1), beta.unsqueeze(-1)))
    length, index, rows = q.shape[1], None, q.shape[0]
    if cu_seqlens is not None:
        index, rows = sequence_index(cu_seqlens, length), cu_seqlens.numel() - 1
        length = int(cu_seqlens.diff().max()) if rows else 0
        tokens = tuple(_spread(x[0], index, rows, length) for x in tokens)
    chunk = chunk_size(length, q.device)
    q_c, k_c, v_c, g_c, beta_c = (to_chunks(x, chunk) for x in tokens)
    q_c = (q_c * scale).contiguous()
    k_c, v_c, g_c, beta_c = k_c.contiguous(), v_c.contiguous(), g_c.squeeze(-1), beta_c.squeeze(-1)
    g_c, beta_c = g_c.contiguous(), beta_c.contiguous()
    h0 = None if initial_state is None else initial_state.to(acc)
    o_c, core = core_fwd(q_c, k_c, v_c, g_c, beta_c, h0, causal_masks(chunk, q.device))

    o = _gather(from_chunks(o_c, length), index).to(v.dtype).contiguous()
    final = core.states[-1].reshape(rows, v.shape[2], q.shape[-1], v.shape[-1]).clone() if output_final_state else None
    if not save:
        return o, final, None
    dtypes = tuple(x.dtype for x in (q, k, v, g, beta))
    has_state = initial_state is not None
    return o, final, ChunkSaved(q_c, k_c, v_c, g_c, beta_c, core, index, length, scale, dtypes, has_state)


def chunk_gated_delta_rule_bwd(
    do: Tensor, saved: ChunkSaved | TritonChunkSaved, dht: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of everything that went into `chunk_gated_delta_rule_fwd`.

    Args:
        do: [B, T, HV, DV], any strides (expanded too).
        saved: of the forward; left as it is, so the backward can run again.
        dht: gradient of the final state [S, HV, DK, DV], None = zero.

    Returns:
        dq, dk, dv, dg, dbeta, each in the shape and dtype of its input, and dh0 [S, HV, DK, DV] in acc (None if no
        initial state was given).

    Raises:
        ValueError: `do` or `dht` does not fit the forward.
    """
    op = "chunk_gated_delta_rule_bwd"
    checks.shape(op, "do", do, saved.o_shape, str(list(saved.o_shape)), "pass the gradient of o")
    checks.same_device(op, "do", do, "the saved k", saved.k)
    if dht is not None:
        checks.shape(op, "dht", dht, saved.state_shape, str(list(saved.state_shape)), "pass that of final_state")
        checks.same_device(op, "dht", dht, "the saved k", saved.k)
    if not isinstance(saved, ChunkSaved):
        from .chunk_triton import chunk_bwd

        with launching_on(do):
            return chunk_bwd(do, saved, dht)
    _, rows, _, chunk, _ = saved.v.shape
    index, length, acc = saved.packed, saved.length, saved.v.dtype
    do = do.to(acc)
    if index is not None:
        do = _spread(do[0], index, rows, length)
    grads = core_bwd(
        to_chunks(do, chunk).contiguous(),
        None if dht is None else dht.to(acc),
        saved.q,
        saved.k,
        saved.v,
        saved.g,
        saved.beta,
        causal_masks(chunk, do.device),
        saved.core,
    )
    per_token = (grads.dq * saved.scale, grads.dk, grads.dv, grads.dg.unsqueeze(-1), grads.dbeta.unsqueeze(-1))
    dq, dk, dv_out, dg, dbeta = (
        _gather(from_chunks(x, length), index).to(dtype).contiguous()
        for x, dtype in zip(per_token, saved.dtypes, strict=True)
    )
    dh0 = grads.dh0.clone() if saved.has_state else None
    return dq, dk, dv_out, dg.squeeze(-1), dbeta.squeeze(-1), dh0


def _spread(x: Tensor, index: SeqIndex, rows: int, length: int) -> Tensor:
    """Packed tokens [N, H, D] -> one row a sequence [S, L, H, D], zeros behind each."""
    out = x.new_zeros(rows, length, *x.shape[1:])
    out[index.seq_ids, index.positions] = x
    return out


def _gather(x: Tensor, index: SeqIndex | None) -> Tensor:
    """The inverse of `_spread`, [S, L, H, D] -> [1, N, H, D]; without an index x itself."""
    return x if index is None else x[index.seq_ids, index.positions].unsqueeze(0)


def _check_inputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Raise ValueError unless the shapes fit the table of the module docstring."""
    op, layout = "chunk_gated_delta_rule_fwd", "the layout is [B, T, H, D]"
    checks.shape(op, "q", q, (None,) * 4, "[B, T, HK, DK]", layout)
    checks.same_shape(op, "k", k, "q", q, layout)
    checks.shape(op, "v", v, (*q.shape[:2], None, None), f"[{q.shape[0]}, {q.shape[1]}, HV, DV]", layout)
    hk, hv = q.shape[2], v.shape[2]
    if q.shape[3] == 0 or v.shape[3] == 0:
        checks.fail(op, "DK and DV", "at least 1", (q.shape[3], v.shape[3]), layout)
    if hk == 0 or hv == 0 or hv % hk:
        checks.fail(op, "the heads of v", f"a multiple of the {hk} of k", hv, "value head h uses key head h // (HV/HK)")
    for name, x in (("g", g), ("beta", beta)):
        checks.shape(op, name, x, v.shape[:3], str(list(v.shape[:3])), "there is one a token and value head")
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        checks.dtype(op, name, x, checks.FLOATS, "convert it with .to()")
        checks.same_device(op, name, x, "q", q)
    rows = q.shape[0]
    if cu_seqlens is not None:
        check_cu_seqlens(op, cu_seqlens, q)
        if rows != 1:
            fix = "reshape to [1, B*T, H, D] and let cu_seqlens mark the rows"
            checks.fail(op, "B", "1 with cu_seqlens", rows, fix)
        rows = cu_seqlens.numel() - 1
    if initial_state is not None:
        state = (rows, hv, q.shape[3], v.shape[3])
        checks.shape(op, "initial_state", initial_state, state, str(list(state)), "there is one a sequence")
        checks.dtype(op, "initial_state", initial_state, checks.FLOATS, "convert it with .to()")
        checks.same_device(op, "initial_state", initial_state, "q", q)
