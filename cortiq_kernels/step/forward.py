"""Forward of the stack, as a list of op calls. `backward.py` is this file read from the bottom up.

Everything is token-major `[N, .]`, N = batch * max_seqlen. A branch's output `r` is added to the residual stream by
the next norm (`add_rms_norm`), so `x` and `r` travel as a pair from layer to layer. Layers are counted as they run:
in a looped stack layer i has the weights of layer i mod L.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.ops.attention import (
    AttnBlocks,
    AttnDims,
    Llama3Rope,
    attention_mixer_fwd,
    kernel_blocks,
    rope_table,
)
from cortiq_kernels.ops.embedding import embedding_fwd
from cortiq_kernels.ops.gated_delta import ChunkIndex, GdnDims, chunk_index, gdn_mixer_fwd
from cortiq_kernels.ops.linear import linear_fwd
from cortiq_kernels.ops.rms_norm import RmsNormSaved, add_rms_norm_fwd
from cortiq_kernels.ops.sequences import SeqIndex, sequence_index
from cortiq_kernels.ops.swiglu import swiglu_mlp_fwd
from cortiq_kernels.step.buffers import Buffers, LayerSlots, cut


@dataclass(frozen=True)
class Sequences:
    """Where sequences start among N tokens, and what every mixer needs to know of it; built once per batch."""

    cu_seqlens: Tensor  # [S + 1] int32
    max_seqlen: int
    index: SeqIndex
    cos: Tensor  # [max_seqlen, rot / 2]
    sin: Tensor  # [max_seqlen, rot / 2]
    chunks: ChunkIndex | None = None  # of the Gated DeltaNet kernels, on a GPU
    blocks: AttnBlocks | None = None  # of the attention kernels, where they run

    @classmethod
    def build(cls, g: Geometry, cu_seqlens: Tensor, max_seqlen: int, n: int, rope: tuple[Tensor, Tensor]) -> Sequences:
        chunks = chunk_index(cu_seqlens, n) if cu_seqlens.is_cuda else None
        full = any(map(g.is_full, range(g.n_layers)))
        blocks = kernel_blocks(cu_seqlens, n, max_seqlen, attn_dims(g)) if full else None
        return cls(cu_seqlens, max_seqlen, sequence_index(cu_seqlens, n), *rope, chunks, blocks)


def rope_for(w: Weights, max_seqlen: int) -> tuple[Tensor, Tensor]:
    """RoPE tables of positions 0 .. max_seqlen-1 in the accumulation dtype."""
    g = w.geometry
    llama3 = Llama3Rope(*g.rope_llama3) if g.rope_llama3 else None
    return rope_table(max_seqlen, g.rot, g.rope_theta, w.acc_dtype, w.device, llama3)


def gdn_dims(g: Geometry) -> GdnDims:
    """Sizes of the GDN mixer."""
    return GdnDims(g.nk, g.nv, g.dk, g.dv, g.conv)


def attn_dims(g: Geometry) -> AttnDims:
    """Sizes of the attention mixer."""
    return AttnDims(g.nq, g.nkv, g.hd, g.rot, g.attn_gate)


def attn_vectors(w: Weights, at: str) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(q_norm, k_norm, bias) of an attention layer; None for what the model does not have."""
    g = w.geometry
    q_norm, k_norm = (w[at + "q_norm"], w[at + "k_norm"]) if g.qk_norm else (None, None)
    return q_norm, k_norm, w[at + "qkv_bias"] if g.qkv_bias else None


def norm_forward(
    w: Weights, name: str, x: Tensor, r: Tensor | None, *, x_out: Tensor | None = None, out: Tensor
) -> tuple[Tensor, RmsNormSaved]:
    """The residual add and the norm called `name`; see `add_rms_norm_fwd`."""
    g = w.geometry
    return add_rms_norm_fwd(x, r, w[name], g.eps, zero_centered=g.zero_centered, x_out=x_out, out=out)


def embed(w: Weights, buf: Buffers, tokens: Tensor) -> Tensor:
    """tokens [N] int64 -> residual stream [N, H], in the buffers."""
    return embedding_fwd(tokens, w["embed"], out=buf.x_out)


def forward(
    w: Weights,
    buf: Buffers,
    x: Tensor,
    seqs: Sequences,
    *,
    save: bool = True,
    masks: Mapping[int, Tensor] | None = None,
) -> Tensor:
    """Residual stream entering layer `buf.first` -> hidden states [N, H] for the head (after the final norm).

    `save` keeps what the backward needs in `buf` (layers from `buf.save_from` on). `masks` maps a layer to its
    per-neuron gate [F] (absent: 1). `x` may be `buf.x_out`; it is not changed.
    """
    x, r = layers_forward(w, buf, x, seqs, buf.first, w.geometry.n_virtual, save=save, masks=masks)
    _, buf.final_norm = norm_forward(w, "final_norm", x, r, x_out=buf.x_out, out=buf.hidden)
    return buf.hidden


def layers_forward(
    w: Weights,
    buf: Buffers,
    x: Tensor,
    seqs: Sequences,
    start: int,
    stop: int,
    *,
    save: bool = False,
    masks: Mapping[int, Tensor] | None = None,
    after_layer: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Layers start .. stop-1: (x, r) with the residual stream after them being x + r (r None when there are no layers).

    A norm between passes belongs to the layer before it. `after_layer(i)` is called when layer i is done; its gated
    activation is then in `buf.act` (`cut` to its width).
    """
    r: Tensor | None = None
    for i in range(start, stop):
        mask = masks.get(i) if masks else None
        x, r = layer_forward(w, buf, buf.slots(i, save), i, x, r, seqs, save and buf.saves_mixer(i), mask)
        if buf.loop_out is not None and w.geometry.norm_after(i):
            kept = buf.loop_x[i] if save and i in buf.loop_x else None
            x, buf.loop_norms[i] = norm_forward(w, "final_norm", x, r, x_out=kept, out=buf.loop_out)
            r = None
        if after_layer is not None:
            after_layer(i)
    return x, r


def layer_forward(
    w: Weights,
    buf: Buffers,
    s: LayerSlots,
    i: int,
    x: Tensor,
    r: Tensor | None,
    seqs: Sequences,
    save: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One layer: adds `r` to the stream, runs mixer and MLP; returns (stream after the mixer, the MLP's output).

    `save`: keep what the mixer's backward needs. `mask` [F]: the layer's per-neuron gate.
    """
    g, at = w.geometry, f"layers.{w.geometry.physical(i)}."
    to_gate_up(w, buf, s, i, x, r, seqs, save)
    act = swiglu_mlp_fwd(s.gate_up, mask, out=cut(buf.act, g.intermediate[g.physical(i)]))
    linear_fwd(act, w[at + "down"], out=buf.r)
    return s.x_mlp, buf.r


def to_gate_up(
    w: Weights, buf: Buffers, s: LayerSlots, i: int, x: Tensor, r: Tensor | None, seqs: Sequences, save: bool
) -> None:
    """One layer up to its gate/up projection: fills all slots."""
    g, at = w.geometry, f"layers.{w.geometry.physical(i)}."
    n, s.norm_mix = norm_forward(w, at + "input_norm", x, r, x_out=s.x_mix, out=s.n_mix)
    mix_forward = attn_forward if g.is_full(i) else gdn_forward
    mix_forward(w, s, at, n, seqs, save)
    linear_fwd(s.mix, w[at + mixer_out(g, i)], out=buf.r)
    n, s.norm_mlp = norm_forward(w, at + "post_norm", s.x_mix, buf.r, x_out=s.x_mlp, out=s.n_mlp)
    linear_fwd(n, w[at + "gate_up"], out=s.gate_up)


def layer_again(w: Weights, buf: Buffers, s: LayerSlots, i: int, seqs: Sequences) -> None:
    """Policy "layer": everything that the backward of a layer reads, from the residual stream that the layer kept."""
    if buf.through_mixer(i):
        to_gate_up(w, buf, s, i, s.x_mix, None, seqs, save=True)
        return
    at = f"layers.{w.geometry.physical(i)}."
    n, s.norm_mlp = norm_forward(w, at + "post_norm", s.x_mlp, None, out=s.n_mlp)
    linear_fwd(n, w[at + "gate_up"], out=s.gate_up)


def gdn_forward(w: Weights, s: LayerSlots, at: str, n: Tensor, seqs: Sequences, save: bool) -> None:
    """Input projection and GDN mixer: n [N, H] -> s.proj, s.mix, s.mixer."""
    linear_fwd(n, w[at + "in_proj"], out=s.proj)
    _, s.mixer = gdn_mixer_fwd(
        s.proj,
        w[at + "conv"],
        w[at + "A_log"],
        w[at + "dt_bias"],
        w[at + "gdn_norm"],
        dims=gdn_dims(w.geometry),
        cu_seqlens=seqs.cu_seqlens,
        max_seqlen=seqs.max_seqlen,
        eps=w.geometry.eps,
        out=s.mix,
        save=save,
        index=seqs.index,
        chunks=seqs.chunks,
        keep=s.keep,
    )


def attn_forward(w: Weights, s: LayerSlots, at: str, n: Tensor, seqs: Sequences, save: bool) -> None:
    """q/k/v projection and attention mixer: n [N, H] -> s.proj, s.mix, s.mixer."""
    linear_fwd(n, w[at + "qkv_proj"], out=s.proj)
    q_norm, k_norm, bias = attn_vectors(w, at)
    _, s.mixer = attention_mixer_fwd(
        s.proj,
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
        out=s.mix,
        save=save,
        index=seqs.index,
        blocks=seqs.blocks,
    )


def mixer_in(g: Geometry, layer: int) -> str:
    """Name of the projection from the normed residual stream into the mixer."""
    return "qkv_proj" if g.is_full(layer) else "in_proj"


def mixer_out(g: Geometry, layer: int) -> str:
    """Name of the projection from the mixer back to the residual stream."""
    return "o_proj" if g.is_full(layer) else "out_proj"
