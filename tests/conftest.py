"""Shared fixtures.

Memory that the package allocates with `torch.empty*` is filled with NaN while a test runs, so an element that an op
forgets to write is seen instead of being zero by luck.
"""

from __future__ import annotations

import sys

import pytest
import torch

# Tensors here are tiny, and two busy threads waiting for each other cost milliseconds a call.
torch.set_num_threads(1)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(1234)


@pytest.fixture(autouse=True)
def poison_empty(monkeypatch: pytest.MonkeyPatch):
    def poisoned(make):
        def call(*args, **kwargs):
            t = make(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("cortiq_kernels") and t.is_floating_point():
                t.fill_(float("nan"))
            return t

        return call

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
