"""Products beside the chain on a GPU: with and without them, replayed and plain, the same bits."""

from __future__ import annotations

import pytest
import torch
from ops_close import bits
from tiny import batch, geometry, targets

from cortiq_kernels import backend
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import POLICIES, Micro, Trainer
from cortiq_kernels.step.loss import Targets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA, WINDOW = torch.device("cuda"), 1024


def run(case, train, policy, *, graph, beside):
    """Bits after every step. Products of some ten microseconds and scans that leave most of the GPU idle, so that work
    beside the chain does run while the chain goes on."""
    g = geometry("LLFL", hidden=512, ffn=1536, vocab=1031, nq=4, nkv=2, hd=128, nk=4, nv=8, dk=128, dv=128, **case)
    w = Weights.random(g, seed=1, dtype=torch.bfloat16, device=CUDA, train=train)
    t = Trainer(w, 2 * WINDOW, WINDOW, policy=policy, graph=graph)
    if not beside:
        t.buffers.lane = backend.SideLane(torch.device("cpu"))  # runs at once, on the stream of the chain
    found = []
    for i in range(5):
        micros = []
        for j in range(1 + i % 2):
            b = batch([[WINDOW], [300, 1, 700]], WINDOW, g.vocab, seed=j)
            micros.append(Micro(b.to(CUDA), Targets(*targets(b, g.vocab, 8, seed=j)).to(CUDA)))
        t.step(micros, 1e-3)
        found.append(bits(w.trained.grad, w.trained.master, w.trained.plane, t.loss))
    assert graph == (not t.programs.reason)
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("case", "train"), [({}, "layers"), (dict(num_loops=2, norm_between_loops=True), "all"), ({}, "mlp")]
)
def test_the_same_bits_with_and_without(case, train, policy):
    with backend.deterministic(True):
        want = run(case, train, policy, graph=False, beside=False)
        for graph in (True, False):
            assert run(case, train, policy, graph=graph, beside=True) == want
