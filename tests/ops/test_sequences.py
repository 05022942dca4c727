from __future__ import annotations

import pytest
import torch

from cortiq_kernels.ops.sequences import sequence_index


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "cu",
    [[0, 5], [0, 1, 2, 3], [0, 0, 4, 4, 4, 9, 9], [0, 3, 7, 7, 7, 7], [0, 0], [0]],
    ids=["one", "single tokens", "empty anywhere", "padded with n", "no tokens", "no sequences"],
)
def test_counts_tokens(cu, dtype):
    want = [(s, t) for s in range(len(cu) - 1) for t in range(cu[s + 1] - cu[s])]
    index = sequence_index(torch.tensor(cu, dtype=dtype), cu[-1])
    assert index.seq_ids.dtype == index.positions.dtype == torch.int64
    assert list(zip(index.seq_ids.tolist(), index.positions.tolist(), strict=True)) == want


def test_strided_cu_seqlens():
    cu = torch.tensor([0, -1, 3, -1, 4, -1], dtype=torch.int32)[::2]
    assert sequence_index(cu, 4).positions.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(
    "cu,n,match",
    [
        (torch.tensor([0.0, 3.0]), 3, "cu_seqlens must be int32"),
        (torch.tensor([[0, 3]]), 3, r"got torch.int64 \[1, 2\]"),
        (torch.tensor([], dtype=torch.int32), 0, "one sequence of n tokens"),
        (torch.tensor([0, 3]), -1, "n must be at least 0; got -1"),
    ],
)
def test_errors(cu, n, match):
    with pytest.raises(ValueError, match=match):
        sequence_index(cu, n)
