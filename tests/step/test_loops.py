"""Looped stacks: a stack that runs several times is the deeper model with the same weights in every pass."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from plain_model import kd_loss
from tiny import batch, geometry, plain_config, targets

from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.layout import plan_layout
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import Evaluator, Micro, Trainer
from cortiq_kernels.step.backward import backward
from cortiq_kernels.step.forward import embed, forward
from cortiq_kernels.step.loss import Targets, head_loss
from cortiq_kernels.step.memory import train_bytes

LOOPED = {
    "hybrid": geometry("LF", num_loops=2),
    "hybrid, three passes, a norm between": geometry("LF", num_loops=3, norm_between_loops=True, tied=False),
    "plain, a norm between": Geometry.from_config(plain_config("qwen2", num_loops=2, norm_between_loops=True)),
    "one layer, many passes": Geometry.from_config(plain_config("llama", 1, num_loops=4)),
}
LOOPED["widths that differ"] = LOOPED["hybrid"].with_widths([48, 24])


def weights(g: Geometry, train: str | None = "all", train_from: int = 0, dtype=torch.float64) -> Weights:
    w = Weights.random(g, seed=1, dtype=dtype, train=train, train_from=train_from)
    gen = torch.Generator().manual_seed(2)
    for name in w.names:
        w[name].add_(torch.randn(w[name].shape, generator=gen, dtype=torch.float64).to(w[name].dtype) * 0.1)
    return w


def unrolled(w: Weights, train: str | None = "all") -> Weights:
    """The ordinary model of L * num_loops layers with the weights of every visit."""
    g = w.geometry
    n = g.num_loops
    deep = dataclasses.replace(g, layer_types=g.layer_types * n, intermediate=g.intermediate * n, num_loops=1)
    out = Weights(deep, dtype=w.dtype, train=train)
    for name in out.names:
        out.assign(name, w[physical_name(name, g)])
    return out


def physical_name(name: str, g: Geometry) -> str:
    if not name.startswith("layers."):
        return name
    _, i, rest = name.split(".", 2)
    return f"layers.{int(i) % g.n_layers}.{rest}"


def world(g: Geometry):
    b = batch([[9, 1, 17], [40], [3, 5]], 40, g.vocab)
    return b, Targets(*targets(b, g.vocab, 5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["hybrid", "one layer, many passes", "widths that differ"])
def test_equals_the_same_weights_unrolled(case, dtype):
    """Loss and hidden states bit for bit; a weight's gradient is the sum over its visits."""
    g = LOOPED[case]
    w = weights(g, dtype=dtype)
    deep = unrolled(w)
    b, t = world(g)
    n = b.tokens.numel()
    hidden = Evaluator(w, n, b.max_seqlen).hidden(b).clone()
    assert torch.equal(hidden, Evaluator(deep, n, b.max_seqlen).hidden(b))
    w.trained.grad.fill_(float("nan"))
    losses = [float(Trainer(x, n, b.max_seqlen).gradients([Micro(b, t)])) for x in (w, deep)]
    assert losses[0] == losses[1]
    want: dict[str, torch.Tensor] = {}
    for name in deep.names:
        key = physical_name(name, g)
        want[key] = want.get(key, 0) + deep.grad(name)
    for name, total in want.items():
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        assert (w.grad(name) - total).abs().max() <= tolerance * total.abs().max(), name


@pytest.mark.parametrize("case", LOOPED)
def test_every_gradient(case):
    """Against float64 autograd of the plain model, with the norm between passes; micro-batches add up."""
    g = LOOPED[case]
    w = weights(g)
    b, t = world(g)
    trainer = Trainer(w, b.tokens.numel(), b.max_seqlen)
    w.trained.grad.fill_(float("nan"))
    loss = trainer.gradients([Micro(b, t), Micro(b, t)])
    p = {name: w[name].detach().clone().requires_grad_() for name in w.names}
    want = kd_loss(p, g, b, t.ids, t.probs)
    want.backward()
    assert abs(float(loss) - float(want.detach())) <= 1e-10 * abs(float(want.detach()))
    for name, leaf in p.items():
        assert (w.grad(name) - leaf.grad).abs().max() <= 1e-8 * leaf.grad.abs().max(), name


@pytest.mark.parametrize(("train", "train_from"), [("layers", 1), ("mlp", 0), ("mlp", 1)])
def test_what_is_frozen_passes_the_gradient_on(train, train_from):
    """A frozen layer's later visits lie between a trained layer's visits and the loss."""
    g = LOOPED["hybrid, three passes, a norm between"]
    w = weights(g, train, train_from)
    b, t = world(g)
    Trainer(w, b.tokens.numel(), b.max_seqlen).gradients([Micro(b, t)])
    p = {name: w[name].detach().clone().requires_grad_() for name in w.names}
    kd_loss(p, g, b, t.ids, t.probs).backward()
    assert w.trained.names
    for name in w.trained.names:
        leaf = p[name]
        assert (w.grad(name) - leaf.grad).abs().max() <= 1e-8 * leaf.grad.abs().max(), name


def test_masks_belong_to_a_visit():
    g = LOOPED["hybrid"]
    w = weights(g, None)
    b, t = world(g)
    gen = torch.Generator().manual_seed(5)
    masks = {i: torch.rand(g.intermediate[g.physical(i)], generator=gen, dtype=torch.float64) for i in range(4)}
    trainer = Trainer(weights(g), b.tokens.numel(), b.max_seqlen)
    w, buf, seqs = trainer.weights, trainer.buffers, trainer.sequences(b)
    dmasks = {i: torch.full_like(m, float("nan")) for i, m in masks.items()}
    for again in (False, True):
        forward(w, buf, embed(w, buf, b.tokens), seqs, masks=masks)
        head_loss(w, buf, b, t, grad_scale=1 / b.weight_sum, accumulate=again)
        backward(w, buf, buf.dhidden, seqs, stop=0, accumulate=again, masks=masks, dmasks=dmasks)
    leaves = {i: m.clone().requires_grad_() for i, m in masks.items()}
    kd_loss({n: w[n] for n in w.names}, g, b, t.ids, t.probs, leaves).backward()
    for i, leaf in leaves.items():
        assert (dmasks[i] - 2 * leaf.grad).abs().max() <= 1e-8 * leaf.grad.abs().max(), i


@pytest.mark.parametrize("norm", [False, True])
def test_one_pass_is_the_ordinary_model_bit_for_bit(norm):
    once, ordinary = geometry("LLF", num_loops=1, norm_between_loops=norm), geometry("LLF")
    b, t = world(ordinary)
    seen = []
    for g in (once, ordinary):
        w = weights(g, dtype=torch.float32)
        loss = Trainer(w, b.tokens.numel(), b.max_seqlen).gradients([Micro(b, t)])
        seen.append((loss.clone(), w.trained.grad.clone(), Evaluator(w, 120, b.max_seqlen).hidden(b).clone()))
    assert all(torch.equal(x, y) for x, y in zip(*seen, strict=True))


def test_memory_of_every_visit_is_counted():
    g = LOOPED["hybrid, three passes, a norm between"]
    w = weights(g, "layers", dtype=torch.float32)
    b, t = world(g)
    n = b.tokens.numel()
    trainer = Trainer(w, n, b.max_seqlen)
    trainer.gradients([Micro(b, t)])
    keys = {"first": 0, "train_from": 0, "trained": w.layout.trained_numel}
    said = train_bytes(g, n, b.max_seqlen, b.n_scored, torch.float32, "cpu", **keys)
    assert said.buffers == trainer.buffers.nbytes
    deep = dataclasses.replace(g, layer_types=g.layer_types * 3, intermediate=g.intermediate * 3, num_loops=1)
    flat = train_bytes(deep, n, b.max_seqlen, b.n_scored, torch.float32, "cpu", **keys)
    # two norms between passes: what each read, one output that they share, and rstd of each
    assert said.buffers - flat.buffers == 3 * n * g.hidden * 4 and said.saved - flat.saved == 2 * n * 4
    assert len(trainer.buffers.loop_norms) == 2


def test_a_looped_stack_is_held_whole():
    with pytest.raises(ValueError, match="first_layer: got 1 in a stack of 2 passes; expected 0"):
        plan_layout(LOOPED["hybrid"], first_layer=1)
