"""Draw one token for each row, with the row's own settings.

Shapes: S rows, V vocabulary. The random number of a token is a hash of its request's seed and its position. So a
request draws the same tokens in any batch, and no random state has to be saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Settings:
    """Per-row sampling settings, one tensor each."""

    temperature_S: Tensor
    top_p_S: Tensor
    top_k_S: Tensor
    seed_S: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Settings:
        return cls(
            torch.ones(rows, device=device),
            torch.ones(rows, device=device),
            torch.zeros(rows, dtype=torch.long, device=device),
            torch.zeros(rows, dtype=torch.long, device=device),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        return self.temperature_S, self.top_p_S, self.top_k_S, self.seed_S

    def rows(self, start: int, stop: int) -> Settings:
        return Settings(*(tensor[start:stop] for tensor in self.tensors()))


def draw(logits_SV: Tensor, settings: Settings, drawn_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, their logprobs, and all logprobs of the distribution they were drawn from. `drawn_S`: tokens drawn so
    far."""
    temperature_S1 = settings.temperature_S[:, None]
    greedy_S = settings.temperature_S == 0
    scaled_SV = logits_SV / torch.where(temperature_S1 == 0, 1.0, temperature_S1)
    if bool((settings.top_k_S > 0).any() | (settings.top_p_S < 1).any()):
        # A greedy row keeps every token: its logprobs are the model's at temperature 1.
        top_p_S, top_k_S = settings.top_p_S.masked_fill(greedy_S, 1.0), settings.top_k_S.masked_fill(greedy_S, 0)
        scaled_SV = _keep_likely(scaled_SV, top_p_S, top_k_S)
    logprobs_SV = scaled_SV.log_softmax(-1)
    ids_S = logits_SV.argmax(-1)
    if not bool(greedy_S.all()):
        # In float64: the last entries of a float32 sum over a large vocabulary would round away.
        cumulative_SV = logprobs_SV.double().exp_().cumsum_(-1)
        point_S1 = (uniform(settings.seed_S, drawn_S) * cumulative_SV[:, -1])[:, None]
        sampled_S = (
            torch.searchsorted(cumulative_SV, point_S1, right=True).squeeze(-1).clamp_(max=logits_SV.shape[-1] - 1)
        )
        ids_S = torch.where(greedy_S, ids_S, sampled_S)
    return ids_S, logprobs_SV.gather(-1, ids_S[:, None]).squeeze(-1), logprobs_SV


def _keep_likely(logits_SV: Tensor, top_p_S: Tensor, top_k_S: Tensor) -> Tensor:
    """Set logits to minus infinity that top-k and then top-p exclude; the most likely token always stays."""
    sorted_SV, order_SV = logits_SV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_SV.shape[-1], device=logits_SV.device)
    limit_S = torch.where(top_k_S > 0, top_k_S, logits_SV.shape[-1])
    sorted_SV = sorted_SV.masked_fill(rank_V >= limit_S[:, None], -torch.inf)
    probs_SV = sorted_SV.softmax(-1)
    before_SV = probs_SV.cumsum(-1) - probs_SV
    outside_SV = (before_SV >= top_p_S[:, None]) & (top_p_S[:, None] < 1)
    outside_SV[:, 0] = False
    sorted_SV = sorted_SV.masked_fill(outside_SV, -torch.inf)
    return torch.empty_like(logits_SV).scatter_(-1, order_SV, sorted_SV)


_GOLDEN, _MIX_1, _MIX_2 = (
    -0x61C8864680B583EB,
    -0x40A7B892E31B1A47,
    -0x6B2FB644ECCEEE15,
)  # constants of splitmix64, as signed integers


def uniform(seed_S: Tensor, count_S: Tensor) -> Tensor:
    """Return random numbers in [0, 1), float64: splitmix64 of the seed, then of the count."""
    bits_S = _mix(_mix(seed_S) + (count_S + 1) * _GOLDEN)
    return ((bits_S >> 11) & (2**53 - 1)).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX_2
    return z ^ ((z >> 31) & (2**33 - 1))
