"""Scores do not depend on how records are batched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortiq_kernels.data import DataError, Record, score_batches


def record(i, n, first=0, weight=1.0):
    return Record(f"r{i}", "test", np.arange(i * 10000, i * 10000 + n, dtype=np.int32), first, None, weight)


def toy_nll(batch) -> dict[int, float]:
    """A stand-in for a model: what a row sees is its position in its sequence and every token before it there."""
    out: dict[int, float] = {}
    cu = batch.cu_seqlens.numpy()
    tokens = batch.tokens.numpy().astype(np.float64)
    for row, owner in zip(batch.row_index.tolist(), batch.row_record.tolist(), strict=True):
        start = int(cu[np.searchsorted(cu, row, side="right") - 1])
        seen = np.sin(tokens[start : row + 1] * (1 + np.arange(row + 1 - start))).sum()
        out[owner] = out.get(owner, 0.0) + float(np.cos(seen + int(batch.next_ids[row])))
    return out


def totals(records, window, batch):
    nll: dict[int, float] = {}
    count = 0
    for b in score_batches(records, window, batch, pad_id=7):
        count += b.n_scored
        assert b.weight_sum == b.n_scored and len(b.tokens) % b.max_seqlen == 0
        assert set(range(0, len(b.tokens) + 1, b.max_seqlen)) <= set(b.cu_seqlens.tolist())
        for k, v in toy_nll(b).items():
            assert k not in nll  # a record is whole, in one batch
            nll[k] = v
    return nll, count


@pytest.mark.parametrize("window", [8, 64, 1024])
def test_nll_is_independent_of_the_batch(window):
    """huggingface/transformers#39241: records of 3, 50, 700 tokens; batch 1, 2, 7."""
    records = [record(0, 3), record(1, 50, first=20), record(2, 700, weight=0.25), record(3, 3, first=2)]
    expected, count = totals(records, 700, 1)
    assert count == 2 + 30 + 699 + 1  # token-weighted: a record's weight plays no part in a score
    for batch in (1, 2, 7):
        got, n = totals(records, window, batch)
        assert n == count and got == pytest.approx(expected, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 41)), max_size=9), st.integers(1, 17), st.integers(1, 4))
def test_every_target_once(rows, window, batch):
    records = [record(i, n, first) for i, (n, first) in enumerate(rows)]
    if not any(r.n_targets for r in records):
        with pytest.raises(DataError, match="none of the"):
            score_batches(records, window, batch)
        return
    got = [
        (owner, int(b.next_ids[row]))
        for b in score_batches(records, window, batch)
        for row, owner in zip(b.row_index.tolist(), b.row_record.tolist(), strict=True)
    ]
    want = [(i, int(t)) for i, r in enumerate(records) for t in r.ids[max(r.first_target, 1) :]]
    assert sorted(got) == sorted(want)


def test_refusals():
    with pytest.raises(DataError, match="none of the 0 records"):
        score_batches([], 8, 1)
    with pytest.raises(DataError, match="window must be at least 1"):
        score_batches([record(0, 3)], 0, 1)
