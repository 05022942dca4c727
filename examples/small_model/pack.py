"""Pack the corpus as token arrays for the training machine, one compressed file a split.

    python examples/small_model/pack.py --corpus .corpus/corpus.jsonl --tokenizer .corpus/tokenizer --out .corpus

`train.npz`, `val.npz` and `test.npz` hold `tokens` uint16 [N], whole files one after another, an end of text (id 0)
after each; `starts` int64 [files + 1], where each file begins, the last = N; and `widths` uint8 [vocab], the bytes each
token spells (0 for special tokens), by which nats a token become nats a byte. Train files lie in the order of
FNV-1a-64(rid), so that neighbours share no folder; val and test in the order of the corpus.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from corpus import fnv1a64, read_corpus
from ngram import Units
from tokenizers import Tokenizer


def pack(records: list[dict], units: Units) -> tuple[np.ndarray, np.ndarray]:
    """(tokens uint16 [N], starts int64 [files + 1]) of whole files, each with its end of text."""
    if units.vocab > 1 << 16:
        raise ValueError(f"vocabulary: got {units.vocab}, expected at most 65536, the ids are stored as uint16")
    sequences = units.encode([r["text"] for r in records])
    starts = np.cumsum([0] + [len(s) for s in sequences])
    return np.concatenate(sequences).astype(np.uint16), starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    units = Units(Tokenizer.from_file(str(args.tokenizer / "tokenizer.json")))
    report = {}
    for split in ("train", "val", "test"):
        records = read_corpus(args.corpus, split)
        if split == "train":
            records.sort(key=lambda r: fnv1a64(r["rid"]))
        tokens, starts = pack(records, units)
        path = args.out / f"{split}.npz"
        np.savez_compressed(path, tokens=tokens, starts=starts, widths=units.widths.astype(np.uint8))
        report[split] = {"files": len(records), "tokens": len(tokens), "file_bytes": path.stat().st_size}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
