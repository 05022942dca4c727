"""Capture: the Gram of every MLP's gated activation over the train records, in one file.

    G_i = sum over real tokens of a aᵀ,   a = silu(gate_i x) * (up_i x), the input of layer i's down projection

G_i / rows is E[a aᵀ]: its diagonal ranks neurons, and the whole of it says how the ones that stay can stand in for
those that go (`fold --grams`). Padding never enters. In a looped stack the visits of a layer add up, for they share its
down projection; rows stay those of one visit. How the sum is formed, in passes: capture_pass.py; the file:
gram_file.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from typing import Any

from cortiq_kernels import backend
from cortiq_kernels.data.batches import Batches, eval_batches
from cortiq_kernels.data.records import Dataset
from cortiq_kernels.data.windows import pack
from cortiq_kernels.model.hf import ModelDir, check_destination, open_model
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.ops.gram import gram_diagonal
from cortiq_kernels.reading import kind_of
from cortiq_kernels.recipes.capture_config import CaptureConfig
from cortiq_kernels.recipes.capture_pass import capture, gram_bytes, layers_run, plan_passes
from cortiq_kernels.recipes.errors import need, refuse
from cortiq_kernels.recipes.fingerprint import fingerprint
from cortiq_kernels.recipes.gram_file import GramWriter
from cortiq_kernels.recipes.inputs import Progress, fit_shape, geometry_summary, load_for, silent
from cortiq_kernels.recipes.lock import check_unlocked, locked
from cortiq_kernels.recipes.memory import check_fits, forward_memory
from cortiq_kernels.recipes.outputs import check_files
from cortiq_kernels.recipes.provenance import provenance
from cortiq_kernels.recipes.stopping import check, stop_on_signals
from cortiq_kernels.report.results import size

HOST_SHARE = 0.3  # of the host memory available, for the residual stream between two passes
ROOM_SHARE = 0.9  # of what the forward pass leaves of the device, for the Grams of a pass


@dataclasses.dataclass(frozen=True)
class CaptureReport:
    """What a capture did. `energy[k]`: mean square of an activation of layer `layers[k]`; `dead[k]`: neurons that were
    never active. `tokens_per_s`: real tokens through all passes, in the time of the passes.
    """

    out: str
    layers: list[int]
    rows: int
    passes: int
    nbytes: int
    energy: list[float]
    dead: list[int]
    tokens_per_s: float
    seconds: float
    device: str
    dtype: str
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class CapturePlan:
    """Opened inputs and decisions of a capture."""

    cfg: CaptureConfig
    device: backend.DeviceChoice
    dtype: backend.DtypeChoice
    model: ModelDir
    dataset: Dataset
    batches: Batches
    layers: list[int]
    notes: list[str]

    @property
    def n_batches(self) -> int:
        """Batches that are measured."""
        return min(len(self.batches), self.cfg.max_batches or len(self.batches))

    @property
    def widths(self) -> dict[int, int]:
        """Neurons of each layer that is measured."""
        return {i: self.model.geometry.intermediate[i] for i in self.layers}

    @property
    def nbytes(self) -> int:
        """Bytes of all Grams: of the file, but for its header."""
        return sum(gram_bytes(f) for f in self.widths.values())

    def room(self, memory: dict[str, int]) -> int:
        """Bytes for the Grams of a pass."""
        room = int(ROOM_SHARE * max(0, memory["free"] - memory["peak_without_grams"]))
        return room if self.cfg.room_mb is None else min(room, self.cfg.room_mb << 20)

    def passes(self, memory: dict[str, int]) -> list[tuple[int, ...]]:
        """Layers of each pass."""
        return plan_passes(self.widths, self.room(memory))

    def memory(self) -> dict[str, int]:
        """Estimated bytes by part, their peak, and what is free (`memory.py`); `residual` is kept on the host between
        passes, 0 where there is one pass, or no room for it.
        """
        g, n, dtype, device = self.model.geometry, self.n_tokens, self.dtype.dtype, self.device.device
        inside = 8 if device.type == "cpu" else 4
        work = max(self.widths.values()) * (min(n, 4096) * (dtype.itemsize + inside) + 512 * inside)
        m = forward_memory(g, n, self.batches.window, 0, dtype, device, work=work)
        stream = self.n_batches * n * g.hidden * dtype.itemsize
        if g.num_loops > 1 or stream > HOST_SHARE * m["host_free"]:
            stream = 0
        before = {**m, "peak_without_grams": m["peak"]}
        if len(self.passes(before)) == 1:
            stream = 0
        if device.type == "cpu":  # the stream lies in the same memory
            before["peak_without_grams"] += stream
        grams = max(sum(gram_bytes(self.widths[i]) for i in p) for p in self.passes(before))
        more = grams + before["peak_without_grams"] - m["peak"]
        least, peak = m["least"] + more, m["peak"] + more
        return {**before, "grams": grams, "residual": stream, "least": least, "peak": peak}

    @property
    def n_tokens(self) -> int:
        """Tokens of a batch, padding included."""
        return self.batches.batch * self.batches.window

    def describe(self) -> dict[str, Any]:
        """JSON-able summary for logs and dry runs."""
        memory = self.memory()
        passes = self.passes(memory)
        return {
            "recipe": "capture",
            "model": {"path": str(self.model.path), **geometry_summary(self.model.geometry)},
            "data": {
                "path": str(self.cfg.data),
                "sha256": self.dataset.data_hash,
                "records": self.dataset.counts,
                "batches": self.n_batches,
            },
            "layers": self.layers,
            "passes": f"{len(passes)}, of {', '.join(str(len(p)) for p in passes)} layers",
            "file": f"{size(self.nbytes)} in {self.cfg.out}",
            "device": backend.describe(self.device.device),
            "device_reason": self.device.reason,
            "dtype": backend.dtype_name(self.dtype.dtype),
            "dtype_reason": self.dtype.reason,
            "memory": {k: v for k, v in memory.items() if k != "peak_without_grams"},
            "out": str(self.cfg.out),
            "notes": self.notes,
        }


def plan_capture(cfg: CaptureConfig) -> CapturePlan:
    """Open and check everything; raises ValueError (InputError, ModelError, DataError) before any weight is read."""
    cfg.check()
    device = backend.pick_device(cfg.device)
    dtype = backend.pick_dtype(cfg.dtype, device.device)
    model = open_model(cfg.model)
    n_layers = model.geometry.n_layers
    layers = sorted(set(cfg.layers)) or list(range(n_layers))
    fix = f"Choose from 0 .. {n_layers - 1}."
    need(layers[-1] < n_layers, "capture: layers", layers[-1], f"layers of a model that has {n_layers}", fix)
    check_files("capture", cfg)
    dataset, pad_id = load_for(model, cfg.data, "all", ("train",))
    window, batch = fit_shape(dataset.split("train"), cfg.window, cfg.batch)
    packed = pack(dataset.split("train"), window, "records", pad_id)
    batches = eval_batches(packed.windows, batch, pad_id=pad_id, split="train")
    notes = list(dataset.notes)
    plan = CapturePlan(cfg, device, dtype, model, dataset, batches, layers, notes)
    check_place(plan)
    memory = plan.memory()
    n = len(plan.passes(memory))
    if n > 1 and not memory["residual"]:
        why = "the residual stream does not fit on the host"
        why = "a looped stack" if model.geometry.num_loops > 1 else why
        notes.append(f"{why}: each of {n} passes starts at the first layer")
    notes += check_fits("capture", memory, device.device, "Lower --batch or --window, or --room-mb.")
    return plan


def check_place(plan: CapturePlan) -> None:
    """Refuse an output that is there, or has no room; creates nothing."""
    out = plan.cfg.out
    kind = kind_of(out)
    if kind is None or not kind.startswith("no such file"):
        got = f"{kind or 'a file'} at {str(out)!r}"
        raise refuse("capture: out", got, "a new file", "Choose another --out, or delete it first.")
    check_destination(plan.model.path, out, plan.nbytes)


def run(cfg: CaptureConfig, progress: Progress = silent) -> CaptureReport:
    """Capture and write `cfg.out`. Events: "plan", "note", "tick" (phase "capture", with tokens_per_s and left_s),
    "layer" (layer, energy, dead), "write".

    Raises as `plan_capture`, and InputError naming a layer whose neurons were never active or not finite, or for an
    output that another run holds; nothing is written then. A signal raises `Stopped`.
    """
    with stop_on_signals():
        cfg.check()
        check_unlocked("capture", cfg.out)
        plan = plan_capture(cfg)
        with locked("capture", cfg.out):
            check_place(plan)  # another run may have written it since the plan was made
            return _run(plan, progress)


def _run(plan: CapturePlan, progress: Progress) -> CaptureReport:
    """The work, with the output's lock held."""
    began, cfg = time.perf_counter(), plan.cfg
    progress({"event": "plan", **plan.describe()})
    for note in plan.notes:
        progress({"event": "note", "text": note})
    device, memory = plan.device.device, plan.memory()
    passes, resumed = plan.passes(memory), bool(memory["residual"])
    said = provenance(
        "capture", cfg, model=plan.model, data_hash=plan.dataset.data_hash, device=backend.describe(device),
        dtype=backend.dtype_name(plan.dtype.dtype),
    )  # fmt: skip
    weights = Weights.load(plan.model, dtype=plan.dtype.dtype, device=device, train=None)
    batches = [plan.batches[i] for i in range(plan.n_batches)]
    rows = sum(sum(b.n_tokens) for b in batches)
    metadata = {
        "rows": str(rows), "model": fingerprint(plan.model), "data_sha256": plan.dataset.data_hash,
        "provenance": json.dumps(said),
    }  # fmt: skip
    g = plan.model.geometry
    more = g.n_virtual - g.n_layers
    ticks = _Ticks(progress, sum(layers_run(passes, resumed, more)), len(batches), len(passes), rows)
    energy: list[float] = []
    dead: list[int] = []
    room = plan.room(memory) if len(passes) > 1 else None
    with GramWriter(cfg.out, plan.widths, metadata) as file:
        found = capture(
            weights, batches, plan.layers, window=plan.batches.window, room=room, keep_stream=resumed, done=ticks
        )
        for layer, gram in found:
            file.put(layer, gram)
            square = gram_diagonal(gram, plan.widths[layer])
            energy.append(float(square.double().mean()) / rows)
            dead.append(int((square == 0).sum()))
            progress({"event": "layer", "layer": layer, "energy": energy[-1], "dead": dead[-1]})
            check()
        progress({"event": "write", "out": str(cfg.out)})
    return CaptureReport(
        os.path.realpath(cfg.out), plan.layers, rows, len(passes), plan.nbytes, energy, dead, ticks.tokens_per_s,
        time.perf_counter() - began, backend.describe(device), backend.dtype_name(plan.dtype.dtype), plan.notes,
    )  # fmt: skip


class _Ticks:
    """Progress over all passes. Work is counted in layers times batches: passes run different numbers of layers."""

    def __init__(self, progress: Progress, layers: int, batches: int, passes: int, rows: int):
        self.progress, self.layers, self.batches, self.passes, self.rows = progress, layers, batches, passes, rows
        self.began, self.done, self.ticks, self.tokens_per_s = time.perf_counter(), 0, 0, 0.0

    def __call__(self, batch: int, layers: int) -> None:
        self.done += layers
        self.ticks += 1
        share = self.done / (self.layers * self.batches)
        spent = max(time.perf_counter() - self.began, 1e-9)
        self.tokens_per_s = self.rows * share / spent
        self.progress({
            "event": "tick", "phase": "capture", "done": self.ticks, "of": self.batches * self.passes,
            "tokens_per_s": self.tokens_per_s, "left_s": spent * (1 - share) / share,
        })  # fmt: skip
        check()
