"""On a GPU, too, what a layer keeps for its backward changes no bit, and asks for no memory after the second step."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, geometry, targets

from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import POLICIES, Micro, Trainer
from cortiq_kernels.step.loss import Targets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make(dtype, policy, train):
    """Heads of the sizes that published models have: launches differ by size, and with them the order of sums."""
    g = geometry("LLFL", hidden=256, ffn=512, vocab=257, nq=4, nkv=2, hd=128, nk=2, nv=4, dk=128, dv=128)
    w = Weights.random(g, seed=1, dtype=dtype, device="cuda", train=train)
    b = batch([[100, 1, 155], [256], [3, 64, 61]], 256, g.vocab).to("cuda")
    t = Targets(*targets(b, g.vocab, 7)).to(torch.device("cuda"))
    return w, Micro(b, t), Trainer(w, b.tokens.numel(), b.max_seqlen, policy=policy)


@pytest.mark.parametrize("train", ["all", "mlp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits(dtype, train):
    found = []
    for policy in POLICIES:
        w, micro, trainer = make(dtype, policy, train)
        trainer.gradients([micro])
        grad = w.trained.grad.clone()
        for _ in range(3):
            trainer.step([micro], 1e-3)
        found.append((grad, trainer.loss.clone(), w.trained.master.clone()))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(other, found[0], strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_no_new_memory(policy):
    _, micro, trainer = make(torch.bfloat16, policy, "layers")
    for _ in range(2):
        trainer.step([micro], 1e-4)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    for _ in range(3):
        trainer.step([micro], 1e-4)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == reserved
