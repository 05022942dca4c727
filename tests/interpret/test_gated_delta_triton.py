"""The gated delta rule's kernels under Triton's interpreter, held against float64 autograd through the token
recurrence, head by head.

A chunk of a value head costs 0.1 s here, so that shapes, lengths, groups and head sizes share their cases. bfloat16 is
for the GPU: the interpreter computes it wrong.
"""

from __future__ import annotations

import random

import pytest
import torch
from gated_delta_cases import Scan, close, head_errors, scan_case, scan_run, scan_truth
from interpreter import addresses_checked, unfit
from ops_close import bits, same

from cortiq_kernels.ops.gated_delta import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from cortiq_kernels.ops.gated_delta.chunks import ChunkIndex, chunk_index
from cortiq_kernels.ops.gated_delta.layout import CHUNK, unfit_for_kernels

F16, F32, NAN = torch.float16, torch.float32, float("nan")

pytestmark = [pytest.mark.interpret, pytest.mark.skipif(bool(unfit()), reason=unfit())]

# In float32 dg and dh0 may lose digits where decay is strong: they are sums, over a chunk, of what has decayed less.
TIGHT = {n: 4e-6 for n in ("o", "final", "dq", "dk", "dv", "dbeta", "dh0")} | {"dg": 1e-4}
HALF = {n: 2e-3 for n in ("o", "final", "dq", "dk", "dv", "dbeta", "dg")} | {"dh0": 4e-3}
SHAPES = [  # batch, T, HK, HV, DK, DV
    (1, 1, 1, 1, 16, 16),
    (2, 2, 1, 2, 24, 40),
    (1, 3, 1, 3, 16, 32),
    (1, 63, 2, 2, 40, 24),
    (1, 64, 1, 2, 32, 16),
    (1, 65, 1, 2, 64, 64),
    (1, 127, 1, 1, 24, 24),
    (1, 130, 1, 2, 16, 17),
    (1, 5, 2, 6, 7, 3),
]


def cuts(*lengths: int, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def part(x: dict[str, torch.Tensor], s: int, lo: int, hi: int) -> list[torch.Tensor]:
    """What belongs to sequence s of packed results, tokens lo .. hi-1."""
    return [t[s : s + 1] if name in ("final", "dh0") else t[:, lo:hi] for name, t in x.items()]


def alone(case: Scan, s: int, lo: int, hi: int) -> Scan:
    states = [None if x is None else x[s : s + 1] for x in (case.h0, case.dht)]
    return Scan(*(x[:, lo:hi] for x in case[:5]), states[0], case.do[:, lo:hi], states[1])


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(shape, dtype, rng):
    case = scan_case(rng, *shape, dtype=dtype, rates=(0.02, 16.0 if dtype == F32 else 1.5))
    got = scan_run(case)
    close(got, scan_truth(case), TIGHT if dtype == F32 else HALF)
    assert {got[n].dtype for n in ("o", "dq", "dk", "dv")} == {dtype}
    assert {got[n].dtype for n in ("final", "dg", "dbeta", "dh0")} == {F32}


def test_weak_decay_is_tight_throughout(rng):
    case = scan_case(rng, 1, 100, 1, 2, 16, 16, rates=(0.001, 0.1))
    close(scan_run(case, scale=0.7), scan_truth(case, scale=0.7), 2e-6)


def test_without_states(rng):
    """Nothing decays through a first token: its dg is 0 up to a rounding of the rest."""
    case = scan_case(rng, 2, 66, 1, 1, 16, 16, state=False, rates=(2.0, 2.0))
    got = scan_run(case)
    assert "final" not in got and "dh0" not in got
    close(got, scan_truth(case), TIGHT)
    assert (got["dg"][:, 0].abs() <= 1e-6 * got["dg"].abs().amax(1)).all()
    assert chunk_gated_delta_rule_fwd(*case[:5], save=False, backend="triton")[2] is None


@pytest.mark.parametrize("lengths", [(0, 3, 0, 64, 1, 65, 0), (1, 0, 70, 1)], ids=str)
def test_packed_is_one_by_one_bit_for_bit(lengths, rng):
    """Empty sequences first, in the middle and last hand their state through."""
    cu = cuts(*lengths)
    case = scan_case(rng, 1, sum(lengths), 1, 1, 16, 24, states=len(lengths), rates=(0.3, 0.3))
    got, starts = scan_run(case, cu), cu.tolist()
    close(got, scan_truth(case, cu), TIGHT)
    for s, (lo, hi) in enumerate(zip(starts, starts[1:], strict=False)):
        if hi == lo:
            assert bits(got["final"][s], got["dh0"][s]) == bits(case.h0[s], case.dht[s])
        else:
            assert bits(*part(got, s, lo, hi)) == bits(*scan_run(alone(case, s, lo, hi)).values())


def test_a_nan_stays_in_its_sequence(rng):
    cu = cuts(5, 64, 0, 3)
    case = scan_case(rng, 1, 72, 1, 1, 16, 16, states=4, rates=(0.01, 0.01))
    want = scan_run(case, cu)
    for x in case[:5]:
        x[:, 5:69] = NAN
    case.do[:, 5:69], case.h0[1], case.dht[1] = NAN, NAN, NAN
    got = scan_run(case, cu)
    for s, lo, hi in ((0, 0, 5), (2, 69, 69), (3, 69, 72)):
        assert bits(*part(got, s, lo, hi)) == bits(*part(want, s, lo, hi))
    assert all(x.isnan().all() for x in part(got, 1, 5, 69) if x.shape[1] == 64)


def test_many_short_sequences_and_padded_cu_seqlens(rng):
    """One token, two, none; the list of starts padded by repeating N, in both integer types."""
    lengths = [1, 0, 2, 1, 0, 0, 1, 1, 0]
    cu = cuts(*lengths)
    case = scan_case(rng, 1, sum(lengths), 1, 1, 16, 16, states=len(lengths))
    got = scan_run(case, cu)
    close(got, scan_truth(case, cu), TIGHT)
    stateless = case._replace(h0=None, dht=None)
    want = scan_run(stateless, cu)
    padded = torch.cat((cu, cu[-1:].expand(6))).long()
    assert bits(*scan_run(stateless, padded).values()) == bits(*want.values())


EMPTY = [((2, 0, 1, 2, 16, 16), None), ((1, 0, 1, 1, 16, 16), (0, 0)), ((1, 0, 1, 1, 5, 6), ())]


@pytest.mark.parametrize("shape,cu", EMPTY)
def test_no_tokens(shape, cu, rng):
    case = scan_case(rng, *shape, states=shape[0] if cu is None else len(cu))
    got = scan_run(case, None if cu is None else cuts(*cu))
    assert bits(got["final"], got["dh0"]) == bits(case.h0, case.dht)
    assert all(x.numel() == 0 for name, x in got.items() if name not in ("final", "dh0"))


def test_no_decay_is_the_plain_delta_rule(rng):
    case = scan_case(rng, 1, 70, 1, 1, 16, 16, g=0.0)
    got = scan_run(case)
    q, k, v, _, beta, h0 = (x[0].double() for x in case[:6])
    state, rows = h0[0], []
    for t in range(70):
        state = state + beta[t] * torch.outer(k[t, 0], v[t, 0] - k[t, 0] @ state)
        rows.append(q[t, 0] @ state / 4)
    same(got["o"][0, :, 0], torch.stack(rows), 2e-6)
    close(got, scan_truth(case), 4e-6)


@pytest.mark.parametrize("g", [-20.0, -80.0, -1e4])
def test_strong_decay(g, rng):
    """dg is right relative to itself, token by token, however small it is."""
    case = scan_case(rng, 1, 70, 1, 2, 16, 16, g=g)
    got, want = scan_run(case), scan_truth(case)
    dg, true = got.pop("dg"), want.pop("dg")
    close(got, want, 4e-6, floor=1e-30 if g == -20 else 1e-7)  # exp(-80) is past what float32 products keep
    assert torch.isfinite(dg).all()
    if g == -20:
        typical = true.abs().median()
        assert typical < 1e-7
        # decay sums reach 1800 in units of log 2, where a float32 is good to 6e-5, and so is its power of 2
        assert ((dg - true).abs() <= 2e-4 * (true.abs() + typical)).all()
    else:
        assert dg.abs().max() <= 1e-20


def test_decay_rates_from_0_to_16(rng):
    """A head a rate; the slowest does not decay at all."""
    case = scan_case(rng, 1, 40, 1, 7, 16, 16, rates=(0.0, 16.0))
    close(scan_run(case), scan_truth(case), TIGHT | {"dg": 4e-4}, floor=1e-7)


def test_weak_decay_after_strong(rng):
    """The sum over the chunk is large, the differences that matter are small."""
    case = scan_case(rng, 1, 64, 1, 1, 16, 16, g=-0.01)
    case.g[:, ::7] = -50
    close(scan_run(case), scan_truth(case), 3e-5)


@pytest.mark.parametrize("t", [64, 70])
def test_identical_keys(t, rng):
    """Nothing but the latest value is kept: the chunk's system is as far from the identity as it gets."""
    case = scan_case(rng, 1, t, 1, 1, 16, 16, g=0.0)
    case.k[:] = case.k[:, :1].clone()
    case.beta[:] = 1
    close(scan_run(case), scan_truth(case), 2e-5)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_beta_of_zero_and_tiny(dtype, rng):
    """dbeta is right where beta is 0, all of it or some of it; what beta scales is then as good as 0."""
    case = scan_case(rng, 1, 20, 1, 2, 16, 16, dtype=dtype, rates=(0.02, 0.2))
    case.beta[..., 0] = 0
    case.beta[:, ::3, 1] = 0
    case.beta[:, 1::3, 1] = 1e-20 if dtype == F32 else 1e-7
    got, want = scan_run(case), scan_truth(case)
    for rows in (slice(0, None, 3), slice(1, None, 3), slice(2, None, 3)):
        worst = head_errors("dbeta", got["dbeta"][:, rows], want["dbeta"][:, rows])
        assert (worst <= (4e-6 if dtype == F32 else 3e-3)).all(), worst
    dv = got["dv"][:, :, 0].abs().max()
    assert dv <= (1e-25 if dtype == F32 else 3e-4) and (want["dv"][:, :, 0] == 0).all()
    del got["dv"], want["dv"]
    close(got, want, 4e-6 if dtype == F32 else 3e-3)


def test_strided_expanded_and_column_slices(rng):
    """q, k and v as columns of one matrix with NaN beside them; every layout gives the bits of the contiguous one."""
    case = scan_case(rng, 2, 9, 1, 2, 16, 24)
    wide = torch.full((2, 9, 3 + 16 + 16 + 48 + 2), NAN)
    spread = torch.full((2, 18, 5), NAN)
    q, k, v = wide[..., 3:19], wide[..., 19:35], wide[..., 35:83]
    heads = (q.unflatten(-1, (1, 16)), k.unflatten(-1, (1, 16)), v.unflatten(-1, (2, 24)))
    views = (*heads, spread[:, ::2, :2], spread[:, ::2, 2:4])
    for view, x in zip(views, case[:5], strict=True):
        view.copy_(x)
    do = case.do[:1, :1].expand(2, 9, 2, 24)
    sliced = Scan(*views, case.h0.mT.contiguous().mT, do, case.dht[:1].expand(2, 2, 16, 24))
    plain = Scan(*(x.contiguous() for x in sliced))
    want = bits(*scan_run(plain).values())
    assert bits(*scan_run(sliced).values()) == want
    turned = [torch.stack((x, torch.full_like(x, NAN)), -1)[..., 0] for x in plain[:5]]  # no unit stride anywhere
    assert bits(*scan_run(Scan(*turned, *plain[5:])).values()) == want
    assert wide[..., :3].isnan().all() and wide[..., -2:].isnan().all()


def test_each_gradient_has_the_dtype_of_its_input(rng):
    case = scan_case(rng, 1, 2, 1, 1, 16, 16)
    dtypes = {"q": F16, "k": torch.float64, "g": F16, "beta": torch.float64, "h0": F16}
    mixed = case._replace(**{name: getattr(case, name).to(dtype) for name, dtype in dtypes.items()})
    got = scan_run(mixed)
    assert {n: got[f"d{n}"].dtype for n in ("v", *dtypes)} == {**dtypes, "v": F32, "h0": F32}
    close(got, scan_truth(mixed), 1e-3)


def test_repeats_bit_for_bit_and_leaves_its_inputs(rng):
    case, cu = scan_case(rng, 1, 24, 1, 1, 16, 16, states=2), cuts(20, 4)
    before = bits(*case, cu)
    o, ht, saved = chunk_gated_delta_rule_fwd(*case[:5], None, case.h0, True, cu, backend="triton")
    first = chunk_gated_delta_rule_bwd(case.do, saved, case.dht)
    assert bits(*chunk_gated_delta_rule_bwd(case.do, saved, case.dht)) == bits(*first)
    assert bits(*scan_run(case, cu).values()) == bits(o, ht, *first)
    assert bits(*case, cu) == before
    _, _, saved = chunk_gated_delta_rule_fwd(*case[:5], None, case.h0, False, cu, backend="triton")
    same(chunk_gated_delta_rule_bwd(case.do, saved)[5], chunk_gated_delta_rule_bwd(case.do, saved, 0 * case.dht)[5], 0)


def test_heads_that_do_not_fit_are_refused(rng):
    case = scan_case(rng, 1, 2, 1, 1, 129, 16)
    with pytest.raises(ValueError, match="the kernels take up to 128"):
        scan_run(case)
    assert "matrix units" in unfit_for_kernels(torch.float32, 64, 64)  # a GPU's; the interpreter takes it
    assert "5 taps" in unfit_for_kernels(torch.bfloat16, 64, 64, 5) and not unfit_for_kernels(torch.bfloat16, 128, 100)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("seed", range(20))
def test_chunk_index_against_a_list(seed, backend):
    """Random lengths around multiples of a chunk, the starts padded or not."""
    draw = random.Random(seed)
    around = [0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, draw.randrange(5 * CHUNK)]
    lengths = [draw.choice(around) for _ in range(draw.randrange(12))]
    n = sum(lengths)
    cu = cuts(*lengths, *[0] * draw.choice([0, 0, 7]), dtype=draw.choice([torch.int32, torch.int64]))
    table, offsets, starts = chunk_index(cu, n, backend=backend)
    want, before = [], [0]
    for lo, hi in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        want += [[a, min(CHUNK, hi - a)] for a in range(lo, hi, CHUNK)]
        before.append(len(want))
    assert table[: len(want), :2].tolist() == want and (table[len(want) :, 1] == 0).all()
    assert offsets.tolist() == before and starts.tolist() == cu.tolist()
    assert table.shape == (n // CHUNK + cu.numel() - 1, 3)
    places = table[: len(want), 2].tolist()
    half = ChunkIndex(table, offsets, starts).half
    assert len(set(places)) == len(want) and all(0 <= p < 2 * half for p in places)
    assert [p % 2 for p in places] == [(i - max(b for b in before if b <= i)) % 2 for i in range(len(want))]
    assert {x.dtype for x in (table, offsets, starts)} == {torch.int32}


def test_chunk_index_of_more_sequences_than_a_block():
    lengths = [(0, 1, 65, 2, 130)[i % 5] for i in range(1200)]
    one, other = (chunk_index(cuts(*lengths), sum(lengths), backend=b) for b in ("torch", "triton"))
    used = int(one.offsets[-1])
    assert torch.equal(one.offsets, other.offsets) and torch.equal(one.table[:used], other.table[:used])
    assert one.table.shape == other.table.shape and (other.table[used:, 1] == 0).all()


ODD = [((0, 3, 65, 1), (1, 2, 24, 17)), ((64,), (1, 1, 40, 64)), ((1,), (2, 2, 3, 5))]  # lengths; HK, HV, DK, DV


@pytest.mark.parametrize("lengths,sizes", ODD)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_every_address_is_inside_its_tensor(lengths, sizes, dtype, rng):
    state = dtype == F32  # states or none
    case = scan_case(rng, 1, sum(lengths), *sizes, dtype=dtype, states=len(lengths), state=state)
    wide = torch.full((1, sum(lengths), sizes[0] * sizes[2] + 5), NAN, dtype=dtype)
    k = wide[..., 2:-3].unflatten(-1, (sizes[0], sizes[2]))
    k.copy_(case.k)
    with addresses_checked() as seen:
        got = scan_run(case._replace(k=k), cuts(*lengths))
    names = {"wy", "state", "output", "dstate", "input", "gates_bwd"}
    assert set(seen) == {f"{name}_kernel" for name in names}
    assert all(torch.isfinite(x).all() for x in got.values())


def test_the_check_of_addresses_fails_where_it_should():
    import triton
    import triton.language as tl

    @triton.jit
    def copy_kernel(x_ptr, y_ptr, first, n):
        i = first + tl.arange(0, 16)
        tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n, other=0), mask=i < n)

    wide, out = torch.zeros(4, 40), torch.zeros(16)
    with addresses_checked() as seen:
        copy_kernel[(1,)](wide[1, 3:19], out, 0, 16)
    assert seen == {"copy_kernel": 2}
    for first, n in ((1, 17), (-1, 12), (0, 16)):
        x = wide[1, 3:19] if first else wide[1, 3:18]
        with addresses_checked(), pytest.raises(Exception, match="copy_kernel: load of 1 addresses outside"):
            copy_kernel[(1,)](x, out, first, n)
