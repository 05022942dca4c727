"""The gated delta rule and the mixer as PyTorch operators, for code that uses autograd or torch.compile.

    torch.ops.cortiq.chunk_gated_delta_rule(q, k, v, g, beta, initial_state, cu_seqlens, scale, output_final_state,
                                            save, backend) -> (o, final_state, what the backward needs ..)
    torch.ops.cortiq.gdn_mixer(proj, conv_weight, A_log, dt_bias, norm_weight, cu_seqlens, nk, nv, dk, dv, max_seqlen,
                               eps, save, backend) -> (out, what the backward needs ..)

and their backwards, `.._bwd`. Importing this module registers them; nothing else in the package imports it, and the
package's own training step calls the plain functions. Call `chunk_gated_delta_rule` and `gdn_mixer` below. Formulas,
shapes and errors are those of ops/gated_delta/chunk.py and mixer.py.

Under torch.compile each direction is one opaque call: no graph break, nothing of it is fused with its surroundings.
What the kernels keep for the backward are outputs of the forward operator; without gradients they are empty, [0].  The
torch path keeps nothing but its inputs and runs its forward again in the backward: its sizes would depend on the values
of cu_seqlens.  A gradient of the gradient is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cortiq_kernels.ops.checks import acc_dtype
from cortiq_kernels.ops.gated_delta.chunk import ChunkSaved, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from cortiq_kernels.ops.gated_delta.chunks import ChunkIndex
from cortiq_kernels.ops.gated_delta.layout import CHUNK, L2_EPS, GdnDims, unfit_for_kernels, unit_stride
from cortiq_kernels.ops.gated_delta.mixer import GdnSaved, gdn_mixer_bwd, gdn_mixer_fwd
from cortiq_kernels.ops.triton_gate import use_triton

# What the kernels keep besides inputs; the last two are of `ChunkIndex`.
SCAN_KEPT = ("t", "g", "beta", "even", "odd", "vn", "table", "offsets")
MIXER_KEPT = ("t", "g", "rstd", "even", "o", "vn", "table", "offsets")


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(o [B, T, HV, DV] in v's dtype, the final state [S, HV, DK, DV] in float32 (float64 for float64), or None).

    Gradients of q, k, v, g, beta and initial_state, in the dtype of each, from those of o and of the final state.

    Args:
        q, k: [B, T, HK, DK].  v: [B, T, HV, DV], HV a multiple of HK.  Any strides.
        g, beta: [B, T, HV], log decay (at most 0) and step size, best in float32.
        scale: factor of q, default DK**-0.5.
        initial_state: [S, HV, DK, DV], one a sequence; None is zero.
        use_qk_l2norm_in_kernel: q and k are first divided by sqrt(sum x^2 + 1e-6), in float32, rounded to their dtype.
            (Before the kernel: the name is the field's.)
        cu_seqlens: [S+1] starts of packed sequences, with B 1.

    Raises:
        ValueError: shapes, dtypes and devices that do not fit.
    """
    if use_qk_l2norm_in_kernel:
        q, k = _unit(q), _unit(k)
    tensors = (q, k, v, g, beta, initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    o, final, *_ = torch.ops.cortiq.chunk_gated_delta_rule(
        *tensors, cu_seqlens, scale, output_final_state, save, "auto"
    )
    return o, final if output_final_state else None


def gdn_mixer(
    proj: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    *,
    dims: GdnDims,
    cu_seqlens: Tensor,
    max_seqlen: int,
    eps: float,
) -> Tensor:
    """Projection rows [N, dims.width] to the input of the output projection, [N, nv*dv] in proj's dtype.

    Convolution, norms, gates, recurrence and gated norm in one; gradients of proj and of the four weights, in the dtype
    of each. The weights may have any float dtype; they are used in float32 (float64 for a float64 proj). proj must not
    be changed in place before the backward. Arguments, and ValueErrors, as in ops/gated_delta/mixer.py.
    """
    weights = [w.to(acc_dtype(proj.dtype)) for w in (conv_weight, A_log, dt_bias, norm_weight)]
    save = torch.is_grad_enabled() and any(x.requires_grad for x in (proj, *weights))
    return torch.ops.cortiq.gdn_mixer(proj, *weights, cu_seqlens, *dims[:4], max_seqlen, eps, save, "auto")[0]


def _unit(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dimension."""
    wide = x.to(acc_dtype(x.dtype))
    return (wide * (wide.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()).to(x.dtype)


def _nothing(like: Tensor) -> list[Tensor]:
    """What a forward keeps that keeps nothing: a tensor each, for an operator may not return the same memory twice."""
    return [like.new_empty((0,)) for _ in SCAN_KEPT]


def _fake_kept(like: Tensor, n: int, hv: int, dk: int, dv: int, sequences: int, *, mixer: bool) -> list[Tensor]:
    """What the kernels keep of n tokens, in the order of SCAN_KEPT or MIXER_KEPT."""
    cap = n // CHUNK + sequences
    half = ((cap + sequences) // 2, hv, dv, dk)
    sizes = ((hv, n, CHUNK), (hv, n), (hv, n), half, (hv, n, dv) if mixer else half, (hv, n, dv), (cap, 3))
    work, acc, ints = like.dtype, torch.float32, torch.int32
    types = (work, acc, acc, work, work, work, ints, ints)
    return [like.new_empty(s, dtype=t) for s, t in zip((*sizes, (sequences + 1,)), types, strict=True)]


# The recurrence


def _scan_kernels(q: Tensor, v: Tensor, backend: str) -> bool:
    """Whether the forward will take the Triton kernels."""
    unfit = unfit_for_kernels(v.dtype, q.shape[-1], v.shape[-1], gpu=v.is_cuda)
    return use_triton("chunk_gated_delta_rule_fwd", v, backend, unfit)


@torch.library.custom_op(
    "cortiq::chunk_gated_delta_rule",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state=None, Tensor? cu_seqlens=None,"
    " float? scale=None, bool output_final_state=False, bool save=True, str backend='auto')"
    " -> (Tensor o, Tensor final_state, Tensor t, Tensor g_sums, Tensor beta_used, Tensor even, Tensor odd, Tensor vn,"
    " Tensor table, Tensor offsets)",
)
def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    save: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """The operator behind `chunk_gated_delta_rule`; a final state that is not asked for is an empty [0]."""
    o, final, saved = chunk_gated_delta_rule_fwd(
        q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, save=save, backend=backend
    )
    final = v.new_empty((0,)) if final is None else final
    if saved is None or isinstance(saved, ChunkSaved):
        return o, final, *_nothing(v)
    rule = saved.rule
    return o, final, rule.t, rule.g, rule.beta, *saved.h, saved.vn, rule.chunks.table, rule.chunks.offsets


@_scan.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    save: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    (b, t), (hv, dv), dk = q.shape[:2], v.shape[2:], q.shape[3]
    sequences = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o = v.new_empty(v.shape)
    final = v.new_empty((0,))
    if output_final_state:
        final = v.new_empty((sequences, hv, dk, dv), dtype=acc_dtype(v.dtype))
    if not (save and _scan_kernels(q, v, backend)):
        return o, final, *_nothing(v)
    return o, final, *_fake_kept(v, b * t, hv, dk, dv, sequences, mixer=False)


@torch.library.custom_op(
    "cortiq::chunk_gated_delta_rule_bwd",
    mutates_args=(),
    schema="(Tensor do, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta,"
    " Tensor? initial_state, Tensor? cu_seqlens, Tensor[] kept, float? scale)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state)",
)
def _scan_bwd(
    do: Tensor,
    dfinal_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    kept: list[Tensor],
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Gradients of the inputs; that of an initial state that was not given is an empty [0]."""
    if kept[0].dim() == 3:
        from cortiq_kernels.ops.gated_delta.chunk_triton import restored

        scale = q.shape[-1] ** -0.5 if scale is None else scale
        saved: Any = restored((q, k, v, g, beta), scale, cu_seqlens, kept, has_state=initial_state is not None)
    else:
        inputs = (q, k, v, g, beta, scale, initial_state, False, cu_seqlens)
        saved = chunk_gated_delta_rule_fwd(*inputs, backend="torch")[2]
    *grads, dh0 = chunk_gated_delta_rule_bwd(do, saved, dfinal_state)
    if dh0 is None or initial_state is None:
        return *grads, v.new_empty((0,))
    return *grads, dh0.to(initial_state.dtype)


@_scan_bwd.register_fake
def _(
    do: Tensor,
    dfinal_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    kept: list[Tensor],
    scale: float | None,
) -> tuple[Tensor, ...]:
    state = v.new_empty((0,)) if initial_state is None else initial_state.new_empty(initial_state.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v, g, beta)), state


def _scan_keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, scale, output_final_state, _, _ = inputs
    _, final, *kept = output
    ctx.mark_non_differentiable(*kept, *(() if output_final_state else (final,)))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *kept)
    ctx.scale = scale


@once_differentiable
def _scan_grads(ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_kept: None) -> tuple[Tensor | None, ...]:
    tensors, kept = ctx.saved_tensors[:7], list(ctx.saved_tensors[7:])
    if do is None:
        if dfinal is None:
            return (None,) * 11
        do = torch.zeros_like(tensors[2])
    *grads, dh0 = torch.ops.cortiq.chunk_gated_delta_rule_bwd(do, dfinal, *tensors, kept, ctx.scale)
    return *grads, None if tensors[5] is None else dh0, *(None,) * 5


_scan.register_autograd(_scan_grads, setup_context=_scan_keep)


# The mixer


def _mixer_kernels(proj: Tensor, dk: int, dv: int, taps: int, backend: str) -> bool:
    unfit = unfit_for_kernels(proj.dtype, dk, dv, taps, gpu=proj.is_cuda)
    return proj.shape[0] > 0 and use_triton("gdn_mixer_fwd", proj, backend, unfit)


@torch.library.custom_op(
    "cortiq::gdn_mixer",
    mutates_args=(),
    schema="(Tensor proj, Tensor conv_weight, Tensor A_log, Tensor dt_bias, Tensor norm_weight, Tensor cu_seqlens,"
    " int nk, int nv, int dk, int dv, SymInt max_seqlen, float eps, bool save=True, str backend='auto')"
    " -> (Tensor out, Tensor t, Tensor g_sums, Tensor rstd, Tensor even, Tensor o, Tensor vn, Tensor table,"
    " Tensor offsets)",
)
def _mixer(
    proj: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    cu_seqlens: Tensor,
    nk: int,
    nv: int,
    dk: int,
    dv: int,
    max_seqlen: int,
    eps: float,
    save: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """The operator behind `gdn_mixer`."""
    out, saved = gdn_mixer_fwd(
        proj, conv_weight, A_log, dt_bias, norm_weight, dims=GdnDims(nk, nv, dk, dv, conv_weight.shape[-1]),
        cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, eps=eps, save=save, backend=backend,
    )  # fmt: skip
    if saved is None or isinstance(saved, GdnSaved):
        return out, *_nothing(proj)
    o, rstd = saved.kept
    return out, saved.t, saved.g, rstd, saved.h, o, saved.vn, saved.chunks.table, saved.chunks.offsets


@_mixer.register_fake
def _(
    proj: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    cu_seqlens: Tensor,
    nk: int,
    nv: int,
    dk: int,
    dv: int,
    max_seqlen: int,
    eps: float,
    save: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    out = proj.new_empty((proj.shape[0], nv * dv))
    if not (save and _mixer_kernels(proj, dk, dv, conv_weight.shape[-1], backend)):
        return out, *_nothing(proj)
    return out, *_fake_kept(proj, proj.shape[0], nv, dk, dv, cu_seqlens.shape[0] - 1, mixer=True)


@torch.library.custom_op(
    "cortiq::gdn_mixer_bwd",
    mutates_args=(),
    schema="(Tensor dout, Tensor proj, Tensor conv_weight, Tensor A_log, Tensor dt_bias, Tensor norm_weight,"
    " Tensor cu_seqlens, Tensor[] kept, int nk, int nv, int dk, int dv, SymInt max_seqlen, float eps)"
    " -> (Tensor dproj, Tensor dconv, Tensor dA_log, Tensor ddt_bias, Tensor dnorm)",
)
def _mixer_bwd(
    dout: Tensor,
    proj: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    cu_seqlens: Tensor,
    kept: list[Tensor],
    nk: int,
    nv: int,
    dk: int,
    dv: int,
    max_seqlen: int,
    eps: float,
) -> tuple[Tensor, ...]:
    """Gradients of proj and of the weights."""
    weights = (conv_weight, A_log, dt_bias, norm_weight)
    dims = GdnDims(nk, nv, dk, dv, conv_weight.shape[-1])
    common: Any = dict(dims=dims, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, eps=eps)
    if kept[0].dim() == 3:
        from cortiq_kernels.ops.gated_delta.mixer_triton import TritonSaved
        from cortiq_kernels.ops.gated_delta.triton_run import Kept

        t, sums, rstd, h, o, vn, table, offsets = kept
        chunks = ChunkIndex(table, offsets, cu_seqlens.to(torch.int32).contiguous())
        saved: Any = TritonSaved(unit_stride(proj), t, sums, h, vn, Kept(o, rstd), chunks, None)
    else:
        saved = gdn_mixer_fwd(proj, *weights, **common, backend="torch")[1]
    dconv, da, ddt, dnorm = (torch.empty_like(w, memory_format=torch.contiguous_format) for w in weights)
    dproj = gdn_mixer_bwd(dout, saved, *weights, dconv=dconv, dA_log=da, ddt_bias=ddt, dnorm=dnorm, **common)
    return dproj, dconv, da, ddt, dnorm


@_mixer_bwd.register_fake
def _(
    dout: Tensor,
    proj: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    cu_seqlens: Tensor,
    kept: list[Tensor],
    nk: int,
    nv: int,
    dk: int,
    dv: int,
    max_seqlen: int,
    eps: float,
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (proj, conv_weight, A_log, dt_bias, norm_weight))


def _mixer_keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], *output[1:])
    ctx.sizes = inputs[6:12]


@once_differentiable
def _mixer_grads(ctx: Any, dout: Tensor | None, *_kept: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 14
    tensors, kept = ctx.saved_tensors[:6], list(ctx.saved_tensors[6:])
    grads = torch.ops.cortiq.gdn_mixer_bwd(dout, *tensors, kept, *ctx.sizes)
    return *grads, *(None,) * 9


_mixer.register_autograd(_mixer_grads, setup_context=_mixer_keep)
