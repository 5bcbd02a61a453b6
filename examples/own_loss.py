"""Losses, an optimizer and a callback of your own: examples/own_loss.toml names a loss for RL and the other two by
path, examples/own_preference.toml the loss `ipo` for pairs of answers."""

from __future__ import annotations

import torch
from torch import Tensor

import tandem


def loss(
    scored: tandem.TokenLogprobs, micro: tandem.MicroBatch, totals: tandem.Totals, *, clip: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective, written out: N trained tokens of this micro-batch, `totals` of the whole step."""
    ratio_N = (scored.logprobs_N - micro.behaviour_N).exp()
    clipped_N = ratio_N.clamp(1 - clip, 1 + clip)
    objective_N = torch.minimum(ratio_N * micro.credit_N, clipped_N * micro.credit_N)
    return -objective_N.sum() / totals.tokens, {"loss/clipped": (ratio_N != clipped_N).sum()}


def ipo(
    scored: tandem.TokenLogprobs, micro: tandem.MicroBatch, totals: tandem.Totals, *, beta: float = 0.1
) -> tuple[Tensor, dict[str, Tensor]]:
    """IPO: pulls the margin of each of the P pairs to 1 / (2 beta), where DPO pushes it up without an end."""
    assert micro.reference_N is not None  # algorithm.reference = true
    gain_N = micro.credit_N * (scored.logprobs_N - micro.reference_N) / micro.length_N
    margin_P = micro.pair_sums(gain_N)  # credit is 1 for the better answer and -1 for the other
    pairs = totals.sequences / 2
    right = (margin_P > 0).sum() * totals.tokens / pairs  # a metric is divided by the step's tokens
    return (margin_P - 1 / (2 * beta)).square().sum() / pairs, {"reward/accuracy": right}


class SignMomentum:
    """Moves every weight by the learning rate, in the direction of the mean gradient."""

    by_rows = True  # each weight is updated by itself, so rows of a matrix may be updated apart

    def init(self, like: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(like)}

    def update(self, value: Tensor, grad: Tensor, state: dict[str, Tensor], *, lr: float, step: int) -> None:
        state["momentum"].lerp_(grad, 0.1)
        value.sub_(lr * state["momentum"].sign())


class Lengths:
    """Adds the mean answer length of each step to metrics.jsonl, from the batch by token."""

    def on_step(self, step: tandem.Step) -> dict[str, float]:
        return {"mine/trained_tokens": float(step.tokens.mask_T.sum()) / len(step.tokens.rewards_S)}
