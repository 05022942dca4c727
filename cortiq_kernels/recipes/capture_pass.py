"""Grams of the MLPs' gated activations over a set of batches, in as many passes as memory asks for.

Layers are taken in ascending order. A pass takes as many as fit `room` bytes (at least one), runs the stack up to the
last of them, and adds each one's activation to its Gram (`ops/gram.py`), real rows only. The residual stream that
leaves the pass is kept on the host in its own dtype, so the next pass goes on from there: every layer runs once, and
the Grams are those of a single pass to the bit. Without room for the stream on the host each pass starts at layer 0.
In a looped stack the visits of a layer add up; there every pass starts at layer 0 and runs up to the last visit of its
last layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cortiq_kernels.data.batches import Batch
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.ops.gram import TILE, gram_accumulate_, gram_tiles, gram_zeros
from cortiq_kernels.recipes.errors import need
from cortiq_kernels.step import Buffers
from cortiq_kernels.step.buffers import cut
from cortiq_kernels.step.forward import Sequences, embed, layers_forward, rope_for


def gram_bytes(width: int) -> int:
    """Bytes of the packed float32 Gram of `width` neurons."""
    return gram_tiles(width) * TILE * TILE * 4


def plan_passes(widths: Mapping[int, int], room: int) -> list[tuple[int, ...]]:
    """Layers of each pass: greedily, in ascending order, at least one a pass. `widths`: layer -> neurons."""
    passes: list[tuple[int, ...]] = []
    left = 0
    for layer in sorted(widths):
        size = gram_bytes(widths[layer])
        if not passes or size > left:
            passes.append(())
            left = room
        passes[-1] += (layer,)
        left -= size
    return passes


def layers_run(passes: Sequence[Sequence[int]], resumed: bool, earlier: int = 0) -> list[int]:
    """How many layers each pass runs: from where the one before it stopped when it is `resumed`, else from 0. `earlier`
    layers come before the last visit of a looped stack.
    """
    stops = [earlier + p[-1] + 1 for p in passes]
    return [b - a for a, b in zip([0, *stops], stops, strict=False)] if resumed else stops


@dataclass
class Residuals:
    """`streams[i]`: the residual stream [N, H] of batch i that enters `layer`, on the host; `key` says of which set."""

    key: str = ""
    layer: int = 0
    streams: list[Tensor] = field(default_factory=list)

    def start(self, key: str, first: int) -> int:
        """The layer from which a pass over the set `key` may go on, whose lowest measured layer is `first`."""
        return self.layer if self.streams and self.key == key and self.layer <= first else 0


def set_key(batches: Sequence[Batch]) -> str:
    """A digest of the tokens and sequences of a set of batches."""
    h = hashlib.sha256()
    for b in batches:
        h.update(repr((b.max_seqlen, b.n_tokens)).encode())
        for t in (b.tokens, b.cu_seqlens):
            h.update(t.contiguous().numpy().tobytes())
    return h.hexdigest()


def real_rows(batch: Batch) -> Tensor:
    """Rows of a batch that hold real tokens, int64."""
    t = batch.max_seqlen
    return torch.cat([torch.arange(i * t, i * t + n) for i, n in enumerate(batch.n_tokens)])


def capture(
    w: Weights,
    batches: Sequence[Batch],
    layers: Sequence[int],
    *,
    window: int,
    room: int | None = None,
    keep_stream: bool = True,
    kept: Residuals | None = None,
    done: Callable[[int, int], None] = lambda n, layers: None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (layer, its packed Gram) in ascending order; a Gram is whole, and its caller's, when it is yielded.

    `layers` are sorted and made unique. `room`: bytes for the Grams of a pass (None: one pass). `kept` holds streams
    of an earlier call: they are used if it was over the same batches and stopped at or below the first layer, and it
    holds this call's afterwards (unless `keep_stream` is False). `done(n, layers)` after batch n of a pass that runs so
    many layers.
    InputError for no layers, a layer that the model lacks, no batches, and windows longer than `window`.
    """
    g = w.geometry
    chosen = sorted(set(layers))
    fix = f"Choose from 0 .. {g.n_layers - 1}."
    need(bool(chosen), "capture: layers", "none", "at least one", fix)
    bad = [i for i in chosen if not 0 <= i < g.n_layers]
    need(not bad, "capture: layers", bad[:5], f"layers of a model that has {g.n_layers}", fix)
    need(len(batches) > 0, "capture: batches", "none", "at least one", "Check the data.")
    longest = max(b.max_seqlen for b in batches)
    need(longest <= window, "capture: window", f"a window of {longest} tokens", f"at most {window}", "Cut it.")
    shapes = {(len(b.tokens), b.max_seqlen) for b in batches}
    need(len(shapes) == 1, "capture: batches", f"shapes {sorted(shapes)}", "one shape", "Make them of one set.")
    key = set_key(batches)
    later = kept is not None
    kept = kept or Residuals()
    widths = {i: g.intermediate[i] for i in chosen}
    passes = [tuple(chosen)] if room is None else plan_passes(widths, room)
    for number, part in enumerate(passes, 1):
        grams = {i: gram_zeros(widths[i], device=w.device) for i in part}
        keep = keep_stream and g.num_loops == 1 and (number < len(passes) or later) and part[-1] + 1 < g.n_layers
        _run_pass(w, batches, grams, kept, key, keep, done)
        for layer in part:
            yield layer, grams.pop(layer)


def _run_pass(
    w: Weights,
    batches: Sequence[Batch],
    grams: dict[int, Tensor],
    kept: Residuals,
    key: str,
    keep: bool,
    done: Callable[[int, int], None],
) -> None:
    """Fill `grams`, going on from `kept` where that serves; with `keep` it then holds the streams that leave."""
    g, first = w.geometry, batches[0]
    n, t = first.tokens.shape[0], first.max_seqlen
    start, stop = kept.start(key, min(grams)), g.n_virtual - g.n_layers + max(grams) + 1
    streams = kept.streams if start else []
    if keep:  # they change from here on; those of another set, or beyond this pass, make room
        kept.key, kept.streams = "", []
    buf, rope = Buffers(g, n, w.dtype, w.device), rope_for(w, t)
    left: list[Tensor] = []
    for k, host in enumerate(batches):
        batch = host.to(w.device)
        # Without padding all rows enter, to the same bits, and a GPU reads them where they lie.
        real = None if sum(host.n_tokens) == n else real_rows(host).to(w.device)
        seqs = Sequences.build(g, batch.cu_seqlens, t, n, rope)

        def measure(layer: int, real: Tensor | None = real) -> None:
            if (at := g.physical(layer)) in grams:
                gram_accumulate_(grams[at], cut(buf.act, g.intermediate[at]), row_index=real)

        x = streams[k].to(w.device) if start else embed(w, buf, batch.tokens)
        x, r = layers_forward(w, buf, x, seqs, start, stop, after_layer=measure)
        if keep:  # the same sum, rounded once, as the next layer's add_rms_norm forms
            left.append((x if r is None else x + r).to("cpu", copy=True))
            if start:
                streams[k] = left[-1]  # the one that was read makes room
        done(k + 1, stop - start)
    if keep:
        kept.key, kept.layer, kept.streams = key, stop, left
