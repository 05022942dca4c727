from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ops_close import GPU_TOL, bits, same

from cortiq_kernels.ops import library, topk
from cortiq_kernels.ops.library import head_topk_kl_loss, topk_softmax
from cortiq_kernels.ops.topk_kl import head_topk_kl_fwd_bwd, head_topk_kl_ref

ROOT = Path(__file__).parents[2]
F64, F32 = torch.float64, torch.float32
BENT = {"temperature": 1.7, "softcap": 5.0, "tail": True}


def make(rng, n=7, h=5, v=19, k=3, dtype=F64, mass=0.8):
    hidden, head = (torch.randn(*s, generator=rng, dtype=F64).to(dtype).requires_grad_() for s in ((n, h), (v, h)))
    ids = torch.rand(n, v, generator=rng).argsort(1)[:, :k].to(torch.int32)
    probs = mass * torch.softmax(torch.randn(n, k, generator=rng, dtype=F64), -1)
    weight = 0.2 + torch.rand(n, generator=rng, dtype=F64)
    return (hidden, head, ids, probs, weight) if dtype == F64 else (hidden, head, ids, probs.float(), weight.float())


def oracle(args, scale=1.0, **options):
    """(total, loss, dhidden, dhead) by float64 autograd through the reference."""
    hidden, head = (t.detach().to(F64).requires_grad_() for t in args[:2])
    loss, total = head_topk_kl_ref(hidden, head, *args[2:], **options)
    return total.detach(), loss.detach(), *torch.autograd.grad(total * scale, (hidden, head))


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("grads", [(True, True), (True, False), (False, True), (False, False)])
def test_opcheck_head(grads, dtype, rng):
    hidden, head, *rest = make(rng, dtype=dtype)
    args = (hidden.requires_grad_(grads[0]), head.requires_grad_(grads[1]), *rest)
    options = {"need_dhidden": grads[0], "need_dhead": grads[1], **(BENT if dtype == F64 else {})}
    torch.library.opcheck(torch.ops.cortiq.head_topk_kl.default, args, options)


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("options", [(), (13, True)])
def test_opcheck_topk(options, dtype, rng):
    logits = torch.randn(6, 17, generator=rng, dtype=F64).to(dtype)
    torch.library.opcheck(torch.ops.cortiq.topk_softmax.default, (logits, 4, *options))


@pytest.mark.parametrize("options", [{}, BENT], ids=["plain", "bent"])
@pytest.mark.parametrize("scale", [1.0, -2.5])
def test_gradients_match_autograd(scale, options, rng):
    args = make(rng)
    total, loss = head_topk_kl_loss(*args, **options)
    (total * scale).backward()
    for got, want in zip((total, loss, args[0].grad, args[1].grad), oracle(args, scale, **options), strict=True):
        same(got.detach(), want)


def test_gradcheck(rng):
    hidden, head, *rest = make(rng, n=3, h=4, v=6)
    assert torch.autograd.gradcheck(lambda h, w: head_topk_kl_loss(h, w, *rest)[0].square(), (hidden, head))


@pytest.mark.parametrize("dtype,tol", [(F32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_gradients_have_the_dtype_of_their_tensors(dtype, tol, rng):
    args = make(rng, dtype=dtype)
    total, loss = head_topk_kl_loss(*args)
    (total / 3).backward()
    assert (total.dtype, loss.dtype, args[0].grad.dtype, args[1].grad.dtype) == (F64, F32, dtype, dtype)
    for got, want in zip((total, loss, args[0].grad, args[1].grad), oracle(args, 1 / 3), strict=True):
        same(got.detach(), want, tol)


def test_an_incoming_gradient_is_not_rounded_to_16_bits(rng):
    """A factor past float16's largest number, on gradients small enough to take it."""
    args = make(rng, dtype=torch.float16)
    total, _ = head_topk_kl_loss(*args[:4], args[4] * 2**-12)
    total.backward(torch.tensor(2.0**17, dtype=F64))
    for t, want in zip(args[:2], oracle(args, 2.0**5)[2:], strict=True):
        same(t.grad, want, 4e-3)


def test_as_part_of_a_model(rng):
    """Through layers on both sides, with another loss on the same hidden rows."""
    x, head, *rest = make(rng)
    grads = []
    for ours in (True, False):
        leaves = [t.detach().clone().requires_grad_() for t in (x, head)]
        hidden, weight = torch.tanh(leaves[0]), leaves[1] * 2
        total = head_topk_kl_loss(hidden, weight, *rest)[0] if ours else head_topk_kl_ref(hidden, weight, *rest)[1]
        grads.append(torch.autograd.grad(total.exp() + hidden.square().sum(), leaves))
    for got, want in zip(*grads, strict=True):
        same(got, want)


def test_non_contiguous_inputs(rng):
    args = make(rng)
    wide = [torch.stack((t.detach(), t.detach() + 1), dim=-1)[..., 0] for t in args]  # every stride doubled
    turned = [t.t().contiguous().t() if t.dim() == 2 else t for t in wide]
    for views in (wide, turned):
        hidden, head = (t.requires_grad_() for t in views[:2])
        assert not hidden.is_contiguous() and not head.is_contiguous()
        total, loss = head_topk_kl_loss(hidden, head, *views[2:])
        grads = torch.autograd.grad(total, (hidden, head))
        for got, want in zip((total, loss, *grads), oracle(args), strict=True):
            same(got.detach(), want)
        torch.library.opcheck(torch.ops.cortiq.head_topk_kl.default, (hidden, head, *views[2:]), test_utils=(
            "test_schema", "test_faketensor"))  # fmt: skip
    logits = torch.randn(17, 6, generator=rng).t()
    assert bits(*topk_softmax(logits, 4)) == bits(*topk.topk_softmax(logits.contiguous(), 4))


def test_what_is_saved_is_not_changed(rng):
    """Backward twice gives the same twice, and inputs are as they were."""
    args = make(rng)
    before = bits(*args)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        total, _ = head_topk_kl_loss(*args)
    kept = bits(*saved)
    first = torch.autograd.grad(total, args[:2], torch.tensor(3.0, dtype=F64), retain_graph=True)
    for g in first:
        g.mul_(0)  # the caller's to change
    second = torch.autograd.grad(total, args[:2])
    assert bits(*saved) == kept and bits(*args) == before
    for got, want in zip(second, oracle(args)[2:], strict=True):
        same(got, want)


@pytest.mark.parametrize("need", [(True, False), (False, True), (False, False)])
def test_no_memory_for_a_gradient_that_is_not_needed(need, rng, monkeypatch):
    seen = []

    def spy(*args, **kwargs):
        seen.append((kwargs["dhidden"] is not None, kwargs["dhead"] is not None, kwargs["need_grad"]))
        return head_topk_kl_fwd_bwd(*args, **kwargs)

    monkeypatch.setattr(library, "head_topk_kl_fwd_bwd", spy)
    hidden, head, *rest = make(rng)
    hidden.requires_grad_(need[0]), head.requires_grad_(need[1])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        total, _ = head_topk_kl_loss(hidden, head, *rest)
    assert seen == [(*need, any(need))]
    assert total.requires_grad == any(need)
    assert sum(t.numel() for t in saved) == need[0] * hidden.numel() + need[1] * head.numel()
    shapes = [t.shape[0] for t in torch.ops.cortiq.head_topk_kl(
        hidden, head, *rest, need_dhidden=need[0], need_dhead=need[1])[2:]]  # fmt: skip
    assert shapes == [need[0] * hidden.shape[0], need[1] * head.shape[0]]
    if any(need):
        total.backward()
    assert (hidden.grad is not None, head.grad is not None) == need


def test_without_gradients_nothing_is_kept(rng):
    args = make(rng)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            total, loss = head_topk_kl_loss(*args)
        assert not total.requires_grad
        same(loss.clone(), oracle(args)[1])


def test_what_has_no_gradient_says_so(rng):
    hidden, head, ids, probs, weight = make(rng)
    total, loss = head_topk_kl_loss(hidden, head, ids, probs, weight)
    assert total.requires_grad and not loss.requires_grad
    with pytest.raises(ValueError, match="topk_probs must be without requires_grad; .*detach"):
        head_topk_kl_loss(hidden, head, ids, probs.requires_grad_(), weight)
    with pytest.raises(ValueError, match="row_weight must be without requires_grad"):
        head_topk_kl_loss(hidden, head, ids, probs.detach(), weight.requires_grad_())
    raw = torch.ops.cortiq.head_topk_kl(hidden, head, ids, probs.detach(), weight.detach(), need_dhead=False)
    assert [t.requires_grad for t in raw] == [False, True, False, False]
    with pytest.raises(ValueError, match="head_weight must be without requires_grad; .*need_dhead"):
        raw[1].backward()
    first = torch.autograd.grad(total.square(), hidden, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()
    ids, probs, lse, mass = topk_softmax(hidden @ head.t(), 3, return_lse=True)
    assert not (probs.requires_grad or lse.requires_grad or mass.requires_grad)


def test_errors_of_the_plain_functions_come_through(rng):
    hidden, head, ids, probs, weight = make(rng)
    with pytest.raises(ValueError, match="head_weight must be .*the head is stored"):
        head_topk_kl_loss(hidden, head.t(), ids, probs, weight)
    with pytest.raises(ValueError, match="row_weight must be"):
        head_topk_kl_loss(hidden, head, ids, probs, weight[1:])
    with pytest.raises(ValueError, match="k must be between 1 and the vocabulary"):
        topk_softmax(torch.zeros(2, 3), 4)


def test_topk_is_the_plain_one(rng):
    logits = torch.randn(6, 17, generator=rng)
    plain = topk_softmax(logits, 4)
    assert plain.lse is None and plain.mass is None and bits(*plain) == bits(*topk.topk_softmax(logits, 4))
    options = {"valid_vocab": 13, "return_lse": True}
    assert bits(*topk_softmax(logits, 4, **options)) == bits(*topk.topk_softmax(logits, 4, **options))


def distil(hidden, head, logits, weight):
    """A teacher's targets and the student's loss, with work around them to compile."""
    ids, probs, lse, _ = topk_softmax(logits * 2, 3, return_lse=True)
    total, loss = head_topk_kl_loss(torch.tanh(hidden), head, ids, probs, weight)
    return total * 3, loss, lse


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph(dynamic, rng):
    compiled = torch.compile(distil, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for n in (7, 4) if dynamic else (7,):
        hidden, head, _, _, weight = make(rng, n=n, dtype=F32)
        logits = torch.randn(n, 19, generator=rng)
        results = []
        for run in (distil, compiled):
            total, loss, lse = run(hidden, head, logits, weight)
            results.append((total, loss, lse, *torch.autograd.grad(total, (hidden, head))))
        assert bits(*results[0]) == bits(*results[1])
    with torch.no_grad():
        assert bits(*compiled(hidden, head, logits, weight)) == bits(*results[0][:3])


def test_only_importing_it_registers():
    code = """
import pkgutil, sys, torch, cortiq_kernels, cortiq_kernels.ops, cortiq_kernels.step, cortiq_kernels.recipes
import cortiq_kernels.ops.topk_kl, cortiq_kernels.ops.topk
assert "cortiq_kernels.ops.library" not in sys.modules and not hasattr(torch.ops.cortiq, "head_topk_kl")
import cortiq_kernels.ops.library
assert hasattr(torch.ops.cortiq, "head_topk_kl") and hasattr(torch.ops.cortiq, "topk_softmax")
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_the_example_learns(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("custom_head_loss", ROOT / "examples" / "custom_head_loss.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "STEPS", 50)
    with torch.random.fork_rng():
        first, last = example.main()
    assert last < 0.6 * first
    assert "KL" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F32])
def test_compiled_on_the_gpu(dtype, rng):
    hidden, head, _, _, weight = make(rng, n=300, h=64, v=1000, dtype=dtype)
    hidden, head = ((0.5 * t).detach().cuda().requires_grad_() for t in (hidden, head))
    logits, weight = torch.randn(300, 1000, generator=rng).cuda(), weight.cuda() / 300
    total, loss, _ = torch.compile(distil, fullgraph=True)(hidden, head, logits, weight)
    got = total, loss, *torch.autograd.grad(total, (hidden, head))
    ids, probs, _, _ = topk_softmax(logits * 2, 3)
    h64, w64 = (t.detach().double().requires_grad_() for t in (hidden, head))
    want_loss, want = head_topk_kl_ref(torch.tanh(h64), w64, ids, probs, weight)
    for mine, exact in zip(got, (want * 3, want_loss, *torch.autograd.grad(want * 3, (h64, w64))), strict=True):
        same(mine.detach(), exact.detach(), GPU_TOL[dtype])
