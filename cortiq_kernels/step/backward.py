"""Backward of the stack: `forward.py` read from the bottom up, one call for one call.

`dx` [N, H] is the gradient of the residual stream, in the working dtype. A branch's gradient is `dx` itself (the
residual add), and each norm adds its share (`+=`). Weight gradients go to the trained store's flat gradient in the
accumulation dtype, `=` on the first micro-batch of a step and `+=` after (`accumulate`); what is not trained gets none
and costs nothing. In a looped stack the visits of a layer add up: `=` on the last one alone, which comes first here.

Two of a layer's four products of weight gradients (gate/up and the mixer's input) run beside the chain on a GPU, on
`buf.lane`: the scans of a mixer leave much of a GPU idle. What they read is waited for where it is written next.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from cortiq_kernels.model.weights import Weights
from cortiq_kernels.ops.attention import attention_mixer_bwd
from cortiq_kernels.ops.embedding import embedding_bwd
from cortiq_kernels.ops.gated_delta import gdn_mixer_bwd
from cortiq_kernels.ops.linear import linear_bwd_w, linear_bwd_x
from cortiq_kernels.ops.rms_norm import RmsNormSaved, add_rms_norm_bwd
from cortiq_kernels.ops.swiglu import swiglu_mlp_bwd
from cortiq_kernels.step.buffers import Buffers, LayerSlots, cut, mixer_widths
from cortiq_kernels.step.forward import (
    Sequences,
    attn_dims,
    attn_vectors,
    gdn_dims,
    layer_again,
    mixer_in,
    mixer_out,
)


def backward(
    w: Weights,
    buf: Buffers,
    dhidden: Tensor,
    seqs: Sequences,
    *,
    stop: int,
    accumulate: bool = False,
    masks: Mapping[int, Tensor] | None = None,
    dmasks: Mapping[int, Tensor] | None = None,
) -> Tensor:
    """Gradient of the hidden states -> gradients of everything trained in layers `stop ..`; returns dx entering `stop`.

    Mixers of layers below `buf.mixers_from` carry no gradient: what trains in them gets none.
    `dmasks` [F] (accumulation dtype, `=`/`+=` by micro-batch) receives the gradient of each layer's per-neuron gate.
    Masks belong to a visit, so to the (virtual) layers as they run.
    """
    g = w.geometry
    norm_backward(w, "final_norm", dhidden, buf.final_norm, buf.dx, accumulate, add_dx=False)
    for i in reversed(range(stop, g.n_virtual)):
        if g.norm_after(i):
            norm_backward(w, "final_norm", buf.dx, buf.loop_norms[i], buf.dx, accumulate=True, add_dx=False)
        mask = masks.get(i) if masks else None
        dmask = dmasks.get(i) if dmasks else None
        again = accumulate or i + g.n_layers < g.n_virtual
        s = buf.kept[i]
        if buf.policy == "layer":
            buf.lane.join()
            layer_again(w, buf, s, i, seqs)
        layer_backward(w, buf, s, i, seqs, again, mask, dmask, accumulate_mask=accumulate)
        if buf.policy == "layer":
            s.mixer = None  # the memory of the next layer's
    buf.lane.join()
    return buf.dx


def embed_backward(w: Weights, dx: Tensor, tokens: Tensor, *, accumulate: bool) -> None:
    """Scatter dx [N, H] into the embedding's gradient. A tied head has already written there, so this then adds."""
    out = w.grad("embed")
    if out is not None:
        embedding_bwd(dx, tokens, out=out, accumulate=accumulate or w.geometry.tied)


def layer_backward(
    w: Weights,
    buf: Buffers,
    s: LayerSlots,
    i: int,
    seqs: Sequences,
    accumulate: bool,
    mask: Tensor | None,
    dmask: Tensor | None,
    accumulate_mask: bool,
) -> None:
    """One layer, MLP then mixer: buf.dx becomes the gradient of the stream that entered the layer (of the stream after
    the mixer, where the mixer carries no gradient: the same by the residual add).

    `accumulate` is of the weights' gradients, `accumulate_mask` of dmask.
    """
    g, at, dx = w.geometry, f"layers.{w.geometry.physical(i)}.", buf.dx
    f = g.intermediate[g.physical(i)]
    dact = linear_bwd_x(dx, w[at + "down"], out=cut(buf.act, f))
    dgate_up, act, _ = swiglu_mlp_bwd(
        dact,
        s.gate_up,
        mask,
        dgate_up=s.gate_up,
        act=dact,
        dmask=dmask,
        accumulate=accumulate_mask,
    )
    weight_grad(w, at + "down", dx, act, accumulate)
    dn = linear_bwd_x(dgate_up, w[at + "gate_up"], out=buf.dn)
    again = s.n_mlp if "n_mlp" in s.again and w.grad(at + "gate_up") is not None else None
    buf.lane.wait("n_mlp")
    norm_backward(w, at + "post_norm", dn, s.norm_mlp, dx, accumulate, again=again)
    buf.lane.run("n_mlp", partial(weight_grad, w, at + "gate_up", dgate_up, s.n_mlp, accumulate))

    if not buf.through_mixer(i):
        return
    p, o = mixer_widths(g, i)
    in_name, out_name = at + mixer_in(g, i), at + mixer_out(g, i)
    dmix, dproj = linear_bwd_x(dx, w[out_name], out=cut(buf.act, o)), cut(buf.dproj, p)
    mix_backward = attn_backward if g.is_full(i) else gdn_backward
    buf.lane.wait("dproj")
    mix_backward(w, s, at, dmix, dproj, seqs, accumulate)
    weight_grad(w, out_name, dx, s.mix, accumulate)
    dn = linear_bwd_x(dproj, w[in_name], out=buf.dn)
    again = s.n_mix if "n_mix" in s.again and w.grad(in_name) is not None else None
    norm_backward(w, at + "input_norm", dn, s.norm_mix, dx, accumulate, again=again)
    buf.lane.run("dproj", partial(weight_grad, w, in_name, dproj, s.n_mix, accumulate))


def gdn_backward(
    w: Weights, s: LayerSlots, at: str, dmix: Tensor, dproj: Tensor, seqs: Sequences, accumulate: bool
) -> None:
    """dmix [N, O] -> dproj [N, P], the gradient of the projection's output; the mixer's gradients; s.mix again."""
    gdn_mixer_bwd(
        dmix,
        s.mixer,
        w[at + "conv"],
        w[at + "A_log"],
        w[at + "dt_bias"],
        w[at + "gdn_norm"],
        dims=gdn_dims(w.geometry),
        cu_seqlens=seqs.cu_seqlens,
        max_seqlen=seqs.max_seqlen,
        eps=w.geometry.eps,
        dproj=dproj,
        dconv=w.grad(at + "conv"),
        dA_log=w.grad(at + "A_log"),
        ddt_bias=w.grad(at + "dt_bias"),
        dnorm=w.grad(at + "gdn_norm"),
        out=s.mix if "mix" in s.again and w.grad(at + "out_proj") is not None else None,
        accumulate=accumulate,
        index=seqs.index,
    )


def attn_backward(
    w: Weights, s: LayerSlots, at: str, dmix: Tensor, dproj: Tensor, seqs: Sequences, accumulate: bool
) -> None:
    """dmix [N, O] -> dproj [N, P], the gradient of the projection's output; the mixer's gradients."""
    q_norm, k_norm, bias = attn_vectors(w, at)
    attention_mixer_bwd(
        dmix,
        s.mixer,
        q_norm,
        k_norm,
        seqs.cos,
        seqs.sin,
        dims=attn_dims(w.geometry),
        cu_seqlens=seqs.cu_seqlens,
        max_seqlen=seqs.max_seqlen,
        eps=w.geometry.eps,
        bias=bias,
        zero_centered=w.geometry.zero_centered,
        dproj=dproj,
        dq_norm=w.grad(at + "q_norm"),
        dk_norm=w.grad(at + "k_norm"),
        dbias=w.grad(at + "qkv_bias"),
        accumulate=accumulate,
        index=seqs.index,
        blocks=seqs.blocks,
    )


def norm_backward(
    w: Weights,
    name: str,
    dn: Tensor,
    saved: RmsNormSaved,
    dx: Tensor,
    accumulate: bool,
    *,
    add_dx: bool = True,
    again: Tensor | None = None,
) -> None:
    """dx `+=` (`=` without `add_dx`) the gradient through the norm called `name`, and the norm's own when it trains.
    `again` receives the norm's output once more, for the weight gradient that reads it."""
    add_rms_norm_bwd(
        dn,
        saved,
        w[name],
        dx=dx,
        zero_centered=w.geometry.zero_centered,
        dweight=w.grad(name),
        accumulate=accumulate,
        add_dx=add_dx,
        out=again,
    )


def weight_grad(w: Weights, name: str, dy: Tensor, x: Tensor, accumulate: bool) -> None:
    """dW [O, I] `=`/`+=` dyᵀ x, when the matrix trains."""
    out = w.grad(name)
    if out is not None:
        linear_bwd_w(dy, x, out=out, accumulate=accumulate)
