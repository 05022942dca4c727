"""Where each weight lies in the flat stores: pure arithmetic, no tensors.

    plane   (working dtype)  | frozen matrices | trained matrices |
    master  (acc dtype)                        | trained matrices | trained vectors |      and grad, m, v alike
    vectors (acc dtype)      | frozen vectors |

The trained matrices lie at the same offsets in the tail of the plane and in the head of the master, so refreshing the
plane is one copy. Where the working dtype is the accumulation dtype the two are the same memory. Every tensor starts at
a multiple of `ALIGN` elements (a fused update never straddles tensors within a vector load; gaps hold zeros), and each
of the four sections is padded to a multiple of `ALIGN · world`, so that any of them splits evenly over `world` ranks.

Order of frozen tensors: embed, layers, head. Order of trained ones: layers, then embed and head (`train="all"`);
trained vectors: layers, then final_norm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

from cortiq_kernels.model import names as _names
from cortiq_kernels.model.geometry import Geometry

ALIGN = 128
TRAIN_MODES = (None, "layers", "mlp", "all")
_MLP = ("gate_up", "down")


class Span(NamedTuple):
    """A tensor in a flat store: `store[start:start + numel].view(shape)`."""

    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """End of the tensor, without the gap after it."""
        return self.start + math.prod(self.shape)


class Range(NamedTuple):
    """A piece of the flat trained stores that belongs to one layer (-1: embed, head or final_norm).

    `[start, stop)` indexes master, grad, m and v, gaps between tensors included. `plane_start` is where its first
    element lies in `Trained.plane`; None for vectors and where there is no separate plane.
    """

    layer: int
    start: int
    stop: int
    plane_start: int | None


@dataclasses.dataclass(frozen=True)
class Layout:
    """Spans of every held tensor: trained ones index the master, frozen matrices the plane, frozen vectors theirs."""

    frozen_matrices: dict[str, Span]
    trained_matrices: dict[str, Span]
    frozen_vectors: dict[str, Span]
    trained_vectors: dict[str, Span]
    frozen_numel: int
    matrix_numel: int
    vector_numel: int
    frozen_vector_numel: int

    @property
    def plane_numel(self) -> int:
        """Elements of the plane."""
        return self.frozen_numel + self.matrix_numel

    @property
    def trained_numel(self) -> int:
        """Elements of master, grad, m and v each."""
        return self.matrix_numel + self.vector_numel

    def nbytes(self, itemsize: int) -> int:
        """Bytes of all stores (plane, vectors, master, grad, m, v) in a working dtype of `itemsize` 2, 4 or 8."""
        acc = 8 if itemsize == 8 else 4
        master = self.trained_numel if itemsize < acc else self.vector_numel  # else the matrices are the plane's tail
        return self.plane_numel * itemsize + (self.frozen_vector_numel + master + 3 * self.trained_numel) * acc


def plan_layout(
    g: Geometry, *, train: str | None = None, train_from: int = 0, first_layer: int = 0, world: int = 1
) -> Layout:
    """Lay out the weights of `g`.

    `train`: None (nothing), "layers" (every tensor of layers >= `train_from`), "mlp" (gate_up and down of those layers)
    or "all" (every layer, embed, head and final_norm; needs `train_from` 0).
    `first_layer` > 0 holds only layers >= `first_layer`, final_norm and the head (a tied head is the embedding, so then
    that too); training must start there or later.
    The stack of a looped model is held whole: every pass needs it. Raises `ValueError` for anything else.
    """
    if train not in TRAIN_MODES:
        raise ValueError(f"train: got {train!r}; expected one of {list(TRAIN_MODES)}. Choose one.")
    n = g.n_layers
    if not 0 <= first_layer < n or not 0 <= train_from < n:
        raise ValueError(
            f"layers: got first_layer {first_layer}, train_from {train_from}; expected 0 to {n - 1}. Choose a layer."
        )
    if train is not None and train_from < first_layer:
        raise ValueError(
            f"train_from: got {train_from}; expected at least first_layer {first_layer}. "
            "Hold those layers, or freeze them."
        )
    if first_layer and g.num_loops > 1:
        raise ValueError(
            f"first_layer: got {first_layer} in a stack of {g.num_loops} passes; expected 0. Every pass needs it whole."
        )
    if train == "all" and (train_from or first_layer):
        raise ValueError(
            f"train_from: got {train_from} (first_layer {first_layer}) with 'all'; expected 0. Use 'layers' for a part."
        )
    if world < 1:
        raise ValueError(f"world: got {world}; expected at least 1. Pass the number of ranks.")
    shapes = {k: s for k, s in _names.internal_shapes(g).items() if _held(k, g, first_layer)}
    trained = [k for k in shapes if _trains(k, train, train_from)]
    trained.sort(key=lambda k: _names.layer_of(k) if _names.layer_of(k) >= 0 else n)  # stable: layers, then embed, head
    frozen = [k for k in shapes if k not in set(trained)]
    unit = ALIGN * world

    def place(names: Iterable[str], vectors: bool, start: int = 0) -> tuple[dict[str, Span], int]:
        spans: dict[str, Span] = {}
        at = start
        for name in names:
            if _names.is_vector(name) == vectors:
                spans[name] = Span(at, shapes[name])
                at += -(-math.prod(shapes[name]) // ALIGN) * ALIGN
        return spans, start + -(-(at - start) // unit) * unit

    frozen_matrices, frozen_numel = place(frozen, False)
    trained_matrices, matrix_numel = place(trained, False)
    frozen_vectors, frozen_vector_numel = place(frozen, True)
    trained_vectors, end = place(trained, True, matrix_numel)
    return Layout(
        frozen_matrices, trained_matrices, frozen_vectors, trained_vectors,
        frozen_numel, matrix_numel, end - matrix_numel, frozen_vector_numel,
    )  # fmt: skip


def _held(name: str, g: Geometry, first_layer: int) -> bool:
    """Whether a stack that starts at `first_layer` needs the tensor."""
    if name == "embed":
        return first_layer == 0 or g.tied
    layer = _names.layer_of(name)
    return layer < 0 or layer >= first_layer


def _trains(name: str, train: str | None, train_from: int) -> bool:
    """Whether the tensor trains."""
    layer = _names.layer_of(name)
    if train is None or layer < 0:
        return train == "all"
    return layer >= train_from and (train != "mlp" or name.rsplit(".", 1)[-1] in _MLP)


def trained_ranges(layout: Layout, from_layer: int, with_plane: bool) -> list[Range]:
    """Ranges of the trained stores in memory order; see `Weights.ranges`."""
    out: list[Range] = []
    lowest = min((_names.layer_of(k) for k in layout.trained_matrices if k.startswith("layers.")), default=0)
    for spans, matrices in ((layout.trained_matrices, True), (layout.trained_vectors, False)):
        for name, span in spans.items():
            layer = _names.layer_of(name)
            if 0 <= layer < from_layer or (name == "embed" and from_layer > lowest):
                continue
            stop = span.start + -(-(span.stop - span.start) // ALIGN) * ALIGN
            last = out[-1] if out else None
            same_kind = last is not None and (last.start >= layout.matrix_numel) != matrices
            if last is not None and layer >= 0 and last.layer == layer and last.stop == span.start and same_kind:
                out[-1] = last._replace(stop=stop)
            else:
                out.append(Range(layer, span.start, stop, span.start if matrices and with_plane else None))
    return out
