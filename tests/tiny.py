"""Tiny geometries, batches and targets shared by the step, parity and recipe tests."""

from __future__ import annotations

import numpy as np
import torch

from cortiq_kernels.data.batches import Batch
from cortiq_kernels.model.geometry import Geometry


def config(
    layers: str = "LLF", *, hidden=32, ffn=48, vocab=61, nq=4, nkv=2, hd=16, nk=2, nv=4, dk=8, dv=8, tied=True, **more
) -> dict:
    """A Hugging Face config.json of a flat text model; `layers` spells linear (L) and full (F) attention layers."""
    kinds = {"L": "linear_attention", "F": "full_attention"}
    return {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": len(layers),
        "num_attention_heads": nq,
        "num_key_value_heads": nkv,
        "head_dim": hd,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": dk,
        "linear_value_head_dim": dv,
        "linear_num_key_heads": nk,
        "linear_num_value_heads": nv,
        "layer_types": [kinds[c] for c in layers],
        "eos_token_id": 0,
        "dtype": "float32",
    } | more


#: transformers' class names, by model_type
FAMILIES = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}


def plain_config(
    family: str, layers: int = 2, *, hidden=32, ffn=48, vocab=61, nq=4, nkv=2, tied=False, **more
) -> dict:
    """config.json of a softmax-attention model: `family` is its model_type."""
    return {
        "model_type": family,
        "architectures": [f"{FAMILIES[family]}ForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": nq,
        "num_key_value_heads": nkv,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "rope_theta": 10000.0,
        "eos_token_id": 0,
        "dtype": "float32",
    } | ({"head_dim": 16} if family == "qwen3" else {}) | more  # fmt: skip


def geometry(*args, **kwargs) -> Geometry:
    return Geometry.from_config(config(*args, **kwargs))


def batch(lengths: list[list[int]], window: int, vocab: int, *, seed: int = 0, scored: float = 0.8) -> Batch:
    """Packed rows of one window each: `lengths` of the sequences in a row; what is left of the window is padding."""
    rng = np.random.default_rng(seed)
    n = len(lengths) * window
    cuts, weight = [0], np.zeros(n, np.float32)
    for row, parts in enumerate(lengths):
        at = row * window
        for length in parts:
            keep = (rng.random(max(length - 1, 0)) < scored) * rng.choice([1.0, 0.5], max(length - 1, 0))
            weight[at : at + length - 1] = keep
            at += length
            cuts.append(at)
        if at < (row + 1) * window:
            cuts.append((row + 1) * window)
    tokens = torch.from_numpy(rng.integers(0, vocab, n + 1))
    index = np.flatnonzero(weight)
    cuts += [n] * 2  # spare capacity: empty sequences at the end
    return Batch(
        tokens=tokens[:n].clone(),
        next_ids=tokens[1:].clone(),
        row_index=torch.from_numpy(index.astype(np.int32)),
        row_weight=torch.from_numpy(weight[index]),
        cu_seqlens=torch.tensor(cuts, dtype=torch.int32),
        max_seqlen=window,
        weight_sum=float(weight.sum(dtype=np.float64)),
        n_scored=len(index),
        n_tokens=tuple(sum(parts) for parts in lengths),
    )


def targets(b: Batch, vocab: int, k: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random top-k targets with distinct ids: ids [R, k] int32, probs [R, k] float32."""
    gen = torch.Generator().manual_seed(seed)
    rows = len(b.row_index)
    ids = torch.rand(rows, vocab, generator=gen).argsort(-1)[:, :k].to(torch.int32)
    return ids, torch.softmax(torch.randn(rows, k, generator=gen), -1)
