"""Softmax attention between the two projections of an attention layer."""

from .blocks import AttnBlocks, attention_blocks, kernel_blocks
from .dims import AttnDims, AttnSaved
from .mixer import attention_mixer_bwd, attention_mixer_fwd
from .reference import attention_mixer_ref
from .rope import Llama3Rope, rope_table

__all__ = [
    "AttnBlocks",
    "AttnDims",
    "AttnSaved",
    "Llama3Rope",
    "attention_blocks",
    "attention_mixer_bwd",
    "attention_mixer_fwd",
    "attention_mixer_ref",
    "kernel_blocks",
    "rope_table",
]
