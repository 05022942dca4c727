"""Constants that fix the split, the train order and the order of the batches."""

from __future__ import annotations

import json

import pytest

from cortiq_kernels.data import HEAL_SEED, MASKS_SEED, Shuffler, fnv1a64, split_of


def test_fnv_constants():
    assert fnv1a64("") == 0xCBF29CE484222325
    assert fnv1a64("a") == 0xAF63DC4C8601EC8C
    assert fnv1a64("é") == fnv1a64("é") != fnv1a64("e")  # UTF-8 bytes, so no error and no collision


def test_split_by_hash():
    by_digit = {8: "val", 9: "test"}
    seen = {split_of(str(i)) for i in range(100)}
    assert seen == {"train", "val", "test"}
    assert all(split_of(str(i)) == by_digit.get(fnv1a64(str(i)) % 10, "train") for i in range(100))


@pytest.mark.parametrize(
    ("seed", "passes"),
    [
        (HEAL_SEED, ([2, 1, 3, 6, 7, 0, 4, 5], [5, 2, 0, 6, 4, 7, 1, 3])),
        (MASKS_SEED, ([1, 0, 3, 2, 6, 5, 4, 7], [2, 6, 1, 4, 3, 0, 7, 5])),
    ],
)
def test_shuffle_constants(seed, passes):
    assert (HEAL_SEED, MASKS_SEED) == (0x9E3779B97F4A7C15, 0x2545F4914F6CDD1D)
    shuffler = Shuffler(8, seed)
    assert shuffler.order == list(range(8))
    assert (shuffler.next_pass(), shuffler.next_pass()) == passes


def test_seed_mixed_in_by_xor_changes_the_order():
    assert Shuffler(8, HEAL_SEED ^ 0).next_pass() == [2, 1, 3, 6, 7, 0, 4, 5]
    assert Shuffler(8, HEAL_SEED ^ 1).next_pass() != [2, 1, 3, 6, 7, 0, 4, 5]
    with pytest.raises(ValueError, match="choose another seed"):
        Shuffler(8, HEAL_SEED ^ HEAL_SEED)


def test_resume_inside_the_second_pass_continues_it():
    """modelscope/ms-swift#10050: a resume in pass 2 replayed the order of pass 1."""
    whole = Shuffler(8)
    whole.next_pass()
    second = whole.next_pass()
    resumed = Shuffler.from_state(json.loads(json.dumps(whole.state())))
    assert (resumed.order, resumed.passes) == (second, 2)
    assert resumed.next_pass() == whole.next_pass()


def test_one_batch_and_damaged_state():
    assert Shuffler(1).next_pass() == [0]
    with pytest.raises(ValueError, match="permutation"):
        Shuffler.from_state({"rng": "1", "order": [0, 0], "passes": 1})
    with pytest.raises(ValueError, match="at least 1"):
        Shuffler(0)
