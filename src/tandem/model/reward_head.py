"""A reward model: the body of a causal model, and a head that gives an answer one number, at the token that ends it.

The class is transformers' ...ForSequenceClassification with one label, so that an export is loaded as any such model.
It takes the number at the last token that is not padding: so the padding id must be another one than the end of a turn.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem.errors import SpecError
from tandem.model.policy import CausalPolicy
from tandem.ops.lm_head import Head
from tandem.types import MicroBatch


class ScoreHead(Head):
    """Gives each token the number of the text up to it, in the place of a logprob."""

    def __init__(self, module: Any, num_ids: int) -> None:
        self.config, self.body, self.linear = module.config, module.base_model, module.score
        self.num_ids = min(num_ids, module.config.get_text_config().vocab_size)

    def why_not_fused(self, top_p: float = 1.0) -> str:
        return "a reward model's head has one output"

    def logprobs(self, hidden_NH: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        score_N = self.linear(hidden_NH)[..., 0].float()
        return score_N, torch.zeros_like(score_N).detach()

    def buffer_bytes(self, num_tokens: int, top_p: float = 1.0) -> tuple[int, int]:
        return 8 * num_tokens, 8 * num_tokens

    def check(self, module: Any) -> None:
        """Do nothing: the head is transformers' own."""


class RewardPolicy(CausalPolicy):
    """`logprobs` returns scores: of each trained token that of the text which ends with it."""

    def _make_head(self, module: Any) -> Head:
        return ScoreHead(module, len(self.tokenizer))

    def _scored(self, head: Head, micro: MicroBatch, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
        return super()._scored(head, replace(micro, source_N=micro.target_N), temperature, top_p)


def with_reward_head(module: Any, tokenizer: Any, end_id: int) -> Any:
    """Return a reward model with the body of `module`; its head is 0, so that before training all answers tie."""
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(module.config)
    config.num_labels, config.pad_token_id = 1, _padding(tokenizer, end_id)
    try:
        with torch.random.fork_rng(devices=[]):
            made: Any = AutoModelForSequenceClassification.from_config(
                config, attn_implementation=module.config._attn_implementation
            )
        made.base_model.load_state_dict(module.base_model.state_dict())
        torch.nn.init.zeros_(made.score.weight)
    except (ValueError, RuntimeError, AttributeError) as error:
        raise SpecError(
            f"algorithm.kind = 'reward_model': {type(module).__name__} has no counterpart with one score in "
            f"transformers ({error}); choose another architecture"
        ) from error
    return made


def _padding(tokenizer: Any, end_id: int) -> int | None:
    """Make a special token that ends no turn the padding, and return its id. If there is none there is no padding:
    transformers then refuses several texts at once, rather than take a score at the wrong token."""
    wanted = (tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token, *tokenizer.all_special_tokens)
    for token in filter(None, wanted):
        if (token_id := tokenizer.convert_tokens_to_ids(token)) != end_id:
            tokenizer.pad_token = token
            return token_id
    tokenizer.pad_token = None
    return None
