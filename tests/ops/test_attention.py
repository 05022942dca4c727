from __future__ import annotations

import pytest
import torch
from ops_close import GPU_TOL, bits, nan, no_sync, not_worse, same

from cortiq_kernels import backend
from cortiq_kernels.ops.attention import (
    AttnDims,
    attention_mixer_bwd,
    attention_mixer_fwd,
    attention_mixer_ref,
    kernel_blocks,
    rope_table,
    sdpa,
    torch_path,
)
from cortiq_kernels.ops.attention import dims as dims_of
from cortiq_kernels.ops.checks import acc_dtype
from cortiq_kernels.ops.sequences import sequence_index

EPS = 1e-6
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DIMS = AttnDims(4, 2, 8, 4)
# (dims, starts, window): one token; odd lengths with empty sequences; two windows, the second packed; no rotary; no GQA
CASES = {
    "one token": (DIMS, [0, 1], 1),
    "empty": (DIMS, [0, 0], 5),
    "packed": (AttnDims(3, 1, 6, 2), [0, 0, 1, 4, 4, 13, 13], 13),
    "windows": (DIMS, [0, 9, 18, 19, 27, 27, 27], 9),
    "no rotary": (AttnDims(2, 1, 4, 0), [0, 7, 11], 11),
    "full rotary": (AttnDims(2, 2, 4, 4), [0, 6, 11, 12], 12),
    "no gate": (AttnDims(4, 2, 8, 8, False), [0, 9, 18, 19, 27, 27, 27], 9),
}
#: what Qwen3, Qwen2 and Llama compute: (q/k norm, bias); none has the gate or the zero-centred norm
PLAIN = {"norm": (True, False), "bias": (False, True), "neither": (False, False), "norm and bias": (True, True)}


def make(dims, starts, window, dtype, rng):
    acc, n = acc_dtype(dtype), starts[-1]
    proj = torch.randn(n, dims.width, generator=rng, dtype=torch.float64).to(dtype)
    dout = torch.randn(n, dims.nq * dims.hd, generator=rng, dtype=torch.float64).to(dtype)
    q_norm, k_norm = ((0.3 * torch.randn(dims.hd, generator=rng, dtype=torch.float64)).to(acc) for _ in range(2))
    cos, sin = rope_table(window, dims.rot, 1e4, dtype, "cpu")
    return proj, dout, (q_norm, k_norm, cos, sin), torch.tensor(starts, dtype=torch.int32)


def oracle(proj, dout, vectors, dims, cu, dtype=torch.float64):
    proj, dout, q_norm, k_norm, cos, sin = (t.to(dtype, copy=True) for t in (proj, dout, *vectors))
    leaves = (proj, q_norm, k_norm)
    for t in leaves:
        t.requires_grad_()
    out = attention_mixer_ref(proj, q_norm, k_norm, cos, sin, dims, cu, EPS)
    grads = torch.autograd.grad(out, leaves, dout, allow_unused=True, materialize_grads=True)
    return (out.detach(), *grads)


def run(proj, dout, vectors, dims, cu, window, **grads):
    keys = {"dims": dims, "cu_seqlens": cu, "max_seqlen": window, "eps": EPS}
    out, saved = attention_mixer_fwd(proj, *vectors, **keys)
    dq = nan(dims.hd, dtype=vectors[0].dtype)
    dk = nan(dims.hd, dtype=vectors[0].dtype)
    dproj = attention_mixer_bwd(dout, saved, *vectors, **keys, dq_norm=dq, dk_norm=dk, **grads)
    return out, dproj, dq, dk


@pytest.mark.parametrize("block", [256, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_matches_float64(case, dtype, block, rng, monkeypatch):
    monkeypatch.setattr(torch_path, "BLOCK_Q", {"cpu": block})
    dims, starts, window = CASES[case]
    proj, dout, vectors, cu = make(dims, starts, window, dtype, rng)
    got = run(proj, dout, vectors, dims, cu, window)
    exact = oracle(proj, dout, vectors, dims, cu)
    eager = oracle(proj, dout, vectors, dims, cu, dtype)
    for mine, want, base in zip(got, exact, eager, strict=True):
        if dtype == torch.float64:
            same(mine, want)
        else:
            # Sums of a few dozen f32 terms differ by some roundings either way; 16 bit hides that.
            not_worse(mine, want, base, ulps=4 if mine.dtype == torch.float32 else 1)


def test_packed_sequences_do_not_see_each_other(rng):
    """Each sequence equals itself alone, and a change in one leaves every other bit in place."""
    dims, starts, window = CASES["packed"]
    proj, dout, vectors, cu = make(dims, starts, window, torch.float64, rng)
    out, dproj, _, _ = run(proj, dout, vectors, dims, cu, window)
    for a, b in ((0, 1), (1, 4), (4, 13)):
        alone = torch.tensor([0, b - a], dtype=torch.int32)
        o, dp, _, _ = run(proj[a:b], dout[a:b], vectors, dims, alone, b - a)
        same(o, out[a:b])
        same(dp, dproj[a:b])
    changed = proj.clone()
    changed[1:4] += 1
    o, dp, _, _ = run(changed, dout, vectors, dims, cu, window)
    others = [0, *range(4, 13)]
    assert bits(o[others], dp[others]) == bits(out[others], dproj[others])


def test_no_token_sees_the_future(rng):
    proj, dout, vectors, cu = make(DIMS, [0, 9], 9, torch.float64, rng)
    out, *_ = run(proj, dout, vectors, DIMS, cu, 9)
    proj[6:] = 1e3
    again, *_ = run(proj, dout, vectors, DIMS, cu, 9)
    assert bits(out[:6]) == bits(again[:6])


def test_given_index_poisoned_outputs_strides_and_accumulation(rng):
    dims, starts, window = CASES["windows"]
    n = starts[-1]
    wide = torch.randn(n, dims.width + 6, generator=rng, dtype=torch.float64)
    proj, edges = wide[:, 3:-3], wide[:, :3].clone()
    _, _, vectors, cu = make(dims, starts, window, torch.float64, rng)
    dout = torch.ones((), dtype=torch.float64).expand(n, dims.nq * dims.hd)
    want = oracle(proj, dout, vectors, dims, cu)
    keys = {"dims": dims, "cu_seqlens": cu, "max_seqlen": window, "eps": EPS, "index": sequence_index(cu, n)}
    out = nan(n, dims.nq * dims.hd + 2, dtype=torch.float64)
    y, saved = attention_mixer_fwd(proj, *vectors, **keys, out=out[:, 1:-1])
    same(y, want[0])
    assert out[:, 0].isnan().all() and out[:, -1].isnan().all()
    nothing_kept, none = attention_mixer_fwd(proj, *vectors, **keys, save=False)
    assert none is None and bits(nothing_kept) == bits(y)
    dproj = nan(n, dims.width + 2, dtype=torch.float64)
    dq, dk = torch.ones(dims.hd).double(), torch.ones(dims.hd).double()
    grads = {"dproj": dproj[:, 1:-1], "dq_norm": dq, "dk_norm": dk}
    attention_mixer_bwd(dout, saved, *vectors, **keys, **grads, accumulate=True)
    same(dproj[:, 1:-1], want[1])
    same(dq - 1, want[2])
    same(dk - 1, want[3])
    assert torch.equal(wide[:, :3], edges)
    alone = attention_mixer_bwd(dout, saved, *vectors, **keys)
    assert bits(alone) == bits(dproj[:, 1:-1])


def test_second_run_is_bitwise_equal(rng):
    dims, starts, window = CASES["windows"]
    proj, dout, vectors, cu = make(dims, starts, window, torch.bfloat16, rng)
    assert bits(*run(proj, dout, vectors, dims, cu, window)) == bits(*run(proj, dout, vectors, dims, cu, window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_values_stay_finite(dtype, rng):
    """Large norm weights make scores of several thousand: a softmax without its maximum would overflow."""
    proj, dout, vectors, cu = make(DIMS, [0, 9], 9, dtype, rng)
    vectors[0].fill_(60.0)
    vectors[1].fill_(60.0)
    proj.mul_(100)
    proj[3] = 0
    for t in run(proj, dout, vectors, DIMS, cu, 9):
        assert torch.isfinite(t).all()


def test_agrees_with_transformers(rng):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    dims = AttnDims(4, 2, 16, 4)
    config = transformers.Qwen3_5TextConfig(
        hidden_size=24,
        num_attention_heads=dims.nq,
        num_key_value_heads=dims.nkv,
        head_dim=dims.hd,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.25},
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    layer = modeling.Qwen3_5Attention(config, layer_idx=0).eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=rng))
    t, batch = 40, 2
    x = torch.randn(batch, t, 24, generator=rng)
    cos, sin = modeling.Qwen3_5TextRotaryEmbedding(config)(x, torch.arange(t)[None].expand(batch, t))
    causal = torch.full((t, t), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        want = layer(x, (cos, sin), causal)[0].flatten(0, 1)
        weight = torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight])
    c, s = rope_table(t, dims.rot, 5e4, torch.float32, "cpu")
    assert torch.equal(torch.cat([c, c], 1), cos[0]) and torch.equal(torch.cat([s, s], 1), sin[0])
    cu = torch.tensor([0, t, 2 * t], dtype=torch.int32)
    proj = x.flatten(0, 1) @ weight.detach().t()
    norms = (layer.q_norm.weight.detach(), layer.k_norm.weight.detach())
    out, _ = attention_mixer_fwd(proj, *norms, c, s, dims=dims, cu_seqlens=cu, max_seqlen=t, eps=config.rms_norm_eps)
    same(out @ layer.o_proj.weight.detach().t(), want, 2e-6)


def test_rope_table_is_exact_in_float64():
    cos, sin = rope_table(3, 4, 100.0, torch.float64, "cpu")
    same(cos, torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]], dtype=torch.float64).cos(), 1e-15)
    assert sin.shape == (3, 2) and sin[0].tolist() == [0, 0]
    assert rope_table(3, 4, 100.0, torch.bfloat16, "cpu")[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PLAIN)
def test_without_a_gate(case, dtype, rng):
    """Norms that are not zero-centred, or none, and a bias, against float64 autograd."""
    has_norm, has_bias = PLAIN[case]
    dims, starts, window = CASES["no gate"]
    proj, dout, (q_norm, k_norm, cos, sin), cu = make(dims, starts, window, dtype, rng)
    acc = acc_dtype(dtype)
    bias = torch.randn(dims.width, generator=rng, dtype=torch.float64).to(acc) if has_bias else None
    norms = (1 + q_norm, 1 + k_norm) if has_norm else (None, None)
    keys = {"dims": dims, "cu_seqlens": cu, "max_seqlen": window, "eps": EPS, "bias": bias, "zero_centered": False}
    out, saved = attention_mixer_fwd(proj, *norms, cos, sin, **keys)
    assert saved.o is out
    sizes = {"dq_norm": dims.hd, "dk_norm": dims.hd} if has_norm else {}
    sizes |= {"dbias": dims.width} if has_bias else {}
    grads = {name: nan(size, dtype=acc) for name, size in sizes.items()}
    dproj = attention_mixer_bwd(dout, saved, *norms, cos, sin, **keys, **grads)
    got = (out, dproj, *grads.values())

    def truth(kind):
        leaves = [t.to(kind, copy=True).requires_grad_() for t in (proj, *norms, bias) if t is not None]
        rest = leaves[1:]
        q, k = rest[:2] if has_norm else (None, None)
        tables = (cos.to(kind), sin.to(kind))
        ref = attention_mixer_ref(
            leaves[0], q, k, *tables, dims, cu, EPS, bias=rest[-1] if has_bias else None, zero_centered=False
        )
        return ref.detach(), *torch.autograd.grad(ref, leaves, dout.to(kind))

    for mine, exact, plain in zip(got, truth(torch.float64), truth(dtype), strict=True):
        if dtype == torch.float64:
            same(mine, exact)
        else:
            # The backward reads o in the working dtype, so in 16 bit a bias's gradient is as good as a sum of that.
            not_worse(mine.to(dtype), exact, plain, ulps=4 if dtype == torch.float32 else 1)
    before = {name: g.clone() for name, g in grads.items()}
    attention_mixer_bwd(dout, saved, *norms, cos, sin, **keys, **grads, accumulate=True)
    for name, g in grads.items():
        assert torch.equal(g, 2 * before[name]), name


def test_errors():
    proj, norm = torch.zeros(6, DIMS.width), torch.zeros(8)
    cos, sin = rope_table(6, 4, 1e4, torch.float32, "cpu")
    cu = torch.tensor([0, 6], dtype=torch.int32)
    good = {"dims": DIMS, "cu_seqlens": cu, "max_seqlen": 6, "eps": EPS}

    def refused(match, *args, **changes):
        with pytest.raises(ValueError, match=match):
            attention_mixer_fwd(*(args or (proj, norm, norm, cos, sin)), **{**good, **changes})

    refused(r"attention_mixer_fwd: proj must be \[N, 96\]; got \(6, 95\)", proj[:, 1:], norm, norm, cos, sin)
    refused("q_norm must be float32", proj, norm.bfloat16(), norm, cos, sin)
    refused(r"k_norm must be \[8\]", proj, norm, norm[1:], cos, sin)
    refused(r"max_seqlen must be a divisor of N = 6; got 4", max_seqlen=4)
    refused(r"cos must be \[at least 6, 2\]; got \(5, 2\); build it with rope_table", proj, norm, norm, cos[1:], sin)
    refused("cu_seqlens must be int32", cu_seqlens=cu.float())
    refused("dims must be nq a multiple of nkv", dims=AttnDims(3, 2, 8, 4))
    refused(r"out must be \[6, 32\]", out=proj)
    refused("q_norm and k_norm must be both given or both None", proj, norm, None, cos, sin)
    refused("bias must be None with an output gate", bias=torch.zeros(96))
    refused(r"bias must be \[64\]", proj[:, :64], norm, norm, cos, sin, dims=DIMS._replace(gate=False), bias=norm)
    refused(r"index.positions must be \[6\]; got \(3,\)", index=sequence_index(cu, 3))
    _, saved = attention_mixer_fwd(proj, norm, norm, cos, sin, **good)
    with pytest.raises(ValueError, match=r"attention_mixer_bwd: dout must be \[6, 32\]"):
        attention_mixer_bwd(proj, saved, norm, norm, cos, sin, **good)
    with pytest.raises(ValueError, match="dk_norm must be a tensor whose elements do not share memory"):
        attention_mixer_bwd(proj[:, :32], saved, norm, norm, cos, sin, **good, dk_norm=norm[:1].expand(8))
    with pytest.raises(ValueError, match=r"dbias must be None without bias"):
        attention_mixer_bwd(proj[:, :32], saved, norm, norm, cos, sin, **good, dbias=torch.zeros(96))
    with pytest.raises(ValueError, match="rope_table: n and rot must be"):
        rope_table(4, 3, 1e4, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_TOL)
def test_gpu(dtype, rng):
    dims, starts, window = AttnDims(4, 2, 32, 8), [0, 300, 301, 600, 1000, 1200, 1200], 600
    proj, dout, vectors, cu = make(dims, starts, window, dtype, rng)
    want = oracle(proj, dout, vectors, dims, cu)
    proj, dout, vectors, cu = proj.cuda(), dout.cuda(), tuple(v.cuda() for v in vectors), cu.cuda()
    keys = {"dims": dims, "cu_seqlens": cu, "max_seqlen": window, "eps": EPS}
    runs = []
    for _ in range(2):
        dq, dk = (nan(dims.hd, dtype=torch.float32).cuda() for _ in range(2))
        with no_sync():
            out, saved = attention_mixer_fwd(proj, *vectors, **keys)
            dproj = attention_mixer_bwd(dout, saved, *vectors, **keys, dq_norm=dq, dk_norm=dk)
        for got, exact in zip((out, dproj, dq, dk), want, strict=True):
            same(got.cpu(), exact, GPU_TOL[dtype])
        runs.append(bits(out, dproj, dq, dk))
    assert runs[0] == runs[1]


def test_what_the_kernels_and_sdpa_take():
    bf16 = torch.bfloat16
    assert dims_of.unfit_for_kernels(bf16, 256) == dims_of.unfit_for_kernels(bf16, 256, arch=90) == ""
    assert dims_of.unfit_for_kernels(bf16, 128, arch=89) == ""
    assert "sm_89" in dims_of.unfit_for_kernels(bf16, 256, arch=89)
    assert "float32" in dims_of.unfit_for_kernels(torch.float32, 64)
    assert "512" in dims_of.unfit_for_kernels(bf16, 512)
    whole, packed = torch.tensor([0, 4, 8]), torch.tensor([0, 3, 4, 8])
    assert sdpa.dense(whole, 8, 4) and not sdpa.dense(packed, 8, 4) and not sdpa.dense(torch.tensor([0, 8]), 8, 4)
    assert sdpa.choose(torch.zeros(8, DIMS.width), DIMS, whole, 4) == "triton"  # no cuDNN on a CPU
    assert kernel_blocks(whole, 8, 4, DIMS) is None


def test_sdpa_is_not_asked_where_bits_must_repeat(monkeypatch):
    class OnGpu:
        is_cuda, dtype, shape, device = True, torch.bfloat16, (8, DIMS.width), torch.device("cuda", 0)

    asked = []
    monkeypatch.setattr(sdpa, "_takes", lambda *args: not asked.append(args))
    whole, packed = torch.tensor([0, 4, 8]), torch.tensor([0, 3, 4, 8])
    assert sdpa.choose(OnGpu(), DIMS, whole, 4) == "cudnn"
    assert sdpa.choose(OnGpu(), DIMS, packed, 4) == "triton"
    with backend.deterministic(True):
        assert sdpa.choose(OnGpu(), DIMS, whole, 4) == "triton"
    assert len(asked) == 1
