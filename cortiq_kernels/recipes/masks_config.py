"""Settings of `masks`. No torch here: the command line reads this before anything heavy is imported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from cortiq_kernels.recipes.errors import need, refuse
from cortiq_kernels.recipes.interval import parse_interval
from cortiq_kernels.recipes.schedule import decimal
from cortiq_kernels.recipes.settings import check_least, check_values

MOST_PRUNED = Fraction(95, 100)


@dataclass(frozen=True)
class MasksConfig:
    """Learn which MLP neurons your records need: a sigmoid gate per neuron under growing L1 pressure, weights frozen.

    Gates of at most `tau` count as closed. The mask with the lowest held-out loss among those that close enough is
    written; `cortiq fold` makes a smaller model of it.
    """

    model: Path
    """model directory whose neurons are judged; it is not changed"""
    data: Path
    """records, JSONL or parquet; needs val records (by "split", or by the hash of their rids)"""
    out: Path
    """mask file to write (safetensors); must not exist"""
    teacher: Path | None = None
    """model directory to learn from with loss kl; default the model itself, every neuron open"""
    keep_frac: float = 0.75
    """share of the neurons to keep, in (0, 1]; at most 95 % are closed"""
    loss: Literal["nll", "kl"] = "nll"
    """nll of the true next token, or kl to a teacher's top-k distribution"""
    topk: int = 64
    """tokens of the teacher's distribution that are kept (loss kl)"""
    backward: Literal["full", "ffn"] = "full"
    """gradient of the whole model, or along the residual stream and through the MLPs only (faster, less memory)"""
    precision: Literal["strict", "fast"] = "strict"
    """operands of the steps: float32, or `dtype`; evaluations are in `dtype`"""
    lr: float = 0.1
    """rate of Adam on the logits of the gates, the same in every step"""
    eps: float = 1e-8
    """Adam's epsilon; a pressure of l1 over the number of all gates that is not well above it moves a gate slowly"""
    l1_init: float = 0.01
    """L1 pressure on the mean gate, at first"""
    l1_step: float = 0.005
    """what an evaluation below the target adds to the pressure, after growing it"""
    l1_grow: float = 1.5
    """factor by which an evaluation below the target grows the pressure; 1 is linear growth"""
    mask_init: float = 2.0
    """logit that every gate starts with"""
    tau: float = 0.5
    """a gate above it is open, in (0, 1)"""
    eval_every: int = 25
    """steps between evaluations"""
    settle: int = 2
    """evaluations after the target was first reached, before it ends"""
    max_steps: int = 1000
    """most steps"""
    window: int = 2048
    """tokens of a window"""
    batch: int = 4
    """windows of a step"""
    packing: Literal["records", "stream"] = "records"
    """whole records in a window, each on its own, or one stream cut every `window` tokens"""
    loss_on: Literal["completion", "all"] = "completion"
    """which tokens are scored"""
    dtype: Literal["bf16", "f16", "f32", "f64"] | None = None
    """working precision of evaluations, of the teacher, and of steps with precision fast; default bf16 on a GPU, f32 on
    a CPU"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    activations: Literal["auto", "keep", "cheap", "layer"] = "auto"
    """what a layer keeps for its backward: all (fastest), not what is cheap to make again, or its input alone and its
    forward is run again (least memory); auto is the fastest that fits. Results are the same"""
    deterministic: bool = False
    """the same bits in every run on the same machine (slower on a GPU)"""
    seed: int = 0
    """changes the order of the batches"""
    targets: Path | None = None
    """directory that keeps the teacher's targets for later runs; default OUT.targets, which is removed at the end"""
    resume: bool = False
    """go on from the checkpoint in OUT.resume, if there is one; without one the run starts from the beginning"""
    checkpoint_every: str = "10m"
    """steps ("500") or time ("90s", "10m", "2h") between checkpoints in OUT.resume, or "off"; a run that is stopped
    writes one too"""
    log: Path | None = None
    """run log (JSONL); default beside OUT"""

    @property
    def recipe(self) -> str:
        """Its name in messages."""
        return "masks"

    @property
    def alpha(self) -> float:
        """Share of the true next token in the target: 1 with nll, 0 with kl."""
        return 1.0 if self.loss == "nll" else 0.0

    @property
    def loss_name(self) -> str:
        """What the loss is called: NLL or KL."""
        return self.loss.upper()

    @property
    def target(self) -> Fraction:
        """Share of the neurons to close: clamp(1 - keep_frac, 0, 0.95), keep_frac taken as the decimal it is written
        as.
        """
        return min(max(1 - decimal(self.keep_frac), Fraction(0)), MOST_PRUNED)

    def check(self) -> None:
        """Refuse settings that no data or model could make right; raises `InputError`."""
        check_values("masks", self)
        check_least("masks", self, {
            "topk": 1, "eval_every": 1, "settle": 0, "max_steps": 1, "window": 2, "batch": 1, "l1_init": 0,
            "l1_step": 0, "l1_grow": 1,
        })  # fmt: skip
        for name in ("lr", "eps"):
            need(getattr(self, name) > 0, f"masks: {name}", getattr(self, name), "more than 0", f"Set --{name}.")
        need(
            0 < self.keep_frac <= 1, "masks: keep_frac", self.keep_frac, "a fraction in (0, 1]",
            "Set --keep-frac, for instance 0.75.",
        )  # fmt: skip
        need(0 < self.tau < 1, "masks: tau", self.tau, "a fraction in (0, 1)", "Set --tau, for instance 0.5.")
        most = math.log(self.tau) - math.log1p(-self.tau)
        need(
            self.mask_init > most, "masks: mask_init", self.mask_init,
            f"more than {most:.4g}, where a gate is at tau {self.tau:g}", "Every gate starts open: set --mask-init.",
        )  # fmt: skip
        need(
            self.mask_init <= 16, "masks: mask_init", self.mask_init, "at most 16",
            "Beyond it a float32 gate is 1 and has no gradient: set --mask-init.",
        )  # fmt: skip
        need(
            self.l1_init > 0 or self.l1_step > 0, "masks: l1_init", "0 with l1_step 0", "some pressure",
            "Set --l1-init or --l1-step.",
        )  # fmt: skip
        parse_interval(self.checkpoint_every, "masks: checkpoint_every")
        if self.teacher is not None and self.loss == "nll":
            raise refuse(
                "masks: teacher", f"{str(self.teacher)!r} with loss nll", "none", "Leave it out, or set --loss kl."
            )
