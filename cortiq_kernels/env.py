"""What this machine offers and what the package will use: `python -m cortiq_kernels.env [--json]`.

Prints versions, the GPU and its driver, whether the native module is there and why not, and for every op the backend
that CPU and CUDA tensors get, with the reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from typing import Any

OPS = (
    "add_rms_norm", "gdn_mixer", "attention_mixer", "swiglu_mlp", "linear", "head_topk_kl", "topk_softmax", "embedding",
    "adam",
)  # fmt: skip
WITH_KERNELS = ("head_topk_kl", "topk_softmax")  # on CUDA tensors below float64


def collect() -> dict[str, Any]:
    """Everything that is printed, as JSON-able values."""
    from cortiq_kernels import backend
    from cortiq_kernels.ops import triton_gate

    native = importlib.util.find_spec("cortiq_kernels._C") is not None
    why_not = backend.no_gpu_reason()
    return {
        "versions": backend.versions(),
        "gpus": [g._asdict() for g in backend.gpus()],
        "gpu_reason": why_not or "usable",
        "driver": backend.driver_version(),
        "native": {
            "present": native,
            "reason": "built" if native else "this version has no native sources to build",
        },
        "default": _default(backend),
        "ops": [_op(op, why_not, triton_gate.missing()) for op in OPS],
    }


def _op(op: str, no_gpu: str | None, no_triton: str | None) -> dict[str, Any]:
    """What tensors of either device get, and why."""
    cuda = "torch"
    if op in WITH_KERNELS:
        cuda, reason = ("torch", no_triton) if no_triton else ("triton", "Triton kernels on CUDA; float64 takes torch")
    elif op == "linear":
        reason = "cuBLAS / BLAS through torch"
    else:
        reason = "explicit torch forward and backward; no kernel of our own yet"
    return {"op": op, "cpu": "torch", "cuda": None if no_gpu else cuda, "reason": reason}


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
        f"{'op':16}{'CPU tensors':14}{'CUDA tensors':14}why",
    ]
    lines += [f"{o['op']:16}{o['cpu']:14}{o['cuda'] or 'no GPU':14}{o['reason']}" for o in info["ops"]]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cortiq_kernels.env", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    args = parser.parse_args(argv)
    info = collect()
    print(json.dumps(info, indent=2) if args.json else render(info))
    return 0


if __name__ == "__main__":
    sys.exit(main())
