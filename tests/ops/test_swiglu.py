from __future__ import annotations

import pytest
import torch
from ops_close import GPU_TOL, bits, nan, no_sync, not_worse, same

from cortiq_kernels.ops.checks import acc_dtype
from cortiq_kernels.ops.swiglu import swiglu_mlp_bwd, swiglu_mlp_fwd, swiglu_ref

SHAPES = [(0, 4), (1, 1), (1, 7), (5, 33), (130, 63)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def make(n, f, dtype, rng):
    gate_up = (2 * torch.randn(n, 2 * f, generator=rng, dtype=torch.float64)).to(dtype)
    dact = torch.randn(n, f, generator=rng, dtype=torch.float64).to(dtype)
    mask = torch.rand(f, generator=rng, dtype=torch.float64).to(acc_dtype(dtype))
    return gate_up, dact, mask


def oracle(gate_up, dact, mask, dtype=torch.float64):
    gate_up, dact, mask = (t.to(dtype, copy=True) for t in (gate_up, dact, mask))
    gate_up.requires_grad_()
    mask.requires_grad_()
    act = swiglu_ref(gate_up, mask)
    dgate_up, dmask = torch.autograd.grad(act, (gate_up, mask), dact)
    return act.detach(), dgate_up, act.detach(), dmask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n,f", SHAPES)
def test_matches_float64(n, f, dtype, rng):
    gate_up, dact, mask = make(n, f, dtype, rng)
    act = swiglu_mlp_fwd(gate_up, mask, out=nan(n, f, dtype=dtype))
    back = swiglu_mlp_bwd(
        dact,
        gate_up,
        mask,
        dgate_up=nan(n, 2 * f, dtype=dtype),
        act=nan(n, f, dtype=dtype),
        dmask=nan(f, dtype=mask.dtype),
    )
    assert bits(back[1]) == bits(act)
    exact, eager = oracle(gate_up, dact, mask), oracle(gate_up, dact, mask, dtype)
    for got, want, base in zip((act, *back), exact, eager, strict=True):
        if dtype == torch.float64:
            same(got, want)
        else:
            not_worse(got, want, base)


def test_no_mask_is_a_mask_of_ones(rng):
    gate_up, dact, _ = make(6, 5, torch.float32, rng)
    ones = torch.ones(5)
    assert bits(swiglu_mlp_fwd(gate_up)) == bits(swiglu_mlp_fwd(gate_up, ones))
    plain, masked = swiglu_mlp_bwd(dact, gate_up), swiglu_mlp_bwd(dact, gate_up, ones)
    assert bits(*plain) == bits(*masked) and plain[2] is None


def test_closed_neuron_is_exactly_silent_but_has_a_mask_gradient(rng):
    gate_up, dact, mask = make(6, 5, torch.float32, rng)
    mask[2] = 0
    act = swiglu_mlp_fwd(gate_up, mask)
    dgate_up, again, dmask = swiglu_mlp_bwd(dact, gate_up, mask, dmask=torch.zeros(5))
    assert (act[:, 2] == 0).all() and (again[:, 2] == 0).all()
    assert (dgate_up[:, [2, 7]] == 0).all()
    assert dmask is not None and dmask[2] != 0
    keep = [0, 1, 3, 4]  # the compacted layer is the masked one
    compact = swiglu_mlp_fwd(gate_up[:, keep + [k + 5 for k in keep]], mask[keep])
    assert bits(compact) == bits(act[:, keep])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_closed_neuron_is_silent_where_gate_times_up_overflows(dtype):
    big = torch.finfo(dtype).max
    gate_up, mask = torch.tensor([[big, big], [1e20, -1e20], [-big, big], [1.0, big]]).to(dtype), torch.zeros(1)
    dgate_up, again, _ = swiglu_mlp_bwd(torch.full((4, 1), 2.0, dtype=dtype), gate_up, mask)
    for t in (swiglu_mlp_fwd(gate_up, mask), again, dgate_up):
        assert (t == 0).all()


def test_mask_gradient_of_a_nearly_open_gate(rng):
    """In 16 bit a gate at logit 7 rounds to 1, and its gradient through the logistic function to 0."""
    gate_up, dact, _ = make(8, 3, torch.bfloat16, rng)
    mask = torch.sigmoid(torch.full((3,), 7.0))
    _, _, ds = swiglu_mlp_bwd(dact, gate_up, mask, dmask=torch.zeros(3))
    dm = ds * mask * (1 - mask)
    want = oracle(gate_up, dact, mask)[3] * (mask * (1 - mask)).double()
    assert (dm != 0).all()
    same(dm / want, torch.ones(3), 1e-5)


def test_dmask_accumulates_and_identity_with_down_proj(rng):
    """Σ_h Wd·dWd per neuron equals mask·dmask, whatever the numbers are."""
    gate_up, _, mask = make(20, 6, torch.float64, rng)
    wd = torch.randn(4, 6, generator=rng, dtype=torch.float64)
    dy = torch.randn(20, 4, generator=rng, dtype=torch.float64)
    dmask = torch.full((6,), 3.0, dtype=torch.float64)
    _, act, _ = swiglu_mlp_bwd(dy @ wd, gate_up, mask, dmask=dmask, accumulate=True)
    same((wd * (dy.t() @ act)).sum(0), mask * (dmask - 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_rank_neurons(dtype, rng):
    """Of act as it is written, in the rows that count, whatever the others hold; `=` and `+=`."""
    gate_up, dact, mask = make(40, 7, dtype, rng)
    counted = torch.rand(40, generator=rng) < 0.6
    act = swiglu_mlp_fwd(gate_up, mask)
    gate_up[~counted] = float("nan")
    want = act[counted].to(mask.dtype).abs().sum(0), act[counted].to(mask.dtype).square().sum(0)
    got = nan(7, dtype=mask.dtype), nan(7, dtype=mask.dtype)
    sums = dict(sum_abs=got[0], sum_square=got[1], counted=counted)
    swiglu_mlp_fwd(gate_up, mask, **sums)
    for mine, exact in zip(got, want, strict=True):
        same(mine, exact, 1e-12 if dtype == torch.float64 else 1e-5)
    swiglu_mlp_fwd(gate_up, mask, **sums, accumulate=True)
    for mine, exact in zip(got, want, strict=True):
        same(mine, 2 * exact, 1e-12 if dtype == torch.float64 else 1e-5)


def test_first_order_score_is_the_mask_times_its_gradient(rng):
    gate_up, dact, mask = make(9, 5, torch.float32, rng)
    dmask, product, alone = (torch.full((5,), 3.0) for _ in range(3))
    swiglu_mlp_bwd(dact, gate_up, mask, dmask=dmask, mask_dmask=product, accumulate=True)
    same(product - 3, mask * (dmask - 3), 1e-6)
    swiglu_mlp_bwd(dact, gate_up, mask, mask_dmask=alone)
    same(alone, product - 3, 1e-6)
    no_mask = swiglu_mlp_bwd(dact, gate_up, dmask=dmask, mask_dmask=product)[2]
    assert bits(no_mask) == bits(product)


@pytest.mark.parametrize("accumulate", [False, True])
def test_no_rows_have_no_sums(accumulate):
    """A peer left them as they were allocated."""
    empty = torch.zeros(0, 10)
    sums = [torch.full((5,), 3.0) for _ in range(4)]
    swiglu_mlp_fwd(empty, sum_abs=sums[0], sum_square=sums[1], accumulate=accumulate)
    swiglu_mlp_bwd(empty[:, :5], empty, dmask=sums[2], mask_dmask=sums[3], accumulate=accumulate)
    assert all((s == (3 if accumulate else 0)).all() for s in sums)


def test_buffers_may_be_the_inputs(rng):
    gate_up, dact, mask = make(7, 9, torch.bfloat16, rng)
    want = bits(*swiglu_mlp_bwd(dact, gate_up, mask)[:2])
    g, a = gate_up.clone(), dact.clone()
    swiglu_mlp_bwd(a, g, mask, dgate_up=g, act=a)
    assert bits(g, a) == want


def test_inputs_stay_untouched_and_second_run_is_bitwise_equal(rng):
    gate_up, dact, mask = make(65, 33, torch.float32, rng)
    before = bits(gate_up, dact, mask)
    runs = [
        bits(swiglu_mlp_fwd(gate_up, mask), *swiglu_mlp_bwd(dact, gate_up, mask, dmask=torch.zeros(33)))
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and bits(gate_up, dact, mask) == before


def test_strided_and_expanded(rng):
    wide = torch.randn(5, 30, generator=rng, dtype=torch.float64)
    gate_up, dact = wide[:, 4:16], torch.ones((), dtype=torch.float64).expand(5, 6)
    mask = torch.full((1,), 0.5, dtype=torch.float64).expand(6)
    want = oracle(gate_up, dact, mask)
    buffer = nan(5, 8, dtype=torch.float64)
    same(swiglu_mlp_fwd(gate_up, mask, out=buffer[:, 1:7]), want[0])
    assert buffer[:, 0].isnan().all() and buffer[:, 7].isnan().all()
    for got, exact in zip(swiglu_mlp_bwd(dact, gate_up, mask, dmask=torch.zeros(6).double()), want[1:], strict=True):
        same(got, exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_gates(dtype):
    gate_up = torch.tensor([[-3e4, 3e4, -80.0, 0.0, 1.0, 1.0, 1.0, 1.0]], dtype=dtype)
    act = swiglu_mlp_fwd(gate_up)
    assert act[0, 0] == 0 and act[0, 3] == 0 and act[0, 1] == gate_up[0, 1]
    dgate_up, _, _ = swiglu_mlp_bwd(torch.ones_like(act), gate_up)
    assert torch.isfinite(dgate_up).all()
    assert dgate_up[0, :4].tolist() == pytest.approx([0.0, 1.0, 0.0, 0.5], abs=1e-6)


def test_errors():
    with pytest.raises(ValueError) as e:
        swiglu_mlp_fwd(torch.zeros(8, 31))
    assert str(e.value) == "swiglu_mlp_fwd: gate_up must be [N, 2F]; got (8, 31); pass gate and up side by side"
    gate_up = torch.zeros(8, 6)
    with pytest.raises(ValueError, match=r"swiglu_mlp_fwd: mask must be \[3\]; got \(6,\)"):
        swiglu_mlp_fwd(gate_up, torch.zeros(6))
    with pytest.raises(ValueError, match="mask must be float32; got torch.bfloat16"):
        swiglu_mlp_fwd(gate_up, torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"swiglu_mlp_fwd: out must be \[8, 3\]; got \(8, 6\)"):
        swiglu_mlp_fwd(gate_up, out=gate_up)
    with pytest.raises(ValueError, match=r"swiglu_mlp_bwd: dact must be \[8, 3\]; got \(7, 3\)"):
        swiglu_mlp_bwd(torch.zeros(7, 3), gate_up)
    with pytest.raises(ValueError, match="dact must be the dtype of gate_up"):
        swiglu_mlp_bwd(torch.zeros(8, 3, dtype=torch.float64), gate_up)
    with pytest.raises(ValueError, match=r"dmask must be \[3\]"):
        swiglu_mlp_bwd(torch.zeros(8, 3), gate_up, dmask=torch.zeros(4))
    with pytest.raises(ValueError, match=r"sum_abs must be \[3\]; got \(6,\)"):
        swiglu_mlp_fwd(gate_up, sum_abs=torch.zeros(6))
    with pytest.raises(ValueError, match="mask_dmask must be a tensor whose elements do not share memory"):
        swiglu_mlp_bwd(torch.zeros(8, 3), gate_up, mask_dmask=torch.zeros(1).expand(3))
    with pytest.raises(ValueError, match=r"counted must be \[8\]; got \(3,\); it says of every row"):
        swiglu_mlp_fwd(gate_up, counted=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="counted must be bool; got torch.float32"):
        swiglu_mlp_fwd(gate_up, counted=torch.zeros(8))
    with pytest.raises(ValueError, match="backend must be one of"):
        swiglu_mlp_fwd(gate_up, backend="cuda")
    with pytest.raises(ValueError, match="backend must be one that can run here; got 'triton', but a CPU tensor"):
        swiglu_mlp_bwd(torch.zeros(8, 3), gate_up, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_TOL)
def test_gpu(dtype, rng):
    gate_up, dact, mask = make(130, 65, dtype, rng)
    want = oracle(gate_up, dact, mask)
    gate_up, dact, mask = gate_up.cuda(), dact.cuda(), mask.cuda()
    runs = []
    for _ in range(2):
        dmask = nan(65, dtype=torch.float32).cuda()
        with no_sync():
            got = (swiglu_mlp_fwd(gate_up, mask), *swiglu_mlp_bwd(dact, gate_up, mask, dmask=dmask))
        assert bits(got[0]) == bits(got[2])
        for mine, exact in zip(got, want, strict=True):
            same(mine.cpu(), exact, 1e-5 if mine is dmask else GPU_TOL[dtype])
        runs.append(bits(*got))
    assert runs[0] == runs[1]
