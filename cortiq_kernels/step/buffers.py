"""Preallocated memory of a step: what the forward keeps for the backward, and the scratch that both share.

For N tokens, hidden H, layer width F, projection width P (GDN or attention) and mixer output width O, each layer whose
activations are kept holds, in the working dtype:

    | slot    | shape   | written by                              | read in the backward by           |
    |---------|---------|-----------------------------------------|-----------------------------------|
    | x_mix   | [N, H]  | add_rms_norm before the mixer           | add_rms_norm_bwd                  |
    | proj    | [N, P]  | input projection                        | mixer backward                    |
    | mix     | [N, O]  | mixer (attention only)                  | dW of the output projection       |
    | x_mlp   | [N, H]  | add_rms_norm before the MLP             | add_rms_norm_bwd                  |
    | gate_up | [N, 2F] | gate/up projection                      | SwiGLU backward (act is recomputed) |

A looped stack runs its layers several times: layers are virtual here (`Geometry.n_virtual`), each visit has its slots.

that is N * (2H + P + 2F) elements a layer, O more for attention, and what each mixer says it saves. A kept layer below
`mixers_from` has no backward of its mixer, and holds x_mlp and gate_up alone. What a pass over
memory brings back is not kept, and lies in slots that all layers share: n_mix and n_mlp [N, H], the norms' outputs, and
mix of Gated DeltaNet, which its backward makes on the way. On a GPU there is also the head's slab of logits
(`logits_slab`), made at its first use: steps, graphs and evaluations share the one. Layers that are not kept (frozen
ones, and all of them in an evaluation) share one whole set. Scratch of any layer: r [N, H] (a branch's output), act [N,
F], and the gradients dx, dn [N, H], dact [N, F], dgate_up [N, 2F], dproj [N, P], dmix [N, O].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.ops.topk_kl import CHUNK_ROWS, new_slab


@dataclass
class LayerSlots:
    """One layer's activations; `norm_mix`, `mixer`, `norm_mlp` are what those ops save, filled by the forward."""

    x_mix: Tensor  # [N, H]
    n_mix: Tensor  # [N, H]
    proj: Tensor  # [N, P]
    mix: Tensor  # [N, O]
    x_mlp: Tensor  # [N, H]
    n_mlp: Tensor  # [N, H]
    gate_up: Tensor  # [N, 2F]
    norm_mix: Any = None
    mixer: Any = None
    norm_mlp: Any = None


def mixer_widths(geometry: Geometry, layer: int) -> tuple[int, int]:
    """(projection width P, mixer output width O) of a layer."""
    if not geometry.is_full(layer):
        return geometry.gdn_width, geometry.nv * geometry.dv
    return geometry.attn_width, geometry.nq * geometry.hd


@dataclass
class Buffers:
    """Activations and scratch for `n` tokens of the layers `first ..`, kept from layer `save_from` on (None: none).

    Allocated once; a forward or backward over `n` tokens allocates nothing here. `nbytes` is what these buffers take.
    `mixers_from`: the backward goes through the mixers of the layers from there on; below, a mixer's output counts as a
    constant, and the gradient passes along the residual stream alone.
    """

    geometry: Geometry
    n: int
    dtype: torch.dtype
    device: torch.device
    first: int = 0
    save_from: int | None = None
    mixers_from: int = 0
    kept: dict[int, LayerSlots] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        g, layers = self.geometry, range(self.first, self.geometry.n_virtual)
        widths = [mixer_widths(g, i) for i in layers]
        p_max, o_max = max(p for p, _ in widths), max(o for _, o in widths)
        f_max = max(g.intermediate[g.physical(i)] for i in layers)
        self._shared = self._slots(p_max, o_max, f_max)
        self.r = self._new(g.hidden)
        self.act = self._new(f_max)
        self.x_out = self._new(g.hidden)  # residual stream after the last layer
        self.hidden = self._new(g.hidden)  # final norm's output: the head's input
        self._slab: Tensor | None = None
        self.final_norm: Any = None
        #: by the layer before it: what a norm between passes reads [N, H] (kept for the backward), and saves
        self.loop_x = {i: self._new(g.hidden) for i in layers if g.norm_after(i) and self.save_from is not None}
        self.loop_norms: dict[int, Any] = {}
        self.loop_out = self._new(g.hidden) if any(map(g.norm_after, layers)) else None
        if self.save_from is not None:
            for i in range(max(self.save_from, self.first), g.n_virtual):
                self.kept[i] = self._kept(i)
            self.dx, self.dn, self.dhidden = self._new(g.hidden), self._new(g.hidden), self._new(g.hidden)
            self.dact, self.dgate_up = self._new(f_max), self._new(2 * f_max)
            through = [mixer_widths(g, i) for i in self.kept if i >= self.mixers_from]
            self.dproj = self._new(max((p for p, _ in through), default=0))
            self.dmix = self._new(max((o for _, o in through), default=0))

    def _new(self, width: int) -> Tensor:
        return torch.empty(self.n, width, dtype=self.dtype, device=self.device)

    def _slots(self, p: int, o: int, f: int) -> LayerSlots:
        h = self.geometry.hidden
        return LayerSlots(
            self._new(h), self._new(h), self._new(p), self._new(o), self._new(h), self._new(h), self._new(2 * f)
        )

    def _kept(self, layer: int) -> LayerSlots:
        """A layer's own slots; those that the backward fills again are the shared ones."""
        g, s, h = self.geometry, self._shared, self.geometry.hidden
        p, o = mixer_widths(g, layer)
        up = self._new(2 * g.intermediate[g.physical(layer)])
        if layer < self.mixers_from:
            return LayerSlots(s.x_mix, s.n_mix, cut(s.proj, p), cut(s.mix, o), self._new(h), s.n_mlp, up)
        mix = self._new(o) if g.is_full(layer) else cut(s.mix, o)
        return LayerSlots(self._new(h), s.n_mix, self._new(p), mix, self._new(h), s.n_mlp, up)

    def slots(self, layer: int, save: bool) -> LayerSlots:
        """The slots a layer writes: its own when kept and `save`, else the shared ones, cut to the layer's widths."""
        if save and layer in self.kept:
            return self.kept[layer]
        p, o = mixer_widths(self.geometry, layer)
        s, f = self._shared, self.geometry.intermediate[self.geometry.physical(layer)]
        return LayerSlots(s.x_mix, s.n_mix, cut(s.proj, p), cut(s.mix, o), s.x_mlp, s.n_mlp, cut(s.gate_up, 2 * f))

    def logits_slab(self, vocab: int) -> Tensor | None:
        """Memory for the logits of as many rows as the head takes at a time (2 GB for 4096 of 248,320 in 16 bit); None
        where it takes none: on a CPU, and in float64."""
        if self.device.type != "cuda" or self.dtype == torch.float64:
            return None
        if self._slab is None:
            self._slab = new_slab(min(CHUNK_ROWS, self.n), vocab, self.dtype, self.device)
        return self._slab

    def forget(self) -> None:
        """Drop what the ops saved in the last forward, whose memory may be used again."""
        self.final_norm = None
        self.loop_norms.clear()
        for s in (self._shared, *self.kept.values()):
            s.norm_mix = s.mixer = s.norm_mlp = None

    def through_mixer(self, layer: int) -> bool:
        """Whether the backward goes through a layer's mixer."""
        return layer in self.kept and layer >= self.mixers_from

    @property
    def nbytes(self) -> int:
        own = [t for t in vars(self).values() if isinstance(t, Tensor)]
        s = self._shared
        own += [s.x_mix, s.n_mix, s.proj, s.mix, s.x_mlp, s.n_mlp, s.gate_up]
        for i, s in self.kept.items():
            own += [s.x_mlp, s.gate_up]
            if i >= self.mixers_from:
                own += [s.x_mix, s.proj]
                own += [s.mix] if self.geometry.is_full(i) else []
        own += self.loop_x.values()
        return sum(t.numel() * t.element_size() for t in own)


def cut(buffer: Tensor, width: int) -> Tensor:
    """`[N, width]`, contiguous, in the memory of a wider `[N, >= width]` buffer."""
    n = buffer.shape[0]
    return buffer.view(-1)[: n * width].view(n, width)
