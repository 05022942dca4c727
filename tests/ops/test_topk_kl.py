from __future__ import annotations

import pytest
import torch
from ops_close import GPU_TOL, bits, nan, no_sync, not_worse, same

from cortiq_kernels.ops import topk_kl_torch
from cortiq_kernels.ops.checks import acc_dtype
from cortiq_kernels.ops.topk_kl import head_topk_kl_fwd_bwd, head_topk_kl_ref, mix_targets, new_slab, rows_for

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
F64 = torch.float64


def make(n, h, v, k, dtype, rng, mass=1.0):
    """Distinct ids; probs sum to `mass`."""
    hidden = torch.randn(n, h, generator=rng, dtype=F64).to(dtype)
    head = (0.7 * torch.randn(v, h, generator=rng, dtype=F64)).to(dtype)
    ids = torch.rand(n, v, generator=rng).argsort(1)[:, :k].to(torch.int32)
    probs = mass * torch.softmax(torch.randn(n, k, generator=rng, dtype=F64), -1)
    weight = 0.2 + torch.rand(n, generator=rng, dtype=F64)
    if dtype != F64:
        probs, weight = probs.float(), weight.float()
    return hidden, head, ids, probs, weight


def oracle(hidden, head, ids, probs, weight, scale=1.0, dtype=F64, **options):
    hidden, head = (t.to(dtype, copy=True).requires_grad_() for t in (hidden, head))
    loss, total = head_topk_kl_ref(hidden, head, ids, probs, weight, **options)
    dhidden, dhead = torch.autograd.grad(total * scale, (hidden, head))
    return loss.detach(), total.detach(), dhidden, dhead


def run(hidden, head, ids, probs, weight, **kw):
    """-> (loss, total, dhidden, dhead), gradients into poisoned buffers."""
    dhidden, dhead = nan(*hidden.shape, dtype=hidden.dtype), nan(*head.shape, dtype=acc_dtype(hidden.dtype))
    out = head_topk_kl_fwd_bwd(hidden, head, ids, probs, weight, dhidden=dhidden, dhead=dhead, **kw)
    assert out.total.dtype == F64 and out.total.dim() == 0
    return out.loss, out.total, dhidden, dhead


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n,h,v,k,mass", [(1, 1, 1, 1, 1), (1, 5, 7, 3, 1), (7, 9, 33, 5, 0.6), (41, 17, 131, 12, 1.7)])
def test_matches_float64(n, h, v, k, mass, dtype, rng):
    args = make(n, h, v, k, dtype, rng, mass)
    got = run(*args, grad_scale=0.25)
    exact, eager = oracle(*args, 0.25), oracle(*args, 0.25, dtype)
    for mine, want, base in zip(got, exact, eager, strict=True):
        if dtype == F64:
            same(mine, want)
        elif mine.dim() == 0:
            same(mine, want, (got[0].double() - want / n).abs().max().item() + 1e-2)
        else:
            not_worse(mine, want, base, ulps=4)


def test_loss_is_float32_grade_from_16_bit_logits(rng):
    """The only 16-bit rounding on the way to the loss is that of the logits."""
    args = make(20, 16, 200, 8, torch.bfloat16, rng)
    z = (args[0] @ args[1].t()).double()
    p = args[3].double()
    want = (p * (p.log() - torch.log_softmax(z, -1).gather(1, args[2].long()))).sum(-1)
    same(run(*args)[0], want, 1e-6)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_one_slot_is_cross_entropy(dtype, rng):
    hidden, head, ids, _, weight = make(9, 6, 40, 1, dtype, rng)
    loss, total, dhidden, dhead = run(hidden, head, ids, torch.ones(9, 1), weight)
    h64, w64 = hidden.double().requires_grad_(), head.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(h64 @ w64.t(), ids[:, 0].long(), reduction="none")
    want_total = (want * weight.double()).sum()
    tol = 1e-10 if dtype == F64 else 2e-6
    same(loss, want, tol)
    same(total, want_total, tol)
    for got, exact in zip((dhidden, dhead), torch.autograd.grad(want_total, (h64, w64)), strict=True):
        same(got, exact, tol)


def test_dead_rows_add_exactly_nothing(rng):
    """Weight 0, index -1 and rows past n_active may hold NaN, inf and ids out of range."""
    hidden, head, ids, probs, weight = make(10, 6, 30, 4, torch.float32, rng)
    keep = [0, 2, 3, 5]
    want = run(hidden[keep], head, ids[keep], probs[keep], weight[keep])
    order = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.int32)
    order[4] = -1
    weight = weight[:8].clone()
    weight[1] = 0
    weight[4] = float("nan")
    weight[6:] = float("inf")
    hidden, ids, probs = hidden.clone(), ids[:8].clone(), probs[:8].clone()
    for r in (1, 4, 6, 7, 8, 9):
        hidden[r] = float("nan")
    for r in (1, 4, 6, 7):
        ids[r] = 2**31 - 1
        probs[r] = float("nan")
    loss, total, dhidden, dhead = run(hidden, head, ids, probs, weight, n_active=6, row_index=order)
    same(loss[keep], want[0], 1e-6)
    assert bits(loss[[1, 4, 6, 7]]) == bits(torch.zeros(4))
    same(total, want[1], 1e-6)
    same(dhidden[keep], want[2], 1e-6)
    assert bits(dhidden[[1, 4, 6, 7, 8, 9]]) == bits(torch.zeros(6, 6))
    same(dhead, want[3], 1e-6)


@pytest.mark.parametrize("chunk", [None, 1, 2, 5])
def test_row_index_scores_a_part_in_any_order(chunk, rng):
    hidden, head, ids, probs, weight = make(12, 6, 30, 4, F64, rng)
    index = torch.tensor([7, -1, 3, 0, -1, 11, -1], dtype=torch.int32)
    real = index >= 0
    ids, probs, weight = ids[:7], probs[:7], weight[:7]
    loss, total, dhidden, dhead = run(hidden, head, ids, probs, weight, row_index=index, chunk_rows=chunk)
    want = oracle(hidden[index[real].long()], head, ids[real], probs[real], weight[real])
    same(loss[real], want[0])
    assert (loss[~real] == 0).all()
    same(total, want[1])
    full = torch.zeros_like(hidden)
    full[index[real].long()] = want[2]
    same(dhidden, full)
    same(dhead, want[3])


def test_all_padding(rng):
    hidden, head, ids, probs, weight = make(3, 4, 9, 2, torch.float32, rng)
    hidden.fill_(float("nan"))
    none = torch.full((3,), -1, dtype=torch.int32)
    for kw in ({"row_index": none}, {"n_active": 0}, {"row_index": none, "n_active": 0}):
        assert all((t == 0).all() for t in run(hidden, head, ids, probs, weight, **kw))
    assert all((t == 0).all() for t in run(hidden, head, ids, probs, weight * 0))  # Σw = 0


def test_no_rows():
    head, empty = torch.randn(9, 4), torch.zeros(0, 2)
    for n in (0, 5):
        kw = {} if n == 0 else {"row_index": torch.zeros(0, dtype=torch.int32)}
        got = run(torch.randn(n, 4), head, empty.int(), empty, torch.zeros(0), **kw)
        assert got[0].shape == (0,) and all((t == 0).all() for t in got[1:])
    slots = torch.ones(3, 2)
    padding = torch.full((3,), -1, dtype=torch.int32)
    got = run(torch.randn(0, 4), head, slots.int(), slots, torch.ones(3), row_index=padding)  # a batch of padding only
    assert all((t == 0).all() for t in got)


def test_duplicates_add_up_and_empty_slots_do_not_collide(rng):
    hidden, head, _, _, weight = make(4, 5, 11, 1, F64, rng)
    slots = [[3, 3, -1, 0, 3], [-1, -1, -1, -1, -1], [-1, 0, 10, 0, -1], [2, 11, -7, 99, 2]]
    probs = torch.rand(4, 5, generator=rng, dtype=F64)
    ids = torch.tensor(slots, dtype=torch.int32)
    inside = torch.where((ids >= 0) & (ids < 11), ids, -1)
    want = oracle(hidden, head, inside, probs, weight)
    poisoned = probs.masked_fill(inside < 0, float("nan"))
    for got, exact in zip(run(hidden, head, ids, poisoned, weight), want, strict=True):
        same(got, exact)
    # K copies of id 0 in padded positions must not gather gradient K times.
    one = run(hidden, head, inside[:, :1].clamp(min=0), torch.ones(4, 1).double(), weight)
    padded = torch.zeros(4, 5, dtype=torch.int32)
    padded[:, 0] = inside[:, 0].clamp(min=0)
    p = torch.zeros(4, 5, dtype=F64)
    p[:, 0] = 1
    for got, exact in zip(run(hidden, head, padded, p, weight), one, strict=True):
        same(got, exact)
    # An id twice with half the mass is the id once.
    twice = run(hidden, head, inside[:, [0, 0]].clamp(min=0), torch.full((4, 2), 0.5).double(), weight)
    for got, exact in zip(twice, one, strict=True):
        same(got, exact)


def test_slot_order_does_not_matter(rng):
    args = make(6, 5, 40, 7, F64, rng)
    perm = torch.randperm(7, generator=rng)
    shuffled = (args[0], args[1], args[2][:, perm], args[3][:, perm], args[4])
    for a, b in zip(run(*args), run(*shuffled), strict=True):
        same(a, b, 1e-13)


def test_zero_probability_adds_nothing_to_the_loss(rng):
    hidden, head, ids, probs, weight = make(5, 6, 20, 3, F64, rng)
    probs[:, 1] = 0
    for got, want in zip(run(hidden, head, ids, probs, weight), oracle(hidden, head, ids, probs, weight), strict=True):
        same(got, want)
    fewer = run(hidden, head, ids[:, [0, 2]], probs[:, [0, 2]], weight)
    for got, want in zip(run(hidden, head, ids, probs, weight), fewer, strict=True):
        same(got, want, 1e-13)


def test_teacher_equal_to_student_is_a_minimum(rng):
    hidden, head, _, _, weight = make(5, 6, 20, 1, F64, rng)
    probs = torch.softmax(hidden @ head.t(), -1)
    ids = torch.arange(20, dtype=torch.int32).expand(5, 20)
    for t in run(hidden, head, ids, probs, weight):
        assert t.abs().max() < 1e-14


def test_logit_gradient_sums_to_zero_and_is_linear_in_the_weights(rng):
    """With the identity as the head, dhidden is the gradient of the logits."""
    hidden, _, ids, probs, weight = make(6, 30, 30, 4, F64, rng)
    head = torch.eye(30, dtype=F64)
    _, total, dz, _ = run(hidden, head, ids, probs, weight)
    assert dz.sum(-1).abs().max() < 1e-14
    _, tripled, dz3, _ = run(hidden, head, ids, probs, 3 * weight)
    same(dz3, 3 * dz, 1e-14)
    same(tripled, 3 * total, 1e-14)
    scale = torch.tensor(3.0, dtype=torch.float32)
    _, unscaled, by_tensor, _ = run(hidden, head, ids, probs, weight, grad_scale=scale)
    same(by_tensor, dz3, 1e-14)
    assert unscaled == total


def test_mixture_is_linear_in_the_target(rng):
    """grad(α·onehot + (1-α)·b) = α·grad(onehot) + (1-α)·grad(b)."""
    hidden, head, ids, probs, weight = make(6, 5, 30, 4, F64, rng)
    truth = torch.zeros_like(probs)
    truth[:, 2] = 1
    a, b = run(hidden, head, ids, truth, weight), run(hidden, head, ids, probs, weight)
    mixed = run(hidden, head, ids, 0.3 * truth + 0.7 * probs, weight)
    for x, y, z in zip(a[2:], b[2:], mixed[2:], strict=True):
        same(z, 0.3 * x + 0.7 * y, 1e-13)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_padded_vocabulary_does_not_exist(dtype, rng):
    hidden, head, ids, probs, weight = make(7, 6, 37, 4, dtype, rng)
    ids[0, 0] = 39  # a teacher's padded id is an empty slot
    want = run(hidden, head, torch.where(ids < 37, ids, -1), probs, weight)
    padded = torch.cat([head, torch.full((5, 6), float("nan"), dtype=dtype)])
    loss, total, dhidden, dhead = run(hidden, padded, ids, probs, weight, valid_vocab=37)
    assert bits(loss, total, dhidden, dhead[:37]) == bits(*want)
    assert (dhead[37:] == 0).all()
    before = torch.ones(42, 6, dtype=dtype)
    head_topk_kl_fwd_bwd(hidden, padded, ids, probs, weight, dhead=before, accumulate=True, valid_vocab=37)
    same(before[:37] - 1, want[3], 1e-6)
    assert (before[37:] == 1).all()


@pytest.mark.parametrize("dtype", [F64, torch.bfloat16])
def test_chunks_do_not_matter(dtype, rng, monkeypatch):
    args = make(13, 6, 50, 4, dtype, rng)
    want = run(*args)
    tight = 1e-13 if dtype == F64 else 1e-2
    for chunk in (1, 4, 12, 13, 99):
        for got, exact in zip(run(*args, chunk_rows=chunk), want, strict=True):
            same(got, exact, tight)
    monkeypatch.setattr(topk_kl_torch, "_SLAB", {"cpu": 150})
    monkeypatch.setattr(topk_kl_torch, "_PAIRS", 32)
    for got, exact in zip(run(*args), want, strict=True):
        same(got, exact, tight)


def test_dhead_accumulates_and_either_gradient_may_be_left_out(rng):
    args = make(5, 6, 20, 3, F64, rng)
    loss, total, dhidden, dhead = run(*args)
    more = torch.ones(20, 6, dtype=F64)
    head_topk_kl_fwd_bwd(*args, dhead=more, accumulate=True, chunk_rows=2)
    same(more - 1, dhead)
    untouched = more.clone()
    head_topk_kl_fwd_bwd(*args, 0, dhead=more, accumulate=True)
    assert torch.equal(more, untouched)
    only = nan(5, 6, dtype=F64)
    head_topk_kl_fwd_bwd(*args, dhidden=only)
    assert bits(only) == bits(dhidden)
    poisoned = nan(5, 6, dtype=F64)
    evaluated = head_topk_kl_fwd_bwd(*args, need_grad=False, dhidden=poisoned)
    assert poisoned.isnan().all() and bits(*evaluated) == bits(loss, total)


def test_inputs_stay_untouched_strides_do_not_matter_and_runs_repeat(rng):
    hidden, head, ids, probs, weight = make(11, 6, 40, 5, torch.bfloat16, rng)
    before = bits(hidden, head, ids, probs, weight)
    want = bits(*run(hidden, head, ids, probs, weight))
    assert want == bits(*run(hidden, head, ids.long(), probs, weight))
    assert before == bits(hidden, head, ids, probs, weight)
    wide = torch.zeros(11, 20).bfloat16()
    wide[:, 7:13] = hidden
    turned = (ids.t().contiguous().t(), probs.t().contiguous().t())
    assert bits(*run(wide[:, 7:13], head, *turned, weight)) == want
    same(
        run(hidden[:1].expand(11, 6), head, ids, probs, torch.ones(1).expand(11))[2],
        run(hidden[:1].repeat(11, 1), head, ids, probs, torch.ones(11))[2],
        0,
    )


def test_extreme_logits(rng):
    hidden, head, ids, probs, weight = make(4, 6, 30, 3, torch.float32, rng)
    for t in run(hidden * 1e4, head, ids, probs, weight):
        assert torch.isfinite(t).all()
    bad = hidden.clone()
    bad[2] = float("nan")  # a live row must show its NaN
    loss, total, dhidden, _ = run(bad, head, ids, probs, weight)
    assert loss[2].isnan() and total.isnan() and dhidden[2].isnan().all()
    assert torch.isfinite(loss[[0, 1, 3]]).all() and torch.isfinite(dhidden[[0, 1, 3]]).all()


def test_errors(rng):
    hidden, head, ids, probs, weight = make(4, 6, 30, 3, torch.float32, rng)
    good = {"dhidden": torch.zeros(4, 6)}

    def refused(match, *args, **kw):
        with pytest.raises(ValueError, match=match):
            head_topk_kl_fwd_bwd(*args, **{**good, **kw})

    refused(r"head_topk_kl_fwd_bwd: head_weight must be \[V, 6\]", hidden, head[:, 1:], ids, probs, weight)
    refused("head_weight must be the dtype of hidden", hidden, head.bfloat16(), ids, probs, weight)
    refused("topk_ids must be int32 or int64", hidden, head, ids.float(), probs, weight)
    refused(r"topk_probs must be the shape of topk_ids", hidden, head, ids, probs[:, 1:], weight)
    refused("topk_probs must be float32 or float64", hidden, head, ids, probs.half(), weight)
    refused(r"row_weight must be \[4\]", hidden, head, ids, probs, weight[1:])
    refused(r"topk_ids must be \[N, K\] with N = 4; got \(3, 3\)", hidden, head, ids[1:], probs[1:], weight[1:])
    refused(r"row_index must be \[4\]", hidden, head, ids, probs, weight, row_index=ids[:3, 0])
    refused("n_active must be between 0 and R = 4; got 5", hidden, head, ids, probs, weight, 5)
    refused("chunk_rows must be at least 1; got 0", hidden, head, ids, probs, weight, chunk_rows=0)
    refused("valid_vocab must be between 1 and V = 30", hidden, head, ids, probs, weight, valid_vocab=31)
    refused("dhidden or dhead must be given", hidden, head, ids, probs, weight, dhidden=None)
    refused(r"dhead must be \[30, 6\]", hidden, head, ids, probs, weight, dhead=torch.zeros(29, 6))
    refused("grad_scale must be a number or a 0-d", hidden, head, ids, probs, weight, grad_scale=weight)


OPTIONS = [
    dict(temperature=0.5),
    dict(temperature=3.0),
    dict(softcap=2.0),
    dict(tail=True),
    dict(softcap=4.0, temperature=1.7),
    dict(softcap=4.0, temperature=0.6, tail=True),
]


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_temperature_softcap_and_tail(options, dtype, rng):
    """Against autograd of the reference; duplicates, empty slots, one distinct id, P = 0, 1 and above among them."""
    args = make(6, 9, 57, 7, dtype, rng, mass=0.6)
    args[2][0, 1] = args[2][0, 4]
    args[2][1, 2] = -1
    args[2][2, :] = 11
    args[2][3, :] = -1
    args[3][4] = torch.tensor([0.5, 0.25, 0.125, 0.125, 0, 0, 0])
    args[3][5] *= 2.5
    got, exact = run(*args, **options), oracle(*args, **options)
    assert got[0][3] == 0 and (got[2][3] == 0).all()
    for i in (0, 2, 3):
        if dtype == F64:
            same(got[i], exact[i])
        else:
            not_worse(got[i], exact[i], oracle(*args, dtype=dtype, **options)[i], ulps=4)
    for a, b in zip(got, run(*args, chunk_rows=4, **options), strict=True):
        same(a, b, 1e-12 if dtype == F64 else 2e-6)
    evaluated = head_topk_kl_fwd_bwd(*args, need_grad=False, **options)
    assert bits(*evaluated) == bits(*got[:2])


def test_neutral_options_change_no_bit(rng):
    args = make(5, 6, 20, 3, torch.float32, rng)
    assert bits(*run(*args, temperature=1.0, softcap=0.0, tail=False, backend="torch")) == bits(*run(*args))
    for a, b in zip(run(*args, softcap=1e4), run(*args), strict=True):
        same(a, b, 2e-6)


def test_tail_is_a_bucket_of_its_own(rng):
    """The loss is the KL of the slots and one more outcome, so it is never negative."""
    args = make(30, 6, 40, 4, F64, rng, mass=0.5)
    loss = run(*args, tail=True)[0]
    q = torch.softmax(args[0] @ args[1].t(), -1).gather(1, args[2].long())
    q = torch.cat((q, 1 - q.sum(-1, keepdim=True)), 1)
    p = torch.cat((args[3], torch.full((30, 1), 0.5, dtype=F64)), 1)
    same(loss, (p * (p / q).log()).sum(-1))
    assert (loss >= 0).all()


@pytest.mark.parametrize("above", [5.0, 20.0, 25.0, 90.0])
def test_tail_of_a_sure_student(above, rng):
    """1 − Q is below float32's rounding: not NaN, and as right as elsewhere."""
    z = torch.randn(4, 60, generator=rng)
    ids = torch.rand(4, 60, generator=rng).argsort(1)[:, :5].int()
    z.scatter_add_(1, ids.long(), torch.full((4, 5), above))
    probs = 0.9 * torch.softmax(torch.randn(4, 5, generator=rng), -1)
    args = (z, torch.eye(60), ids, probs, torch.ones(4))
    for got, want in zip(run(*args, tail=True), oracle(*args, tail=True), strict=True):
        same(got, want, 2e-6 * above)


def test_float32_slab_keeps_logits_unrounded(rng):
    args = make(20, 32, 200, 8, torch.bfloat16, rng)
    exact = oracle(*args)[0]
    strict = run(*args, slab_dtype=torch.float32)
    same(strict[0], exact, 1e-5)
    assert (run(*args)[0] - exact).abs().max() > 1e-3  # what a 16-bit slab costs
    by_slab = run(*args, slab=new_slab(3, 200, torch.float32, torch.device("cpu")))
    assert bits(*strict) == bits(*by_slab)
    for i in (2, 3):
        not_worse(strict[i], oracle(*args)[i], oracle(*args, dtype=torch.bfloat16)[i])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_mixture_with_the_true_token(alpha, rng):
    """α·CE + (1 − α)·KL: its value with the constant, and its gradient by central differences."""
    hidden, head, ids, probs, weight = make(5, 4, 20, 3, F64, rng, mass=0.8)
    true = torch.tensor([int(ids[0, 2]), 9, 7, 19, 0])  # the first is a slot already
    ids[1, 0] = -1
    probs[1, 0] = float("nan")
    mixed_ids, mixed, const = mix_targets(ids, probs, true, alpha)
    assert mixed_ids.dtype == torch.int32 and mixed_ids.shape == mixed.shape == (5, 4)
    loss, _, dhidden, dhead = run(hidden, head, mixed_ids, mixed, weight)

    def mix(h, w):
        ce = torch.nn.functional.cross_entropy(h @ w.t(), true, reduction="none")
        return alpha * ce + (1 - alpha) * head_topk_kl_ref(h, w, ids, probs, weight)[0]

    same(loss + const, mix(hidden, head))
    for _ in range(3):
        dh, dw = torch.randn(5, 4, generator=rng, dtype=F64), torch.randn(20, 4, generator=rng, dtype=F64)
        up, down = (mix(hidden + e * dh, head + e * dw) for e in (1e-5, -1e-5))
        same((dhidden * dh).sum() + (dhead * dw).sum(), ((up - down) / 2e-5 * weight).sum(), 1e-8)
    with pytest.raises(ValueError, match="mix_targets: alpha must be between 0 and 1; got 1.5"):
        mix_targets(ids, probs, true, 1.5)


def test_rows_of_a_slab():
    assert rows_for(10**12, 248320) == 4096 and rows_for(1, 248320) == 128
    for budget in (64e6, 512e6, 1e9, 2.1e9):
        rows = rows_for(int(budget), 248320)
        slab = rows * new_slab(1, 248320, torch.bfloat16, torch.device("cpu")).nbytes
        assert slab <= max(budget, 64e6) and (rows == 4096 or 2 * slab > budget)
    assert new_slab(3, 65, torch.float32, torch.device("cpu")).shape == (3, 128)


def test_backend_errors(rng, monkeypatch):
    args = make(4, 6, 30, 3, torch.float32, rng)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def refused(match, args=args, **kw):
        with pytest.raises(ValueError, match=match):
            run(*args, **kw)

    refused(r"head_topk_kl_fwd_bwd: backend must be one of \['auto', 'triton', 'torch'\]; got 'cuda'", backend="cuda")
    refused("backend must be one that can run here; got 'triton', but .*; use backend='auto'", backend="triton")
    refused("float64 is for exact runs", make(4, 6, 30, 3, F64, rng), backend="triton")
    refused(r"temperature and softcap must be above 0, and at least 0; got \(0.0, 0.0\)", temperature=0.0)
    refused(r"got \(1.0, -1.0\)", softcap=-1.0)
    refused(r"got \(nan, 0.0\)", temperature=float("nan"))
    refused("slab_dtype must be torch.float32 or torch.float32; got torch.bfloat16", slab_dtype=torch.bfloat16)
    refused("slab_dtype must be .*; got torch.float16", slab=torch.zeros(4, 30).half())
    refused(r"slab must be torch.float32 \[rows, at least 30\], unit column stride; got", slab=torch.zeros(4, 29))
    refused("slab must be", slab=torch.zeros(0, 30))
    half = [t.half() if t.dtype == torch.float32 and t.dim() == 2 and t.shape[1] == 6 else t for t in args]
    refused("slab must be torch.float32", half, slab=torch.zeros(4, 30).half(), slab_dtype=torch.float32)
    refused("slab must be", slab=torch.zeros(30, 4).t())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_TOL)
def test_gpu(dtype, rng):
    hidden, head, ids, probs, weight = make(64, 32, 520, 12, dtype, rng)
    ids[:, 3:6] = -1
    ids[:, 7] = ids[:, 6]
    index = torch.randperm(64, generator=rng)[:40].to(torch.int32)
    live, ids, probs, weight = index.long(), ids[:40], probs[:40], weight[:40]
    loss, total, part, dhead = oracle(hidden[live], head, ids, probs, weight, 0.25)
    dhidden = torch.zeros(64, 32, dtype=F64).index_copy_(0, live, part)
    want = (torch.cat([loss, torch.zeros(8)]), total, dhidden, dhead)
    pad = lambda t, value: torch.cat([t, torch.full((8, *t.shape[1:]), value, dtype=t.dtype)]).cuda()  # noqa: E731
    args = (hidden.cuda(), head.cuda(), pad(ids, 10**9), pad(probs, float("nan")), pad(weight, 1.0))
    place, scale = pad(index, -1), torch.tensor(0.25).cuda()
    runs = []
    for _ in range(2):
        dh, dw = nan(64, 32, dtype=dtype).cuda(), nan(520, 32, dtype=torch.float32).cuda()
        with no_sync():
            out = head_topk_kl_fwd_bwd(*args, row_index=place, grad_scale=scale, dhidden=dh, dhead=dw, chunk_rows=16)
        for got, exact in zip((*out, dh, dw), want, strict=True):
            same(got.cpu(), exact, GPU_TOL[dtype])
        runs.append(bits(*out, dh, dw))
    assert runs[0] == runs[1]
