"""A step that is recorded and replayed, with a recorder that calls the function: on static inputs, in order, by key."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from ops_close import bits
from recorder import Recorder
from tiny import batch, geometry, targets

from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import Evaluator, GateTrainer, Micro, Trainer
from cortiq_kernels.step.graph import LIMIT, Programs
from cortiq_kernels.step.inputs import StaticInputs, shape_of
from cortiq_kernels.step.loss import Targets, pad_rows

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def pools():
    Recorder.made = []
    return Recorder.made


def micro(g, lengths, seed=0, x=None):
    """Scored rows padded to 32, as a GPU's are: windows of other records have the same shape."""
    b = batch(lengths, 70, g.vocab, seed=seed)
    cu = torch.full((9,), b.tokens.numel(), dtype=torch.int32)
    cu[: len(b.cu_seqlens)] = b.cu_seqlens
    b = dataclasses.replace(b, cu_seqlens=cu)
    return Micro(*pad_rows(b, Targets(*targets(b, g.vocab, 4, seed=seed), const=0.25 * seed), 128), x)


LENGTHS = ([[30, 40], [64]], [[70], [1, 2, 60]], [[10, 20, 30], [69, 1]], [[35, 35], [33]])


def trainer(graph, train="all", **kw):
    g = geometry("LLF")
    w = Weights.random(g, seed=1, dtype=torch.float32, device=CPU, train=train, **kw)
    return g, w, Trainer(w, 140, 70, capture=Recorder if graph else None)


def state(w, t):
    flat = w.trained
    return bits(flat.master, flat.m, flat.v, t.loss), t.read()


def test_replayed_steps_have_the_bits_of_plain_ones_whatever_the_records(pools):
    """Four packings, each step another batch, rate and constant: one recording of the gradients, one of the update."""
    results = []
    for graph in (False, True):
        g, w, t = trainer(graph)
        seen = []
        for i in range(8):
            t.step([micro(g, LENGTHS[i % 4], seed=i)], rate=1e-3 * (i + 1))
            seen.append(state(w, t))
        results.append(seen)
    assert results[0] == results[1]
    assert t.programs.enabled and len(t.programs.recorded) == 2
    assert (pools[0].recorded, pools[0].replays, len(pools)) == (2, 14, 1)


def test_micro_batches_of_a_step_have_graphs_for_the_first_and_for_the_others(pools):
    results = []
    for graph in (False, True):
        g, w, t = trainer(graph)
        seen = []
        for i in range(5):
            t.step([micro(g, LENGTHS[j % 4], seed=i + j) for j in range(1 + i % 3)], rate=1e-3)
            seen.append(state(w, t))
        results.append(seen)
    assert results[0] == results[1]
    assert sorted(k[2] for k in t.programs.recorded if k[0] == "step") == [False, True]


def test_another_trained_window_is_another_graph_and_the_old_one_goes(pools):
    results = []
    for graph in (False, True):
        g, w, t = trainer(graph, train="layers")
        seen = []
        for start, kappa in ((2, 0.1), (2, 0.1), (2, 0.1), (1, 0.1), (1, 0.1), (1, 0.2), (1, 0.2)):
            m = micro(g, LENGTHS[0], seed=len(seen))
            factor = lambda layer, s=start, k=kappa: 1 - k * (layer - s)  # noqa: E731
            t.step([m], rate=1e-3, from_layer=start, factor=factor)
            seen.append(state(w, t))
        results.append(seen)
    assert results[0] == results[1]
    assert sum(p.recorded for p in pools) == 5  # two windows; of the update three sets of rates
    assert sum(p.dropped for p in pools) == 3
    assert {k[1][0] for k in t.programs.recorded if k[0] == "step"} == {1}


def test_other_shapes_are_other_graphs(pools):
    g, w, t = trainer(True)
    small = micro(g, LENGTHS[0])
    large = Micro(*pad_rows(small.batch, small.targets, 256))
    for m in (small, large, small, large, small):
        t.step([m], rate=1e-3)
    assert len([k for k in t.programs.recorded if k[0] == "step"]) == 2
    assert shape_of(small) != shape_of(large)


def test_a_frozen_prefix_is_an_input(pools):
    results = []
    for graph in (False, True):
        g, w, t = trainer(graph, train="layers", train_from=1, first_layer=1)
        for i in range(4):
            x = torch.randn(140, g.hidden, generator=torch.Generator().manual_seed(i))
            t.step([micro(g, LENGTHS[i], x=x)], rate=1e-3)
        results.append(state(w, t))
    assert results[0] == results[1]


def test_masks_are_read_where_they_lie_and_others_are_another_graph(pools):
    results = []
    for graph in (False, True):
        g, w, t = trainer(graph)
        mask, seen = torch.ones(48), []
        for i in range(7):
            mask[:] = torch.linspace(0, 1, 48) * i
            t.masks = {1: mask} if i < 4 else {1: mask.clone()} if i == 4 else None
            t.step([micro(g, LENGTHS[i % 4], seed=i)], rate=1e-3)
            seen.append(state(w, t))
        results.append(seen)
    assert results[0] == results[1]
    assert len([k for k in t.programs.recorded if k[0] == "step"]) == 1 and pools[0].dropped == 1


def test_a_skipped_step_is_replayed_like_any_other(pools):
    g, w, t = trainer(True)
    for _ in range(3):
        t.step([micro(g, LENGTHS[0])], rate=1e-3)
    before = state(w, t)[0][:3]
    m = micro(g, LENGTHS[1])
    m.targets.probs[0, 0] = float("nan")
    t.step([m], rate=1e-3)
    assert state(w, t)[0][:3] == before and t.read()[3:6] == (3, 1, 1)
    t.step([micro(g, LENGTHS[2])], rate=1e-3)
    assert t.read().ok and t.read().steps == 4


def test_gates_are_recorded_too(pools):
    results = []
    for graph in (False, True):
        g = geometry("LLF")
        w = Weights.random(g, seed=1, dtype=torch.float32, device=CPU)
        t = GateTrainer(w, 140, 70, capture=Recorder if graph else None)
        for i in range(4):
            t.step([micro(g, LENGTHS[i], seed=i)], l1=0.1 * i)
        results.append((bits(t.logits, t.m, t.v, t.loss), t.read()))
    assert results[0] == results[1]
    assert len(t.programs.recorded) == 1


def test_evaluations_are_recorded_on_the_trainer_s_memory(pools):
    """Between steps, whose graphs they do not disturb; with masks they run."""
    results = []
    for graph in (False, True):
        g, w, t = trainer(graph)
        evaluator = Evaluator(w, 140, 70, t.buffers, programs=t.programs)
        seen = []
        for i in range(4):
            t.step([micro(g, LENGTHS[i], seed=i)], rate=1e-3)
            seen.append(evaluator.loss([micro(g, LENGTHS[j], seed=j) for j in range(3)]))
        evaluator.masks = {0: torch.zeros(48)}
        seen.append(evaluator.loss([micro(g, LENGTHS[0])]))
        results.append((seen, state(w, t)))
    assert results[0] == results[1]
    assert sorted(k[0] for k in t.programs.recorded) == ["hidden", "step", "update"]
    assert len(pools) == 1


@pytest.mark.parametrize("what", [dict(graph=False), dict()])
def test_without_graphs_there_is_a_reason_and_no_copy(what, monkeypatch):
    monkeypatch.setattr(StaticInputs, "load", lambda *_: pytest.fail("inputs were copied"))
    g = geometry("LLF")
    w = Weights.random(g, seed=1, dtype=torch.float32, device=CPU, train="all")
    t = Trainer(w, 140, 70, **what)
    t.step([micro(g, LENGTHS[0])], rate=1e-3)
    assert t.programs.reason == ("switched off" if what else "a CPU has no graphs")


def test_a_recording_that_fails_is_said_once_and_the_step_runs(pools):
    """What waits for the device cannot be recorded; the step that failed to be is run, and counts once."""

    class Failing(Recorder):
        def __call__(self, work):
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    results = []
    for capture in (None, Failing):
        g, w, t = trainer(False)
        if capture:
            t.programs._make, t.programs.reason = capture, ""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for i in range(4):
                t.step([micro(g, LENGTHS[i])], rate=1e-3)
        results.append(state(w, t))
    assert results[0] == results[1]
    assert [str(x.message) for x in said] == [
        "step: runs without a CUDA graph, which takes longer: recording failed: operation not permitted when stream is "
        "capturing"
    ]


def test_the_least_recently_used_graph_goes(pools):
    programs, ran = Programs(CPU, capture=Recorder), []
    for key in [*range(LIMIT + 2)] * 2 + [2, LIMIT + 5, LIMIT + 5]:
        programs.run(("x", key), lambda key=key: ran.append(key))
    assert len(programs.recorded) == LIMIT
    assert ("x", 2) in programs.recorded and ("x", 3) not in programs.recorded
    assert ran == [*range(LIMIT + 2)] * 2 + [2, LIMIT + 5, LIMIT + 5]
    programs.forget(lambda key: True)
    assert pools[0].dropped == LIMIT + 3 and not programs.recorded
    for _ in range(2):
        programs.run(("x", 0), lambda: None)
    assert len(pools) == 2  # the memory of the first pool went with its last graph


def test_buffers_keep_nothing_before_and_after_a_recording():
    """Saved tensors of the run before it would take their memory twice."""
    kept = []

    class Looking(Recorder):
        def __call__(self, work):
            kept.append(saved())
            return super().__call__(work)

    g, w, t = trainer(True)
    t.programs._make = Looking

    def saved():
        found = [t.buffers.final_norm, *(x for s in t.buffers.kept.values() for x in (s.mixer, s.norm_mix, s.norm_mlp))]
        return sum(x is not None for x in found)

    t.gradients([micro(g, LENGTHS[0])])
    assert saved() == 1 + 3 * 3
    t.gradients([micro(g, LENGTHS[0])])
    assert kept == [0]


def test_plain_runs_start_without_what_the_last_one_saved():
    """The allocator then finds every step as the one before."""
    programs, order = Programs(CPU, enabled=False), []
    for _ in range(2):
        programs.run("a", lambda: order.append("run"), release=lambda: order.append("release"))
    assert order == ["release", "run"] * 2


def test_kernels_compile_before_a_first_run_and_only_where_nothing_adds_up():
    """What has been written by the compiler's call of the step is written anew by the step."""
    order: list[str] = []
    programs = Programs(CPU, capture=Recorder, compiler=lambda work: (order.append("compile"), work()))
    for _ in range(3):
        programs.run("a", lambda: order.append("a"), ahead=True)
        programs.run("b", lambda: order.append("b"))
    assert order[:4] == ["compile", "a", "a", "b"] and order.count("compile") == 1

    results = []
    for compiler in (None, lambda work: work()):
        g, w, t = trainer(True)
        t.programs._compile = compiler
        for i in range(4):
            t.step([micro(g, LENGTHS[i % 4], seed=i), micro(g, LENGTHS[(i + 1) % 4], seed=9 + i)], rate=1e-3)
        results.append(state(w, t))
    assert results[0] == results[1]
