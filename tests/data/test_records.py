"""Files of records: what is read, what is refused and how, what is counted."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cortiq_kernels.data import SPLITS, DataError, Tokenizer, eval_batches, load_records, pack

LINES = [
    {"text": "the quick brown fox"},
    {"prompt": "What is ", "completion": "the answer?", "split": "val", "category": "qa", "weight": 0.5},
    {"ids": [5, 6, 7, 8], "first_target": 2, "rid": "mine", "split": "test"},
    {"messages": [{"role": "user", "content": "hé\u2028"}, {"role": "assistant", "content": "42"}], "split": "train"},
]


def jsonl(rows) -> bytes:
    return b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in rows)


def write(tmp_path, data: bytes, name="data.jsonl"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


def same(a, b) -> bool:
    return (
        a.data_hash == b.data_hash
        and a.counts == b.counts
        and [(r.rid, r.split, r.first_target, r.category, r.weight) for r in a.records]
        == [(r.rid, r.split, r.first_target, r.category, r.weight) for r in b.records]
        and all(np.array_equal(x.ids, y.ids) for x, y in zip(a.records, b.records, strict=True))
    )


@pytest.fixture(scope="module")
def tok(model_dir):
    return Tokenizer(model_dir)


def test_kinds(tmp_path, tok):
    data = load_records(write(tmp_path, jsonl(LINES)), tok, splits=SPLITS)
    text, qa, ids, chat = data.records
    assert [r.rid for r in data.records] == ["1", "2", "mine", "4"] and [r.line for r in data.records] == [1, 2, 3, 4]
    assert tok.decode(text.ids) == "the quick brown fox<|endoftext|>" and text.first_target == 0
    assert text.n_targets == len(text.ids) - 1  # token 0 is never scored
    assert tok.decode(qa.ids[qa.first_target :]) == " the answer?<|endoftext|>"
    assert (qa.category, qa.weight, qa.split) == ("qa", 0.5, "val")
    assert (ids.ids.tolist(), ids.first_target, ids.n_targets) == ([5, 6, 7, 8], 2, 2)
    assert ids.ids.dtype == text.ids.dtype == np.int32
    assert tok.decode(chat.ids).endswith("42<|im_end|>\n")  # no eos after a rendered conversation
    assert data.counts["records"] == 4 and data.counts["tokens"] == sum(len(r.ids) for r in data.records)
    everything = load_records(write(tmp_path, jsonl(LINES)), tok, splits=SPLITS, loss_on="all")
    assert [r.n_targets for r in everything.records] == [len(r.ids) - 1 for r in everything.records]
    assert everything.data_hash == data.data_hash


def test_eos_is_not_doubled(tmp_path, tok):
    rows = [{"text": "the<|im_end|>"}, {"text": "the<|endoftext|>"}, {"text": ""}]
    data = load_records(write(tmp_path, jsonl(rows)), tok, splits=SPLITS)
    assert [tok.decode(r.ids) for r in data.records] == ["the<|im_end|>", "the<|endoftext|>", "<|endoftext|>"]
    assert data.counts["unscored"] == 1


def test_bom_crlf_and_no_final_newline(tmp_path, tok):
    """infiniflow/ragflow#19179: same records, rids and data hash as the clean file."""
    clean = jsonl(LINES)
    dirty = b"\xef\xbb\xbf" + clean.replace(b"\n", b"\r\n")[:-2]
    a = load_records(write(tmp_path, clean), tok, splits=SPLITS)
    b = load_records(write(tmp_path, dirty, "dirty.jsonl"), tok, splits=SPLITS)
    assert same(a, b) and len(b.records) == 4


def test_unicode_line_separators_do_not_split_a_record(tmp_path, tok):
    """bytedance/deer-flow#5423: U+2028, U+2029, U+0085, raw, in one line."""
    text = "a\u2028b\u2029c\u0085d"
    raw = f'{{"text": "{text}"}}\n{{"text": "next"}}\n'.encode()
    data = load_records(write(tmp_path, raw), tok, splits=SPLITS)
    assert [r.rid for r in data.records] == ["1", "2"]
    assert tok.decode(data.records[0].ids) == text + "<|endoftext|>"


def test_blank_lines_are_counted(tmp_path, tok):
    data = load_records(write(tmp_path, b'\n{"text": "a b"}\n \t\r\n\n{"text": "c d"}\n\n'), tok, splits=SPLITS)
    assert [(r.rid, r.line) for r in data.records] == [("2", 2), ("5", 5)]


def test_data_hash_is_of_the_content(tmp_path, tok):
    base = load_records(write(tmp_path, jsonl(LINES)), tok)
    spaced = "\n".join(
        json.dumps(
            {k: r[k] for k in reversed(r)} | {"note": "x", "rid": r.get("rid")}, indent=None, separators=(" ,", " :")
        )
        for r in LINES
    )
    other = load_records(write(tmp_path, spaced.encode(), "b.jsonl"), tok)
    assert other.data_hash == base.data_hash and len(base.data_hash) == 64
    assert any("ignored: note" in n for n in other.notes)
    for changed in ({**LINES[1], "weight": 0.25}, {**LINES[1], "split": "train"}, {**LINES[1], "completion": "x"}):
        assert (
            load_records(write(tmp_path, jsonl([LINES[0], changed, *LINES[2:]]), "c.jsonl"), tok).data_hash
            != base.data_hash
        )


def test_parquet_equals_jsonl(tmp_path, tok):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [*LINES, {"messages": [*LINES[3]["messages"][:1], {"role": "assistant", "content": "7", "name": "x"}]}]
    names = sorted({k for r in rows for k in r})
    pq.write_table(pa.table({n: [r.get(n) for r in rows] for n in names}), tmp_path / "data.parquet", row_group_size=2)
    assert same(
        load_records(tmp_path / "data.parquet", tok, splits=SPLITS),
        load_records(write(tmp_path, jsonl(rows)), tok, splits=SPLITS),
    )
    odd = pa.table({"messages": [[{"role": "user", "content": "a", "at": b"x"}]]})
    pq.write_table(odd, tmp_path / "odd.parquet")
    with pytest.raises(DataError, match="line 1: .*not JSON"):
        load_records(tmp_path / "odd.parquet", tok)
    whole = (tmp_path / "data.parquet").read_bytes()
    with pytest.raises(DataError, match="cannot be read as parquet.*complete"):
        load_records(write(tmp_path, whole[: len(whole) // 2], "half.parquet"), tok)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, tok, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"pip install 'cortiq_kernels\[data\]'"):
        load_records(write(tmp_path, b"PAR1...."), tok)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "is not JSON .*expected one JSON object per line"),
        (b"[1]", "is a JSON array.*jq"),
        (b'"text"', r"is 'text' \(str\); expected a JSON object"),
        (b'{"txt": "a"}', r"no content field \(fields: txt\); expected"),
        (b"{}", r"no content field \(fields: none\)"),
        (b'{"text": null}', "no content field"),
        (b'{"prompt": "a"}', 'has no "completion"'),
        (b'{"completion": "a"}', 'has no "prompt"'),
        (b'{"prompt": "a", "completion": "b", "messages": []}', "is ambiguous: it has prompt, completion, messages"),
        (b'{"text": "a", "ids": [1]}', "is ambiguous: it has text, ids"),
        (b'{"text": 5}', r'"text" is 5 \(int\); expected a string'),
        (b'{"prompt": [{"role": "user"}], "completion": "x"}', '"prompt" is .*a conversation goes into "messages"'),
        (b'{"text": "\\ud800"}', "holds a lone surrogate"),
        (
            b'{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "b"}]}',
            "lone surrogate",
        ),
        (b'{"text": "\xff"}', "is not UTF-8 .byte 10 of the line is 0xff"),
        (b'{"messages": "a"}', '"messages" is .*non-empty list'),
        (b'{"messages": []}', '"messages" is .*non-empty list'),
        (b'{"messages": ["a"]}', r'"messages"\[0\] is .*an object'),
        (b'{"messages": [{"content": "a"}]}', r'"messages"\[0\] has role None'),
        (b'{"messages": [{"role": "user", "content": 5}]}', r'"messages"\[0\] has content 5'),
        (b'{"ids": [1, 2]}', '"first_target" is None .*expected an integer >= 0'),
        (b'{"ids": [1, 2], "first_target": -1}', '"first_target" is -1'),
        (b'{"ids": [1, 2], "first_target": true}', '"first_target" is True'),
        (b'{"ids": [1, 2.0], "first_target": 0}', '"ids" is .*list of token ids'),
        (b'{"ids": [1, true], "first_target": 0}', '"ids" is .*list of token ids'),
        (b'{"ids": "12", "first_target": 0}', '"ids" is .*list of token ids'),
        (b'{"ids": [1, 9999999999999], "first_target": 0}', "token id 9999999999999 is outside the vocabulary"),
        (b'{"ids": [-1, 2], "first_target": 0}', "token id -1 is outside the vocabulary"),
        (b'{"text": "a", "rid": 5}', '"rid" is 5 .*non-empty string'),
        (b'{"text": "a", "rid": ""}', '"rid" is .*non-empty string'),
        (b'{"text": "a", "split": "dev"}', "\"split\" is 'dev' .*train, val or test"),
        (b'{"text": "a", "category": 3}', '"category" is 3'),
        (b'{"text": "a", "weight": -1}', '"weight" is -1 .*finite number >= 0'),
        (b'{"text": "a", "weight": NaN}', 'is not JSON .NaN'),
        (b'{"text": "a", "weight": 1e300}', '"weight" is 1e.300 .*float32'),
        (b'{"text": "a", "weight": 1e-60}', '"weight" is 1e-60 .*float32'),
        (b'{"text": "a", "weight": "1"}', '"weight" is .1. .str'),
    ],
)
def test_bad_lines_are_named(tmp_path, tok, line, message):
    path = write(tmp_path, b'{"text": "fine line"}\n' + line + b"\n")
    with pytest.raises(DataError, match=r"data.jsonl: 1 of 2 records cannot be used") as e:
        load_records(path, tok)
    lines = str(e.value).split("\n")
    assert len(lines) == 2 and lines[1].startswith("  line 2: ")
    assert __import__("re").search(message, lines[1]), lines[1]


def test_many_bad_lines_are_one_error(tmp_path, tok):
    rows = [b'{"txt": 1}' if i % 2 else b'{"text": "ok ok"}' for i in range(1000)]
    with pytest.raises(DataError, match="500 of 1000 records") as e:
        load_records(write(tmp_path, b"\n".join(rows)), tok)
    lines = str(e.value).split("\n")
    assert [t.split(":")[0] for t in lines[1:]] == [f"  line {k}" for k in (2, 4, 6, 8, 10)] + ["  and 495 more"]


def test_bad_files(tmp_path, tok):
    for data, message in (
        (b"", "holds no records"),
        (b"\n \r\n", "holds no records"),
        (b"\xef\xbb\xbf", "holds no records"),
        (b"\x1f\x8b\x08\x00", "gzip.*gunzip"),
        ('{"text": "a"}'.encode("utf-16"), "UTF-16.*iconv"),
        (b'[\n{"text": "a"},\n{"text": "b"}\n]\n', "one JSON document over many lines.*jq"),
        (b'[{"text": "a"}, {"text": "b"}]', "JSON array"),
    ):
        with pytest.raises(DataError, match=message):
            load_records(write(tmp_path, data), tok)
    with pytest.raises(DataError, match="no such file"):
        load_records(tmp_path / "none.jsonl", tok)
    with pytest.raises(DataError, match="got a directory"):
        load_records(tmp_path, tok)
    with pytest.raises(DataError, match="loss_on is 'prompt'; expected one of completion, all"):
        load_records(tmp_path / "data.jsonl", tok, loss_on="prompt")
    with pytest.raises(DataError, match="unknown split 'dev'"):
        load_records(tmp_path / "data.jsonl", tok, splits=("dev",))


def test_vocabulary(tmp_path, tok):
    path = write(tmp_path, b'{"ids": [1, 2, 300], "first_target": 0, "split": "train"}')
    assert load_records(path, tok, vocab=301).records[0].ids.tolist() == [1, 2, 300]
    assert load_records(path, None).records[0].ids.tolist() == [1, 2, 300]
    with pytest.raises(DataError, match="token id 300 is outside the vocabulary of 300"):
        load_records(path, None, vocab=300)
    with pytest.raises(DataError, match="outside the vocabulary of 40 .the tokenizer's ids.*tokenizer of this model"):
        load_records(write(tmp_path, jsonl(LINES[:1])), tok, vocab=40)
    with pytest.raises(DataError, match="there is no tokenizer"):
        load_records(write(tmp_path, jsonl(LINES[:1])), None)


def test_unscored_records(tmp_path, tok):
    """huggingface/trl#6668: counted; all of them is an error, never a loss of 0."""
    rows = [
        {"prompt": "the fox", "completion": "", "split": "train"},
        {"ids": [1, 2, 3], "first_target": 3, "split": "train"},
        {"ids": [1, 2, 3], "first_target": 99, "split": "val"},
        {"ids": [1], "first_target": 0, "split": "val"},
        {"ids": [], "first_target": 0, "split": "train"},
        {"text": "the fox", "weight": 0, "split": "train"},
    ]
    with pytest.raises(DataError, match="none of the 6 records has a scored token"):
        load_records(write(tmp_path, jsonl(rows)), tok)
    data = load_records(write(tmp_path, jsonl([*rows, {"text": "the dog", "split": "train"}])), tok)
    assert data.counts["unscored"] == 6
    assert any("6 records (rids '1', '2', '3', ...) have no scored token" in n for n in data.notes)
    assert data.counts["targets"] == data.records[-1].n_targets > 0
    with pytest.raises(DataError, match="no val windows"):
        eval_batches(pack(data.split("val"), 8).windows, 2)
    for packing in ("records", "stream"):
        packed = pack(data.split("train"), 8, packing, tok.pad_id)
        assert sum(float(w.weights.sum()) for w in packed.windows) == data.counts["targets"]


def test_overlap_and_repeated_rids(tmp_path, tok):
    """MakazhanAlpamys/Soup#680: the same text in train ("a") and val ("c", by FNV) counted; a repeated rid refused."""
    rows = [{"text": "the same text", "rid": "a"}, {"text": "the same text", "rid": "c"}, {"text": "other", "rid": "b"}]
    data = load_records(write(tmp_path, jsonl(rows)), tok, splits=SPLITS)
    assert {r.rid: r.split for r in data.records} | {"b": ""} == {"a": "train", "c": "val", "b": ""}
    assert data.counts["overlap"] == 1
    assert "1 val record (rid 'c') has the same content as a train record" in data.notes[0]
    again = {"ids": [1, 2, 3], "first_target": 1, "split": "train"}
    ids = load_records(write(tmp_path, jsonl([again, {**again, "first_target": 0, "split": "test"}])), tok)
    assert ids.counts["overlap"] == 1 and len(ids.records) == 1  # a test record is compared, not loaded
    with pytest.raises(DataError, match="line 4: repeats the rid 'a' of line 1; expected unique rids"):
        load_records(write(tmp_path, jsonl([*rows, {"text": "x", "rid": "a"}])), tok)
    with pytest.raises(DataError, match="line 2: repeats the rid '2'|repeats the rid '2' of line 1"):
        load_records(write(tmp_path, jsonl([{"text": "x", "rid": "2"}, {"text": "y"}])), tok)


def test_splits_and_order(tmp_path, tok):
    from cortiq_kernels.data import fnv1a64

    rows = [{"text": f"the fox {i}"} for i in range(600)]  # several tokenised chunks
    data = load_records(write(tmp_path, jsonl(rows)), tok)
    assert {r.split for r in data.records} == {"train", "val"} and data.counts["test"] > 0
    assert sum(data.counts[s] for s in SPLITS) == 600
    train = [fnv1a64(r.rid) for r in data.split("train")]
    assert train == sorted(train) and len(train) == data.counts["train"]
    val = [r.line for r in data.split("val")]
    assert val == sorted(val) and len(val) == data.counts["val"]
    for r in data.records:
        assert tok.decode(r.ids) == f"the fox {r.line - 1}<|endoftext|>"
    with pytest.raises(DataError, match="split 'test' was not loaded"):
        data.split("test")
    test = load_records(write(tmp_path, jsonl(rows)), tok, splits=("test",))
    assert {r.split for r in test.records} == {"test"} and test.data_hash == data.data_hash
