"""The mixer's kernels under Triton's interpreter, held against float64 autograd through the reference, head by head.

The convolution's programs walk some 32 tokens one after another, which is slow here: most tests give them 4, in more
strips. The recurrence has its own tests (test_gated_delta_triton.py).
"""

from __future__ import annotations

import pytest
import torch
from gated_delta_cases import EPS, WEIGHTS, empty_like, mixer_case, mixer_close, mixer_run, mixer_truth
from interpreter import addresses_checked, strips_of, unfit
from ops_close import bits, same

from cortiq_kernels.ops.gated_delta import GdnDims, gdn_mixer_bwd, gdn_mixer_fwd
from cortiq_kernels.ops.sequences import sequence_index

F16, F32, NAN = torch.float16, torch.float32, float("nan")

pytestmark = [pytest.mark.interpret, pytest.mark.skipif(bool(unfit()), reason=unfit())]

# The output's norm takes most of dq away where few tokens have been seen. In float32 the gates' gradients may lose
# digits where decay is strong: sums, over a chunk, of what has decayed less.
TIGHT = {n: 1e-5 for n in ("out", "dz", "dq", "dk", "dv", "dconv_q", "dconv_k", "dconv_v", "dnorm")}
TIGHT |= {n: 4e-4 for n in ("da", "db", "dA_log", "ddt_bias")}
HALF = {n: 6e-3 for n in TIGHT} | {n: 2e-2 for n in ("db", "da", "dA_log", "ddt_bias")}
SMALL = GdnDims(1, 1, 16, 16, 4)


@pytest.fixture
def quick():
    with strips_of(8, 4):
        yield


def cuts(*starts: int) -> torch.Tensor:
    return torch.tensor(starts, dtype=torch.int32)


CASES = [
    (GdnDims(1, 2, 16, 16, 4), [0, 66], 66),
    (GdnDims(1, 3, 24, 40, 4), [0, 0, 3, 4, 18, 18], 18),
    (GdnDims(2, 2, 32, 16, 2), [0, 1, 2, 34], 34),
    (GdnDims(1, 1, 16, 24, 3), [0, 30, 60], 30),
    (GdnDims(1, 2, 24, 24, 1), [0, 0, 33], 33),
    (GdnDims(1, 1, 64, 64, 4), [0, 1, 2, 3], 1),
    (GdnDims(2, 4, 12, 9, 4), [0, 14, 14], 14),
]


@pytest.mark.parametrize("dims,cu,window,dtype", [(*c, F32) for c in CASES] + [(*c, F16) for c in CASES[:4]], ids=str)
def test_matches_float64(dims, cu, window, dtype, quick, rng):
    case = mixer_case(rng, dims, cu[-1], dtype=dtype, rates=(0.02, 16.0 if dtype == F32 else 1.5))
    got = mixer_run(case, cuts(*cu), window)
    mixer_close(case, got, mixer_truth(case, cuts(*cu)), TIGHT if dtype == F32 else HALF)


def test_as_shipped(rng):
    """The convolution's own strips, ending inside one, and a sequence that starts in the first tokens of the next."""
    cu = cuts(0, 31, 33, 129, 130)
    case = mixer_case(rng, SMALL, 130, rates=(0.5, 0.5))
    mixer_close(case, mixer_run(case, cu, 130), mixer_truth(case, cu), TIGHT)


@pytest.mark.parametrize("strips,steps", [(1, 2), (2, 3), (16, 1)])
def test_strips_of_the_convolution(strips, steps, rng):
    """However it is cut, and shorter than its taps: the same bits a token, and the weights' gradient."""
    cu = cuts(0, 1, 8, 9)
    case = mixer_case(rng, SMALL, 9, rates=(0.5, 0.5))
    with strips_of(strips, steps):
        got = mixer_run(case, cu, 9)
    want = mixer_truth(case, cu)
    mixer_close(case, got, want, TIGHT)
    same(got["dconv"], want["dconv"], 4e-6)


def test_packed_is_one_by_one_bit_for_bit(quick, rng):
    cu = [0, 1, 3, 3, 34, 36]
    case = mixer_case(rng, SMALL, 36, rates=(0.01, 0.5))
    got = mixer_run(case, cuts(*cu), 36)
    mixer_close(case, got, mixer_truth(case, cuts(*cu)), TIGHT)
    total = {name: torch.zeros_like(got[name]) for name in WEIGHTS}
    for lo, hi in zip(cu, cu[1:], strict=False):
        if hi > lo:
            one = case._replace(proj=case.proj[lo:hi], dout=case.dout[lo:hi])
            alone = mixer_run(one, cuts(0, hi - lo), hi - lo)
            assert bits(alone["out"], alone["dproj"]) == bits(got["out"][lo:hi], got["dproj"][lo:hi])
            for name, x in total.items():
                x += alone[name]
    for name, x in total.items():
        same(got[name], x, 4e-6)


def test_a_nan_stays_in_its_sequence(quick, rng):
    cu = cuts(0, 5, 27, 30)
    case = mixer_case(rng, SMALL, 30, rates=(0.01, 0.01))
    want = mixer_run(case, cu, 30)
    case.proj[5:27] = NAN
    case.dout[5:27] = NAN
    got = mixer_run(case, cu, 30)
    for rows in (slice(0, 5), slice(27, 30)):
        assert bits(got["out"][rows], got["dproj"][rows]) == bits(want["out"][rows], want["dproj"][rows])
    assert got["out"][5:27].isnan().all() and all(got[n].isnan().any() for n in WEIGHTS)


def test_keep_out_accumulate_and_skipped_gradients(quick, rng):
    """keep="all" gives the bits of "lean", the backward those of the forward's out, and a second run the same again."""
    cu = cuts(0, 7, 20)
    case = mixer_case(rng, GdnDims(1, 1, 16, 24, 4), 20)
    before = bits(case.proj, case.dout, *case.weights)
    want = mixer_run(case, cu, 20)
    assert bits(*mixer_run(case, cu, 20, keep="all").values()) == bits(*want.values())
    common = dict(dims=case.dims, cu_seqlens=cu, max_seqlen=20, eps=EPS)
    index = sequence_index(cu, 20)
    out, saved = gdn_mixer_fwd(case.proj, *case.weights, backend="triton", index=index, **common)
    nothing = gdn_mixer_fwd(case.proj, *case.weights, backend="triton", save=False, **common)
    assert nothing[1] is None and bits(nothing[0]) == bits(out) == bits(want["out"])
    made = empty_like(case)
    more = {name: torch.ones_like(want[name]) for name in WEIGHTS}
    dproj = gdn_mixer_bwd(case.dout, saved, *case.weights, **more, out=made["out"], accumulate=True, **common)
    assert bits(dproj, made["out"]) == bits(want["dproj"], want["out"])
    for name, x in more.items():
        same(x, want[name] + 1, 1e-6)
    only = {"dconv": made["dconv"], "dnorm": made["dnorm"]}
    again = gdn_mixer_bwd(case.dout, saved, *case.weights, **only, **common)
    assert bits(again, *only.values()) == bits(want["dproj"], want["dconv"], want["dnorm"])
    assert bits(case.proj, case.dout, *case.weights) == before


def test_strided_expanded_and_guard_columns(quick, rng):
    """proj, dproj and both outs as columns of wider matrices full of NaN, dout expanded or turned."""
    cu = cuts(0, 4, 12)
    case = mixer_case(rng, GdnDims(1, 1, 16, 24, 4), 12)
    case = case._replace(dout=case.dout[:1].expand(12, -1))
    dense = case._replace(dout=case.dout.contiguous())
    want = mixer_run(dense, cu, 12)
    widths = {"proj": case.dims.width, "dproj": case.dims.width, "out": case.dims.out_width}
    wide = {n: torch.full((12, width + 7), NAN) for n, width in widths.items()}
    inner = {n: x[:, 3:-4] for n, x in wide.items()}
    inner["proj"].copy_(case.proj)
    into = {**empty_like(case), "out": inner["out"], "dproj": inner["dproj"]}
    got = mixer_run(case._replace(proj=inner["proj"]), cu, 12, into=into)
    assert bits(*got.values()) == bits(*want.values())
    for x in wide.values():
        assert x[:, :3].isnan().all() and x[:, -4:].isnan().all()
    turned = {n: torch.full(x.shape[::-1], NAN).t() for n, x in inner.items()}
    turned["proj"].copy_(case.proj)
    into = {**empty_like(case), "out": turned["out"], "dproj": turned["dproj"]}
    columns = dense._replace(proj=turned["proj"], dout=dense.dout.t().contiguous().t())
    assert bits(*mixer_run(columns, cu, 12, into=into).values()) == bits(*want.values())


@pytest.mark.parametrize("a,b", [(-200.0, 200.0), (80.0, 200.0), (-200.0, -200.0), (3.0, -60.0)])
def test_saturated_gates(a, b, quick, rng):
    """beta 0 or 1, decay none or complete, and sigmoids that float32 still tells from 0."""
    case = mixer_case(rng, SMALL, 20, rates=(0.5, 2.0))
    case.proj[:, SMALL.ab][:, :1] = a
    case.proj[:, SMALL.ab][:, 1:] = b
    case.weights[2].zero_()
    got, want = mixer_run(case, cuts(0, 20), 20), mixer_truth(case, cuts(0, 20))
    # with decay complete o is a multiple of v, and the norm takes all of dq and dk but what eps leaves
    lost = {name: 2e-4 for name in ("dq", "dk", "dconv_q", "dconv_k")}
    mixer_close(case, got, want, TIGHT | (lost if a == 80 else {}), floor=1e-6)


def test_zero_projection(quick, rng):
    """All-zero keys, queries and outputs: the eps of each norm carries."""
    case = mixer_case(rng, SMALL, 6, rates=(0.5, 2.0))
    case.proj.zero_()
    mixer_close(case, mixer_run(case, cuts(0, 6), 6), mixer_truth(case, cuts(0, 6)), TIGHT)


def test_no_tokens(quick, rng):
    case = mixer_case(rng, SMALL, 0)
    got = mixer_run(case, cuts(0, 0), 8)
    assert got["out"].shape == (0, 16) and all((got[n] == 0).all() for n in WEIGHTS)


@pytest.mark.parametrize("dims", [GdnDims(1, 2, 24, 17, 4), GdnDims(1, 1, 16, 16, 2)], ids=str)
def test_every_address_is_inside_its_tensor(dims, quick, rng):
    case = mixer_case(rng, dims, 35)
    wide = torch.full((35, dims.width + 5), NAN)
    wide[:, 2:-3] = case.proj
    case = case._replace(proj=wide[:, 2:-3])
    with addresses_checked() as seen:
        got = mixer_run(case, cuts(0, 1, 1, 34, 35), 35)
    names = {"conv", "wy", "state", "output", "gated_norm_bwd", "advance", "dstate", "input", "gates_bwd", "conv_bwd"}
    names.add("parts")
    assert set(seen) == {f"{name}_kernel" for name in names}
    assert all(torch.isfinite(x).all() for x in got.values())
