"""The best weights so far, on the host."""

from __future__ import annotations

import math

from torch import Tensor

from cortiq_kernels.model.weights import Weights


class Best:
    """Keeps the trained weights with the lowest held-out loss; a strictly lower loss wins, so the earliest of equals
    stays.

    `offer` the starting weights first, as step 0: training that never helps gives them back. A loss that is NaN
    never wins.
    """

    def __init__(self) -> None:
        self.step = -1
        self.loss = math.inf
        self._state: Tensor | None = None

    def offer(self, step: int, loss: float, weights: Weights) -> bool:
        """Keep the weights of `step` if `loss` is the lowest so far (or they are the first); says whether it is."""
        if self._state is not None and not loss < self.loss:
            return False
        self._state = weights.state(self._state)
        self.step, self.loss = step, loss if not math.isnan(loss) else math.inf
        return True

    @property
    def state(self) -> Tensor:
        """The kept masters, flat, on the host."""
        assert self._state is not None, "nothing was offered yet"
        return self._state

    @classmethod
    def kept(cls, step: int, loss: float, state: Tensor) -> Best:
        """What an earlier run kept: `state` (flat masters on the host), the weights of `step`, is its own now."""
        best = cls()
        best.step, best.loss, best._state = step, loss, state
        return best

    def restore(self, weights: Weights) -> None:
        """Put the kept weights back: masters, and the working copies that mirror them."""
        assert self._state is not None, "restore before any offer"
        weights.load_state(self._state)
