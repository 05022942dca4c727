"""What a run reports: one table row a measurement, and JSON in which every figure has its environment beside it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from bench.floor import Floor
from bench.registry import Work
from bench.timing import Timing

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


def environment(device: torch.device) -> dict[str, object]:
    """What a figure depends on besides the code it names: device, driver, versions, commit, date."""
    commit = _run("git", "rev-parse", "HEAD")
    driver = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if device.type == "cuda" else ""
    return {
        "device": device_name(device),
        "driver": driver.split("\n")[0],
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cortiq_kernels": _version("cortiq_kernels"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "commit": commit + ("+changes" if commit and _run("git", "status", "--porcelain") else ""),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor architecture and number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}, {os.cpu_count()} cores"


def results_path(device: torch.device, name: str) -> Path:
    """Where results of this device belong: bench/results/h200/ops.json for an NVIDIA H200."""
    folder = "cpu" if device.type == "cpu" else device_name(device).lower().removeprefix("nvidia ").replace(" ", "-")
    return RESULTS / folder / name


def write_json(path: Path, device: torch.device, content: Mapping[str, object], rows: Sequence[Row] = ()) -> None:
    """Write beside and rename; the environment comes first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"environment": environment(device), **content}
    if rows:
        body["rows"] = [{k: v for k, v in asdict(r).items() if v not in (None, "")} for r in rows]
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(body, indent=1) + "\n")
    partial.replace(path)


def pick_device(asked: str) -> torch.device:
    """`auto` is the first GPU if there is one; asking for a GPU where there is none is an error."""
    found = torch.cuda.is_available()
    if asked == "auto":
        asked = "cuda" if found else "cpu"
    device = torch.device(asked)
    if device.type not in ("cuda", "cpu"):
        raise SystemExit(f"--device: got {asked}; expected cuda, cuda:N, cpu or auto")
    if device.type == "cuda" and not found:
        raise SystemExit(f"--device: got {asked}; torch {torch.__version__} sees no CUDA device; use --device cpu")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _run(*command: str) -> str:
    """Output of a command, or nothing when it is not there or fails."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
