"""The attention mixer in explicit torch operations: any device and dtype, blockwise over queries.

Scores never exceed B·nq·BLOCK_Q·T elements, and keys behind a block's last query are not touched. What a token must not
see is multiplied by 0: finite values there change no bit as long as no product with them overflows, but a NaN or an
infinity reaches the tokens of its window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortiq_kernels.ops import checks
from cortiq_kernels.ops.rms_norm import gain, normalize, normalize_bwd

from .dims import AttnSaved, Given, VectorGrads, columns, put
from .rope import turn

# Query rows a block: bounds the score matrix; on a CPU small enough that a block's scores stay in cache.
BLOCK_Q = {"cpu": 64, "cuda": 256}


def torch_fwd(a: Given, out: Tensor, save: bool) -> AttnSaved | None:
    """out [N, nq*hd] `=`; returns what the backward needs, None without `save`."""
    grid, proj, dims = _Grid(a), a.proj, a.dims
    o_saved = (proj.new_empty(out.shape) if dims.gate else out) if save else None
    lse = proj.new_empty(grid.q.shape[:-1], dtype=grid.q.dtype) if save else None
    out_grid = out.view(grid.token_shape)
    gate = columns(proj, dims).gate
    gate_grid = None if gate is None else gate.unflatten(0, (-1, a.window)).unflatten(2, (dims.nkv, -1))

    for start in range(0, a.window, grid.block):
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
    return None if o_saved is None or lse is None else AttnSaved(proj, o_saved, lse)


def torch_bwd(dout: Tensor, saved: AttnSaved, a: Given, dproj: Tensor, grads: VectorGrads) -> None:
    """dproj [N, width] `=`, and the vectors' gradients."""
    grid, proj, dims, lse = _Grid(a), a.proj, a.dims, saved.lse
    acc = grid.q.dtype
    cols, dcols = columns(proj, dims), columns(dproj, dims)
    do = dout.unflatten(1, (dims.nq, dims.hd)).to(acc)
    o = saved.o.unflatten(1, (dims.nq, dims.hd)).to(acc)
    if cols.gate is not None and dcols.gate is not None:
        sig = torch.sigmoid(cols.gate.to(acc))  # [N, nq, hd]
        dcols.gate.copy_(do * o * sig * (1 - sig))
        do = do * sig
    delta = grid.heads((do * o).sum(-1, keepdim=True))  # [B, nkv, G, T, 1]
    do = grid.heads(do)
    dq, dk, dv = torch.empty_like(grid.q), torch.zeros_like(grid.k), torch.zeros_like(grid.v)

    for start in range(0, a.window, grid.block):
        p, lo, stop = grid.scores(start)
        p.sub_(lse[..., start:stop].flatten(2).unsqueeze(-1)).exp_()  # [B, nkv, G*Q, keys]
        do_block = do[..., start:stop, :].flatten(2, 3)
        dv[:, :, lo:stop] += torch.matmul(p.transpose(2, 3), do_block)
        ds = torch.matmul(do_block, grid.v[:, :, lo:stop].transpose(2, 3))
        ds.sub_(delta[..., start:stop, :].flatten(2, 3)).mul_(p)
        dk[:, :, lo:stop] += torch.matmul(ds.transpose(2, 3), grid.q[..., start:stop, :].flatten(2, 3))
        dq[..., start:stop, :] = torch.matmul(ds, grid.k[:, :, lo:stop]).unflatten(2, (-1, stop - start))

    dq.mul_(dims.hd**-0.5)  # grid.q carries the scale, so dk has it already
    for name, dx, weight in (("q", dq, a.q_norm), ("k", dk, a.k_norm), ("v", dv, None)):
        dx = grid.tokens(dx)
        if name != "v":
            dx = _norm_rope_bwd(dx, name, weight, a, grid, grads)
        getattr(dcols, name).copy_(dx)
        if grads.dbias is not None:
            part = getattr(columns(grads.dbias.unsqueeze(0), dims), name)
            put(part, dx.sum(0, keepdim=True), grads.accumulate)


def _part(name: str, a: Given) -> Tensor:
    """q, k or v [N, heads, hd] with its bias, in the accumulation dtype; a view of proj when that changes nothing."""
    part: Tensor = getattr(columns(a.proj, a.dims), name).to(checks.acc_dtype(a.proj.dtype))
    return part if a.bias is None else part + getattr(columns(a.bias.unsqueeze(0), a.dims), name)


class _Grid:
    """Normed and rotated q (scaled by hd^-½), k, and v by head, and which keys a query sees.

    q [B, nkv, G, T, hd], k and v [B, nkv, T, hd], G = nq/nkv: key heads are never repeated, the G query heads of one
    are rows of the same product.
    """

    def __init__(self, a: Given) -> None:
        proj, dims, window = a.proj, a.dims, a.window
        self.batch, self.window, self.groups = proj.shape[0] // window, window, dims.group
        self.block = BLOCK_Q.get(proj.device.type, BLOCK_Q["cpu"])
        self.token_shape = (self.batch, window, dims.nkv, self.groups, dims.hd)
        self.cos, self.sin = a.cos[a.positions].unsqueeze(1), a.sin[a.positions].unsqueeze(1)  # [N, 1, rot/2]
        # A query sees exactly the keys from its own sequence's start to itself.
        self.place = torch.arange(window, device=proj.device)
        self.first = self.place - a.positions.view(-1, window)  # [B, T]
        self.q = self.heads(self._turned("q", a.q_norm, a).mul_(dims.hd**-0.5))
        self.k = self.heads(self._turned("k", a.k_norm, a)).squeeze(2)
        self.v = self.heads(_part("v", a)).squeeze(2)

    def _turned(self, name: str, norm: Tensor | None, a: Given) -> Tensor:
        """q or k by token, normed where there is a norm, and rotated: memory of its own."""
        x = _part(name, a)
        if norm is not None:
            x = normalize(x, a.eps)[0].mul_(gain(norm, a.zero_centered))
        return turn(x, self.cos, self.sin)

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


def _norm_rope_bwd(dy: Tensor, name: str, weight: Tensor | None, a: Given, grid: _Grid, grads: VectorGrads) -> Tensor:
    """From the gradient of rope(x̂·gain), or rope(x), to dx and the norm's. dy, x, dx [N, heads, hd]."""
    dy = turn(dy, grid.cos, -grid.sin)
    if weight is None:
        return dy
    xhat, rstd = normalize(_part(name, a), a.eps)
    grads.write(f"d{name}_norm", (dy * xhat).sum((0, 1)))
    return normalize_bwd(dy.mul_(gain(weight, a.zero_centered)), xhat, rstd)
