"""From hidden states to logprobs, without ever holding `[tokens, vocab]`.

Shapes: N tokens, H hidden, V vocabulary, C tokens in a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tandem.errors import SpecError


class Head:
    """The lm-head of a causal model with whatever its architecture does to logits afterwards.

    Trainer and engine both score through this class, so that a token's logprob means the same on both sides. Rows of a
    padded vocabulary that the tokenizer cannot name (`num_ids` and above) are left out of the distribution.
    """

    def __init__(self, module: Any, num_ids: int) -> None:
        config = module.config.get_text_config()
        self.body: nn.Module = module.base_model
        self.linear: nn.Module = module.get_output_embeddings()
        self.num_ids = min(num_ids, config.vocab_size)
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )

    def hidden(self, ids_BT: Tensor, positions_BT: Tensor, mask: Any, cache: Any = None) -> Tensor:
        out = self.body(
            input_ids=ids_BT,
            position_ids=positions_BT,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out.last_hidden_state

    def logits(self, hidden_NH: Tensor) -> Tensor:
        logits_NV = self.linear(hidden_NH)[..., : self.num_ids].float()
        if self._scale != 1.0:
            logits_NV = logits_NV * self._scale
        if self._softcap:
            logits_NV = torch.tanh(logits_NV / self._softcap) * self._softcap
        return logits_NV

    def logprobs(
        self, hidden_NH: Tensor, ids_N: Tensor, temperature: float, chunk: int = 2048
    ) -> tuple[Tensor, Tensor]:
        """Logprob of each id, entropy at each position; logits live for one chunk, in forward and in backward."""
        pieces = [
            checkpoint(self._score, hidden_CH, ids_C, temperature, use_reentrant=False)
            for hidden_CH, ids_C in zip(hidden_NH.split(chunk), ids_N.split(chunk), strict=True)
        ]
        logprobs_N, entropy_N = (torch.cat(part) for part in zip(*pieces, strict=True))
        return logprobs_N, entropy_N.detach()

    def _score(self, hidden_CH: Tensor, ids_C: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits_CV = self.logits(hidden_CH)
        if temperature != 1.0:
            logits_CV = logits_CV / temperature
        log_z_C = logits_CV.logsumexp(-1)
        logprobs_C = logits_CV.gather(-1, ids_C[:, None]).squeeze(-1) - log_z_C
        with torch.no_grad():
            entropy_C = log_z_C - ((logits_CV - log_z_C[:, None]).exp() * logits_CV).sum(-1)
        return logprobs_C, entropy_C

    @torch.no_grad()
    def check(self, module: Any) -> None:
        """Refuse an architecture whose head does something that this class does not know."""
        device = next(module.parameters()).device
        ids = torch.arange(8, device=device)[None] % self.num_ids
        ours = self.logits(self.hidden(ids, torch.arange(8, device=device)[None], None))
        theirs = module(input_ids=ids).logits[..., : self.num_ids].float()
        gap = (ours - theirs).abs().max().item()
        if not gap <= 1e-3 * max(1.0, theirs.abs().max().item()):
            raise SpecError(
                f"model: the lm-head of {type(module).__name__} is not understood: its logits are {gap:.3g} off ours; "
                "use an architecture with a plain, scaled or soft-capped head"
            )
