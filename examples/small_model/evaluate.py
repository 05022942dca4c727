"""Held-out loss of a model in nats per byte, beside the n-gram models' figures for the same tokens.

    python examples/small_model/evaluate.py --model DIR --split .corpus/test.npz [--ngram .corpus/ngram_token_5.json ...]

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
    parser.add_argument("--split", type=Path, required=True, help="npz of pack.py: tokens, starts, widths")
    parser.add_argument("--ngram", type=Path, nargs="*", default=[], help="JSON that ngram.py printed")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()

    packed = np.load(args.split)
    tokens, starts, widths = packed["tokens"], packed["starts"], packed["widths"]
    name = args.split.stem
    records = [
        Record(rid=str(i), split=name, ids=tokens[a:b].astype(np.int32), first_target=1)
        for i, (a, b) in enumerate(zip(starts, starts[1:], strict=False))
    ]
    n_bytes = sum(int(widths[r.ids[1:]].sum(dtype=np.int64)) for r in records)

    device, _ = backend.pick_device(args.device)
    dtype, _ = backend.pick_dtype(None, device)
    weights = Weights.load(open_model(args.model), dtype=dtype, device=device)
    windows = pack(records, args.window, "records").windows
    batches = eval_batches(windows, args.batch, split=name)
    micros = ((lambda b: Micro(b, next_token_targets(b)))(b.to(device)) for b in batches)
    loss = Evaluator(weights, args.batch * args.window, args.window).loss(micros)
    scored = sum(len(r.ids) - 1 for r in records)
    result = {
        "split": name,
        "files": len(records),
        "tokens": scored,
        "bytes": n_bytes,
        "window": args.window,
        "dtype": backend.dtype_name(dtype),
        "device": str(device),
        "model_nats_per_token": round(loss, 4),
        "model_nats_per_byte": round(loss * scored / n_bytes, 4),
    }
    for path in args.ngram:
        ngram = json.loads(path.read_text())
        figures = ngram["corpus.jsonl"][name]
        result[f"{ngram['unit']}_{ngram['order']}gram_nats_per_byte"] = figures["nats_per_byte"]
        if ngram["unit"] == "token" and figures["units"] != scored:
            raise SystemExit(f"{path}: scored {figures['units']} tokens, the model {scored}: not the same text")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
