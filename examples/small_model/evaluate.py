"""Held-out loss of a model in nats per byte, beside the n-gram models' figures for the same tokens.

    python examples/small_model/evaluate.py --model DIR --splits .corpus/val.npz .corpus/test.npz [--ngram FILE ...]

Every file is its own sequence, and all its tokens but the first are scored, its closing eos included (0 bytes): the
convention of `ngram.py`. The model sees at most one window of context, and a file longer than that starts afresh at
each window, so it never has more context than the n-gram models, which see whole files.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from cortiq_kernels import backend
from cortiq_kernels.data import Record, eval_batches, pack
from cortiq_kernels.model import Weights, open_model
from cortiq_kernels.step import Evaluator, Micro
from cortiq_kernels.step.loss import next_token_targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--splits", type=Path, nargs="+", required=True, help="npz files of pack.py")
    parser.add_argument("--ngram", type=Path, nargs="*", default=[], help="JSON that ngram.py printed")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()

    device, _ = backend.pick_device(args.device)
    dtype, _ = backend.pick_dtype(None, device)
    weights = Weights.load(open_model(args.model), dtype=dtype, device=device)
    result = {
        "device": backend.describe(device),
        "dtype": backend.dtype_name(dtype),
        "window": args.window,
        "versions": backend.versions(),
    }
    ngrams = [json.loads(path.read_text()) for path in args.ngram]
    for path in args.splits:
        figures = measure(weights, path, args.window, args.batch)
        for n in ngrams:
            theirs = n["corpus.jsonl"][path.stem]
            if n["unit"] == "token" and theirs["units"] != figures["tokens"]:
                raise SystemExit(f"{path}: the n-gram scored {theirs['units']} tokens, the model {figures['tokens']}")
            figures[f"{n['unit']}_{n['order']}gram_nats_per_byte"] = theirs["nats_per_byte"]
        result[path.stem] = figures
    print(json.dumps(result, indent=1))


def measure(weights: Weights, path: Path, window: int, batch: int) -> dict:
    """Loss over all tokens but each file's first, in nats per token and per byte."""
    packed = np.load(path)
    tokens, starts, widths = packed["tokens"], packed["starts"], packed["widths"]
    records = [
        Record(rid=str(i), split=path.stem, ids=tokens[a:b].astype(np.int32), first_target=1)
        for i, (a, b) in enumerate(zip(starts, starts[1:], strict=False))
    ]
    batches = eval_batches(pack(records, window, "records").windows, batch, split=path.stem)
    on_device = (b.to(weights.device) for b in batches)
    loss = Evaluator(weights, batch * window, window).loss(Micro(b, next_token_targets(b)) for b in on_device)
    scored = sum(len(r.ids) - 1 for r in records)
    n_bytes = sum(int(widths[r.ids[1:]].sum(dtype=np.int64)) for r in records)
    return {
        "files": len(records),
        "tokens": scored,
        "bytes": n_bytes,
        "model_nats_per_token": round(loss, 4),
        "model_nats_per_byte": round(loss * scored / n_bytes, 4),
    }


if __name__ == "__main__":
    main()
