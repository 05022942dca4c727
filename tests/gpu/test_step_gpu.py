"""The step on a GPU: right, silent (no host synchronisation), without new memory after the second step, capturable,
repeatable."""

from __future__ import annotations

import pytest
import torch
from plain_model import kd_loss
from tiny import batch, geometry, targets

from cortiq_kernels.model.compact import compact
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes.heal_loop import F16_LOSS_SCALE
from cortiq_kernels.step import Micro, Trainer
from cortiq_kernels.step.loss import Targets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make(dtype, train="all", case=None, loss_scale=1.0):
    g = geometry(**(case or dict(layers="LLF", hidden=64, ffn=96, vocab=257, hd=32, dk=16, dv=16)))
    w = Weights.random(g, seed=1, dtype=dtype, device=torch.device("cuda"), train=train)
    b = batch([[100, 1, 27], [128], [3, 64, 61]], 130, g.vocab).to("cuda")
    t = Targets(*targets(b, g.vocab, 7)).to(torch.device("cuda"))
    return g, w, b, t, Trainer(w, b.tokens.numel(), b.max_seqlen, loss_scale=loss_scale)


def errors(dtype):
    """Relative error of every gradient against float64 autograd from the same (rounded) weights."""
    # Float16 needs a loss scale for its small numbers. Below 4096 those of dt_bias, 1e-6 here, lose some in underflow
    # (1.4e-2 at 1024, 0.7e-2 from 4096 to 65536, NaN above), so the recipes start there, too.
    scale = F16_LOSS_SCALE if dtype == torch.float16 else 1.0
    g, w, b, t, trainer = make(dtype, loss_scale=scale)
    p = {n: w[n].detach().double().cpu().requires_grad_() for n in w.names}
    cpu = b.to("cpu")
    loss = kd_loss(p, g, cpu, t.ids.cpu(), t.probs.cpu())
    loss.backward()
    want = float(loss.detach())
    got = trainer.gradients([Micro(b, t)])
    errs = {n: ((w.grad(n).double().cpu() / scale - p[n].grad).norm() / p[n].grad.norm()).item() for n in w.names}
    return abs(float(got) - want) / want, errs


@pytest.mark.parametrize(
    "dtype,bound", [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 6e-2)]
)
def test_gradients(dtype, bound):
    loss_err, errs = errors(dtype)
    assert loss_err < bound, loss_err
    worst = max(errs, key=errs.get)
    assert errs[worst] < bound, (worst, errs[worst])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_hidden_synchronisation_and_no_new_memory(dtype):
    _, w, b, t, trainer = make(dtype)
    for _ in range(2):
        trainer.step([Micro(b, t)], 1e-4)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            trainer.step([Micro(b, t)], 1e-4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == reserved
    assert trainer.read().steps == 5


def test_two_runs_are_bitwise_equal():
    grads = []
    for _ in range(2):
        _, w, b, t, trainer = make(torch.bfloat16)
        trainer.gradients([Micro(b, t)])
        grads.append(w.trained.grad.clone())
    assert torch.equal(grads[0], grads[1])


def test_gradients_replay_as_a_cuda_graph():
    """In a graph of the caller's own."""
    _, w, b, t, _ = make(torch.bfloat16)
    trainer = Trainer(w, b.tokens.numel(), b.max_seqlen, graph=False)
    micro = Micro(b, t)
    want = trainer.gradients([micro]).clone(), w.trained.grad.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        trainer.gradients([micro])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = trainer.gradients([micro])
    for name in w.names:
        w.grad(name).fill_(float("nan"))
    graph.replay()
    assert torch.equal(loss, want[0])
    assert torch.equal(w.trained.grad, want[1])


def test_planted_inf_leaves_every_byte_float16():
    _, w, b, t, trainer = make(torch.float16, loss_scale=4096.0)
    trainer.step([Micro(b, t)], 1e-4)
    t.probs[0, 0] = float("inf")
    before = [x.clone() for x in (w.trained.master, w.trained.m, w.trained.v, w.trained.plane)]
    trainer.step([Micro(b, t)], 1e-4)
    stats = trainer.read()
    after = (w.trained.master, w.trained.m, w.trained.v, w.trained.plane)
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(before, after, strict=True))
    assert (stats.ok, stats.skipped, stats.scale) == (False, 1, 2048.0)


def test_a_cut_model_in_float16_trains():
    """Masters in float32 and a loss scale: the loss falls, and no step is refused."""
    g, w, b, t, _ = make(torch.float16, train="layers")
    gen = torch.Generator().manual_seed(3)
    masks = {i: torch.rand(f, generator=gen) < 0.5 for i, f in enumerate(g.intermediate)}
    cut = compact(w, masks, train="layers")
    assert max(cut.weights.geometry.intermediate) < 96
    trainer = Trainer(cut.weights, b.tokens.numel(), b.max_seqlen, masks=cut.masks, loss_scale=F16_LOSS_SCALE)
    losses = []
    for _ in range(20):
        trainer.step([Micro(b, t)], 1e-3)
        losses.append(trainer.loss.clone())
    stats, losses = trainer.read(), [float(x) for x in losses]
    assert (stats.steps, stats.skipped) == (20, 0)
    assert losses[-1] < 0.9 * losses[0] and all(torch.isfinite(cut.weights[name]).all() for name in cut.weights.names)
