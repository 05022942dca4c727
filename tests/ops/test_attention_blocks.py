"""Lists of blocks against a loop over the sequences."""

from __future__ import annotations

import pytest
import torch

from cortiq_kernels.ops.attention.blocks import block_list


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize(
    "starts", [[0, 1], [0, 0], [0, 0, 0, 7, 7], [0, 5, 13, 13, 40], [0, 8, 16, 24], [0, 40, 40, 40], [0, 3, 4, 9, 9, 9]]
)
@pytest.mark.parametrize("size", [1, 4, 8])
def test_every_token_once_in_order_of_work(starts, size, keys):
    n = starts[-1]
    table = block_list(torch.tensor(starts, dtype=torch.int32), n, size, keys=keys)
    assert table.dtype == torch.int32 and table.shape == (n // size + len(starts) - 1, 4)
    want = {
        (lo + at, at, min(size, hi - lo - at), hi - lo)
        for lo, hi in zip(starts, starts[1:], strict=False)
        for at in range(0, hi - lo, size)
    }
    got = [tuple(row) for row in table.tolist()]
    used = got[: len(want)]
    assert set(used) == want and all(row[2] == 0 for row in got[len(want) :])
    work = [length - place if keys else place for _, place, _, length in used]
    assert work == sorted(work, reverse=True)
