"""How exact a Gram is, against float64: `python -m bench.gram_accuracy [--json [F]] [--device cpu]`.

Matrix units keep a running sum in float32 and cut what it cannot hold, towards zero: the longer a sum runs in them, the
smaller it comes out. "one product" is the library's own over all rows, with nothing in between; ours is rounded into
the Gram every 4096 rows at most. Over `--tokens` rows ours is summed call by call, 8192 rows each, as a capture does.

Inputs: normal numbers; their absolute values, whose products all have one sign; and the gated activation silu(a) · b
of two normal numbers. `largest` is max |G - G64| / sqrt(G_ii G_jj) over the first 512 rows of G, `bias` the mean of
(G - G64) / G64 on the diagonal there. The bounds are 2e-5 for a call of up to 8192 rows and 3e-5 for any number of
calls; beyond them the exit status is 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.report import OURS, headline, pick_device, results_path, write_json
from cortiq_kernels.backend import DTYPES
from cortiq_kernels.ops.gram import gram_accumulate_, gram_finalize, gram_zeros

CALL = 8192  # rows
ROWS = (1024, 2048, 4096, 8192, 16384, 65536)
SEEN = 512  # rows of G that are compared
BOUND_CALL, BOUND_ALL = 2e-5, 3e-5
Draw = Callable[[torch.Generator, int, int], Tensor]


def normal(gen: torch.Generator, rows: int, n: int) -> Tensor:
    return torch.randn(rows, n, generator=gen, device=gen.device)


def gated(gen: torch.Generator, rows: int, n: int) -> Tensor:
    return torch.nn.functional.silu(normal(gen, rows, n)).mul_(normal(gen, rows, n))


KINDS: dict[str, Draw] = {"normal": normal, "one sign": lambda *a: normal(*a).abs_(), "gated": gated}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when ours is within its bounds."""
    args = _parse(argv)
    device = pick_device(args.device)
    dtype = DTYPES[args.dtype or ("bf16" if device.type == "cuda" else "f32")]
    print(headline(device, args.commit))
    found: list[dict] = []
    for kind in KINDS:
        for rows in [r for r in ROWS if r <= args.tokens]:
            found += call_of(kind, rows, args.width, dtype, device)
        found.append(calls_of(kind, args.tokens, args.width, dtype, device))
        for row in found[-2 * len(ROWS) - 1 :]:
            if row["input"] == kind:
                print(f"  {kind:<9}{row['rows']:>9} rows  {row['who']:<15} largest {row['largest']:.1e}  "
                      f"bias {row['bias']:+.1e}", flush=True)  # fmt: skip
    red = [row for row in found if row["who"] == OURS and not row["largest"] <= row["bound"]]
    if args.json is not None:
        path = Path(args.json) if args.json else results_path(device, "gram-accuracy.json")
        write_json(path, device, args.commit, {"red": red, "errors": found})
        print(f"wrote {path}")
    for row in red:
        print(f"RED: {row}")
    return 1 if red else 0


def call_of(kind: str, rows: int, n: int, dtype: torch.dtype, device: torch.device) -> list[dict]:
    """One call of ours and one product of the library, over the same rows."""
    x = KINDS[kind](torch.Generator(device).manual_seed(rows), rows, n).to(dtype)
    want = torch.stack([exact(part) for part in x.split(CALL)]).sum(0)
    ours = gram_finalize(gram_accumulate_(gram_zeros(n, device=device), x), n)
    half = x.is_cuda and dtype != torch.float32
    product = torch.mm(x.T, x, out_dtype=torch.float32) if half else x.float().T @ x.float()
    said = {"input": kind, "rows": rows}
    bound = BOUND_CALL if rows <= CALL else BOUND_ALL
    return [
        {**said, "who": OURS, **errors(ours, want), "bound": bound},
        {**said, "who": "one product", **errors(product, want)},
    ]


def calls_of(kind: str, tokens: int, n: int, dtype: torch.dtype, device: torch.device) -> dict:
    """Ours over many calls, on new rows each time."""
    gen, gram = torch.Generator(device).manual_seed(0), gram_zeros(n, device=device)
    want = torch.zeros(min(SEEN, n), n, dtype=torch.float64, device=device)
    for begin in range(0, tokens, CALL):
        x = KINDS[kind](gen, min(CALL, tokens - begin), n).to(dtype)
        gram_accumulate_(gram, x)
        want += exact(x)
    got = errors(gram_finalize(gram, n), want)
    return {"input": kind, "rows": tokens, "calls": -(-tokens // CALL), "who": OURS, **got, "bound": BOUND_ALL}


def exact(x: Tensor) -> Tensor:
    """The first rows of the Gram of x, in float64."""
    wide = x.double()
    return wide[:, :SEEN].T @ wide


def errors(got: Tensor, want: Tensor) -> dict[str, float]:
    """See the module docstring. `want` holds the first rows."""
    seen = len(want)
    # The diagonal beyond the rows that are compared is known from `got` alone: exact enough for a scale.
    size = got.diagonal().double().sqrt()
    off = got[:seen].double() - want
    diagonal = want.diagonal()
    return {
        "largest": float((off.abs() / (size[:seen, None] * size)).max()),
        "bias": float((off.diagonal() / diagonal).mean()),
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gram_accuracy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1 << 22, help="rows summed call by call")
    parser.add_argument("--width", type=int, default=4096, help="columns of x")
    parser.add_argument("--dtype", choices=("bf16", "f16", "f32"), help="default: bf16 on a GPU, f32 on a CPU")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--json", nargs="?", const="", metavar="F", help="write the figures to F, or where results lie")
    parser.add_argument("--commit", default="", help="commit to record, where there is no git checkout to ask")
    args = parser.parse_args(argv)
    for name in ("tokens", "width"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: got {getattr(args, name)}; expected at least 1")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
