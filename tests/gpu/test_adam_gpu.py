"""The Adam kernels on a GPU: right, repeatable, captured, and past 2^31 elements."""

from __future__ import annotations

import pytest
import torch
from ops_close import bits, no_sync, same

from cortiq_kernels.ops.adam import AdamRange, AdamRanges, AdamState, adam_step_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
F32, F64 = torch.float32, torch.float64


def flat(n, rng, moments=F32, plane=torch.bfloat16):
    p, g = (torch.randn(n, generator=rng) for _ in range(2))
    m, v = torch.randn(n, generator=rng).to(moments), torch.rand(n, generator=rng).to(moments)
    return [p, g, m, v, torch.full((n,), 3.0).to(plane)]


def both(tensors, steps=3, scale=1.0, **kw):
    """(on the GPU, on the CPU, states of both) after `steps` steps."""
    here, there = [x.clone() for x in tensors], [x.cuda() for x in tensors]
    states = AdamState.new("cpu", scale), AdamState.new("cuda", scale)
    for state, t in zip(states, (here, there), strict=True):
        for _ in range(steps):
            adam_step_(state, *t[:4], plane=t[4], **kw)
    return there, here, states


@pytest.mark.parametrize("moments", [F32, F64])
@pytest.mark.parametrize("n", [0, 1, 1000, 1024, 70_001, 1 << 20])
def test_equals_the_cpu(n, moments, rng):
    t = flat(n, rng, moments)
    got, want, states = both(t, rate=1e-2, weight_decay=0.1, loss=None, scale=8.0)
    for a, b in zip(got[:4], want[:4], strict=True):
        same(a.cpu(), b, 2e-6)
    assert bits(got[4]) == bits(got[0].bfloat16())
    a, b = (s.read() for s in states)
    assert a[:4] == b[:4] and a.ok and a.norm == pytest.approx(b.norm, rel=1e-12)


@pytest.mark.parametrize("offset", [0, 1, 16])
@pytest.mark.parametrize("plane", [torch.bfloat16, torch.float16])
def test_ranges_and_slices(offset, plane, rng):
    n = 300_000
    t = flat(n + 32, rng, plane=plane)
    ranges = [AdamRange(128, 65_664, 256, 0.5), AdamRange(100_000, 100_000), AdamRange(131_072, 262_144)]
    if offset == 1:
        ranges = [r._replace(start=r.start + 3) for r in ranges[::2]]
    ranges = AdamRanges(ranges)
    inside = torch.zeros(n, dtype=torch.bool)
    for r in ranges.ranges:
        inside[r.start : r.stop] = True
    t[1][offset : offset + n][~inside] = float("nan")
    here, there = [x.clone() for x in t], [x.cuda() for x in t]
    for side in (here, there):
        cut = [x[offset : offset + n] for x in side]
        adam_step_(AdamState.new(side[0].device), *cut[:4], plane=cut[4], ranges=ranges, rate=1e-2)
    for a, b, before in zip(there, here, t, strict=True):
        a, b, before = a.cpu(), b, before
        eps = 1e-2 if a.dtype == plane else 2e-6
        finite = before.isfinite()
        same(a[finite], b[finite], eps)
        if a.dtype == F32:
            cut = slice(offset, offset + n)
            assert bits(a[cut][~inside], a[:offset], a[offset + n :]) == bits(
                before[cut][~inside], before[:offset], before[offset + n :]
            )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_refused_step_changes_no_bit(bad, rng):
    t = [x.cuda() for x in flat(100_000, rng)]
    t[1][77_777] = bad
    before = [x.clone() for x in t]
    state = AdamState.new("cuda", 4.0)
    adam_step_(state, *t[:4], plane=t[4], rate=1e-2)
    assert bits(*t) == bits(*before)
    assert state.read()[:4] == (0, 1, 1, 2.0) and not state.read().ok


def test_huge_gradients_are_clipped(rng):
    t = flat(1000, rng)
    t[1].fill_(1e20)
    got, want, states = both(t, steps=1, rate=1e-2)
    for a, b in zip(got[:4], want[:4], strict=True):
        same(a.cpu(), b, 2e-6)
    assert states[1].read().ok and states[1].read().norm == pytest.approx(1e20 * 1000**0.5, rel=1e-6)


def test_twenty_runs_are_bitwise_equal(rng):
    t = flat(3_000_000, rng)
    runs = set()
    for _ in range(20):
        mine, state = [x.cuda() for x in t], AdamState.new("cuda")
        adam_step_(state, *mine[:4], plane=mine[4], rate=1e-2)
        runs.add((*(x.double().sum().item() for x in mine), state.read().norm))
    assert len(runs) == 1


def test_one_graph_serves_every_rate_without_a_wait(rng):
    t = flat(100_000, rng)
    ranges = AdamRanges([AdamRange(0, 50_048, 0, 0.5), AdamRange(50_048, 100_000)])
    here, there = [x.clone() for x in t], [x.cuda() for x in t]
    rate, state = torch.zeros((), dtype=F64, device="cuda"), AdamState.new("cuda")
    loss = torch.ones((), dtype=F64, device="cuda")
    plain = AdamState.new("cpu")
    kw = {"ranges": ranges, "loss": loss, "rate": rate}
    adam_step_(AdamState.new("cuda"), *(x.cuda() for x in t[:4]), plane=t[4].cuda(), **kw)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        adam_step_(state, *there[:4], plane=there[4], **kw)
    with no_sync():
        for i in range(3):
            rate.fill_(1e-2 * (i + 1))
            graph.replay()
    for i in range(3):
        adam_step_(plain, *here[:4], plane=here[4], ranges=ranges, rate=1e-2 * (i + 1))
    for a, b in zip(there[:4], here[:4], strict=True):
        same(a.cpu(), b, 2e-6)
    assert state.read()[:4] == plain.read()[:4]


def test_more_elements_than_32_bits_count():
    n = (1 << 31) + 4096
    if torch.cuda.mem_get_info()[0] < 18 * n + (2 << 30):
        pytest.skip("needs 40 GB")
    param, grad, m, v = (torch.zeros(n, device="cuda") for _ in range(4))
    plane = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    grad[-5:] = 3.0
    grad[:5] = 4.0
    state = AdamState.new("cuda")
    adam_step_(state, param, grad, m, v, plane=plane, rate=0.5)
    assert state.read().norm == pytest.approx(125**0.5, rel=1e-12)
    same(param[-5:].cpu(), torch.full((5,), -0.5), 1e-6)
    same(param[:5].cpu(), torch.full((5,), -0.5), 1e-6)
    assert (plane[-5:] == -0.5).all() and int(param.count_nonzero()) == 10
