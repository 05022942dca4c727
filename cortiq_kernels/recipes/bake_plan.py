"""Everything that `bake` decides before it works: all refusals, and what a dry run shows."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from cortiq_kernels import backend
from cortiq_kernels.data.batches import Batch, Batches, eval_batches, train_batches
from cortiq_kernels.data.records import Dataset
from cortiq_kernels.data.windows import pack
from cortiq_kernels.model.hf import ModelDir, check_destination, open_model
from cortiq_kernels.model.layout import Layout, plan_layout
from cortiq_kernels.model.weights import acc_dtype
from cortiq_kernels.recipes.bake_config import FEWEST_CHUNKS, BakeConfig
from cortiq_kernels.recipes.errors import need, refuse
from cortiq_kernels.recipes.finished import check_same_run, made_output, output_is_done
from cortiq_kernels.recipes.inputs import Joined, geometry_summary, load_for
from cortiq_kernels.recipes.masks_plan import at_least_f32
from cortiq_kernels.recipes.memory import check_fits, check_window
from cortiq_kernels.recipes.outputs import check_files
from cortiq_kernels.recipes.resume import check_room, find_checkpoint, where_checkpoint
from cortiq_kernels.report.results import size
from cortiq_kernels.step.memory import StepBytes, forward_bytes, train_bytes
from cortiq_kernels.step.spare import spare_elements

MASKS, OVERLAY = ".masks.safetensors", ".overlay.safetensors"


def beside(out: Path, suffix: str) -> Path:
    """A file of the bake beside its output directory."""
    real = Path(os.path.realpath(out))
    return real.with_name(real.name + suffix)


@dataclass(frozen=True)
class BakePlan:
    """Opened inputs and decisions. `dtype` is that of evaluations and of phase B, `step_dtype` that of phase A's steps;
    `two_copies`: phase A holds the weights in both. `calib` has a batch a chunk, `held` one batch of all. `train_from`
    is the first layer that phase B trains (None: there is no phase B).
    """

    cfg: BakeConfig
    device: backend.DeviceChoice
    dtype: backend.DtypeChoice
    step_dtype: backend.DtypeChoice
    two_copies: bool
    model: ModelDir
    dataset: Dataset
    calib: Batches
    held: Batches
    train_from: int | None
    notes: list[str]
    checkpoint: dict[str, Any] | None = None
    made: dict[str, Any] | None = None

    @property
    def models(self) -> dict[str, ModelDir | None]:
        """The models that it opens, by their settings."""
        return {"model": self.model}

    @property
    def batches(self) -> Joined[Batch]:
        """Calibration chunks, then the held-out batch."""
        return Joined(self.calib, self.held)

    @property
    def n(self) -> int:
        """Tokens of a step."""
        return self.cfg.chunk

    @property
    def steps_b(self) -> int:
        """Steps of phase B."""
        return 0 if self.train_from is None else self.cfg.steps_b

    @property
    def steps(self) -> int:
        """Steps of both phases."""
        return self.cfg.steps_a + self.steps_b

    @property
    def n_gates(self) -> int:
        """Gates of all virtual layers."""
        g = self.model.geometry
        return sum(g.intermediate) * g.num_loops

    @property
    def enough(self) -> Fraction:
        """Closed gates (a number) of the target; 0 without one."""
        return self.cfg.target * self.n_gates

    @property
    def eval_dtype(self) -> torch.dtype:
        """Working dtype of phase A's evaluations."""
        return self.dtype.dtype if self.two_copies else self.step_dtype.dtype

    @property
    def state_bytes(self) -> int:
        """Most bytes of a checkpoint's tensors: gates and their optimizer, or masters, two moments and the best."""
        acc = acc_dtype(self.step_dtype.dtype).itemsize
        tune = 4 * self._layout_b().trained_numel * acc_dtype(self.dtype.dtype).itemsize
        return self.n_gates * (acc + 4) + max(self.n_gates * (acc + 20), tune)

    @property
    def out_bytes(self) -> int:
        """Most bytes that the output takes, with the files beside it."""
        g, overlay = self.model.geometry, 0
        if self.cfg.overlay:
            overlay = 3 * 8 * g.hidden * sum(g.intermediate)
        return self.model.total_bytes() + 10 * self.n_gates + overlay

    def _layout_b(self) -> Layout:
        train = None if self.train_from is None else "mlp"
        return plan_layout(self.model.geometry, train=train, train_from=self.train_from or 0)

    def describe(self) -> dict[str, Any]:
        """JSON-able summary: geometry, data, steps, device, precision, memory, each choice with its reason."""
        cfg = self.cfg
        tuned = "no phase B"
        if self.train_from is not None:
            tuned = f"{cfg.steps_b} on the MLPs of layers {self.train_from} .. {self.model.geometry.n_layers - 1}"
        return {
            "recipe": "bake",
            "model": {"path": str(self.model.path), **geometry_summary(self.model.geometry)},
            "data": {
                "path": str(cfg.data),
                "category": cfg.category or "all",
                "sha256": self.dataset.data_hash,
                "records": self.dataset.counts,
                "calibration_chunks": len(self.calib),
                "held_out_chunks": self.held.batch,
            },
            "loss": "NLL",
            "gates": self.n_gates,
            "target": float(cfg.target),
            "phases": f"{cfg.steps_a} steps on the gates, {tuned}",
            "steps": self.steps,
            "steps_per_epoch": len(self.calib),
            "tokens_per_step": cfg.chunk,
            "device": backend.describe(self.device.device),
            "device_reason": self.device.reason,
            "dtype": backend.dtype_name(self.dtype.dtype),
            "dtype_reason": self.dtype.reason,
            "evaluations": f"in {backend.dtype_name(self.eval_dtype)}, "
            f"phase A in {backend.dtype_name(self.step_dtype.dtype)}",
            "memory": self.memory(),
            "checkpoint": where_checkpoint(self),
            "out": str(cfg.out),
            "notes": self.notes,
        }

    def memory(self) -> dict[str, int]:
        """Estimated bytes by part, of the phase that needs more (B as if nothing were pruned), and what is free."""
        cfg, g, device = self.cfg, self.model.geometry, self.device.device
        n_held, rows = self.held.batch * cfg.chunk, self.held[0].n_scored
        plain = plan_layout(g)

        def phase(
            weights: int, more: int, dtype: torch.dtype, eval_dtype: torch.dtype, **trains: Any
        ) -> dict[str, int]:
            step = train_bytes(
                g, cfg.chunk, cfg.chunk, cfg.chunk, dtype, device.type, first=0, mixers_from=g.n_virtual, **trains
            )
            held: StepBytes = forward_bytes(g, n_held, cfg.chunk, rows, eval_dtype, device.type)
            least = weights + more + step.buffers + step.saved + held.buffers
            work = max(step.workspace, step.head, held.workspace, held.head)
            return {
                "model": weights, "optimizer": more, "activations": step.buffers + held.buffers,
                "saved_by_ops": step.saved, "workspace": work, "least": least, "peak": least + work,
            }  # fmt: skip

        model = plain.nbytes(self.step_dtype.dtype.itemsize)
        model += plain.nbytes(self.dtype.dtype.itemsize) if self.two_copies else 0
        gates = self.n_gates * (3 * acc_dtype(self.step_dtype.dtype).itemsize + 16)
        parts = phase(model, gates, self.step_dtype.dtype, self.eval_dtype, train_from=0, trained=0)
        if self.train_from is not None:
            layout, dtype = self._layout_b(), self.dtype.dtype
            tune = phase(
                layout.nbytes(dtype.itemsize), 0, dtype, dtype, train_from=self.train_from,
                trained=layout.trained_numel, train="mlp",
                spare=spare_elements(layout, train="mlp", train_from=self.train_from, mixers_from=g.n_virtual),
            )  # fmt: skip
            parts = max(parts, tune, key=lambda p: p["peak"]) | {
                "least": max(parts["least"], tune["least"]), "peak": max(parts["peak"], tune["peak"]),
            }  # fmt: skip
        return {**parts, "free": backend.free_bytes(device), "host_free": backend.host_free_bytes()}


def plan_bake(cfg: BakeConfig) -> BakePlan:
    """Open and check everything; raises InputError, ModelError, DataError or ValueError before any weight is read."""
    cfg.check()
    device = backend.pick_device(cfg.device)
    dtype = backend.pick_dtype(cfg.dtype, device.device)
    step_dtype = at_least_f32(dtype, "phase A is strict")
    model = open_model(cfg.model)
    g = model.geometry
    need(
        g.uniform, "bake: model", f"MLP widths that differ per layer ({min(g.intermediate)} to {max(g.intermediate)})",
        "one width", "Bake the model that it was made of.",
    )  # fmt: skip
    made = made_output(cfg)
    done = made is not None or output_is_done(cfg)
    if not done:
        check_destination(model.path, cfg.out, model.total_bytes())
    check_files("bake", cfg)
    for name, suffix in (("masks", MASKS), ("overlay", OVERLAY)):
        file = beside(cfg.out, suffix)
        if os.path.lexists(file) and not done and not cfg.resume and (name == "masks" or cfg.overlay):
            fix = "Choose another --out, or delete the file first."
            raise refuse(f"bake: {name}", f"{str(file)!r}, which is there already", "a new file", fix)
    check_window("bake", g, cfg.chunk, step_dtype.dtype, device.device, mixers_from=g.n_virtual)
    dataset, calib, held, notes = _chunks(model, cfg)
    first = g.n_layers - min(cfg.fcd_layers, g.n_layers)
    train_from = first if cfg.steps_b > 0 and cfg.fcd_layers > 0 else None
    plan = BakePlan(
        cfg, device, dtype, step_dtype, step_dtype.dtype != dtype.dtype, model, dataset, calib, held, train_from, notes
    )
    if made is not None:
        check_same_run(plan, made)
        return replace(plan, made=made)
    if not done:
        check_room(plan)
    plan = replace(plan, checkpoint=find_checkpoint(plan))
    if plan.checkpoint is not None:  # whatever memory is free now: to go on bit for bit
        plan = replace(plan, two_copies=plan.checkpoint["two_copies"])
    memory = plan.memory()
    if plan.checkpoint is None and plan.two_copies and memory["least"] > memory["free"]:
        notes.append(
            f"evaluations of phase A are in {backend.dtype_name(step_dtype.dtype)}, too: {size(memory['least'])} with "
            f"a second copy of the weights, and {size(memory['free'])} are free"
        )
        plan = replace(plan, two_copies=False)
        memory = plan.memory()
    notes += check_fits("bake", memory, device.device, "Lower --chunk or --held.")
    return plan


def _chunks(model: ModelDir, cfg: BakeConfig) -> tuple[Dataset, Batches, Batches, list[str]]:
    """(dataset, calibration chunks, the held-out batch, notes): the train records of the category as one stream, cut
    every `chunk` tokens.
    """
    dataset, pad_id = load_for(model, cfg.data, "all", ("train",))
    records = dataset.split("train")
    if cfg.category is not None:
        there = sorted({r.category or "none" for r in records})
        records = [r for r in records if (r.category or "none") == cfg.category]
        shown = ", ".join(there[:12]) + (", ..." if len(there) > 12 else "")
        need(
            bool(records), "bake: category", repr(cfg.category), f"a category of the train records: {shown}",
            "Set --category.",
        )  # fmt: skip
    windows = pack(records, cfg.chunk, "stream", pad_id).windows
    least = cfg.held + FEWEST_CHUNKS
    need(
        len(windows) >= least, "bake: data", f"{len(windows)} chunks of {cfg.chunk} tokens in {len(records)} train "
        "records", f"at least {least}: {cfg.held} held out, and {FEWEST_CHUNKS} to calibrate on",
        "Give more train records, or lower --chunk or --held.",
    )  # fmt: skip
    calib, notes = windows[cfg.held : cfg.held + cfg.calib], list(dataset.notes)
    if len(calib) < cfg.calib:
        notes.append(f"{len(calib)} chunks to calibrate on, not {cfg.calib}: the train records hold no more")
    held = eval_batches(windows[: cfg.held], cfg.held, pad_id=pad_id, split="train")
    return dataset, train_batches(calib, 1), held, notes
