"""Cut the corpus into the records that ship with the package.

    python examples/small_model/data.py --corpus .corpus/corpus.jsonl --tokenizer .corpus/tokenizer --out .corpus

Writes `data.jsonl`, one `{"rid", "split", "category", "text"}` a line (train, then val, then test), and `NOTICE`, what
the text is and its licence.

A record is one stretch of one file: whole top-level statements, or whole methods of a class that is too long, joined
while they fit in `--tokens` tokens (an end of text included); a statement that is longer still is left out, and so are
stretches shorter than a tenth of that. A record keeps its file's split, so val and test come from files that neither
the tokenizer nor any model was trained on. The categories are the few that both held-out splits hold enough of, in
equal parts; within one, files take turns in the order of their hash, so that no long file fills a split. Files with a
copyright line of anyone but the Python Software Foundation are left out: one licence covers every record.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

from corpus import fnv1a64, read_corpus
from tokenizer import encode_source
from tokenizers import Tokenizer

# A statement begins at a def, a class or its decorators, with the comment lines right above it.
BEGIN = r"^(?:{0}#.*\n)*{0}(?:@|class\b|def\b|async def\b)"
LEVELS = (re.compile(BEGIN.format(""), re.M), re.compile(BEGIN.format("    "), re.M))
RIGHTS = re.compile(r"(?:copyright|all rights reserved|permission to use|redistribution and use).*", re.I)

NOTICE = """\
data.jsonl holds excerpts of the source of CPython's standard library, and the model and tokenizer beside it learned
from that source. The excerpts are unchanged except for being cut at definitions; each names its file in "rid"
(path#number). They are used under the Python Software Foundation License version 2, which follows with the history of
the software.

{copyright}

"""


def cut(text: str, level: int = 0) -> list[str]:
    """The text in pieces, each from a definition of this level on (0 = top level, 1 = methods); joined, the text."""
    starts, decorated = [0], False
    for match in LEVELS[level].finditer(text):
        if not decorated and match.start() > 0:
            starts.append(match.start())
        decorated = match.group().endswith("@")  # the def under a decorator belongs to it
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


def records_of(text: str, tokenizer: Tokenizer, limit: int) -> list[str]:
    """Stretches of a file of at most `limit` tokens, the end of text among them, in the order of the file."""
    pieces = cut(text)
    lengths = [len(i) for i in encode_source(tokenizer, pieces)]
    split = [cut(p, 1) if n >= limit else [p] for p, n in zip(pieces, lengths, strict=True)]
    pieces = [p for group in split for p in group]
    lengths = [len(i) for i in encode_source(tokenizer, pieces)]
    out, run, size = [], "", 1
    for piece, n in zip([*pieces, ""], [*lengths, limit], strict=True):
        if size + n > limit:
            if run and size >= limit // 10:
                out.append(run)
            run, size = "", 1
        if n < limit:
            run, size = run + piece, size + n
    # a join may tokenize to another length than its parts; the bound is on the record itself
    sizes = map(len, encode_source(tokenizer, [t.strip("\n") + "\n" for t in out]))
    return [t.strip("\n") + "\n" for t, n in zip(out, sizes, strict=True) if n < limit]


def others_rights(text: str) -> bool:
    """Whether the file claims rights for anyone but the Python Software Foundation."""
    return any("Python Software Foundation" not in m.group() for m in RIGHTS.finditer(text))


def turns(corpus: list[dict], tokenizer: Tokenizer, limit: int) -> dict[tuple[str, str], list[dict]]:
    """The records of each (split, category): the files' first ones in the order of their hashes, then the second..."""
    groups: dict[tuple[str, str], list[tuple[int, int, dict]]] = defaultdict(list)
    for source in corpus:
        if others_rights(source["text"]):
            continue
        for k, text in enumerate(records_of(source["text"], tokenizer, limit)):
            record = {**source, "rid": f"{source['rid']}#{k}", "text": text}
            groups[source["split"], source["category"]].append((k, fnv1a64(source["rid"]), record))
    return {key: [r for _, _, r in sorted(group, key=lambda x: x[:2])] for key, group in groups.items()}


def choose(groups: dict[tuple[str, str], list[dict]], n_categories: int, wanted: dict[str, int]) -> list[dict]:
    """Equal parts of the categories that fill every split best, up to `wanted` records a split, category after category
    in turn. ValueError when too few categories have their share in every split."""
    share = {split: n // n_categories for split, n in wanted.items()}

    def filled(category: str) -> float:
        return min(len(groups.get((s, category), ())) / max(n, 1) for s, n in share.items())

    names = sorted({c for _, c in groups}, key=lambda c: (-filled(c), c))[:n_categories]
    if len(names) < n_categories or filled(names[-1]) < 1:
        raise ValueError(
            f"records: got {({c: round(filled(c), 2) for c in names})} of each category's share {share}, expected 1 or "
            f"more for {n_categories} categories; ask for fewer categories or records, or use a larger corpus"
        )
    return [groups[split, c][i] for split, n in share.items() for i in range(n) for c in sorted(names)]


def notice_of(licence: str) -> str:
    """The notice with CPython's licence after it, whose own copyright line (retained by its terms) is quoted on top."""
    line = re.search(r'"(Copyright \(c\)[^"]*Python Software Foundation;\s*All Rights Reserved)"', licence)
    if line is None:
        raise ValueError(
            "LICENSE.txt: got no copyright line of the Python Software Foundation, expected CPython's licence; "
            "run corpus.py on the library of a CPython install"
        )
    return NOTICE.format(copyright=line[1]) + licence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1024, help="the longest record, its end of text included")
    parser.add_argument("--categories", type=int, default=6)
    parser.add_argument("--train", type=int, default=324)
    parser.add_argument("--val", type=int, default=36)
    parser.add_argument("--test", type=int, default=96)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    groups = turns(read_corpus(args.corpus), tokenizer, args.tokens)
    records = choose(groups, args.categories, {"train": args.train, "val": args.val, "test": args.test})
    lines = [json.dumps(r, ensure_ascii=False) + "\n" for r in records]
    (args.out / "data.jsonl").write_text("".join(lines), encoding="utf-8")
    licence = (args.corpus.parent / "LICENSE.txt").read_text(encoding="utf-8")
    (args.out / "NOTICE").write_text(notice_of(licence), encoding="utf-8")
    sizes = [len(i) + 1 for i in encode_source(tokenizer, [r["text"] for r in records])]
    tokens: Counter[str] = Counter()
    for record, n in zip(records, sizes, strict=True):
        tokens[record["split"]] += n
    print(json.dumps({
        "bytes": sum(len(line.encode()) for line in lines),
        "records": Counter(r["split"] for r in records), "tokens": tokens, "longest": max(sizes),
        "categories": Counter(f"{r['split']} {r['category']}" for r in records),
        "files": {s: len({r["rid"].split("#")[0] for r in records if r["split"] == s}) for s in tokens},
    }, indent=1))


if __name__ == "__main__":
    main()
