"""Fold: keep the best neurons of every MLP, and repair what is left.

Neuron j of a layer computes act_j = silu(gate_j x) * (up_j x) and adds act_j * down[:, j] to the residual stream.
By default its importance is

    E[act_j^2] * |down[:, j]|^2

the mean energy of that contribution on the train records (real rows only, no padding). The `width` most important stay
(ties: the lowest index), in their old order: rows of gate and up, columns of down. Other rankings, and the repair of
down from the Grams of a capture: repair.py; what a ranking needs to see on records: activity.py. Without Grams nothing
is repaired. With a file of learned masks their logits rank the neurons, and decide the width (keep.py) unless one is
given. In a looped stack a neuron stays or goes in all passes: what its visits do adds up, and it is kept by masks when
any visit keeps it.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cortiq_kernels import backend
from cortiq_kernels.data.batches import Batches, eval_batches
from cortiq_kernels.data.records import Dataset
from cortiq_kernels.data.windows import pack
from cortiq_kernels.model import names
from cortiq_kernels.model.hf import ModelDir, check_destination, open_model, width_changed_updates, write_model
from cortiq_kernels.model.layout import plan_layout
from cortiq_kernels.model.weights import Weights, acc_dtype
from cortiq_kernels.ops.gram import gram_finalize
from cortiq_kernels.recipes.activity import first_order, measure
from cortiq_kernels.recipes.errors import InputError, need
from cortiq_kernels.recipes.fingerprint import fingerprint
from cortiq_kernels.recipes.fold_config import FoldConfig
from cortiq_kernels.recipes.gram_file import Grams
from cortiq_kernels.recipes.heal_loop import F16_LOSS_SCALE
from cortiq_kernels.recipes.inputs import Progress, Ticks, fit_shape, geometry_summary, load_for, silent
from cortiq_kernels.recipes.keep import keep_widths, neuron_ranking, share_of_all, unions
from cortiq_kernels.recipes.lock import check_unlocked, locked
from cortiq_kernels.recipes.mask_file import Masks, read_masks
from cortiq_kernels.recipes.memory import check_fits, forward_memory
from cortiq_kernels.recipes.outputs import check_files
from cortiq_kernels.recipes.provenance import provenance
from cortiq_kernels.recipes.repair import (
    Repaired,
    importance,
    keep_by_gram,
    keep_top,
    magnitude,
    random_order,
    repair,
)
from cortiq_kernels.recipes.stopping import check, stop_on_signals
from cortiq_kernels.step.gates import mixers_from
from cortiq_kernels.step.memory import train_bytes


@dataclasses.dataclass(frozen=True)
class FoldReport:
    """What a fold did, layer by layer. `kept_energy[i]` is the share of layer i's importance that its kept neurons
    hold; `residual`, `output_residual` and `ridge` are those of repair.py, empty when nothing was repaired. `width` is
    that of the widest layer.
    """

    out: str
    width: int
    widths: list[int]
    width_before: list[int]
    kept_energy: list[float]
    repaired: bool
    residual: list[float]
    output_residual: list[float]
    ridge: list[float]
    rows: int
    parameters_before: int
    parameters_after: int
    seconds: float
    device: str
    dtype: str
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Records to measure neurons on."""

    dataset: Dataset
    batches: Batches


@dataclasses.dataclass(frozen=True)
class FoldPlan:
    """Opened inputs and decisions of a fold."""

    cfg: FoldConfig
    device: backend.DeviceChoice
    dtype: backend.DtypeChoice
    model: ModelDir
    grams: Grams | None
    measured: Measured | None
    widths: list[int]
    masks: Masks | None
    notes: list[str]

    @property
    def n_batches(self) -> int:
        """Batches that are measured."""
        if self.measured is None:
            return 0
        return min(len(self.measured.batches), self.cfg.max_batches or len(self.measured.batches))

    @property
    def data_hash(self) -> str:
        """Hash of the records behind the ranking; of several captures all of them."""
        if self.measured is not None:
            return self.measured.dataset.data_hash
        assert self.grams is not None
        return ",".join(self.grams.hashes)

    def data(self) -> dict[str, Any]:
        """JSON-able summary of what neurons are ranked on."""
        if self.measured is None:
            assert self.grams is not None
            files = ", ".join(str(p) for p in self.cfg.grams)
            return {"path": files, "sha256": self.data_hash, "rows": self.grams.rows}
        return {
            "path": str(self.cfg.data),
            "sha256": self.data_hash,
            "records": self.measured.dataset.counts,
            "batches": self.n_batches,
        }

    def describe(self) -> dict[str, Any]:
        """JSON-able summary for logs and dry runs."""
        g = self.model.geometry
        return {
            "recipe": "fold",
            "model": {"path": str(self.model.path), **geometry_summary(g)},
            "data": self.data(),
            "width": self.widths[0] if len(set(self.widths)) == 1 else self.widths,
            "ranked_by": "masks" if self.masks else self.cfg.rank,
            "parameters_after": names.parameter_count(g.with_widths(self.widths)),
            "device": backend.describe(self.device.device),
            "device_reason": self.device.reason,
            "dtype": backend.dtype_name(self.dtype.dtype),
            "dtype_reason": self.dtype.reason,
            "memory": self.memory(),
            "out": str(self.cfg.out),
            "notes": self.notes,
        }

    def memory(self) -> dict[str, int]:
        """Estimated bytes by part, their peak, and what is free (`memory.py`): of the measurement, or of the repair of
        the widest layer.
        """
        g, device = self.model.geometry, self.device.device
        f = max(g.intermediate)
        parts: dict[str, int] = {}
        if self.grams is not None:
            whole, weights = 8 * f * f, 8 * f * g.hidden
            free, host = backend.free_bytes(device), backend.host_free_bytes()
            parts = {
                "grams": whole, "workspace": 3 * whole + 4 * weights, "least": whole + weights,
                "peak": 4 * whole + 4 * weights, "free": free, "host_free": host,
            }  # fmt: skip
        if self.measured is not None:  # before the repair, and gone by then: the larger of the two counts
            seen = self._measuring()
            parts = seen if seen["peak"] > parts.get("peak", 0) else parts
        return parts

    def _measuring(self) -> dict[str, int]:
        """The parts of the pass over the records."""
        assert self.measured is not None
        g, device, batches, dtype = self.model.geometry, self.device.device, self.measured.batches, self.dtype.dtype
        n, acc = batches.batch * batches.window, acc_dtype(dtype)
        if self.cfg.rank == "first_order":
            rows = max(batches[i].n_scored for i in range(self.n_batches))
            step = train_bytes(
                g, n, batches.window, rows, dtype, device.type, first=0, train_from=0, trained=0,
                mixers_from=mixers_from(g, "full"),
            )  # fmt: skip
            least = plan_layout(g).nbytes(dtype.itemsize) + step.buffers + step.saved
            return {
                "model": least - step.buffers - step.saved, "activations": step.buffers + step.saved,
                "workspace": step.workspace, "logits": step.head, "least": least,
                "peak": least + max(step.workspace, step.head), "free": backend.free_bytes(device),
                "host_free": backend.host_free_bytes(),
            }  # fmt: skip
        squares = n * max(g.intermediate) * (dtype.itemsize + 2 * acc.itemsize)  # of one layer, real rows
        return forward_memory(g, n, batches.window, 0, dtype, device, work=squares + sum(g.intermediate) * 16)


def plan_fold(cfg: FoldConfig) -> FoldPlan:
    """Open and check everything; raises ValueError (InputError, ModelError, DataError) before any weight is read."""
    cfg.check()
    device = backend.pick_device(cfg.device)
    dtype = backend.pick_dtype(cfg.dtype, device.device)
    model = open_model(cfg.model)
    check_destination(model.path, cfg.out, model.total_bytes())
    check_files("fold", cfg)
    masks = read_masks(cfg.masks, model.geometry, "fold: masks") if cfg.masks else None
    widths = _widths(cfg, model, masks)
    notes: list[str] = []
    grams = _grams(cfg, model) if cfg.grams else None
    measured = None
    if cfg.data is not None:
        dataset, pad_id = load_for(model, cfg.data, "all", ("train",))
        window, batch = fit_shape(dataset.split("train"), cfg.window, cfg.batch)
        packed = pack(dataset.split("train"), window, "records", pad_id)
        measured = Measured(dataset, eval_batches(packed.windows, batch, pad_id=pad_id, split="train"))
        notes += dataset.notes
    else:
        dtype = backend.DtypeChoice(torch.float64, "repairs are computed in it")
    odd = next((w for w in widths if w % cfg.align), None)
    if odd is not None:
        notes.append(
            f"width {odd} is not a multiple of {cfg.align}: GPUs run such matrices slower; "
            f"{-(-odd // cfg.align) * cfg.align} may be faster with more neurons"
        )
    if list(model.geometry.intermediate) == widths:
        notes.append(f"the MLPs are {max(widths)} wide already: every neuron is kept")
    if masks is not None and model.geometry.num_loops > 1:
        notes.append("a looped stack has one set of neurons for all passes: those that the mask of any visit keeps")
    plan = FoldPlan(cfg, device, dtype, model, grams, measured, widths, masks, notes)
    fix = "Lower --batch or --window." if measured else "Use --device cpu."
    notes += check_fits("fold", plan.memory(), device.device, fix)
    return plan


def _widths(cfg: FoldConfig, model: ModelDir, masks: Masks | None) -> list[int]:
    """Width to keep of each layer."""
    have = model.geometry.intermediate
    if cfg.widths:
        n = len(have)
        need(len(cfg.widths) == n, "fold: widths", f"{len(cfg.widths)} of them", f"{n}, one a layer", "Set --widths.")
        for i, (want, most) in enumerate(zip(cfg.widths, have, strict=True)):
            need(want <= most, f"fold: widths: layer {i}", want, f"at most its {most} neurons", "Set --widths.")
        return list(cfg.widths)
    if masks is not None and cfg.per_layer and cfg.keep is not None:
        return keep_widths(share_of_all(masks.logits, len(have), cfg.keep), have, cfg.align, False)
    if masks is not None and cfg.keep is None and cfg.width is None:
        return keep_widths([int(k.sum()) for k in unions(masks.kept, len(have))], have, cfg.align, not cfg.per_layer)
    least = min(have)
    width = cfg.target_width(least)
    need(
        width <= least, "fold: width", width, f"at most {least}, the width of the model's narrowest MLP", "Set --width."
    )
    return [width] * len(have)


def _grams(cfg: FoldConfig, model: ModelDir) -> Grams:
    """The captures, which have to be of this model and of all its layers."""
    grams = Grams.open(cfg.grams)
    name, fix = f"fold: grams {str(cfg.grams[0])!r}", "Run cortiq capture on --model."
    layers = model.geometry.n_layers
    missing = [i for i in range(layers) if i not in grams.widths]
    need(not missing, name, f"no Gram of layer {missing[:1]}", f"one of each of {layers} layers", fix)
    same = grams.model == fingerprint(model)
    need(same, name, "the Grams of another model", f"those of {str(model.path)!r}", fix)
    return grams


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
    seen = _seen(plan, device, progress) if plan.measured else None
    rows = seen.rows if seen else 0

    replace: dict[str, Tensor] = {}
    learned = neuron_ranking(plan.masks.kept, plan.masks.logits, g.n_layers) if plan.masks else []
    shares: list[float] = []
    repaired: list[Repaired] = []
    for i, width in enumerate(plan.widths):
        gate, up, down = (f"{g.prefix}layers.{i}.mlp.{p}_proj.weight" for p in ("gate", "up", "down"))
        gram = None
        if plan.grams is not None:
            gram = gram_finalize(plan.grams.read(i, device), g.intermediate[i]).double().div_(plan.grams.rows)
        if seen is not None:
            mean_square = seen.square[i] / seen.rows
        else:
            assert gram is not None
            mean_square = gram.diagonal().cpu()
        weight = {p: plan.model.read(p) for p in (gate, up, down)}
        score = importance(mean_square, weight[down])
        if not float(score.sum()) > 0:
            raise InputError(
                f"fold: layer {i}: got no activity (all energy is zero) on {rows} rows; expected some. "
                "Check the model (cortiq score) and the data."
            )
        if gram is not None and cfg.rank == "gram":
            keep = keep_by_gram(gram, weight[down].to(device), width).cpu()
        elif learned:
            keep = keep_top(learned[i], width)
        else:
            keep = keep_top(_ranking(cfg, i, score, mean_square, list(weight.values()), seen), width)
        shares.append(float(score[keep].sum() / score.sum()))
        event: dict[str, Any] = {"event": "layer", "layer": i, "kept_energy": shares[-1]}
        replace[gate] = weight[gate].index_select(0, keep)
        replace[up] = weight[up].index_select(0, keep)
        if gram is not None and cfg.repair:
            made = repair(gram, weight[down].to(device), keep.to(device), cfg.ridge, f"fold: layer {i}")
            repaired.append(made._replace(down=torch.empty(0)))
            replace[down] = made.down.cpu().to(acc_dtype(weight[down].dtype))
            event |= {"residual": made.residual, "output_residual": made.output_residual}
        else:
            replace[down] = weight[down].index_select(1, keep)
        progress(event)
        check()
    notes = list(plan.notes)
    more = [i for i, r in enumerate(repaired) if r.ridge > cfg.ridge]
    if more:
        most = max(r.ridge for r in repaired)
        notes.append(f"the repair of layers {more} took a ridge of up to {most:g}: their Grams are not positive")
    change = width_changed_updates(plan.model, plan.widths)
    after = g.with_widths(plan.widths)
    progress({"event": "write", "out": str(cfg.out)})
    masks = {"masks": plan.masks.provenance} if plan.masks else {}
    left = {k: [getattr(r, k) for r in repaired] for k in ("residual", "output_residual", "ridge")}
    written = write_model(
        plan.model, cfg.out, replace=replace, drop=change.drop, config_updates=change.config_updates,
        provenance=provenance(
            "fold", cfg, model=plan.model, data_hash=plan.data_hash, widths=plan.widths, kept_energy=shares,
            rows=rows, device=backend.describe(device), dtype=backend.dtype_name(plan.dtype.dtype), **left,
            **masks,
        ),
    )  # fmt: skip
    return FoldReport(
        str(written.path), max(plan.widths), plan.widths, list(g.intermediate), shares, bool(repaired),
        left["residual"], left["output_residual"], left["ridge"], rows, names.parameter_count(g),
        names.parameter_count(after), time.perf_counter() - began, backend.describe(device),
        backend.dtype_name(plan.dtype.dtype), [*notes, *change.notes, *written.notes],
    )  # fmt: skip


class Seen(NamedTuple):
    """What the records showed: sums over `rows` rows, and what the ranking asked for."""

    square: list[Tensor]  # of act^2
    ranking: list[Tensor] | None  # [F] of each layer, of the rankings that only records can give
    rows: int


def _seen(plan: FoldPlan, device: torch.device, progress: Progress) -> Seen:
    """Run the plan's batches; the model is gone again afterwards."""
    assert plan.measured is not None
    weights = Weights.load(plan.model, dtype=plan.dtype.dtype, device=device, train=None)
    batches = [plan.measured.batches[i] for i in range(plan.n_batches)]
    twice = plan.cfg.rank == "first_order"
    ticks = Ticks(progress, "measure", len(batches) * (1 + twice))
    activity = measure(weights, batches, done=ticks)
    ranking = activity.absolute if plan.cfg.rank == "absolute" else None
    if twice:
        scale = F16_LOSS_SCALE if weights.dtype == torch.float16 else 1.0
        ranking = first_order(weights, batches, scale=scale, done=lambda n: ticks(len(batches) + n))
    del weights
    backend.release(device)
    return Seen(activity.square, ranking, activity.rows)


def _ranking(
    cfg: FoldConfig, layer: int, score: Tensor, mean_square: Tensor, weights: list[Tensor], seen: Seen | None
) -> Tensor:
    """Scores [F] of a layer's neurons by `cfg.rank`, other than "gram"; `weights`: gate, up, down."""
    if cfg.rank == "random":
        return random_order(len(score), cfg.seed, layer)
    if cfg.rank == "magnitude":
        return magnitude(*weights)
    if seen is not None and seen.ranking is not None:
        return seen.ranking[layer]
    return mean_square if cfg.rank == "activation" else score
