"""The Gram accumulator as torch.library operators."""

from __future__ import annotations

import pytest
import torch
from ops_close import bits

from cortiq_kernels.ops import gram as op
from cortiq_kernels.ops import library_gram
from cortiq_kernels.ops.gram import gram_zeros


@pytest.mark.parametrize("rows", ["all", "index", "weight"])
def test_operators(rows, rng):
    x = torch.randn(20, 130, generator=rng)
    index = torch.tensor([3, 4, 19]) if rows == "index" else None
    weight = torch.rand(20, generator=rng) if rows == "weight" else None
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.cortiq.gram_accumulate_, (gram_zeros(130), x, index, weight), test_utils=checks)
    gram = library_gram.gram_accumulate_(gram_zeros(130), x.requires_grad_(), row_index=index, row_weight=weight)
    want = op.gram_accumulate_(gram_zeros(130), x.detach(), row_index=index, row_weight=weight)
    assert bits(gram) == bits(want) and not gram.requires_grad
    torch.library.opcheck(torch.ops.cortiq.gram_finalize, (gram, 130), test_utils=checks)
    assert bits(library_gram.gram_finalize(gram, 130)) == bits(op.gram_finalize(want, 130))


def test_torch_compile_keeps_it_whole(rng):
    x = torch.randn(20, 130, generator=rng)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(gram, x):
        library_gram.gram_accumulate_(gram, 2 * x)
        return library_gram.gram_finalize(gram, 130)

    gram = gram_zeros(130)
    want = op.gram_accumulate_(gram_zeros(130), 2 * x)
    assert bits(both(gram, x)) == bits(op.gram_finalize(want, 130)) and bits(gram) == bits(want)
