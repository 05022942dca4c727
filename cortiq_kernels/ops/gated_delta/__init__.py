"""Gated delta rule: the chunked recurrence, and the mixer of a gated delta net layer between its two projections."""

from .chunk import ChunkSaved, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from .chunks import ChunkIndex, chunk_index
from .layout import GdnDims
from .mixer import GdnSaved, gdn_mixer_bwd, gdn_mixer_fwd
from .reference import chunk_gated_delta_rule_ref, gdn_mixer_ref

__all__ = [
    "ChunkIndex",
    "ChunkSaved",
    "GdnDims",
    "GdnSaved",
    "chunk_index",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "chunk_gated_delta_rule_ref",
    "gdn_mixer_bwd",
    "gdn_mixer_fwd",
    "gdn_mixer_ref",
]
