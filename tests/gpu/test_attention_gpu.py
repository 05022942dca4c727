"""The attention mixer's kernels on a GPU: 16 bit at the head sizes of models, many sequences, graphs, offsets past 2^31
elements. Truth is the torch path in float64 from the same rounded inputs, compared head by head.
"""

from __future__ import annotations

import gc

import pytest
import torch
from attention_cases import EPS, Case, close, common, make, outputs, run
from ops_close import no_sync

from cortiq_kernels import backend
from cortiq_kernels.ops.attention import AttnDims, attention_mixer_bwd, attention_mixer_fwd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16, F16, NAN = torch.bfloat16, torch.float16, float("nan")
BOUND = {BF16: 1.5e-2, F16: 2e-3}
FULL = AttnDims(8, 2, 256, 64)
DIMS = [
    (FULL, {}),
    (AttnDims(6, 1, 256, 64), {}),
    (AttnDims(16, 8, 128, 128, False), {"zero_centered": False}),
    (AttnDims(14, 2, 64, 64, False), {"norm": False, "bias": True}),
    (AttnDims(3, 1, 160, 64), {}),
    (AttnDims(2, 2, 80, 40, False), {"norm": False}),
]
PACKED = (0, 700, 1, 64, 65, 0, 1000, 3, 63, 152, 0)


@pytest.fixture
def gen() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(1234)


def cuts(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().cuda()


def truth(case: Case, cu: torch.Tensor, window: int) -> dict[str, torch.Tensor]:
    wide = Case(*(x.double() if isinstance(x, torch.Tensor) else x for x in case))
    return run(wide, cu, window, backend="torch")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit for bit, NaN equal to itself."""
    return all(torch.equal(x.view(torch.uint8), b[n].view(torch.uint8)) for n, x in a.items())


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("dims,kind", DIMS, ids=str)
def test_packed_against_float64(dims, kind, dtype, gen):
    """On its own softmax: packed sequences, of no token and of one too."""
    cu = cuts(300, 1, 0, 211, 512, 0, 0)
    case = make(gen, dims, 1024, 512, dtype=dtype, **kind)
    close(case, run(case, cu, 512, backend="auto"), truth(case, cu, 512), BOUND[dtype])


@pytest.mark.parametrize("own", [False, True], ids=["auto", "own"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("dims,kind", DIMS, ids=str)
def test_whole_windows_against_float64(dims, kind, dtype, own, gen):
    """One sequence a window: SDPA's kernels where they serve, or its own."""
    cu = cuts(400, 400)
    case = make(gen, dims, 800, 400, dtype=dtype, **kind)
    close(case, run(case, cu, 400, backend="triton" if own else "auto"), truth(case, cu, 400), BOUND[dtype])


@pytest.mark.parametrize("t", [1, 2, 31, 32, 33, 63, 64, 65, 127, 129, 2049])
def test_lengths(t, gen):
    case = make(gen, FULL, t, t, dtype=BF16)
    close(case, run(case, cuts(t), t), truth(case, cuts(t), t), BOUND[BF16])


def test_long_sequence_and_large_scores(gen):
    """8,192 tokens, and norms that make scores of several hundred."""
    case = make(gen, AttnDims(2, 1, 128, 128), 8192, 8192, dtype=BF16)
    close(case, run(case, cuts(8192), 8192), truth(case, cuts(8192), 8192), BOUND[BF16])
    case.q_norm.fill_(9.0)
    case.k_norm.fill_(9.0)
    assert all(torch.isfinite(x).all() for x in run(case, cuts(8192), 8192).values())


def test_float32_and_large_heads_take_plain_torch(gen):
    case = make(gen, AttnDims(4, 2, 64, 64), 300, 300)
    close(case, run(case, cuts(100, 200), 300, backend="auto"), truth(case, cuts(100, 200), 300), 1e-5)
    with pytest.raises(ValueError, match="float32"):
        run(case, cuts(300), 300)
    wide = make(gen, AttnDims(1, 1, 320, 64), 64, 64, dtype=BF16)
    close(wide, run(wide, cuts(64), 64, backend="auto"), truth(wide, cuts(64), 64), BOUND[BF16])


def test_packed_is_one_by_one_bit_for_bit(gen):
    cu, starts = cuts(*PACKED), cuts(*PACKED).tolist()
    case = make(gen, FULL, 2048, 2048, dtype=BF16)
    got = run(case, cu, 2048)
    for lo, hi in zip(starts, starts[1:], strict=False):
        if hi > lo:
            alone = run(case.rows(lo, hi), cuts(hi - lo), hi - lo)
            for name in ("out", "dproj"):
                assert torch.equal(alone[name], got[name][lo:hi]), (name, lo, hi)
    assert equal(run(case, cuts(*PACKED, *[0] * 500), 2048), got)
    case.proj[:700] = NAN
    again = run(case, cu, 2048)
    for name in ("out", "dproj"):
        assert torch.equal(again[name][700:], got[name][700:]) and again[name][:700].isnan().any()


def test_reruns_give_the_same_bits(gen):
    case, cu = make(gen, FULL, 4096, 2048, dtype=BF16), cuts(2048, 2048)
    first = run(case, cu, 2048)
    assert all(equal(run(case, cu, 2048), first) for _ in range(5))
    with backend.deterministic(True):
        assert equal(run(case, cu, 2048, backend="auto"), first)


def test_more_sequences_than_a_grid_dimension_holds(gen):
    """20,000 sequences of 0 to 3 tokens and 4 programs each: past the 65,535 of a second grid dimension."""
    lengths = [(0, 1, 3, 2, 1)[i % 5] for i in range(20000)]
    n, dims = sum(lengths), AttnDims(4, 4, 64, 32)
    case = make(gen, dims, n, n, dtype=BF16)
    got = run(case, cuts(*lengths), n)
    tail = 7 * 50
    one = run(case.rows(n - tail, n), cuts(*lengths[-250:]), tail)
    assert all(torch.equal(one[name], got[name][-tail:]) for name in ("out", "dproj"))
    close(case.rows(n - tail, n), one, truth(case.rows(n - tail, n), cuts(*lengths[-250:]), tail), BOUND[BF16])


def warm(call) -> None:
    """Twice on a side stream: compiles kernels, makes workspaces."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)


def test_waits_for_nothing_and_replays_as_a_graph(gen):
    """One graph serves every packing: cu_seqlens is read on the device."""
    cu = cuts(100, 0, 300, 112)
    case = make(gen, FULL, 512, 512, dtype=BF16)
    made = outputs(case)
    warm(lambda: run(case, cu, 512, backend="auto", into=made))
    with no_sync():
        run(case, cu, 512, backend="auto", into=made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(case, cu, 512, backend="auto", into=made)
    for lengths in ((100, 0, 300, 112), (512, 0, 0, 0), (0, 0, 0, 512), (1, 2, 3, 506), (128, 128, 128, 128)):
        cu.copy_(cuts(*lengths))
        case.proj.copy_(torch.randn(case.proj.shape, generator=gen, device="cuda"))
        for x in made.values():
            x.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        captured = {n: x.clone() for n, x in made.items()}
        assert equal(captured, run(case, cu, 512)), lengths


def test_whole_windows_wait_for_nothing_and_replay_as_a_graph(gen):
    cu = cuts(512, 512)
    case = make(gen, FULL, 1024, 512, dtype=BF16)
    made = outputs(case)
    warm(lambda: run(case, cu, 512, backend="auto", into=made))
    with no_sync():
        run(case, cu, 512, backend="auto", into=made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(case, cu, 512, backend="auto", into=made)
    case.proj.copy_(torch.randn(case.proj.shape, generator=gen, device="cuda"))
    for x in made.values():
        x.fill_(NAN)
    graph.replay()
    torch.cuda.synchronize()
    close(case, made, truth(case, cu, 512), BOUND[BF16])


def test_past_two_to_the_31_elements(gen):
    """The last window has the bits of a call of its own, also where out, dproj and its gradients begin past 2^31."""
    window = 2048
    n = (2**31 // (FULL.nq * FULL.hd) // window + 2) * window
    last = make(gen, FULL, window, window, dtype=BF16)
    proj = torch.zeros(n, FULL.width, dtype=BF16, device="cuda")  # 10 GB
    dout = torch.zeros(n, FULL.nq * FULL.hd, dtype=BF16, device="cuda")
    proj[-window:], dout[-window:] = last.proj, last.dout
    cu = torch.arange(0, n + 1, window, dtype=torch.int32, device="cuda")
    case = last._replace(proj=proj, dout=dout)
    got, want = run(case, cu, window), run(last, cuts(window), window)
    for name in ("out", "dproj"):
        assert torch.equal(got[name][-window:], want[name]), name
        assert (got[name][:-window] == 0).all()
    for name in ("dq_norm", "dk_norm"):  # zeros are all that is added, in another order
        torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-4 * want[name].abs().max().item())
    del proj, dout, case, got
    gc.collect()
    torch.cuda.empty_cache()


def test_nothing_kept_gives_the_same_output(gen):
    case, cu = make(gen, FULL, 1024, 512, dtype=BF16), cuts(512, 512)
    vectors, keys = (case.q_norm, case.k_norm, case.cos, case.sin), common(case, cu, 512)
    for how in ("auto", "triton"):
        out, saved = attention_mixer_fwd(case.proj, *vectors, **keys, backend=how)
        alone, none = attention_mixer_fwd(case.proj, *vectors, **keys, backend=how, save=False)
        assert none is None and torch.equal(alone, out)
        assert attention_mixer_bwd(case.dout, saved, *vectors, **keys).isfinite().all() and keys["eps"] == EPS
