"""Tiny model directories, made without the package's own writer (so that one does not hide the other's faults)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

L, F = "linear_attention", "full_attention"

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "max_position_embeddings": 512,
    "layer_types": [L, F, L], "eos_token_id": [7, 3], "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25},
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16,
          "num_position_embeddings": 16, "patch_size": 2, "model_type": "qwen3_5_vision"}  # fmt: skip


def published(config: dict[str, Any], prefix: str = "model.") -> dict[str, torch.Tensor]:
    """Random tensors of a Qwen3.5 text model by their published names, written out from the architecture by hand."""
    c = config.get("text_config", config)
    gen = torch.Generator().manual_seed(0)

    def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return (0.1 * torch.randn(shape, generator=gen)).to(dtype)

    h, f, hd = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    nq, nkv = c["num_attention_heads"], c["num_key_value_heads"]
    qk = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    nv, dv = c["linear_num_value_heads"], c["linear_value_head_dim"]
    v = nv * dv
    out = {f"{prefix}embed_tokens.weight": rand(c["vocab_size"], h)}
    for i, kind in enumerate(c["layer_types"]):
        p = f"{prefix}layers.{i}."
        out[p + "input_layernorm.weight"] = rand(h)
        out[p + "post_attention_layernorm.weight"] = rand(h)
        out[p + "mlp.gate_proj.weight"], out[p + "mlp.up_proj.weight"] = rand(f, h), rand(f, h)
        out[p + "mlp.down_proj.weight"] = rand(h, f)
        if kind == F:
            out[p + "self_attn.q_proj.weight"] = rand(2 * nq * hd, h)
            out[p + "self_attn.k_proj.weight"], out[p + "self_attn.v_proj.weight"] = (
                rand(nkv * hd, h),
                rand(nkv * hd, h),
            )
            out[p + "self_attn.o_proj.weight"] = rand(h, nq * hd)
            out[p + "self_attn.q_norm.weight"], out[p + "self_attn.k_norm.weight"] = rand(hd), rand(hd)
        else:
            out[p + "linear_attn.in_proj_qkv.weight"] = rand(2 * qk + v, h)
            out[p + "linear_attn.in_proj_z.weight"] = rand(v, h)
            out[p + "linear_attn.in_proj_a.weight"], out[p + "linear_attn.in_proj_b.weight"] = rand(nv, h), rand(nv, h)
            out[p + "linear_attn.conv1d.weight"] = rand(2 * qk + v, 1, c["linear_conv_kernel_dim"])
            out[p + "linear_attn.A_log"] = rand(nv, dtype=torch.float32) - 3.0017
            out[p + "linear_attn.dt_bias"] = rand(nv, dtype=torch.float32) + 1.0003
            out[p + "linear_attn.norm.weight"] = 1 + rand(dv, dtype=torch.float32)
            out[p + "linear_attn.out_proj.weight"] = rand(h, v)
    out[f"{prefix}norm.weight"] = rand(h)
    out["lm_head.weight"] = rand(c["vocab_size"], h)
    return out


def extras() -> dict[str, torch.Tensor]:
    """Tensors beside the text model, one of an element type that torch code never touches here."""
    return {
        "mtp.fc.weight": torch.full((16, 32), 0.3, dtype=torch.bfloat16),
        "mtp.layers.0.mlp.gate_proj.weight": torch.full((24, 16), 0.2, dtype=torch.bfloat16),
        "model.visual.patch_embed.proj.weight": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
        "model.visual.table": torch.arange(5, dtype=torch.int64),
    }


class Model:
    """A directory under construction: change `config` and `tensors`, then `save`."""

    def __init__(self, nested: bool = False, tied: bool = False, extra: bool = False):
        text = copy.deepcopy(TEXT)
        text["tie_word_embeddings"] = tied
        self.config: dict[str, Any] = text
        self.prefix = "model."
        if nested:
            self.prefix = "model.language_model."
            self.config = {
                "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text,
                "tie_word_embeddings": tied, "vision_config": copy.deepcopy(VISION),
            }  # fmt: skip
        self.tensors = published(self.config, self.prefix)
        if tied:
            del self.tensors["lm_head.weight"]
        if extra:
            self.tensors |= extras()

    @property
    def text(self) -> dict[str, Any]:
        return self.config.get("text_config", self.config)

    def save(self, path: Path, shards: int = 1, metadata: dict[str, str] | None = None) -> Path:
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(self.config, indent=1))
        (path / "tokenizer.json").write_text("{}")
        (path / "generation_config.json").write_text('{"eos_token_id": 7}')
        names = list(self.tensors)
        if shards == 1:
            save_file(self.tensors, path / "model.safetensors", metadata=metadata or {"format": "pt"})
            return path
        weight_map = {n: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, n in enumerate(names)}
        for file in sorted(set(weight_map.values())):
            part = {n: self.tensors[n] for n in names if weight_map[n] == file}
            save_file(part, path / file, metadata=metadata or {"format": "pt"})
        total = sum(t.numel() * t.element_size() for t in self.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        return path


@pytest.fixture
def model() -> Callable[..., Model]:
    return Model


@pytest.fixture
def text_config() -> dict[str, Any]:
    return copy.deepcopy(TEXT)
