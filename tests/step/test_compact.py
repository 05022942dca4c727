"""Compacted hard masks: losses, gradients and whole steps are those of the dense model under the masks, in float64."""

from __future__ import annotations

import pytest
import torch
from plain_model import kd_loss
from tiny import batch, geometry, targets

from cortiq_kernels.model.compact import compact
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import Evaluator, Micro, Trainer
from cortiq_kernels.step.loss import Targets

CASES = {
    "aligned": (geometry("LLF"), 16),
    "exact": (geometry("LF", hidden=27, ffn=35, vocab=53, nq=3, nkv=1, hd=24), 1),
    "looped": (geometry("LF", num_loops=2), 4),
}


def world(case: str, train: str = "layers", train_from: int = 0):
    g, align = CASES[case]
    w = Weights.random(g, seed=1, dtype=torch.float64, train=train, train_from=train_from, std=0.1, vector_noise=0.1)
    b = batch([[9, 1, 17], [40], [3, 5]], 40, g.vocab)
    gen = torch.Generator().manual_seed(3)
    masks = {}
    for i in range(g.n_virtual):
        f = g.intermediate[g.physical(i)]
        masks[i] = torch.rand(f, generator=gen) < (0.2, 0.5)[i % 2]
    masks[0][:] = False
    masks[0][[1, f - 1]] = True  # few enough to be carried with closed ones
    return w, masks, align, Micro(b, Targets(*targets(b, g.vocab, 5)))


def as_gates(masks):
    return {i: m.double() for i, m in masks.items()}


def gone(c, g, name):
    """(dimension, index) of the neurons that `c` does not carry, in a dense tensor; None for tensors without any."""
    kind, layer = name.rsplit(".", 1)[-1], int(name.split(".")[1]) if "layers" in name else -1
    if kind not in ("gate_up", "down"):
        return None
    rest = torch.ones(g.intermediate[layer], dtype=torch.bool)
    rest[c.keep[layer].cpu()] = False
    index = rest.nonzero().flatten()
    return (1, index) if kind == "down" else (0, torch.cat([index, index + g.intermediate[layer]]))


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_dense_ones(case):
    w, masks, align, micro = world(case)
    g, b = w.geometry, micro.batch
    c = compact(w, masks, align=align, train="layers")
    assert sum(c.weights.geometry.intermediate) < 0.8 * sum(g.intermediate)
    assert bool(c.masks) == (case != "exact")
    n, t = b.tokens.numel(), b.max_seqlen
    dense = Trainer(w, n, t, masks=as_gates(masks))
    narrow = Trainer(c.weights, n, t, masks=c.masks)
    want, got = dense.gradients([micro]), narrow.gradients([micro])
    assert abs(float(got - want)) <= 1e-12 * abs(float(want))
    reference = {name: w[name] for name in w.names}
    plain = kd_loss(reference, g, b, micro.targets.ids, micro.targets.probs, as_gates(masks))
    assert abs(float(got - plain)) <= 1e-10 * abs(float(plain))
    expected = {name: w.grad(name).clone() for name in w.trained.names}
    w.trained.grad.fill_(float("nan"))
    c.write_back(w)
    for name, grad in expected.items():
        assert (w.grad(name) - grad).abs().max() <= 1e-10 * grad.abs().max(), name
        if (place := gone(c, g, name)) is not None:
            assert (grad.index_select(*place) == 0).all() and (w.grad(name).index_select(*place) == 0).all(), name


@pytest.mark.parametrize("case", ["aligned", "exact"])
def test_identities_of_the_gates_gradient(case):
    """Per neuron: Σ Wd·dWd = Σ Wu·dWu = m·dm, whose m is 1 here, and 0 in closed neurons that are carried along."""
    from cortiq_kernels.step.train import mean_loss_and_gradients

    w, masks, align, micro = world(case)
    c = compact(w, masks, align=align, train="mlp")
    v, g = c.weights, c.weights.geometry
    trainer = Trainer(v, micro.batch.tokens.numel(), micro.batch.max_seqlen, masks=c.masks)
    dmasks = {i: torch.full((f,), float("nan"), dtype=torch.float64) for i, f in enumerate(g.intermediate)}
    mean_loss_and_gradients(
        v, trainer.buffers, [micro], trainer.rope, trainer.state.scale, stop=0, masks=c.masks, dmasks=dmasks
    )
    for i, f in enumerate(g.intermediate):
        product = dmasks[i] * c.masks.get(i, torch.ones(f, dtype=torch.float64))
        down, up = f"layers.{i}.down", f"layers.{i}.gate_up"
        from_down, from_up = (v[down] * v.grad(down)).sum(0), (v[up] * v.grad(up)).sum(1)[f:]
        size = product.abs().max()
        assert (from_down - product).abs().max() <= 1e-12 * size and (from_up - product).abs().max() <= 1e-12 * size


def test_steps_and_evaluations_are_the_dense_ones():
    """Five steps of Adam: the closed neurons' weights and moments stay exactly where they were, those of the others
    are where a dense run takes them."""
    dense_w, masks, align, micro = world("aligned", "mlp", 1)
    w = world("aligned", "mlp", 1)[0]
    g, b = w.geometry, micro.batch
    n, t = b.tokens.numel(), b.max_seqlen
    c = compact(w, masks, align=align, train="mlp", train_from=1)
    before = {name: w[name].clone() for name in w.names}
    dense = Trainer(dense_w, n, t, masks=as_gates(masks))
    narrow = Trainer(c.weights, n, t, masks=c.masks)
    for _ in range(5):
        dense.step([micro], 1e-3)
        narrow.step([micro], 1e-3)
    c.write_back(w)
    for name in w.trained.names:
        a, b_ = w[name], dense_w[name]
        assert (a - b_).abs().max() <= 1e-9 * b_.abs().max(), name
        rest = gone(c, g, name)
        assert torch.equal(a.index_select(*rest), before[name].index_select(*rest))
        span = w.trained.spans[name]
        for flat in (w.trained.m, w.trained.v):
            moments = flat[span.start : span.stop].view(span.shape)
            assert (moments.index_select(*rest) == 0).all() and moments.abs().max() > 0
    losses = [
        Evaluator(who, n, t, masks=m).loss([micro])
        for who, m in ((w, as_gates(masks)), (c.weights, c.masks), (dense_w, as_gates(masks)))
    ]
    assert abs(losses[0] - losses[1]) <= 1e-12 * losses[0] and abs(losses[0] - losses[2]) <= 1e-9 * losses[0]
    assert Evaluator(w, n, t).loss([micro]) != losses[0]


@pytest.mark.gpu
def test_in_bf16_on_a_gpu_no_worse_than_the_dense_one():
    """Against the dense model in float64 from the same rounded weights: the two differ by the order of sums alone."""
    g = geometry("LF", hidden=128, ffn=512)
    w = Weights.random(g, seed=1, dtype=torch.bfloat16, device="cuda", train="mlp", std=0.1)
    exact = Weights(g, dtype=torch.float64, train="mlp")
    for name in w.names:
        exact.assign(name, w[name].double().cpu())
    gen = torch.Generator().manual_seed(3)
    masks = {i: torch.rand(512, generator=gen) < 0.4 for i in range(2)}
    b = batch([[64], [30, 34]], 64, g.vocab)
    micro = Micro(b, Targets(*targets(b, g.vocab, 5)))
    there = Micro(b.to(w.device), Targets(micro.targets.ids.cuda(), micro.targets.probs.cuda()))
    Trainer(exact, 128, 64, masks=as_gates(masks)).gradients([micro])
    Trainer(w, 128, 64, masks={i: m.cuda().float() for i, m in masks.items()}).gradients([there])
    dense = {name: w.grad(name).double().cpu() for name in w.trained.names}
    c = compact(w, masks, train="mlp")
    assert max(c.weights.geometry.intermediate) < 300
    Trainer(c.weights, 128, 64, masks=c.masks).gradients([there])
    c.write_back(w)
    for name, eager in dense.items():
        want, got = exact.grad(name), w.grad(name).double().cpu()
        err, base = ((x - want).norm() / want.norm() for x in (got, eager))
        assert err <= 2 * base + 1e-3, (name, err, base)
        assert (got.index_select(*gone(c, g, name)) == 0).all()
