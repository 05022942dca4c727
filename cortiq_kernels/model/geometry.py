"""The sizes of a text model (families.py says which), read from the contents of its `config.json`.

A `Geometry` is a frozen record of integers: everything a step, a buffer or a file needs to know about the model's
shape and nothing about its weights. Symbols (used in every shape comment of the package):

| field | config key | meaning |
|---|---|---|
| `hidden` H | `hidden_size` | width of the residual stream |
| `intermediate` F | `intermediate_size` | MLP width of each layer (ours may differ per layer) |
| `vocab` V | `vocab_size` | rows of the embedding and of the head |
| `layer_types` | `layer_types`, else every `full_attention_interval`-th (4) is full attention | mixer of each |
| `nq nkv hd` | `num_attention_heads num_key_value_heads head_dim` (by family) | full attention |
| `rot` | `⌊head_dim · partial_rotary_factor⌋` (0.25) | leading dims of a head that RoPE turns |
| `rope_theta` | `rope_parameters.rope_theta`, or `rope_theta` | RoPE base; there is no default |
| `rope_llama3` | `factor low_freq_factor high_freq_factor original_max_position_embeddings` | None: plain RoPE |
| `nk nv` | `linear_num_key_heads`, `linear_num_value_heads` (16, 32) | Gated DeltaNet heads |
| `dk dv conv` | `linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim` (128, 128, 4) | their sizes |
| `eps` | `rms_norm_eps` (1e-6) | of every RMSNorm |
| `tied` | `tie_word_embeddings` (false) | the head is the embedding |
| `max_position` | `max_position_embeddings` (32768) | longest sequence it was trained for |
| `eos_ids` | `eos_token_id` | int or list; () when absent |
| `num_loops` | `num_loops` (1) | passes over the layers, one after another with the same weights |
| `norm_between_loops` | `norm_between_loops` (false) | the final norm also runs between passes |
| `zero_centered` | by family | norms multiply by 1 + w, not by w (that of Gated DeltaNet always by w) |
| `qk_norm attn_gate qkv_bias` | by family | full attention: norm of q and k, output gate, bias of q, k and v |

Values in brackets are the architecture's own defaults (those of transformers' config classes), used for an absent key.
`hidden_size`, `intermediate_size`, `vocab_size`, `num_hidden_layers`, `num_attention_heads` and `num_key_value_heads`
must be there. Outside Qwen3.5 all layers are full attention, RoPE turns whole heads, and Gated DeltaNet's sizes are 0.

Two layouts are read: flat (`model_type: qwen3_5_text`, `qwen3`, `qwen2`, `llama`) and nested (`model_type: qwen3_5`,
the text part under `text_config`). In a nested config the root and `text_config` are read as one: a key may be in
either, and in both only with equal values (`eos_token_id` excepted: `text_config` wins). The same holds for RoPE
values, which files keep in `rope_parameters`, in the older `rope_scaling`, or beside them: any place will do, two
places must agree.
`torch_dtype`/`dtype` are not read at all: the dtypes of the tensors rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cortiq_kernels.model import families
from cortiq_kernels.model.config_values import MOST_LAYERS, Config, ModelError, is_int, is_real, need
from cortiq_kernels.model.families import Family
from cortiq_kernels.reading import brief

FULL = "full_attention"
LINEAR = "linear_attention"
PREFIXES = ("model.", "model.language_model.")


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes of one model; see the module docstring for the meaning of each field. Immutable and hashable."""

    hidden: int
    intermediate: tuple[int, ...]
    vocab: int
    layer_types: tuple[str, ...]
    nq: int
    nkv: int
    hd: int
    rot: int
    rope_theta: float
    nk: int
    nv: int
    dk: int
    dv: int
    conv: int
    eps: float
    tied: bool
    max_position: int
    eos_ids: tuple[int, ...]
    prefix: str = "model."
    num_loops: int = 1
    zero_centered: bool = True
    qk_norm: bool = True
    attn_gate: bool = True
    qkv_bias: bool = False
    rope_llama3: tuple[float, ...] | None = None
    norm_between_loops: bool = False

    @property
    def n_layers(self) -> int:
        """Number of layers L that have weights."""
        return len(self.layer_types)

    @property
    def n_virtual(self) -> int:
        """Layers that run, L · num_loops: virtual layer vl has the weights of layer vl mod L."""
        return self.n_layers * self.num_loops

    def physical(self, layer: int) -> int:
        """The layer whose weights virtual layer `layer` has."""
        return layer % self.n_layers

    def norm_after(self, layer: int) -> bool:
        """Whether the final norm runs between virtual layer `layer` and the next."""
        ends_pass = (layer + 1) % self.n_layers == 0 and layer + 1 < self.n_virtual
        return self.norm_between_loops and ends_pass

    @property
    def conv_channels(self) -> int:
        """Channels C of the GDN convolution: q | k | v = 2·nk·dk + nv·dv."""
        return 2 * self.nk * self.dk + self.nv * self.dv

    @property
    def gdn_width(self) -> int:
        """Rows of the fused GDN input projection q | k | v | z | a | b = C + nv·dv + 2·nv."""
        return self.conv_channels + self.nv * self.dv + 2 * self.nv

    @property
    def attn_width(self) -> int:
        """Rows of the fused attention projection q (and gate, per head) | k | v = nq·hd (·2) + 2·nkv·hd."""
        return (2 if self.attn_gate else 1) * self.nq * self.hd + 2 * self.nkv * self.hd

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same MLP width (what a runtime other than ours can load)."""
        return len(set(self.intermediate)) == 1

    def is_full(self, layer: int) -> bool:
        """Whether (virtual) layer `layer` is full attention (otherwise it is a Gated DeltaNet)."""
        return self.layer_types[self.physical(layer)] == FULL

    def with_widths(self, widths: Sequence[int]) -> Geometry:
        """The same model with MLP widths `widths` (one per layer)."""
        need(
            len(widths) == self.n_layers, "widths", len(widths), f"{self.n_layers} (one per layer)", "Pass all layers."
        )
        need(
            all(is_int(w) and w > 0 for w in widths), "widths", list(widths), "positive integers", "Keep at least 1."
        )
        return dataclasses.replace(self, intermediate=tuple(int(w) for w in widths))

    @staticmethod
    def from_config(
        config: Mapping[str, Any], tensor_names: Iterable[str] = (), *, widths: Sequence[int] | None = None
    ) -> Geometry:
        """Geometry of a parsed `config.json`.

        `tensor_names`: the published tensor names; they decide the prefix (`model.` or `model.language_model.`).
        Without any, a nested config gets `model.language_model.` and a flat one `model.`.
        `widths`: MLP width of each layer, where they are known from tensor shapes; `intermediate_size` must be their
        maximum. Default: `intermediate_size` in every layer.

        Raises `ModelError`, by name, for: another `model_type`; MoE; quantised weights; unknown layer types or a list
        of the wrong length; a `rope_type` other than default (llama3 too, in a Llama model); a theta, partial factor or
        tie flag given twice with different values; any other key on which root and `text_config` disagree; no theta;
        `attention_bias`, `mlp_bias`, sliding windows; an `attn_output_gate` that the family does not have, or lacks; a
        `hidden_act` other than silu; more than 4096 layers or runs of layers; missing or impossible sizes.
        """
        c = Config(config)
        family = _family(c)
        _refuse_unsupported(c, family)
        n_layers = c.size("num_hidden_layers", most=MOST_LAYERS)
        hidden, wide, vocab = c.size("hidden_size"), c.size("intermediate_size"), c.size("vocab_size")
        nq, nkv = c.size("num_attention_heads"), c.size("num_key_value_heads")
        hd = c.size("head_dim", family.head_dim or hidden // nq or None)
        nk = nv = dk = dv = conv = 0
        if family.hybrid:
            nk, nv = c.size("linear_num_key_heads", 16), c.size("linear_num_value_heads", 32)
            dk, dv = c.size("linear_key_head_dim", 128), c.size("linear_value_head_dim", 128)
            conv = c.size("linear_conv_kernel_dim", 4)
        need(
            nq % nkv == 0, "num_attention_heads", f"{nq} over {nkv} key/value heads", "a multiple", "Mend config.json."
        )
        need(
            nk == 0 or nv % nk == 0, "linear_num_value_heads", f"{nv} over {nk} key heads", "a multiple",
            "Mend config.json.",
        )  # fmt: skip
        theta, rot, llama3 = _rope(c, hd, family)
        per_layer = (wide,) * n_layers if widths is None else tuple(int(w) for w in widths)
        need(
            len(per_layer) == n_layers and max(per_layer) == wide and min(per_layer) > 0,
            "intermediate_size",
            f"{wide} with layer widths {_brief(per_layer)}",
            f"the largest of {n_layers} layer widths",
            "Set intermediate_size to it (width_changed_updates does).",
        )
        return Geometry(
            hidden=hidden, intermediate=per_layer, vocab=vocab, layer_types=_layer_types(c, n_layers, family),
            nq=nq, nkv=nkv, hd=hd, rot=rot, rope_theta=theta,
            nk=nk, nv=nv, dk=dk, dv=dv, conv=conv,
            eps=c.real("rms_norm_eps", 1e-6), tied=c.flag("tie_word_embeddings", False),
            max_position=c.size("max_position_embeddings", 32768), eos_ids=_eos(c, vocab),
            prefix=_prefix(tensor_names, c.nested),
            zero_centered=family.zero_centered, qk_norm=family.qk_norm, attn_gate=family.attn_gate,
            qkv_bias=family.qkv_bias, rope_llama3=llama3,
            num_loops=c.size("num_loops", 1, most=MOST_LAYERS // n_layers),
            norm_between_loops=c.flag("norm_between_loops", False),
        )  # fmt: skip


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The level that describes the text model: `config["text_config"]` of a nested config, else `config` itself."""
    return Config(config).text


def _brief(values: Sequence[int]) -> str:
    """At most six values, for a message."""
    return str(list(values)) if len(values) <= 6 else f"[{', '.join(map(str, values[:6]))}, ... {len(values)} in all]"


def _family(c: Config) -> Family:
    """The family by `model_type`; mixtures of experts and everything unknown are refused by name."""
    types = [str(place["model_type"]) for _, place in c.places if place.get("model_type")]
    moe = "a mixture of experts (MoE)"
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"):
        n = c.get(key)
        need(not n, f"config.json: {key}", f"{n!r}: {moe}", families.SUPPORTED, "Use a dense model.")
    for t in types:
        need("moe" not in t, "config.json: model_type", f"{t!r}: {moe}", families.SUPPORTED, "Use a dense model.")
    need(bool(types), "config.json: model_type", "nothing", families.SUPPORTED, "Take the model's own config.json.")
    if not c.nested and types[0] in families.NESTED:
        raise ModelError(
            f"config.json: got model_type {brief(repr(types[0]))} without text_config; expected its text_config, or "
            f"model_type '{types[0]}_text' for a flat config. Take the model's own config.json."
        )
    found = (families.NESTED if c.nested else families.FLAT).get(types[-1])
    one = found is not None and all(t in families.NESTED or families.FLAT.get(t) == found for t in types)
    need(
        one, "config.json: model_type", " / ".join(map(repr, types)), families.SUPPORTED,
        f"Use a {families.NAMES} model (docs/models.md).",
    )  # fmt: skip
    assert found is not None
    return found


def _refuse_unsupported(c: Config, family: Family) -> None:
    """Everything else that this package does not compute is refused here, by its name."""
    quant = c.get("quantization_config")
    need(quant is None, "config.json: quantization_config", "quantised weights", "none", "Use the unquantised model.")
    act = c.get("hidden_act", "silu")
    need(
        act in ("silu", "swish"), "config.json: hidden_act", repr(act), "'silu'", "Other activations are not supported."
    )
    fixed = [("mlp_bias", False, "MLPs with a bias"), ("use_sliding_window", False, "Sliding windows")]
    if not family.qkv_bias:  # there the bias of q, k and v is no setting
        fixed.append(("attention_bias", False, "Projections with this bias"))
    gate = "Attention without its output gate" if family.attn_gate else f"An output gate in {family.name}"
    for key, value, what in (*fixed, ("attn_output_gate", family.attn_gate, gate)):
        found, words = c.flag(key, value), ("false", "true")
        need(found == value, f"config.json: {key}", words[found], words[value], f"{what} is not supported.")


def _layer_types(c: Config, n_layers: int, family: Family) -> tuple[str, ...]:
    """The list if there is one (it wins over the interval), else the interval; full attention alone if not hybrid."""
    types = c.get("layer_types")
    if types is None:
        every = c.size("full_attention_interval", 4) if family.hybrid else 1
        return tuple(LINEAR if (i + 1) % every else FULL for i in range(n_layers))
    need(isinstance(types, list | tuple), "config.json: layer_types", repr(types), "a list", "Mend config.json.")
    fix = "Make layer_types and num_hidden_layers agree."
    need(
        len(types) == n_layers,
        "config.json: layer_types",
        f"{len(types)} entries",
        f"{n_layers} (num_hidden_layers)",
        fix,
    )
    known = (FULL, LINEAR) if family.hybrid else (FULL,)
    for i, t in enumerate(types):
        need(t in known, f"config.json: layer_types[{i}]", repr(t), " or ".join(map(repr, known)), "Unknown mixer.")
    return tuple(types)


def _rope(c: Config, hd: int, family: Family) -> tuple[float, int, tuple[float, ...] | None]:
    """(theta, rotary dims, llama3's stretch) from every place that may hold them; two places must agree."""
    places: list[tuple[str, Mapping[str, Any]]] = []
    for where, level in c.places:
        for key in ("rope_parameters", "rope_scaling"):
            value = level.get(key)
            if value is not None:
                need(isinstance(value, Mapping), f"config.json: {key}", repr(value), "an object", "Mend config.json.")
                places.append((f"{key} of {where}", value))
    known = ("default", "llama3") if family is families.LLAMA else ("default",)
    kinds = set()
    for where, place in places:
        for key in ("rope_type", "type"):
            kind = place.get(key, "default")
            need(
                kind in known, f"config.json: {key} in {where}", repr(kind), " or ".join(map(repr, known)),
                "Other scaled RoPE is not supported: use the model without it.",
            )  # fmt: skip
            kinds.add(kind)
    llama3 = _llama3(places) if "llama3" in kinds else None
    places += c.places
    theta = _agreed(places, "rope_theta")
    need(
        theta is not None, "config.json: rope_theta", "nothing", "it in rope_parameters, or at the top level",
        "There is no default: take it from the model's own config.json.",
    )  # fmt: skip
    factor = _agreed(places, "partial_rotary_factor")
    if not family.hybrid:
        whole = f"{family.name} turns whole heads."
        need(factor in (None, 1.0), "config.json: partial_rotary_factor", factor, "1", whole)
        factor = 1.0
    factor = 0.25 if factor is None else factor
    rot = int(hd * factor)
    need(
        0 < rot <= hd and rot % 2 == 0, f"config.json: {'partial_rotary_factor' if family.hybrid else 'head_dim'}",
        f"{factor} ({rot} of {hd} dims)",
        "an even number of dims, at most head_dim", "Mend config.json.",
    )  # fmt: skip
    assert theta is not None
    return theta, rot, llama3


def _llama3(places: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[float, ...]:
    """(factor, low, high, original positions) of Llama 3's RoPE."""
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    values: list[float] = []
    for key in keys:
        value, beside = _agreed(places, key), "a positive number beside rope_type 'llama3'"
        need(value is not None, f"config.json: {key}", "nothing", beside, "Take the model's own config.json.")
        values.append(value or 0.0)
    _, low, high, _ = values
    need(low < high, "config.json: high_freq_factor", high, f"more than low_freq_factor {low}", "Mend config.json.")
    return tuple(values)


def _agreed(places: Sequence[tuple[str, Mapping[str, Any]]], key: str) -> float | None:
    """The one value of `key` in `places` (None if nowhere); refuses two different ones."""
    found = [(where, place[key]) for where, place in places if place.get(key) is not None]
    for where, value in found:
        need(
            is_real(value) and value > 0, f"config.json: {key} ({where})", repr(value), "a positive number", "Mend it."
        )
        need(
            value == found[0][1], f"config.json: {key}", f"{found[0][1]!r} in {found[0][0]} and {value!r} in {where}",
            "one value", "Delete the wrong one.",
        )  # fmt: skip
    return float(found[0][1]) if found else None


def _eos(c: Config, vocab: int) -> tuple[int, ...]:
    """End-of-sequence ids; `text_config` wins over the root, which published files do not keep in step."""
    for _, place in c.places:
        value = place.get("eos_token_id")
        if value is None or value == []:
            continue
        ids = list(value) if isinstance(value, list | tuple) else [value]
        need(
            all(is_int(i) and 0 <= i < vocab for i in ids), "config.json: eos_token_id", repr(value),
            f"an id below {vocab} (vocab_size), or a list of them", "Mend it.",
        )  # fmt: skip
        return tuple(ids)
    return ()


def _prefix(tensor_names: Iterable[str], nested: bool) -> str:
    """Which of `PREFIXES` the tensors carry."""
    names = list(tensor_names)
    if not names:
        return PREFIXES[1] if nested else PREFIXES[0]
    found = [p for p in PREFIXES if any(n == f"{p}embed_tokens.weight" or n.startswith(f"{p}layers.") for n in names)]
    need(
        len(found) == 1, "tensor names", f"{found or sorted(names)[:3]} among {len(names)}",
        f"the text model under exactly one of {list(PREFIXES)}", "Use the model's original files.",
    )  # fmt: skip
    return found[0]
