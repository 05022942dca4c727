"""Flat stores of a model's weights, and of what trains.

Matrices lie in one flat plane in the working dtype; norms, conv, `A_log` and `dt_bias` in the accumulation dtype
(float64 if the working dtype is float64, else float32) whatever the working dtype, so they are never rounded. What
trains has a flat master, gradient and two Adam moments in the accumulation dtype; the plane's tail mirrors the
master's matrices, rounded to nearest even. `layout` says where each tensor lies; `names` how names map to files.

    w = Weights.load(open_model(path), dtype=torch.bfloat16, device="cuda", train="layers", train_from=12)
    w["layers.3.gate_up"]                # [2F, H] bfloat16, a view of the plane
    w.trained.grad_view("layers.12.down")  # [H, F] float32, a view of the flat gradient
    write_model(src, dst, replace=w.export(), provenance={...})
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from cortiq_kernels.model import names as _names
from cortiq_kernels.model.geometry import Geometry, ModelError
from cortiq_kernels.model.hf_read import ModelDir
from cortiq_kernels.model.layout import Layout, Range, Span, plan_layout, trained_ranges
from cortiq_kernels.model.shard import all_finite

WORKING_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The accumulation dtype of a working dtype: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _view(store: Tensor, span: Span, offset: int = 0) -> Tensor:
    """The tensor at `span` of a flat store whose section starts at `offset`."""
    return store[offset + span.start : offset + span.stop].view(span.shape)


@dataclasses.dataclass(frozen=True)
class Trained:
    """The flat stores of what trains, all in the accumulation dtype and of one length (`layout.trained_numel`).

    `master`: the weights; `grad`, `m`, `v`: gradient and Adam moments. Order: matrices (layers, then embed and head),
    then vectors (layers, then final_norm); the gaps between tensors are zeros and must stay so. Write in place
    (`add_`, `copy_`): all views share this memory.
    `plane`: the contiguous working-dtype range that mirrors `master[:matrix_numel]`; None when the working dtype is the
    accumulation dtype: then the views that `Weights` hands out are the master.
    """

    master: Tensor
    grad: Tensor
    m: Tensor
    v: Tensor
    plane: Tensor | None
    matrix_numel: int
    spans: dict[str, Span]

    @property
    def names(self) -> list[str]:
        """Internal names in memory order."""
        return list(self.spans)

    def grad_view(self, name: str) -> Tensor:
        """Gradient of an internal tensor, in its shape: a view."""
        return _view(self.grad, self.spans[name])

    def master_view(self, name: str) -> Tensor:
        """Master of an internal tensor, in its shape: a view."""
        return _view(self.master, self.spans[name])

    def refresh_plane(self) -> None:
        """plane = round(master), to nearest even. Needed after the master was written to by anything but the update."""
        if self.plane is not None:
            self.plane.copy_(self.master[: self.matrix_numel])


class Weights:
    """Weights of one model on one device: `w[internal name]` is a view, always the same memory.

    Attributes: `geometry`, `dtype`, `device`, `layout`, `plane` (flat, all matrices), `vectors` (flat, frozen vectors),
    `trained` (`Trained` or None), `first_layer`, `train`, `train_from`, `names` (held internal names).
    A tied model's `w["head"]` is `w["embed"]`, the same view.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        train: str | None = None,
        train_from: int = 0,
        first_layer: int = 0,
        world: int = 1,
    ):
        """Allocate zeroed stores; for the arguments see `plan_layout`. Use `load` or `random` for values."""
        if dtype not in WORKING_DTYPES:
            raise ValueError(f"dtype: got {dtype}; expected one of {list(WORKING_DTYPES)}. Choose a working dtype.")
        self.geometry, self.dtype, self.device = geometry, dtype, torch.device(device)
        self.train, self.train_from, self.first_layer = train, train_from, first_layer
        self.layout: Layout = plan_layout(
            geometry, train=train, train_from=train_from, first_layer=first_layer, world=world
        )
        lay, acc = self.layout, acc_dtype(dtype)

        def zeros(n: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(n, dtype=kind, device=self.device)

        shared = dtype == acc  # the trained matrices of the plane are the master's
        store = zeros(lay.plane_numel + (lay.vector_numel if shared else 0), dtype)
        self.plane = store[: lay.plane_numel]
        self.vectors = zeros(lay.frozen_vector_numel, acc)
        self.trained: Trained | None = None
        if lay.trained_numel:
            n = lay.trained_numel
            self.trained = Trained(
                master=store[lay.frozen_numel :] if shared else zeros(n, acc),
                grad=zeros(n, acc), m=zeros(n, acc), v=zeros(n, acc),
                plane=None if shared else store[lay.frozen_numel :],
                matrix_numel=lay.matrix_numel, spans={**lay.trained_matrices, **lay.trained_vectors},
            )  # fmt: skip
        self._views = {k: _view(self.plane, s) for k, s in lay.frozen_matrices.items()}
        self._views |= {k: _view(self.plane, s, lay.frozen_numel) for k, s in lay.trained_matrices.items()}
        self._views |= {k: _view(self.vectors, s) for k, s in lay.frozen_vectors.items()}
        if self.trained is not None:
            self._views |= {k: _view(self.trained.master, s) for k, s in lay.trained_vectors.items()}
        #: internal names that are held, in the order of `names.slots`
        self.names = [k for k in _names.internal_shapes(geometry) if k in self._views]
        if geometry.tied:
            self._views["head"] = self._views["embed"]

    @classmethod
    def load(
        cls,
        model: ModelDir,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        train: str | None = None,
        train_from: int = 0,
        first_layer: int = 0,
        world: int = 1,
    ) -> Weights:
        """Weights of an opened directory, read tensor by tensor (never a second copy of the model).

        Masters and vectors take the stored values exactly (float64 files are rounded to float32 in a float32 run).
        Raises `ModelError` naming file and tensor for values that are not finite, or beyond the range of `dtype`.
        """
        w = cls(
            model.geometry, dtype=dtype, device=device, train=train, train_from=train_from,
            first_layer=first_layer, world=world,
        )  # fmt: skip
        for slot in _names.slots(model.geometry):
            if slot.internal in w._views:
                where = f"{model.path / model.tensors[slot.published].file}: {slot.published}"
                w.assign(slot.internal, model.read(slot.published), rows=slot.rows, name=where)
        return w

    @classmethod
    def random(
        cls,
        geometry: Geometry,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        train: str | None = None,
        train_from: int = 0,
        first_layer: int = 0,
        world: int = 1,
        std: float = 0.02,
        vector_noise: float = 0.0,
        generate_on: torch.device | str = "cpu",
    ) -> Weights:
        """Weights from scratch, drawn in float32, the same for every `dtype`, `train`, `first_layer` and `world`.

        Matrices normal(0, `std`); zero-centred norms 0, others 1; `qkv_bias` 0; `A_log` = log U(0.01, 16); `dt_bias` 1
        (those are transformers' for Qwen3.5); conv U(±1/√W) (transformers draws normal(0, 0.02), which leaves q and k
        so small that the l2norm's epsilon decides them). `vector_noise` adds normal(0, `vector_noise`) to every vector.
        `generate_on`: the device that draws. "cpu" gives the same values everywhere; the GPU is quicker for large
        models.
        """
        w = cls(
            geometry, dtype=dtype, device=device, train=train, train_from=train_from, first_layer=first_layer,
            world=world,
        )  # fmt: skip
        gen = torch.Generator(device=generate_on)
        for i, (name, shape) in enumerate(_names.internal_shapes(geometry).items()):
            if name not in w._views:
                continue
            gen.manual_seed(seed * 1_000_003 + i)  # a seed per tensor: what else is held changes nothing
            t = torch.empty(shape, dtype=torch.float32, device=generate_on)
            w.assign(name, _draw(name, t, gen, std, vector_noise, geometry.zero_centered))
        return w

    def __getitem__(self, name: str) -> Tensor:
        """View of an internal tensor (module docstring of `names`); `KeyError` if it is not held."""
        view = self._views.get(name)
        if view is None:
            held = f"final_norm, head and the layers from {self.first_layer}" if self.first_layer else "the whole model"
            raise KeyError(f"weights: got {name!r}; expected a name in Weights.names ({held}). Check the name.")
        return view

    def __contains__(self, name: str) -> bool:
        return name in self._views

    @property
    def acc_dtype(self) -> torch.dtype:
        """Dtype of vectors, masters and gradients."""
        return acc_dtype(self.dtype)

    def grad(self, name: str) -> Tensor | None:
        """Gradient view of an internal tensor; None if it does not train. A tied head's is the embedding's."""
        return self.trained.grad_view(self._key(name)) if self.trained is not None and self.trains(name) else None

    def trains(self, name: str) -> bool:
        """Whether an internal tensor has a master."""
        return self.trained is not None and self._key(name) in self.trained.spans

    def _key(self, name: str) -> str:
        """The tensor that `name` is stored as: a tied head is the embedding."""
        return "embed" if name == "head" and self.geometry.tied else name

    def assign(
        self, internal: str, value: Tensor, *, rows: tuple[int, int] | None = None, name: str | None = None
    ) -> None:
        """Set `internal[rows]` (default: all) to `value`, in the view and, where it trains, in the master.

        `value` has the shape of those rows, up to dimensions of 1 (conv). `ModelError` (naming `name`) if it does
        not fit the dtype.
        """
        view = self[internal]
        start, stop = rows or (0, view.shape[0])
        part = view[start:stop]
        value = value.reshape(part.shape)
        if self.trained is not None and self._key(internal) in self.trained.spans and self.trained.plane is not None:
            master = self.trained.master_view(self._key(internal))[start:stop]
            master.copy_(value)
            value = master
        if part.data_ptr() != value.data_ptr():
            part.copy_(value)
        if not all_finite(part):
            raise _bad_values(name or internal, value, part.dtype)

    def ranges(self, from_layer: int = 0) -> list[Range]:
        """Ranges of the trained stores that layers >= `from_layer` train in, in memory order.

        One range per layer for its matrices and one for its vectors; embed, head and final_norm (train="all") a
        range each, with layer -1. Embed is left out when `from_layer` is above the lowest trained layer: its
        gradient passes through all layers. [] when nothing trains.
        """
        if self.trained is None:
            return []
        return trained_ranges(self.layout, from_layer, self.trained.plane is not None)

    def export(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Published name -> tensor in the published shape, for `write_model`'s `replace`.

        `names`: internal names (default: what trains, so {} if nothing does). Trained tensors come from the masters,
        others as they are held. The tensors are views on `device`: write before the next update. A tied head is
        exported as the embedding.
        """
        chosen = [self._key(n) for n in names] if names is not None else (self.trained.names if self.trained else [])
        slots = _names.by_internal(self.geometry)
        out: dict[str, Tensor] = {}
        for name in chosen:
            source = (
                self.trained.master_view(name)
                if self.trained is not None and name in self.trained.spans
                else self[name]
            )
            for s in slots[name]:
                out[s.published] = source[s.rows[0] : s.rows[1]].view(s.shape)
        return out

    def state(self, out: Tensor | None = None) -> Tensor:
        """Copy of the masters on the host (into `out` if given: a flat CPU tensor as an earlier call returned it)."""
        if self.trained is None:
            raise ValueError(
                "state: got weights that do not train; expected train='layers', 'mlp' or 'all'. Nothing to keep."
            )
        if out is None:
            out = torch.empty(self.trained.master.shape, dtype=self.trained.master.dtype, device="cpu")
        return out.copy_(self.trained.master)

    def load_state(self, state: Tensor) -> None:
        """Put masters from `state` back and refresh the plane. `ValueError` for another length or dtype."""
        if self.trained is None or state.shape != self.trained.master.shape or state.dtype != self.trained.master.dtype:
            have = "none" if self.trained is None else f"{tuple(self.trained.master.shape)} {self.trained.master.dtype}"
            raise ValueError(
                f"load_state: got {tuple(state.shape)} {state.dtype}; expected {have}. Load it with the same settings."
            )
        self.trained.master.copy_(state)
        self.trained.refresh_plane()


def check_values(model: ModelDir, dtype: torch.dtype) -> None:
    """Refuse a directory that `Weights.load` would refuse for its values, without holding it: one read of its files.

    For runs that load a model only after hours of other work. Raises the same `ModelError`.
    """
    for slot in _names.slots(model.geometry):
        value = model.read(slot.published)
        held = value.to(acc_dtype(dtype) if _names.is_vector(slot.internal) else dtype)
        if not all_finite(held):
            where = f"{model.path / model.tensors[slot.published].file}: {slot.published}"
            raise _bad_values(where, value, held.dtype)


def _bad_values(where: str, value: Tensor, dtype: torch.dtype) -> ModelError:
    """The error of values that are not finite in `dtype`."""
    why = "not finite" if not all_finite(value) else f"beyond the range of {dtype}"
    return ModelError(f"{where}: got values {why}; expected finite ones. Mend the file, or use another dtype.")


def _draw(name: str, t: Tensor, gen: torch.Generator, std: float, noise: float, zero_centered: bool) -> Tensor:
    """Fill `t` with initial values for `name`."""
    kind = name.rsplit(".", 1)[-1]
    if not _names.is_vector(name):
        return t.normal_(0.0, std, generator=gen)
    if kind == "A_log":
        t.uniform_(0.01, 16.0, generator=gen).log_()
    elif kind == "conv":
        bound = t.shape[1] ** -0.5
        t.uniform_(-bound, bound, generator=gen)
    else:
        plain = kind in ("dt_bias", "gdn_norm") or (kind.endswith("_norm") and not zero_centered)
        t.fill_(1.0 if plain else 0.0)
    if noise:
        t += noise * torch.empty_like(t).normal_(generator=gen)
    return t
