"""The sizes of a Qwen3.5 text model, read from the contents of its `config.json`.

A `Geometry` is a frozen record of integers: everything a step, a buffer or a file needs to know about the model's
shape and nothing about its weights. Symbols (used in every shape comment of the package):

| field | config key | meaning |
|---|---|---|
| `hidden` H | `hidden_size` | width of the residual stream |
| `intermediate` F | `intermediate_size` | MLP width of each layer (ours may differ per layer) |
| `vocab` V | `vocab_size` | rows of the embedding and of the head |
| `layer_types` | `layer_types`, else every `full_attention_interval`-th (4) is full attention | mixer of each |
| `nq nkv hd` | `num_attention_heads num_key_value_heads head_dim` (256) | full attention |
| `rot` | `⌊head_dim · partial_rotary_factor⌋` (0.25) | leading dims of a head that RoPE turns |
| `rope_theta` | `rope_parameters.rope_theta`, or `rope_theta` | RoPE base; there is no default |
| `nk nv` | `linear_num_key_heads`, `linear_num_value_heads` (16, 32) | Gated DeltaNet heads |
| `dk dv conv` | `linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim` (128, 128, 4) | their sizes |
| `eps` | `rms_norm_eps` (1e-6) | of every RMSNorm |
| `tied` | `tie_word_embeddings` (false) | the head is the embedding |
| `max_position` | `max_position_embeddings` (32768) | longest sequence it was trained for |
| `eos_ids` | `eos_token_id` | int or list; () when absent |

Values in brackets are the architecture's own defaults (those of transformers' `Qwen3_5TextConfig`), used for an absent
key. `hidden_size`, `intermediate_size`, `vocab_size`, `num_hidden_layers`, `num_attention_heads` and
`num_key_value_heads` must be there.

Two layouts are read: flat (`model_type: qwen3_5_text`) and nested (`model_type: qwen3_5`, the text part under
`text_config`). In a nested config the root and `text_config` are read as one: a key may be in either, and in both only
with equal values (`eos_token_id` excepted: `text_config` wins). The same holds for RoPE values, which files keep in
`rope_parameters`, in the older `rope_scaling`, or beside them: any place will do, two places must agree.
`torch_dtype`/`dtype` are not read at all: the dtypes of the tensors rule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cortiq_kernels.reading import Refusal, brief

FULL = "full_attention"
LINEAR = "linear_attention"
PREFIXES = ("model.", "model.language_model.")
#: limits of what a config may claim, so that nothing is built from a number that no model has
LARGEST, MOST_LAYERS = 2**31 - 1, 4096


class ModelError(Refusal):
    """A model directory (or config, or place) that cannot be used; says what, got, expected, and how to fix it."""


def _need(ok: bool, what: str, got: Any, expected: str, fix: str) -> None:
    """Raise `ModelError` in the package's form unless `ok`."""
    if not ok:
        raise ModelError(f"{what}: got {brief(got)}; expected {expected}. {fix}")


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

    @property
    def n_layers(self) -> int:
        """Number of layers L."""
        return len(self.layer_types)

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
        """Rows of the fused attention projection (q, gate per head) | k | v = 2·nq·hd + 2·nkv·hd."""
        return 2 * self.nq * self.hd + 2 * self.nkv * self.hd

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same MLP width (what a runtime other than ours can load)."""
        return len(set(self.intermediate)) == 1

    def is_full(self, layer: int) -> bool:
        """Whether `layer` is full attention (otherwise it is a Gated DeltaNet)."""
        return self.layer_types[layer] == FULL

    def with_widths(self, widths: Sequence[int]) -> Geometry:
        """The same model with MLP widths `widths` (one per layer)."""
        _need(
            len(widths) == self.n_layers, "widths", len(widths), f"{self.n_layers} (one per layer)", "Pass all layers."
        )
        _need(
            all(_is_int(w) and w > 0 for w in widths), "widths", list(widths), "positive integers", "Keep at least 1."
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

        Raises `ModelError`, by name, for: another `model_type`; MoE; quantised weights; unknown layer types or a
        list of the wrong length; a `rope_type` other than default; a theta, partial factor or tie flag given twice with
        different values; any other key on which root and `text_config` disagree; no theta; `attention_bias`;
        `attn_output_gate` false; a `hidden_act` other than silu; `num_loops` other than 1; missing or impossible sizes.
        """
        c = _Config(config)
        _refuse_unsupported(c)
        n_layers = c.size("num_hidden_layers", most=MOST_LAYERS)
        hidden, wide, vocab = c.size("hidden_size"), c.size("intermediate_size"), c.size("vocab_size")
        nq, nkv, hd = c.size("num_attention_heads"), c.size("num_key_value_heads"), c.size("head_dim", 256)
        nk, nv = c.size("linear_num_key_heads", 16), c.size("linear_num_value_heads", 32)
        dk, dv = c.size("linear_key_head_dim", 128), c.size("linear_value_head_dim", 128)
        _need(
            nq % nkv == 0, "num_attention_heads", f"{nq} over {nkv} key/value heads", "a multiple", "Mend config.json."
        )
        _need(nv % nk == 0, "linear_num_value_heads", f"{nv} over {nk} key heads", "a multiple", "Mend config.json.")
        theta, rot = _rope(c, hd)
        per_layer = (wide,) * n_layers if widths is None else tuple(int(w) for w in widths)
        _need(
            len(per_layer) == n_layers and max(per_layer) == wide and min(per_layer) > 0,
            "intermediate_size",
            f"{wide} with layer widths {_brief(per_layer)}",
            f"the largest of {n_layers} layer widths",
            "Set intermediate_size to it (width_changed_updates does).",
        )
        return Geometry(
            hidden=hidden, intermediate=per_layer, vocab=vocab, layer_types=_layer_types(c, n_layers),
            nq=nq, nkv=nkv, hd=hd, rot=rot, rope_theta=theta,
            nk=nk, nv=nv, dk=dk, dv=dv, conv=c.size("linear_conv_kernel_dim", 4),
            eps=c.real("rms_norm_eps", 1e-6), tied=c.flag("tie_word_embeddings", False),
            max_position=c.size("max_position_embeddings", 32768), eos_ids=_eos(c, vocab),
            prefix=_prefix(tensor_names, c.nested),
        )  # fmt: skip


class _Config:
    """Typed look-ups in a config; in a nested one a key may be in `text_config`, at the root, or equal in both."""

    def __init__(self, config: Mapping[str, Any]):
        self.nested = isinstance(config.get("text_config"), Mapping)
        self.text: Mapping[str, Any] = config["text_config"] if self.nested else config
        #: (where, mapping) pairs, the first wins where a disagreement is allowed
        self.places = [("text_config", self.text), ("the root", config)] if self.nested else [("config.json", config)]

    def get(self, key: str, default: Any = None) -> Any:
        """Value of `key`; null counts as absent. Refuses different values at the two levels."""
        found = [(where, place[key]) for where, place in self.places if place.get(key) is not None]
        for where, value in found[1:]:
            _need(
                value == found[0][1] and isinstance(value, bool) == isinstance(found[0][1], bool),
                f"config.json: {key}",
                f"{found[0][1]!r} in {found[0][0]} and {value!r} at {where}",
                "one value",
                "Delete the wrong one.",
            )
        return found[0][1] if found else default

    def size(self, key: str, default: int | None = None, most: int = LARGEST) -> int:
        """A positive integer, at most `most`."""
        value = self.get(key, default)
        _need(
            value is not None,
            f"config.json: {key}",
            "nothing",
            "a positive integer",
            "Take the model's own config.json.",
        )
        _need(
            _is_int(value) and 0 < value <= most, f"config.json: {key}", repr(value),
            f"a positive integer, at most {most}", "Mend config.json.",
        )  # fmt: skip
        return int(value)

    def real(self, key: str, default: float) -> float:
        """A positive, finite number."""
        value = self.get(key, default)
        _need(
            _is_real(value) and value > 0, f"config.json: {key}", repr(value), "a positive number", "Mend config.json."
        )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.get(key, default)
        _need(isinstance(value, bool), f"config.json: {key}", repr(value), "true or false", "Mend config.json.")
        return value


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The level that describes the text model: `config["text_config"]` of a nested config, else `config` itself."""
    return _Config(config).text


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_real(x: Any) -> bool:
    """A finite number; an integer only where a float can hold it."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        return False
    return math.isfinite(x) if isinstance(x, float) else abs(x) < 2**1023


def _brief(values: Sequence[int]) -> str:
    """At most six values, for a message."""
    return str(list(values)) if len(values) <= 6 else f"[{', '.join(map(str, values[:6]))}, ... {len(values)} in all]"


def _refuse_unsupported(c: _Config) -> None:
    """Everything that this package does not compute is refused here, by its name."""
    types = [str(place["model_type"]) for _, place in c.places if place.get("model_type")]
    supported = "qwen3_5 (with text_config) or qwen3_5_text, dense"
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"):
        moe = c.get(key)
        _need(not moe, f"config.json: {key}", f"{moe!r}: a mixture of experts (MoE)", supported, "Use a dense model.")
    for t in types:
        _need(
            "moe" not in t,
            "config.json: model_type",
            f"{t!r}: a mixture of experts (MoE)",
            supported,
            "Use a dense model.",
        )
    _need(bool(types), "config.json: model_type", "nothing", supported, "Take the model's own config.json.")
    good = (
        types[0] == "qwen3_5_text"
        if not c.nested
        else types[-1] == "qwen3_5" and set(types) <= {"qwen3_5", "qwen3_5_text"}
    )
    if not c.nested and types == ["qwen3_5"]:
        raise ModelError(
            "config.json: got model_type 'qwen3_5' without text_config; expected its text_config, or model_type "
            "'qwen3_5_text' for a flat config. Take the model's own config.json."
        )
    _need(good, "config.json: model_type", " / ".join(map(repr, types)), supported, "Use a Qwen3.5 text model.")
    quant = c.get("quantization_config")
    _need(quant is None, "config.json: quantization_config", "quantised weights", "none", "Use the unquantised model.")
    act = c.get("hidden_act", "silu")
    _need(
        act in ("silu", "swish"), "config.json: hidden_act", repr(act), "'silu'", "Other activations are not supported."
    )
    bias = c.flag("attention_bias", False)
    _need(not bias, "config.json: attention_bias", "true", "false", "Projections with a bias are not supported.")
    gate = c.flag("attn_output_gate", True)
    _need(gate, "config.json: attn_output_gate", "false", "true", "Attention without its output gate is not supported.")
    loops = c.get("num_loops", 1)
    _need(loops == 1, "config.json: num_loops", repr(loops), "1", "Looped stacks are not supported yet.")


def _layer_types(c: _Config, n_layers: int) -> tuple[str, ...]:
    """The list if there is one (it wins over the interval), else the interval."""
    types = c.get("layer_types")
    if types is None:
        every = c.size("full_attention_interval", 4)
        return tuple(LINEAR if (i + 1) % every else FULL for i in range(n_layers))
    _need(isinstance(types, list | tuple), "config.json: layer_types", repr(types), "a list", "Mend config.json.")
    fix = "Make layer_types and num_hidden_layers agree."
    _need(
        len(types) == n_layers,
        "config.json: layer_types",
        f"{len(types)} entries",
        f"{n_layers} (num_hidden_layers)",
        fix,
    )
    for i, t in enumerate(types):
        _need(
            t in (FULL, LINEAR), f"config.json: layer_types[{i}]", repr(t), f"{FULL!r} or {LINEAR!r}", "Unknown mixer."
        )
    return tuple(types)


def _rope(c: _Config, hd: int) -> tuple[float, int]:
    """(theta, rotary dims) from every place that may hold them; two places must agree."""
    places: list[tuple[str, Mapping[str, Any]]] = []
    for where, level in c.places:
        for key in ("rope_parameters", "rope_scaling"):
            value = level.get(key)
            if value is not None:
                _need(isinstance(value, Mapping), f"config.json: {key}", repr(value), "an object", "Mend config.json.")
                places.append((f"{key} of {where}", value))
    for where, place in places:
        for key in ("rope_type", "type"):
            kind = place.get(key, "default")
            _need(
                kind == "default", f"config.json: {key} in {where}", repr(kind), "'default'",
                "Scaled RoPE is not supported: use the model without it.",
            )  # fmt: skip
    places += c.places
    theta = _agreed(places, "rope_theta")
    _need(
        theta is not None, "config.json: rope_theta", "nothing", "it in rope_parameters, or at the top level",
        "There is no default: take it from the model's own config.json.",
    )  # fmt: skip
    factor = _agreed(places, "partial_rotary_factor")
    factor = 0.25 if factor is None else factor
    rot = int(hd * factor)
    _need(
        0 < rot <= hd and rot % 2 == 0, "config.json: partial_rotary_factor", f"{factor} ({rot} of {hd} dims)",
        "an even number of dims, at most head_dim", "Mend config.json.",
    )  # fmt: skip
    assert theta is not None
    return theta, rot


def _agreed(places: Sequence[tuple[str, Mapping[str, Any]]], key: str) -> float | None:
    """The one value of `key` in `places` (None if nowhere); refuses two different ones."""
    found = [(where, place[key]) for where, place in places if place.get(key) is not None]
    for where, value in found:
        _need(
            _is_real(value) and value > 0, f"config.json: {key} ({where})", repr(value), "a positive number", "Mend it."
        )
        _need(
            value == found[0][1], f"config.json: {key}", f"{found[0][1]!r} in {found[0][0]} and {value!r} in {where}",
            "one value", "Delete the wrong one.",
        )  # fmt: skip
    return float(found[0][1]) if found else None


def _eos(c: _Config, vocab: int) -> tuple[int, ...]:
    """End-of-sequence ids; `text_config` wins over the root, which published files do not keep in step."""
    for _, place in c.places:
        value = place.get("eos_token_id")
        if value is None or value == []:
            continue
        ids = list(value) if isinstance(value, list | tuple) else [value]
        _need(
            all(_is_int(i) and 0 <= i < vocab for i in ids), "config.json: eos_token_id", repr(value),
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
    _need(
        len(found) == 1, "tensor names", f"{found or sorted(names)[:3]} among {len(names)}",
        f"the text model under exactly one of {list(PREFIXES)}", "Use the model's original files.",
    )  # fmt: skip
    return found[0]
