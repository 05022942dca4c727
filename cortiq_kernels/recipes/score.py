"""Score: negative log-likelihood per split and category, each record its own sequence from position 0.

    NLL         mean over scored tokens of -log q(token); scored are the tokens j + 1 >= max(first_target, 1)
    perplexity  exp(NLL)
    agreement   share of scored rows where the model and the source have the same most likely token (ties: the lowest
    id) KL          mean over scored rows of KL(source || model), over the whole vocabulary

A score counts tokens: weights of records do not enter. Records, not windows, are the unit, so window and batch
change the result by rounding only. Logits are in the working dtype, what follows is float32 (float64 for float64),
sums are float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cortiq_kernels import backend
from cortiq_kernels.data.batches import Batch, score_batches
from cortiq_kernels.data.record import Record
from cortiq_kernels.data.records import Dataset
from cortiq_kernels.model.hf import ModelDir, open_model
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.ops.topk_kl import head_topk_kl_fwd_bwd
from cortiq_kernels.recipes.errors import need, refuse
from cortiq_kernels.recipes.inputs import (
    Progress,
    Ticks,
    check_same_tokens,
    fit_shape,
    geometry_summary,
    load_for,
    silent,
)
from cortiq_kernels.recipes.lock import locked
from cortiq_kernels.recipes.memory import check_fits, forward_memory
from cortiq_kernels.recipes.outputs import check_files, write_file
from cortiq_kernels.recipes.provenance import plain
from cortiq_kernels.recipes.rows import logits_of
from cortiq_kernels.recipes.score_config import ScoreConfig
from cortiq_kernels.recipes.stopping import stop_on_signals
from cortiq_kernels.report.results import size
from cortiq_kernels.step import Evaluator

HOST_SHARE = 0.3  # of the host memory available, for the source's hidden rows in a comparison
_SLABS_COMPARED = 6.0  # slabs of logits that a comparison has alive at a time: log q, log p, p, their sums


@dataclasses.dataclass(frozen=True)
class ScoreRow:
    """One model on one split, whole (`category` None) or one category of it. `count` is scored tokens."""

    model: str
    split: str
    category: str | None
    nll: float
    perplexity: float
    count: int
    records: int
    agreement: float | None
    kl: float | None


@dataclasses.dataclass(frozen=True)
class ScoreReport:
    """Rows by model, split, then whole before categories; `agreement` and `kl` are against the first model.

    `tokens_per_s`: measured speed of each model's forward pass over a batch (padding included, without the head),
    the median over batches. Fewer parameters are not always faster; this says whether they were.
    """

    rows: list[ScoreRow]
    models: dict[str, str]
    tokens_per_s: dict[str, float]
    data_sha256: str
    device: str
    dtype: str
    notes: list[str]

    def row(self, model: str, split: str = "test", category: str | None = None) -> ScoreRow:
        """One row; KeyError if there is none."""
        for r in self.rows:
            if (r.model, r.split, r.category) == (model, split, category):
                return r
        raise KeyError((model, split, category))


class RowScores(NamedTuple):
    """Per scored row of a batch, float64 on the host; `agree` and `kl` None without a source."""

    nll: Tensor
    agree: Tensor | None
    kl: Tensor | None


@dataclasses.dataclass(frozen=True)
class ScorePlan:
    """Opened inputs and decisions of a score."""

    cfg: ScoreConfig
    device: backend.DeviceChoice
    dtype: backend.DtypeChoice
    models: dict[str, ModelDir]
    dataset: Dataset
    pad_id: int
    notes: list[str]

    def describe(self) -> dict[str, Any]:
        """JSON-able summary for logs and dry runs."""
        counts = {s: sum(r.n_targets for r in self.dataset.split(s)) for s in self.cfg.splits}
        return {
            "recipe": "score",
            "models": {name: {"path": str(m.path), **geometry_summary(m.geometry)} for name, m in self.models.items()},
            "data": {"path": str(self.cfg.data), "sha256": self.dataset.data_hash, "scored_tokens": counts},
            "device": backend.describe(self.device.device),
            "device_reason": self.device.reason,
            "dtype": backend.dtype_name(self.dtype.dtype),
            "dtype_reason": self.dtype.reason,
            "memory": self.memory(),
            "notes": self.notes,
        }

    def memory(self) -> dict[str, int]:
        """Estimated bytes by part of the model that needs most, its peak, and what is free (`memory.py`).

        A comparison also holds the source's head, and on the host its hidden rows.
        """
        cfg, dtype, device = self.cfg, self.dtype.dtype, self.device.device
        compared = len(self.models) > 1
        source = next(iter(self.models.values())).geometry
        kept = sum(r.n_targets for s in cfg.splits for r in self.dataset.split(s)) * source.hidden * dtype.itemsize
        more = source.vocab * source.hidden * dtype.itemsize if compared else 0
        host = kept if compared else 0
        found = []
        for split in cfg.splits:
            records = self.dataset.split(split)
            window, batch = fit_shape(records, cfg.window, cfg.batch)
            longest = max(len(r.ids) for r in records)
            one = -(-longest // window) * window  # a record longer than the window has one of its own
            n, t = (one, one) if one > window * batch else (window * batch, window)
            rows = min(n, sum(r.n_targets for r in records))
            slabs = _SLABS_COMPARED if compared else (0.0 if device.type == "cuda" else 1.0)
            on_device = more + (host if device.type == "cpu" else 0)
            found += [
                forward_memory(m.geometry, n, t, rows, dtype, device, slabs=slabs, more=on_device)
                for m in self.models.values()
            ]
        return {**max(found, key=lambda m: m["peak"]), "host_source_rows": host}


def plan_score(cfg: ScoreConfig) -> ScorePlan:
    """Open and check everything; raises ValueError (InputError, ModelError, DataError) before any weight is read."""
    cfg.check()
    check_files("score", cfg)
    device = backend.pick_device(cfg.device)
    dtype = backend.pick_dtype(cfg.dtype, device.device)
    opened = [open_model(p) for p in cfg.models]
    models = dict(zip(_labels([m.path for m in opened]), opened, strict=True))
    for name, m in list(models.items())[1:]:
        check_same_tokens(opened[0], m, next(iter(models)), name)
    if cfg.out is not None and (cfg.out.is_dir() or not cfg.out.absolute().parent.is_dir()):
        raise refuse("score: out", repr(str(cfg.out)), "a file in an existing directory", "Set --out.")
    dataset, pad_id = load_for(opened[0], cfg.data, cfg.loss_on, cfg.splits)
    for split in cfg.splits:
        need(
            any(r.n_targets for r in dataset.split(split)),
            f"score: {split} records",
            f"none with a scored token in {cfg.data} ({dataset.counts[split]} records are {split})",
            "at least one",
            'Choose another split with --splits, or mark records with "split".',
        )
    notes = list(dataset.notes)
    plan = ScorePlan(cfg, device, dtype, models, dataset, pad_id, notes)
    memory = plan.memory()
    kept, room = memory["host_source_rows"], int(HOST_SHARE * memory["host_free"])
    need(
        kept <= room, "score: comparison", f"{size(kept)} of source rows to keep",
        f"at most {size(room)} (30 % of host memory)", "Score fewer records or splits at a time.",
    )  # fmt: skip
    notes += check_fits("score", memory, device.device, "Lower --batch or --window, or cut the longest records.")
    return plan


def run(cfg: ScoreConfig, progress: Progress = silent) -> ScoreReport:
    """Score every model of `cfg` on every split. Events: "plan", "note", "tick" (phase: the model's name), "score".

    Raises as `plan_score`, and InputError when another run holds `cfg.out`. Writes `cfg.out` (JSON) when given. A
    signal raises `Stopped`.
    """
    with stop_on_signals():
        plan = plan_score(cfg)
        with locked("score", cfg.out) if cfg.out is not None else contextlib.nullcontext():
            return _run(plan, progress)


def _run(plan: ScorePlan, progress: Progress) -> ScoreReport:
    """The work, with the result file's lock held."""
    cfg = plan.cfg
    progress({"event": "plan", **plan.describe()})
    for note in plan.notes:
        progress({"event": "note", "text": note})
    device, dtype = plan.device.device, plan.dtype.dtype
    sets = {s: plan.dataset.split(s) for s in cfg.splits}
    batches = {}
    for s, r in sets.items():
        batches[s] = list(score_batches(r, *fit_shape(r, cfg.window, cfg.batch), pad_id=plan.pad_id))
    keep = len(plan.models) > 1
    source: _Source | None = None
    rows: list[ScoreRow] = []
    speed: dict[str, float] = {}
    for name, model in plan.models.items():
        weights = Weights.load(model, dtype=dtype, device=device, train=None)
        ticks = Ticks(progress, name, sum(len(b) for b in batches.values()))
        kept: list[Tensor] = []
        scorer = _Scorer(weights)
        done = 0
        for split, records in sets.items():
            table = _Table(len(records))
            for batch in batches[split]:
                hidden = scorer.hidden_rows(batch)
                if keep and source is None:
                    kept.append(hidden.cpu())
                table.add(batch, score_rows(weights, hidden, batch, source.at(done) if source else None))
                done += 1
                ticks(done)
            found = table.rows(name, split, records)
            rows += found
            for row in found:
                progress({"event": "score", **dataclasses.asdict(row)})
        speed[name] = scorer.tokens_per_s()
        if keep and source is None:
            source = _Source(kept, weights["head"].clone())
        del weights, scorer
        backend.release(device)
    report = ScoreReport(
        rows, {n: str(m.path) for n, m in plan.models.items()}, speed, plan.dataset.data_hash,
        backend.describe(device), backend.dtype_name(dtype), plan.notes,
    )  # fmt: skip
    if cfg.out is not None:
        write_file(cfg.out, json.dumps(plain(dataclasses.asdict(report)), indent=2) + "\n")
    return report


def score_rows(w: Weights, hidden: Tensor, batch: Batch, source: tuple[Tensor, Tensor] | None = None) -> RowScores:
    """Scores of the rows hidden [R, H] that predict `batch`'s scored tokens (same order as `batch.row_index`).

    `source`: (its hidden rows [R, H], its head [V, H]) to compare with.
    """
    true = batch.next_ids[batch.row_index.long()].to(w.device)
    rows = hidden.shape[0]
    if source is None:
        one = torch.ones(rows, dtype=w.acc_dtype, device=w.device)
        found = head_topk_kl_fwd_bwd(hidden, w["head"], true[:, None], one[:, None], one, need_grad=False)
        return RowScores(found.loss.double().cpu(), None, None)
    nll = torch.empty(rows, dtype=torch.float64)
    agree, kl = (torch.empty(rows, dtype=torch.float64) for _ in range(2))
    theirs = logits_of(source[0].to(w.device), source[1])
    for a, b, z in logits_of(hidden, w["head"]):
        log_q = torch.log_softmax(z.to(w.acc_dtype), -1)
        nll[a:b] = -log_q.gather(1, true[a:b, None]).squeeze(1).double().cpu()
        z_source = next(theirs)[2]
        log_p = torch.log_softmax(z_source.to(w.acc_dtype), -1)
        agree[a:b] = (top1(z) == top1(z_source)).double().cpu()
        kl[a:b] = (log_p.exp() * (log_p - log_q)).sum(-1).double().cpu()
    return RowScores(nll, agree, kl)


def top1(logits: Tensor) -> Tensor:
    """Most likely token [n] of logits [n, V]; of equals the lowest id."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    best = logits == logits.amax(-1, keepdim=True)
    return torch.where(best, ids, logits.shape[1]).amin(-1)


class _Source(NamedTuple):
    """The first model's hidden rows of every batch, on the host, and its head."""

    hidden: list[Tensor]
    head: Tensor

    def at(self, i: int) -> tuple[Tensor, Tensor]:
        return self.hidden[i], self.head


class _Scorer:
    """Forward passes over batches of changing shape; buffers are kept while the shape stays."""

    def __init__(self, weights: Weights):
        self.weights = weights
        self.shape = (0, 0)
        self.evaluator: Evaluator | None = None
        self.speeds: list[float] = []  # tokens a second, a batch each
        self.first: list[bool] = []  # whether that batch was the first of its shape, which takes longer

    def hidden_rows(self, batch: Batch) -> Tensor:
        """Hidden states [R, H] of the scored rows."""
        shape = batch.tokens.shape[0], batch.max_seqlen
        fresh = self.evaluator is None or shape != self.shape
        if self.evaluator is None or fresh:
            self.evaluator, self.shape = None, shape  # the old buffers go before the new ones come
            self.evaluator = Evaluator(self.weights, *shape)
        on_device = batch.to(self.weights.device)
        backend.synchronize(self.weights.device)
        began = time.perf_counter()
        hidden = self.evaluator.hidden(on_device)
        backend.synchronize(self.weights.device)
        self.speeds.append(len(batch.tokens) / max(time.perf_counter() - began, 1e-9))
        self.first.append(fresh)
        return hidden.index_select(0, on_device.row_index)

    def tokens_per_s(self) -> float:
        """Median speed so far, of batches that were not the first of their shape where there are any."""
        settled = [s for s, first in zip(self.speeds, self.first, strict=True) if not first]
        return statistics.median(settled or self.speeds)


class _Table:
    """Sums per record of one split, in float64."""

    def __init__(self, n_records: int):
        self.count = torch.zeros(n_records, dtype=torch.int64)
        self.sums = torch.zeros(3, n_records, dtype=torch.float64)  # nll, agree, kl
        self.compared = False

    def add(self, batch: Batch, scores: RowScores) -> None:
        assert batch.row_record is not None
        owner = batch.row_record.long()
        self.count.index_add_(0, owner, torch.ones_like(owner))
        for k, values in enumerate(scores):
            if values is not None:
                self.sums[k].index_add_(0, owner, values)
        self.compared = scores.kl is not None

    def rows(self, model: str, split: str, records: Sequence[Record]) -> list[ScoreRow]:
        """The whole split, then each category in alphabetical order."""
        names = sorted({r.category for r in records if r.category is not None})
        groups: list[tuple[str | None, list[int]]] = [(None, list(range(len(records))))]
        groups += [(c, [i for i, r in enumerate(records) if r.category == c]) for c in names]
        made = [self._row(model, split, category, [i for i in ids if self.count[i] > 0]) for category, ids in groups]
        return [row for row in made if row.count]

    def _row(self, model: str, split: str, category: str | None, ids: list[int]) -> ScoreRow:
        count = int(self.count[ids].sum())
        nll, agree, kl = (self.sums[:, ids].sum(1) / max(count, 1)).tolist()
        perplexity = math.exp(nll) if nll < 700 else math.inf
        return ScoreRow(
            model, split, category, nll, perplexity, count, len(ids),
            agree if self.compared else None, kl if self.compared else None,
        )  # fmt: skip


def _labels(paths: Sequence[Path]) -> list[str]:
    """Short distinct names: the last part of each path, or as many parts as it takes."""
    need(len(set(paths)) == len(paths), "score: models", "the same directory twice", "different ones", "Set --models.")
    depth = 1
    while len({p.parts[-depth:] for p in paths}) < len(paths):
        depth += 1
    return ["/".join(p.parts[-depth:]) for p in paths]
