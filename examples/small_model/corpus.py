"""Collect the Python standard library's source as a text corpus.

    python examples/small_model/corpus.py [--stdlib DIR] --out .corpus

Writes `corpus.jsonl`, one file of the library a line, in the order of its path:
`{"rid": path, "split": "train" | "val" | "test", "category": group, "text": source}`, and `LICENSE.txt`, the licence of
the CPython install that the text came from.

The split is a function of the path alone: FNV-1a-64(rid) mod 10, 8 = val, 9 = test, the rest train. Files that teach
nothing about Python code are left out: not UTF-8, shorter than 64 bytes, tables (code pages, entities), generated
build data, deliberately broken or foreign-encoded test inputs, and near copies of a file already taken.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Not source that a person wrote as Python 3: other people's packages, build data with this machine's paths in it,
# texts stored as Python (pydoc_data), inputs of the parsers' tests.
SKIP = re.compile(
    r"(^|/)(site-packages|dist-packages|__pycache__|config-[^/]*|encoded_modules|tokenizedata|cjkencodings|pydoc_data)/"
    r"|(lib2to3/tests|test_lib2to3)/data/|(^|/)(_sysconfigdata|badsyntax_|bad_coding|nosyntax)[^/]*$"
)
MIN_BYTES = 64
MIN_PROSE = 0.65  # letters and white space; tables lie below (html/entities 0.62, stringprep 0.43), code about 0.75 up
NEAR_COPY = 0.8  # share of a file's longer lines that earlier files hold already


def fnv1a64(text: str) -> int:
    """FNV-1a of the UTF-8 bytes, 64 bits: h = (h xor byte) * 100000001b3, from cbf29ce484222325."""
    h = 0xCBF29CE484222325
    for byte in text.encode():
        h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return h


def split_of(rid: str) -> str:
    """`val` or `test` for the rids whose FNV-1a-64 is 8 or 9 mod 10, else `train`."""
    return {8: "val", 9: "test"}.get(fnv1a64(rid) % 10, "train")


def category_of(rid: str) -> str:
    """The top folder of a path (`asyncio`, `test`, ...); single-file modules are `modules`."""
    return rid.split("/")[0] if "/" in rid else "modules"


def is_table(text: str) -> bool:
    """Whether a file is data rather than code: a code page, or mostly digits and punctuation."""
    prose = sum(1 for c in text if c.isspace() or (c.isascii() and c.isalpha()))
    return "decoding_table" in text or prose < MIN_PROSE * len(text)


def collect(stdlib: Path) -> Iterator[dict]:
    """The records of a library folder in the order of their paths, splits assigned, unfit files and copies left out."""
    seen: set[str] = set()
    for path in sorted(stdlib.rglob("*.py"), key=lambda p: p.relative_to(stdlib).as_posix()):
        rid = path.relative_to(stdlib).as_posix()
        if SKIP.search(rid):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text.encode()) < MIN_BYTES or is_table(text):
            continue
        lines = {line.strip() for line in text.splitlines() if len(line.strip()) >= 20} or {text.strip()}
        if len(lines & seen) >= NEAR_COPY * len(lines):
            continue
        seen |= lines
        yield {"rid": rid, "split": split_of(rid), "category": category_of(rid), "text": text}


def read_corpus(path: Path, split: str | None = None) -> list[dict]:
    """The records of a JSONL file, all of them or those of one split."""
    with open(path, encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return [r for r in records if split is None or r["split"] == split]


def sizes(records: list[dict]) -> dict:
    """Files and bytes of each split, and the bytes of each category in each split."""
    report: dict = {}
    for split in ("train", "val", "test"):
        group = [r for r in records if r["split"] == split]
        by_category: Counter[str] = Counter()
        for r in group:
            by_category[r["category"]] += len(r["text"].encode())
        report[split] = {
            "files": len(group), "bytes": sum(by_category.values()), "categories": dict(by_category.most_common(12)),
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    licence = args.stdlib / "LICENSE.txt"
    if not licence.is_file():
        parser.error(f"no licence beside the library: expected {licence}; name CPython's lib/pythonX.Y with --stdlib")
    args.out.mkdir(parents=True, exist_ok=True)
    records = list(collect(args.stdlib))
    with open(args.out / "corpus.jsonl", "w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    shutil.copyfile(licence, args.out / "LICENSE.txt")
    print(json.dumps(sizes(records), indent=1))


if __name__ == "__main__":
    main()
