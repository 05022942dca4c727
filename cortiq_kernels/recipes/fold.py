"""Fold: keep the most important neurons of every MLP, at one width.

Neuron j of a layer computes act_j = silu(gate_j x) * (up_j x) and adds act_j * down[:, j] to the residual stream.
Its importance is

    E[act_j^2] * |down[:, j]|^2

the mean energy of that contribution, measured on the train records (real rows only, no padding). The `width` most
important stay (ties: the lowest index), in their old order: rows of gate and up, columns of down. Nothing is
repaired; heal the result.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cortiq_kernels import backend
from cortiq_kernels.data.batches import Batch, Batches, eval_batches
from cortiq_kernels.data.records import Dataset
from cortiq_kernels.data.windows import pack
from cortiq_kernels.model import names
from cortiq_kernels.model.hf import ModelDir, check_destination, open_model, width_changed_updates, write_model
from cortiq_kernels.model.weights import Weights, acc_dtype
from cortiq_kernels.recipes.errors import InputError, need
from cortiq_kernels.recipes.fold_config import FoldConfig
from cortiq_kernels.recipes.inputs import Progress, Ticks, fit_shape, geometry_summary, load_for, silent
from cortiq_kernels.recipes.lock import check_unlocked, locked
from cortiq_kernels.recipes.memory import check_fits, forward_memory
from cortiq_kernels.recipes.outputs import check_files
from cortiq_kernels.recipes.provenance import provenance
from cortiq_kernels.recipes.stopping import stop_on_signals
from cortiq_kernels.step import Buffers
from cortiq_kernels.step.buffers import cut
from cortiq_kernels.step.forward import Sequences, embed, layers_forward, rope_for


@dataclasses.dataclass(frozen=True)
class FoldReport:
    """What a fold did. `kept_energy[i]` is the share of layer i's importance that its kept neurons hold."""

    out: str
    width: int
    width_before: list[int]
    kept_energy: list[float]
    rows: int
    parameters_before: int
    parameters_after: int
    seconds: float
    device: str
    dtype: str
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class FoldPlan:
    """Opened inputs and decisions of a fold."""

    cfg: FoldConfig
    device: backend.DeviceChoice
    dtype: backend.DtypeChoice
    model: ModelDir
    dataset: Dataset
    batches: Batches
    width: int
    notes: list[str]

    @property
    def n_batches(self) -> int:
        """Batches that are measured."""
        return min(len(self.batches), self.cfg.max_batches or len(self.batches))

    def describe(self) -> dict[str, Any]:
        """JSON-able summary for logs and dry runs."""
        g = self.model.geometry
        return {
            "recipe": "fold",
            "model": {"path": str(self.model.path), **geometry_summary(g)},
            "data": {
                "path": str(self.cfg.data),
                "sha256": self.dataset.data_hash,
                "records": self.dataset.counts,
                "batches": self.n_batches,
            },
            "width": self.width,
            "parameters_after": names.parameter_count(g.with_widths([self.width] * g.n_layers)),
            "device": backend.describe(self.device.device),
            "device_reason": self.device.reason,
            "dtype": backend.dtype_name(self.dtype.dtype),
            "dtype_reason": self.dtype.reason,
            "memory": self.memory(),
            "out": str(self.cfg.out),
            "notes": self.notes,
        }

    def memory(self) -> dict[str, int]:
        """Estimated bytes of the measurement by part, their peak, and what is free (`memory.py`)."""
        g, n, acc = self.model.geometry, self.batches.batch * self.batches.window, acc_dtype(self.dtype.dtype)
        squares = n * max(g.intermediate) * (self.dtype.dtype.itemsize + 2 * acc.itemsize)  # of one layer, real rows
        return forward_memory(
            g, n, self.batches.window, 0, self.dtype.dtype, self.device.device, work=squares + sum(g.intermediate) * 8
        )


def plan_fold(cfg: FoldConfig) -> FoldPlan:
    """Open and check everything; raises ValueError (InputError, ModelError, DataError) before any weight is read."""
    cfg.check()
    device = backend.pick_device(cfg.device)
    dtype = backend.pick_dtype(cfg.dtype, device.device)
    model = open_model(cfg.model)
    check_destination(model.path, cfg.out, model.total_bytes())
    check_files("fold", cfg)
    least = min(model.geometry.intermediate)
    width = cfg.target_width(least)
    need(
        width <= least, "fold: width", width, f"at most {least}, the width of the model's narrowest MLP", "Set --width."
    )
    dataset, pad_id = load_for(model, cfg.data, "all", ("train",))
    window, batch = fit_shape(dataset.split("train"), cfg.window, cfg.batch)
    packed = pack(dataset.split("train"), window, "records", pad_id)
    batches = eval_batches(packed.windows, batch, pad_id=pad_id, split="train")
    notes = list(dataset.notes)
    if width % cfg.align:
        notes.append(
            f"width {width} is not a multiple of {cfg.align}: GPUs run such matrices slower; "
            f"{-(-width // cfg.align) * cfg.align} may be faster with more neurons"
        )
    if set(model.geometry.intermediate) == {width}:
        notes.append(f"the MLPs are {width} wide already: every neuron is kept")
    plan = FoldPlan(cfg, device, dtype, model, dataset, batches, width, notes)
    notes += check_fits("fold", plan.memory(), device.device, "Lower --batch or --window.")
    return plan


def run(cfg: FoldConfig, progress: Progress = silent) -> FoldReport:
    """Fold `cfg.model` and write `cfg.out`. Events: "plan", "note", "tick" (phase "measure"), "layer", "write".

    Raises as `plan_fold`, and InputError naming a layer whose neurons were never active, or for an output that another
    run holds; nothing is written then. A signal raises `Stopped`.
    """
    with stop_on_signals():
        cfg.check()
        check_unlocked("fold", cfg.out)
        plan = plan_fold(cfg)
        with locked("fold", cfg.out):
            check_destination(plan.model.path, cfg.out, 0)  # another run may have written it since the plan was made
            return _run(plan, progress)


def _run(plan: FoldPlan, progress: Progress) -> FoldReport:
    """The work, with the output's lock held."""
    began, cfg = time.perf_counter(), plan.cfg
    progress({"event": "plan", **plan.describe()})
    for note in plan.notes:
        progress({"event": "note", "text": note})
    device, g = plan.device.device, plan.model.geometry
    weights = Weights.load(plan.model, dtype=plan.dtype.dtype, device=device, train=None)
    batches = [plan.batches[i] for i in range(plan.n_batches)]
    energy, rows = activation_energy(weights, batches, done=Ticks(progress, "measure", len(batches)))
    del weights
    backend.release(device)

    replace: dict[str, Tensor] = {}
    shares: list[float] = []
    for i in range(g.n_layers):
        gate, up, down = (f"{g.prefix}layers.{i}.mlp.{p}_proj.weight" for p in ("gate", "up", "down"))
        score = importance(energy[i] / rows, plan.model.read(down))
        if not float(score.sum()) > 0:
            raise InputError(
                f"fold: layer {i}: got no activity (all energy is zero) on {rows} rows; expected some. "
                "Check the model (cortiq score) and the data."
            )
        keep = keep_top(score, plan.width)
        shares.append(float(score[keep].sum() / score.sum()))
        progress({"event": "layer", "layer": i, "kept_energy": shares[-1]})
        replace[gate] = plan.model.read(gate).index_select(0, keep)
        replace[up] = plan.model.read(up).index_select(0, keep)
        replace[down] = plan.model.read(down).index_select(1, keep)
    change = width_changed_updates(plan.model, [plan.width] * g.n_layers)
    after = g.with_widths([plan.width] * g.n_layers)
    progress({"event": "write", "out": str(cfg.out)})
    written = write_model(
        plan.model, cfg.out, replace=replace, drop=change.drop, config_updates=change.config_updates,
        provenance=provenance(
            "fold", cfg, model=plan.model, data_hash=plan.dataset.data_hash, width=plan.width, kept_energy=shares,
            rows=rows, device=backend.describe(device), dtype=backend.dtype_name(plan.dtype.dtype),
        ),
    )  # fmt: skip
    return FoldReport(
        str(written.path), plan.width, list(g.intermediate), shares, rows, names.parameter_count(g),
        names.parameter_count(after), time.perf_counter() - began, backend.describe(device),
        backend.dtype_name(plan.dtype.dtype), [*plan.notes, *change.notes, *written.notes],
    )  # fmt: skip


def activation_energy(
    w: Weights, batches: Sequence[Batch], *, done: Callable[[int], None] = lambda n: None
) -> tuple[list[Tensor], int]:
    """(sum of act^2 per neuron [F] float64 on the host, for every layer; the number of real rows it is over).

    Squares are float32 (float64 for float64) per batch, summed in float64. Padding rows are left out. `done(n)`
    after batch n.
    """
    g, first = w.geometry, batches[0]
    n, t = first.tokens.shape[0], first.max_seqlen
    buf, rope = Buffers(g, n, w.dtype, w.device), rope_for(w, t)
    energy = [torch.zeros(f, dtype=torch.float64, device=w.device) for f in g.intermediate]
    rows = 0
    for k, host in enumerate(batches):
        batch = host.to(w.device)
        real = _real_rows(host).to(w.device)
        seqs = Sequences.build(g, batch.cu_seqlens, t, n, rope)

        def measure(layer: int, real: Tensor = real) -> None:
            act = cut(buf.act, g.intermediate[layer]).index_select(0, real)
            energy[layer] += act.to(w.acc_dtype).square().sum(0, dtype=torch.float64)

        layers_forward(w, buf, embed(w, buf, batch.tokens), seqs, 0, g.n_layers, after_layer=measure)
        rows += len(real)
        done(k + 1)
    return [e.cpu() for e in energy], rows


def importance(mean_square: Tensor, down: Tensor) -> Tensor:
    """E[act^2] * |down column|^2 per neuron: [F] and down [H, F] -> [F] float64."""
    return mean_square * down.double().square().sum(0)


def keep_top(score: Tensor, width: int) -> Tensor:
    """Indices of the `width` largest of score [F], ascending; of equals the lowest index stays."""
    order = torch.sort(score, descending=True, stable=True).indices
    return order[:width].sort().values


def _real_rows(batch: Batch) -> Tensor:
    """Rows of a batch that hold real tokens, int64."""
    t = batch.max_seqlen
    return torch.cat([torch.arange(i * t, i * t + n) for i, n in enumerate(batch.n_tokens)])
