"""Parity with transformers' Qwen3.5: logits, loss and every gradient on random geometries, through a directory on
disk."""

from __future__ import annotations

import json
import os

import pytest
import torch
from tiny import batch, config

from cortiq_kernels.model import open_model
from cortiq_kernels.model.names import slots
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import Evaluator, Micro, Trainer
from cortiq_kernels.step.loss import next_token_targets

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")

CASES = {
    "gva2_tied": dict(layers="LLLF"),
    "gva1_untied": dict(layers="LFL", nk=3, nv=3, tied=False, nq=2, nkv=1),
    "gva3_wide_head": dict(layers="FLL", nk=1, nv=3, hd=32, dk=16, dv=8),
    "odd_interval": dict(layers="LLFLFF", hidden=24, ffn=40, nq=6, nkv=3, hd=16),
    "theta_1e7_half_rotary": dict(
        layers="LF", rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    ),
}


def save(case: str, path, dtype=torch.float32, seed=0):
    """A random transformers model, moved away from its init, saved as a directory."""
    torch.manual_seed(seed)
    fields = {k: v for k, v in config(**CASES[case]).items() if k != "architectures"}
    cfg = transformers.Qwen3_5TextConfig(**fields)
    cfg._attn_implementation = "eager"
    model = transformers.Qwen3_5ForCausalLM(cfg).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.3 if p.dim() == 1 else 0.08))
    model.save_pretrained(path)
    return model


def rows(n_windows=2, window=37, vocab=61):
    return batch([[window]] * n_windows, window, vocab, scored=1.0)


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_float32(case, tmp_path):
    theirs = save(case, tmp_path / "m")
    ours = Weights.load(open_model(tmp_path / "m"), dtype=torch.float32, device=CPU, train="all")
    b = rows()
    trainer = Trainer(ours, b.tokens.numel(), b.max_seqlen)
    logits = Evaluator(ours, b.tokens.numel(), b.max_seqlen).hidden(b) @ ours["head"].T
    want = theirs(b.tokens.view(2, -1)).logits.reshape(logits.shape)
    assert (logits - want).abs().max() <= 1e-4 * want.abs().max()

    index = b.row_index.long()
    ce = torch.nn.functional.cross_entropy(want[index], b.next_ids[index], reduction="none")
    loss = (ce * b.row_weight).sum() / b.weight_sum
    loss.backward()
    got = trainer.gradients([Micro(b, next_token_targets(b))])
    exact = Weights.load(open_model(tmp_path / "m"), dtype=torch.float64, device=CPU, train="all")
    Trainer(exact, b.tokens.numel(), b.max_seqlen).gradients([Micro(b, next_token_targets(b))])
    assert float(got) == pytest.approx(float(loss.detach()), rel=1e-5)
    theirs_grad = {n: p.grad for n, p in theirs.named_parameters()}
    seen = set()
    for s in slots(ours.geometry):
        if s.published not in theirs_grad:
            continue
        part = slice(*s.rows)
        g, truth = ours.grad(s.internal)[part], exact.grad(s.internal)[part]
        err_hf = (theirs_grad[s.published].reshape(g.shape) - truth).norm() / truth.norm()
        assert err_hf < 5e-3, f"{s.published}: not the same function"
        assert (g - truth).norm() / truth.norm() <= 1.5 * err_hf + 2e-5, s.published
        seen.add(s.published)
    assert seen == set(theirs_grad)


@pytest.mark.parametrize("case", ["gva2_tied", "gva1_untied"])
def test_bfloat16_is_no_worse_than_transformers(case, tmp_path):
    """Same bf16 weights: our error against float64 is at most 1.5 x transformers' own."""
    theirs = save(case, tmp_path / "m", torch.bfloat16)
    b = rows()
    exact = Weights.load(open_model(tmp_path / "m"), dtype=torch.float64, device=CPU)
    truth = Evaluator(exact, b.tokens.numel(), b.max_seqlen).hidden(b) @ exact["head"].T
    w = Weights.load(open_model(tmp_path / "m"), dtype=torch.bfloat16, device=CPU)
    ours = (Evaluator(w, b.tokens.numel(), b.max_seqlen).hidden(b) @ w["head"].T).double()
    with torch.no_grad():
        hf = theirs(b.tokens.view(2, -1)).logits.reshape(ours.shape).double()
    err, err_hf = (ours - truth).norm() / truth.norm(), (hf - truth).norm() / truth.norm()
    assert 1e-4 < err_hf < 0.2
    assert err <= 1.5 * err_hf


def test_a_directory_we_write_loads_in_transformers(tmp_path):
    """Train a step, export, load in transformers: the logits are those of our own weights, and the config is
    unchanged."""
    from cortiq_kernels.model import write_model

    save("gva2_tied", tmp_path / "m")
    src = open_model(tmp_path / "m")
    w = Weights.load(src, dtype=torch.float32, device=CPU, train="layers")
    b = rows()
    trainer = Trainer(w, b.tokens.numel(), b.max_seqlen)
    trainer.step([Micro(b, next_token_targets(b))], rate=1e-2)
    write_model(src, tmp_path / "out", replace=w.export(), provenance={"recipe": "test"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    logits = Evaluator(w, b.tokens.numel(), b.max_seqlen).hidden(b) @ w["head"].T
    with torch.no_grad():
        want = theirs(b.tokens.view(2, -1)).logits.reshape(logits.shape)
    assert (logits - want).abs().max() <= 1e-4 * want.abs().max()
    written, original = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("out", "m"))
    assert written == original
