"""Tensors on another GPU than the current one (modelled on triton-lang/triton#2441, `cuda:1` rejected as a CPU tensor):
the same bits as on the first, and the current device stays. Capture of Grams belongs here once it is there.
"""

from __future__ import annotations

import pytest
import torch
from tiny import batch, geometry, targets

from cortiq_kernels.model.weights import Weights
from cortiq_kernels.ops.topk import topk_softmax
from cortiq_kernels.ops.topk_kl import head_topk_kl_fwd_bwd
from cortiq_kernels.step import Micro, Trainer
from cortiq_kernels.step.loss import Targets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(autouse=True)
def current_device_stays():
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0


def same(a, b) -> None:
    """Every tensor of two results has the same bits."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if isinstance(x, torch.Tensor)]
    assert pairs
    for x, y in pairs:
        assert y.device.index == 1 and x.dtype == y.dtype
        assert torch.equal(x.cpu(), y.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_top_k(dtype):
    logits = torch.randn(37, 5003, generator=torch.Generator().manual_seed(1)).to(dtype)
    same(*(topk_softmax(logits.to(f"cuda:{i}"), 64) for i in (0, 1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_and_loss(dtype):
    gen = torch.Generator().manual_seed(2)
    hidden, head = (torch.randn(n, 64, generator=gen).to(dtype) for n in (29, 1031))
    ids = torch.rand(29, 1031, generator=gen).argsort(-1)[:, :8].to(torch.int32)
    probs = torch.softmax(torch.randn(29, 8, generator=gen), -1)
    weight = torch.rand(29, generator=gen)
    found = []
    for i in (0, 1):
        place = [t.to(f"cuda:{i}") for t in (hidden, head, ids, probs, weight)]
        acc = torch.float32
        grads = [torch.empty_like(place[0]), torch.empty(place[1].shape, dtype=acc, device=place[1].device)]
        loss = head_topk_kl_fwd_bwd(*place, dhidden=grads[0], dhead=grads[1])
        found.append([*loss, *grads])
    same(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_steps(dtype):
    g = geometry("LLF", hidden=64, ffn=96, vocab=257, hd=32, dk=16, dv=16)
    results = []
    for i in (0, 1):
        device = torch.device("cuda", i)
        w = Weights.random(g, seed=1, dtype=dtype, device=device, train="all")
        b = batch([[100, 1, 27], [128], [3, 64, 61]], 130, g.vocab).to(device)
        t = Targets(*targets(b, g.vocab, 7)).to(device)
        trainer = Trainer(w, b.tokens.numel(), b.max_seqlen)
        for _ in range(3):
            trainer.step([Micro(b, t)], 1e-3)
        results.append([w[n].clone() for n in sorted(w.names)])
    same(*results)
