"""Steps that count, steps that do not, and what a training run of a few steps must do."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny import batch, geometry, targets

from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import Evaluator, Micro, Trainer
from cortiq_kernels.step.loss import Targets, next_token_targets, pad_rows

CPU = torch.device("cpu")


def make(dtype=torch.float32, train="all", **kwargs):
    g = geometry("LLF")
    w = Weights.random(g, seed=1, dtype=dtype, device=CPU, train=train)
    b = batch([[30, 40], [64]], 70, g.vocab)
    return g, w, b, Targets(*targets(b, g.vocab, 4)), Trainer(w, b.tokens.numel(), 70, **kwargs)


def snapshot(w: Weights) -> dict[str, torch.Tensor]:
    t = w.trained
    flat = {"master": t.master, "m": t.m, "v": t.v} | {n: w[n] for n in w.names}
    return {k: v.clone() for k, v in flat.items()}


def same_bytes(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a)


def test_loss_falls_and_evaluation_agrees():
    _, w, b, t, trainer = make()
    evaluator = Evaluator(w, b.tokens.numel(), 70, trainer.buffers)
    losses = []
    for _ in range(12):
        before = evaluator.loss([Micro(b, t)])
        trainer.step([Micro(b, t)], rate=3e-3)
        stats = trainer.read()
        assert stats.loss == pytest.approx(before, rel=1e-5)
        losses.append(stats.loss)
    assert losses[-1] < 0.9 * losses[0]
    assert stats.steps == 12 and stats.skipped == 0


@pytest.mark.parametrize("where", ["weight", "target", "gradient_overflow"])
@pytest.mark.parametrize("scale", [1.0, 4096.0])
def test_planted_inf_leaves_every_byte(where, scale):
    g, w, b, t, trainer = make(loss_scale=scale)
    trainer.step([Micro(b, t)], rate=1e-3)
    assert trainer.read().steps == 1
    if where == "weight":  # a frozen-looking spot: one element of one matrix
        w["layers.0.down"][0, 0] = float("inf")
    elif where == "target":
        t.probs[0, 0] = float("nan")
    else:
        w["layers.2.o_proj"].fill_(3e38)
    before = snapshot(w)
    trainer.step([Micro(b, t)], rate=1e-3)
    stats = trainer.read()
    assert same_bytes(before, snapshot(w))
    assert not stats.ok and stats.steps == 1 and stats.skipped == 1 and stats.in_row == 1
    assert stats.scale == max(1.0, scale / 2)


def test_an_accepted_step_ends_a_row_of_skips():
    _, w, b, t, trainer = make(loss_scale=4.0)
    good = t.probs.clone()
    for _ in range(3):
        t.probs[0, 0] = float("nan")
        trainer.step([Micro(b, t)], rate=1e-3)
    t.probs.copy_(good)
    assert trainer.read()[3:] == (0, 3, 3, 1.0)  # steps, skipped, in a row, scale: 4 -> 2 -> 1, floor 1
    trainer.step([Micro(b, t)], rate=1e-3)
    assert trainer.read()[3:] == (1, 3, 0, 1.0)


def test_loss_scale_changes_nothing_in_exact_arithmetic():
    runs = []
    for scale in (1.0, 1024.0):
        _, w, b, t, trainer = make(dtype=torch.float64, loss_scale=scale)
        for _ in range(3):
            trainer.step([Micro(b, t)], rate=1e-3)
        runs.append(w.trained.master.clone())
    assert (runs[0] - runs[1]).abs().max() < 1e-12


def test_matches_torch_adam_with_clipping():
    g, w, b, t, trainer = make(dtype=torch.float64)
    start = w.trained.master.clone()
    leaf = start.clone().requires_grad_()
    adam = torch.optim.Adam([leaf], lr=1e-2)
    for _ in range(5):
        trainer.gradients([Micro(b, t)])
        leaf.grad = w.trained.grad.clone()
        torch.nn.utils.clip_grad_norm_([leaf], 1.0)
        adam.step()
        trainer.step([Micro(b, t)], rate=1e-2)
        assert (leaf - w.trained.master).abs().max() < 1e-7  # torch clips with norm + 1e-6
    assert (start - w.trained.master).abs().max() > 1e-3


def test_window_and_factor_only_move_what_they_should():
    g, w, b, t, trainer = make(dtype=torch.float64, train="layers")
    before = {n: w[n].clone() for n in w.names}
    trainer.step([Micro(b, t)], rate=1e-3, from_layer=1, factor=lambda layer: 0.5 if layer == 2 else 1.0)
    for name in before:
        moved = (w[name] - before[name]).abs().max().item()
        layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
        # Adam's first step moves an element by almost exactly its rate
        want = {1: 1e-3, 2: 0.5e-3}.get(layer, 0.0)
        assert moved == pytest.approx(want, rel=1e-2), name


@pytest.mark.parametrize("tied", [True, False])
def test_norm_is_that_of_what_trains(tied):
    """The trained window moves up: what an earlier step left below it (and a tied head's share of the embedding) must
    not count in the norm that clips."""
    g = geometry("LLF", tied=tied)
    w = Weights.random(g, seed=1, dtype=torch.float64, device=CPU, train="all")
    b = batch([[30, 40], [64]], 70, g.vocab)
    micro = Micro(b, Targets(*targets(b, g.vocab, 4)))
    trainer = Trainer(w, b.tokens.numel(), 70)
    trainer.gradients([micro], from_layer=2)
    want = sum(float(w.trained.grad[r.start : r.stop].square().sum()) for r in w.ranges(2)) ** 0.5
    trainer.step([micro], rate=0.0)
    w.grad("layers.0.down")[0, 0] = float("nan")
    trainer.step([micro], rate=0.0, from_layer=2)
    stats = trainer.read()
    assert stats.ok and stats.norm == pytest.approx(want, rel=1e-12)


def test_steps_that_cannot_be_are_refused():
    g, w, b, t, trainer = make(train="layers")
    nothing = dataclasses.replace(b, row_weight=b.row_weight * 0, weight_sum=0.0)
    for micros in ([], [Micro(nothing, t)]):
        with pytest.raises(ValueError, match="must sum to more than 0; got 0"):
            trainer.step(micros, rate=1e-3)
    for layer in (-1, g.n_layers + 1):
        with pytest.raises(ValueError, match=f"from_layer must be between train_from 0 and the 3 layers; got {layer}"):
            trainer.step([Micro(b, t)], rate=1e-3, from_layer=layer)
    assert trainer.read()[3:6] == (0, 0, 0)  # steps, skipped, in a row
    trainer.step([Micro(b, t), Micro(nothing, t)], rate=1e-3)  # one of two may be empty
    assert trainer.read().ok


def test_next_token_targets_are_the_batch_s_own():
    g, w, b, _, _ = make()
    t = next_token_targets(b)
    assert torch.equal(t.ids[:, 0].long(), b.next_ids[b.row_index.long()])
    logits = Evaluator(w, b.tokens.numel(), 70).hidden(b) @ w["head"].T
    rows = b.row_index.long()
    ce = torch.nn.functional.cross_entropy(logits[rows], b.next_ids[rows], reduction="none")
    want = float((ce * b.row_weight).sum() / b.weight_sum)
    assert Evaluator(w, b.tokens.numel(), 70).loss([Micro(b, t)]) == pytest.approx(want, rel=1e-5)


def test_training_nothing_is_refused():
    w = Weights.random(geometry("LF"), seed=0, dtype=torch.float32, device=CPU)
    with pytest.raises(ValueError, match="train"):
        Trainer(w, 8, 8)


def test_padding_rows_change_nothing():
    g, w, b, t, trainer = make(dtype=torch.float64)
    want = trainer.gradients([Micro(b, t)]).clone(), w.trained.grad.clone()
    batch_, targets_ = pad_rows(b, t, 64)
    assert len(batch_.row_index) % 64 == 0 and len(targets_.ids) == len(batch_.row_index) > len(b.row_index)
    got = trainer.gradients([Micro(batch_, targets_)])
    assert float(got) == pytest.approx(float(want[0]), rel=1e-14)
    assert (w.trained.grad - want[1]).abs().max() <= 1e-14
    assert pad_rows(b, t, 1) == (b, t)
