"""The frozen prefix: where it is kept, in what, and that training on it is training without it."""

from __future__ import annotations

import pytest
import torch

from cortiq_kernels.recipes.prefix import PrefixCache, plan_prefix


@pytest.mark.parametrize(
    ("dtype", "budget", "kept"),
    [
        (torch.float32, 4 * 6 * 10 * 8, torch.float32),
        (torch.float32, 4 * 6 * 10 * 8 - 1, torch.float16),
        (torch.float32, 2 * 6 * 10 * 8 - 1, None),
        (torch.bfloat16, 2 * 6 * 10 * 8, torch.bfloat16),
        (torch.bfloat16, 2 * 6 * 10 * 8 - 1, None),
    ],
)
def test_where_the_stream_is_kept(dtype, budget, kept):
    plan = plan_prefix(6, 10, 8, dtype, budget)
    assert plan.dtype == kept
    assert "needed" in plan.reason


def test_half_precision_when_it_fits_else_bfloat16():
    cache = PrefixCache(torch.float16)
    first = torch.tensor([[1.0 / 3, 65504.0]])
    cache.append(first)
    assert cache[0].dtype == torch.float16 and torch.equal(cache[0], first.half())
    cache.append(torch.tensor([[70000.0, 1.0]]))
    assert cache.dtype == torch.bfloat16
    assert [s.dtype for s in cache.streams] == [torch.bfloat16] * 2
    assert torch.isfinite(cache[1]).all()


def test_values_that_are_not_finite_are_kept_as_they_are():
    cache = PrefixCache(torch.float16)
    cache.append(torch.tensor([[float("nan"), 1.0]]))
    assert cache.dtype == torch.bfloat16 and bool(cache[0][0, 0].isnan())
