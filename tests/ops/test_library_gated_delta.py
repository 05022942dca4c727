from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gated_delta_cases import EPS, WEIGHTS, Mixer, Scan, mixer_case, mixer_truth, scan_case, scan_truth
from interpreter import strips_of, unfit
from ops_close import GPU_TOL, bits, same

from cortiq_kernels.ops.gated_delta import GdnDims, chunk_gated_delta_rule_ref, gdn_mixer_fwd
from cortiq_kernels.ops.library_gated_delta import chunk_gated_delta_rule, gdn_mixer

ROOT = Path(__file__).parents[2]
F64, F32 = torch.float64, torch.float32
DIMS = GdnDims(1, 2, 6, 4, 3)
interpreted = [pytest.mark.interpret, pytest.mark.skipif(bool(unfit()), reason=unfit())]
BACKENDS = ["torch", pytest.param("triton", marks=interpreted)]


@pytest.fixture(autouse=True)
def quick(request):
    """Under the interpreter the convolution walks few tokens one after another."""
    params = getattr(request.node, "callspec", None)
    with strips_of(8, 1) if params and params.params.get("backend") == "triton" else contextlib.nullcontext():
        yield


def opcheck(op, args, backend: str) -> None:
    """All of PyTorch's checks; under the interpreter those that run the operator a few times."""
    few = {} if backend == "torch" else {"test_utils": ("test_schema", "test_faketensor", "test_aot_dispatch_static")}
    torch.library.opcheck(op, args, **few)


def cuts(*starts: int) -> torch.Tensor:
    return torch.tensor(starts, dtype=torch.int32)


def scan_leaves(case: Scan, dtype=F64) -> list[torch.Tensor]:
    """q, k, v, g, beta and the initial state (where there is one), that require gradients."""
    return [x.detach().to(dtype).requires_grad_() for x in case[:6] if x is not None]


def mixer_leaves(case: Mixer, dtype=F64) -> list[torch.Tensor]:
    return [x.detach().to(dtype).requires_grad_() for x in (case.proj, *case.weights)]


def mixed(case: Mixer, cu, window, leaves, **kw):
    return gdn_mixer(*leaves, dims=case.dims, cu_seqlens=cu, max_seqlen=window, eps=EPS, **kw)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packed,state", [(False, True), (True, False)])
def test_opcheck_scan(packed, state, backend, rng, monkeypatch):
    if backend == "triton":  # states of chunks that are not there are never written, and opcheck compares them, too
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *size, **kw: empty(*size, **kw).fill_(0))
    cu = cuts(0, 2, 5) if packed else None
    case = scan_case(rng, 1, 5, 1, 2, 6, 4, states=2 if packed else None, state=state)
    q, k, v, g, beta, *h0 = scan_leaves(case, F32)
    args = (q, k, v, g, beta, h0[0] if state else None, cu, None if packed else 0.7, state, True, backend)
    opcheck(torch.ops.cortiq.chunk_gated_delta_rule.default, args, backend)
    nothing = torch.ops.cortiq.chunk_gated_delta_rule(*args[:9], False, backend)[2:]
    assert all(x.shape == (0,) for x in nothing)
    _, _, *kept = torch.ops.cortiq.chunk_gated_delta_rule(*args)
    given = [None if x is None else x.detach() for x in args[:7]]
    back = (case.do, case.dht, *given, [x.detach() for x in kept], args[7])
    opcheck(torch.ops.cortiq.chunk_gated_delta_rule_bwd.default, back, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck_mixer(backend, rng):
    case, cu = mixer_case(rng, DIMS, 8), cuts(0, 1, 8)
    proj, *weights = mixer_leaves(case, F32)
    args = (proj, *weights, cu, *DIMS[:4], 8, EPS, True, backend)
    opcheck(torch.ops.cortiq.gdn_mixer.default, args, backend)
    assert all(x.shape == (0,) for x in torch.ops.cortiq.gdn_mixer(*args[:12], False, backend)[1:])
    _, *kept = torch.ops.cortiq.gdn_mixer(*args)
    back = (case.dout, *(x.detach() for x in args[:6]), [x.detach() for x in kept], *args[6:12])
    opcheck(torch.ops.cortiq.gdn_mixer_bwd.default, back, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_differentiate_on_either_path(backend, rng):
    """The kernels' kept tensors through autograd, twice from the same graph."""
    case, cu = scan_case(rng, 1, 9, 1, 2, 16, 16, states=2), cuts(0, 3, 9)
    leaves = scan_leaves(case, F32)
    o, final, *_ = torch.ops.cortiq.chunk_gated_delta_rule(*leaves, cu, None, True, True, backend)
    want = scan_truth(case, cu)
    for _ in range(2):
        grads = torch.autograd.grad((o, final), leaves, (case.do, case.dht), retain_graph=True)
        for name, x in zip(("dq", "dk", "dv", "dg", "dbeta", "dh0"), grads, strict=True):
            same(x, want[name], 1e-5)
    mixer, cu = mixer_case(rng, DIMS, 6), cuts(0, 2, 6)
    leaves = mixer_leaves(mixer, F32)
    out, *_ = torch.ops.cortiq.gdn_mixer(*leaves, cu, *DIMS[:4], 6, EPS, True, backend)
    want = mixer_truth(mixer, cu)
    for name, x in zip(("dproj", *WEIGHTS), torch.autograd.grad(out, leaves, mixer.dout), strict=True):
        same(x, want[name], 1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_scan_matches_autograd(packed, rng):
    cu = cuts(0, 3, 3, 40) if packed else None
    case = scan_case(rng, 1 if packed else 2, 40, 1, 2, 6, 4, states=3 if packed else None)
    leaves = scan_leaves(case)
    o, final = chunk_gated_delta_rule(*leaves[:5], 0.5, leaves[5], True, cu_seqlens=cu)
    want = scan_truth(case, cu, 0.5)
    grads = torch.autograd.grad((o, final), leaves, (case.do.double(), case.dht.double()))
    for name, x in zip(("o", "final", "dq", "dk", "dv", "dg", "dbeta", "dh0"), (o, final, *grads), strict=True):
        same(x.detach(), want[name])


def test_scan_of_one_output_only(rng):
    """The gradient comes from o alone, from the final state alone, or from neither."""
    case = scan_case(rng, 2, 7, 1, 2, 6, 4)
    for pick in (0, 1):
        leaves = scan_leaves(case)
        result = chunk_gated_delta_rule(*leaves[:5], None, leaves[5], True)[pick]
        truth = chunk_gated_delta_rule_ref(*leaves[:5], None, leaves[5], True)[pick]
        both = (torch.autograd.grad(x.square().sum(), leaves, materialize_grads=True) for x in (result, truth))
        for a, b in zip(*both, strict=True):
            same(a, b)
    q, k, v, g, beta = scan_leaves(case)[:5]
    o, final = chunk_gated_delta_rule(q, k, v, g, beta)
    assert final is None and o.requires_grad
    with torch.no_grad():
        again, final = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    assert not again.requires_grad and not final.requires_grad and bits(again) == bits(o)


def test_scan_normalises(rng):
    case = scan_case(rng, 2, 7, 1, 2, 6, 4, state=False)
    leaves = scan_leaves(case._replace(q=3 * case.q, k=5 * case.k))
    got = chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True)[0]
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in leaves[:2])
    want = chunk_gated_delta_rule_ref(q, k, *leaves[2:])[0]
    both = ((x.detach(), *torch.autograd.grad(x, leaves, case.do.double())) for x in (got, want))
    for a, b in zip(*both, strict=True):
        same(a, b)
    half = chunk_gated_delta_rule(*(x.bfloat16() for x in leaves), use_qk_l2norm_in_kernel=True)[0]
    assert half.dtype == torch.bfloat16


def test_gradcheck(rng):
    case = scan_case(rng, 1, 3, 1, 2, 3, 2)
    leaves = scan_leaves(case)
    assert torch.autograd.gradcheck(lambda *x: chunk_gated_delta_rule(*x[:5], None, x[5], True), leaves)
    mixer = mixer_case(rng, GdnDims(1, 1, 2, 3, 2), 3, rates=(0.5, 0.5))
    assert torch.autograd.gradcheck(lambda *x: mixed(mixer, cuts(0, 1, 3), 3, x), mixer_leaves(mixer))


@pytest.mark.parametrize("dtype", [F64, F32, torch.bfloat16, torch.float16])
def test_mixer_matches_autograd(dtype, rng):
    """Weights in the dtype of proj too; each gradient in the dtype of its tensor."""
    case, cu = mixer_case(rng, DIMS, 20, rates=(0.1, 1.0)), cuts(0, 4, 4, 20)
    leaves = mixer_leaves(case, dtype)
    out = mixed(case, cu, 20, leaves)
    grads = torch.autograd.grad(out, leaves, case.dout.to(dtype))
    assert {x.dtype for x in (out, *grads)} == {dtype}
    rounded = case._replace(proj=leaves[0], weights=tuple(leaves[1:]), dout=case.dout.to(dtype))
    want = mixer_truth(rounded, cu)
    for name, x in zip(("out", "dproj", *WEIGHTS), (out, *grads), strict=True):
        same(x.detach(), want[name], {F64: 1e-10, **GPU_TOL}[dtype])


def test_what_is_saved_is_not_changed(rng):
    case, cu = mixer_case(rng, DIMS, 8), cuts(0, 8)
    leaves = mixer_leaves(case, F32)
    before = bits(*leaves, cu, case.dout)
    out = mixed(case, cu, 8, leaves)
    first = torch.autograd.grad(out, leaves, case.dout, retain_graph=True)
    again = torch.autograd.grad(out, leaves, case.dout, retain_graph=True)
    assert bits(*first) == bits(*again) and bits(*leaves, cu, case.dout) == before
    common = dict(dims=DIMS, cu_seqlens=cu, max_seqlen=8, eps=EPS)
    assert bits(out) == bits(gdn_mixer_fwd(*(x.detach() for x in leaves), **common)[0])
    with torch.no_grad():
        leaves[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, leaves, case.dout)


def test_no_gradient_of_a_gradient(rng):
    leaves = scan_leaves(scan_case(rng, 1, 3, 1, 1, 3, 2, state=False))
    o = chunk_gated_delta_rule(*leaves)[0]
    first = torch.autograd.grad(o.square().sum(), leaves[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_errors_of_the_plain_functions_come_through(rng):
    q, k, v, g, beta = scan_leaves(scan_case(rng, 2, 3, 1, 2, 3, 2, state=False))
    with pytest.raises(ValueError, match="g must be"):
        chunk_gated_delta_rule(q, k, v, g[..., :1], beta)
    with pytest.raises(ValueError, match="B must be 1 with cu_seqlens"):
        chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cuts(0, 3))
    case = mixer_case(rng, DIMS, 8)
    with pytest.raises(ValueError, match="max_seqlen must be a divisor"):
        mixed(case, cuts(0, 8), 3, (case.proj, *case.weights))


def block(x, w_in, w_out, weights, g, cu, dims, window):
    """Both operators, with work around them to compile."""
    out = mixed(Mixer(x, weights, x, dims), cu, window, (torch.tanh(x) @ w_in, *weights)) @ w_out
    q, k, v = (F.silu(out)[None, :, None, a : a + 4] for a in (0, 4, 8))
    o, final = chunk_gated_delta_rule(q, k, v, F.logsigmoid(g), g.sigmoid(), None, None, True, True, cu)
    return o.square().sum() + final.sum()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph(dynamic, rng):
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for n in (8, 11) if dynamic else (8,):
        case, cu = mixer_case(rng, DIMS, n), cuts(0, 3, n)
        made = [torch.randn(s, generator=rng) for s in ((n, 5), (5, DIMS.width), (DIMS.out_width, 12), (1, n, 1))]
        leaves = [x.requires_grad_() for x in made]
        weights = [w.requires_grad_() for w in case.weights]
        results = []
        for run in (block, compiled):
            loss = run(*leaves[:3], tuple(weights), leaves[3], cu, DIMS, n)
            results.append((loss, *torch.autograd.grad(loss, (*leaves, *weights))))
        for a, b in zip(*results, strict=True):
            same(a.detach(), b.detach(), 1e-6)
        with torch.no_grad():
            same(compiled(*leaves[:3], tuple(weights), leaves[3], cu, DIMS, n), results[0][0].detach(), 1e-6)


@pytest.fixture
def example():
    pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    spec = importlib.util.spec_from_file_location("transformers_gdn", ROOT / "examples" / "transformers_gdn.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.random.fork_rng():
        yield module


def test_the_example_agrees_with_transformers(example, capsys):
    found = example.main()
    assert set(found) == {"our_rule", "our_mixer"}
    assert all(0 < off < 1e-3 for off in found.values()), found  # 0 would be transformers' own
    assert capsys.readouterr().out.count("logits and 56 gradients") == 2


def test_the_example_keeps_packed_sequences_apart(example):
    torch.manual_seed(0)
    model, tokens = example.tiny_model(), torch.randint(97, (1, 40))
    position_ids = torch.cat([torch.arange(13), torch.arange(27)])[None]
    packed = {f"cu_seq_lens_{x}": cuts(0, 13, 40) for x in "qk"} | {f"max_length_{x}": 27 for x in "qk"}
    with torch.no_grad():
        alone = torch.cat([model(input_ids=x, use_cache=False).logits for x in tokens.split((13, 27), 1)], 1)
        forward = example.modeling.Qwen3_5GatedDeltaNet.forward
        with example.our_mixer():
            together = model(input_ids=tokens, use_cache=False, position_ids=position_ids, **packed).logits
        assert example.modeling.Qwen3_5GatedDeltaNet.forward is forward
    same(together, alone, 1e-3)


def test_only_importing_it_registers():
    code = """
import sys, torch, cortiq_kernels, cortiq_kernels.ops, cortiq_kernels.step, cortiq_kernels.recipes
import cortiq_kernels.ops.gated_delta, cortiq_kernels.ops.library
assert "cortiq_kernels.ops.library_gated_delta" not in sys.modules and not hasattr(torch.ops.cortiq, "gdn_mixer")
import cortiq_kernels.ops.library_gated_delta
assert hasattr(torch.ops.cortiq, "gdn_mixer") and hasattr(torch.ops.cortiq, "chunk_gated_delta_rule_bwd")
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
