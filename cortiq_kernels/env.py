"""What this machine offers and what the package will use: `cortiq env [--json]`, or `python -m cortiq_kernels.env`.

Prints versions, the GPU and its driver, whether the native module is there and why not, and for every op the backend
that CPU and CUDA tensors get, why, and what would change it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from cortiq_kernels.arguments import Parser

OPS = (
    "add_rms_norm", "gdn_mixer", "chunk_gated_delta_rule", "attention_mixer", "swiglu_mlp", "linear", "head_topk_kl",
    "topk_softmax", "embedding", "adam", "gram",
)  # fmt: skip
GATED_DELTA = ("gdn_mixer", "chunk_gated_delta_rule")
ATTENTION = "attention_mixer"
# on CUDA tensors below float64
WITH_KERNELS = (
    *GATED_DELTA, ATTENTION, "head_topk_kl", "topk_softmax", "add_rms_norm", "embedding", "swiglu_mlp", "adam",
)  # fmt: skip


def collect() -> dict[str, Any]:
    """Everything that is printed, as JSON-able values."""
    from cortiq_kernels import backend, native
    from cortiq_kernels.ops import triton_gate

    why_not = backend.no_gpu_reason()
    return {
        "versions": backend.versions(),
        "gpus": [g._asdict() for g in backend.gpus()],
        "gpu_reason": why_not or "usable",
        "driver": backend.driver_version(),
        "native": {"present": native.missing() is None, "reason": native.describe()},
        "default": _default(backend),
        "ops": [_op(op, why_not, triton_gate.missing()) for op in OPS],
    }


def _op(op: str, no_gpu: str | None, no_triton: str | None) -> dict[str, Any]:
    """What tensors of either device get, why, and what would change it. `cuda` is None where there is no GPU."""
    from cortiq_kernels import native
    from cortiq_kernels.ops.attention.dims import MAX_HEAD as ATTENTION_HEAD
    from cortiq_kernels.ops.gated_delta.layout import MAX_HEAD
    from cortiq_kernels.ops.rms_norm import MAX_WIDTH

    cuda, reason, change = "torch", "explicit torch forward and backward", "nothing yet: it has no kernel of its own"
    cpu_reason = reason
    if op == "linear":
        cpu_reason, reason = "BLAS through torch", "cuBLAS through torch"
        change = "nothing: the vendor's matrix product is the choice"
    elif op in WITH_KERNELS:
        cpu_reason = "explicit torch forward and backward; kernels are for CUDA tensors"
        if no_triton:
            reason, change = f"its Triton kernels cannot run: {no_triton}", "triton"
        else:
            cuda, reason = "triton", "Triton kernels"
            change = "float64 tensors take torch, and so does backend='torch'"
            if op == "add_rms_norm":
                change += f"; rows of up to {MAX_WIDTH} elements without gaps take them"
            if op == "embedding":
                reason = "the gather through torch, the gradient by Triton kernels"
            most = {**dict.fromkeys(GATED_DELTA, MAX_HEAD), ATTENTION: ATTENTION_HEAD}.get(op)
            if most is not None:
                change = f"bf16 and f16 tensors with heads of up to {most} take them; others may take torch"
            if op == ATTENTION:
                reason += ", around SDPA's where no window is packed; with deterministic=True all are its own"
    cpu = "torch"
    if op == "gram":
        change = "a build where nvcc, its headers and libcudart_static are found"
        if no_gpu is None:
            why = native.cuda_missing(0)
            cuda, reason = ("torch", f"torch's products: {why}") if why else ("native", "the compiled module (csrc/)")
            change = change if why else "float64 tensors take torch"
        if native.missing() is None:
            cpu, cpu_reason = "native", "the compiled module (csrc/); float64 takes torch"
        else:
            cpu_reason = f"explicit torch; no native module: {native.missing()}"
    if no_gpu:
        cuda_why = f"no GPU: {no_gpu}"
        change = "a GPU: its tensors take Triton kernels" if op in WITH_KERNELS else change
        change = "a GPU, and a build with CUDA kernels" if op == "gram" else change
    return {
        "op": op, "cpu": cpu, "cpu_reason": cpu_reason, "cuda": None if no_gpu else cuda,
        "reason": cuda_why if no_gpu else reason, "change": change,
    }  # fmt: skip


def backends(
    device: str, dtype: str, heads: Sequence[int] = (0, 0), attention_head: int = 0
) -> dict[str, dict[str, str]]:
    """Op -> {backend, reason} of a run on `device` ("cpu", "cuda:0 (...)") in `dtype` (bf16, f16, f32, f64), of a model
    with gated delta heads of sizes dk and dv, and softmax attention heads of `attention_head`.
    """
    from cortiq_kernels import backend
    from cortiq_kernels.ops import triton_gate
    from cortiq_kernels.ops.attention import dims
    from cortiq_kernels.ops.gated_delta import layout

    working = backend.DTYPES[dtype]
    unfit = dict.fromkeys(GATED_DELTA, layout.unfit_for_kernels(working, *heads))
    unfit[ATTENTION] = dims.unfit_for_kernels(working, attention_head)
    found = {}
    for o in (_op(op, backend.no_gpu_reason(), triton_gate.missing()) for op in OPS):
        kind, why = (o["cpu"], o["cpu_reason"]) if device.startswith("cpu") else (o["cuda"] or "torch", o["reason"])
        if kind in ("triton", "native") and dtype == "f64":
            kind, why = "torch", "float64 is for exact runs, which the torch path does"
        elif kind == "triton" and unfit.get(o["op"]):
            kind, why = "torch", unfit[o["op"]]
        found[o["op"]] = {"backend": kind, "reason": why}
    return found


def _default(backend: Any) -> dict[str, str]:
    device, device_reason = backend.pick_device("auto")
    dtype, dtype_reason = backend.pick_dtype(None, device)
    return {
        "device": str(device),
        "device_reason": device_reason,
        "dtype": backend.dtype_name(dtype),
        "dtype_reason": dtype_reason,
    }


def render(info: dict[str, Any]) -> str:
    """The same as text for people."""
    v = info["versions"]
    lines = [f"{name:15} {version or 'not installed'}" for name, version in v.items()]
    gpus = [f"{g['name']} (sm {g['capability']}, {g['memory'] / 2**30:.0f} GiB)" for g in info["gpus"]]
    native = info["native"]
    d = info["default"]
    lines += [
        f"{'GPU':15} {', '.join(gpus) if gpus else 'none: ' + info['gpu_reason']}",
        f"{'driver':15} {info['driver'] or 'none'}",
        f"{'native module':15} {'yes' if native['present'] else 'no'}: {native['reason']}",
        f"{'default':15} {d['device']} ({d['device_reason']}), {d['dtype']} ({d['dtype_reason']})",
        "",
        f"{'op':24}{'CPU tensors':13}{'CUDA tensors':14}why; what would change it",
    ]
    for o in info["ops"]:
        why = o["reason"] if o["cuda"] else o["cpu_reason"]
        lines.append(f"{o['op']:24}{o['cpu']:13}{o['cuda'] or 'no GPU':14}{why}; {o['change']}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = Parser("cortiq env", "What this machine offers and what the package will use.")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    args = parser.parse_args(argv)
    info = collect()
    print(json.dumps(info, indent=2) if args.json else render(info))
    return 0


if __name__ == "__main__":
    sys.exit(main())
