from __future__ import annotations

import math

import pytest
import torch
from ops_close import bits, same

from cortiq_kernels.ops.gated_delta import (
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    chunk_gated_delta_rule_ref,
    layout,
)
from cortiq_kernels.ops.gated_delta.core import unit_lower_inverse

NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dh0")
# error allowed in norm, relative to the norm of the float64 result; float32 sums run over some hundred products
BOUND = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def make(batch, t, hk, hv, dk, dv, rng, *, states=None, g=None, dtype=torch.float64):
    """q, k, v, g, beta, initial_state and the gradients of o and the final state."""

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    states = batch if states is None else states
    unit = torch.nn.functional.normalize
    rates = torch.linspace(0, 16, hv, dtype=torch.float64)  # the range of exp(A_log)
    inputs = (
        unit(normal(batch, t, hk, dk), dim=-1),
        unit(normal(batch, t, hk, dk), dim=-1),
        normal(batch, t, hv, dv),
        -rates * torch.nn.functional.softplus(normal(batch, t, hv)) if g is None else torch.full((batch, t, hv), g),
        normal(batch, t, hv).sigmoid(),
        normal(states, hv, dk, dv),
    )
    grads = normal(batch, t, hv, dv), normal(states, hv, dk, dv)
    return tuple(x.to(dtype) for x in inputs), tuple(x.to(dtype) for x in grads)


def ours(inputs, grads, cu=None, scale=None):
    q, k, v, g, beta, h0 = inputs
    o, final, saved = chunk_gated_delta_rule_fwd(q, k, v, g, beta, scale, h0, True, cu)
    return (o, final, *chunk_gated_delta_rule_bwd(grads[0], saved, grads[1]))


def oracle(inputs, grads, cu=None, scale=None):
    q, k, v, g, beta, h0 = leaves = [x.detach().double().requires_grad_() for x in inputs]
    o, final = chunk_gated_delta_rule_ref(q, k, v, g, beta, scale, h0, True, cu)
    back = torch.autograd.grad((o, final), leaves, [x.double() for x in grads], materialize_grads=True)
    return (o.detach(), final.detach(), *back)


def close(got, want, bound):
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert a.shape == b.shape, name
        assert torch.isfinite(a).all(), name
        error, size = (a.double() - b).norm().item(), b.norm().item()
        assert error <= bound * max(size, 1e-3), (name, error, size)


@pytest.mark.parametrize("t", [0, 1, 2, 16, 31, 33, 100])
@pytest.mark.parametrize("hk,hv", [(1, 1), (2, 4), (1, 3)])
def test_float64(t, hk, hv, rng):
    inputs, grads = make(2, t, hk, hv, 6, 10, rng)
    close(ours(inputs, grads), oracle(inputs, grads), BOUND[torch.float64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype, rng):
    inputs, grads = make(2, 70, 2, 4, 16, 8, rng, dtype=dtype)
    got = ours(inputs, grads)
    assert [x.dtype for x in got] == [dtype, torch.float32, *[dtype] * 5, torch.float32]
    close(got, oracle(inputs, grads), BOUND[dtype])


@pytest.mark.parametrize("chunk", [16, 64, 128])
def test_chunk_sizes(chunk, rng, monkeypatch):
    monkeypatch.setattr(layout, "CHUNK_CPU", chunk)
    inputs, grads = make(1, 150, 1, 2, 5, 3, rng)
    close(ours(inputs, grads), oracle(inputs, grads), BOUND[torch.float64])


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_scale(scale, rng):
    inputs, grads = make(1, 20, 1, 1, 4, 4, rng)
    close(ours(inputs, grads, scale=scale), oracle(inputs, grads, scale=scale), BOUND[torch.float64])


def test_no_state_in_or_out(rng):
    (q, k, v, g, beta, h0), (do, _) = make(2, 40, 1, 2, 4, 4, rng)
    o, final, saved = chunk_gated_delta_rule_fwd(q, k, v, g, beta)
    assert final is None
    assert chunk_gated_delta_rule_fwd(q, k, v, g, beta, save=False)[2] is None
    *grads, dh0 = chunk_gated_delta_rule_bwd(do, saved)
    assert dh0 is None
    zero = torch.zeros_like(h0)
    want = oracle((q, k, v, g, beta, zero), (do, zero))
    for a, b in zip((o, *grads), (want[0], *want[2:7]), strict=True):
        same(a, b)


@pytest.mark.parametrize("lengths", [[70], [1, 1, 1], [0, 3, 0, 0, 40, 1, 0], [32, 64, 33], [0, 0], []])
def test_packed_is_one_by_one(lengths, rng):
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    inputs, grads = make(1, sum(lengths), 1, 2, 4, 6, rng, states=len(lengths))
    got = ours(inputs, grads, cu)
    close(got, oracle(inputs, grads, cu), BOUND[torch.float64])
    for s, (lo, hi) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        row = tuple(x[:, lo:hi] for x in inputs[:5]) + (inputs[5][s : s + 1],)
        alone = ours(row, (grads[0][:, lo:hi], grads[1][s : s + 1]))
        for name, a, b in zip(NAMES, got, alone, strict=True):
            same(a[s : s + 1] if name in ("final_state", "dh0") else a[:, lo:hi], b, 1e-12)


def test_no_decay_is_the_delta_rule(rng):
    inputs, grads = make(1, 90, 1, 1, 5, 5, rng, g=0.0)
    q, k, v, _, beta, h0 = (x[0] for x in inputs)
    state, rows = h0[0], []
    for t in range(90):
        kt = k[t, 0]
        state = state - beta[t] * torch.outer(kt, kt @ state) + beta[t] * torch.outer(kt, v[t, 0])
        rows.append(q[t, 0] @ state * 5**-0.5)
    got = ours(inputs, grads)
    same(got[0][0, :, 0], torch.stack(rows))
    close(got, oracle(inputs, grads), BOUND[torch.float64])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("g", [-20.0, -1e4, -1e30, -math.inf])
def test_strong_decay(g, dtype, rng):
    inputs, grads = make(1, 70, 1, 2, 4, 4, rng, g=g, dtype=dtype)
    want = oracle(inputs, grads)
    close(ours(inputs, grads), want, BOUND[dtype])


@pytest.mark.parametrize("g", [-500.0, -1e30])
def test_weak_decay_after_strong(g, rng):
    """The cumulative decay is large, the differences that matter are small: float32 sums would lose them."""
    inputs, grads = make(1, 64, 1, 1, 8, 8, rng, g=-0.01, dtype=torch.float32)
    inputs[3][:, ::7] = g
    got, want = ours(inputs, grads), oracle(inputs, grads)
    close(got, want, 2e-6)


def test_decay_gradient_does_not_cancel(rng):
    """dg under a mix of decays, element by element; exactly 0 where nothing decays through the token."""
    inputs, grads = make(2, 64, 1, 4, 16, 16, rng, dtype=torch.float32)
    inputs[3][..., 1:] -= 5
    zero = torch.zeros_like(inputs[5])
    inputs = (*inputs[:5], zero)
    dg, want = ours(inputs, (grads[0], zero))[5], oracle(inputs, (grads[0], zero))[5]
    assert (dg[:, 0] == 0).all()
    assert ((dg - want).abs() <= 2e-5 * want.abs() + 1e-6 * want.abs().amax((1,), keepdim=True)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_identical_keys(beta, dtype, rng):
    inputs, grads = make(1, 100, 1, 2, 4, 4, rng, g=0.0, dtype=dtype)
    inputs[1][:] = inputs[1][:, :1].clone()
    inputs[4][:] = beta
    close(ours(inputs, grads), oracle(inputs, grads), BOUND[dtype])


@pytest.mark.parametrize("size", [1e-18, 1e12])
def test_extreme_values(size, rng):
    inputs, grads = make(1, 40, 1, 2, 8, 8, rng, dtype=torch.float32)
    inputs = (*inputs[:2], inputs[2] * size, *inputs[3:5], inputs[5] * size)
    got, want = ours(inputs, grads), oracle(inputs, grads)
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert (a.double() - b).norm() <= 2e-5 * b.norm(), name


def test_strided_and_expanded(rng):
    inputs, grads = make(2, 37, 2, 4, 4, 6, rng)
    wide = [torch.randn(2, 2 * 37, x.shape[2] + 1, *x.shape[3:], dtype=x.dtype)[:, ::2, 1:] for x in inputs[:5]]
    for view, x in zip(wide, inputs, strict=False):
        view.copy_(x)
    do = torch.randn(4, 1, dtype=torch.float64).expand(2, 37, 4, 6)
    h0, dht = inputs[5].mT.contiguous().mT, grads[1].mT.contiguous().mT
    got = ours((*wide, h0), (do, dht))
    for a, b in zip(got, ours(inputs, (do.contiguous(), grads[1])), strict=True):
        same(a, b, 1e-13)


def test_repeats_bit_for_bit_and_leaves_its_inputs(rng):
    inputs, grads = make(1, 90, 2, 4, 8, 8, rng, states=3, dtype=torch.float32)
    cu = torch.tensor([0, 50, 51, 90], dtype=torch.int32)
    before = bits(*inputs, *grads)
    q, k, v, g, beta, h0 = inputs
    o, final, saved = chunk_gated_delta_rule_fwd(q, k, v, g, beta, None, h0, True, cu)
    first = chunk_gated_delta_rule_bwd(grads[0], saved, grads[1])
    again = chunk_gated_delta_rule_bwd(grads[0], saved, grads[1])
    assert bits(*first) == bits(*again)
    assert bits(o, final, *first) == bits(*ours(inputs, grads, cu))
    assert bits(*inputs, *grads) == before


@pytest.mark.parametrize("c", [1, 2, 16, 64])
def test_unit_lower_inverse(c, rng):
    lower = torch.rand(3, c, c, generator=rng).tril(-1)
    lower[0] = torch.ones(c, c).tril(-1)  # identical keys, beta 1
    exact = torch.linalg.inv(lower.double() + torch.eye(c))
    same(unit_lower_inverse(lower), exact, 3e-6)


def test_errors(rng):
    (q, k, v, g, beta, h0), (do, dht) = make(2, 5, 2, 4, 4, 4, rng)
    cu = torch.tensor([0, 5], dtype=torch.int32)
    _, _, saved = chunk_gated_delta_rule_fwd(q, k, v, g, beta)
    for call, match in (
        (lambda: chunk_gated_delta_rule_fwd(q[0], k, v, g, beta), "q must be"),
        (lambda: chunk_gated_delta_rule_fwd(q, k[..., :3], v, g, beta), "k must be the shape of q"),
        (lambda: chunk_gated_delta_rule_fwd(q, k, v[:, :4], g, beta), r"v must be \[2, 5, HV, DV\]"),
        (lambda: chunk_gated_delta_rule_fwd(q, k, v[:, :, :3], g, beta), "a multiple of the 2 of k; got 3"),
        (lambda: chunk_gated_delta_rule_fwd(q, k, v, g[..., :2], beta), "g must be"),
        (lambda: chunk_gated_delta_rule_fwd(q, k, v, g, beta[:1]), "beta must be"),
        (lambda: chunk_gated_delta_rule_fwd(q, k, v, g, beta.int()), "beta must be"),
        (lambda: chunk_gated_delta_rule_fwd(q, k, v, g, beta, None, h0[:1]), r"initial_state must be \[2, 4, 4, 4\]"),
        (lambda: chunk_gated_delta_rule_fwd(q, k, v, g, beta, None, h0.int()), "initial_state must be bfloat16 or"),
        (lambda: chunk_gated_delta_rule_fwd(q[..., :0], k[..., :0], v, g, beta), "DK and DV must be at least 1"),
        (lambda: chunk_gated_delta_rule_fwd(q, k, v[..., :0], g, beta), "DK and DV must be at least 1"),
        (lambda: chunk_gated_delta_rule_fwd(q, k, v, g, beta, cu_seqlens=cu), "B must be 1 with cu_seqlens; got 2"),
        (lambda: chunk_gated_delta_rule_fwd(q, k, v, g, beta, cu_seqlens=cu.float()), "cu_seqlens must be int32"),
        (lambda: chunk_gated_delta_rule_bwd(do[:1], saved), "do must be"),
        (lambda: chunk_gated_delta_rule_bwd(do, saved, dht[:1]), "dht must be"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
