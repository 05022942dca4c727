"""Internal names of weights, and how they map to the published tensors.

Internally, projections that read the same input are rows of one matrix, so that a layer does few large GEMMs:

| internal | shape | published, in row order |
|---|---|---|
| `embed`, `head` | [V, H] | `embed_tokens.weight`, `lm_head.weight` (no prefix; none when tied) |
| `final_norm` | [H] | `norm.weight` |
| `layers.{i}.input_norm`, `.post_norm` | [H] | `input_layernorm.weight`, `post_attention_layernorm.weight` |
| `layers.{i}.gate_up` | [2F, H] | `mlp.gate_proj`, `mlp.up_proj` |
| `layers.{i}.down` | [H, F] | `mlp.down_proj` |
| `layers.{i}.in_proj` | [2·nk·dk + 2·nv·dv + 2·nv, H] | `linear_attn.in_proj_qkv` (q, k, v), `_z`, `_a`, `_b` |
| `layers.{i}.conv` | [C, W] | `linear_attn.conv1d.weight` [C, 1, W] |
| `layers.{i}.A_log`, `.dt_bias`, `.gdn_norm` | [nv], [nv], [dv] | `linear_attn.A_log`, `.dt_bias`, `.norm.weight` |
| `layers.{i}.out_proj` | [H, nv·dv] | `linear_attn.out_proj` |
| `layers.{i}.qkv_proj` | [P, H] | `self_attn.q_proj` (per head q, and the gate if there is one), `k_proj`, `v_proj` |
| `layers.{i}.qkv_bias` | [P] | `self_attn.q_proj.bias`, `k_proj.bias`, `v_proj.bias`, where `g.qkv_bias` |
| `layers.{i}.q_norm`, `.k_norm` | [hd] | `self_attn.q_norm.weight`, `.k_norm.weight`, where `g.qk_norm` |
| `layers.{i}.o_proj` | [H, nq·hd] | `self_attn.o_proj` |

P = 2·nq·hd + 2·nkv·hd, or nq·hd + 2·nkv·hd without an output gate. The gate and up projections, norms and globals have
the same names in every family. "Vectors" are the norms, `A_log`, `dt_bias`, `qkv_bias` and `conv`: held in the
accumulation dtype whatever the working dtype. Everything else is a matrix.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cortiq_kernels.model.geometry import Geometry

HEAD = "lm_head.weight"
_VECTORS = frozenset(
    {"input_norm", "post_norm", "conv", "A_log", "dt_bias", "gdn_norm", "q_norm", "k_norm", "qkv_bias", "final_norm"}
)


class Slot(NamedTuple):
    """One published tensor: `internal[rows[0]:rows[1]]`, reshaped to `shape`, is the tensor named `published`."""

    internal: str
    published: str
    rows: tuple[int, int]
    shape: tuple[int, ...]


def is_vector(internal: str) -> bool:
    """Whether an internal name is a vector (norm, A_log, dt_bias, bias, conv), so held in the accumulation dtype."""
    return internal.rsplit(".", 1)[-1] in _VECTORS


def layer_of(internal: str) -> int:
    """Layer number of an internal name; -1 for `embed`, `head`, `final_norm`."""
    return int(internal.split(".")[1]) if internal.startswith("layers.") else -1


def layer_slots(g: Geometry, i: int) -> list[Slot]:
    """Slots of layer `i`: mixer first, then MLP; matrices and vectors in the order they are used."""
    pre, name = f"{g.prefix}layers.{i}.", f"layers.{i}."
    h, f, c = g.hidden, g.intermediate[i], g.conv_channels
    out = [Slot(f"{name}input_norm", f"{pre}input_layernorm.weight", (0, h), (h,))]

    def stack(internal: str, *parts: tuple[str, int], kind: str = "weight", tail: tuple[int, ...] = (h,)) -> None:
        """Matrices [rows, H] (or biases [rows]) stacked as one."""
        start = 0
        for published, rows in parts:
            out.append(Slot(name + internal, f"{pre}{published}.{kind}", (start, start + rows), (rows, *tail)))
            start += rows

    def one(internal: str, published: str, *shape: int) -> None:
        """A tensor that is alone in its internal one."""
        out.append(Slot(name + internal, pre + published, (0, shape[0]), shape))

    if g.is_full(i):
        q = g.attn_width - 2 * g.nkv * g.hd
        qkv = (("self_attn.q_proj", q), ("self_attn.k_proj", g.nkv * g.hd), ("self_attn.v_proj", g.nkv * g.hd))
        stack("qkv_proj", *qkv)
        if g.qkv_bias:
            stack("qkv_bias", *qkv, kind="bias", tail=())
        if g.qk_norm:
            one("q_norm", "self_attn.q_norm.weight", g.hd)
            one("k_norm", "self_attn.k_norm.weight", g.hd)
        one("o_proj", "self_attn.o_proj.weight", h, g.nq * g.hd)
    else:
        stack(
            "in_proj", ("linear_attn.in_proj_qkv", c), ("linear_attn.in_proj_z", g.nv * g.dv),
            ("linear_attn.in_proj_a", g.nv), ("linear_attn.in_proj_b", g.nv),
        )  # fmt: skip
        one("conv", "linear_attn.conv1d.weight", c, 1, g.conv)
        one("A_log", "linear_attn.A_log", g.nv)
        one("dt_bias", "linear_attn.dt_bias", g.nv)
        one("gdn_norm", "linear_attn.norm.weight", g.dv)
        one("out_proj", "linear_attn.out_proj.weight", h, g.nv * g.dv)
    one("post_norm", "post_attention_layernorm.weight", h)
    stack("gate_up", ("mlp.gate_proj", f), ("mlp.up_proj", f))
    one("down", "mlp.down_proj.weight", h, f)
    return out


def slots(g: Geometry) -> list[Slot]:
    """All slots: `embed`, the layers in order, `final_norm`, and `head` unless tied."""
    wide = (g.vocab, g.hidden)
    out = [Slot("embed", f"{g.prefix}embed_tokens.weight", (0, g.vocab), wide)]
    for i in range(g.n_layers):
        out += layer_slots(g, i)
    out.append(Slot("final_norm", f"{g.prefix}norm.weight", (0, g.hidden), (g.hidden,)))
    if not g.tied:
        out.append(Slot("head", HEAD, (0, g.vocab), wide))
    return out


def internal_shapes(g: Geometry) -> dict[str, tuple[int, ...]]:
    """Shape of every internal tensor, in the order of `slots` (conv as [C, W])."""
    shapes: dict[str, tuple[int, ...]] = {}
    for s in slots(g):
        tail = s.shape[2:] if len(s.shape) == 3 else s.shape[1:]
        shapes[s.internal] = (s.rows[1], *tail)
    return shapes


def by_published(g: Geometry) -> dict[str, Slot]:
    """Slot of every published name."""
    return {s.published: s for s in slots(g)}


def by_internal(g: Geometry) -> dict[str, list[Slot]]:
    """The slots (in row order) that make up every internal tensor."""
    out: dict[str, list[Slot]] = {}
    for s in slots(g):
        out.setdefault(s.internal, []).append(s)
    return out


def parameter_count(g: Geometry) -> int:
    """Number of parameters of the text model (a tied head counts once)."""
    return sum(math.prod(s.shape) for s in slots(g))
