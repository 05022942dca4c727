"""The whole explicit step against float64 autograd through the plain model: the loss and every parameter's gradient."""

from __future__ import annotations

import pytest
import torch
from plain_model import kd_loss, packed_hidden
from tiny import batch, geometry, plain_config, targets

from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import Evaluator, Micro, Trainer
from cortiq_kernels.step.loss import Targets

CASES = {
    "gdn_and_attention": dict(layers="LLF"),
    "gva1": dict(layers="LF", nk=3, nv=3),
    "gva3_untied": dict(layers="LF", nk=1, nv=3, tied=False),
    "attention_only": dict(layers="FF", nq=2, nkv=2),
    "gdn_only_wide_values": dict(layers="LL", dk=4, dv=12),
    "odd_sizes": dict(layers="LF", hidden=27, ffn=35, vocab=53, nq=3, nkv=1, hd=24),
}


PLAIN = {
    "qwen3": plain_config("qwen3"),
    "qwen3_tied_odd": plain_config("qwen3", tied=True, hidden=27, ffn=35, nq=3, nkv=1, head_dim=10),
    "qwen2": plain_config("qwen2", nq=4, nkv=4),
    "llama": plain_config("llama", nkv=1),
}


def setup(case: str, train: str = "all", train_from: int = 0, dtype=torch.float64):
    g = Geometry.from_config(PLAIN[case]) if case in PLAIN else geometry(**CASES[case])
    w = Weights.random(g, seed=1, dtype=dtype, device=torch.device("cpu"), train=train, train_from=train_from)
    gen = torch.Generator().manual_seed(2)
    for name in w.names:  # away from the init, where norms are 0 or 1 and gradients could vanish by luck
        w[name].add_(torch.randn(w[name].shape, generator=gen, dtype=w[name].dtype) * 0.1)
    b = batch([[9, 1, 17], [70], [3, 5]], 70, g.vocab)
    ids, probs = targets(b, g.vocab, 5)
    return g, w, b, Targets(ids, probs)


def oracle(g, w: Weights, b, t: Targets):
    p = {name: w[name].detach().clone().double().requires_grad_() for name in w.names}
    loss = kd_loss(p, g, b, t.ids, t.probs)
    loss.backward()
    return float(loss.detach()), p


@pytest.mark.parametrize("case", [*CASES, *PLAIN])
def test_every_gradient(case):
    g, w, b, t = setup(case)
    trainer = Trainer(w, b.tokens.numel(), b.max_seqlen)
    loss = trainer.gradients([Micro(b, t)])
    want, p = oracle(g, w, b, t)
    assert abs(float(loss) - want) <= 1e-10 * abs(want)
    for name, leaf in p.items():
        got = w.grad(name)
        assert got is not None, name
        scale = leaf.grad.abs().max()
        assert scale > 0, f"{name}: the oracle's gradient is zero, this case tests nothing"
        assert (got - leaf.grad).abs().max() <= 1e-8 * scale, name


def test_float32_is_close_to_float64():
    g, w, b, t = setup("gdn_and_attention", dtype=torch.float32)
    trainer = Trainer(w, b.tokens.numel(), b.max_seqlen)
    trainer.gradients([Micro(b, t)])
    _, p = oracle(g, w, b, t)
    for name, leaf in p.items():
        assert (w.grad(name) - leaf.grad).norm() <= 2e-4 * leaf.grad.norm(), name


def test_micro_batches_weigh_their_rows():
    """Loss and gradient of a step are sums over rows / sum of weights, however the windows are grouped (modelled on a
    report where micro-batches counted equally)."""
    g, w, b, t = setup("gdn_and_attention")
    one, many = batch([[2]], 70, g.vocab, seed=3, scored=1.0), batch([[70], [69]], 70, g.vocab, seed=4)
    t1, t2 = Targets(*targets(one, g.vocab, 3)), Targets(*targets(many, g.vocab, 3))
    want: dict[str, torch.Tensor] = {}
    total = 0.0
    for b_, t_ in ((one, t1), (many, t2)):
        loss, p = oracle(g, w, b_, t_)
        total += loss * b_.weight_sum
        for name, leaf in p.items():
            want[name] = want.get(name, 0) + leaf.grad * b_.weight_sum
    weight_sum = one.weight_sum + many.weight_sum
    trainer = {n: Trainer(w, n, 70) for n in (70, 140)}
    # Different batch sizes need their own buffers; gradients accumulate in the same store.
    loss = accumulate(w, [(trainer[70], one, t1), (trainer[140], many, t2)], weight_sum)
    assert abs(loss - total / weight_sum) < 1e-10
    for name, g_want in want.items():
        assert (w.grad(name) - g_want / weight_sum).abs().max() <= 1e-8 * g_want.abs().max(), name


def accumulate(w, parts, weight_sum):
    from cortiq_kernels.step.backward import backward, embed_backward
    from cortiq_kernels.step.forward import embed, forward
    from cortiq_kernels.step.loss import head_loss

    total = 0.0
    for j, (tr, b, t) in enumerate(parts):
        seqs = tr.sequences(b)
        forward(w, tr.buffers, embed(w, tr.buffers, b.tokens), seqs)
        total += float(head_loss(w, tr.buffers, b, t, grad_scale=1 / weight_sum, accumulate=j > 0))
        dx = backward(w, tr.buffers, tr.buffers.dhidden, seqs, stop=0, accumulate=j > 0)
        embed_backward(w, dx, b.tokens, accumulate=j > 0)
    return total / weight_sum


@pytest.mark.parametrize("train,train_from", [("layers", 0), ("layers", 1), ("mlp", 0), ("mlp", 2)])
def test_what_does_not_train_has_no_gradient(train, train_from):
    g, w, b, t = setup("gdn_and_attention", train, train_from)
    trainer = Trainer(w, b.tokens.numel(), b.max_seqlen)
    trainer.gradients([Micro(b, t)])
    _, p = oracle(g, w, b, t)
    trained = set()
    for name, leaf in p.items():
        got = w.grad(name)
        if got is None:
            continue
        trained.add(name)
        assert (got - leaf.grad).abs().max() <= 1e-8 * leaf.grad.abs().max(), name
    mlp = {f"layers.{i}.{m}" for i in range(train_from, 3) for m in ("gate_up", "down")}
    if train == "mlp":
        assert trained == mlp
    else:
        assert trained == {n for n in p if n.startswith("layers.") and int(n.split(".")[1]) >= train_from}


def test_packed_records_equal_records_alone():
    g, w, b, t = setup("gdn_and_attention")
    hidden = Evaluator(w, b.tokens.numel(), b.max_seqlen).hidden(b).clone()
    cuts = b.cu_seqlens.tolist()
    for start, stop in zip(cuts, cuts[1:], strict=False):
        if stop == start:
            continue
        alone = batch([[stop - start]], stop - start, g.vocab)
        alone.tokens[:] = b.tokens[start:stop]
        got = Evaluator(w, stop - start, stop - start).hidden(alone)
        assert torch.allclose(got, hidden[start:stop], rtol=0, atol=1e-10), (start, stop)
    want = packed_hidden({n: w[n] for n in w.names}, g, b.tokens, b.cu_seqlens)
    assert torch.allclose(hidden, want, rtol=0, atol=1e-9)


def test_two_runs_are_bitwise_equal():
    g, w, b, t = setup("gdn_and_attention", dtype=torch.float32)
    grads = []
    for _ in range(2):
        w.trained.grad.fill_(float("nan"))
        Trainer(w, b.tokens.numel(), b.max_seqlen).gradients([Micro(b, t)])
        grads.append({n: w.grad(n).clone() for n in w.names})
    assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])


def test_masked_neurons_and_their_gradient():
    g, w, b, t = setup("gdn_and_attention")
    gen = torch.Generator().manual_seed(5)
    masks = {i: torch.rand(g.intermediate[i], generator=gen, dtype=torch.float64) for i in range(g.n_layers)}
    masks[1][::2] = 0.0
    dmasks = {i: torch.full_like(m, float("nan")) for i, m in masks.items()}
    from cortiq_kernels.step.backward import backward
    from cortiq_kernels.step.forward import embed, forward
    from cortiq_kernels.step.loss import head_loss

    tr = Trainer(w, b.tokens.numel(), b.max_seqlen)
    seqs = tr.sequences(b)
    forward(w, tr.buffers, embed(w, tr.buffers, b.tokens), seqs, masks=masks)
    head_loss(w, tr.buffers, b, t, grad_scale=1 / b.weight_sum)
    backward(w, tr.buffers, tr.buffers.dhidden, seqs, stop=0, masks=masks, dmasks=dmasks)
    leaves = {i: m.clone().requires_grad_() for i, m in masks.items()}
    kd_loss({n: w[n] for n in w.names}, g, b, t.ids, t.probs, leaves).backward()
    for i, leaf in leaves.items():
        assert (dmasks[i] - leaf.grad).abs().max() <= 1e-8 * leaf.grad.abs().max()
    closed = torch.cat([masks[1] == 0, masks[1] == 0])
    assert w.grad("layers.1.gate_up")[closed].abs().max() == 0
    assert w.grad("layers.1.down")[:, masks[1] == 0].abs().max() == 0
