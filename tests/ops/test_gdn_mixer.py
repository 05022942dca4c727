from __future__ import annotations

import pytest
import torch
from ops_close import bits, nan, same
from torch.utils._python_dispatch import TorchDispatchMode

from cortiq_kernels.ops.checks import acc_dtype
from cortiq_kernels.ops.gated_delta import GdnDims, gdn_mixer_bwd, gdn_mixer_fwd, gdn_mixer_ref
from cortiq_kernels.ops.sequences import sequence_index

EPS = 1e-6
NAMES = ("out", "dproj", "dconv", "dA_log", "ddt_bias", "dnorm")
BOUND = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DIMS = GdnDims(nk=2, nv=4, dk=6, dv=10, conv=4)


def make(dims, n, rng, dtype=torch.float64, rates=None):
    """proj, dout and the four small weights; `rates` is exp(A_log)."""

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    rates = torch.linspace(0.01, 16, dims.nv, dtype=torch.float64) if rates is None else rates
    weights = (0.5 * normal(dims.conv_width, dims.conv), rates.log(), normal(dims.nv), normal(dims.dv))
    proj, dout = normal(n, dims.width).to(dtype), normal(n, dims.out_width).to(dtype)
    return proj, dout, tuple(w.to(acc_dtype(dtype)) for w in weights)


def cuts(*starts):
    return torch.tensor(starts, dtype=torch.int32)


def ours(proj, dout, weights, dims, cu, window, **kwargs):
    """out and all gradients, written into NaN."""
    kwargs = dict(dims=dims, cu_seqlens=cu, max_seqlen=window, eps=EPS, **kwargs)
    n, dtype = proj.shape[0], proj.dtype
    out, saved = gdn_mixer_fwd(proj, *weights, out=nan(n, dims.out_width, dtype=dtype), **kwargs)
    grads = [nan(*w.shape, dtype=w.dtype) for w in weights]
    named = dict(zip(("dconv", "dA_log", "ddt_bias", "dnorm"), grads, strict=True))
    dproj = gdn_mixer_bwd(dout, saved, *weights, dproj=nan(n, dims.width, dtype=dtype), **named, **kwargs)
    return (out, dproj, *grads)


def oracle(proj, dout, weights, dims, cu):
    leaves = [x.detach().double().requires_grad_() for x in (proj, *weights)]
    out = gdn_mixer_ref(*leaves, dims, cu, EPS)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout.double()))


def close(got, want, bound):
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert a.shape == b.shape, name
        assert torch.isfinite(a).all(), name
        error, size = (a.double() - b).norm().item(), b.norm().item()
        assert error <= bound * max(size, 1e-3), (name, error, size)


@pytest.mark.parametrize("dims", [DIMS, GdnDims(1, 1, 4, 4, 4), GdnDims(1, 3, 8, 4, 2), GdnDims(2, 2, 4, 8, 1)])
@pytest.mark.parametrize(
    "window,cu",
    [
        (1, [0, 1, 2, 3]),
        (2, [0, 1, 2, 4]),
        (33, [0, 33, 66]),
        (70, [0, 3, 4, 5, 31, 32, 33, 65, 70, 100, 140, 140, 140]),
        (64, [0, 0, 64]),
    ],
    ids=["one-token rows", "tiny", "whole rows", "packed", "empty first"],
)
def test_float64(dims, window, cu, rng):
    proj, dout, weights = make(dims, cu[-1], rng)
    got = ours(proj, dout, weights, dims, cuts(*cu), window)
    close(got, oracle(proj, dout, weights, dims, cuts(*cu)), BOUND[torch.float64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype, rng):
    dims, cu = GdnDims(2, 4, 16, 16, 4), cuts(0, 3, 50, 90, 91, 180)
    proj, dout, weights = make(dims, 180, rng, dtype)
    got = ours(proj, dout, weights, dims, cu, 90)
    assert [x.dtype for x in got] == [dtype, dtype, *[torch.float32] * 4]
    close(got, oracle(proj, dout, weights, dims, cu), BOUND[dtype])


def test_packed_is_one_by_one(rng):
    cu = cuts(0, 1, 40, 43, 43, 80, 80)
    proj, dout, weights = make(DIMS, 80, rng)
    got = ours(proj, dout, weights, DIMS, cu, 80)
    parts = [(0, 1), (1, 40), (40, 43), (43, 80)]
    alone = [ours(proj[a:b], dout[a:b], weights, DIMS, cuts(0, b - a), b - a) for a, b in parts]
    for i, name in enumerate(NAMES):
        rows = [part[i] for part in alone]
        same(got[i], torch.cat(rows) if name in ("out", "dproj") else sum(rows), 1e-12)


def test_nothing_leaks_between_sequences(rng):
    """Slow decay, so that a leak would show; what one sequence holds does not change a bit of another."""
    cu, rates = cuts(0, 37, 88, 128), torch.full((4,), 1e-4, dtype=torch.float64)
    proj, dout, weights = make(DIMS, 128, rng, torch.float32, rates)
    first = ours(proj, dout, weights, DIMS, cu, 128)
    proj[37:88] += 3 * torch.randn(51, DIMS.width, generator=rng)
    dout[37:88] -= 1
    second = ours(proj, dout, weights, DIMS, cu, 128)
    for rows in (slice(0, 37), slice(88, 128)):
        assert bits(first[0][rows], first[1][rows]) == bits(second[0][rows], second[1][rows])
    assert not torch.equal(first[1][37:88], second[1][37:88])


@pytest.mark.parametrize("strong", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("window", [40, 128])
def test_decay_of_one_sequence_rounds_nothing_in_another(window, strong, rng):
    """In float64, where it would show: a decay summed across sequences and subtracted again leaves its rounding."""
    cu = cuts(0, 7, window // 2, window - 5, window)
    proj, dout, weights = make(DIMS, window, rng)
    first = ours(proj, dout, weights, DIMS, cu, window)
    proj[7 : window // 2] = strong * torch.randn(window // 2 - 7, DIMS.width, generator=rng, dtype=torch.float64)
    second = ours(proj, dout, weights, DIMS, cu, window)
    for rows in (slice(0, 7), slice(window // 2, window)):
        assert bits(first[0][rows], first[1][rows]) == bits(second[0][rows], second[1][rows])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_strided_and_expanded(dtype, rng):
    """proj and dproj as columns of wider matrices, dout expanded; nothing beside them is touched."""
    cu = cuts(0, 20, 50)
    proj, dout, weights = make(DIMS, 50, rng, dtype)
    dout = dout[:1].expand(50, -1)
    wide, dwide, out_wide = (nan(50, w + 7, dtype=dtype) for w in (DIMS.width, DIMS.width, DIMS.out_width))
    wide[:, 3:-4] = proj
    kwargs = dict(dims=DIMS, cu_seqlens=cu, max_seqlen=50, eps=EPS)
    out, saved = gdn_mixer_fwd(wide[:, 3:-4], *weights, out=out_wide[:, 3:-4], **kwargs)
    dproj = gdn_mixer_bwd(dout, saved, *weights, dproj=dwide[:, 3:-4], **kwargs)
    want = ours(proj, dout.contiguous(), weights, DIMS, cu, 50)
    assert bits(out, dproj) == bits(*want[:2])
    for x in (dwide, out_wide):
        assert x[:, :3].isnan().all() and x[:, -4:].isnan().all()


def test_accumulate_and_skip(rng):
    cu = cuts(0, 20, 50)
    proj, dout, weights = make(DIMS, 50, rng)
    want = ours(proj, dout, weights, DIMS, cu, 50)
    kwargs = dict(dims=DIMS, cu_seqlens=cu, max_seqlen=50, eps=EPS)
    _, saved = gdn_mixer_fwd(proj, *weights, **kwargs)
    names = ("dconv", "dA_log", "ddt_bias", "dnorm")
    grads = {name: torch.ones_like(w) for name, w in zip(names, weights, strict=True)}
    dproj = gdn_mixer_bwd(dout, saved, *weights, **grads, accumulate=True, **kwargs)
    same(dproj, want[1], 0)
    for grad, x in zip(grads.values(), want[2:], strict=True):
        same(grad, x + 1, 1e-14)
    for name in names:
        only = {name: grads[name]}
        assert bits(gdn_mixer_bwd(dout, saved, *weights, **only, **kwargs)) == bits(want[1])
        assert bits(grads[name]) == bits(want[NAMES.index(name)])


def test_repeats_bit_for_bit_and_leaves_its_inputs(rng):
    cu = cuts(0, 20, 70, 140)
    proj, dout, weights = make(DIMS, 140, rng, torch.float32)
    before = bits(proj, dout, *weights)
    first = ours(proj, dout, weights, DIMS, cu, 70)
    again = ours(proj, dout, weights, DIMS, cu, 70, index=sequence_index(cu, 140))
    assert bits(*first) == bits(*again)
    assert bits(proj, dout, *weights) == before
    kwargs = dict(dims=DIMS, cu_seqlens=cu, max_seqlen=70, eps=EPS)
    out, nothing = gdn_mixer_fwd(proj, *weights, save=False, **kwargs)
    assert nothing is None
    assert bits(out) == bits(first[0])
    _, saved = gdn_mixer_fwd(proj, *weights, **kwargs)
    once = gdn_mixer_bwd(dout, saved, *weights, **kwargs)
    assert bits(once) == bits(gdn_mixer_bwd(dout, saved, *weights, **kwargs)) == bits(first[1])


def test_no_tokens(rng):
    proj, dout, weights = make(DIMS, 0, rng)
    got = ours(proj, dout, weights, DIMS, cuts(0, 0, 0), 16)
    assert got[0].shape == (0, 40) and got[1].shape == (0, DIMS.width)
    assert all((g == 0).all() for g in got[2:])


class NoHostReads(TorchDispatchMode):
    """Fails where an operation would wait for the device, or give a shape that depends on data."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        assert name not in self.FORBIDDEN, f"{name} reads device values on the host"
        return func(*args, **(kwargs or {}))


def test_host_never_reads_the_device(rng):
    cu = cuts(0, 20, 70, 140, 140)
    proj, dout, weights = make(DIMS, 140, rng, torch.float32)
    with NoHostReads():
        got = ours(proj, dout, weights, DIMS, cu, 70)
    assert len(got) == 6


@pytest.mark.parametrize("a", [-200.0, 80.0])
@pytest.mark.parametrize("b", [-200.0, 200.0])
def test_saturated_gates(a, b, rng):
    """beta 0 or 1, decay none or complete."""
    proj, dout, weights = make(DIMS, 40, rng, torch.float32)
    proj[:, DIMS.ab][:, :4] = a
    proj[:, DIMS.ab][:, 4:] = b
    cu = cuts(0, 40)
    close(ours(proj, dout, weights, DIMS, cu, 40), oracle(proj, dout, weights, DIMS, cu), 2e-5)


def test_zero_projection(rng):
    """All-zero keys, queries and outputs: the eps of each norm carries."""
    proj, dout, weights = make(DIMS, 20, rng)
    proj.zero_()
    cu = cuts(0, 20)
    close(ours(proj, dout, weights, DIMS, cu, 20), oracle(proj, dout, weights, DIMS, cu), 1e-11)


def test_matches_transformers(rng):
    """The layer of transformers between its projections, forward and all gradients, float32."""
    hf = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    config = hf.Qwen3_5TextConfig(
        hidden_size=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    layer = hf.Qwen3_5GatedDeltaNet(config, 0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator))
        layer.A_log.copy_(torch.linspace(0.01, 16, 4).log())
    x = torch.randn(2, 75, 24, generator=generator)
    dy = torch.randn(2, 75, 24, generator=generator)
    y = layer(x)
    y.backward(dy)

    dims, cu = GdnDims(2, 4, 8, 8, 4), cuts(0, 75, 150)
    w_in = torch.cat([getattr(layer, f"in_proj_{n}").weight for n in ("qkv", "z", "a", "b")]).detach()
    weights = tuple(w.detach() for w in (layer.conv1d.weight[:, 0], layer.A_log, layer.dt_bias, layer.norm.weight))
    x, dy = x.view(150, 24), dy.view(150, 24)
    dout = dy @ layer.out_proj.weight.detach()
    out, dproj, *grads = ours(x @ w_in.T, dout, weights, dims, cu, 75)
    dw_in = torch.cat([getattr(layer, f"in_proj_{n}").weight.grad for n in ("qkv", "z", "a", "b")])
    for name, got, want in (
        ("y", out @ layer.out_proj.weight.T, y.view(150, 24)),
        ("out_proj", dy.T @ out, layer.out_proj.weight.grad),
        ("in_proj", dproj.T @ x, dw_in),
        ("conv", grads[0], layer.conv1d.weight.grad[:, 0]),
        ("A_log", grads[1], layer.A_log.grad),
        ("dt_bias", grads[2], layer.dt_bias.grad),
        ("norm", grads[3], layer.norm.weight.grad),
    ):
        # theirs sums the decay in float32, which alone costs up to 8e-5 in the gradients of A_log and dt_bias
        assert (got - want).norm() <= 2e-4 * want.norm(), (name, (got - want).norm() / want.norm())


def test_errors(rng):
    proj, dout, weights = make(DIMS, 20, rng, torch.float32)
    conv, a_log, dt, norm = weights
    kwargs = dict(dims=DIMS, cu_seqlens=cuts(0, 20), max_seqlen=20, eps=EPS)
    _, saved = gdn_mixer_fwd(proj, *weights, **kwargs)

    def fwd(*args, **changed):
        return lambda: gdn_mixer_fwd(*args, **{**kwargs, **changed})

    def bwd(dout, **changed):
        return lambda: gdn_mixer_bwd(dout, saved, *weights, **{**kwargs, **changed})

    for call, match in (
        (fwd(proj[:, 1:], *weights), r"proj must be \[N, 112\]; got \(20, 111\)"),
        (fwd(proj.long(), *weights), "proj must be"),
        (fwd(proj, conv[:, None], a_log, dt, norm), "conv_weight must be"),
        (fwd(proj, conv.bfloat16(), a_log, dt, norm), "conv_weight must be float32"),
        (fwd(proj, conv, a_log[:2], dt, norm), "A_log must be"),
        (fwd(proj, conv, a_log, dt.double(), norm), "dt_bias must be"),
        (fwd(proj, conv, a_log, dt, norm[:3]), "norm_weight must be"),
        (fwd(proj, *weights, dims=GdnDims(3, 4, 4, 4, 4)), "nv a multiple of nk"),
        (fwd(proj, *weights, max_seqlen=8), "max_seqlen must be a divisor of the 20 tokens; got 8"),
        (fwd(proj, *weights, cu_seqlens=cuts(0, 20).float()), "cu_seqlens must be int32"),
        (fwd(proj, *weights, out=proj), "out must be"),
        (fwd(proj, *weights, index=sequence_index(cuts(0, 10), 10)), r"index.positions must be \[20\]; got \(10,\)"),
        (bwd(dout[:3]), "dout must be"),
        (bwd(dout.double()), "dout must be"),
        (bwd(dout, dproj=dout), "dproj must be"),
        (bwd(dout, dconv=conv[1:]), "dconv must be"),
        (bwd(dout, dnorm=norm.double()), "dnorm must be"),
        (bwd(dout, dA_log=a_log[:1].expand(4)), "dA_log must be a tensor whose elements do not share memory"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
