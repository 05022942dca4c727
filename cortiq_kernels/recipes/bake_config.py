"""Settings of `bake`. No torch here: the command line reads this before anything heavy is imported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from cortiq_kernels.recipes.errors import need
from cortiq_kernels.recipes.interval import parse_interval
from cortiq_kernels.recipes.schedule import decimal
from cortiq_kernels.recipes.settings import check_least, check_values

FEWEST_CHUNKS = 12  # to calibrate on
START = 1 / (1 + math.exp(-2.0))  # of every gate


@dataclass(frozen=True)
class BakeConfig:
    """Bake a skill: learn which MLP neurons a text needs, close the others, then tune the last MLPs under that mask.

    Writes the narrowed model directory OUT and the masks OUT.masks.safetensors. Both phases minimise the plain
    next-token loss of the train records; the first chunks are held out, and choose what is kept.
    """

    model: Path
    """model directory to bake (the backbone); it is not changed"""
    data: Path
    """records, JSONL or parquet; the train split is used, all its tokens"""
    out: Path
    """directory to write; must not exist, or be empty"""
    category: str | None = None
    """use the records of this category alone"""
    steps_a: int = 240
    """steps of phase A, on the gates of all MLPs"""
    steps_b: int = 120
    """steps of phase B, on the MLPs of the last layers; 0 skips it"""
    l1_init: float = 0.01
    """L1 pressure on the mean gate, at first"""
    l1_step: float = 0.005
    """what each evaluation of phase A adds to the pressure"""
    l1_mult: float = 1.0
    """factor on both"""
    eval_every: int = 30
    """steps between evaluations"""
    lr_a: float = 0.1
    """rate of Adam on the logits of the gates"""
    lr_b: float = 1e-5
    """rate of Adam on the weights at first; it falls to 0 along a cosine"""
    tau: float = 0.5
    """a gate above it is open, in (0, 0.88): every gate starts open"""
    fcd_layers: int = 4
    """how many of the last layers phase B trains (at most all); 0 skips it"""
    target_sparsity: float = 0.0
    """share of the neurons to close at least, in [0, 1); 0: as many as make the held-out loss lowest, perhaps none"""
    align: int = 32
    """a layer keeps a multiple of it, the best of the closed neurons filling up"""
    uniform: bool = False
    """every layer keeps as many neurons as the one that needs most; any runtime loads such a directory"""
    chunk: int = 256
    """tokens of a chunk; a step is one chunk"""
    held: int = 12
    """first chunks, which are held out"""
    calib: int = 112
    """most chunks to calibrate on, those that follow; at least 12"""
    overlay: bool = False
    """also write OUT.overlay.safetensors: what changed, at the backbone's full width"""
    dtype: Literal["bf16", "f16", "f32", "f64"] | None = None
    """working precision of evaluations and of phase B; default bf16 on a GPU, f32 on a CPU. Phase A is at least f32"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    deterministic: bool = False
    """the same bits in every run on the same machine (slower on a GPU)"""
    resume: bool = False
    """go on from the checkpoint in OUT.resume, if there is one; without one the run starts from the beginning"""
    checkpoint_every: str = "10m"
    """steps ("500") or time ("90s", "10m", "2h") between checkpoints in OUT.resume, or "off"; a run that is stopped
    writes one too"""
    log: Path | None = None
    """run log (JSONL); default OUT.log.jsonl"""

    @property
    def recipe(self) -> str:
        """Its name in messages."""
        return "bake"

    @property
    def target(self) -> Fraction:
        """`target_sparsity`, taken as the decimal that it is written as."""
        return decimal(self.target_sparsity)

    def check(self) -> None:
        """Refuse settings that no data or model could make right; raises `InputError`."""
        check_values("bake", self)
        check_least("bake", self, {
            "steps_a": 1, "steps_b": 0, "eval_every": 1, "fcd_layers": 0, "align": 1, "chunk": 2, "held": 1,
            "calib": FEWEST_CHUNKS, "l1_init": 0, "l1_step": 0, "l1_mult": 0,
        })  # fmt: skip
        for name in ("lr_a", "lr_b"):
            value = getattr(self, name)
            need(value > 0, f"bake: {name}", value, "more than 0", f"Set --{name.replace('_', '-')}.")
        need(
            0 < self.tau < START, "bake: tau", self.tau, f"a fraction in (0, {START:.4f}), where every gate starts",
            "Set --tau, for instance 0.5.",
        )  # fmt: skip
        need(
            0 <= self.target_sparsity < 1, "bake: target_sparsity", self.target_sparsity, "a fraction in [0, 1)",
            "Set --target-sparsity, for instance 0.25.",
        )  # fmt: skip
        need(
            (self.l1_init > 0 or self.l1_step > 0) and self.l1_mult > 0, "bake: l1_init", "no pressure (l1_init and "
            "l1_step, times l1_mult, are 0)", "some", "Set --l1-init, --l1-step or --l1-mult.",
        )  # fmt: skip
        parse_interval(self.checkpoint_every, "bake: checkpoint_every")
