"""Preallocated memory of a step: what the forward keeps for the backward, and the scratch that both share.

For N tokens, hidden H, layer width F, projection width P (GDN or attention) and mixer output width O, each layer whose
activations are kept holds of these slots, in the working dtype, what the policy says (k keep, c cheap, l layer):

    | slot    | shape   | written by                      | read in the backward by              | own in |
    |---------|---------|---------------------------------|--------------------------------------|--------|
    | x_mix   | [N, H]  | add_rms_norm before the mixer   | add_rms_norm_bwd                     | k c l  |
    | n_mix   | [N, H]  | the same                        | dW of the input projection           | k      |
    | proj    | [N, P]  | input projection                | mixer backward                       | k c    |
    | mix     | [N, O]  | mixer                           | dW of the output projection          | k* c*  |
    | x_mlp   | [N, H]  | add_rms_norm before the MLP     | add_rms_norm_bwd                     | k c    |
    | n_mlp   | [N, H]  | the same                        | dW of gate/up                        | k      |
    | gate_up | [N, 2F] | gate/up projection              | SwiGLU backward (act is recomputed)  | k c    |

What is not a layer's own lies in slots that all layers share, and is made again by the backward:

    keep    act alone; a Gated DeltaNet keeps its normed q and k, too. What no weight gradient reads (`train`: "mlp" has
            none in the mixer, None has none at all) is not kept
    cheap   what one pass over memory brings back: norm outputs, and a Gated DeltaNet's normed q and k
    layer   all but the residual stream that enters the layer: its backward starts with its forward, less the down
            projection

(*) mix is attention's; that of Gated DeltaNet its backward makes on the way, whatever the policy: on a GPU it need not
round as the forward did, and so the same ops see the same inputs in each policy: gradients are the same bits.

A looped stack runs its layers several times: layers are virtual here (`Geometry.n_virtual`), each visit has its slots.
A kept layer below `mixers_from` has no backward of its mixer, and holds x_mlp and gate_up alone ("keep": n_mlp, too;
"layer": x_mlp, the stream after the mixer). Layers that are not kept (frozen ones, and all of them in an evaluation)
use the shared set, whose proj, gate_up, x_mix and x_mlp are those of the last layer that keeps its own: it runs after
them, and an evaluation runs before the next step. Scratch of any layer: r [N, H] (a branch's output), act [N, F], which
is dact and dmix, too, and the gradients dx, dn [N, H] and dproj [N, P]; d(gate_up) takes the place of gate_up, which
nothing reads after it. On a GPU there is also the head's slab of logits (`logits_slab`), which steps, graphs and
evaluations share: in the memory of gradients where a trainer lends that (`spare.py`), else made at its first use.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from cortiq_kernels import backend
from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.ops.topk_kl import new_slab
from cortiq_kernels.step.spare import slab_in, slab_rows

Policy = Literal["keep", "cheap", "layer"]
#: from the fastest step to the smallest
POLICIES: tuple[Policy, ...] = get_args(Policy)
_REMAKES = ("n_mix", "mix", "n_mlp")  # slots that one pass over memory brings back


@dataclass
class LayerSlots:
    """One layer's activations; `norm_mix`, `mixer`, `norm_mlp` are what those ops save, filled by the forward.

    `again`: slots that the backward has to make once more where it reads them; `keep`: that of `gdn_mixer_fwd`.
    """

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
    again: frozenset[str] = frozenset()
    keep: str = "lean"


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
    constant, and the gradient passes along the residual stream alone. `policy` and `train` (what trains, as in
    `Weights`) say what a layer keeps: see the module docstring. ValueError for another policy.
    """

    geometry: Geometry
    n: int
    dtype: torch.dtype
    device: torch.device
    first: int = 0
    save_from: int | None = None
    mixers_from: int = 0
    policy: Policy = "cheap"
    train: str | None = "layers"
    kept: dict[int, LayerSlots] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        g, layers = self.geometry, range(self.first, self.geometry.n_virtual)
        if self.policy not in POLICIES:
            raise ValueError(f"Buffers: policy: got {self.policy!r}; expected {' | '.join(POLICIES)}. Choose one.")
        widths = [mixer_widths(g, i) for i in layers]
        p_max, o_max = max(p for p, _ in widths), max(o for _, o in widths)
        f_max = max(g.intermediate[g.physical(i)] for i in layers)
        keeps = range(g.n_virtual if self.save_from is None else max(self.save_from, self.first), g.n_virtual)
        lent = self._lenders(keeps, p_max, f_max)
        self._shared = self._slots(p_max, o_max, f_max, lent)
        self.kept = {i: self._kept(i) for i in keeps}
        self._shared = replace(self._shared, **{name: getattr(self.kept[i], name) for name, i in lent.items()})
        for i, s in self.kept.items():  # those that use a slot of the set which was not there yet
            late = {name: getattr(self.slots(i, save=False), name) for name in lent if name not in self.own(i)}
            self.kept[i] = replace(s, **late)
        self.r = self._new(g.hidden)
        through = [mixer_widths(g, i) for i in self.kept if i >= self.mixers_from]
        self.act = self._new(max([f_max, *(o for _, o in through)]))
        #: for weight gradients that run beside the backward
        self.lane = backend.SideLane(self.device)
        self.x_out = self._new(g.hidden)  # residual stream after the last layer
        self.hidden = self._new(g.hidden)  # final norm's output: the head's input
        self._slab: Tensor | None = None
        #: flat memory that holds nothing while the head runs, unless gradients add up over micro-batches
        self.spare: Tensor | None = None
        self.final_norm: Any = None
        #: by the layer before it: what a norm between passes reads [N, H] (kept for the backward), and saves
        self.loop_x = {i: self._new(g.hidden) for i in layers if g.norm_after(i) and self.save_from is not None}
        self.loop_norms: dict[int, Any] = {}
        self.loop_out = self._new(g.hidden) if any(map(g.norm_after, layers)) else None
        if self.save_from is not None:
            self.dx, self.dn, self.dhidden = self._new(g.hidden), self._new(g.hidden), self._new(g.hidden)
            self.dproj = self._new(max((p for p, _ in through), default=0))

    def _new(self, width: int, device: torch.device | None = None) -> Tensor:
        return torch.empty(self.n, width, dtype=self.dtype, device=device or self.device)

    def _slots(self, p: int, o: int, f: int, without: Container[str]) -> LayerSlots:
        """One of each slot; those named in `without` have a shape and no memory."""
        h = self.geometry.hidden
        widths = {"x_mix": h, "n_mix": h, "proj": p, "mix": o, "x_mlp": h, "n_mlp": h, "gate_up": 2 * f}
        meta = torch.device("meta")
        made: Any = {name: self._new(w, meta if name in without else self.device) for name, w in widths.items()}
        return LayerSlots(**made)

    def _lenders(self, kept: range, p: int, f: int) -> dict[str, int]:
        """Slot -> the kept layer that lends its own to the shared set: the last one as wide as the set's, unless a
        kept layer that uses the set's runs after it."""
        g = self.geometry
        need = {"x_mix": g.hidden, "x_mlp": g.hidden, "proj": p, "gate_up": 2 * f}
        found: dict[str, int] = {}
        for i in kept:
            own = self.own(i)
            have = {"proj": mixer_widths(g, i)[0], "gate_up": 2 * g.intermediate[g.physical(i)]}
            for name, width in need.items():
                if name not in own:
                    found.pop(name, None)
                elif have.get(name, width) == width:
                    found[name] = i
        return found

    def own(self, layer: int) -> list[str]:
        """Names of the slots that are a kept layer's own."""
        mixer = layer >= self.mixers_from
        if self.policy == "layer":
            return ["x_mix" if mixer else "x_mlp"]
        full, grads = self.geometry.is_full(layer), self.train in ("layers", "all")
        names = ["x_mlp", "gate_up"]
        if mixer:
            names += ["x_mix", "proj"] + (["mix"] if full else [])
        if self.policy == "keep":
            names += ["n_mlp"] if self.train is not None else []
            names += ["n_mix"] if mixer and grads else []
        return names

    def _kept(self, layer: int) -> LayerSlots:
        """A kept layer's slots: its own, and for the rest the shared ones."""
        shared, own = self.slots(layer, save=False), self.own(layer)
        again = frozenset({"mix"} if self.policy == "layer" else _REMAKES).difference(own)
        fresh = {name: self._new(getattr(shared, name).shape[1]) for name in own}
        return replace(shared, **fresh, again=again, keep="lean" if self.policy == "cheap" else "all")

    def slots(self, layer: int, save: bool) -> LayerSlots:
        """The slots a layer writes: its own when kept and `save`, else the shared ones, cut to the layer's widths."""
        if save and layer in self.kept:
            return self.kept[layer]
        p, o = mixer_widths(self.geometry, layer)
        s, f = self._shared, self.geometry.intermediate[self.geometry.physical(layer)]
        return LayerSlots(s.x_mix, s.n_mix, cut(s.proj, p), cut(s.mix, o), s.x_mlp, s.n_mlp, cut(s.gate_up, 2 * f))

    def logits_slab(self, vocab: int, *, own: bool = False) -> Tensor | None:
        """Memory for the logits of as many rows as the head takes at a time (2 GB for 4096 of 248,320 in 16 bit); None
        where it takes none: on a CPU, and in float64. It lies in `spare` where that is large enough; `own`: not there.
        """
        if self.device.type != "cuda" or self.dtype == torch.float64:
            return None
        lent = None if own or self.spare is None else slab_in(self.spare, self.n, vocab, self.dtype)
        if lent is not None:
            return lent
        if self._slab is None:
            self._slab = new_slab(slab_rows(self.n), vocab, self.dtype, self.device)
        return self._slab

    def forget(self) -> None:
        """Drop what the ops saved in the last forward, whose memory may be used again."""
        self.final_norm = None
        self.loop_norms.clear()
        self.lane.forget()
        for s in (self._shared, *self.kept.values()):
            s.norm_mix = s.mixer = s.norm_mlp = None

    def through_mixer(self, layer: int) -> bool:
        """Whether the backward goes through a layer's mixer."""
        return layer in self.kept and layer >= self.mixers_from

    def saves_mixer(self, layer: int) -> bool:
        """Whether the forward keeps what a layer's mixer backward needs."""
        return self.policy != "layer" and self.through_mixer(layer)

    @property
    def nbytes(self) -> int:
        own = [t for name, t in vars(self).items() if isinstance(t, Tensor) and name != "spare"]
        lent = {id(getattr(s, name)) for i, s in self.kept.items() for name in self.own(i)}
        own += [t for t in vars(self._shared).values() if isinstance(t, Tensor) and id(t) not in lent]
        own += [getattr(s, name) for i, s in self.kept.items() for name in self.own(i)]
        own += self.loop_x.values()
        return sum(t.numel() * t.element_size() for t in own)


def cut(buffer: Tensor, width: int) -> Tensor:
    """`[N, width]`, contiguous, in the memory of a wider `[N, >= width]` buffer."""
    n = buffer.shape[0]
    return buffer.view(-1)[: n * width].view(n, width)
