"""Settings of `heal`. No torch here: the command line reads this before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cortiq_kernels.recipes.errors import need, refuse
from cortiq_kernels.recipes.interval import parse_interval
from cortiq_kernels.recipes.settings import check_least, check_values


@dataclass(frozen=True)
class HealConfig:
    """Distil a teacher (the source model) into a student (its fold) on your records, and write the healed directory.

    The loss of a scored token is KL(teacher's top-k distribution || student) over the whole vocabulary. The best
    weights by the held-out loss (val records) are written; test records are never used here.
    """

    student: Path
    """model directory to heal"""
    data: Path
    """records, JSONL or parquet; needs val records (by "split", or by the hash of their rids)"""
    out: Path
    """directory to write; must not exist, or be empty"""
    teacher: Path | None = None
    """model directory to learn from, usually the source of the fold; not needed with ce 1"""
    train: Literal["layers", "mlp", "all"] = "layers"
    """what trains: whole layers, their MLPs only, or everything (also embedding, final norm and head)"""
    train_from: int = 0
    """first layer that trains; the layers below are frozen and run once per batch"""
    epochs: float = 1.0
    """passes over the train batches; a fraction is fine"""
    lr: float = 1e-5
    """peak learning rate"""
    warm: float = 0.1
    """share of the steps that warm up, in (0, 1]"""
    genesis: bool = False
    """train the last layers first, in a window that grows every epoch (no warm-up); not with train all"""
    ce: float = 0.0
    """share of the true next token in the target, clamped to 0..1; 1 is plain next-token training without a teacher"""
    topk: int = 64
    """tokens of the teacher's distribution that are kept"""
    window: int = 2048
    """tokens of a window"""
    batch: int = 4
    """windows of a micro-batch"""
    accumulate: int = 1
    """micro-batches of a step; the mean is over all its scored tokens"""
    packing: Literal["records", "stream"] = "records"
    """whole records in a window, each on its own, or one stream cut every `window` tokens"""
    loss_on: Literal["completion", "all"] = "completion"
    """which tokens are scored"""
    eval_every: int = 25
    """steps between held-out evaluations"""
    clip: float = 1.0
    """limit of the global gradient norm; 0 turns clipping off"""
    weight_decay: float = 0.0
    """decoupled weight decay"""
    dtype: Literal["bf16", "f16", "f32", "f64"] | None = None
    """working precision; default bf16 on a GPU, f32 on a CPU"""
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
    """directory that keeps the teacher's targets for later runs with the same teacher and data; default OUT.targets,
    which lets an interrupted run continue and is removed when the output is written"""
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
        return "heal"

    @property
    def alpha(self) -> float:
        """`ce`, clamped to 0 .. 1."""
        return min(max(self.ce, 0.0), 1.0)

    @property
    def loss_name(self) -> str:
        """What the loss is: NLL (ce 1), KL (ce 0), or mixed."""
        return {0.0: "KL", 1.0: "NLL"}.get(self.alpha, "mixed")

    def check(self) -> None:
        """Refuse settings that no data or model could make right; raises `InputError`."""
        check_values("heal", self)
        check_least("heal", self, {
            "topk": 1, "window": 2, "batch": 1, "accumulate": 1, "eval_every": 1, "train_from": 0, "weight_decay": 0,
        })  # fmt: skip
        need(self.epochs > 0, "heal: epochs", self.epochs, "more than 0", "Set --epochs.")
        need(self.lr > 0, "heal: lr", self.lr, "more than 0", "Set --lr.")
        need(0 < self.warm <= 1, "heal: warm", self.warm, "a fraction in (0, 1]", "Set --warm, for instance 0.1.")
        need(self.ce == self.ce, "heal: ce", self.ce, "a number", "Set --ce between 0 and 1.")
        parse_interval(self.checkpoint_every, "heal: checkpoint_every")
        need(self.clip >= 0, "heal: clip", self.clip, "at least 0 (0 turns clipping off)", "Set --clip.")
        if self.train == "all" and self.train_from != 0:
            raise refuse(
                "heal: train_from", f"{self.train_from} with train 'all'", "0", "Use --train-from 0, or --train layers."
            )
        if self.train == "all" and self.genesis:
            raise refuse(
                "heal: genesis",
                "genesis with train 'all'",
                "train 'layers' or 'mlp'",
                "Its windows and rates are defined for layers: an embedding below a window that grows has neither. "
                "Drop --genesis, or use --train layers.",
            )
        if self.teacher is None and self.alpha < 1.0:
            raise refuse(
                "heal: teacher",
                f"none with ce {self.ce:g}",
                "a model directory",
                "Name it with --teacher, or set --ce 1.",
            )
