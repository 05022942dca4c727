"""The norm and the row kernels on a GPU: against float64, silent, capturable, repeatable."""

from __future__ import annotations

import pytest
import torch
from ops_close import bits, no_sync

from cortiq_kernels.ops.embedding import embedding_bwd, embedding_fwd
from cortiq_kernels.ops.rms_norm import add_rms_norm_bwd, add_rms_norm_fwd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EPS = 1e-6
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOL = {BF16: 3e-3, F16: 4e-4, F32: 1e-6}  # relative L2
SHAPES = [
    *((1, 64, BF16), (4099, 64, F16), (257, 65, BF16), (4099, 1024, BF16), (4099, 1024, F32), (129, 2560, BF16)),
    *((1000, 2560, F16), (8192, 5120, BF16), (77, 8191, BF16), (130, 8192, F32), (5, 16384, BF16), (300, 16384, F32)),
]


def gap(t):
    """The same values in rows that lie 16 elements further apart."""
    wide = torch.full((t.shape[0], t.shape[1] + 16), float("nan"), dtype=t.dtype, device=t.device)
    wide[:, : t.shape[1]] = t
    return wide[:, : t.shape[1]]


def off(got, want):
    assert torch.isfinite(got).all()
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("n,h,dtype", SHAPES)
def test_norm_against_float64(n, h, dtype):
    gen = torch.Generator("cuda").manual_seed(n + h)
    x, r, dn, dx = (torch.randn(n, h, generator=gen, device="cuda").to(dtype) for _ in range(4))
    weight = 0.3 * torch.randn(h, generator=gen, device="cuda")
    total = (x.double() + r.double()).to(dtype)
    for centered, add in ((True, True), (False, False)):
        y64, saved64 = add_rms_norm_fwd(total.double(), None, weight.double(), EPS, zero_centered=centered)
        dx64, dw64 = (dx if add else torch.zeros_like(dx)).double(), torch.empty_like(weight).double()
        add_rms_norm_bwd(dn.double(), saved64, weight.double(), dx=dx64, zero_centered=centered, dweight=dw64)
        runs = []
        for strided in (False, True, True):
            mine = [gap(t) if strided else t.clone() for t in (x, r, dn, dx)]
            xs, rs, dns, got = mine
            y, again = (torch.full_like(x, float("nan")) for _ in range(2))
            dw = torch.full_like(weight, float("nan"))
            kw = dict(zero_centered=centered, backend="triton")
            with no_sync():
                _, saved = add_rms_norm_fwd(xs, rs, weight, EPS, out=y, **kw)
                add_rms_norm_bwd(dns, saved, weight, dx=got, dweight=dw, add_dx=add, out=again, **kw)
            errors = off(y, y64), off(got, dx64), off(dw, dw64)
            assert torch.equal(xs, total) and bits(again) == bits(y)
            assert errors[0] < TOL[dtype] and errors[1] < TOL[dtype] and errors[2] < 1e-6, errors
            runs.append(bits(y, got, dw))
            twice = dw.clone()
            add_rms_norm_bwd(dns, saved, weight, dx=dns, dweight=twice, accumulate=True, add_dx=False, **kw)
            assert torch.equal(twice, 2 * dw) and (add or torch.equal(dns, got))
        assert runs[1] == runs[2] and (h % 16 or runs[0] == runs[1])


def test_no_rows():
    x, w, dw = torch.zeros(0, 64, device="cuda", dtype=BF16), torch.zeros(64, device="cuda"), torch.ones(64).cuda()
    _, saved = add_rms_norm_fwd(x, x, w, EPS)
    add_rms_norm_bwd(x, saved, w, dx=x.clone(), dweight=dw, accumulate=True)
    assert (dw == 1).all()
    add_rms_norm_bwd(x, saved, w, dx=x.clone(), dweight=dw)
    assert (dw == 0).all()


@pytest.mark.parametrize("n,v,h,dtype", [(0, 5, 8, BF16), (3000, 7, 65, F32), (8192, 50000, 1024, BF16)])
def test_embedding_gradient(n, v, h, dtype):
    gen = torch.Generator("cuda").manual_seed(n)
    ids = torch.randint(v, (n,), generator=gen, device="cuda")
    ids[: n // 3] = v // 2
    dy = torch.randn(n, h, generator=gen, device="cuda").to(dtype)
    table = torch.randn(v, h, generator=gen, device="cuda").to(dtype)
    assert bits(embedding_fwd(ids, table)) == bits(table[ids])
    want = torch.zeros(v, h, dtype=torch.float64, device="cuda").index_put_((ids,), dy.double(), accumulate=True)
    runs = []
    for kind in (torch.int32, torch.int64):
        own = ids.to(kind)
        out = torch.full((v, h), float("nan"), device="cuda")
        with no_sync():
            embedding_bwd(dy, own, out=out)
        assert torch.isfinite(out).all() and (out.double() - want).norm() <= 3e-6 * want.norm()
        assert ((want != 0) | (out == 0)).all()
        runs.append(bits(out))
        embedding_bwd(dy, own, out=out, accumulate=True)
        assert (out.double() - 2 * want).norm() <= 6e-6 * want.norm()
    assert runs[0] == runs[1]


def test_both_replay_as_a_cuda_graph():
    gen = torch.Generator("cuda").manual_seed(0)
    x, r, dn = (torch.randn(520, 256, generator=gen, device="cuda").to(BF16) for _ in range(3))
    ids = torch.randint(99, (520,), generator=gen, device="cuda")
    weight, dw, table = torch.zeros(256, device="cuda"), torch.zeros(256, device="cuda"), torch.zeros(99, 256).cuda()
    x_out, y, dx = (torch.empty_like(x) for _ in range(3))

    def run():
        _, saved = add_rms_norm_fwd(x, r, weight, EPS, x_out=x_out, out=y)
        add_rms_norm_bwd(dn, saved, weight, dx=dx, dweight=dw, add_dx=False)
        embedding_bwd(dx, ids, out=table)

    run()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    x.copy_(r)
    ids.copy_(ids.flip(0))
    run()
    want = bits(x_out, y, dx, dw, table)
    for t in (x_out, y, dx, dw, table):
        t.fill_(float("nan"))
    graph.replay()
    assert bits(x_out, y, dx, dw, table) == want
