"""The SwiGLU passes on a GPU: widths that are no multiple of anything, rows past 2^31 elements, graphs, memory, and the
identities that tie the gates' gradient to those of the matrices around them. Truth is the torch path in float64 from
the same rounded inputs."""

from __future__ import annotations

import pytest
import torch
from ops_close import bits, nan, no_sync, not_worse, same

from cortiq_kernels.ops.linear import linear_bwd_w, linear_bwd_x, linear_fwd
from cortiq_kernels.ops.swiglu import swiglu_mlp_bwd, swiglu_mlp_fwd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SUMS = ("sum_abs", "sum_square", "dmask", "mask_dmask")


@pytest.fixture
def gen() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(1234)


def make(n, f, dtype, gen):
    gate_up = torch.randn(n, 2 * f, generator=gen, device="cuda").mul_(2).to(dtype)
    dact = torch.randn(n, f, generator=gen, device="cuda").to(dtype)
    return gate_up, dact, torch.rand(f, generator=gen, device="cuda")


def run(gate_up, dact, mask, backend="auto", counted=None):
    n, f = dact.shape
    dtype, acc = gate_up.dtype, F64 if gate_up.dtype == F64 else F32
    s = {k: torch.full((f,), float("nan"), dtype=acc, device="cuda") for k in SUMS}
    act, again, dgate_up = (
        torch.full((n, w * f), float("nan"), dtype=dtype, device="cuda") for w in (1, 1, 2)
    )  # fmt: skip
    swiglu_mlp_fwd(
        gate_up, mask, out=act, sum_abs=s["sum_abs"], sum_square=s["sum_square"], counted=counted, backend=backend
    )
    swiglu_mlp_bwd(
        dact, gate_up, mask, dgate_up=dgate_up, act=again, dmask=s["dmask"], mask_dmask=s["mask_dmask"],
        backend=backend,
    )  # fmt: skip
    return {"act": act, "again": again, "dgate_up": dgate_up, **s}


def check(gate_up, dact, mask, **kw):
    """Kernels no worse than the torch path in the same dtype; the backward's act is the forward's."""
    with no_sync():
        got = run(gate_up, dact, mask, **kw)
    exact = run(*(None if t is None else t.double() for t in (gate_up, dact, mask)), "torch", **kw)
    plain = run(gate_up, dact, mask, "torch", **kw)
    for name, t in got.items():
        not_worse(t, exact[name], plain[name], ulps=8.0 if name in SUMS else 2.0 if t.dtype == F32 else 1.0)
    assert bits(got["act"]) == bits(got["again"])
    return got


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("f", [1, 7, 8, 9, 63, 64, 65, 127, 129, 431, 768, 1504])
def test_every_width(f, dtype, gen):
    check(*make(130, f, dtype, gen))


@pytest.mark.parametrize("n", [1, 2, 31, 128, 129, 1000])
def test_every_number_of_rows(n, gen):
    gate_up, dact, mask = make(n, 3584, BF16, gen)
    check(gate_up, dact, mask)
    check(gate_up, dact, None)


@pytest.mark.parametrize("shape", [(8192, 3584), (4096, 9216)])
def test_sizes_of_a_step_and_the_same_bits_in_every_run(shape, gen):
    t = make(*shape, BF16, gen)
    got = check(*t)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(got.values(), run(*t).values(), strict=True))


def test_rows_that_count(gen):
    gate_up, dact, mask = make(1000, 431, BF16, gen)
    counted = torch.rand(1000, generator=gen, device="cuda") < 0.7
    got = check(gate_up, dact, mask, counted=counted)
    gate_up[~counted] = float("nan")
    bad = run(gate_up, dact, mask, counted=counted)
    assert bits(bad["sum_abs"], bad["sum_square"]) == bits(got["sum_abs"], got["sum_square"])


def test_strides_alignment_and_outputs_that_are_inputs(gen):
    gate_up, dact, mask = make(300, 431, BF16, gen)
    want = run(gate_up, dact, mask)
    for shift in (1, 3, 8):
        wide = torch.full((300, 900), float("nan"), dtype=BF16, device="cuda")
        wide[:, shift : shift + 862] = gate_up
        got = run(wide[:, shift : shift + 862], dact, torch.stack([mask, mask], 1)[:, 0])
        assert bits(*got.values()) == bits(*want.values())
    g, a, dmask = gate_up.clone(), dact.clone(), nan(431, dtype=F32).cuda()
    swiglu_mlp_bwd(a, g, mask, dgate_up=g, act=a, dmask=dmask)
    assert bits(g, a, dmask) == bits(want["dgate_up"], want["again"], want["dmask"])


def test_an_expanded_gradient_takes_the_torch_path(gen):
    """out.sum().backward() hands one down; a peer read one element's neighbours."""
    gate_up, _, mask = make(65, 33, BF16, gen)
    one = torch.ones((), dtype=BF16, device="cuda")
    with pytest.warns(UserWarning, match="columns 0 elements apart"):
        got = run(gate_up, one.expand(65, 33), mask)
    want = run(gate_up, one.expand(65, 33).contiguous(), mask)
    for name in ("dgate_up", "dmask"):
        same(got[name], want[name].double(), 1e-2)


def test_elements_past_two_to_the_31(gen):
    """130,000 rows of 2 · 17,408: int32 offsets end at row 61,681, and those of act at row 123,361."""
    n, f = 130_000, 17_408
    gate_up = torch.empty(n, 2 * f, dtype=BF16, device="cuda").normal_(generator=gen)
    dact = torch.empty(n, f, dtype=BF16, device="cuda").normal_(generator=gen)
    mask, dmask = torch.rand(f, generator=gen, device="cuda"), nan(f, dtype=F32).cuda()
    act = swiglu_mlp_fwd(gate_up, mask)
    dgate_up, again, _ = swiglu_mlp_bwd(dact, gate_up, mask, dmask=dmask)
    total = torch.zeros(f, dtype=F64, device="cuda")
    for a in range(0, n, 2000):
        rows = slice(a, a + 2000)
        piece = nan(f, dtype=F32).cuda()
        one = swiglu_mlp_bwd(dact[rows], gate_up[rows], mask, dmask=piece, backend="torch")
        total += piece
        assert (one[1].float() - act[rows].float()).abs().max() <= 2**-8 * one[1].float().abs().max()
        assert torch.equal(again[rows], act[rows])
        assert (one[0].float() - dgate_up[rows].float()).abs().max() <= 2**-8 * one[0].float().abs().max()
    assert ((dmask - total).norm() / total.norm()).item() <= 1e-5


def test_capture_and_replay(gen):
    gate_up, dact, mask = make(1000, 768, BF16, gen)
    run(gate_up, dact, mask)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(gate_up, dact, mask)
    torch.cuda.current_stream().wait_stream(side)
    s = {k: nan(768, dtype=F32).cuda() for k in ("dmask", "sum_abs")}
    act, again, dgate_up = torch.empty_like(dact), torch.empty_like(dact), torch.empty_like(gate_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        swiglu_mlp_fwd(gate_up, mask, out=act, sum_abs=s["sum_abs"])
        swiglu_mlp_bwd(dact, gate_up, mask, dgate_up=dgate_up, act=again, dmask=s["dmask"])
    gate_up.copy_(gate_up.roll(3, 0))
    mask.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    want = run(gate_up, dact, mask)
    assert bits(act, again, dgate_up, s["dmask"], s["sum_abs"]) == bits(
        *(want[k] for k in ("act", "again", "dgate_up", "dmask", "sum_abs"))
    )


def test_memory_of_the_passes(gen):
    """Parts of the sums and nothing else: 24 MiB at the largest size that is measured."""
    gate_up, dact, mask = make(8192, 17_408, BF16, gen)
    act, dgate_up, dmask = torch.empty_like(dact), torch.empty_like(gate_up), torch.empty_like(mask)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    swiglu_mlp_fwd(gate_up, mask, out=act, sum_abs=dmask)
    swiglu_mlp_bwd(dact, gate_up, mask, dgate_up=dgate_up, act=act, dmask=dmask)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 24 << 20


@pytest.mark.parametrize("dtype,tol", [(BF16, 1e-2), (F32, 1e-5)])
def test_identities_of_the_gates_gradient(dtype, tol, gen):
    """Σ_h Wd·dWd = Σ_h Wu·dWu = mask·dmask, neuron by neuron."""
    n, h, f = 2048, 512, 1536
    x, dy = (torch.randn(n, h, generator=gen, device="cuda").to(dtype) for _ in range(2))
    wu = (h**-0.5 * torch.randn(2 * f, h, generator=gen, device="cuda")).to(dtype)
    wd = (f**-0.5 * torch.randn(h, f, generator=gen, device="cuda")).to(dtype)
    mask = torch.rand(f, generator=gen, device="cuda")
    mask[::5] = 0
    gate_up = linear_fwd(x, wu)
    product = nan(f, dtype=F32).cuda()
    dgate_up, act, _ = swiglu_mlp_bwd(linear_bwd_x(dy, wd), gate_up, mask, mask_dmask=product)
    dwu, dwd = nan(2 * f, h, dtype=F32).cuda(), nan(h, f, dtype=F32).cuda()
    linear_bwd_w(dgate_up, x, out=dwu)
    linear_bwd_w(dy, act, out=dwd)
    from_down, from_up = (wd.double() * dwd).sum(0), (wu.double() * dwu).sum(1)[f:]
    size = product.double().norm()
    assert (from_down - product).norm() <= tol * size and (from_up - product).norm() <= tol * size
    closed = mask == 0
    assert (dwd[:, closed] == 0).all() and (dwu[:f][closed] == 0).all() and (dwu[f:][closed] == 0).all()


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_weight_gradients_are_not_summed_in_16_bit(dtype, gen):
    """Halves of the rows that cancel: a product that is split over the rows and adds its parts in 16 bit keeps 2^-9 of
    them. Also added to what was there, which lies where it lay."""
    a, b = (torch.randn(4096, w, generator=gen, device="cuda").to(dtype) for w in (1024, 3584))
    dy, x = torch.cat([a, -a]), torch.cat([b, b])
    out = nan(1024, 3584, dtype=F32).cuda()
    linear_bwd_w(dy, x, out=out)
    size = (a.double().t() @ b.double()).abs().max()
    assert (out.abs().max() / size).item() <= 1e-5
    out.fill_(0.5)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_bwd_w(dy, x, out=out, accumulate=True)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < out.nbytes
    assert ((out - 0.5).abs().max() / size).item() <= 1e-5
