"""Everything that `masks` decides before it works: all refusals, and what a dry run shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from cortiq_kernels import backend
from cortiq_kernels.data.batches import Batches
from cortiq_kernels.data.records import Dataset
from cortiq_kernels.model.hf import ModelDir, open_model
from cortiq_kernels.model.layout import plan_layout
from cortiq_kernels.model.weights import acc_dtype
from cortiq_kernels.recipes.activations import Activations, choose_activations, how_to_fit
from cortiq_kernels.recipes.errors import need
from cortiq_kernels.recipes.finished import check_same_run, made_output, output_is_done
from cortiq_kernels.recipes.inputs import Joined, check_same_tokens, geometry_summary, packed_for
from cortiq_kernels.recipes.masks_config import MasksConfig
from cortiq_kernels.recipes.memory import check_fits, check_window, forward_memory
from cortiq_kernels.recipes.outputs import check_files
from cortiq_kernels.recipes.resume import check_room, find_checkpoint, where_checkpoint
from cortiq_kernels.recipes.target_dir import check_target_directory, held_bytes
from cortiq_kernels.recipes.target_file import file_bytes
from cortiq_kernels.recipes.targets import asked_topk
from cortiq_kernels.recipes.taught_plan import HOST_SHARE, TaughtPlan
from cortiq_kernels.report.results import size
from cortiq_kernels.step import Policy
from cortiq_kernels.step.gates import gate_widths, mixers_from
from cortiq_kernels.step.memory import forward_bytes, train_bytes


@dataclass(frozen=True)
class MasksPlan(TaughtPlan):
    """Opened inputs and decisions. `dtype` is that of the teacher and of the evaluations, `step_dtype` that of the
    steps; `two_copies`: the weights are held in both; `rows` are the scored rows of each of `batches`, `target_room`
    the host bytes that targets may take in memory, `checkpoint` the state of an earlier run to go on from, `made` the
    provenance of an output that is there already, `activations` what a layer keeps for its backward.
    """

    cfg: MasksConfig
    device: backend.DeviceChoice
    dtype: backend.DtypeChoice
    step_dtype: backend.DtypeChoice
    two_copies: bool
    model: ModelDir
    teacher: ModelDir | None
    dataset: Dataset
    train: Batches
    val: Batches
    topk: int
    rows: list[int]
    target_room: int
    notes: list[str]
    checkpoint: dict[str, Any] | None = None
    made: dict[str, Any] | None = None
    activations: Activations = Activations("cheap")

    @property
    def models(self) -> dict[str, ModelDir | None]:
        """The models that it opens, by their settings."""
        return {"model": self.model, "teacher": self.teacher}

    @property
    def steps(self) -> int:
        """Most steps."""
        return self.cfg.max_steps

    @property
    def state_bytes(self) -> int:
        """Most bytes of a checkpoint's tensors: logits, two moments, and the best logits so far."""
        return self.n_gates * (2 * acc_dtype(self.step_dtype.dtype).itemsize + 16)

    @property
    def out_bytes(self) -> int:
        """Most bytes that the output takes."""
        return 9 * self.n_gates + (1 << 20)

    @property
    def n_gates(self) -> int:
        """Gates of all layers, of every visit in a looped stack."""
        return sum(gate_widths(self.model.geometry))

    @property
    def eval_dtype(self) -> torch.dtype:
        """Working dtype of the evaluations."""
        return self.dtype.dtype if self.two_copies else self.step_dtype.dtype

    def describe(self) -> dict[str, Any]:
        """JSON-able summary: geometry, data, steps, device, precision, memory, each choice with its reason."""
        cfg = self.cfg
        teacher = self.teacher
        return {
            "recipe": "masks",
            "model": {"path": str(self.model.path), **geometry_summary(self.model.geometry)},
            "teacher": {"path": str(teacher.path), **geometry_summary(teacher.geometry)} if teacher else None,
            "data": {
                "path": str(cfg.data),
                "sha256": self.dataset.data_hash,
                "records": self.dataset.counts,
                "train_batches": len(self.train),
                "val_batches": len(self.val),
            },
            "loss": cfg.loss_name,
            "topk": self.topk,
            "gates": self.n_gates,
            "target": float(cfg.target),
            "steps": cfg.max_steps,
            "steps_per_epoch": len(self.train),
            "tokens_per_step": self.n,
            "device": backend.describe(self.device.device),
            "device_reason": self.device.reason,
            "dtype": backend.dtype_name(self.step_dtype.dtype),
            "dtype_reason": self.step_dtype.reason,
            "evaluations": f"in {backend.dtype_name(self.eval_dtype)}",
            "activations": self.activations.text,
            "activation_peaks": dict(self.activations.peaks),
            "memory": self.memory(),
            "checkpoint": where_checkpoint(self),
            "out": str(cfg.out),
            "notes": self.notes,
        }

    def memory(self) -> dict[str, int]:
        """Estimated bytes by part, their peak, and what is free. The teacher is gone before the steps begin."""
        cfg, g, device = self.cfg, self.model.geometry, self.device.device
        dtype, rows, layout = self.step_dtype.dtype, max(self.rows), plan_layout(g)
        step = train_bytes(
            g, self.n, cfg.window, rows, dtype, device.type, first=0, train_from=0, trained=0,
            mixers_from=mixers_from(g, cfg.backward), policy=self.activations.policy, train=None,
            sequences=self.train.capacity,
        )  # fmt: skip
        gates = self.n_gates * (3 * acc_dtype(dtype).itemsize + 16)
        inputs = 8 * rows * self.topk + 32 * self.n
        model, activations = layout.nbytes(dtype.itemsize), step.buffers
        if self.two_copies:
            model += layout.nbytes(self.dtype.dtype.itemsize)
            activations += forward_bytes(g, self.n, cfg.window, rows, self.dtype.dtype, device.type).buffers
        least = model + activations + step.saved + gates + inputs
        peak = least + max(step.workspace, step.head)
        targets = self.target_bytes if self.target_bytes <= self.target_room else 0
        if device.type == "cpu":
            least, peak = least + targets, peak + targets
        teacher = {"model": 0, "least": 0, "peak": 0}
        if self.teacher is not None:
            teacher = forward_memory(
                self.teacher.geometry, self.n, cfg.window, rows, self.dtype.dtype, device,
                slabs=2.0 if device.type == "cpu" else 0.0, more=8 * rows * self.topk,
            )  # fmt: skip
        return {
            "model": model,
            "gates_and_optimizer": gates,
            "activations": activations,
            "saved_by_ops": step.saved,
            "workspace": step.workspace,
            "logits": step.head,
            "inputs": inputs,
            "teacher": teacher["model"],
            "teacher_phase": teacher["peak"],
            "host_targets": targets,
            "least": max(least, teacher["least"]),
            "peak": max(peak, teacher["peak"]),
            "free": backend.free_bytes(device),
            "host_least": targets,
            "host_free": backend.host_free_bytes(),
        }

    def memory_with(self, policy: Policy) -> dict[str, int]:
        """`memory`, were that the policy of activations."""
        return replace(self, activations=Activations(policy)).memory()


def plan_masks(cfg: MasksConfig) -> MasksPlan:
    """Open and check everything; raises InputError, ModelError, DataError or ValueError before any weight is read."""
    cfg.check()
    device = backend.pick_device(cfg.device)
    dtype = backend.pick_dtype(cfg.dtype, device.device)
    step_dtype = steps_in(cfg, dtype)
    model = open_model(cfg.model)
    g = model.geometry
    made = made_output(cfg)
    done = made is not None or output_is_done(cfg)
    check_files("masks", cfg, done=done)
    teacher = None
    if cfg.loss == "kl":
        teacher = model if cfg.teacher is None else open_model(cfg.teacher)
        check_same_tokens(teacher, model, "teacher", "model")
        need(cfg.topk <= g.vocab, "masks: topk", cfg.topk, f"1 .. {g.vocab} (the vocabulary)", "Set --topk.")
    check_window(
        "masks", g, cfg.batch * cfg.window, step_dtype.dtype, device.device, mixers_from=mixers_from(g, cfg.backward),
        activations=cfg.activations, train=None,
    )  # fmt: skip
    dataset, train, val, notes = packed_for(model, cfg)
    topk, rows = asked_topk(cfg.topk, cfg.alpha, g.vocab), [b.n_scored for b in Joined(train, val)]
    beside = 0
    if teacher is not None:
        on_disk = file_bytes(rows, topk)
        check_target_directory(cfg, on_disk if made is None else 0)
        if cfg.targets is None:  # they lie beside the output while it is made
            beside = max(0, on_disk - held_bytes(cfg))
    plan = MasksPlan(
        cfg, device, dtype, step_dtype, step_dtype.dtype != dtype.dtype, model, teacher, dataset, train, val, topk,
        rows, int(HOST_SHARE * backend.host_free_bytes()), notes,
    )  # fmt: skip
    if made is None:
        if not done:
            check_room(plan, beside)
        plan = replace(plan, checkpoint=find_checkpoint(plan))
    if plan.checkpoint is not None:  # whatever memory is free now: to go on bit for bit
        plan = replace(plan, two_copies=plan.checkpoint["two_copies"])
    plan = replace(plan, activations=choose_activations(cfg.activations, plan.memory_with))
    memory = plan.memory()
    if plan.checkpoint is None and plan.two_copies and memory["least"] > memory["free"]:
        notes.append(
            f"evaluations are in {backend.dtype_name(step_dtype.dtype)}, too: {size(memory['least'])} with a second "
            f"copy of the weights in {backend.dtype_name(dtype.dtype)}, and {size(memory['free'])} are free"
        )
        plan = replace(plan, two_copies=False)
        plan = replace(plan, activations=choose_activations(cfg.activations, plan.memory_with))
        memory = plan.memory()
    fix = how_to_fit(cfg.activations).removesuffix(".") + ", or use --precision fast."
    notes += check_fits("masks", memory, device.device, fix)
    if made is not None:
        check_same_run(plan, made)
    return replace(plan, made=made)


def steps_in(cfg: MasksConfig, dtype: backend.DtypeChoice) -> backend.DtypeChoice:
    """The working dtype of the steps: at least float32 with precision "strict"."""
    return dtype if cfg.precision == "fast" else at_least_f32(dtype, "precision strict")


def at_least_f32(dtype: backend.DtypeChoice, why: str) -> backend.DtypeChoice:
    """float32 in place of 16 bit, for gradients of gates: rounded operands close other neurons."""
    exact = dtype.dtype in (torch.float32, torch.float64)
    return dtype if exact else backend.DtypeChoice(torch.float32, why)
