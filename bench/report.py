"""What a run reports: one table row a measurement, and JSON in which every figure has its environment beside it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from bench.floor import Floor
from bench.registry import Work
from bench.timing import Timing
from cortiq_kernels import backend

RESULTS = Path(__file__).parent / "results"
OURS = "cortiq_kernels"


@dataclass(frozen=True)
class Row:
    """One figure: who did what at which size, how long it took, and its share of the floor measured in the same run."""

    op: str
    part: str
    who: str
    shape: str
    sizes: dict[str, int]
    dtype: str
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    repeats: int = 0
    method: str = ""
    flops: float = 0.0
    nbytes: float = 0.0
    floor_ms: float | None = None
    floor_percent: float | None = None
    peak_mib: float | None = None
    rate: str = ""
    failed: str = ""


def timed(row: Row, timing: Timing, work: Work | None, floor: Floor, peak: int | None) -> Row:
    """`row` with its measurement."""
    row = replace(
        row,
        median_ms=timing.median,
        p20_ms=timing.p20,
        p80_ms=timing.p80,
        repeats=timing.repeats,
        method=timing.method,
        peak_mib=None if peak is None else peak / 2**20,
    )
    if work is None:
        return row
    best = floor.ms(work)
    return replace(
        row,
        flops=work.flops,
        nbytes=work.nbytes,
        floor_ms=best,
        floor_percent=100 * best / timing.median,
        rate=floor.rate(work, timing.median),
    )


HEADER = f"  {'part':<12}{'who':<30}{'median ms':>11}{'p20':>10}{'p80':>10}  {'rate':<15}{'of floor':>9}{'MiB':>9}  by"


def line(row: Row) -> str:
    """A table row."""
    start = f"  {row.part:<12}{row.who:<30}"
    if row.failed:
        return f"{start}{'failed':>11}  {row.failed}"
    share = "" if row.floor_percent is None else f"{row.floor_percent:.1f} %"
    peak = "" if row.peak_mib is None else f"{row.peak_mib:.0f}"
    times = f"{row.median_ms:>11.4f}{row.p20_ms:>10.4f}{row.p80_ms:>10.4f}"
    return f"{start}{times}  {row.rate:<15}{share:>9}{peak:>9}  {row.method}"


def environment(device: torch.device, commit: str = "") -> dict[str, object]:
    """What a figure depends on: device, driver, versions, commit (asked of git unless given), date."""
    if not commit:
        commit = _git("rev-parse", "HEAD") or "unknown"
        commit += "+changes" if _git("status", "--porcelain", "--untracked-files=no") else ""
    return {
        "device": device_name(device),
        "driver": backend.driver_version() if device.type == "cuda" else None,
        "versions": backend.versions(),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def headline(device: torch.device, commit: str = "") -> str:
    """The environment in one line."""
    where, versions = environment(device, commit), backend.versions()
    return (
        f"{where['device']}, torch {versions['torch']}, triton {versions['triton'] or 'none'}, commit {where['commit']}"
    )


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor architecture and number of cores."""
    if device.type == "cuda":
        return backend.gpus()[device.index or 0].name
    return f"CPU {platform.machine()}, {os.cpu_count()} cores"


def results_path(device: torch.device, name: str) -> Path:
    """Where results of this device belong: bench/results/h200/ops.json for an NVIDIA H200."""
    folder = "cpu" if device.type == "cpu" else device_name(device).lower().removeprefix("nvidia ").replace(" ", "-")
    return RESULTS / folder / name


def write_json(
    path: Path, device: torch.device, commit: str, content: Mapping[str, object], rows: Sequence[Row] = ()
) -> None:
    """Write beside and rename; the environment comes first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"environment": environment(device, commit), **content}
    if rows:
        body["rows"] = [{k: v for k, v in asdict(r).items() if v not in (None, "")} for r in rows]
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(body, indent=1) + "\n")
    partial.replace(path)


def pick_device(asked: str) -> torch.device:
    """The package's own choice of device; asking for what is not there ends the run with its one line."""
    try:
        device = backend.pick_device(asked).device
    except ValueError as e:
        raise SystemExit(str(e)) from None
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events and graphs are those of the current device
    return device


def _git(*command: str) -> str:
    """Output of a git command, or nothing outside a checkout."""
    try:
        done = subprocess.run(["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
