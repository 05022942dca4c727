"""Teacher targets and the mixed loss against direct computations in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny import batch, geometry

from cortiq_kernels.model.weights import Weights
from cortiq_kernels.recipes.errors import InputError
from cortiq_kernels.recipes.heal_config import HealConfig
from cortiq_kernels.recipes.heal_plan import plan_heal
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


LN = {2: 0.69314718056, 3: 1.09861228867, 5: 1.60943791243, 7: 1.94591014906}

# alpha, ids, p, true -> ids, target, const = H(target) - (1 - alpha) H(b); k + 1 = 3 slots
MIXED = {
    # ranked first: b = (4/8, 3/8, 1/8) from any positive multiple of probabilities,
    # H(b) = 1/2 ln 2 + 3/8 ln(8/3) + 3/8 ln 2; target = 1/2 b + 1/2 [5] = (3/4, 3/16, 1/16)
    "ranked first": (0.5, [5, 1, 8], [0.4, 0.3, 0.1], 5, [5, 1, 8], [0.75, 0.1875, 0.0625],
                     (0.75 * (2 * LN[2] - LN[3]) + 0.1875 * (4 * LN[2] - LN[3]) + 0.0625 * 4 * LN[2])
                     - 0.5 * (0.5 * LN[2] + 0.375 * (3 * LN[2] - LN[3]) + 0.375 * LN[2])),
    # ranked k + 1: all stay, with the probability that it has. b = (1/2, 1/4, 1/4), target = 3/4 b + 1/4 [8]
    "ranked last": (0.25, [5, 1, 8], [0.5, 0.25, 0.25], 8, [5, 1, 8], [0.375, 0.1875, 0.4375],
                    0.375 * (3 * LN[2] - LN[3]) + 0.1875 * (4 * LN[2] - LN[3]) + 0.4375 * (4 * LN[2] - LN[7])
                    - 0.75 * 1.5 * LN[2]),
    # not ranked: it replaces the weakest, with p = 0. b = (5/8, 3/8, 0) with 0 log 0 = 0; target = (5/16, 3/16, 1/2)
    "not ranked": (0.5, [5, 1, 8], [0.5, 0.3, 0.2], 7, [5, 1, 7], [0.3125, 0.1875, 0.5],
                   0.3125 * (4 * LN[2] - LN[5]) + 0.1875 * (4 * LN[2] - LN[3]) + 0.5 * LN[2]
                   - 0.5 * (0.625 * (3 * LN[2] - LN[5]) + 0.375 * (3 * LN[2] - LN[3]))),
    # a sure teacher: zeros among its own probabilities. b = (1, 0, 0), target = (1/2, 0, 1/2)
    "zeros": (0.5, [5, 1, 8], [1.0, 0.0, 0.0], 7, [5, 1, 7], [0.5, 0.0, 0.5], LN[2]),
    # all of a row's mass is 0 (it underflowed): b = 0 / max(0, 1e-12) = 0, and the true token's share is what is left
    "no mass": (0.25, [5, 1, 8], [0.0, 0.0, 0.0], 1, [5, 1, 8], [0.0, 0.25, 0.0], 0.25 * 2 * LN[2]),
}  # fmt: skip


@pytest.mark.parametrize("case", MIXED)
def test_mixed_targets_by_hand(case):
    alpha, ids, p, true, want_ids, want, const = MIXED[case]
    got = mix_true_token(
        torch.tensor([ids] * 2, dtype=torch.int32), torch.tensor([p] * 2), torch.tensor([true] * 2), alpha
    )
    assert got[0].tolist() == [want_ids] * 2
    torch.testing.assert_close(got[1], torch.tensor([want] * 2), rtol=1e-6, atol=0)
    assert got[2].tolist() == pytest.approx([const] * 2, abs=1e-7)


def test_teacher_targets_of_alpha_zero_by_hand():
    """b = p / sum p of the k that are kept: 1/2, 1/3, 1/6 from logits ln 3, ln 2, ln 1 and a tail that is cut off."""
    (made, *_), teacher = batches(), Evaluator(model(1), 32, 16)
    head = teacher.weights["head"].fill_(-2.0 / 24)
    head[:5] = (torch.tensor([1.0, 3.0, 0.5, 2.0, 0.5]).log() / 24)[:, None]
    teacher.hidden = lambda batch: torch.ones(32, 24, dtype=torch.float64)
    store = TargetStore([made.n_scored], 3)
    teacher_targets(teacher, [made], store, 0.0)
    assert store.ids.tolist() == [[1, 3, 0]] * made.n_scored
    torch.testing.assert_close(store.probs, torch.tensor([[1 / 2, 1 / 3, 1 / 6]]).expand_as(store.probs))
    assert store.const == [0.0]


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


def test_topk_beyond_the_vocabulary_is_refused(world, tmp_path):
    cfg = HealConfig(world.student, world.data, tmp_path / "o", world.teacher, device="cpu", window=32, batch=2,
                     topk=24)  # fmt: skip
    with pytest.raises(InputError, match=r"heal: topk: got 24; expected 1 .. 23 \(the vocabulary\)"):
        plan_heal(cfg)
    assert plan_heal(dataclasses.replace(cfg, topk=23, ce=0.5)).topk == 23
    assert plan_heal(dataclasses.replace(cfg, ce=1.0)).topk == 1  # no teacher, so topk says nothing


@pytest.mark.parametrize(("ce", "name", "k"), [(-3.0, "KL", 8), (1.5, "NLL", 1), (0.25, "mixed", 9)])
def test_alpha_is_clamped(world, tmp_path, ce, name, k):
    cfg = HealConfig(world.student, world.data, tmp_path / "o", world.teacher, device="cpu", window=32, batch=2, topk=8,
                     ce=ce)  # fmt: skip
    plan = plan_heal(cfg)
    assert (cfg.loss_name, plan.topk, plan.teacher is None) == (name, k, ce > 1)


@pytest.mark.parametrize("k", [1, 6])
def test_ids_of_a_row_are_distinct(k):
    _, targets = fill(0.5, k)
    ids = targets.ids.sort(1).values
    assert bool((ids[:, 1:] != ids[:, :-1]).all())
    torch.testing.assert_close(targets.probs.sum(1), torch.ones(len(ids)))
