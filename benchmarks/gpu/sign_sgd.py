"""An optimizer without state, for models whose moments do not fit: `--optimizer sign_sgd.py:SignSgd` of grpo_ranks.py.
It is no way to train; it makes versions that differ."""

from __future__ import annotations

from torch import Tensor


class SignSgd:
    by_rows = True

    def init(self, like: Tensor) -> dict[str, Tensor]:
        return {}

    def update(self, value: Tensor, grad: Tensor, state: dict[str, Tensor], *, lr: float, step: int) -> None:
        value.sub_(grad.sign_(), alpha=lr)
