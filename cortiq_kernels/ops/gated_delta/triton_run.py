"""Launches of the gated delta rule's kernels, shared by the op of its own (chunk_triton.py) and the mixer's
(mixer_triton.py). Shapes are checked by the callers.

Tokens are one packed row of N; q, k [N, HK, DK] and v [N, HV, DV] are views with unit last stride and any others.
What is made for one kernel by another lies head by head, [HV, N, .], so that a chunk's tile is one piece of memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import configs
from . import bwd_triton as bwd
from . import conv_triton as conv
from . import fwd_triton as fwd
from . import gates_triton as gates
from . import norm_triton as norms
from . import wy_triton as wy
from .chunks import ChunkIndex
from .layout import CHUNK, GdnDims


class Rule(NamedTuple):
    """Inputs of the recurrence, and what `prepare` makes of them."""

    q: Tensor  # [N, HK, DK]
    k: Tensor  # [N, HK, DK]
    v_shape: tuple[int, int, int]  # N, HV, DV
    t: Tensor  # [HV, N, CHUNK] working dtype
    g: Tensor  # [HV, N] f32 decay sums within chunks, in units of log 2
    beta: Tensor  # [HV, N] f32
    chunks: ChunkIndex
    scale: float

    @property
    def n(self) -> int:
        return self.q.shape[0]

    @property
    def shape(self) -> dict[str, int]:
        """The constexprs that most kernels share."""
        hv, dk, dv = self.v_shape[1], self.q.shape[2], self.v_shape[2]
        return {"HV": hv, "GROUP": hv // self.q.shape[1], "DK": dk, "DV": dv}

    @property
    def kpad(self) -> int:
        return padded(self.q.shape[2])

    @property
    def vpad(self) -> int:
        return padded(self.v_shape[2])

    def launch(self, kernel: str) -> dict[str, int]:
        """Launch configuration of `kernel`."""
        return configs.launch("gated_delta", max(self.kpad, self.vpad), kernel)


class Gates(NamedTuple):
    """Where g and beta come from: given as they are (a_log None), or the mixer's a | b with A_log and dt_bias."""

    a: Tensor  # [N, HV], unit last stride
    b: Tensor  # [N, HV], the row stride of a
    a_log: Tensor | None = None  # [HV] f32
    dt: Tensor | None = None  # [HV] f32


def padded(size: int) -> int:
    """The tile width of a head size in a product: the next power of two, at least 64.

    Narrower tiles are left out on purpose: a Hopper product with 32 columns (shared memory swizzled by 64 bytes) reads
    out of range in some kernels of Triton 3.6 and 3.7, now and then (triton#10573, triton#11366; here compute-sanitizer
    found state_kernel and local_kernel). With 64 columns none did.
    """
    return max(64, power(size))


def power(size: int) -> int:
    """The tile width of anything else: the next power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def block(wanted: int, size: int) -> int:
    """Channels of a loop over `size` of them: as many as wanted where that divides it, else all."""
    return wanted if size % wanted == 0 else padded(size)


def prepare(q: Tensor, k: Tensor, v: Tensor, source: Gates, chunks: ChunkIndex, scale: float) -> Rule:
    """`Rule` of these inputs: decay sums, beta and the chunk inverses."""
    n, hk, dk = k.shape
    hv = v.shape[1]
    t = torch.empty(hv, n, CHUNK, dtype=k.dtype, device=k.device)
    g, beta = (torch.empty(hv, n, dtype=torch.float32, device=k.device) for _ in range(2))
    rule = Rule(q, k, (n, hv, v.shape[2]), t, g, beta, chunks, scale)
    raw = source.a_log is not None
    wy.wy_kernel[(chunks.capacity * hk,)](
        k, source.a, source.b, source.a_log if raw else g, source.dt if raw else g, chunks.table, t, g, beta,
        n, k.stride(0), k.stride(1), source.a.stride(0),
        HK=hk, GROUP=hv // hk, DK=dk, KPAD=rule.kpad, RAW=raw, TINY=2.0**-14 if k.dtype == torch.float16 else 1e-30,
        **rule.launch("wy"),
    )  # fmt: skip
    return rule


class States(NamedTuple):
    """States that enter the chunks, value channels first, where the chunks' table says."""

    even: Tensor  # [half, HV, DV, DK] working dtype
    odd: Tensor


def states(rule: Rule, v: Tensor, h0: Tensor | None, *, final: bool) -> tuple[States, Tensor, Tensor | None]:
    """(entering states, V' [HV, N, DV], final states [S, HV, DK, DV] f32 or None)."""
    n, hv, dv = v.shape
    dk, s, like = rule.q.shape[2], rule.chunks.sequences, rule.k
    h = States(*(_half_states(rule) for _ in range(2)))
    vn = torch.empty(hv, n, dv, dtype=like.dtype, device=like.device)
    ht = torch.empty(s, hv, dk, dv, dtype=torch.float32, device=like.device) if final else None
    launch = dict(rule.launch("state"))
    launch["BV"] = block(launch["BV"], dv)
    fwd.state_kernel[(s * hv * -(-dv // launch["BV"]),)](
        rule.k, v, rule.t, rule.g, rule.beta, rule.chunks.cu_seqlens, rule.chunks.offsets,
        rule.g if h0 is None else h0, h.even, h.odd, vn, rule.g if ht is None else ht,
        n, rule.k.stride(0), rule.k.stride(1), v.stride(0), v.stride(1),
        **rule.shape, KPAD=rule.kpad, HAS_H0=h0 is not None, HAS_HT=final, **launch,
    )  # fmt: skip
    return h, vn, ht


def _half_states(rule: Rule) -> Tensor:
    _, hv, dv = rule.v_shape
    shape = (rule.chunks.half, hv, dv, rule.q.shape[2])
    return torch.empty(shape, dtype=rule.k.dtype, device=rule.k.device)


def advance(rule: Rule, even: Tensor, vn: Tensor) -> States:
    """The odd chunks' entering states again, from those before them."""
    n, hv, dv = rule.v_shape
    odd = _half_states(rule)
    launch = dict(rule.launch("advance"))
    launch["BV"] = block(launch["BV"], dv)
    fwd.advance_kernel[(rule.chunks.capacity * hv * -(-dv // launch["BV"]),)](
        rule.k, vn, rule.g, even, odd, rule.chunks.table, n, rule.k.stride(0), rule.k.stride(1),
        **rule.shape, KPAD=rule.kpad, **launch,
    )  # fmt: skip
    return States(even, odd)


class Norm(NamedTuple):
    """The mixer's gated norm, the epilogue of the output."""

    z: Tensor  # [N, HV*DV], unit last stride
    weight: Tensor  # [DV] f32
    eps: float


class Kept(NamedTuple):
    """What the gated norm keeps for its backward."""

    o: Tensor  # [HV, N, DV]
    rstd: Tensor  # [HV, N] f32


def outputs(rule: Rule, h: States, vn: Tensor, out: Tensor, norm: Norm | None, *, keep: bool = False) -> Kept | None:
    """o, or with `norm` the mixer's output, into out [N, HV*DV] (unit last stride)."""
    n, hv, dv = rule.v_shape
    kept = None
    if keep:
        kept = Kept(torch.empty_like(vn), torch.empty(hv, n, dtype=torch.float32, device=vn.device))
    z = out if norm is None else norm.z
    fwd.output_kernel[(rule.chunks.capacity * hv,)](
        rule.q, rule.k, vn, rule.g, *h, z, rule.g if norm is None else norm.weight, rule.chunks.table,
        out if kept is None else kept.o, rule.g if kept is None else kept.rstd, out,
        n, rule.scale, 0.0 if norm is None else norm.eps,
        rule.q.stride(0), rule.q.stride(1), rule.k.stride(0), rule.k.stride(1), z.stride(0), out.stride(0),
        **rule.shape, KPAD=rule.kpad, VPAD=rule.vpad, NORM=norm is not None, KEEP=keep, **rule.launch("output"),
    )  # fmt: skip
    return kept


class NormGrads(NamedTuple):
    """What `norm_backward` makes."""

    do: Tensor  # [HV, N, DV] gradient of o
    beta: Tensor  # [HV, N] f32, as the forward had it
    dnorm: Tensor  # [P, HV, DV] f32 parts


def norm_backward(kept: Kept, norm: Norm, b: Tensor, dout: Tensor, dz: Tensor, out: Tensor | None) -> NormGrads:
    """dz [N, HV*DV] `=`, and unless None the forward's out again; dout like them, b [N, HV], unit last strides."""
    hv, n, dv = kept.o.shape
    launch = configs.launch("gated_delta", padded(dv), "norm_bwd")
    parts = -(-n // launch["ROWS"])
    do, beta = torch.empty_like(kept.o), torch.empty_like(kept.rstd)
    dnorm = torch.empty(parts, hv, dv, dtype=torch.float32, device=do.device)
    again = dz if out is None else out
    norms.gated_norm_bwd_kernel[(parts * hv,)](
        kept.o, kept.rstd, norm.z, b, norm.weight, dout, do, dz, again, beta, dnorm,
        n, norm.z.stride(0), b.stride(0), dout.stride(0), dz.stride(0), again.stride(0),
        HV=hv, DV=dv, PAD=power(dv), WRITE_OUT=out is not None, **launch,
    )  # fmt: skip
    return NormGrads(do, beta, dnorm)


def dstates(rule: Rule, do: Tensor, dht: Tensor | None, *, want_dh0: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dh [cap, HV, DV, DK] gradients of leaving states, Y [HV, N, DV], dh0 [S, HV, DK, DV] f32 or None).

    do: [N, HV, DV], unit last stride.
    """
    n, hv, dv = rule.v_shape
    dk, s, like = rule.q.shape[2], rule.chunks.sequences, rule.k
    dh = torch.empty(rule.chunks.capacity, hv, dv, dk, dtype=like.dtype, device=like.device)
    y = torch.empty(hv, n, dv, dtype=like.dtype, device=like.device)
    dh0 = torch.empty(s, hv, dk, dv, dtype=torch.float32, device=like.device) if want_dh0 else None
    launch = dict(rule.launch("dstate"))
    launch["BV"] = block(launch["BV"], dv)
    bwd.dstate_kernel[(s * hv * -(-dv // launch["BV"]),)](
        rule.q, rule.k, rule.t, rule.g, rule.beta, do, rule.chunks.cu_seqlens, rule.chunks.offsets,
        rule.g if dht is None else dht, dh, y, rule.g if dh0 is None else dh0,
        n, rule.scale,
        rule.q.stride(0), rule.q.stride(1), rule.k.stride(0), rule.k.stride(1), do.stride(0), do.stride(1),
        **rule.shape, KPAD=rule.kpad, HAS_DHT=dht is not None, HAS_DH0=want_dh0, **launch,
    )  # fmt: skip
    return dh, y, dh0


class InputGrads(NamedTuple):
    """What `input_grads` makes."""

    dqk: Tensor  # [2, HK, N, DK] dq, dk
    dg: Tensor  # [P, HV, N] f32 parts of dG
    dbeta: Tensor  # [HV, N] f32 beta dbeta


def input_grads(rule: Rule, h: States, vn: Tensor, dh: Tensor, do: Tensor, y: Tensor) -> InputGrads:
    """dq, dk, dG and beta dbeta; do as `dstates` takes it, the others as it and `states` make them."""
    n, hk, size = rule.q.shape
    hv = rule.v_shape[1]
    launch = rule.launch("input")
    parts = -(-size // launch["BK"])
    dqk = torch.empty(2, hk, n, size, dtype=rule.q.dtype, device=vn.device)
    dg = torch.empty(parts, hv, n, dtype=torch.float32, device=vn.device)
    dbeta = torch.empty(hv, n, dtype=torch.float32, device=vn.device)
    bwd.input_kernel[(rule.chunks.capacity * hk * parts,)](
        rule.q, rule.k, vn, rule.g, rule.beta, *h, dh, do, y, rule.chunks.table, dqk[0], dqk[1], dg, dbeta,
        n, rule.scale,
        rule.q.stride(0), rule.q.stride(1), rule.k.stride(0), rule.k.stride(1), do.stride(0), do.stride(1),
        **rule.shape, VPAD=rule.vpad, **launch,
    )  # fmt: skip
    return InputGrads(dqk, dg, dbeta)


def gate_grads(rule: Rule, grads: InputGrads, source: Gates, da: Tensor, db: Tensor) -> Tensor | None:
    """da, db [N, HV] (same strides) `=`: the gradients of `source`'s a and b. Parts [cap, 2, HV] f32 of dA_log and
    ddt_bias where it has A_log, else None."""
    n, hv = rule.n, rule.v_shape[1]
    raw = source.a_log is not None
    parts = torch.empty(rule.chunks.capacity, 2, hv, dtype=torch.float32, device=da.device) if raw else None
    gates.gates_bwd_kernel[(rule.chunks.capacity,)](
        grads.dg, grads.dbeta, source.a, rule.beta, source.a_log if raw else rule.g, source.dt if raw else rule.g,
        rule.chunks.table, da, db, parts if raw else rule.g,
        n, source.a.stride(0), da.stride(0),
        HV=hv, PAD=power(hv), RAW=raw, PARTS=grads.dg.shape[0], **rule.launch("gates_bwd"),
    )  # fmt: skip
    return parts


def _spans(dims: GdnDims, values: bool) -> list[dict[str, Any]]:
    """Launches of a convolution: all heads at once where they are alike, else key heads and value heads."""
    keys, common = 2 * dims.nk, {"norm_heads": 2 * dims.nk, "scaled_heads": dims.nk}
    if dims.dk == dims.dv:
        return [{"head0": 0, "start": 0, "HEADS": keys + dims.nv * values, "D": dims.dk, **common}]
    return [
        {"head0": 0, "start": 0, "HEADS": keys, "D": dims.dk, **common},
        {"head0": keys, "start": keys * dims.dk, "HEADS": dims.nv, "D": dims.dv, **common},
    ][: 1 + values]


def conv_forward(
    proj: Tensor, weight: Tensor, positions: Tensor, dims: GdnDims, *, values: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """q^, k^ [N, nk, dk] and v [N, nv, dv] (of no heads without `values`) of projection rows, views of one tensor."""
    n, keys = proj.shape[0], dims.nk * dims.dk
    wide = dims.nv * dims.dv if values else 0
    y = torch.empty(n, 2 * keys + wide, dtype=proj.dtype, device=proj.device)
    for span in _spans(dims, values):
        pad = power(span["D"])
        launch = configs.launch("gated_delta", padded(span["D"]), "conv")
        conv.conv_kernel[(-(-n // launch["ROWS"]) * span["HEADS"],)](
            proj, weight, positions, y, n, dims.dk**-0.5, proj.stride(0), y.stride(0),
            **span, PAD=pad, W=dims.conv, **launch,
        )  # fmt: skip
    q, k, v = y.split([keys, keys, wide], dim=1)
    return q.unflatten(1, (dims.nk, dims.dk)), k.unflatten(1, (dims.nk, dims.dk)), v.view(n, -1, dims.dv)


def conv_backward(
    proj: Tensor, weight: Tensor, positions: Tensor, dims: GdnDims, dqk: Tensor, y: Tensor, beta: Tensor, dproj: Tensor
) -> Tensor:
    """The q | k | v columns of dproj `=`, from dqk [2, nk, N, dk], Y and beta; returns parts [P, C, W] of dweight."""
    n, width = proj.shape[0], dims.conv_width
    spans = _spans(dims, True)
    launches = [configs.launch("gated_delta", padded(s["D"]), "conv_bwd") for s in spans]
    parts = [-(-n // (a["STRIPS"] * a["STEPS"])) for a in launches]
    make = torch.empty if len(set(parts)) == 1 else torch.zeros
    dw = make(max(parts), width, dims.conv, dtype=torch.float32, device=proj.device)
    for span, launch, count in zip(spans, launches, parts, strict=True):
        conv.conv_bwd_kernel[(count * span["HEADS"],)](
            proj, weight, positions, dqk, y, beta, dproj, dw, n, dims.dk**-0.5, width,
            proj.stride(0), dproj.stride(0),
            **span, PAD=power(span["D"]), W=dims.conv, **launch,
        )  # fmt: skip
    return dw
