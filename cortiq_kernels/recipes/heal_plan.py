"""Everything that `heal` decides before it works: all refusals, and what a dry run shows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from cortiq_kernels import backend
from cortiq_kernels.data.batches import Batches
from cortiq_kernels.data.records import Dataset
from cortiq_kernels.model import names
from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.hf import ModelDir, check_destination, open_model
from cortiq_kernels.model.layout import plan_layout
from cortiq_kernels.model.weights import acc_dtype
from cortiq_kernels.recipes.activations import Activations, choose_activations, how_to_fit
from cortiq_kernels.recipes.errors import need
from cortiq_kernels.recipes.finished import check_same_run, made_output, output_is_done
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.heal_memory import heal_memory
from cortiq_kernels.recipes.inputs import Joined, check_same_tokens, geometry_summary, layer_parameters, packed_for
from cortiq_kernels.recipes.memory import check_fits, check_window
from cortiq_kernels.recipes.outputs import check_files
from cortiq_kernels.recipes.prefix import PrefixPlan, plan_prefix
from cortiq_kernels.recipes.resume import check_room, find_checkpoint, same_prefix, where_checkpoint
from cortiq_kernels.recipes.schedule import total_steps
from cortiq_kernels.recipes.settings import LARGEST
from cortiq_kernels.recipes.target_dir import check_target_directory, held_bytes, target_directory
from cortiq_kernels.recipes.target_file import file_bytes
from cortiq_kernels.recipes.targets import asked_topk
from cortiq_kernels.recipes.taught_plan import HOST_SHARE, TaughtPlan
from cortiq_kernels.report.results import size
from cortiq_kernels.step import Policy


@dataclass(frozen=True)
class HealPlan(TaughtPlan):
    """Opened inputs and decisions. `per_epoch` is steps a pass (the last one may have fewer micro-batches), `steps`
    is T, `rows` the scored rows of each of `batches`, `target_room` the host bytes that targets may take in memory,
    `checkpoint` the state of an earlier run to go on from, `made` the provenance of an output that is there already,
    `activations` what a layer keeps for its backward.
    """

    cfg: HealConfig
    device: backend.DeviceChoice
    dtype: backend.DtypeChoice
    student: ModelDir
    teacher: ModelDir | None
    dataset: Dataset
    train: Batches
    val: Batches
    per_epoch: int
    steps: int
    topk: int
    prefix: PrefixPlan | None
    rows: list[int]
    target_room: int
    notes: list[str]
    checkpoint: dict[str, Any] | None = None
    made: dict[str, Any] | None = None
    activations: Activations = Activations("cheap")

    @property
    def models(self) -> dict[str, ModelDir | None]:
        """The models that it opens, by their settings."""
        return {"student": self.student, "teacher": self.teacher}

    @property
    def state_bytes(self) -> int:
        """Most bytes of a checkpoint's tensors: master, two moments, and the best weights so far."""
        layout = plan_layout(self.student.geometry, train=self.cfg.train, train_from=self.cfg.train_from)
        return 4 * layout.trained_numel * acc_dtype(self.dtype.dtype).itemsize

    @property
    def out_bytes(self) -> int:
        """Most bytes that the output takes."""
        return self.student.total_bytes()

    @property
    def first_layer(self) -> int:
        """First layer that the student holds while it trains."""
        return self.cfg.train_from if self.prefix and self.prefix.dtype else 0

    def describe(self) -> dict[str, Any]:
        """JSON-able summary: geometry, data, steps, device, precision, memory, each choice with its reason."""
        cfg, g = self.cfg, self.student.geometry
        return {
            "recipe": "heal",
            "student": {"path": str(self.student.path), **geometry_summary(g)},
            "teacher": {"path": str(self.teacher.path), **geometry_summary(self.teacher.geometry)}
            if self.teacher
            else None,
            "data": {
                "path": str(cfg.data),
                "sha256": self.dataset.data_hash,
                "records": self.dataset.counts,
                "train_batches": len(self.train),
                "val_batches": len(self.val),
            },
            "loss": self.cfg.loss_name,
            "topk": self.topk,
            "trained_parameters": trained_parameters(g, cfg.train, cfg.train_from),
            "steps": self.steps,
            "steps_per_epoch": self.per_epoch,
            "tokens_per_step": self.n * min(cfg.accumulate, len(self.train)),
            "device": backend.describe(self.device.device),
            "device_reason": self.device.reason,
            "dtype": backend.dtype_name(self.dtype.dtype),
            "dtype_reason": self.dtype.reason,
            "targets": self._where_targets(),
            "prefix": self.prefix.reason if self.prefix else "no frozen layers",
            "activations": self.activations.text,
            "activation_peaks": dict(self.activations.peaks),
            "memory": self.memory(),
            "checkpoint": where_checkpoint(self),
            "out": str(cfg.out),
            "notes": self.notes,
        }

    def _where_targets(self) -> str:
        if self.teacher is None:
            return "the true next tokens: no teacher"
        place = target_directory(self.cfg)
        where = "in memory" if self.target_bytes <= self.target_room else "read from there in every step"
        stay = "kept for later runs" if self.cfg.targets else "removed when the output is written"
        return f"{size(self.target_bytes)} in {place} ({stay}), {where} while it trains"

    def memory(self) -> dict[str, int]:
        """Estimated bytes by part and phase, their peak, and what is free; see `heal_memory`."""
        return heal_memory(self)

    def memory_with(self, policy: Policy) -> dict[str, int]:
        """`memory`, were that the policy of activations."""
        return replace(self, activations=Activations(policy)).memory()


def plan_heal(cfg: HealConfig) -> HealPlan:
    """Open and check everything; raises InputError, ModelError, DataError or ValueError before any weight is read."""
    cfg.check()
    device = backend.pick_device(cfg.device)
    dtype = backend.pick_dtype(cfg.dtype, device.device)
    student = open_model(cfg.student)
    g = student.geometry
    made = made_output(cfg)
    there = made is not None or output_is_done(cfg)
    if not there:
        check_destination(student.path, cfg.out, student.total_bytes(), [cfg.teacher] if cfg.teacher else [])
    check_files("heal", cfg)
    last = g.n_layers - 1
    need(cfg.train_from <= last, "heal: train_from", cfg.train_from, f"0 .. {last} (layers)", "Set --train-from.")
    need(
        g.num_loops == 1 or cfg.train_from == 0, "heal: train_from",
        f"{cfg.train_from} in a stack of {g.num_loops} passes", "0", "Every pass runs all layers: there is no prefix.",
    )  # fmt: skip
    teacher = None
    if cfg.alpha < 1.0:
        assert cfg.teacher is not None
        teacher = open_model(cfg.teacher)
        check_same_tokens(teacher, student, "teacher", "student")
    check_window(
        "heal", g, cfg.batch * cfg.window, dtype.dtype, device.device, first=cfg.train_from, save_from=cfg.train_from,
        activations=cfg.activations, train=cfg.train,
    )  # fmt: skip
    dataset, train, val, notes = packed_for(student, cfg)
    if cfg.teacher is not None and teacher is None:
        notes.append("ce is 1: the teacher is not opened")
    host = int(HOST_SHARE * backend.host_free_bytes())
    topk = asked_topk(cfg.topk, cfg.alpha, g.vocab)
    rows, beside = [b.n_scored for b in Joined(train, val)], 0
    if teacher is not None:
        need(cfg.topk <= g.vocab, "heal: topk", cfg.topk, f"1 .. {g.vocab} (the vocabulary)", "Set --topk.")
        on_disk = file_bytes(rows, topk)
        check_target_directory(cfg, on_disk if made is None else 0)
        if cfg.targets is None:  # they lie beside the output while it is made
            beside = max(0, on_disk - held_bytes(cfg))
    prefix = None
    if cfg.train_from > 0:
        prefix = plan_prefix(len(train) + len(val), cfg.batch * cfg.window, g.hidden, dtype.dtype, host)
    per_epoch = math.ceil(len(train) / cfg.accumulate)
    plan = HealPlan(
        cfg, device, dtype, student, teacher, dataset, train, val, per_epoch, total_steps(cfg.epochs, per_epoch),
        topk, prefix, rows, host, notes,
    )  # fmt: skip
    need(
        plan.steps <= LARGEST, "heal: epochs", f"{cfg.epochs:g} passes of {per_epoch} steps",
        f"at most {LARGEST} steps in all", "Set --epochs.",
    )  # fmt: skip
    plan = replace(plan, activations=choose_activations(cfg.activations, plan.memory_with))
    memory = plan.memory()
    notes += check_fits("heal", memory, device.device, how_to_fit(cfg.activations))
    need(
        memory["host_least"] <= memory["host_free"], "heal: host memory",
        f"best weights, targets and prefix cache of {size(memory['host_least'])}",
        f"at most the {size(memory['host_free'])} that are free", "Train fewer layers: --train-from, or --train mlp.",
    )  # fmt: skip
    if made is not None:
        check_same_run(plan, made)
        return replace(plan, made=made)
    if not there:
        check_room(plan, beside)
    state = find_checkpoint(plan)
    return plan if state is None else replace(plan, checkpoint=state, prefix=same_prefix(prefix, state, dtype.dtype))


def trained_parameters(g: Geometry, train: str, train_from: int) -> int:
    """Parameters that train: "all", whole "layers" from `train_from` on, or their "mlp"."""
    if train == "all":
        return names.parameter_count(g)
    layers = range(train_from, g.n_layers)
    if train == "mlp":
        return sum(3 * g.intermediate[i] * g.hidden for i in layers)
    return sum(layer_parameters(g, i) for i in layers)
