"""The head's loss kernel under Triton's interpreter, held against the torch path in float64.

Shapes that end inside a tile, several tiles a row (BLOCK shrunk), and everything that a row may hold. bfloat16 is for
the GPU: the interpreter computes it wrong.
"""

from __future__ import annotations

import pytest
import torch
from interpreter import unfit
from ops_close import bits, nan, not_worse, same

from cortiq_kernels.ops.topk_kl import head_topk_kl_fwd_bwd, head_topk_kl_ref, mix_targets, new_slab

F64, INF, NAN = torch.float64, float("inf"), float("nan")

pytestmark = [pytest.mark.interpret, pytest.mark.skipif(bool(unfit()), reason=unfit())]
DTYPES = [torch.float32, torch.float16]


@pytest.fixture(params=[64, 4096])
def block(request, monkeypatch) -> int:
    from cortiq_kernels.ops import topk_kl_triton

    monkeypatch.setattr(topk_kl_triton, "BLOCK", request.param)
    return request.param


@pytest.fixture
def small_block(monkeypatch) -> int:
    from cortiq_kernels.ops import topk_kl_triton

    monkeypatch.setattr(topk_kl_triton, "BLOCK", 64)
    return 64


def make(n, h, v, k, dtype, rng, mass=1.0):
    """Ids may repeat; probs sum to `mass`."""
    hidden = torch.randn(n, h, generator=rng, dtype=F64).to(dtype)
    head = (0.7 * torch.randn(v, h, generator=rng, dtype=F64)).to(dtype)
    ids = torch.randint(0, v, (n, k), generator=rng, dtype=torch.int32)
    probs = mass * torch.softmax(torch.randn(n, k, generator=rng), -1)
    return hidden, head, ids, probs, 0.2 + torch.rand(n, generator=rng)


def run(hidden, head, ids, probs, weight, n_active=None, backend="triton", **kw):
    """-> (loss, total, dhidden, dhead), gradients into poisoned buffers."""
    dhidden = nan(*hidden.shape, dtype=hidden.dtype)
    dhead = nan(*head.shape, dtype=F64 if hidden.dtype == F64 else torch.float32)
    out = head_topk_kl_fwd_bwd(
        hidden, head, ids, probs, weight, n_active, dhidden=dhidden, dhead=dhead, backend=backend, **kw
    )
    return out.loss, out.total, dhidden, dhead


def truth(hidden, head, ids, probs, weight, n_active=None, **kw):
    """The torch path in float64 from the same inputs."""
    kw = {name: value for name, value in kw.items() if name not in ("slab", "slab_dtype", "chunk_rows")}
    return run(hidden.double(), head.double(), ids, probs.double(), weight.double(), n_active, "torch", **kw)


def autograd(hidden, head, ids, probs, weight, scale=1.0, **options):
    """float64 autograd through the reference; ids out of range are empty slots."""
    hidden, head = (t.double().requires_grad_() for t in (hidden, head))
    ids = torch.where((ids >= 0) & (ids < head.shape[0]), ids, -1)
    loss, total = head_topk_kl_ref(hidden, head, ids, probs, weight, **options)
    grads = torch.autograd.grad(total * scale, (hidden, head))
    return loss.detach(), total.detach(), *grads


def check(args, **kw):
    """At most 1.5 times as far from float64 as the torch path in the same dtype; returns what the kernel gave."""
    got, exact, eager = run(*args, **kw), truth(*args, **kw), run(*args, backend="torch", **kw)
    for i in (0, 2, 3):
        not_worse(got[i], exact[i], eager[i], ulps=4)
    same(got[1], (args[4].double() * got[0].double()).sum())  # the total is that of the losses returned
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v,k", [(1, 1), (255, 0), (255, 7), (257, 16), (257, 17), (63, 40), (4097, 7)])
def test_matches_float64(v, k, dtype, block, rng):
    n = 2 if v > 4096 else 5
    args = make(n, 9, v, k, dtype, rng, mass=0.7)
    if k > 7:
        args[2][0, 3], args[2][1, :5], args[2][2] = -1, v, -7
        args[3][args[2] < 0] = NAN  # an empty slot's probability is never read
    got = check(args, grad_scale=0.25)
    if dtype == torch.float32:
        for mine, want in zip(got, autograd(*args, 0.25), strict=True):
            same(mine, want, 5e-6)
    evaluated = run(*args, need_grad=False)
    same(evaluated[0], got[0], 1e-6)
    assert evaluated[2].isnan().all() and evaluated[3].isnan().all()


OPTIONS = [
    dict(temperature=0.5),
    dict(temperature=3.0),
    dict(softcap=2.0),
    dict(tail=True),
    dict(softcap=4.0, temperature=1.7),
    dict(softcap=4.0, temperature=0.6, tail=True),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options, dtype, small_block, rng):
    args = make(6, 9, 257, 7, dtype, rng, mass=0.6)
    args[2][0, 1] = args[2][0, 4]
    args[2][1, 2] = -1
    args[2][1, 5] = 257
    args[2][2, :] = 11  # one distinct id
    args[2][3, :] = -1  # no target at all: P = 0
    args[3][4] /= args[3][4].sum()  # P = 1, up to a rounding
    args[3][5] *= 2.5  # P > 1: no tail is left
    got = check(args, **options)
    assert got[0][3] == 0 and (got[2][3] == 0).all()
    if dtype == torch.float32:
        for mine, want in zip(got, autograd(*args, **options), strict=True):
            same(mine, want, 5e-6)
    evaluated = head_topk_kl_fwd_bwd(*args, need_grad=False, backend="triton", **options)
    same(evaluated.loss, got[0], 1e-6)


@pytest.mark.parametrize("k", [2, 16, 17, 33])
def test_duplicates_add_up(k, small_block, rng):
    """More slots than ids: K > V, and copies that lie in another group of 16 slots."""
    args = make(4, 5, 11, k, torch.float32, rng)
    got = check(args)
    merged = torch.zeros(4, 11).scatter_add(1, args[2].long(), args[3])
    whole = torch.arange(11, dtype=torch.int32).expand(4, 11)
    for a, b in zip(got, run(*args[:2], whole, merged, args[4]), strict=True):
        same(a, b, 2e-6)
    perm = torch.randperm(k, generator=rng)
    for a, b in zip(got, run(*args[:2], args[2][:, perm], args[3][:, perm], args[4]), strict=True):
        same(a, b, 2e-6)
    wider = torch.cat((args[1], torch.randn(20, 5, generator=rng)))  # a tail needs columns without a slot
    with_tail = (args[0], wider, args[2], args[3] * 0.5, args[4])
    for mine, want in zip(run(*with_tail, tail=True), truth(*with_tail, tail=True), strict=True):
        same(mine, want, 2e-6)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("above", [5.0, 20.0, 25.0, 90.0])
def test_tail_of_a_sure_student(above, backend, small_block, rng):
    """1 − Q is below float32's rounding: not NaN, and as right as elsewhere."""
    z = torch.randn(4, 300, generator=rng)
    ids = torch.rand(4, 300, generator=rng).argsort(1)[:, :5].int()
    ids[1, 3] = ids[1, 0]
    z.scatter_add_(1, ids.long(), torch.full((4, 5), above))
    probs = 0.9 * torch.softmax(torch.randn(4, 5, generator=rng), -1)
    eye, weight, dz = torch.eye(300), torch.ones(4), nan(4, 300, dtype=torch.float32)
    got = head_topk_kl_fwd_bwd(z, eye, ids, probs, weight, dhidden=dz, tail=True, backend=backend)
    want = autograd(z, eye, ids, probs, weight, tail=True)
    same(got.loss, want[0], 2e-6)
    same(dz, want[2], 2e-6)
    evaluated = head_topk_kl_fwd_bwd(z, eye, ids, probs, weight, need_grad=False, tail=True, backend=backend)
    same(evaluated.loss, want[0], 2e-6)


def by_logits(z, ids, probs, weight, dtype=torch.float32, **kw):
    """Loss and the gradient of logits [N, V] that come out of the GEMM as they are, kernel and truth."""
    eye = torch.eye(z.shape[1])
    out = []
    for args, backend in (((z.to(dtype), eye.to(dtype)), "triton"), ((z.to(dtype).double(), eye.double()), "torch")):
        dz = nan(*z.shape, dtype=args[0].dtype)
        loss = head_topk_kl_fwd_bwd(*args, ids, probs, weight, dhidden=dz, backend=backend, **kw).loss
        out.append((loss, dz))
    return out


@pytest.mark.parametrize("mode", ["ratio", "softcap", "scaled", "f16"])
@pytest.mark.parametrize("height", [59.0, 61.0, 100.0, 3000.0])
def test_logits_far_above_every_slot(height, mode, small_block, rng):
    """The sweep's reference moves, in the first, a middle, the last tile, and in several one after the other."""
    v = 200  # four tiles of 64
    z = torch.randn(7, v, generator=rng)
    for row, spikes in enumerate([(3,), (100,), (199,), (3, 199), (70, 150), ()]):
        for i, col in enumerate(spikes):
            z[row, col] = height * (i + 1)
    z[5] += height * (torch.arange(v) // 64)  # each tile above all before
    z[6] += height * (3 - torch.arange(v) // 64)  # each below
    ids = torch.tensor([[5, 17, 5], [0, 60, 1], [7, -1, 120], [9, 8, 7], [0, 1, 2], [0, 1, 2], [192, 198, 199]])
    probs = torch.softmax(torch.randn(7, 3, generator=rng), -1)
    kw = {"scaled": dict(tail=True), "softcap": dict(softcap=2000.0)}.get(mode, {})
    dtype = torch.float16 if mode == "f16" else torch.float32
    (loss, dz), (want_loss, want_dz) = by_logits(z, ids.int(), probs, torch.ones(7), dtype, **kw)
    same(loss, want_loss, 2e-6)
    # a bent logit is good to some roundings of the cap, a log-sum-exp to some of the largest logit; exp passes both on
    tol = 2e-6 + {"ratio": 0.0, "softcap": 2000 * 2**-23, "scaled": 6 * height * 2**-23, "f16": 1e-3}[mode]
    same(dz, want_dz, tol)


def test_every_logit_far_above_the_slots(small_block, rng):
    """No rescaling below 60: sums reach exp(60)·V, and a slot far below rounds to nothing but its −t."""
    z = 59.5 + 0.3 * torch.rand(2, 200, generator=rng)
    z[:, 0] = 0
    z[1, 0] = -300
    (loss, dz), (want_loss, want_dz) = by_logits(z, torch.zeros(2, 1).int(), torch.ones(2, 1), torch.ones(2))
    same(loss, want_loss, 1e-6)
    same(dz, want_dz, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_minus_infinity(dtype, small_block, rng):
    """Logits of −inf (an overflow of the product): q is 0 there, with a slot on it or without."""
    big = 1e4 if dtype == torch.float16 else 1e30
    hidden, head, ids, probs, weight = make(4, 3, 150, 4, dtype, rng)
    ids[:] = torch.tensor([5, 66, 70, 139])
    hidden[:, 2], head[:, 2] = big, 0
    head[torch.arange(150) % 3 == 2, 2] = -big
    head[70, 2] = 0
    ids[1, 0] = 64  # its slot survives
    probs[0, 0] = 0  # a slot of probability 0 on a −inf logit
    loss, total, dhidden, dhead = run(hidden, head, ids, probs, weight)
    base = run(hidden, head, ids, probs, weight, backend="torch")
    assert torch.isfinite(loss[:2]).tolist() == [True, True] and (loss[2:] == INF).all() and total == INF
    for rows in ([0], [1]):
        same(loss[rows], base[0][rows], 1e-5)
        same(dhidden[rows, :2], base[2][rows, :2], 1e-5 if dtype == torch.float32 else 2e-3)
    assert torch.isfinite(dhidden[0]).all() and torch.isfinite(dhead).all()
    same(dhead[:, :2], base[3][:, :2], 1e-5 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("options", [{}, dict(tail=True)], ids=str)
def test_dead_rows_add_exactly_nothing(options, small_block, rng):
    """Weight 0, index −1 and rows past n_active may hold NaN, inf and ids out of range."""
    hidden, head, ids, probs, weight = make(10, 6, 130, 4, torch.float32, rng, mass=0.8)
    keep = [0, 2, 3, 5]
    want = truth(hidden[keep], head, ids[keep], probs[keep], weight[keep], **options)
    order = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.int32)
    order[4] = -1
    weight = weight[:8].clone()
    weight[1] = 0
    weight[4] = NAN
    weight[6:] = INF
    hidden, ids, probs = hidden.clone(), ids[:8].clone(), probs[:8].clone()
    hidden[[1, 4, 6, 7, 8, 9]] = NAN
    ids[[1, 4, 6, 7]] = 2**31 - 1
    probs[[1, 4, 6, 7]] = NAN
    for chunk in (None, 3):
        loss, total, dhidden, dhead = run(
            hidden, head, ids, probs, weight, 6, row_index=order, chunk_rows=chunk, **options
        )
        same(loss[keep], want[0], 2e-6)
        assert bits(loss[[1, 4, 6, 7]]) == bits(torch.zeros(4))
        same(total, want[1], 2e-6)
        same(dhidden[keep], want[2], 2e-6)
        assert bits(dhidden[[1, 4, 6, 7, 8, 9]]) == bits(torch.zeros(6, 6))
        same(dhead, want[3], 2e-6)
    dead = torch.full((10, 6), NAN)
    nothing = run(dead, head, ids[:1].expand(10, 4), probs[:1].expand(10, 4), torch.zeros(10), **options)
    assert all((t == 0).all() for t in nothing)


def test_a_live_row_shows_its_nan(small_block, rng):
    hidden, head, ids, probs, weight = make(3, 6, 130, 4, torch.float32, rng)
    hidden[1] = NAN
    loss, total, dhidden, _ = run(hidden, head, ids, probs, weight)
    assert loss.isnan().tolist() == [False, True, False] and total.isnan() and dhidden[1].isnan().all()
    assert torch.isfinite(dhidden[[0, 2]]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_expansion_integer_types_and_repetition(dtype, small_block, rng):
    hidden, head, ids, probs, weight = make(5, 6, 130, 5, dtype, rng)
    before = bits(hidden, head, ids, probs, weight)
    want = bits(*run(hidden, head, ids, probs, weight))
    assert want == bits(*run(hidden, head, ids, probs, weight))
    assert want == bits(*run(hidden, head, ids.long(), probs.double(), weight.double()))
    assert before == bits(hidden, head, ids, probs, weight)
    wide, tall = torch.full((5, 20), NAN).to(dtype), torch.full((130, 9), NAN).to(dtype)
    wide[:, 7:13], tall[:, 2:8] = hidden, head
    spread = torch.full((5, 3), NAN)
    spread[:, 1] = weight
    turned = ids.t().contiguous().t(), torch.stack((probs, probs), -1)[..., 0]
    for a, b in zip(run(wide[:, 7:13], tall[:, 2:8], *turned, spread[:, 1]), run(hidden, head, ids, probs, weight),
                    strict=True):  # fmt: skip
        same(a, b, 1e-6 if dtype == torch.float32 else 2e-3)
    one = (ids[:1].expand(5, 5), probs[:1].expand(5, 5), torch.tensor([0.5]).expand(5))
    assert bits(*run(hidden, head, *one)) == bits(*run(hidden, head, *(t.contiguous() for t in one)))
    same_slot = ids[:, :1].expand(5, 3), torch.full((1, 1), 0.25).expand(5, 3)
    made = [t.contiguous() for t in same_slot]
    assert bits(*run(hidden, head, *same_slot, weight)) == bits(*run(hidden, head, *made, weight))


def test_the_callers_slab_and_chunks(small_block, rng):
    """A slab may hold NaN and be larger than needed; what lies past the vocabulary stays as it is."""
    args = make(7, 6, 130, 5, torch.float32, rng)
    want = truth(*args)
    for rows in (1, 3, 7, 9):
        slab = new_slab(rows, 130, torch.float32, torch.device("cpu")).fill_(NAN)
        assert slab.shape == (rows, 192)
        for a, b in zip(run(*args, slab=slab), want, strict=True):
            same(a, b, 2e-6)
        assert slab[:, 130:].isnan().all()
        for a, b in zip(run(*args, chunk_rows=rows), want, strict=True):
            same(a, b, 2e-6)
    scale = torch.tensor(-0.5)
    for a, b in zip(run(*args, grad_scale=scale, slab=slab)[2:], want[2:], strict=True):
        same(a, -0.5 * b, 2e-6)


def test_row_index_accumulate_and_left_out_gradients(small_block, rng):
    hidden, head, ids, probs, weight = make(12, 6, 130, 4, torch.float32, rng)
    index = torch.tensor([7, -1, 3, 0, -1, 11, -1], dtype=torch.int32)
    part = (ids[:7], probs[:7], weight[:7])
    want = truth(hidden, head, *part, row_index=index)
    for chunk in (None, 2):
        for a, b in zip(run(hidden, head, *part, row_index=index, chunk_rows=chunk), want, strict=True):
            same(a, b, 2e-6)
    more = torch.ones(130, 6)
    kw = dict(row_index=index, backend="triton", chunk_rows=3)
    head_topk_kl_fwd_bwd(hidden, head, *part, dhead=more, accumulate=True, **kw)
    same(more - 1, want[3], 5e-6)
    untouched = more.clone()
    head_topk_kl_fwd_bwd(hidden, head, *part, 0, dhead=more, accumulate=True, **kw)
    assert bits(more) == bits(untouched)
    only = nan(12, 6, dtype=torch.float32)
    head_topk_kl_fwd_bwd(hidden, head, *part, dhidden=only, **kw)
    same(only, want[2], 2e-6)


@pytest.mark.parametrize("options", [{}, dict(tail=True, softcap=3.0)], ids=str)
def test_padded_vocabulary_does_not_exist(options, small_block, rng):
    hidden, head, ids, probs, weight = make(5, 6, 131, 4, torch.float32, rng, mass=0.9)
    ids[0, 0] = 133  # a teacher's padded id is an empty slot
    want = run(hidden, head, torch.where(ids < 131, ids, -1), probs, weight, **options)
    padded = torch.cat([head, torch.full((5, 6), NAN)])
    loss, total, dhidden, dhead = run(hidden, padded, ids, probs, weight, valid_vocab=131, **options)
    assert bits(loss, total, dhidden, dhead[:131]) == bits(*want)
    assert (dhead[131:] == 0).all()


def test_no_rows():
    head, empty = torch.randn(9, 4), torch.zeros(0, 2)
    got = run(torch.randn(5, 4), head, empty.int(), empty, torch.zeros(0), row_index=torch.zeros(0).int())
    assert got[0].shape == (0,) and all((t == 0).all() for t in got[1:])
    padding = torch.full((3,), -1, dtype=torch.int32)
    got = run(torch.zeros(0, 4), head, torch.ones(3, 2).int(), torch.ones(3, 2), torch.ones(3), row_index=padding)
    assert all((t == 0).all() for t in got)


def test_one_slot_is_cross_entropy_and_the_teacher_is_a_minimum(small_block, rng):
    hidden, head, ids, _, weight = make(4, 6, 130, 1, torch.float32, rng)
    loss, _, dhidden, _ = run(hidden, head, ids, torch.ones(4, 1), weight)
    z = (hidden.double() @ head.double().t()).requires_grad_()
    want = torch.nn.functional.cross_entropy(z, ids[:, 0].long(), reduction="none")
    same(loss, want, 2e-6)
    same(dhidden, torch.autograd.grad((want * weight).sum(), z)[0] @ head.double(), 2e-6)
    probs = torch.softmax(z.detach(), -1).float()
    for t in run(hidden, head, torch.arange(130).int().expand(4, 130), probs, weight):
        assert t.abs().max() < 1e-5


def test_mixture_with_the_true_token(small_block, rng):
    """α·CE + (1 − α)·KL: value, and gradient by central differences of the float64 mix along a random direction."""
    hidden, head, ids, probs, weight = make(4, 6, 130, 5, torch.float32, rng)
    true = torch.tensor([int(ids[0, 2]), 9, 77, 129])
    alpha = 0.3
    mixed_ids, mixed, const = mix_targets(ids, probs, true, alpha)
    loss, _, dhidden, dhead = run(hidden, head, mixed_ids, mixed, weight)

    def mix(h, w):
        ce = torch.nn.functional.cross_entropy(h @ w.t(), true, reduction="none")
        return alpha * ce + (1 - alpha) * head_topk_kl_ref(h, w, ids, probs.double(), weight)[0]

    h64, w64 = hidden.double(), head.double()
    same(loss + const, mix(h64, w64), 2e-6)
    dh, dw = torch.randn(4, 6, generator=rng, dtype=F64), torch.randn(130, 6, generator=rng, dtype=F64)
    eps = 1e-5
    slope = ((mix(h64 + eps * dh, w64 + eps * dw) - mix(h64 - eps * dh, w64 - eps * dw)) / (2 * eps) * weight).sum()
    same((dhidden * dh).sum() + (dhead * dw).sum(), slope, 1e-5)
