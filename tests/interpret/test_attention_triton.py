"""The attention mixer's kernels under Triton's interpreter, held against float64 autograd through the reference."""

from __future__ import annotations

import pytest
import torch
from attention_cases import close, common, make, outputs, run, truth
from interpreter import addresses_checked, unfit
from ops_close import bits, same

from cortiq_kernels.ops import configs
from cortiq_kernels.ops.attention import (
    AttnDims,
    attention_blocks,
    attention_mixer_bwd,
    attention_mixer_fwd,
    mixer,
    sdpa,
)
from cortiq_kernels.ops.sequences import sequence_index

F16, F32, NAN = torch.float16, torch.float32, float("nan")
TIGHT, HALF = 3e-6, 2e-3

pytestmark = [pytest.mark.interpret, pytest.mark.skipif(bool(unfit()), reason=unfit())]

SMALL = AttnDims(4, 2, 16, 4)
PLAIN = AttnDims(4, 2, 16, 16, False)


def cuts(*starts: int) -> torch.Tensor:
    return torch.tensor(starts, dtype=torch.int32)


# Sequences of no token and of one, padding of cu_seqlens, groups of 1, 3, 4, 6 and 8 query heads, odd head sizes.
CASES = {
    "packed": (SMALL, (0, 9, 18, 19, 50, 50, 55, 55), 55, {}),
    "group of 4": (AttnDims(4, 1, 32, 8), (0, 0, 40, 41, 100), 100, {}),
    "group of 3": (AttnDims(3, 1, 24, 12), (0, 1, 33), 33, {}),
    "group of 6": (AttnDims(6, 1, 20, 0), (0, 33, 66), 33, {}),
    "group of 8": (AttnDims(16, 2, 16, 8), (0, 17, 40), 40, {}),
    "no group": (AttnDims(2, 2, 16, 16), (0, 5, 7), 7, {}),
    "longer than a tile": (AttnDims(1, 1, 16, 4), (0, 140, 150), 150, {}),
    "heads of 160": (AttnDims(2, 1, 160, 64), (0, 5, 12), 12, {}),
    "one token": (SMALL, (0, 1), 1, {}),
    "plain norm": (PLAIN, (0, 9, 40), 40, {"zero_centered": False}),
    "bias": (AttnDims(4, 2, 20, 20, False), (0, 9, 40), 40, {"norm": False, "bias": True}),
    "norm and bias": (PLAIN, (0, 9, 40), 40, {"bias": True}),
    "neither": (PLAIN, (0, 9, 40), 40, {"norm": False}),
}
KINDS = [(name, F32) for name in CASES] + [(name, F16) for name in ("group of 6", "norm and bias")]


@pytest.mark.parametrize("name,dtype", KINDS, ids=str)
def test_matches_float64(name, dtype, rng):
    dims, starts, window, kind = CASES[name]
    case = make(rng, dims, starts[-1], window, dtype=dtype, **kind)
    got = run(case, cuts(*starts), window)
    close(case, got, truth(case, cuts(*starts)), TIGHT if dtype == F32 else HALF)


def test_no_tokens(rng):
    case = make(rng, SMALL, 0, 5)
    got = run(case, cuts(0, 0), 5)
    assert got["out"].shape == (0, 64) and not got["dq_norm"].any() and not got["dk_norm"].any()


def test_packed_is_one_by_one_bit_for_bit(rng):
    """Alone, packed, before twenty empty sequences: the same bits."""
    starts = (0, 40, 41, 41, 110)
    case = make(rng, AttnDims(2, 1, 16, 4), 110, 110)
    got = run(case, cuts(*starts), 110)
    for lo, hi in zip(starts, starts[1:], strict=False):
        if hi > lo:
            alone = run(case.rows(lo, hi), cuts(0, hi - lo), hi - lo)
            assert bits(alone["out"], alone["dproj"]) == bits(got["out"][lo:hi], got["dproj"][lo:hi])
    padded = run(case, cuts(*starts, *[110] * 20), 110)
    assert bits(*padded.values()) == bits(*got.values()) == bits(*run(case, cuts(*starts), 110).values())


def test_a_nan_stays_in_its_sequence(rng):
    cu = cuts(0, 5, 27, 30)
    case = make(rng, SMALL, 30, 30)
    want = run(case, cu, 30)
    case.proj[5:27] = NAN
    case.dout[5:27] = NAN
    got = run(case, cu, 30)
    for rows in (slice(0, 5), slice(27, 30)):
        assert bits(got["out"][rows], got["dproj"][rows]) == bits(want["out"][rows], want["dproj"][rows])
    assert got["out"][5:27].isnan().all()


@pytest.mark.parametrize("rows,split", [(64, 0), (128, 1)])
def test_other_configurations(rows, split, rng):
    cu = cuts(0, 70, 71, 120)
    case = make(rng, AttnDims(2, 1, 16, 8), 120, 120)
    forward = {"ROWS": rows, "COLS": 64, "STAGES": 1, "num_warps": 4, "num_stages": 1}
    backward = {**forward, "ROWS": 192 - rows, "BOTH": split}
    few = {"ROWS": rows // 32, "num_warps": 1, "num_stages": 1}
    with (
        configs.trying("attention", 64, "softmax", forward),
        configs.trying("attention", 64, "softmax_bwd", backward),
        configs.trying("attention", 64, "prep_bwd", few),
    ):
        close(case, run(case, cu, 120), truth(case, cu), TIGHT)


def test_given_blocks_accumulation_skipped_gradients_and_nothing_kept(rng):
    cu = cuts(0, 7, 20)
    case = make(rng, PLAIN, 20, 20, bias=True)
    before = bits(case.proj, case.dout, case.bias)
    want = run(case, cu, 20)
    given = {"index": sequence_index(cu, 20), "blocks": attention_blocks(cu, 20, case.dims)}
    assert bits(*run(case, cu, 20, **given).values()) == bits(*want.values())
    vectors, keys = (case.q_norm, case.k_norm, case.cos, case.sin), common(case, cu, 20)
    out, saved = attention_mixer_fwd(case.proj, *vectors, **keys, backend="triton")
    assert saved.o is out
    alone, none = attention_mixer_fwd(case.proj, *vectors, **keys, backend="triton", save=False)
    assert none is None and bits(alone) == bits(out) == bits(want["out"])
    more = {n: torch.ones_like(want[n]) for n in ("dq_norm", "dk_norm", "dbias")}
    dproj = attention_mixer_bwd(case.dout, saved, *vectors, **keys, **more, accumulate=True)
    assert bits(dproj) == bits(want["dproj"])
    for name, x in more.items():
        same(x, want[name] + 1, 1e-6)
    assert bits(attention_mixer_bwd(case.dout, saved, *vectors, **keys)) == bits(want["dproj"])
    assert bits(case.proj, case.dout, case.bias) == before


@pytest.mark.parametrize("dims", [SMALL, PLAIN], ids=["gate", "no gate"])
def test_strided_expanded_and_guard_columns(dims, rng):
    """proj, dproj and out as columns of wider matrices full of NaN, or turned; dout expanded."""
    cu, n = cuts(0, 4, 12), 12
    case = make(rng, dims, n, n)
    case = case._replace(dout=case.dout[:1].expand(n, -1))
    dense = case._replace(dout=case.dout.contiguous())
    want = run(dense, cu, n)
    whole = {"proj": dims.width, "dproj": dims.width, "out": dims.nq * dims.hd}
    wide = {name: torch.full((n, width + 7), NAN) for name, width in whole.items()}
    inner = {name: x[:, 3:-4] for name, x in wide.items()}
    inner["proj"].copy_(case.proj)
    into = {**outputs(case), "out": inner["out"], "dproj": inner["dproj"]}
    assert bits(*run(case._replace(proj=inner["proj"]), cu, n, into=into).values()) == bits(*want.values())
    for x in wide.values():
        assert x[:, :3].isnan().all() and x[:, -4:].isnan().all()
    turned = {name: torch.full(x.shape[::-1], NAN).t() for name, x in inner.items()}
    turned["proj"].copy_(case.proj)
    into = {**outputs(case), "out": turned["out"], "dproj": turned["dproj"]}
    assert bits(*run(dense._replace(proj=turned["proj"]), cu, n, into=into).values()) == bits(*want.values())


@pytest.mark.parametrize("name", ["packed", "heads of 160", "norm and bias"])
def test_reads_and_writes_only_its_tensors(name, rng):
    dims, starts, window, kind = CASES[name]
    case = make(rng, dims, starts[-1], window, **kind)
    with addresses_checked() as seen:
        run(case, cuts(*starts), window)
    kernels = {"attn_prep_kernel", "attn_fwd_kernel", "attn_gate_bwd_kernel", "attn_bwd_kernel", "attn_prep_bwd_kernel"}
    kernels.add("parts_kernel")
    assert set(seen) == kernels


def plain_attention(q, k, v, window):
    """[N, heads, hd] to (o [N, nq*hd], lse), by windows, in PyTorch."""
    n, nq, hd = q.shape
    q, k, v = (x.unflatten(0, (-1, window)).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(nq // x.shape[1], 1) for x in (k, v))
    s = (q @ k.transpose(2, 3) * hd**-0.5).masked_fill(torch.ones(window, window).triu(1).bool(), float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2).reshape(n, nq * hd), s.logsumexp(-1)


@pytest.mark.parametrize(
    "name,dims,kind", [("gate", SMALL, {}), ("bias", PLAIN, {"bias": True}), ("neither", PLAIN, {"norm": False})]
)
def test_around_another_softmax(name, dims, kind, rng, monkeypatch):
    """With SDPA's kernels, here PyTorch in their place, the gate and dv come by other ways."""
    cu, n, window = cuts(0, 10, 20), 20, 10
    case = make(rng, dims, n, window, **kind)

    def forward(q, k, v, window):
        return *plain_attention(q, k, v, window), ()

    def backward(saved, do, q, k, v, window):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            o, _ = plain_attention(*leaves, window)
        return tuple(x.flatten(1) for x in torch.autograd.grad(o, leaves, do))

    monkeypatch.setattr(mixer, "use_triton", lambda *_: True)
    monkeypatch.setattr(sdpa, "choose", lambda *_: "cudnn")
    monkeypatch.setattr(sdpa, "attend", forward)
    monkeypatch.setattr(sdpa, "attend_bwd", backward)
    close(case, run(case, cu, window, backend="auto"), truth(case, cu), TIGHT)
