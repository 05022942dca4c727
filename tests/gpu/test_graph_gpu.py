"""The step as CUDA graphs: the bits of the plain step, no wait of the host, no new memory, any packing, any window."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from ops_close import bits, no_sync
from tiny import batch, geometry, targets

from cortiq_kernels import backend
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import Evaluator, GateTrainer, Micro, Trainer
from cortiq_kernels.step.inputs import Ahead
from cortiq_kernels.step.loss import Targets, pad_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
WINDOW, CAPACITY = 256, 16
LENGTHS = ([[100, 1, 155], [256]], [[3, 64, 61], [128, 20]], [[256], [10, 20, 30, 40]], [[255], [1, 254]])


def make(graph, dtype=torch.bfloat16, train="layers", **kw):
    g = geometry(layers="LLFL", hidden=128, ffn=256, vocab=1031, nq=4, nkv=2, hd=64, nk=2, nv=4, dk=64, dv=64)
    w = Weights.random(g, seed=1, dtype=dtype, device=CUDA, train=train, **kw)
    return g, w, Trainer(w, 2 * WINDOW, WINDOW, graph=graph, loss_scale=256.0 if dtype == torch.float16 else 1.0)


def micro(g, lengths, seed=0, x=None):
    b = batch(lengths, WINDOW, g.vocab, seed=seed)
    cu = torch.full((CAPACITY + 1,), b.tokens.numel(), dtype=torch.int32)
    cu[: len(b.cu_seqlens)] = b.cu_seqlens
    b, t = pad_rows(dataclasses.replace(b, cu_seqlens=cu), Targets(*targets(b, g.vocab, 8, seed=seed), 0.5 * seed), 512)
    return Micro(b.to(CUDA), t.to(CUDA), x)


def state(w, t):
    flat = w.trained
    return bits(flat.master, flat.m, flat.v, flat.plane, t.loss), t.read()


@pytest.fixture(autouse=True)
def recorded():
    """A recording that fails falls back with a warning; here that is a failure."""
    with warnings.catch_warnings(), backend.deterministic(True):
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*without a CUDA graph")
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("train", ["layers", "all", "mlp"])
def test_replayed_steps_have_the_bits_of_plain_ones(dtype, train):
    results = []
    for graph in (False, True):
        g, w, t = make(graph, dtype, train)
        seen = []
        for i in range(6):
            t.step([micro(g, LENGTHS[i % 4], seed=i)], rate=1e-3 * (i + 1))
            seen.append(state(w, t))
        results.append(seen)
    for a, b in zip(*results, strict=True):
        assert a[1] == b[1] and a[0] == b[0]
    assert len(t.programs.recorded) == 2 and not t.programs.reason


def test_micro_batches_windows_and_a_prefix():
    results = []
    for graph in (False, True):
        g, w, t = make(graph, train_from=1, first_layer=1)
        seen = []
        for i in range(9):
            start, kappa = (3, 0.1) if i < 3 else (1, 0.1) if i < 6 else (1, 0.05)
            xs = [torch.randn(2 * WINDOW, g.hidden, device=CUDA).mul_(0.1).bfloat16() for _ in range(1 + i % 2)]
            micros = [micro(g, LENGTHS[(i + j) % 4], seed=i + j) for j in range(len(xs))]
            gen = torch.Generator(CUDA).manual_seed(i)
            micros = [m._replace(x=x.normal_(generator=gen)) for m, x in zip(micros, xs, strict=True)]
            t.step(micros, rate=1e-3, from_layer=start, factor=lambda n, s=start, k=kappa: 1 - k * (n - s))
            seen.append(state(w, t))
        results.append(seen)
    for a, b in zip(*results, strict=True):
        assert a[1] == b[1] and a[0] == b[0]
    assert {k[1][0] for k in t.programs.recorded if k[0] == "step"} == {1}


def test_a_planted_inf_leaves_every_byte_in_a_replay():
    g, w, t = make(True, torch.float16)
    for i in range(3):
        t.step([micro(g, LENGTHS[i])], 1e-3)
    before = state(w, t)[0][:4]
    bad = micro(g, LENGTHS[0])
    bad.targets.probs[0, 0] = float("inf")
    t.step([bad], 1e-3)
    stats = t.read()
    assert state(w, t)[0][:4] == before
    assert (stats.ok, stats.steps, stats.skipped, stats.scale) == (False, 3, 1, 128.0)
    t.step([micro(g, LENGTHS[1])], 1e-3)
    assert t.read().ok


@pytest.mark.parametrize("graph", [True, False])
def test_no_wait_and_no_new_memory_after_the_second_step(graph):
    g, w, t = make(graph)
    micros = [micro(g, lengths, seed=i) for i, lengths in enumerate(LENGTHS)]
    for i in range(2):
        t.step([micros[i]], 1e-4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    with no_sync():
        for i in range(6):
            t.step([micros[i % 4]], 1e-4 * i)
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
    assert t.read().steps == 8


def test_dropped_graphs_give_their_memory_back():
    g, w, t = make(True)
    m = micro(g, LENGTHS[0])
    held = []
    for start in (3, 2, 1, 0, 3, 2, 1, 0):
        for _ in range(3):
            t.step([m], 1e-4, from_layer=start)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_reserved())
    assert held[-1] <= held[3] + (4 << 20), held


def test_gates_replay():
    results = []
    for graph in (False, True):
        g = geometry(layers="LLFL", hidden=128, ffn=256, vocab=1031, nq=4, nkv=2, hd=64, nk=2, nv=4, dk=64, dv=64)
        w = Weights.random(g, seed=1, dtype=torch.bfloat16, device=CUDA)
        t = GateTrainer(w, 2 * WINDOW, WINDOW, graph=graph)
        for i in range(5):
            t.step([micro(g, LENGTHS[i % 4], seed=i)], l1=0.01 * i)
        results.append((bits(t.logits, t.m, t.v, t.loss), t.read()))
    assert results[0] == results[1]
    assert len(t.programs.recorded) == 1


def test_what_is_copied_ahead_trains_alike_without_a_wait():
    """Batches built on the host: pinned memory, a stream of their own, and evaluations in between."""
    g = make(False)[0]
    hosts = []
    for i in range(8):
        m = micro(g, LENGTHS[i % 4], seed=i)
        hosts.append(Micro(m.batch.to("cpu"), m.targets.to(torch.device("cpu"))))
    results = []
    for graph in (False, True):
        _, w, t = make(graph)
        evaluator = Evaluator(w, 2 * WINDOW, WINDOW, t.buffers, programs=t.programs)
        ahead = Ahead(CUDA, hosts.__getitem__, backend.copy_lane(CUDA))
        seen = []
        for i in range(7):
            m = ahead[i]
            if i < 3:
                t.step([m], 1e-3)
                ahead.prepare([i + 1])
                seen.append(evaluator.loss([m]))
            else:
                with no_sync():
                    t.step([m], 1e-3)
                    ahead.prepare([i + 1])
            seen.append(state(w, t))
        results.append(seen)
    assert results[0] == results[1]
    assert sorted(k[0] for k in t.programs.recorded) == ["hidden", "step", "update"]
