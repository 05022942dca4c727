"""Weight gradients beside the chain: however late they run, they read what was there when they were queued."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, geometry, targets

from cortiq_kernels import backend
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import POLICIES, Micro, Trainer
from cortiq_kernels.step.loss import Targets

WINDOW = 40


class Late:
    """The worst side stream there is: it works only when somebody waits, and then on no more than it has to."""

    def __init__(self):
        self.queued, self.most = [], 0

    def run(self, what, work):
        self.queued.append((what, work))
        self.most = max(self.most, len(self.queued))

    def wait(self, what):
        names = [name for name, _ in self.queued]
        upto = len(names) - names[::-1].index(what) if what in names else 0  # a stream runs in order
        for _, work in self.queued[:upto]:
            work()
        del self.queued[:upto]

    def join(self):
        for what in [name for name, _ in self.queued]:
            self.wait(what)

    def forget(self):
        assert not self.queued


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("train", "mixers_from", "more"),
    [("all", 0, {}), ("layers", 0, dict(num_loops=2, norm_between_loops=True)), ("mlp", 99, {}), ("mlp", 2, {})],
)
def test_late_products_change_no_bit(policy, train, mixers_from, more):
    g, found = geometry("LLFL", nk=1, nv=3, **more), []
    for lane in (None, Late()):
        w = Weights.random(g, seed=1, dtype=torch.float32, train=train, std=0.1, vector_noise=0.1)
        t = Trainer(w, 2 * WINDOW, WINDOW, policy=policy, mixers_from=mixers_from)
        t.buffers.lane = lane or t.buffers.lane
        for i in range(2):
            micros = []
            for j in range(2):
                b = batch([[9, 1, 17], [40]], WINDOW, g.vocab, seed=i + j)
                micros.append(Micro(b, Targets(*targets(b, g.vocab, 5, seed=i + j))))
            t.step(micros, 1e-2)
        assert lane is None or (not lane.queued and lane.most >= (1 if policy == "layer" or mixers_from == 99 else 2))
        found.append([w.trained.grad, w.trained.master, t.loss.clone()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_cpu_runs_at_once():
    lane, seen = backend.SideLane(torch.device("cpu")), []
    lane.run("a", lambda: seen.append("a"))
    assert seen == ["a"]
    lane.wait("a")
    lane.join()
    lane.forget()
