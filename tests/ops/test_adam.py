from __future__ import annotations

import math

import pytest
import torch
from ops_close import bits, no_sync, same

from cortiq_kernels.ops import adam
from cortiq_kernels.ops.adam import AdamState, adam_advance_, adam_norm_, adam_ref, adam_update_

F64 = torch.float64


@pytest.fixture(autouse=True)
def one_thread():
    """On tensors this small, threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def buffers(n, dtype, rng):
    param = torch.randn(n, generator=rng, dtype=F64).to(dtype)
    return param, torch.zeros_like(param), torch.zeros_like(param)


def step(state, param, grad, m, v, loss=None, **kw):
    adam_norm_(state, grad, loss)
    adam_update_(state, param, grad, m, v, **kw)
    adam_advance_(state)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_equals_torch_adamw_over_1000_steps(decay, rng):
    param, m, v = buffers(40, F64, rng)
    theirs = param.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=decay)
    state = AdamState.new("cpu")
    for i in range(1000):
        grad = torch.randn(40, generator=rng, dtype=F64) * (0.05 if i % 3 else 1.0)  # some steps clip
        step(state, param, grad.clone(), m, v, rate=2e-2, factor=0.5, beta2=0.99, eps=1e-6, weight_decay=decay)
        theirs.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_([theirs], 1.0)
        optimizer.step()
    # clip_grad_norm_ divides by norm + 1e-6, we by norm.
    same(param, theirs.detach(), 1e-4)
    assert state.read().step == 1000


@pytest.mark.parametrize("clip", [1.0, 0.0, None])
def test_float64_equals_the_reference_over_1000_steps(clip, rng):
    param, m, v = buffers(33, F64, rng)
    want = (param, m, v)
    state = AdamState.new("cpu", scale=8.0)
    for i in range(1000):
        grad = 8 * torch.randn(33, generator=rng, dtype=F64) * (0.05 if i % 3 else 1.0)
        kw = {"rate": 1e-2, "clip": clip, "weight_decay": 0.01}
        want = adam_ref(want[0], grad, want[1], want[2], i, scale=8.0, **kw)
        step(state, param, grad, m, v, **kw)
    for got, exact in zip((param, m, v), want, strict=True):
        same(got, exact, 1e-11)


def test_reference_without_clipping_is_torch_adamw(rng):
    param, m, v = buffers(10, F64, rng)
    theirs = param.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1)
    for i in range(1000):
        theirs.grad = torch.randn(10, generator=rng, dtype=F64)
        param, m, v = adam_ref(param, theirs.grad, m, v, i, rate=1e-2, clip=None, weight_decay=0.1)
        optimizer.step()
    same(param, theirs.detach(), 1e-12)


def test_float32_masters_stay_with_the_reference_and_no_worse_than_torch(rng):
    param, m, v = buffers(257, torch.float32, rng)
    want = tuple(t.double() for t in (param, m, v))
    theirs = param.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.0)
    state = AdamState.new("cpu")
    for i in range(1000):
        grad = torch.randn(257, generator=rng)
        want = adam_ref(*(want[0], grad, *want[1:]), i, rate=1e-3, clip=None)
        step(state, param, grad, m, v, rate=1e-3, clip=None)
        theirs.grad = grad
        optimizer.step()
    err, base = ((t.double() - want[0]).abs().max().item() for t in (param, theirs.detach()))
    assert err <= 1.5 * base + 1e-7 and err < 1e-5


def test_small_updates_move_the_master_and_in_time_the_plane():
    param, m, v = torch.ones(8), torch.zeros(8), torch.zeros(8)
    plane = param.bfloat16()
    state = AdamState.new("cpu")
    for _ in range(1000):  # each update is far below half a bf16 step of 1.0
        step(state, param, torch.ones(8), m, v, plane=plane, rate=1e-5, clip=None)
        assert bits(plane) == bits(param.bfloat16())
    same(param, torch.full((8,), 0.99), 2e-5)  # each step rounds to the spacing of f32 near 1
    assert (plane != 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 8, 9, 127, 128, 129, 1025])
def test_lengths_unaligned_slices_and_plane(n, dtype, rng):
    """A slice at an odd offset gives the same bits as the tensor alone, and nothing around it changes."""
    wide = [torch.randn(n + 8, generator=rng) for _ in range(4)]
    wide[3].abs_()
    plane = torch.full((n + 8,), 7.0).to(dtype)
    around = [bits(t[:3], t[3 + n :]) for t in (*wide, plane)]
    p, g, m, v = (t[3 : 3 + n].clone() for t in wide)
    w = plane[3 : 3 + n].clone()
    for tensors, out in ((wide, plane), ((p, g, m, v), w)):
        a, b, c, d = (t[3 : 3 + n] if out is plane else t for t in tensors)
        state = AdamState.new("cpu")
        step(state, a, b, c, d, plane=out[3 : 3 + n] if out is plane else out, rate=0.1, weight_decay=0.1)
    assert bits(p, g, m, v, w) == bits(*(t[3 : 3 + n] for t in (*wide, plane)))
    assert bits(w) == bits(p.to(dtype))
    assert around == [bits(t[:3], t[3 + n :]) for t in (*wide, plane)]
    assert state.read().ok and state.read().norm == pytest.approx(g.double().norm().item(), rel=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_refused_step_changes_no_bit(bad, where, rng):
    param, m, v = buffers(1000, torch.float32, rng)
    m.normal_(generator=rng)
    v.uniform_(generator=rng)
    plane = torch.full((1000,), 3.0).bfloat16()  # not even round(param): a refused step must not refresh it
    grad, loss = torch.randn(1000, generator=rng), torch.tensor(1.0)
    if where == "gradient":
        grad[517] = bad
    else:
        loss = torch.tensor(bad, dtype=F64)
    before = bits(param, m, v, plane, grad)
    state = AdamState.new("cpu")
    step(state, param, grad, m, v, loss, plane=plane, rate=1e-2)
    assert bits(param, m, v, plane, grad) == before
    read = state.read()
    assert not read.ok and (read.step, read.skipped, read.in_row, read.scale) == (0, 1, 1, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_huge_gradients_are_clipped_not_refused(dtype, rng):
    """Squares that overflow say nothing about the gradient."""
    param, m, v = buffers(100, dtype, rng)
    size = 1e20 if dtype == torch.float32 else 1e200
    grad = torch.full((100,), size, dtype=dtype)
    before = param.clone()
    state = AdamState.new("cpu")
    step(state, param, grad, m, v, rate=1e-2)
    read = state.read()
    assert read.ok and read.step == 1 and read.norm == pytest.approx(10 * size, rel=1e-6)
    same(m, torch.full((100,), 0.01, dtype=dtype), 1e-6)
    same(before - param, torch.full((100,), 1e-2, dtype=dtype), 1e-5)


def test_norm_is_that_of_the_unscaled_gradient(rng):
    grad = torch.randn(100003, generator=rng)
    state = AdamState.new("cpu", scale=4096.0)
    adam_norm_(state, grad * 4096)
    assert state.read().norm == pytest.approx(grad.double().norm().item(), rel=1e-12)
    adam_norm_(state, torch.zeros(5))
    assert state.read().norm == 0 and state.read().ok
    param, m, v = buffers(5, torch.float32, rng)
    before = bits(param)
    adam_update_(state, param, torch.zeros(5), m, v, rate=1.0)  # clip / 0 must not reach anything
    assert bits(param) == before
    tiny = torch.full((4,), 1e-45)
    adam_norm_(AdamState.new("cpu"), tiny)
    adam_norm_(state, torch.zeros(0))
    assert state.read().norm == 0 and state.read().ok


def test_scale_halves_to_one_and_never_grows_back():
    state = AdamState.new("cpu", scale=5.0)
    seen = []
    for ok in (False, False, True, False, False, True, True):
        adam_norm_(state, torch.tensor([1.0 if ok else float("inf")]))
        adam_advance_(state)
        read = state.read()
        seen.append((read.scale, read.step, read.skipped, read.in_row))
    assert seen == [
        (2.5, 0, 1, 1),
        (1.25, 0, 2, 2),
        (1.25, 1, 2, 0),
        (1.0, 1, 3, 1),
        (1.0, 1, 4, 2),
        (1.0, 2, 4, 0),
        (1.0, 3, 4, 0),
    ]


def test_bias_correction_counts_accepted_steps_only(rng):
    param, m, v = buffers(6, F64, rng)
    want = (param, m, v)
    state = AdamState.new("cpu")
    for i in range(3):
        step(state, param, torch.full((6,), float("nan"), dtype=F64), m, v, rate=1e-2)
        grad = torch.randn(6, generator=rng, dtype=F64)
        want = adam_ref(want[0], grad, want[1], want[2], i, rate=1e-2)
        step(state, param, grad, m, v, rate=1e-2)
    same(param, want[0], 1e-13)
    assert state.read()[:3] == (3, 3, 0)


def test_rate_and_factor_may_be_tensors_and_moments_double(rng):
    param, _, _ = buffers(9, torch.float32, rng)
    grad = torch.randn(9, generator=rng)
    results = []
    for rate, factor in ((1e-2, 0.5), (torch.tensor(1e-2, dtype=F64), torch.tensor(0.5))):
        p, m, v = param.clone(), torch.zeros(9, dtype=F64), torch.zeros(9, dtype=F64)
        step(AdamState.new("cpu"), p, grad, m, v, rate=rate, factor=factor)
        results.append(bits(p, m, v))
    assert results[0] == results[1]
    want = adam_ref(param, grad, torch.zeros(9), torch.zeros(9), 0, rate=1e-2, factor=0.5)
    same(m, want[1], 1e-14)
    same(v, want[2], 1e-14)
    assert bits(p) == bits(want[0].float())


def test_chunks_do_not_matter_and_runs_repeat(rng, monkeypatch):
    param, m, v = buffers(1000, torch.float32, rng)
    grad = torch.randn(1000, generator=rng)

    def once():
        p, a, b, w = param.clone(), m.clone(), v.clone(), param.half()
        state = AdamState.new("cpu")
        step(state, p, grad, a, b, plane=w, rate=1e-2, clip=None)
        return bits(p, a, b, w), state.read().norm

    runs = {once()[1] for _ in range(20)}
    assert len(runs) == 1
    want, norm = once()
    monkeypatch.setattr(adam, "_CHUNK", {"cpu": 7})
    got, chunked_norm = once()
    assert got == want and math.isclose(norm, chunked_norm, rel_tol=1e-14)


def test_hard_masked_weights_stay_zero_with_old_momentum_cleared():
    """Zero gradient and zero moments never move a pruned weight."""
    param, m, v = torch.tensor([0.0, 1.0]), torch.zeros(2), torch.zeros(2)
    state = AdamState.new("cpu")
    for _ in range(20):
        step(state, param, torch.tensor([0.0, 0.3]), m, v, rate=1e-2, weight_decay=0.1)
    assert param[0] == 0 and param[1] < 1


def test_state_is_written_in_place():
    """The addresses must stay: a replayed step knows them."""
    state = AdamState.new("cpu", 2.0)
    tensors = (state.step, state.skipped, state.in_row, state.scale, state.norm, state.ok)
    adam_norm_(state, torch.tensor([float("nan")]))
    adam_advance_(state)
    assert all(a is b for a, b in zip(tensors, vars(state).values(), strict=True))
    assert [t.dtype for t in tensors] == [torch.int64] * 3 + [torch.float32, F64, torch.bool]


def test_errors():
    state, x = AdamState.new("cpu"), torch.zeros(4)
    with pytest.raises(ValueError, match=r"AdamState.new: scale must be finite and above 0; got 0"):
        AdamState.new("cpu", 0.0)
    for scale in (1e-46, 1e39, 1e300, float("nan")):  # 0, inf and nan in float32
        with pytest.raises(ValueError, match="AdamState.new: scale must be finite and above 0"):
            AdamState.new("cpu", scale)
    with pytest.raises(ValueError, match=r"adam_norm_: grad must be flat, \[n\]; got \(2, 2\)"):
        adam_norm_(state, x.view(2, 2))
    with pytest.raises(ValueError, match="adam_norm_: grad must be float32 or float64"):
        adam_norm_(state, x.half())
    with pytest.raises(ValueError, match="adam_update_: m must be the shape of param"):
        adam_update_(state, x, x, x[1:], x, rate=1.0)
    with pytest.raises(ValueError, match="grad must be float32; got torch.float64"):
        adam_update_(state, x, x.double(), x, x, rate=1.0)
    with pytest.raises(ValueError, match="v must be float32; got torch.float64"):
        adam_update_(state, x, x, x, x.double(), rate=1.0)
    with pytest.raises(ValueError, match="plane must be bfloat16 or float16; got torch.float32"):
        adam_update_(state, x, x, x, x, plane=x, rate=1.0)
    param, m = torch.ones(4), torch.zeros(4)
    with pytest.raises(ValueError, match="v must be a tensor whose elements do not share memory"):
        adam_update_(state, param, torch.ones(4), m, torch.zeros(1).expand(4), rate=1.0)
    assert (param == 1).all() and (m == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("refused", [False, True])
def test_gpu_replays_as_one_graph(refused, rng):
    """Three steps from one captured graph, with the rate in a tensor, equal three steps on the CPU."""
    param, m, v = buffers(1001, torch.float32, rng)
    grads = [torch.randn(1001, generator=rng) for _ in range(3)]
    if refused:
        grads[1][500] = float("nan")
    here = (param.clone(), m.clone(), v.clone())
    state = AdamState.new("cpu", 4.0)
    for i, g in enumerate(grads):
        step(state, here[0], g, here[1], here[2], rate=1e-2 * (i + 1))
    there = tuple(t.cuda() for t in (param, m, v))
    plane, grad = torch.zeros(1001).bfloat16().cuda(), torch.zeros(1001).cuda()
    rate, loss = torch.zeros((), dtype=F64).cuda(), torch.zeros(()).cuda()
    device_state = AdamState.new("cuda", 4.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(device_state, there[0], grad, there[1], there[2], loss, plane=plane, rate=rate)
    for i, g in enumerate(grads):
        rate.fill_(1e-2 * (i + 1))
        grad.copy_(g)
        graph.replay()
    for got, want in zip(there, here, strict=True):
        same(got.cpu(), want, 1e-6)
    assert bits(plane) == bits(there[0].bfloat16())
    assert device_state.read()[:4] == state.read()[:4]
    with no_sync():
        step(device_state, there[0], grad, there[1], there[2], plane=plane, rate=1e-2, factor=0.5, weight_decay=0.1)
