"""Teacher targets and the mixed loss against direct computations in float64."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, geometry

from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes.targets import TargetStore, TrueTokens, asked_topk, mix_true_token, teacher_targets
from cortiq_kernels.step import Evaluator, Micro

G = geometry("LF", hidden=24, ffn=20, vocab=37)


def model(seed: int, dtype=torch.float64) -> Weights:
    return Weights.random(G, seed=seed, dtype=dtype, std=0.2)


def batches():
    return [batch([[9, 5], [12]], 16, G.vocab, seed=s) for s in range(3)]


def fill(alpha: float, k: int, chunk_rows: int | None = None, **store):
    made = batches()
    t = TargetStore([b.n_scored for b in made], asked_topk(k, alpha, G.vocab), **store)
    teacher_targets(Evaluator(model(1), 32, 16), made, t, alpha, chunk_rows=chunk_rows)
    return made, t


def logits(w: Weights, b) -> torch.Tensor:
    hidden = Evaluator(w, 32, 16).hidden(b)
    return (hidden @ w["head"].T)[b.row_index.long()]


def test_true_token_stays_where_it_is_ranked_and_replaces_the_weakest_where_not():
    ids = torch.tensor([[4, 2, 9], [4, 2, 9]], dtype=torch.int32)
    p = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    got_ids, target, _ = mix_true_token(ids, p, torch.tensor([9, 7]), 0.25)
    assert got_ids.tolist() == [[4, 2, 9], [4, 2, 7]]
    want = torch.tensor([[0.375, 0.225, 0.15 + 0.25], [0.75 * 0.625, 0.75 * 0.375, 0.25]])
    torch.testing.assert_close(target, want)
    assert ids[1, 2] == 9 and p[1, 2] == 0.2  # the inputs are the caller's


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_reported_loss_is_the_mix_of_ce_and_kl(alpha):
    k = 5
    made, targets = fill(alpha, k, chunk_rows=3)
    student = model(2)
    got = Evaluator(student, 32, 16).loss(Micro(b, targets[i]) for i, b in enumerate(made))
    total = weight = 0.0
    for b in made:
        lp_teacher, lq = torch.log_softmax(logits(model(1), b), -1), torch.log_softmax(logits(student, b), -1)
        true = b.next_ids[b.row_index.long()]
        for r in range(b.n_scored):
            p, ids = lp_teacher[r].exp().topk(k + (alpha > 0))
            if alpha > 0 and true[r] not in ids:
                ids[-1], p[-1] = true[r], 0.0
            mine = p / p.sum()
            kl = (torch.special.xlogy(mine, mine) - mine * lq[r, ids]).sum()
            total += float(b.row_weight[r] * (alpha * -lq[r, true[r]] + (1 - alpha) * kl))
            weight += float(b.row_weight[r])
    assert got == pytest.approx(total / weight, rel=2e-6)


def test_alpha_one_is_next_token_likelihood_and_needs_no_teacher():
    made, student = batches(), model(2)
    targets = TrueTokens(made)
    got = Evaluator(student, 32, 16).loss(Micro(b, targets[i]) for i, b in enumerate(made))
    total = weight = 0.0
    for b in made:
        lq = torch.log_softmax(logits(student, b), -1)
        true = b.next_ids[b.row_index.long()]
        total += float((b.row_weight * -lq.gather(1, true[:, None]).squeeze(1)).sum())
        weight += b.weight_sum
    assert got == pytest.approx(total / weight, rel=1e-12)
    assert targets[0].const == 0.0 and targets[0].ids.shape[1] == 1


def test_a_student_equal_to_its_teacher_has_only_the_missing_tail_as_loss():
    made, targets = fill(0.0, G.vocab)
    got = Evaluator(model(1), 32, 16).loss(Micro(b, targets[i]) for i, b in enumerate(made))
    assert got == pytest.approx(0.0, abs=1e-6)


def test_k_is_capped_by_the_vocabulary():
    assert asked_topk(64, 0.0, 37) == 37
    assert asked_topk(64, 0.5, 37) == 37
    assert asked_topk(5, 0.5, 37) == 6
    assert asked_topk(64, 1.0, 37) == 1


def test_ids_of_a_row_are_distinct():
    _, targets = fill(0.5, 6)
    ids = targets.ids.sort(1).values
    assert bool((ids[:, 1:] != ids[:, :-1]).all())
    torch.testing.assert_close(targets.probs.sum(1), torch.ones(len(ids)))
