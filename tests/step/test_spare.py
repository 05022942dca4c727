"""The head's logits in the memory of gradients that are not written yet: nothing they leave there is ever read."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny import batch, geometry, targets

from cortiq_kernels.model.layout import plan_layout
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import Buffers, Micro, Trainer
from cortiq_kernels.step import train as train_module
from cortiq_kernels.step.loss import Targets, head_loss
from cortiq_kernels.step.memory import train_bytes
from cortiq_kernels.step.spare import slab_in, spare_elements, spare_run

WINDOW = 40
CPU, BF16 = torch.device("cpu"), torch.bfloat16
PLAIN = geometry("LLFL", hidden=32, ffn=64)
UNEVEN = geometry("LLFL", nk=1, nv=3, tied=False)  # matrices with gaps after them
LOOPED = geometry("LF", num_loops=3, norm_between_loops=True)


def world(g, seed=0):
    b = batch([[9, 1, 17], [40]], WINDOW, g.vocab, seed=seed)
    return Micro(b, Targets(*targets(b, g.vocab, 5, seed=seed)))


def scribbled(w, buf, micro_batch, targets_, *, need_grad=True, accumulate=False, **more):
    """The head, and all over the spare memory what no logits would be as harmful as."""
    if not (need_grad and accumulate):
        assert buf.spare.numel()
        buf.spare.fill_(float("nan"))
    return head_loss(w, buf, micro_batch, targets_, need_grad=need_grad, accumulate=accumulate, **more)


@pytest.mark.parametrize("g", [PLAIN, UNEVEN, LOOPED], ids=["plain", "uneven", "looped"])
@pytest.mark.parametrize(
    ("train", "train_from", "mixers_from", "micros"),
    [("layers", 0, 0, 1), ("layers", 1, 0, 2), ("all", 0, 0, 2), ("mlp", 0, 0, 1), ("mlp", 1, 99, 2)],
)
def test_no_step_reads_what_logits_left(monkeypatch, g, train, train_from, mixers_from, micros):
    if g is LOOPED and train_from:
        train_from = 0
    found = []
    for head in (head_loss, scribbled):
        monkeypatch.setattr(train_module, "head_loss", head)
        w = Weights.random(g, seed=1, dtype=torch.float32, train=train, train_from=train_from, std=0.1)
        t = Trainer(w, 2 * WINDOW, WINDOW, mixers_from=mixers_from)
        for i in range(3):  # the window of layers that train opens in the last step
            start = None if train == "all" or g is LOOPED or i == 2 else g.n_layers - 1
            t.step([world(g, seed=i + j) for j in range(micros)], 1e-2, from_layer=start)
        assert t.read().ok and t.read().steps == 3
        found.append([t.loss.clone(), w.trained.master, w.trained.m, w.trained.v])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_run_is_the_longest_without_a_gap():
    gradient = plan_layout(PLAIN, train="layers")
    assert spare_run(gradient, train="layers", train_from=0, mixers_from=0) == (0, gradient.matrix_numel)
    gaps = plan_layout(UNEVEN, train="layers")
    start, stop = spare_run(gaps, train="layers", train_from=0, mixers_from=0)
    covered = [s for s in gaps.trained_matrices.values() if start <= s.start < stop]
    assert 0 < stop - start < gaps.matrix_numel and stop - start == sum(s.stop - s.start for s in covered)


def test_what_the_backward_does_not_write_is_not_lent():
    every = plan_layout(PLAIN, train="all")
    end = max(s.stop for name, s in every.trained_matrices.items() if name.startswith("layers."))
    assert spare_run(every, train="all", train_from=0, mixers_from=0)[1] <= end < every.matrix_numel
    assert spare_elements(every, train="all", train_from=0, mixers_from=2) == 0
    mlp = plan_layout(PLAIN, train="mlp", train_from=1)
    assert spare_elements(mlp, train="mlp", train_from=1, mixers_from=99) > 0
    assert spare_elements(plan_layout(PLAIN), train=None, train_from=0) == 0


def test_the_slab_lies_in_it_where_it_fits():
    gradient = torch.zeros(70 * 128)
    slab = slab_in(gradient, 200, 65, BF16)
    assert slab is None
    slab = slab_in(gradient, 140, 65, BF16)
    assert slab is not None and slab.shape == (140, 128) and slab.stride() == (128, 1)
    slab.fill_(1)
    assert gradient.view(BF16).eq(1).all()


def test_a_trainer_lends_it_but_not_to_a_micro_batch_that_adds(monkeypatch):
    g = dataclasses.replace(PLAIN, vocab=200)
    w = Weights.random(g, dtype=BF16, train="layers")
    buf = Trainer(w, 2 * WINDOW, WINDOW).buffers
    assert buf.logits_slab(g.vocab) is None  # a CPU has none
    size = buf.nbytes
    monkeypatch.setattr(buf, "device", torch.device("cuda"))
    monkeypatch.setattr("cortiq_kernels.step.buffers.new_slab", lambda *a: torch.zeros(a[0], 256))
    lent, own = buf.logits_slab(g.vocab), buf.logits_slab(g.vocab, own=True)
    inside = w.trained.grad.untyped_storage().data_ptr()
    assert lent.untyped_storage().data_ptr() == inside != own.untyped_storage().data_ptr()
    assert buf.nbytes - size == own.nbytes and buf.logits_slab(g.vocab).data_ptr() == lent.data_ptr()
    alone = Buffers(g, 2 * WINDOW, BF16, CPU)
    assert alone.spare is None and alone.nbytes < size


def test_the_plan_counts_no_slab_that_fits():
    g = dataclasses.replace(PLAIN, vocab=200)
    layout = plan_layout(g, train="layers")
    keys = dict(first=0, train_from=0, trained=layout.trained_numel)
    spare = spare_elements(layout, train="layers", train_from=0)
    own, lent = (train_bytes(g, 80, 40, 70, BF16, "cuda", spare=s, **keys) for s in (0, spare))
    assert own.buffers - lent.buffers == 80 * g.vocab * 2 and own[1:] == lent[1:]
    assert train_bytes(g, 80, 40, 70, BF16, "cuda", spare=100, **keys) == own
