"""Parity of the softmax-attention families with transformers, through a directory that transformers saved: logits, loss
and every gradient in float32, bfloat16 against float64, and the way back."""

from __future__ import annotations

import os

import pytest
import torch
from directories import cortiq, id_rows, nll, records, transformers_nll
from test_parity_transformers import rows
from tiny import FAMILIES, plain_config

from cortiq_kernels.model import open_model, write_model
from cortiq_kernels.model.names import slots
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import Evaluator, Micro, Trainer
from cortiq_kernels.step.loss import next_token_targets

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES = {
    "qwen3": plain_config("qwen3"),
    "qwen3_tied": plain_config("qwen3", 3, tied=True, nq=6, nkv=3, head_dim=8, rope_theta=1e6),
    "qwen2": plain_config("qwen2"),
    "qwen2_tied": plain_config("qwen2", tied=True, nq=2, nkv=1, use_sliding_window=False, sliding_window=8),
    "llama": plain_config("llama"),
    "llama_heads": plain_config("llama", 3, nq=4, nkv=4, head_dim=12, rms_norm_eps=1e-5, attention_bias=False),
    # with 64 original positions, turns of 6 tokens stay, those of 32 are blended, longer ones stretched
    "llama3": plain_config("llama", hidden=64, rope_theta=5e5, rope_scaling=LLAMA3),
}


def save(case: str, path, dtype=torch.float32):
    """A random transformers model, moved away from its init, saved as a directory."""
    torch.manual_seed(0)
    fields = dict(CASES[case])
    name = FAMILIES[fields.pop("model_type")]
    cfg = getattr(transformers, f"{name}Config")(**fields)
    cfg._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(cfg).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.3 if p.dim() == 1 else 0.08))
    model.save_pretrained(path)
    return model


def logits_of(w: Weights, b) -> torch.Tensor:
    return Evaluator(w, b.tokens.numel(), b.max_seqlen).hidden(b) @ w["head"].T


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_float32(case, tmp_path):
    theirs, b = save(case, tmp_path / "m"), rows()
    ours = Weights.load(open_model(tmp_path / "m"), dtype=torch.float32, device=CPU, train="all")
    logits = logits_of(ours, b)
    want = theirs(b.tokens.view(2, -1)).logits.reshape(logits.shape)
    assert (logits - want).abs().max() <= 1e-4 * want.abs().max()

    index = b.row_index.long()
    ce = torch.nn.functional.cross_entropy(want[index], b.next_ids[index], reduction="none")
    loss = (ce * b.row_weight).sum() / b.weight_sum
    loss.backward()
    got = Trainer(ours, b.tokens.numel(), b.max_seqlen).gradients([Micro(b, next_token_targets(b))])
    assert float(got) == pytest.approx(float(loss.detach()), rel=1e-5)
    params = dict(theirs.named_parameters())
    seen = {s.published for s in slots(ours.geometry)}
    assert seen == set(params)
    for s in slots(ours.geometry):
        g, hf = ours.grad(s.internal)[slice(*s.rows)], params[s.published].grad.reshape(s.shape)
        assert hf.norm() > 0, s.published
        assert (g.reshape(s.shape) - hf).norm() <= 1e-4 * hf.norm(), s.published


@pytest.mark.parametrize("case", ["qwen3", "qwen2", "llama"])
def test_bfloat16_is_no_worse_than_transformers(case, tmp_path):
    """Same bf16 weights: our error against float64 is at most 1.5 x transformers' own."""
    theirs, b = save(case, tmp_path / "m", torch.bfloat16), rows()
    truth = logits_of(Weights.load(open_model(tmp_path / "m"), dtype=torch.float64, device=CPU), b)
    ours = logits_of(Weights.load(open_model(tmp_path / "m"), dtype=torch.bfloat16, device=CPU), b).double()
    with torch.no_grad():
        hf = theirs(b.tokens.view(2, -1)).logits.reshape(ours.shape).double()
    err, err_hf = (ours - truth).norm() / truth.norm(), (hf - truth).norm() / truth.norm()
    assert 1e-4 < err_hf < 0.2
    assert err <= 1.5 * err_hf


@pytest.mark.parametrize("case", ["qwen3", "qwen2_tied", "llama"])
def test_a_directory_we_write_loads_in_transformers(case, tmp_path):
    """Train a step, write, load in transformers: the logits are those of our own weights."""
    save(case, tmp_path / "m")
    src, b = open_model(tmp_path / "m"), rows()
    w = Weights.load(src, dtype=torch.float32, device=CPU, train="layers")
    before = logits_of(w, b)
    Trainer(w, b.tokens.numel(), b.max_seqlen).step([Micro(b, next_token_targets(b))], rate=1e-2)
    write_model(src, tmp_path / "out", replace=w.export(), provenance={"recipe": "test"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    logits = logits_of(w, b)
    assert not torch.allclose(logits, before)
    with torch.no_grad():
        want = theirs(b.tokens.view(2, -1)).logits.reshape(logits.shape)
    assert (logits - want).abs().max() <= 1e-4 * want.abs().max()
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "m" / "config.json").read_bytes()


@pytest.mark.parametrize("case", ["qwen3", "qwen2", "llama_heads"])
def test_capture_fold_heal_and_score(case, tmp_path):
    """The recipes on a directory of each family; transformers agrees on the source and on the healed fold."""
    save(case, tmp_path / "m")
    test = id_rows(61, (20, 31, 7), first=2)
    train = id_rows(61, (30, 25, 32, 28), "train", seed=1) + id_rows(61, (26, 9), "val", seed=2)
    data = records(tmp_path / "d.jsonl", test + train)
    common = ("--data", data, "--device", "cpu", "--window", "32", "--batch", "1", "--json")
    fold, healed = tmp_path / "fold", tmp_path / "healed"
    assert cortiq("fold", "--model", tmp_path / "m", "--out", fold, "--keep", "0.5", "--align", "8", *common).json
    assert open_model(fold).geometry.intermediate[0] == 24
    grams, repaired = tmp_path / "grams.safetensors", tmp_path / "repaired"
    done = cortiq("capture", "--model", tmp_path / "m", "--out", grams, *common)
    assert done.status == 0, done.err
    more = ("--keep", "0.5", "--align", "8", "--grams", grams, "--device", "cpu")
    done = cortiq("fold", "--model", tmp_path / "m", "--out", repaired, *more)
    assert done.status == 0, done.err
    assert nll(model=repaired, data=data)[0] != nll(model=fold, data=data)[0]
    done = cortiq(
        "heal", "--student", fold, "--teacher", tmp_path / "m", "--out", healed, "--lr", "1e-3", "--epochs", "4",
        "--topk", "8", *common,
    )  # fmt: skip
    assert done.status == 0, done.err
    for path in (tmp_path / "m", healed):
        got, count = nll(model=path, data=data)
        assert count == sum(len(r["ids"]) - 2 for r in test)
        assert got == pytest.approx(transformers_nll(path, test), rel=1e-7)  # its norms are in float32
