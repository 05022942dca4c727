"""Packing loses nothing and puts every target where it belongs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortiq_kernels.data import DataError, Record, eval_batches, make_batch, pack, train_batches

PAD = 9999


def record(i: int, n: int, first: int = 0, weight: float = 1.0, base: int | None = None) -> Record:
    base = i * 1000 if base is None else base
    return Record(f"r{i}", "train", np.arange(base, base + n, dtype=np.int32), first, None, weight)


records_strategy = st.lists(
    st.tuples(st.integers(0, 23), st.integers(0, 25), st.sampled_from([1.0, 0.5, 2.0, 0.0])), min_size=0, max_size=9
).map(lambda rows: [record(i, n, first, weight) for i, (n, first, weight) in enumerate(rows)])


def scored_pairs(records):
    """(token before, token, weight) of every scored token: what packing must give, once each."""
    return sorted(
        (int(r.ids[k - 1]), int(r.ids[k]), r.weight)
        for r in records
        if r.weight
        for k in range(max(r.first_target, 1), len(r.ids))
    )


@settings(max_examples=300, deadline=None)
@given(records_strategy, st.integers(1, 9), st.sampled_from(["records", "stream"]))
def test_every_target_exactly_once(records, window, packing):
    packed = pack(records, window, packing, PAD)
    got = sorted(
        (int(w.tokens[j]), int(w.next_ids[j]), float(w.weights[j]))
        for w in packed.windows
        for j in np.flatnonzero(w.weights)
    )
    assert got == scored_pairs(records)
    for w in packed.windows:
        assert w.scored and len(w.tokens) == len(w.next_ids) == len(w.weights) == window
        assert (w.tokens.dtype, w.next_ids.dtype, w.weights.dtype) == (np.int32, np.int32, np.float32)
        assert w.starts[0] == 0 and list(w.starts) == sorted(set(w.starts)) and w.starts[-1] < window
        assert not w.weights[w.n_tokens :].any() and (w.tokens[w.n_tokens :] == PAD).all()
        assert (w.n_tokens in w.starts) == (w.n_tokens < window)
    assert packed.dropped >= 0


@settings(max_examples=200, deadline=None)
@given(records_strategy, st.integers(1, 9))
def test_records_packing_sequences(records, window):
    """Each sequence is one record, or one piece of a record that is longer than the window, cut at multiples of it."""
    packed = pack(records, window, "records", PAD)
    for w in packed.windows:
        ends = [*w.starts[1:], window]
        for start, end in zip(w.starts, ends, strict=True):
            if start >= w.n_tokens:
                continue
            seq = w.tokens[start:end]
            owner = records[int(seq[0]) // 1000]
            at = int(seq[0]) % 1000
            assert at % window == 0 and (at == 0 or len(owner.ids) > window)
            np.testing.assert_array_equal(seq, owner.ids[at : at + window])
            if at + len(seq) == len(owner.ids):
                assert w.weights[end - 1] == 0  # the last row of a record
    assert packed.cut == sum(len(r.ids) > window for r in records)


def test_next_fit_in_order():
    packed = pack([record(0, 3), record(1, 4), record(2, 2), record(3, 5)], 8, "records", PAD)
    assert [w.starts for w in packed.windows] == [(0, 3, 7), (0, 2, 7)]
    assert [w.n_tokens for w in packed.windows] == [7, 7]
    assert packed.windows[0].weights.tolist() == [1, 1, 0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("packing", ["records", "stream"])
@pytest.mark.parametrize("n", [8, 9, 15, 16, 17, 23])
def test_n_tokens_give_n_minus_1_targets(packing, n):
    """huggingface/transformers#30975: a target lost at each window edge. t = 8, N mod t in {0, 1, t-1}."""
    packed = pack([record(0, n)], 8, packing, PAD)
    assert sum(int(np.count_nonzero(w.weights)) for w in packed.windows) == n - 1
    assert packed.cut == (n > 8)


def test_stream_runs_over_records_and_window_edges():
    packed = pack([record(0, 3, base=10), record(1, 6, base=20)], 4, "stream", PAD)
    assert [w.tokens.tolist() for w in packed.windows] == [[10, 11, 12, 20], [21, 22, 23, 24]]
    assert [w.next_ids.tolist() for w in packed.windows] == [[11, 12, 20, 21], [22, 23, 24, 25]]
    assert [w.weights.tolist() for w in packed.windows] == [[1, 1, 0, 1], [1, 1, 1, 1]]
    assert [w.starts for w in packed.windows] == [(0,), (0,)]
    assert (packed.cut, packed.dropped) == (1, 1)  # the third window holds token 25 alone, which predicts nothing


def test_unscored_windows_are_dropped_and_counted():
    packed = pack([record(0, 4, first=4), record(1, 4)], 4, "records", PAD)
    assert len(packed.windows) == 1 and packed.dropped == 1
    assert pack([], 4).windows == []


def test_refusals():
    with pytest.raises(DataError, match=r"unknown packing 'dense'.*records, stream"):
        pack([], 4, "dense")
    with pytest.raises(DataError, match="at least 1 token, got 0"):
        pack([], 0)


# ---- batches


def windows(n: int, t: int = 4):
    return pack([record(i, t - i % 2) for i in range(n)], t, "records", PAD).windows


def test_batch_layout():
    ws = pack([record(0, 3, weight=0.5), record(1, 2), record(2, 6, first=3)], 8, "records", PAD).windows
    b = make_batch(ws, capacity=7)
    assert (b.max_seqlen, len(b.tokens), b.n_tokens) == (8, 16, (5, 6))
    assert b.cu_seqlens.tolist() == [0, 3, 5, 8, 14, 16, 16, 16]
    assert b.row_index.tolist() == [0, 1, 3, 10, 11, 12]
    assert b.row_weight.tolist() == [0.5, 0.5, 1, 1, 1, 1]
    assert (b.weight_sum, b.n_scored) == (5.0, 6) and isinstance(b.weight_sum, float)
    assert b.next_ids[b.row_index.long()].tolist() == [1, 2, 1001, 2003, 2004, 2005]
    dtypes = [b.tokens, b.next_ids, b.row_index, b.row_weight, b.cu_seqlens]
    assert [str(x.dtype)[6:] for x in dtypes] == ["int64", "int64", "int32", "float32", "int32"]
    assert b.to("cpu").cu_seqlens.tolist() == b.cu_seqlens.tolist()
    with pytest.raises(DataError, match="do not fit"):
        make_batch(ws, capacity=3)


@settings(max_examples=60, deadline=None)
@given(records_strategy, st.integers(2, 9), st.integers(1, 4), st.sampled_from(["records", "stream"]))
def test_eval_batches_keep_every_weight_and_one_shape(records, window, batch, packing):
    ws = pack(records, window, packing, PAD).windows
    if not ws:
        with pytest.raises(DataError, match="no val windows"):
            eval_batches(ws, batch)
        return
    batches = eval_batches(ws, batch, pad_id=PAD)
    assert len(batches) == -(-len(ws) // batch) and batches.fillers == len(batches) * batch - len(ws)
    total = sum(r.n_targets * r.weight for r in records)
    assert sum(b.weight_sum for b in batches) == total
    assert {len(b.cu_seqlens) for b in batches} == {batches.capacity + 1}
    for b in batches:
        cu = b.cu_seqlens.tolist()
        n = batch * window
        assert cu[0] == 0 and cu[-1] == n and cu == sorted(cu) and len(b.tokens) == n
        assert set(range(0, n + 1, window)) <= set(cu)
        assert (b.row_weight > 0).all() and len(b.row_index) == len(b.row_weight) == b.n_scored


def test_train_batches_drop_the_rest():
    batches = train_batches(windows(7), 3)
    assert (len(batches), batches.dropped, batches.window) == (2, 1, 4)
    assert len(list(batches)) == 2 and len(batches[0:5]) == 2
    assert batches[-1].tokens.tolist() == batches[1].tokens.tolist()
    with pytest.raises(IndexError):
        batches[2]
    assert train_batches(windows(7), 3, capacity=50)[0].cu_seqlens.shape == (51,)
    with pytest.raises(DataError, match="2 train windows do not fill one batch of 3"):
        train_batches(windows(2), 3)
    with pytest.raises(DataError, match="at least 1 window, got 0"):
        train_batches(windows(2), 0)
