"""The head's loss and the top-k on a GPU at the vocabularies they are for: bf16, rows past 2^31 elements, graphs,
memory. Truth is the torch path in float64 from the same rounded inputs."""

from __future__ import annotations

import pytest
import torch
from ops_close import nan, no_sync

from cortiq_kernels.ops.topk import topk_softmax
from cortiq_kernels.ops.topk_kl import head_topk_kl_fwd_bwd, new_slab

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
QWEN, ODD = 248320, 151937
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def gen() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(1234)


def make(n, v, dtype, gen, h=256, k=64):
    """Logits of deviation 1, so that 16 bit round them by 2^-7 at most; half of the slots are the student's own
    largest."""
    hidden = torch.randn(n, h, generator=gen, device="cuda").to(dtype)
    head = (h**-0.5 * torch.randn(v, h, generator=gen, device="cuda")).to(dtype)
    ids = torch.randint(0, v, (n, k), generator=gen, device="cuda", dtype=torch.int32)
    for a in range(0, n, 1024):
        ids[a : a + 1024, : k // 2] = (hidden[a : a + 1024] @ head.t()).topk(k // 2).indices
    probs = torch.softmax(torch.randn(n, k, generator=gen, device="cuda"), -1)
    return hidden, head, ids, probs, 0.2 + torch.rand(n, generator=gen, device="cuda")


def buffers(hidden, head):
    acc = F64 if hidden.dtype == F64 else F32
    return nan(*hidden.shape, dtype=hidden.dtype).cuda(), nan(*head.shape, dtype=acc).cuda()


def run(hidden, head, *args, **kw):
    """-> (loss, total, dhidden, dhead), gradients into poisoned buffers."""
    dhidden, dhead = buffers(hidden, head)
    out = head_topk_kl_fwd_bwd(hidden, head, *args, dhidden=dhidden, dhead=dhead, **kw)
    return out.loss, out.total, dhidden, dhead


def truth(hidden, head, *args, **kw):
    return run(hidden.double(), head.double(), *args, backend="torch", **kw)


def off(got, want) -> float:
    """Relative L2 error."""
    return ((got.double() - want).norm() / want.norm()).item()


def loss_errors(got, want) -> tuple[float, float]:
    err = (got.double() - want).abs()
    return err.max().item(), err.mean().item()


@pytest.mark.parametrize("v", [QWEN, ODD])
def test_bf16_against_float64(v, gen):
    args = make(257, v, BF16, gen)
    got, exact = run(*args, grad_scale=1 / 257), truth(*args, grad_scale=1 / 257)
    worst, mean = loss_errors(got[0], exact[0])
    assert worst <= 2e-2 and mean <= 2e-3, (worst, mean)
    base = run(*args, grad_scale=1 / 257, backend="torch")
    dh, base_dh = off(got[2], exact[2]), off(base[2], exact[2])
    assert dh <= 4e-3 and dh <= 1.3 * base_dh, (dh, base_dh)
    # 16-bit autograd hands out dW in 16 bit
    dw, base_dw = off(got[3], exact[3]), off(base[3].bfloat16(), exact[3])
    assert dw <= 4e-3 and dw <= 1.3 * base_dw, (dw, base_dw)

    strict = run(*args, grad_scale=1 / 257, slab_dtype=F32)
    assert loss_errors(strict[0], exact[0])[0] <= 1e-5, loss_errors(strict[0], exact[0])
    assert off(strict[2], exact[2]) <= 4e-3 and off(strict[3], exact[3]) <= 4e-3
    evaluated = head_topk_kl_fwd_bwd(*args, need_grad=False, slab_dtype=F32)
    assert loss_errors(evaluated.loss, exact[0])[0] <= 1e-5


@pytest.mark.parametrize(
    "options", [dict(tail=True), dict(softcap=5.0, temperature=0.8), dict(softcap=5.0, tail=True)], ids=str
)
def test_bf16_options_against_float64(options, gen):
    hidden, head, ids, probs, weight = make(65, ODD, BF16, gen)
    args = (hidden, head, ids, probs * 0.8, weight)
    got, exact = run(*args, **options), truth(*args, **options)
    worst, mean = loss_errors(got[0], exact[0])
    assert worst <= 2e-2 and mean <= 2e-3, (worst, mean)
    base = run(*args, backend="torch", **options)
    for mine, eager, want in ((got[2], base[2], exact[2]), (got[3], base[3].bfloat16(), exact[3])):
        assert off(mine, want) <= 1.3 * off(eager, want), (off(mine, want), off(eager, want))
    strict = run(*args, slab_dtype=F32, **options)
    assert loss_errors(strict[0], exact[0])[0] <= 1e-5


@pytest.mark.parametrize("dtype,loss_tol,tol", [(F16, 4e-3, 1e-3), (F32, 1e-5, 2e-5)])
def test_other_dtypes_against_float64(dtype, loss_tol, tol, gen):
    args = make(129, ODD, dtype, gen)
    got, exact = run(*args), truth(*args)
    assert loss_errors(got[0], exact[0])[0] <= loss_tol
    assert off(got[2], exact[2]) <= tol and off(got[3], exact[3]) <= tol, (off(got[2], exact[2]), off(got[3], exact[3]))


@pytest.mark.parametrize("mode", ["ratio", "scaled"])
def test_slots_where_student_and_teacher_agree(mode, gen):
    """P·q − t in the slots is formed before it is rounded: its error is of its own size, not of q's."""
    from cortiq_kernels.ops import topk_kl_triton as kernels

    z = torch.randn(64, ODD, generator=gen, device="cuda")
    ids = torch.rand(64, ODD, generator=gen, device="cuda").topk(64).indices
    high = 14 + 2 * torch.randn(64, 64, generator=gen, device="cuda")  # the slots hold almost all of q
    z = z.scatter(1, ids, high).bfloat16()
    q = torch.softmax(z.double(), -1).gather(1, ids)
    t = (q * (1 + 0.01 * torch.randn(64, 64, generator=gen, device="cuda"))).float()
    weight, scale = torch.rand(64, generator=gen, device="cuda"), torch.ones((), dtype=F64, device="cuda")
    loss, ratio = torch.full((64,), NAN, device="cuda"), torch.full((64,), NAN, device="cuda")
    kernel = kernels.RATIO if mode == "ratio" else kernels.SCALED
    kernels.launch(z, ids.int(), t, weight, scale, loss, ratio, mode=kernel.value)
    t, w = t.double(), weight.double().unsqueeze(1)
    exact = w * (t.sum(-1, keepdim=True) * q - t)
    got = z.gather(1, ids).double() * (ratio.double().unsqueeze(1) if mode == "ratio" else 1.0)
    assert ((exact.abs() < 0.05 * w * t).double().mean() > 0.9).item()  # they do agree
    assert ((got - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * w).all()
    assert ((loss.double() - (t * (t / q).log()).sum(-1)).abs() <= 1e-5).all()


def test_rows_past_two_to_the_31_elements(gen):
    """16384 rows of 248,320 logits in one slab; its last rows begin past 4·10^9 elements."""
    args = make(16384, QWEN, BF16, gen, h=64, k=16)
    got, exact = run(*args, chunk_rows=16384, grad_scale=1 / 16384), truth(*args, grad_scale=1 / 16384)
    assert loss_errors(got[0], exact[0])[0] <= 2e-2
    for rows in (slice(0, 64), slice(8640, 8704), slice(16320, 16384)):
        assert off(got[2][rows], exact[2][rows]) <= 4e-3, (rows, off(got[2][rows], exact[2][rows]))
    assert off(got[3], exact[3]) <= 4e-3, off(got[3], exact[3])


@pytest.mark.parametrize("slab_dtype", [None, F32])
def test_dead_rows_padding_duplicates_and_repetition(slab_dtype, gen):
    """Rows that do not count hold NaN, one that counts has no target; two runs are bit-equal."""
    hidden, head, ids, probs, weight = make(300, ODD, BF16, gen)
    ids[:, 5], ids[:, 9], ids[4, :], ids[:, 11] = ids[:, 6], -1, -1, ODD
    keep = torch.arange(0, 256, 2, device="cuda")
    exact = truth(hidden[keep], head, ids[keep], probs[keep], weight[keep])
    dead = torch.ones(300, dtype=torch.bool, device="cuda")
    dead[keep] = False
    hidden[dead] = NAN
    index = torch.arange(280, dtype=torch.int32, device="cuda")
    index[1::4] = -1
    weight[3::4] = 0
    ids[dead], probs[dead], weight[256:] = 2**31 - 1, NAN, INF
    args = (hidden, head, ids[:280], probs[:280], weight[:280], 256)
    kw = dict(row_index=index, chunk_rows=96, slab_dtype=slab_dtype)
    got, again = run(*args, **kw), run(*args, **kw)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    assert loss_errors(got[0][keep], exact[0])[0] <= (2e-2 if slab_dtype is None else 1e-5)
    assert (got[0][dead[:280]] == 0).all() and (got[2][dead] == 0).all() and (got[0][4] == 0).all()
    assert off(got[2][keep], exact[2]) <= 4e-3 and off(got[3], exact[3]) <= 4e-3
    nothing = run(*args[:2], *args[2:4], torch.zeros_like(args[4]), 256, **kw)
    assert all((t == 0).all() for t in nothing)


def test_logits_far_above_every_slot(gen):
    """The sweep's reference moves; strides and expanded inputs on the way."""
    hidden, head, ids, probs, _ = make(33, ODD, BF16, gen)
    ids[:, :32] = ids[:, 32:]  # none of the student's own
    ids = torch.where(ids >= ODD - 6, 7, ids)
    head[[0, 100_000, ODD - 1], :2] = torch.tensor([[8.0, 0], [0, 8], [8, 8]], device="cuda").bfloat16()
    hidden[:, :2] = torch.arange(66, device="cuda").view(33, 2) / 3  # logits up to 350
    wide = torch.full((33, 300), NAN, device="cuda").bfloat16()
    wide[:, 20:276] = hidden
    weight = torch.full((1,), 0.5, device="cuda").expand(33)
    got = run(wide[:, 20:276], head, ids.t().contiguous().t(), probs, weight, slab_dtype=F32)
    exact = truth(hidden, head, ids, probs, weight)
    assert ((got[0].double() - exact[0]).abs() <= 3e-6 * exact[0]).all()
    plain = run(hidden, head, ids, probs, weight)
    rounded = torch.softmax((hidden @ head.t()).double(), -1)  # from the rounded logits, which are off by 1 at 350
    target = torch.zeros_like(rounded).scatter_add_(1, ids.long(), probs.double())
    dz = 0.5 * (probs.double().sum(-1, keepdim=True) * rounded - target)
    assert off(plain[2], dz @ head.double()) <= 1e-2 and off(plain[3], dz.t() @ hidden.double()) <= 1e-2
    assert all(torch.isfinite(t).all() for t in (*got, *plain))


def test_capture_and_replay_without_synchronisation(gen):
    hidden, head, ids, probs, weight = make(192, ODD, BF16, gen)
    slab, scale = new_slab(128, ODD, BF16, hidden.device), torch.tensor(0.25, device="cuda")
    index = torch.randperm(192, generator=gen, device="cuda").int()
    index[::7] = -1
    dhidden, dhead = buffers(hidden, head)
    kw = dict(row_index=index, slab=slab, grad_scale=scale)

    def call():
        return head_topk_kl_fwd_bwd(hidden, head, ids, probs, weight, 180, dhidden=dhidden, dhead=dhead, **kw)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles the kernels and makes the GEMMs' workspaces
            call()
    torch.cuda.current_stream().wait_stream(side)
    with no_sync():
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    hidden.copy_(torch.randn(192, 256, generator=gen, device="cuda"))
    ids.copy_(ids.roll(1, 0))
    scale.fill_(0.5)
    slab.fill_(NAN)
    dhidden.fill_(NAN)
    dhead.fill_(NAN)
    graph.replay()
    torch.cuda.synchronize()
    captured = [t.clone() for t in (*out, dhidden, dhead)]
    for a, b in zip(captured, run(hidden, head, ids, probs, weight, 180, **kw), strict=True):
        assert torch.isfinite(a).all() and off(a, b.double()) <= 1e-3, off(a, b.double())


@pytest.mark.parametrize("trained", [False, True])
def test_memory_of_a_call(trained, gen):
    """At most 2.2 GB beside the operands, 4096 rows of 248,320 at a time, H 5120."""
    n, h, k = 8192, 5120, 64
    hidden = torch.empty(n, h, dtype=BF16, device="cuda").normal_(generator=gen)
    head = torch.empty(QWEN, h, dtype=BF16, device="cuda").normal_(std=h**-0.5, generator=gen)
    ids = torch.randint(0, QWEN, (n, k), generator=gen, device="cuda", dtype=torch.int32)
    probs, weight = torch.full((n, k), 1 / k, device="cuda"), torch.ones(n, device="cuda")
    dhidden = torch.empty_like(hidden)
    dhead = torch.empty(QWEN, h, dtype=F32, device="cuda") if trained else None
    scale = torch.tensor(1.0 / n, device="cuda")
    kw = dict(grad_scale=scale, dhidden=dhidden, dhead=dhead)
    head_topk_kl_fwd_bwd(hidden, head, ids, probs, weight, 64, **kw)  # the GEMMs' workspaces stay
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = head_topk_kl_fwd_bwd(hidden, head, ids, probs, weight, **kw)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert torch.isfinite(out.total) and peak <= 2.2e9, peak


def check_topk(z, k, rows=None):
    """The GPU's ids are those of the CPU's torch path; its other results are close. `rows`: only these are compared."""
    with no_sync():
        got = topk_softmax(z, k, return_lse=True)
    pick = slice(None) if rows is None else torch.tensor(rows)
    want = topk_softmax((z if rows is None else z[pick.cuda()]).cpu(), k, return_lse=True)
    got = [t.cpu()[pick] for t in got]
    assert torch.equal(got[0], want.ids), (got[0] != want.ids).nonzero()[:5]
    for a, b in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("k", [1, 17, 64, 65, 128, 256])
def test_topk_is_exact_in_bf16(k, gen):
    z = (3 * torch.randn(32, 9008, generator=gen, device="cuda")).bfloat16()  # hundreds of ties a row
    z[20:28] = torch.randint(-3, 4, (8, 9008), generator=gen, device="cuda").bfloat16()
    z[28, 17], z[29, 100:8000], z[30, ::2], z[31, :9000] = NAN, -INF, NAN, -INF
    check_topk(z, k)


def test_topk_of_crowded_and_special_rows():
    ramp = torch.arange(9008, device="cuda").float()
    rows = [ramp, -ramp, ramp / 64, -ramp / 64, ramp * 0, ramp % 3, (ramp // 256), (ramp == 9007), ramp.clamp(max=4500)]
    rows += [ramp * 0 + NAN, ramp * 0 - INF, torch.where(ramp % 2 == 0, -0.0, 0.0), (ramp > 5000) * 1.0 - 1]
    z = torch.stack([r.float() for r in rows]) / 64
    for dtype in (BF16, F16, F32):
        check_topk(z.to(dtype), 64)
    infinite = z[:1].bfloat16().clone()
    infinite[0, [8000, 20]] = INF
    got = topk_softmax(infinite, 64)
    assert got.ids[0, :2].tolist() == [20, 8000] and got.probs.isnan().any()


def test_topk_of_strided_rows(gen):
    wide = torch.randn(20, 9100, generator=gen, device="cuda").bfloat16()
    check_topk(wide[:, 11:9012], 64)
    check_topk(wide[::3, :9008], 64)
    check_topk(wide.t().contiguous().t()[:, :9008], 64)
    check_topk(wide[:1].expand(3, 9100), 64)
    small = wide[:, :200]
    check_topk(small, 200)
    check_topk(small[:0], 7)


def test_topk_past_two_to_the_31_elements(gen):
    """16384 rows of 248,320, every row a different one."""
    z = torch.empty(16384, QWEN, dtype=BF16, device="cuda").normal_(generator=gen)
    check_topk(z, 64, rows=[0, 1, 4097, 8647, 8648, 8649, 8650, 12345, 16382, 16383])
    first, second = topk_softmax(z, 64, return_lse=True), topk_softmax(z, 64, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
