"""Optimizers and a loss as a user writes them, for runs of several ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SignMomentum:
    by_rows = True

    def init(self, like: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(like)}

    def update(self, value: Tensor, grad: Tensor, state: dict[str, Tensor], *, lr: float, step: int) -> None:
        state["momentum"].lerp_(grad, 0.1)
        value.sub_(lr * state["momentum"].sign())


class Centred:
    """Needs whole tensors: it subtracts the gradient's mean over all rows."""

    def init(self, like: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(like)}

    def update(self, value: Tensor, grad: Tensor, state: dict[str, Tensor], *, lr: float, step: int) -> None:
        state["momentum"].lerp_(grad - grad.mean(0, keepdim=True), 0.1)
        value.sub_(lr * state["momentum"] / (state["momentum"].norm() + 1e-8))


def loss(scored: Any, micro: Any, totals: Any) -> Tensor:
    ratio_N = (scored.logprobs_N - micro.behaviour_N).exp()
    apart_N = (scored.logprobs_N - micro.reference_N).square()
    return (0.05 * apart_N - ratio_N * micro.credit_N).sum() / totals.tokens


def focal(scored: Any, micro: Any, totals: Any) -> Tensor:
    """Of recorded conversations: a token that is known already counts less."""
    return -((1 - scored.logprobs_N.exp()) * scored.logprobs_N * micro.credit_N).sum() / totals.tokens


def ipo(scored: Any, micro: Any, totals: Any) -> tuple[Tensor, dict[str, Tensor]]:
    gain_N = micro.credit_N * (scored.logprobs_N - micro.reference_N) / micro.length_N
    margin_P = micro.pair_sums(gain_N)
    return (margin_P - 1.0).square().sum() / totals.sequences, {"reward/margin": margin_P.sum()}
