"""Gates: their gradient against float64 autograd and finite differences, both backwards, and hand-computed steps."""

from __future__ import annotations

import math

import pytest
import torch
from plain_model import attention, gdn, kd_loss, rms
from tiny import batch, geometry, targets

from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import Buffers, GateTrainer, Micro, Trainer
from cortiq_kernels.step.gates import by_layer, open_gates
from cortiq_kernels.step.loss import Targets
from cortiq_kernels.step.memory import train_bytes

CASES = {
    "gdn_and_attention": dict(layers="LLF"),
    "gva3_untied": dict(layers="LF", nk=1, nv=3, tied=False),
    "odd_sizes": dict(layers="LF", hidden=27, ffn=35, vocab=53, nq=3, nkv=1, hd=24),
}


def frozen(case: str, dtype=torch.float64, train=None):
    g = geometry(**CASES[case])
    w = Weights.random(g, seed=1, dtype=dtype, train=train, std=0.1, vector_noise=0.1)
    b = batch([[9, 1, 17], [70], [3, 5]], 70, g.vocab)
    return g, w, b, Targets(*targets(b, g.vocab, 5))


def trainer(w, b, seed=5, **more) -> GateTrainer:
    """With logits of all sizes."""
    tr = GateTrainer(w, b.tokens.numel(), b.max_seqlen, **more)
    gen = torch.Generator().manual_seed(seed)
    tr.logits.copy_(torch.randn(tr.logits.shape, generator=gen, dtype=torch.float64) * 2)
    return tr


def ffn_loss(p, g, b, t, masks, constants=None):
    """The plain model's loss with every mixer's output detached; or with given `constants` [sequence][layer] in its
    place. Returns the loss and those outputs."""
    cuts = [(s, e) for s, e in zip(b.cu_seqlens.tolist(), b.cu_seqlens.tolist()[1:], strict=False) if e > s]
    parts, seen = [], []
    for k, (start, stop) in enumerate(cuts):
        x, outputs = p["embed"][b.tokens[start:stop]], []
        for i, kind in enumerate(g.layer_types):
            at = f"layers.{i}."
            n = rms(x, g.eps) * (1 + p[at + "input_norm"])
            mixed = (gdn if kind == "linear_attention" else attention)(p, at, n, g).detach()
            mixed = mixed if constants is None else constants[k][i]
            outputs.append(mixed)
            x = x + mixed
            n = rms(x, g.eps) * (1 + p[at + "post_norm"])
            gate, up = (n @ p[at + "gate_up"].T).chunk(2, -1)
            x = x + (torch.nn.functional.silu(gate) * up * masks[i]) @ p[at + "down"].T
        parts.append(rms(x, g.eps) * (1 + p["final_norm"]))
        seen.append(outputs)
    h = torch.cat(parts)[b.row_index.long()]
    logq = torch.log_softmax(h @ (p["embed"] if g.tied else p["head"]).T, -1)
    target = torch.zeros_like(logq).scatter_add(1, t.ids.long(), t.probs.to(logq.dtype))
    kl = (torch.xlogy(target, target) - target * logq).sum(-1)
    return (b.row_weight.to(kl.dtype) * kl).sum() / b.weight_sum, seen


@pytest.mark.parametrize("backward", ["full", "ffn"])
@pytest.mark.parametrize("case", CASES)
def test_gradient_against_autograd(case, backward):
    g, w, b, t = frozen(case)
    tr = trainer(w, b, gradient=backward)
    loss = tr.gradients([Micro(b, t)], l1=3.0)
    p = {n: w[n] for n in w.names}
    leaf = tr.logits.clone().requires_grad_()
    masks = by_layer(torch.sigmoid(leaf), g)
    want = kd_loss(p, g, b, t.ids, t.probs, masks) if backward == "full" else ffn_loss(p, g, b, t, masks)[0]
    assert abs(float(loss) - float(want.detach())) <= 1e-10 * abs(float(want.detach()))
    (want + 3.0 * torch.sigmoid(leaf).mean()).backward()
    assert (tr.grad - leaf.grad).abs().max() <= 1e-8 * leaf.grad.abs().max()


def test_the_two_backwards_differ():
    g, w, b, t = frozen("gdn_and_attention")
    grads = []
    for backward in ("full", "ffn"):
        tr = trainer(w, b, gradient=backward)
        tr.gradients([Micro(b, t)], l1=0.0)
        grads.append(by_layer(tr.grad, g))
    assert torch.equal(grads[0][2], grads[1][2])  # there is no mixer above the last MLP
    assert (grads[0][0] - grads[1][0]).norm() > 1e-2 * grads[0][0].norm()


@pytest.mark.parametrize("backward", ["full", "ffn"])
def test_gradient_against_finite_differences(backward):
    g, w, b, t = frozen("gdn_and_attention")
    tr = trainer(w, b, gradient=backward)
    tr.gradients([Micro(b, t)], l1=0.0)
    grad, at = tr.grad.clone(), tr.logits.clone()
    p = {n: w[n] for n in w.names}
    constants = ffn_loss(p, g, b, t, by_layer(torch.sigmoid(at), g))[1]

    def loss(logits):
        masks = by_layer(torch.sigmoid(logits), g)
        if backward == "ffn":
            return float(ffn_loss(p, g, b, t, masks, constants)[0])
        return float(kd_loss(p, g, b, t.ids, t.probs, masks))

    gen = torch.Generator().manual_seed(6)
    for _ in range(2):
        way = torch.randn(at.shape, generator=gen, dtype=torch.float64)
        slope = (loss(at + 1e-5 * way) - loss(at - 1e-5 * way)) / 2e-5
        assert slope == pytest.approx(float(grad @ way), rel=1e-6)


def test_micro_batches_weigh_their_rows():
    g, w, b, t = frozen("gdn_and_attention")
    other = batch([[70], [69], [3]], 70, g.vocab, seed=4)
    t2 = Targets(*targets(other, g.vocab, 3))
    tr = trainer(w, b)
    parts = []
    for micro in (Micro(b, t), Micro(other, t2)):
        parts.append((tr.gradients([micro], 0.0), tr.grad.clone(), micro.batch.weight_sum))
    loss = tr.gradients([Micro(b, t), Micro(other, t2)], 0.0)
    total = sum(s for *_, s in parts)
    assert float(loss) == pytest.approx(sum(float(x) * s for x, _, s in parts) / total, rel=1e-12)
    torch.testing.assert_close(tr.grad, sum(x * s for _, x, s in parts) / total, rtol=1e-9, atol=1e-15)


def test_two_steps_by_hand():
    """Adam with float64 moments on float32 logits, l1 in the gradient, computed one number at a time."""
    g, w, b, t = frozen("gdn_and_attention", dtype=torch.float32)
    tr = trainer(w, b, rate=0.1)
    n_all = sum(g.intermediate)
    m = v = 0.0
    logit = float(tr.logits[7])
    for d, l1 in ((1, 0.01), (2, 40.0)):
        tr.gradients([Micro(b, t)], 0.0)
        s = float(torch.sigmoid(tr.logits[7]))
        data = float(tr.grad[7]) / (s * (1 - s))
        tr.step([Micro(b, t)], l1)
        grad = (data + l1 / n_all) * s * (1 - s)
        assert float(tr.grad[7]) == pytest.approx(grad, rel=1e-5)
        grad = float(tr.grad[7])
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad * grad
        step = 0.1 * (m / (1 - 0.9**d)) / (math.sqrt(v / (1 - 0.999**d)) + 1e-8)
        logit = float(torch.tensor(logit - step, dtype=torch.float32))
        assert float(tr.logits[7]) == pytest.approx(logit, abs=2e-7)
        assert (float(tr.m[7]), float(tr.v[7])) == pytest.approx((m, v), rel=1e-12)
    assert tr.m.dtype == tr.v.dtype == torch.float64 and tr.logits.dtype == torch.float32


def test_weights_have_no_gradient_nor_memory_for_one():
    g, w, b, t = frozen("gdn_and_attention", dtype=torch.float32)
    before = {n: w[n].clone() for n in w.names}
    n = b.tokens.numel()
    full, ffn = (trainer(w, b, gradient=kind) for kind in ("full", "ffn"))
    for tr in (full, ffn):
        tr.step([Micro(b, t)], 1.0)
        assert w.trained is None and all(w.grad(name) is None for name in w.names)
        own = [x for x in vars(tr).values() if isinstance(x, torch.Tensor)]
        n_all = sum(g.intermediate)
        assert sum(x.numel() for x in own) == 5 * n_all  # logits, gates, gradient, two moments
    assert all(torch.equal(w[name], x) for name, x in before.items())
    # "ffn" keeps x_mlp and gate_up of a layer, and has no gradient of a mixer
    assert ffn.buffers.dproj.numel() == 0
    slots = {i: [x for x in vars(s).values() if isinstance(x, torch.Tensor)] for i, s in ffn.buffers.kept.items()}
    for i, mine in slots.items():
        others = {x.data_ptr() for j, theirs in slots.items() if j != i for x in theirs}
        alone = [x.shape[1] for x in mine if x.data_ptr() not in others]
        assert alone == [g.hidden, 2 * g.intermediate[i]]
    whole = Buffers(g, n, w.dtype, w.device, save_from=0)
    assert ffn.buffers.nbytes < full.buffers.nbytes < whole.nbytes
    for tr in (full, ffn):
        said = train_bytes(
            g, n, b.max_seqlen, b.n_scored, w.dtype, "cpu", first=0, train_from=0, trained=0,
            mixers_from=tr.buffers.mixers_from,
        )  # fmt: skip
        assert said.buffers == tr.buffers.nbytes


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_that_is_not_finite_changes_nothing(bad):
    _, w, b, t = frozen("gdn_and_attention", dtype=torch.float32)
    tr = trainer(w, b, loss_scale=4.0)
    tr.step([Micro(b, t)], 1.0)
    before = [x.clone() for x in (tr.logits, tr.m, tr.v)]
    tr.gradients([Micro(b, t)], 1.0)
    tr.grad[3] = bad
    tr.apply()
    tr.gradients([Micro(b, t)], 1.0)
    tr.loss.mul_(bad)
    tr.apply()
    stats = tr.read()
    assert all(torch.equal(x, y) for x, y in zip(before, (tr.logits, tr.m, tr.v), strict=True))
    assert (stats.ok, stats.steps, stats.skipped, stats.in_row, stats.scale) == (False, 1, 2, 2, 1.0)


def test_the_scale_leaves_the_step_as_it_is():
    _, w, b, t = frozen("gdn_and_attention", dtype=torch.float32)
    found = []
    for scale in (1.0, 4096.0):
        tr = trainer(w, b, loss_scale=scale)
        tr.step([Micro(b, t)], 2.0)
        found.append((tr.logits.clone(), tr.read()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-7)
    assert found[0][1].norm == pytest.approx(found[1][1].norm, rel=1e-6)


def test_gates_at_tau_are_closed():
    assert open_gates(torch.tensor([-1e-3, 0.0, 1e-3]), 0.5).tolist() == [False, False, True]


def test_weights_that_train_are_refused():
    _, w, b, _ = frozen("gdn_and_attention", train="mlp")
    with pytest.raises(ValueError, match="train=None"):
        GateTrainer(w, b.tokens.numel(), b.max_seqlen)


def test_every_visit_of_a_looped_stack_has_its_own_gates():
    g = geometry("LF", num_loops=2)
    w = Weights.random(g, seed=1, dtype=torch.float64, std=0.1, vector_noise=0.1)
    b = batch([[9, 5], [16]], 16, g.vocab)
    t = Targets(*targets(b, g.vocab, 5))
    tr = trainer(w, b)
    assert tr.logits.numel() == 2 * sum(g.intermediate)
    tr.gradients([Micro(b, t)], l1=3.0)
    leaf = tr.logits.clone().requires_grad_()
    loss = kd_loss({n: w[n] for n in w.names}, g, b, t.ids, t.probs, by_layer(torch.sigmoid(leaf), g))
    (loss + 3.0 * torch.sigmoid(leaf).mean()).backward()
    assert (tr.grad - leaf.grad).abs().max() <= 1e-8 * leaf.grad.abs().max()


def test_weights_of_mlps_under_hard_masks_against_autograd():
    """`Trainer` with masks and no backward of the mixers: the gradient of gate, up and down in the same graph, exactly
    0 for neurons that are closed."""
    g, w, b, t = frozen("gdn_and_attention", train="mlp")
    gen = torch.Generator().manual_seed(3)
    masks = {i: (torch.rand(f, generator=gen) > 0.4).double() for i, f in enumerate(g.intermediate)}
    tr = Trainer(w, b.tokens.numel(), b.max_seqlen, masks=masks, mixers_from=g.n_virtual)
    loss = tr.gradients([Micro(b, t)])
    p = {n: w[n].clone() for n in w.names}
    leaves = {n: p[n].requires_grad_() for n in p if w.trains(n)}
    want = ffn_loss(p, g, b, t, masks)[0]
    assert float(loss) == pytest.approx(float(want.detach()), rel=1e-10)
    want.backward()
    assert sorted(leaves) == sorted(f"layers.{i}.{part}" for i in range(3) for part in ("down", "gate_up"))
    for name, leaf in leaves.items():
        assert (w.grad(name) - leaf.grad).abs().max() <= 1e-8 * leaf.grad.abs().max()
        closed = masks[int(name.split(".")[1])] == 0
        dead = w.grad(name)[:, closed] if "down" in name else w.grad(name)[closed.repeat(2)]
        assert closed.any() and not dead.any()
