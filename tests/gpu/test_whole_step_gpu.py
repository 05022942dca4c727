"""A whole distillation step in bfloat16 at the geometry of the published 0.8B model: its gradients beside transformers'
own bfloat16 ones, both held against transformers in float32 from the same weights."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from tiny import batch, config

from cortiq_kernels.model.geometry import Geometry
from cortiq_kernels.model.hf import create_model, open_model
from cortiq_kernels.model.names import slots
from cortiq_kernels.model.weights import Weights
from cortiq_kernels.step import Micro, Trainer
from cortiq_kernels.step.loss import Targets

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA, WINDOW, WINDOWS = torch.device("cuda"), 512, 2


def published(layers: int) -> dict:
    """The 0.8B model's config with fewer layers, of the same kinds in the same order."""
    kinds = ("LLLF" * 6)[:layers]
    return config(
        kinds, hidden=1024, ffn=3584, vocab=248320, nq=8, nkv=2, hd=256, nk=16, nv=16, dk=128, dv=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    )  # fmt: skip


def theirs(path, dtype, b, ids, probs):
    """Loss and gradients of a loaded transformers model: autograd, eager attention, no kernels of other packages."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").to(CUDA)
    hidden = model.model(input_ids=b.tokens.view(WINDOWS, -1), use_cache=False).last_hidden_state.flatten(0, 1)
    logits = (hidden[b.row_index.long()] @ model.lm_head.weight.T).float()
    log_q = torch.log_softmax(logits, -1).gather(1, ids.long())
    loss = ((probs * (probs.log() - log_q)).sum(-1) * b.row_weight).sum() / b.weight_sum
    loss.backward()
    return float(loss.detach()), {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module", params=[4, 24])
def errors(request, tmp_path_factory):
    """Of every tensor's gradient: (relative error of ours, of transformers' bfloat16 one, name)."""
    layers, path = request.param, tmp_path_factory.mktemp("model") / "m"
    cfg = published(layers)
    g = Geometry.from_config(cfg)
    w = Weights.random(g, seed=3, dtype=torch.float32, device=CUDA, generate_on=CUDA, train="all")
    noise = torch.Generator(CUDA).manual_seed(1)
    tensors = {}
    for name, t in w.export().items():  # every value one that bfloat16 holds, so that all three start from the same
        t = t.to(CUDA)
        if t.dim() == 1 and "A_log" not in name:
            t = t + 0.1 * torch.randn(t.shape, generator=noise, device=CUDA)
        tensors[name] = t.bfloat16().cpu()
    create_model(path, cfg, tensors)
    del w, tensors
    b = batch([[WINDOW]] * WINDOWS, WINDOW, cfg["vocab_size"], scored=1.0)
    gen = torch.Generator().manual_seed(5)
    place = torch.randint(0, cfg["vocab_size"], (b.n_scored, 1), generator=gen)
    ids = ((place + torch.arange(64)) % cfg["vocab_size"]).to(torch.int32).to(CUDA)
    probs = torch.softmax(torch.randn(b.n_scored, 64, generator=gen), -1).to(CUDA)
    b = b.to(CUDA)

    truth_loss, truth = theirs(path, torch.float32, b, ids, probs)
    _, eager = theirs(path, torch.bfloat16, b, ids, probs)
    mine = Weights.load(open_model(path), dtype=torch.bfloat16, device=CUDA, train="all")
    # one sequence a window, so that the attention is the one that benchmarks run
    cu = torch.arange(WINDOWS + 1, dtype=torch.int32, device=CUDA) * WINDOW
    trainer = Trainer(mine, WINDOWS * WINDOW, WINDOW)
    loss = float(trainer.gradients([Micro(dataclasses.replace(b, cu_seqlens=cu), Targets(ids, probs))]))
    assert loss == pytest.approx(truth_loss, rel=2e-3)

    rows, seen = [], set()
    for s in slots(mine.geometry):
        if s.published not in truth:
            continue
        got = mine.grad(s.internal)[slice(*s.rows)].float()
        want, other = (x[s.published].reshape(got.shape) for x in (truth, eager))
        own, his = (((x - want).norm() / want.norm()).item() for x in (got, other))
        rows.append((own, his, s.published))
        seen.add(s.published)
    assert seen == set(truth)
    rows.sort(key=lambda r: r[0] / r[1], reverse=True)
    print(f"\n{layers} layers: loss {loss:.6f}, float32 {truth_loss:.6f}; {len(rows)} tensors")
    for own, his, name in [*[r for r in rows if decay(r)][:6], *[r for r in rows if not decay(r)][:6]]:
        print(f"  {name:<60} ours {own:.2e}  transformers {his:.2e}  {own / his:.2f} x")
    return rows


def decay(row) -> bool:
    """The two vectors that decide how fast a Gated DeltaNet forgets: sums over all tokens of terms that cancel."""
    return row[2].endswith(("A_log", "dt_bias"))


def test_gradients_are_as_near_to_float32_as_transformers_own(errors):
    rows = [r for r in errors if not decay(r)]
    above = [f"{name}: {own:.2e} of {his:.2e}" for own, his, name in rows if own > 1.1 * his]
    assert not above, above


@pytest.mark.xfail(reason="up to 3.5 times transformers' error in 4 layers, 2.2 times in 24, on an H200")
def test_so_are_those_of_the_decay(errors):
    above = [f"{name}: {own:.2e} of {his:.2e}" for own, his, name in filter(decay, errors) if own > 1.5 * his]
    assert not above, above
