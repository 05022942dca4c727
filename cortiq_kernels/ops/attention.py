"""Softmax attention between the two projections: causal GQA with RoPE; bias, q/k norm and output gate where a model has
them.

One row of `proj` is nq·(q hd | gate hd) | k nkv·hd | v nkv·hd; without a gate, q nq·hd comes first. Rows
form a grid [B, T], T = max_seqlen, and `cu_seqlens` says where sequences start; a sequence sees only itself, and
positions restart at 0 in each.

Maths (per token and head; rope turns the first `rot` dimensions, half-split; h' = h // (nq/nkv))
    proj + bias, then
    q̃ = rope(q̂·gain),  k̃ = rope(k̂·gain)                        x̂ = x·(mean(x²) + eps)^-½ over hd
        gain = 1 + q_norm (k_norm), or q_norm itself without `zero_centered`; without norms q̃ = rope(q), k̃ = rope(k)
    S = q̃·k̃ᵀ/√hd on keys of the same sequence that are not in the future;  P = softmax(S) = exp(S − lse)
    o = P·v,   out = o·σ(gate), or o
Gradients
    do = dout·σ(gate),  dgate = dout·o·σ(gate)·(1 − σ(gate));  without a gate do = dout
    dv = Pᵀ·do,  dP = do·vᵀ,  dS = P·(dP − rowsum(do·o)),  dq̃ = dS·k̃/√hd,  dk̃ = dSᵀ·q̃/√hd
    dk̃ and dv sum over the nq/nkv query heads of a key head; then back through rope (turning by −angle) and the norm
    dq_norm = Σ over tokens and heads of d(q̂·gain)·q̂, dk_norm likewise;  dbias = Σ over tokens of dproj   (`=`, `+=`)

| tensor | shape | dtype |
|---|---|---|
| proj, dproj | [N, W], W = 2·nq·hd + 2·nkv·hd, or nq·hd + 2·nkv·hd | working: bf16, f16, f32, f64 |
| out, dout | [N, nq·hd] | working |
| q_norm, k_norm and their gradients | [hd] or None | f32 (f64 for f64) |
| bias, dbias | [W] or None | f32 (f64 for f64) |
| cos, sin | [≥ max_seqlen, rot/2] | f32 (f64 for f64) |
| cu_seqlens | [S+1] | int32, 0 … N, non-decreasing, may be padded with N |

Precision: all in f32 (f64 for f64) from the working-dtype projection, the bias too (large ones, as Qwen2's, cost no
bits), rounded once into out and dproj; dbias sums what is rounded into dproj before it is. The softmax is
explicit and blockwise over queries, so scores never exceed B·nq·256·T elements; keys behind the block's last query are
not touched. Kept for the backward: proj itself, o before the gate (working dtype; without a gate it is out itself) and
lse; q̃ and k̃ are computed again. Every row of out and dproj is written, padding rows too. The order of every sum is
fixed. What a token must not see is multiplied by 0: finite values there change no bit as long as no product with them
overflows, but a NaN or an infinity reaches the tokens of its window.
Sources: Vaswani et al. 2017; Su et al., "RoFormer", 2021; Rabe and Staats, "Self-attention Does Not Need O(n²) Memory",
2021; the backward from (o, lse) is Dao et al., "FlashAttention", 2022.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cortiq_kernels.ops import checks
from cortiq_kernels.ops.rms_norm import gain, normalize, normalize_bwd, rms_norm_ref
from cortiq_kernels.ops.sequences import SeqIndex, token_positions

# Query rows a block: bounds the score matrix; on a CPU small enough that a block's scores stay in cache.
BLOCK_Q = {"cpu": 64, "cuda": 256}


class AttnDims(NamedTuple):
    """Heads of one attention layer: query heads, key/value heads, head dimension, rotary dimensions, output gate."""

    nq: int
    nkv: int
    hd: int
    rot: int
    gate: bool = True

    @property
    def q_width(self) -> int:
        """Columns of q, with the gate where there is one."""
        return (2 if self.gate else 1) * self.nq * self.hd

    @property
    def width(self) -> int:
        """Columns of the projection: q (and gate) for every query head, then k, then v."""
        return self.q_width + 2 * self.nkv * self.hd


class AttnSaved(NamedTuple):
    """What the backward needs. `proj` is the caller's tensor, not a copy; without a gate `o` is the forward's out."""

    proj: Tensor  # [N, width] working dtype
    o: Tensor  # [N, nq*hd] working dtype, before the gate
    lse: Tensor  # [B, nkv, nq/nkv, T] accumulation dtype


class Llama3Rope(NamedTuple):
    """How Llama 3.1 and later stretch RoPE: turns longer than original / low are `factor` times longer, turns shorter
    than original / high as they were, those in between blended.
    """

    factor: float
    low: float
    high: float
    original: float


def rope_table(
    n: int, rot: int, theta: float, dtype: torch.dtype, device: torch.device | str, llama3: Llama3Rope | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of position·f_i, f_i = theta^(−2i/rot). -> two [n, rot/2] in the accumulation dtype of `dtype`.

    `llama3`: f_i becomes (1 − s)·f_i/factor + s·f_i, s = (original·f_i/2π − low)/(high − low) held within 0 and 1.
    Below float64 the angles are formed in float32, because published checkpoints were trained and are served that way.
    """
    if n < 0 or rot < 0 or rot % 2:
        checks.fail("rope_table", "n and rot", "non-negative, rot even", (n, rot), "rot counts both halves")
    acc = checks.acc_dtype(dtype)
    inv_freq = 1.0 / theta ** (torch.arange(0, rot, 2, dtype=acc, device=device) / max(rot, 1))
    if llama3 is not None:
        share = (llama3.original * inv_freq / (2 * torch.pi) - llama3.low) / (llama3.high - llama3.low)
        share.clamp_(0, 1)
        inv_freq = (1 - share) * inv_freq / llama3.factor + share * inv_freq
    angle = torch.outer(torch.arange(n, dtype=acc, device=device), inv_freq)
    return angle.cos(), angle.sin()


def attention_mixer_ref(
    proj: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    dims: AttnDims,
    cu_seqlens: Tensor,
    eps: float,
    *,
    bias: Tensor | None = None,
    zero_centered: bool = True,
) -> Tensor:
    """The forward, one sequence and one full score matrix at a time, in the dtype of proj. -> [N, nq*hd]."""
    nq, nkv, hd = dims[:3]
    if bias is not None:
        proj = proj + bias.to(proj.dtype)
    q, k, v = proj.split([dims.q_width, nkv * hd, nkv * hd], dim=1)
    q, gate = q.unflatten(1, (nq, 2, hd)).unbind(2) if dims.gate else (q.unflatten(1, (nq, hd)), None)
    k, v = k.unflatten(1, (nkv, hd)), v.unflatten(1, (nkv, hd))
    if q_norm is not None and k_norm is not None:
        q = rms_norm_ref(q, q_norm, eps, zero_centered)
        k = rms_norm_ref(k, k_norm, eps, zero_centered)
    bounds = cu_seqlens.tolist()
    pieces = [proj.new_empty(0, nq * hd)]
    for a, b in zip(bounds, bounds[1:], strict=False):
        c, s = (table[: b - a, None].to(proj.dtype) for table in (cos, sin))
        qs = _rope(q[a:b], c, s).transpose(0, 1)  # [nq, t, hd]
        ks = _rope(k[a:b], c, s).repeat_interleave(nq // nkv, dim=1).transpose(0, 1)
        vs = v[a:b].repeat_interleave(nq // nkv, dim=1).transpose(0, 1)
        future = torch.ones(b - a, b - a, dtype=torch.bool, device=proj.device).triu(1)
        p = (qs @ ks.transpose(1, 2) * hd**-0.5).masked_fill(future, float("-inf")).softmax(-1)
        o = (p @ vs).transpose(0, 1)  # [t, nq, hd]
        pieces.append((o if gate is None else o * torch.sigmoid(gate[a:b])).flatten(1))
    return torch.cat(pieces)


def attention_mixer_fwd(
    proj: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    dims: AttnDims,
    cu_seqlens: Tensor,
    max_seqlen: int,
    eps: float,
    bias: Tensor | None = None,
    zero_centered: bool = True,
    out: Tensor | None = None,
    save: bool = True,
    index: SeqIndex | None = None,
) -> tuple[Tensor, AttnSaved | None]:
    """-> (out [N, nq*hd], saved, or None with save=False). `out` is written with `=`; None allocates.

    Every multiple of max_seqlen is a sequence start. `index` is `sequence_index(cu_seqlens, N)` when the caller already
    has it (it is the same for every layer).
    """
    op = "attention_mixer_fwd"
    n = _check(op, proj, q_norm, k_norm, cos, sin, dims, cu_seqlens, max_seqlen, bias)
    out = checks.output(op, "out", out, (n, dims.nq * dims.hd), proj.dtype, proj)
    positions = token_positions(op, cu_seqlens, n, index)
    grid = _Grid(proj, q_norm, k_norm, cos, sin, dims, positions, max_seqlen, eps, bias, zero_centered)
    o_saved = (proj.new_empty(out.shape) if dims.gate else out) if save else None
    lse = proj.new_empty(grid.q.shape[:-1], dtype=grid.q.dtype) if save else None
    out_grid = out.view(grid.token_shape)
    gate = _columns(proj, dims).gate
    gate_grid = None if gate is None else gate.unflatten(0, (-1, max_seqlen)).unflatten(2, (dims.nkv, -1))

    for start in range(0, max_seqlen, grid.block):
        scores, lo, stop = grid.scores(start)
        top = scores.amax(-1, keepdim=True)
        scores.sub_(top).exp_()
        total = scores.sum(-1, keepdim=True)
        o = torch.matmul(scores, grid.v[:, :, lo:stop]).div_(total)  # [B, nkv, G*Q, hd]
        o = o.unflatten(2, (-1, stop - start)).permute(0, 3, 1, 2, 4)  # [B, Q, nkv, G, hd]
        if o_saved is not None and lse is not None:
            if o_saved is not out:
                o_saved.view(grid.token_shape)[:, start:stop].copy_(o)
            lse[..., start:stop].copy_(total.log_().add_(top).view(*lse.shape[:-1], stop - start))
        if gate_grid is not None:
            o = o * torch.sigmoid(gate_grid[:, start:stop].to(o.dtype))
        out_grid[:, start:stop].copy_(o)
    if o_saved is None or lse is None:
        return out, None
    return out, AttnSaved(proj, o_saved, lse)


def attention_mixer_bwd(
    dout: Tensor,
    saved: AttnSaved,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    dims: AttnDims,
    cu_seqlens: Tensor,
    max_seqlen: int,
    eps: float,
    bias: Tensor | None = None,
    zero_centered: bool = True,
    dproj: Tensor | None = None,
    dq_norm: Tensor | None = None,
    dk_norm: Tensor | None = None,
    dbias: Tensor | None = None,
    accumulate: bool = False,
    index: SeqIndex | None = None,
) -> Tensor:
    """-> dproj [N, width], written with `=`; None allocates. It must not overlap saved.proj.

    dq_norm, dk_norm [hd]: `=`, or `+=` with `accumulate`; None skips them.
    """
    op = "attention_mixer_bwd"
    proj, o_saved, lse = saved
    n = _check(op, proj, q_norm, k_norm, cos, sin, dims, cu_seqlens, max_seqlen, bias)
    sizes = (n, dims.nq * dims.hd)
    checks.shape(op, "dout", dout, sizes, str(list(sizes)), "it is the gradient of the forward's out")
    checks.alike(op, "dout", dout, "proj", proj)
    dproj = checks.output(op, "dproj", dproj, proj.shape, proj.dtype, proj)
    for name, grad, weight in (("dq_norm", dq_norm, q_norm), ("dk_norm", dk_norm, k_norm), ("dbias", dbias, bias)):
        if grad is not None:
            if weight is None:
                checks.fail(op, name, f"None without {name[1:]}", tuple(grad.shape), "it is that vector's gradient")
            checks.vector(op, name, grad, weight.shape[0], "proj", proj)
            checks.writable(op, name, grad)

    positions = token_positions(op, cu_seqlens, n, index)
    grid = _Grid(proj, q_norm, k_norm, cos, sin, dims, positions, max_seqlen, eps, bias, zero_centered)
    acc = grid.q.dtype
    columns, dcolumns = _columns(proj, dims), _columns(dproj, dims)
    do = dout.unflatten(1, (dims.nq, dims.hd)).to(acc)
    o = o_saved.unflatten(1, (dims.nq, dims.hd)).to(acc)
    if columns.gate is not None and dcolumns.gate is not None:
        sig = torch.sigmoid(columns.gate.to(acc))  # [N, nq, hd]
        dcolumns.gate.copy_(do * o * sig * (1 - sig))
        do = do * sig
    delta = grid.heads((do * o).sum(-1, keepdim=True))  # [B, nkv, G, T, 1]
    do = grid.heads(do)
    dq, dk, dv = torch.empty_like(grid.q), torch.zeros_like(grid.k), torch.zeros_like(grid.v)

    for start in range(0, max_seqlen, grid.block):
        p, lo, stop = grid.scores(start)
        p.sub_(lse[..., start:stop].flatten(2).unsqueeze(-1)).exp_()  # [B, nkv, G*Q, keys]
        do_block = do[..., start:stop, :].flatten(2, 3)
        dv[:, :, lo:stop] += torch.matmul(p.transpose(2, 3), do_block)
        ds = torch.matmul(do_block, grid.v[:, :, lo:stop].transpose(2, 3))
        ds.sub_(delta[..., start:stop, :].flatten(2, 3)).mul_(p)
        dk[:, :, lo:stop] += torch.matmul(ds.transpose(2, 3), grid.q[..., start:stop, :].flatten(2, 3))
        dq[..., start:stop, :] = torch.matmul(ds, grid.k[:, :, lo:stop]).unflatten(2, (-1, stop - start))

    dq.mul_(dims.hd**-0.5)  # grid.q carries the scale, so dk has it already
    for name, dx, weight, dweight in (("q", dq, q_norm, dq_norm), ("k", dk, k_norm, dk_norm), ("v", dv, None, None)):
        dx = grid.tokens(dx)
        if name != "v":
            dx = _norm_rope_bwd(dx, _part(name, proj, bias, dims), weight, grid, eps, dweight, accumulate)
        getattr(dcolumns, name).copy_(dx)
        if dbias is not None:
            _write(getattr(_columns(dbias.unsqueeze(0), dims), name), dx.sum(0, keepdim=True), accumulate)
    return dproj


class _Columns(NamedTuple):
    q: Tensor  # [N, nq, hd] view
    gate: Tensor | None  # [N, nq, hd] view
    k: Tensor  # [N, nkv, hd] view
    v: Tensor  # [N, nkv, hd] view


def _columns(proj: Tensor, dims: AttnDims) -> _Columns:
    nq, nkv, hd = dims[:3]
    q, k, v = proj.split([dims.q_width, nkv * hd, nkv * hd], dim=1)
    q, gate = q.unflatten(1, (nq, 2, hd)).unbind(2) if dims.gate else (q.unflatten(1, (nq, hd)), None)
    return _Columns(q, gate, k.unflatten(1, (nkv, hd)), v.unflatten(1, (nkv, hd)))


def _part(name: str, proj: Tensor, bias: Tensor | None, dims: AttnDims) -> Tensor:
    """q, k or v [N, heads, hd] with its bias, in the accumulation dtype; a view of proj when that changes nothing."""
    part: Tensor = getattr(_columns(proj, dims), name).to(checks.acc_dtype(proj.dtype))
    return part if bias is None else part + getattr(_columns(bias.unsqueeze(0), dims), name)


class _Grid:
    """Normed and rotated q (scaled by hd^-½), k, and v by head, and which keys a query sees.

    q [B, nkv, G, T, hd], k and v [B, nkv, T, hd], G = nq/nkv: key heads are never repeated, the G query heads of one
    are rows of the same product.
    """

    def __init__(
        self,
        proj: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        dims: AttnDims,
        positions: Tensor,
        window: int,
        eps: float,
        bias: Tensor | None,
        zero_centered: bool,
    ) -> None:
        self.batch, self.window, self.groups = proj.shape[0] // window, window, dims.nq // dims.nkv
        self.block = BLOCK_Q.get(proj.device.type, BLOCK_Q["cpu"])
        self.token_shape = (self.batch, window, dims.nkv, self.groups, dims.hd)
        self.cos, self.sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [N, 1, rot/2]
        # A query sees exactly the keys from its own sequence's start to itself.
        self.place = torch.arange(window, device=proj.device)
        self.first = self.place - positions.view(-1, window)  # [B, T]
        self.zero_centered = zero_centered
        self.q = self.heads(self._turned("q", q_norm, proj, bias, dims, eps).mul_(dims.hd**-0.5))
        self.k = self.heads(self._turned("k", k_norm, proj, bias, dims, eps)).squeeze(2)
        self.v = self.heads(_part("v", proj, bias, dims)).squeeze(2)

    def _turned(
        self, name: str, norm: Tensor | None, proj: Tensor, bias: Tensor | None, dims: AttnDims, eps: float
    ) -> Tensor:
        """q or k by token, normed where there is a norm, and rotated: memory of its own."""
        x = _part(name, proj, bias, dims)
        if norm is not None:
            x = normalize(x, eps)[0].mul_(gain(norm, self.zero_centered))
        return _rope(x, self.cos, self.sin)

    def heads(self, x: Tensor) -> Tensor:
        """[N, heads, d] by token -> [B, nkv, heads/nkv, T, d] by head, contiguous."""
        groups = x.shape[1] // self.token_shape[2]
        x = x.reshape(self.batch, self.window, self.token_shape[2], groups, x.shape[2])
        return x.permute(0, 2, 3, 1, 4).contiguous()

    def tokens(self, x: Tensor) -> Tensor:
        """[B, nkv, (G,) T, hd] by head -> [N, heads, hd] by token."""
        x = x if x.dim() == 5 else x.unsqueeze(2)
        heads = x.shape[1] * x.shape[2]
        return x.permute(0, 3, 1, 2, 4).reshape(self.batch * self.window, heads, x.shape[-1])

    def scores(self, start: int) -> tuple[Tensor, int, int]:
        """Masked scores of one block of queries. -> ([B, nkv, G*Q, stop - lo], first key, one past the last key)."""
        stop = min(start + self.block, self.window)
        first = self.first[:, start:stop]
        # On the CPU the earliest key is free to read, and packed records make most of the keys before it dead.
        lo = 0 if first.device.type != "cpu" or first.numel() == 0 else int(first.min())
        q = self.q[..., start:stop, :].flatten(2, 3)
        scores = torch.matmul(q, self.k[:, :, lo:stop].transpose(2, 3))
        key, query = self.place[lo:stop], self.place[start:stop].unsqueeze(1)
        hidden = (key > query) | (key < first.unsqueeze(-1))  # [B, Q, keys]
        scores.unflatten(2, (self.groups, -1)).masked_fill_(hidden[:, None, None], float("-inf"))
        return scores, lo, stop


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn dimension i and i + rot/2 by the angle of i; dimensions from rot on pass. x [..., hd], cos [..., rot/2]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def _norm_rope_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    grid: _Grid,
    eps: float,
    dweight: Tensor | None,
    accumulate: bool,
) -> Tensor:
    """From the gradient of rope(x̂·gain), or rope(x), to dx and dweight (`=` or `+=`). dy, x, dx [N, heads, hd]."""
    dy = _rope(dy, grid.cos, -grid.sin)
    if weight is None:
        return dy
    xhat, rstd = normalize(x, eps)
    if dweight is not None:
        _write(dweight, (dy * xhat).sum((0, 1)), accumulate)
    return normalize_bwd(dy.mul_(gain(weight, grid.zero_centered)), xhat, rstd)


def _write(out: Tensor, value: Tensor, accumulate: bool) -> None:
    """out `=` or `+=` value."""
    if accumulate:
        out.add_(value)
    else:
        out.copy_(value)


def _check(
    op: str,
    proj: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    dims: AttnDims,
    cu_seqlens: Tensor,
    max_seqlen: int,
    bias: Tensor | None,
) -> int:
    nq, nkv, hd, rot, gate = dims
    if min(nq, nkv, hd) < 1 or nq % nkv or rot % 2 or not 0 <= rot <= hd:
        checks.fail(op, "dims", "nq a multiple of nkv and rot even, at most hd", dims, "read them from the config")
    rows = f"rows are nq*{'(q|gate)' if gate else 'q'}, then k, then v"
    checks.shape(op, "proj", proj, (None, dims.width), f"[N, {dims.width}]", rows)
    checks.dtype(op, "proj", proj, checks.FLOATS, "convert it with .to()")
    if (q_norm is None) != (k_norm is None):
        checks.fail(op, "q_norm and k_norm", "both given or both None", "one of them", "a model has both or none")
    if bias is not None and gate:
        checks.fail(op, "bias", "None with an output gate", tuple(bias.shape), "set dims.gate to False, or drop it")
    for name, vector, size in (("q_norm", q_norm, hd), ("k_norm", k_norm, hd), ("bias", bias, dims.width)):
        if vector is not None:
            checks.vector(op, name, vector, size, "proj", proj)
    n = proj.shape[0]
    if max_seqlen < 1 or n % max_seqlen:
        checks.fail(op, "max_seqlen", f"a divisor of N = {n}", max_seqlen, "it is the window: N = batch*window")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dim() != 2 or table.shape[0] < max_seqlen or table.shape[1] != rot // 2:
            expected = f"[at least {max_seqlen}, {rot // 2}]"
            checks.fail(op, name, expected, tuple(table.shape), "build it with rope_table(max_seqlen, rot, ...)")
        checks.dtype(op, name, table, (checks.acc_dtype(proj.dtype),), "build it with rope_table")
        checks.same_device(op, name, table, "proj", proj)
    checks.shape(op, "cu_seqlens", cu_seqlens, (None,), "[S+1]", "it holds the sequence starts, then N")
    checks.dtype(op, "cu_seqlens", cu_seqlens, checks.INTS, "convert it with .to(torch.int32)")
    checks.same_device(op, "cu_seqlens", cu_seqlens, "proj", proj)
    return n
