"""Where a step's time goes: `python -m bench.profile --size 0.8B [--packing records] [--json [F]]`, or `make profile`.

The step of `bench.step`, run as plain launches (each op's kernels are the same as in a replayed graph), with every call
of an op named for torch.profiler. A kernel belongs to the op inside whose span on the device it ran; what is outside of
all of them is "other". Nothing runs beside anything else here, so that the shares add up: weight gradients that a step
runs beside its scans wait for their turn, and the sum is more than a step takes. On a CPU the times are those of the
calls. `--json` writes the figures, and beside them a page with the table and a chart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from bench import step
from bench.report import headline, results_path, write_json
from bench.setting import begin
from cortiq_kernels import backend
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.report.chart import bar_chart
from cortiq_kernels.report.style import STYLE
from cortiq_kernels.step import Trainer
from cortiq_kernels.step import backward as backward_module
from cortiq_kernels.step import forward as forward_module
from cortiq_kernels.step import gates as gates_module
from cortiq_kernels.step import loss as loss_module
from cortiq_kernels.step import update as update_module

MARK = "op: "
#: what the step calls, by the beginning of its name -> the family that it counts for
FAMILIES = {
    "linear_": "GEMM",
    "gdn_mixer_": "GDN",
    "attention_mixer_": "attention",
    "swiglu_": "SwiGLU",
    "add_rms_norm_": "norms",
    "head_topk_kl_": "head",
    "embedding_": "embedding",
    "adam_step_": "Adam",
}
ORDER = ("GEMM", "GDN", "attention", "SwiGLU", "norms", "head", "embedding", "Adam", "other")


class Span(NamedTuple):
    """Microseconds of one piece of work."""

    start: float
    end: float
    name: str


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    args = step.parse(argv, "bench.profile", __doc__ or "")
    device, dtype, g, n = begin(args, args.packing)
    weights = Weights.random(g, dtype=dtype, device=device, train="layers", generate_on=device)
    micro = step.micro_of(args, g, device)
    trainer = Trainer(weights, n, args.window, graph=False)
    trainer.buffers.lane = backend.SideLane(torch.device("cpu"))  # runs at once, on the stream of the rest
    for _ in range(2):
        trainer.step([micro], args.rate)
    shares = measure_shares(lambda: trainer.step([micro], args.rate), device, args.steps)
    total = sum(shares.values())
    print(f"{total:.2f} ms of kernels a step")
    for name, ms in shares.items():
        print(f"  {name:<12}{ms:>10.3f} ms{100 * ms / total:>7.1f} %")
    if args.json is not None:
        kind = "" if args.packing == "stream" else f"-{args.packing}"
        path = Path(args.json) if args.json else results_path(device, f"profile-{args.size}{kind}.json")
        shape = {"size": args.size, "batch": args.batch, "window": args.window, "packing": args.packing}
        shape["dtype"] = backend.dtype_name(dtype)
        write_json(path, device, args.commit, {"profile": {**shape, "kernel_ms": total, "ms": shares}})
        title = f"A step of {args.size}, {n} tokens, {args.packing}: kernels by op"
        path.with_suffix(".html").write_text(page(title, headline(device, args.commit), shares), encoding="utf-8")
        print(f"wrote {path} and {path.with_suffix('.html')}")
    return 0


def measure_shares(call: Any, device: torch.device, calls: int) -> dict[str, float]:
    """Milliseconds of one `call` by family, in `ORDER`: the mean over `calls`."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with named_ops(), torch_profile(activities=kinds) as prof:
        for _ in range(calls):
            with record_function(MARK + "other"):
                call()
        backend.synchronize(device)
    on = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    events = [e for e in prof.events() or [] if e.device_type == on]
    spans = [Span(e.time_range.start, e.time_range.end, e.name) for e in events]
    marks = [s._replace(name=s.name.removeprefix(MARK)) for s in spans if s.name.startswith(MARK)]
    work = [s for s in spans if not s.name.startswith(MARK)] if device.type == "cuda" else None
    found = shares_of(marks, work)
    return {name: found[name] / calls / 1e3 for name in ORDER if name in found}


def shares_of(marks: Sequence[Span], work: Sequence[Span] | None) -> dict[str, float]:
    """Microseconds by name: of the pieces of `work` that begin inside a mark, else of "other". Without `work`, of the
    marks themselves, where those called "other" hold the rest."""
    found: dict[str, float] = {}
    inner = sorted(m for m in marks if m.name != "other")
    if work is None:
        for m in marks:
            found[m.name] = found.get(m.name, 0.0) + m.end - m.start
        found["other"] = found.get("other", 0.0) - sum(m.end - m.start for m in inner)
        return found
    at = 0
    for w in sorted(work):
        while at < len(inner) and inner[at].end <= w.start:
            at += 1
        name = inner[at].name if at < len(inner) and inner[at].start <= w.start else "other"
        found[name] = found.get(name, 0.0) + w.end - w.start
    return found


@contextlib.contextmanager
def named_ops() -> Iterator[None]:
    """Inside, what the step's modules call of the ops is named for the profiler."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for module in (forward_module, backward_module, loss_module, update_module, gates_module):
            for name, function in list(vars(module).items()):
                family = next((f for start, f in FAMILIES.items() if name.startswith(start)), None)
                if family is not None and callable(function):
                    before.append((module, name, function))
                    setattr(module, name, _named(function, MARK + family))
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def _named(function: Any, label: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return function(*args, **kwargs)

    return call


def page(title: str, where: str, shares: dict[str, float]) -> str:
    """One page without a script: the chart, and the table."""
    total = sum(shares.values())
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{ms:.3f}</td><td>{100 * ms / total:.1f} %</td></tr>'
        for name, ms in shares.items()
    )
    chart = bar_chart("shares", "Time by op", f"{total:.2f} ms of kernels a step", list(shares.items()), "ms")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main><h1>{escape(title)}</h1>"
        f'<p class="where">{escape(where)}</p>\n{chart}\n<table><thead><tr><th scope="col">op</th>'
        '<th scope="col">ms</th><th scope="col">share</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></main></body></html>\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
