"""The order of the train batches: a shuffle per pass that a resumed run continues exactly.

xorshift64 with shifts 13, 7, 17; Fisher-Yates from the top: for i = n-1 ... 1 swap a[i] and a[rng % (i+1)], one draw
per i. The array is carried over from pass to pass, so pass p depends on all passes before it.

    HEAL_SEED,  n = 8: [2,1,3,6,7,0,4,5], then [5,2,0,6,4,7,1,3]
    MASKS_SEED, n = 8: [1,0,3,2,6,5,4,7], then [2,6,1,4,3,0,7,5]

A user's `seed` is mixed in by xor: Shuffler(n, HEAL_SEED ^ seed).
"""

from __future__ import annotations

from typing import Any

HEAL_SEED = 0x9E3779B97F4A7C15
MASKS_SEED = 0x2545F4914F6CDD1D
_MASK64 = 0xFFFFFFFFFFFFFFFF


def xorshift64(state: int) -> int:
    """One step on a non-zero 64-bit state: x ^= x << 13; x ^= x >> 7; x ^= x << 17. The new state is the draw."""
    state ^= (state << 13) & _MASK64
    state ^= state >> 7
    return state ^ ((state << 17) & _MASK64)


class Shuffler:
    """Permutations of range(n), one per pass.

    `seed` is the whole starting state, taken mod 2^64; 0 is refused, since the generator would stay at 0.
    """

    def __init__(self, n: int, seed: int = HEAL_SEED):
        if n < 1:
            raise ValueError(f"Shuffler: n must be at least 1, got {n}")
        if seed & _MASK64 == 0:
            raise ValueError("Shuffler: the mixed seed is 0, where xorshift64 never moves; choose another seed")
        self._rng = seed & _MASK64
        self._order = list(range(n))
        self.passes = 0

    @property
    def order(self) -> list[int]:
        """The permutation of the current pass (before the first pass: the identity)."""
        return list(self._order)

    def next_pass(self) -> list[int]:
        """Shuffle once more and return the permutation."""
        for i in range(len(self._order) - 1, 0, -1):
            self._rng = xorshift64(self._rng)
            j = self._rng % (i + 1)
            self._order[i], self._order[j] = self._order[j], self._order[i]
        self.passes += 1
        return self.order

    def state(self) -> dict[str, Any]:
        """JSON-able; `Shuffler.from_state` continues with the same current permutation and the same next ones."""
        return {"rng": f"{self._rng:016x}", "order": self.order, "passes": self.passes}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Shuffler:
        order = [int(i) for i in state["order"]]
        if sorted(order) != list(range(len(order))):
            raise ValueError(
                f"Shuffler: the saved order is not a permutation of 0..{len(order) - 1}; the file is damaged"
            )
        shuffler = cls(len(order), int(state["rng"], 16))
        shuffler._order, shuffler.passes = order, int(state["passes"])
        return shuffler
