"""What a layer keeps for its backward changes memory and time, and no bit of a result."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from plain_model import kd_loss
from tiny import batch, geometry, plain_config, targets

from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import POLICIES, Buffers, Evaluator, GateTrainer, Micro, Trainer
from cortiq_kernels.step import backward as backward_module
from cortiq_kernels.step.backward import backward
from cortiq_kernels.step.forward import embed, forward
from cortiq_kernels.step.gates import by_layer
from cortiq_kernels.step.loss import Targets, head_loss

WINDOW = 40
CASES = {
    "hybrid": geometry("LLFL", nk=1, nv=3, tied=False),
    "widths that differ": geometry("LFL").with_widths([48, 24, 60]),
    "plain": Geometry.from_config(plain_config("qwen2", 3)),
    "looped": geometry("LF", num_loops=3, norm_between_loops=True),
}
TRAINS = [("all", 0, 0), ("layers", 1, 0), ("layers", 1, 1), ("mlp", 1, 0), ("mlp", 1, 1)]


def world(g: Geometry, seed: int = 0) -> Micro:
    b = batch([[9, 1, 17], [40], [3, 5]], WINDOW, g.vocab, seed=seed)
    return Micro(b, Targets(*targets(b, g.vocab, 5, seed=seed)))


def weights(g: Geometry, train: str | None, train_from: int = 0, first: int = 0, dtype=torch.float32) -> Weights:
    return Weights.random(
        g, seed=1, dtype=dtype, train=train, train_from=train_from, first_layer=first, std=0.1, vector_noise=0.1
    )


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) and not x.isnan().any() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("train", "train_from", "first"), TRAINS)
@pytest.mark.parametrize(("case", "dtype"), [*((c, torch.float32) for c in CASES), ("hybrid", torch.bfloat16)])
def test_the_same_bits(case, dtype, train, train_from, first):
    """Two steps of two micro-batches, an evaluation on the same buffers between them."""
    g, found = CASES[case], []
    if first and g.num_loops > 1:
        pytest.skip("a looped stack is held whole")
    micros = [world(g), world(g, 3)]
    if first:
        gen = torch.Generator().manual_seed(4)
        micros = [m._replace(x=torch.randn(3 * WINDOW, g.hidden, generator=gen).to(dtype)) for m in micros]
    for policy in POLICIES:
        w = weights(g, train, train_from, first, dtype)
        trainer = Trainer(w, 3 * WINDOW, WINDOW, policy=policy)
        seen = []
        for _ in range(2):
            w.trained.grad.fill_(float("nan"))
            trainer.step(micros, 1e-2)
            seen += [trainer.loss.clone(), *(w.grad(n).clone() for n in w.trained.names)]
            seen.append(Evaluator(w, 3 * WINDOW, WINDOW, trainer.buffers).hidden(*micros[0][::2]).clone())
        found.append([*seen, w.trained.master.clone()])
    assert same(found[0], found[1]) and same(found[0], found[2])


@pytest.mark.parametrize("backward_of", ["full", "ffn"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_of_gates(case, backward_of):
    g, found = CASES[case], []
    for policy in POLICIES:
        trainer = GateTrainer(weights(g, None), 3 * WINDOW, WINDOW, gradient=backward_of, policy=policy)
        trainer.step([world(g), world(g, 3)], 1.0)
        first = trainer.grad.clone()
        trainer.step([world(g, 3)], 1.0)
        found.append([first, trainer.grad.clone(), trainer.logits.clone(), trainer.loss.clone()])
    assert same(found[0], found[1]) and same(found[0], found[2])


@pytest.mark.parametrize("policy", ["keep", "layer"])
@pytest.mark.parametrize("case", CASES)
def test_every_gradient_against_autograd(case, policy):
    """Of weights and of gates, in float64; the step's own default has these tests elsewhere."""
    g = CASES[case]
    w, (b, t, _) = weights(g, "all", dtype=torch.float64), world(g)
    gen = torch.Generator().manual_seed(5)
    widths = [g.intermediate[g.physical(i)] for i in range(g.n_virtual)]
    masks = by_layer(torch.rand(sum(widths), generator=gen, dtype=torch.float64), g)
    dmasks = {i: torch.full_like(m, float("nan")) for i, m in masks.items()}
    trainer = Trainer(w, 3 * WINDOW, WINDOW, policy=policy)
    buf, seqs = trainer.buffers, trainer.sequences(b)
    w.trained.grad.fill_(float("nan"))
    forward(w, buf, embed(w, buf, b.tokens), seqs, masks=masks)
    head_loss(w, buf, b, t, grad_scale=1 / b.weight_sum)
    dx = backward(w, buf, buf.dhidden, seqs, stop=0, masks=masks, dmasks=dmasks)
    backward_module.embed_backward(w, dx, b.tokens, accumulate=False)
    p = {name: w[name].detach().clone().requires_grad_() for name in w.names}
    leaves = {i: m.clone().requires_grad_() for i, m in masks.items()}
    kd_loss(p, g, b, t.ids, t.probs, leaves).backward()
    pairs = [(w.grad(name), leaf.grad) for name, leaf in p.items()]
    pairs += [(dmasks[i], leaf.grad) for i, leaf in leaves.items()]
    for got, want in pairs:
        assert want.abs().max() > 0 and (got - want).abs().max() <= 1e-8 * want.abs().max()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_made_again(policy):
    """With NaN in slots after the forward: what the backward makes again loses it, what it reads as kept does not."""
    g, streams = CASES["hybrid"], ("x_mix", "n_mix", "proj", "mix", "x_mlp", "n_mlp", "gate_up")
    w, (b, t, _) = weights(g, "layers"), world(g)
    trainer = Trainer(w, 3 * WINDOW, WINDOW, policy=policy)
    buf, seqs = trainer.buffers, trainer.sequences(b)
    for i in range(g.n_layers):
        mix = set() if g.is_full(i) and policy != "layer" else {"mix"}
        assert buf.kept[i].again == mix | ({"n_mix", "n_mlp"} if policy == "cheap" else set())
    spoiled = {"keep": ("n_mix", "n_mlp"), "cheap": ("n_mix", "n_mlp"), "layer": streams[1:]}[policy]
    forward(w, buf, embed(w, buf, b.tokens), seqs)
    head_loss(w, buf, b, t, grad_scale=1 / b.weight_sum)
    for s in buf.kept.values():
        for name in spoiled:
            getattr(s, name).fill_(float("nan"))
        if "mix" in s.again:
            s.mix.fill_(float("nan"))
    backward(w, buf, buf.dhidden, seqs, stop=0)
    bad = {n.rsplit(".", 1)[1] for n in w.trained.names if w.grad(n).isnan().any()}
    assert bad == ({"gate_up", "in_proj", "qkv_proj"} if policy == "keep" else set())


def test_each_keeps_less_than_the_one_before():
    g = dataclasses.replace(CASES["hybrid"], layer_types=CASES["hybrid"].layer_types * 3, intermediate=(48,) * 12)
    for train, start in (("layers", 0), ("mlp", 0), (None, 0), (None, 99)):
        sizes = [
            Buffers(g, 80, torch.float32, torch.device("cpu"), save_from=0, mixers_from=start, policy=p, train=train)
            for p in POLICIES
        ]
        keep, cheap, layer = (b.nbytes for b in sizes)
        assert layer < cheap <= keep and (cheap < keep) == (train is not None)
        stream = 80 * g.hidden * 4
        assert all(layer == b.nbytes for b in sizes[2:]) and len(sizes[2].kept) * stream < layer


def test_the_mixers_of_a_layer_are_let_go(monkeypatch):
    """At most one layer's is held at a time with policy "layer"."""
    g, held = CASES["hybrid"], []
    trainer = Trainer(weights(g, "layers"), 3 * WINDOW, WINDOW, policy="layer")
    made = backward_module.layer_backward

    def watched(*args, **more):
        held.append([i for i, s in trainer.buffers.kept.items() if s.mixer is not None])
        made(*args, **more)

    monkeypatch.setattr(backward_module, "layer_backward", watched)
    trainer.gradients([world(g)])
    assert held == [[3], [2], [1], [0]] and all(s.mixer is None for s in trainer.buffers.kept.values())


def test_another_policy_is_refused():
    with pytest.raises(ValueError, match=r"policy: got 'some'; expected keep \| cheap \| layer"):
        Buffers(CASES["hybrid"], 80, torch.float32, torch.device("cpu"), save_from=0, policy="some")


@pytest.mark.parametrize("policy", POLICIES)
def test_the_set_of_an_evaluation_is_lent_by_the_last_layer_that_keeps_its_own(policy):
    g = geometry("LLF")
    buf = Buffers(g, 8, torch.float32, torch.device("cpu"), save_from=1, policy=policy)
    last, shared = buf.kept[2], buf.slots(0, save=True)
    lent = {"x_mix"} if policy == "layer" else {"x_mix", "x_mlp", "gate_up"}
    for name in ("x_mix", "x_mlp", "gate_up"):
        same = getattr(shared, name).data_ptr() == getattr(last, name).data_ptr()
        assert same == (name in lent or name not in buf.own(2)), name
    every = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for s in (buf._shared, *buf.kept.values())
             for t in vars(s).values() if isinstance(t, torch.Tensor)}  # fmt: skip
    every |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in vars(buf).values()
              if isinstance(t, torch.Tensor)}  # fmt: skip
    assert buf.nbytes == sum(every.values())
    assert all(t.device.type == "cpu" for s in (buf._shared, *buf.kept.values()) for t in vars(s).values()
               if isinstance(t, torch.Tensor))  # fmt: skip
