"""Micro-batches on their way: copied ahead, never over what is still read, and whole whatever their shapes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from ops_close import bits
from tiny import batch, targets

from cortiq_kernels.step import Micro
from cortiq_kernels.step.inputs import Ahead, StaticInputs
from cortiq_kernels.step.loss import Targets, pad_rows

CPU = torch.device("cpu")


def made(i: int) -> Micro:
    """Batches of two shapes, each with other values."""
    b = batch([[30, 40], [64]] if i % 3 else [[1], [2]], 70, 61, seed=i, scored=1.0)
    t = Targets(*targets(b, 61, 4, seed=i), const=float(i))
    b, t = pad_rows(b, t, 8)
    return Micro(b, t, torch.full((140, 8), float(i)))


def tensors(m: Micro) -> list[bytes]:
    b = m.batch
    found = (b.tokens, b.next_ids, b.row_index, b.row_weight, b.cu_seqlens, m.targets.ids, m.targets.probs, m.x)
    return bits(*found) + [m.targets.const, b.weight_sum, b.n_scored, b.max_seqlen]


class Lane:
    """A stream whose fences are numbers, in their order; `waited`: what each set of copies came after."""

    def __init__(self):
        self.queued, self.waited = 0, []

    def fence(self):
        self.queued += 1
        return self.queued

    @contextlib.contextmanager
    def copies(self, after):
        self.waited.append(after)
        yield

    def done(self):
        class Done:
            def synchronize(self):
                pass

        return Done()

    def join(self, copies):
        assert copies is not None


def test_what_was_prepared_is_there_and_two_sets_of_memory_take_turns():
    lane, built = Lane(), []
    ahead = Ahead(CPU, lambda i: built.append(i) or made(i), lane)
    held: dict[int, list] = {}
    where = []
    for step in range(8):
        indices = [2 * step, 2 * step + 1]
        micros = [ahead[i] for i in indices]
        for i, m in zip(indices, micros, strict=True):
            assert tensors(m) == tensors(made(i))
            held[i] = [m, tensors(m)]
        where.append({m.batch.tokens.data_ptr() for m in micros})
        ahead.prepare(range(2 * step + 2, 2 * step + 4))
        for i in indices:  # the work on these is still running
            assert tensors(held[i][0]) == held[i][1]
    assert built == list(range(18))
    assert where[3] == where[5] == where[7] != where[4] == where[6]  # the first is built when it is asked for


def test_a_copy_waits_for_the_work_on_the_memory_it_goes_to():
    lane = Lane()
    ahead = Ahead(CPU, lambda i: made(1), lane)
    for i in range(5):
        ahead[i]
        ahead.prepare([i + 1])
    # New memory waits for all that is queued (2 and 4, a fence of its own each); the others for the work on the memory
    # that they take: fence n + 2 of `prepare` in step n, two steps ago.
    assert lane.waited == [2, 4, 3, 5, 6]


def test_each_index_is_made_once_and_an_unprepared_one_when_it_is_asked_for():
    lane, built = Lane(), []
    ahead = Ahead(CPU, lambda i: built.append(i) or made(i), lane)
    ahead.prepare([1, 2])
    ahead.prepare([2, 3])
    assert tensors(ahead[5]) == tensors(made(5))
    assert [tensors(ahead[i]) == tensors(made(i)) for i in (1, 2, 3)] == [True] * 3
    assert built == [1, 2, 3, 5]


def test_without_a_lane_nothing_is_made_early():
    built = []
    ahead = Ahead(CPU, lambda i: built.append(i) or made(i), None)
    ahead.prepare([1, 2])
    assert built == []
    assert tensors(ahead[1]) == tensors(made(1)) and built == [1]


@pytest.mark.parametrize("first", [1, 2])
def test_static_inputs_stay_where_they_are(first):
    inputs = StaticInputs(CPU)
    a = inputs.load(made(first))
    place, x = a.batch.tokens.data_ptr(), a.x.data_ptr()
    assert bits(a.batch.tokens, a.x) == bits(made(first).batch.tokens, made(first).x)
    b = inputs.load(made(first + 3))
    assert (b.batch.tokens.data_ptr(), b.x.data_ptr()) == (place, x)
    assert tensors(b)[:8] == tensors(made(first + 3))[:8] and float(b.targets.const) == first + 3
    c = inputs.load(made(3))  # other rows: other memory, but for the stream
    assert c.batch.row_index.shape != b.batch.row_index.shape and c.x.data_ptr() == x
