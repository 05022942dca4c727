"""The scripts that prepare the small model's data, end to end on a tiny library."""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "small_model"
STATEMENT = '''
# {i} adds a number of its own.
@decorated
def function_{i}(first, second={i}):
    """Return the sum of {name} and two numbers."""
    total_{i} = first + second
    return total_{i}


class Class{i}:
    def method_{name}(self):
        return self.value_{i}
'''
LICENCE = 'keep "Copyright (c) 2001,\n2002 Python Software Foundation;\nAll Rights Reserved" in it\n'


@pytest.fixture(scope="module")
def scripts():
    """The scripts as modules; they import each other by their plain names, as when run from the command line."""
    sys.path.insert(0, str(FOLDER))
    try:
        import corpus
        import data
        import ngram
        import pack
        import tokenizer
    finally:
        sys.path.remove(str(FOLDER))
    return {"corpus": corpus, "tokenizer": tokenizer, "data": data, "ngram": ngram, "pack": pack}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A made-up library: three folders of 40 files, and files that must be left out."""
    root = tmp_path_factory.mktemp("stdlib")
    (root / "LICENSE.txt").write_text(LICENCE)
    for k, folder in enumerate(("alpha", "beta", "gamma")):
        (root / folder).mkdir()
        for i in range(40):
            text = "".join(STATEMENT.format(i=f"{k}_{i}_{j}", name=f"{folder}_{j}") for j in range(3))
            (root / folder / f"file_{i:02}.py").write_text(f'"""File {i} of {folder}."""\n' + text)
    (root / "alpha" / "zz_copy.py").write_text((root / "alpha" / "file_00.py").read_text() + "\n")
    (root / "alpha" / "zz_latin.py").write_bytes(b"# caf\xe9 " + b"words " * 40)
    (root / "beta" / "zz_table.py").write_text("TABLE = [" + "0x12, " * 100 + "]\n")
    (root / "beta" / "zz_short.py").write_text("x = 1\n")
    (root / "site-packages").mkdir()
    (root / "site-packages" / "other.py").write_text("# somebody else's package\n" * 10)
    return root


def run(module, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    module.main()
    return json.loads(capsys.readouterr().out)


def test_end_to_end(scripts, library, tmp_path, monkeypatch, capsys):
    corpus, tokens = tmp_path / "corpus.jsonl", tmp_path / "tokenizer"
    run(scripts["corpus"], monkeypatch, capsys, "--stdlib", library, "--out", tmp_path)
    records = scripts["corpus"].read_corpus(corpus)
    expected = [f"{folder}/file_{i:02}.py" for folder in ("alpha", "beta", "gamma") for i in range(40)]
    assert [r["rid"] for r in records] == expected
    assert all(r["split"] == scripts["corpus"].split_of(r["rid"]) for r in records)
    assert {r["category"] for r in records} == {"alpha", "beta", "gamma"}

    run(scripts["tokenizer"], monkeypatch, capsys, "--corpus", corpus, "--out", tokens, "--vocab", 400)
    assert json.loads((tokens / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"

    arguments = ("--corpus", corpus, "--tokenizer", tokens)
    sizes = ("--tokens", 100, "--categories", 2, "--train", 20, "--val", 2, "--test", 4)
    report = run(scripts["data"], monkeypatch, capsys, *arguments, "--out", tmp_path, *sizes)
    shipped = scripts["corpus"].read_corpus(tmp_path / "data.jsonl")
    assert Counter(r["split"] for r in shipped) == {"train": 20, "val": 2, "test": 4} and report["longest"] <= 100
    assert all(r["split"] == scripts["corpus"].split_of(r["rid"].split("#")[0]) for r in shipped)
    assert len({r["rid"] for r in shipped}) == len(shipped)
    notice = (tmp_path / "NOTICE").read_text()
    assert notice.endswith(LICENCE) and notice.count("2002 Python Software Foundation") == 2
    again = (tmp_path / "data.jsonl").read_bytes()
    run(scripts["data"], monkeypatch, capsys, *arguments, "--out", tmp_path, *sizes)
    assert (tmp_path / "data.jsonl").read_bytes() == again

    run(scripts["pack"], monkeypatch, capsys, *arguments, "--out", tmp_path)
    for split in ("train", "val", "test"):
        with np.load(tmp_path / f"{split}.npz") as packed:
            ids, starts, widths = packed["tokens"], packed["starts"], packed["widths"]
        assert starts[-1] == len(ids) and (ids[starts[1:] - 1] == 0).all() and (ids == 0).sum() == len(starts) - 1
        assert widths[ids].sum() == sum(len(r["text"].encode()) for r in records if r["split"] == split)

    report = run(scripts["ngram"], monkeypatch, capsys, *arguments, "--order", 4, "--eval", tmp_path / "data.jsonl")
    assert report["corpus.jsonl"]["test"]["nats_per_byte"] < 1 and report["data.jsonl"]["test"]["records"] == 4
    by_bytes = run(scripts["ngram"], monkeypatch, capsys, "--corpus", corpus, "--unit", "byte", "--order", 3)
    assert by_bytes["corpus.jsonl"]["val"]["nats_per_byte"] < 2


def test_hash_and_splits(scripts):
    corpus = scripts["corpus"]
    assert corpus.fnv1a64("") == 0xCBF29CE484222325 and corpus.fnv1a64("a") == 0xAF63DC4C8601EC8C
    records = pytest.importorskip("cortiq_kernels.data.records")
    for rid in ("", "a", "asyncio/tasks.py", "é"):
        assert corpus.fnv1a64(rid) == records.fnv1a64(rid)


def test_tokenizer_round_trip(scripts):
    tokenizer = scripts["tokenizer"]
    text = "def f(x):\n        return x  # café 1234\n\n\n    <|endoftext|>\r\n\ttail  "
    trained = tokenizer.train_tokenizer([text * 20], 300)
    assert [trained.token_to_id(t) for t in tokenizer.SPECIAL] == [0, 1, 2] and trained.get_vocab_size() == 300
    (ids,) = tokenizer.encode_source(trained, [text])
    assert trained.decode(ids) == text and min(ids) > 2  # a special token spelled out in a file is ordinary text
    assert trained.encode("<|im_end|>").ids == [2]
    pieces = [trained.decode([i]) for i in tokenizer.encode_source(trained, ["f(x):\n        return 1234"])[0]]
    assert "):\n        " in pieces and pieces[-4:] == ["1", "2", "3", "4"]


def test_cuts_join_to_the_text(scripts):
    head, f = "import x\n\n", "# above\n@one\n@two\ndef f():\n    pass\n\n"
    methods = ["class A:\n", "    # of g\n    def g(self): ...\n", "    @p\n    def h(self): ...\n"]
    cut = scripts["data"].cut
    assert cut(head + f + "".join(methods)) == [head, f, "".join(methods)]
    assert cut("".join(methods), 1) == methods


def test_rights_of_others_are_seen(scripts):
    others = scripts["data"].others_rights
    assert others("# Copyright 2007 Somebody.\n") and others("# All rights reserved.\n")
    assert not others("# Copyright (C) 2001 Python Software Foundation\nx = 1\n")


def small_model(scripts, order):
    rng = np.random.default_rng(0)
    texts = [np.append(rng.integers(0, 5, n) * rng.integers(0, 2, n), 6) for n in rng.integers(1, 40, 12)]
    return scripts["ngram"].NGram(texts, order, vocab=7, mark=6), texts


@pytest.mark.parametrize("order", [2, 3, 5])
def test_ngram_sums_to_one(scripts, order):
    model, texts = small_model(scripts, order)
    model.tune(texts[:3])
    rng = np.random.default_rng(1)
    for length in (0, 1, 2, 3, 8):
        context = rng.integers(0, 6, length)
        hits = model.hits([np.append(context, w) for w in range(7)], first=length)
        assert model.prob(hits).sum() == pytest.approx(1, abs=1e-12)


def test_ngram_equals_the_formula(scripts):
    """Against a dictionary of strings: the recursion of the module's docstring written out."""
    model, texts = small_model(scripts, 3)
    padded = [(6, 6, *map(int, t)) for t in texts]
    counts = {3: Counter(p[i - 2 : i + 1] for p in padded for i in range(2, len(p)))}
    for n in (2, 1):
        counts[n] = Counter(gram[1:] for gram in counts[n + 1])

    def p(word, context):
        n = len(context) + 1
        lower = p(word, context[1:]) if context else 1 / 7
        after = {gram[-1]: c for gram, c in counts[n].items() if gram[:-1] == context}
        if not after:
            return lower
        taken = {w: model.discounts[n - 1][min(c, 3) - 1] for w, c in after.items()}
        kept = max(after[word] - taken[word], 0) if word in after else 0
        return (kept + sum(taken.values()) * lower) / sum(after.values())

    held_out = np.array([1, 0, 0, 4, 5, 0, 0, 2, 6])
    want = [p(int(held_out[i]), (6, 6, *map(int, held_out))[i : i + 2]) for i in range(1, len(held_out))]
    np.testing.assert_allclose(model.prob(model.hits([held_out])), want, rtol=1e-12)
