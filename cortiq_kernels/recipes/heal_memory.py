"""The memory of a heal by part, and its peak: what a dry run shows, and what is refused before any work.

Three phases follow one another, each gone before the next: the teacher, the frozen prefix, training.

    teacher phase    teacher weights, a forward pass, slabs of logits for the top-k
    prefix phase     the whole student in the working dtype, a forward pass
    training         student with optimizer, the step (`step/memory.py`), the micro-batches of a step

On the host, from when they are made to the end: targets (or they stay on disk), the prefix cache, the best weights. On
a CPU host and device are one, and all of it adds up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cortiq_kernels import backend
from cortiq_kernels.model.layout import plan_layout
from cortiq_kernels.model.weights import acc_dtype
from cortiq_kernels.recipes.memory import forward_memory
from cortiq_kernels.step.memory import train_bytes
from cortiq_kernels.step.spare import spare_elements

if TYPE_CHECKING:
    from cortiq_kernels.recipes.heal_plan import HealPlan


def heal_memory(plan: HealPlan) -> dict[str, int]:
    """Bytes by part. `least`, `peak` and `free` are of the device; `host_least` and `host_free` of the host.

    Tests hold the peak against that of whole runs: within 20 % on a CPU, Python, its libraries and what the allocator
    keeps of freed memory left out (that can be as much again as 20 %), and within 10 % on a GPU.
    """
    cfg, g, dtype, device = plan.cfg, plan.student.geometry, plan.dtype.dtype, plan.device.device
    rows = max(plan.rows)
    layout = plan_layout(g, train=cfg.train, train_from=cfg.train_from, first_layer=plan.first_layer)
    student = layout.nbytes(dtype.itemsize)
    micros = min(cfg.accumulate, len(plan.train))
    spare = spare_elements(layout, train=cfg.train, train_from=cfg.train_from) if micros == 1 else 0
    step = train_bytes(
        g, plan.n, cfg.window, rows, dtype, device.type, first=plan.first_layer, train_from=cfg.train_from,
        trained=layout.trained_numel, policy=plan.activations.policy, train=cfg.train,
        sequences=plan.train.capacity, spare=spare,
    )  # fmt: skip
    cached = plan.prefix is not None and plan.prefix.dtype is not None
    stream = plan.n * g.hidden * dtype.itemsize if cached else 0
    micro = stream + 8 * rows * plan.topk + 32 * plan.n
    inputs = micro * (2 * micros + 1 if device.type == "cuda" else micros)  # this step's, the next one's, a graph's own
    training = student + step.buffers + step.saved + inputs
    least, peak = training, training + max(step.workspace, step.head)
    targets = plan.target_bytes if plan.target_bytes <= plan.target_room else 0
    prefix = plan.prefix.nbytes if plan.prefix is not None and plan.prefix.dtype is not None else 0
    best = layout.trained_numel * acc_dtype(dtype).itemsize
    host = targets + prefix + best
    if device.type == "cpu":
        least, peak = least + host, peak + host
    teacher = {"model": 0, "least": 0, "peak": 0}
    if plan.teacher is not None:
        slabs = 2.0 if device.type == "cpu" else 0.0
        teacher = forward_memory(
            plan.teacher.geometry, plan.n, cfg.window, rows, dtype, device, slabs=slabs, more=8 * rows * plan.topk
        )
    frozen = {"least": 0, "peak": 0}
    if cached:
        more = targets + prefix if device.type == "cpu" else 0
        frozen = forward_memory(g, plan.n, cfg.window, 0, dtype, device, more=more)
    return {
        "student_and_optimizer": student,
        "activations": step.buffers,
        "saved_by_ops": step.saved,
        "workspace": step.workspace,
        "logits": step.head,
        "inputs": inputs,
        "teacher": teacher["model"],
        "teacher_phase": teacher["peak"],
        "prefix_phase": frozen["peak"],
        "host_targets": targets,
        "host_prefix": prefix,
        "host_best": best,
        "least": max(least, teacher["least"], frozen["least"]),
        "peak": max(peak, teacher["peak"], frozen["peak"]),
        "free": backend.free_bytes(device),
        "host_least": host,
        "host_free": backend.host_free_bytes(),
    }
