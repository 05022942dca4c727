"""An interpolated n-gram language model, the figure the small model has to beat: modified Kneser-Ney, tuned discounts.

    python examples/small_model/ngram.py --corpus .corpus/corpus.jsonl --tokenizer .corpus/tokenizer \\
        [--unit token|byte] [--order 5] [--eval .corpus/data.jsonl]

Trains on the whole train split, tunes its discounts on the val split, and prints what it scores on the val and test
splits of the corpus and of every `--eval` file, as JSON.

What is scored, as a neural model on the same records would: each record is a sequence of its own that starts from an
empty context; every unit but the record's first is predicted, and the end of text after the last. `nats_per_byte` =
the nats of all predicted units / the bytes they spell (the end of text spells none); `without_eos` leaves the end out.

The model of order n, over a vocabulary of V symbols, with c the counts (n-grams at the highest order; below it the
number of distinct symbols seen before the n-gram) and c' the context without its oldest symbol:

    p_n(w | c) = max(c(cw) - D_n(c(cw)), 0) / c(c.) + g_n(c) p_{n-1}(w | c')
    g_n(c) = (D_n1 N1(c.) + D_n2 N2(c.) + D_n3 N3+(c.)) / c(c.)
    p_0(w) = 1 / V,    p_n(. | c) = p_{n-1}(. | c') for a context never seen

D_n takes three values, for counts 1, 2 and 3 or more; 0 <= D_nk <= k, so that p_n sums to one. Source: Chen and
Goodman 1998, "An Empirical Study of Smoothing Techniques for Language Modeling".
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from corpus import read_corpus
from tokenizer import encode_source
from tokenizers import Tokenizer


class Table(NamedTuple):
    """The n-grams of one order, sorted by key = context's id * vocab + symbol; an n-gram's id is its place here."""

    keys: np.ndarray  # [M] int64
    counts: np.ndarray  # [M] int32
    total: np.ndarray  # [C] int32, sum of the counts after each context (C = n-grams of the order below)
    types: np.ndarray  # [3, C] int32, how many symbols follow each context with count 1, 2, 3 or more


class Hits(NamedTuple):
    """What one order knows of the symbols to be predicted."""

    counts: np.ndarray  # [T] of the n-gram
    total: np.ndarray  # [T] of its context, 0 = never seen
    types: np.ndarray  # [3, T]


class NGram:
    """`NGram(sequences, order, vocab, mark)`: `mark` is the id that ends a text, and fills the empty context before it.

    sequences: integer arrays, each ending as its text does (append `mark` for the end to be learned).
    """

    def __init__(self, sequences: list[np.ndarray], order: int, vocab: int, mark: int):
        if order < 2:
            raise ValueError(f"n-gram order: got {order}, expected 2 or more; order 1 has no context")
        self.order, self.vocab, self.mark = order, vocab, mark
        stream, real = self._stream(sequences)
        self.tables: list[Table] = []
        ids, keys, raw = stream, np.arange(vocab), np.bincount(stream[real], minlength=vocab)
        for _ in range(1, order):
            higher, where = np.unique(self._keys(ids, stream), return_inverse=True)
            suffix = np.empty(len(higher), np.int64)
            suffix[where] = ids  # an n-gram without its oldest symbol is the shorter one that ends at the same place
            raw_higher = np.bincount(where[real], minlength=len(higher))
            before = np.bincount(suffix[raw_higher > 0], minlength=len(keys))
            self.tables.append(self._table(keys, before))
            ids, keys, raw = where, higher, raw_higher
        self.tables.append(self._table(keys, raw))
        self.discounts = np.stack([_discounts(t.counts) for t in self.tables])  # [order, 3]

    def _stream(self, sequences: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """All sequences in one row, order - 1 marks before each, and which places are symbols of a sequence."""
        pad = np.full(self.order - 1, self.mark, np.int64)
        stream = np.concatenate([part for s in sequences for part in (pad, np.asarray(s, np.int64))])
        real = np.concatenate([part for s in sequences for part in (pad < 0, np.ones(len(s), bool))])
        return stream, real

    def _keys(self, ids: np.ndarray, stream: np.ndarray) -> np.ndarray:
        """Keys of the n-grams ending at each place, from the ids of the shorter ones; before place 0 lie marks."""
        return np.concatenate([ids[:1], ids[:-1]]) * self.vocab + stream

    def _table(self, keys: np.ndarray, counts: np.ndarray) -> Table:
        """Counts and what each context adds up to; contexts are the n-grams of the last table (none: the empty one)."""
        context = keys // self.vocab
        n = len(self.tables[-1].keys) if self.tables else 1
        total = np.bincount(context, weights=counts, minlength=n).astype(np.int32)
        level = (counts == 1, counts == 2, counts >= 3)
        types = np.stack([np.bincount(context[m], minlength=n) for m in level]).astype(np.int32)
        return Table(keys, counts.astype(np.int32), total, types)

    def hits(self, sequences: list[np.ndarray], first: int = 1) -> list[Hits]:
        """Each order's counts for the symbols `first`... of every sequence, one row after another."""
        stream, real = self._stream(sequences)
        starts = np.cumsum([0] + [len(s) + self.order - 1 for s in sequences[:-1]]) + self.order - 1
        for skip in range(first):
            real[starts + skip] = False
        found, ids = [], stream
        for n, table in enumerate(self.tables, 1):
            context = np.zeros_like(ids)
            if n > 1:
                context = np.concatenate([ids[:1], ids[:-1]])
                key = np.where(context < 0, -1, context * self.vocab + stream)
                ids = np.minimum(np.searchsorted(table.keys, key), len(table.keys) - 1)
                ids = np.where(table.keys[ids] == key, ids, -1)
            here, seen = ids[real], context[real] >= 0
            past = context[real]
            found.append(Hits(table.counts[here] * (here >= 0), table.total[past] * seen, table.types[:, past] * seen))
        return found

    def prob(self, hits: list[Hits], discounts: np.ndarray | None = None) -> np.ndarray:
        """p(symbol | context) [T] float64 by the recursion above, from the lowest order up."""
        p = np.full(len(hits[0].counts), 1 / self.vocab)
        for hit, d in zip(hits, self.discounts if discounts is None else discounts, strict=True):
            kept = np.maximum(hit.counts - np.concatenate([[0.0], d])[np.minimum(hit.counts, 3)], 0)
            p = np.where(hit.total > 0, (kept + (d @ hit.types) * p) / np.maximum(hit.total, 1), p)
        return p

    def tune(self, sequences: list[np.ndarray], rounds: int = 2, at_most: int = 200_000) -> None:
        """Lower the loss of held-out text by coordinate descent on the discounts: each moves by a step, +-0.2 in the
        first round and finer after, for as long as the loss falls. At most `at_most` evenly spaced places count."""
        hits = self.hits(sequences)
        step = -(-len(hits[0].counts) // at_most)
        hits = [Hits(h.counts[::step], h.total[::step], h.types[:, ::step]) for h in hits]
        best = -np.log(self.prob(hits)).mean()
        for width in np.geomspace(0.2, 0.05, rounds):
            for n in range(self.order):
                for k in range(3):
                    for sign in (1, -1):
                        while True:
                            trial = self.discounts.copy()
                            trial[n, k] = np.clip(trial[n, k] + sign * width, 0.01, k + 1)
                            loss = -np.log(self.prob(hits, trial)).mean()
                            if loss >= best:
                                break
                            best, self.discounts = loss, trial


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Chen and Goodman's estimate, n_k = n-grams of count k: D_k = k - (k+1) Y n_{k+1} / n_k within [0.01, k],
    Y = n_1 / (n_1 + 2 n_2); every n_k counts one more, so that none is 0."""
    n = np.bincount(np.minimum(counts, 5), minlength=6)[1:5].astype(float) + 1
    y = n[0] / (n[0] + 2 * n[1])
    return np.array([np.clip(k - (k + 1) * y * n[k] / n[k - 1], 0.01, k) for k in (1, 2, 3)])


class Units:
    """Texts as symbols: BPE tokens or UTF-8 bytes, and the bytes each symbol spells."""

    def __init__(self, tokenizer: Tokenizer | None, eos: int = 0):
        self.tokenizer = tokenizer
        if tokenizer is None:
            self.vocab, self.mark, self.widths = 257, 256, np.array([1] * 256 + [0])
        else:
            self.vocab, self.mark = tokenizer.get_vocab_size(), eos
            special = tokenizer.get_added_tokens_decoder()
            # one character of a byte-level token's name stands for one byte
            names = [tokenizer.id_to_token(i) or "" for i in range(self.vocab)]
            self.widths = np.array([0 if i in special else len(name) for i, name in enumerate(names)])

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Each text's symbols with the end mark after them."""
        if self.tokenizer is None:
            symbols = [np.frombuffer(t.encode(), np.uint8) for t in texts]
        else:
            symbols = [np.array(ids) for ids in encode_source(self.tokenizer, texts)]
        return [np.append(s.astype(np.int64), self.mark) for s in symbols]


def score(model: NGram, units: Units, texts: list[str]) -> dict:
    """Nats a unit and a byte of the texts, with the end of text counted and without."""
    sequences = units.encode(texts)
    nats = -np.log(model.prob(model.hits(sequences)))
    symbols = np.concatenate([s[1:] for s in sequences])
    n_bytes, end = int(units.widths[symbols].sum()), symbols == model.mark
    return {
        "records": len(texts), "units": len(symbols), "bytes": n_bytes,
        "nats_per_unit": round(float(nats.mean()), 4),
        "nats_per_byte": round(float(nats.sum()) / n_bytes, 4),
        "without_eos": round(float(nats[~end].sum()) / n_bytes, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="folder of tokenizer.json (unit token)")
    parser.add_argument("--unit", choices=("token", "byte"), default="token")
    parser.add_argument("--order", type=int, default=5)
    parser.add_argument("--eval", type=Path, nargs="*", default=[], help="more JSONL files to score")
    args = parser.parse_args()
    if args.unit == "token" and args.tokenizer is None:
        parser.error("unit token: got no --tokenizer, expected the folder of a tokenizer.json")
    started = time.time()
    units = Units(Tokenizer.from_file(str(args.tokenizer / "tokenizer.json")) if args.unit == "token" else None)
    texts = {s: [r["text"] for r in read_corpus(args.corpus, s)] for s in ("train", "val", "test")}
    model = NGram(units.encode(texts["train"]), args.order, units.vocab, units.mark)
    report: dict = {"unit": args.unit, "order": args.order, "vocab": units.vocab}
    report["ngrams"] = [len(t.keys) for t in model.tables]
    report["untuned_val"] = score(model, units, texts["val"])["nats_per_byte"]
    model.tune(units.encode(texts["val"]))
    report["discounts"] = model.discounts.round(3).tolist()
    report[args.corpus.name] = {s: score(model, units, texts[s]) for s in ("val", "test")}
    for path in args.eval:
        report[path.name] = {s: score(model, units, [r["text"] for r in read_corpus(path, s)]) for s in ("val", "test")}
    print(json.dumps({**report, "seconds": round(time.time() - started, 1)}, indent=1))


if __name__ == "__main__":
    main()
