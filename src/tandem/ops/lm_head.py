"""Compute logprobs from hidden states with a model's lm-head, without a `[tokens, vocab]` tensor in memory.

Shapes: N tokens, H hidden, V vocabulary, C tokens in a chunk.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tandem.errors import SpecError
from tandem.ops import byte_sizes, fused_logprobs
from tandem.ops.vision import Vision
from tandem.types import ImageRows


class Head:
    """The lm-head of a causal model, with its architecture's changes of the logits (scale, softcap).

    Trainer and engine both use this class, so that a token's logprob means the same on both sides. Padding rows of the
    vocabulary (`num_ids` and above), which are no tokens, are left out of the distribution.
    """

    def __init__(self, module: Any, num_ids: int, vision: Vision | None = None) -> None:
        """`vision`: for `images`, where the model sees."""
        config = module.config.get_text_config()
        self.config = module.config
        self.body: nn.Module = module.base_model
        self.vision = vision
        self.linear: nn.Module = module.get_output_embeddings()
        self.num_ids = min(num_ids, config.vocab_size)
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )

    def hidden(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        mask: Any,
        cache: Any = None,
        images: ImageRows | None = None,
        **more: Any,
    ) -> Tensor:
        """`images`: those among the ids, with the positions of the rotary embedding; `positions_BT` then only decides
        the mask, where none is given. `more`: for the attention, as ops/packed_attention.py takes it."""
        given = {"attention_mask": mask, "past_key_values": cache, "use_cache": cache is not None, **more}
        if images is None:
            return self.body(input_ids=ids_BT, position_ids=positions_BT, **given).last_hidden_state
        return self._seeing(ids_BT, positions_BT, images, given).last_hidden_state

    def _seeing(self, ids_BT: Tensor, positions_BT: Tensor, images: ImageRows, given: dict[str, Any]) -> Any:
        """Run the body with features at the places of images. Their ids do not matter: a model may sample such an id
        where there is no image."""
        assert self.vision is not None, "images are given to a head without a vision tower"
        body: Any = self.body
        embeds_BTH = body.get_input_embeddings()(ids_BT)
        if images.digests:
            embeds_PH, deep = self.vision.features(images.digests)
            flat_H = embeds_BTH.flatten(0, 1).index_copy(0, images.places_P, embeds_PH.to(embeds_BTH.dtype))
            embeds_BTH = flat_H.view_as(embeds_BTH)
            order_P = images.places_P.argsort()  # the body adds features in the order of the row's places
            seen_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
            seen_BT.view(-1)[images.places_P] = True
            given |= {"visual_pos_masks": seen_BT, "deepstack_visual_embeds": [layer[order_P] for layer in deep]}
        positions_4BT = torch.cat([positions_BT[None], images.rotary_3BT])  # as transformers has them
        return body.language_model(inputs_embeds=embeds_BTH, position_ids=positions_4BT, **given)

    def why_not_fused(self, top_p: float = 1.0) -> str:
        """Return why `logprobs` uses the module in checkpointed chunks instead of the kernel; empty if it uses the
        kernel."""
        if top_p < 1:
            return f"a nucleus (top_p = {top_p:g}) needs every logit of a row, sorted"
        if type(self.linear) is not nn.Linear:
            return f"the output embedding is a {type(self.linear).__name__}, not a plain nn.Linear"
        weight_VH: Tensor = self.linear.weight
        if self.linear.bias is not None:
            return "the output embedding has a bias"
        if self.linear._forward_hooks or self.linear._forward_pre_hooks:
            return "the output embedding has forward hooks"
        if type(weight_VH) not in (nn.Parameter, Tensor):
            return f"the output embedding's weight is a {type(weight_VH).__name__}"
        if weight_VH.dtype not in (torch.bfloat16, torch.float32, torch.float64):
            return f"the output embedding's weight is {weight_VH.dtype}, too narrow for the gradient of a logit"
        if weight_VH.is_cuda and find_spec("triton") is None:
            return "triton is not installed"
        return ""

    def logits(self, hidden_NH: Tensor) -> Tensor:
        if not self.why_not_fused():
            logits_NV = fused_logprobs.logits(hidden_NH, self._weight())[..., : self.num_ids]
        else:
            logits_NV = self.linear(hidden_NH)[..., : self.num_ids].float()
        if self._scale != 1.0:
            logits_NV = logits_NV * self._scale
        if self._softcap:
            logits_NV = torch.tanh(logits_NV / self._softcap) * self._softcap
        return logits_NV

    def logprobs(
        self,
        hidden_NH: Tensor,
        ids_N: Tensor,
        temperature: float,
        top_p: float = 1.0,
        workspace_bytes: int = byte_sizes.WORKSPACE_BYTES,
    ) -> tuple[Tensor, Tensor]:
        """Return the logprob of each id and the entropy at each position, under the sampling distribution."""
        if not self.why_not_fused(top_p):
            return fused_logprobs.score(
                hidden_NH,
                self._weight(),
                ids_N,
                num_ids=self.num_ids,
                scale=self._scale,
                softcap=self._softcap,
                temperature=temperature,
                workspace_bytes=workspace_bytes,
            )
        chunk = max(1, workspace_bytes // (self.num_ids * byte_sizes.bytes_a_logit(top_p)))
        pieces = [
            checkpoint(self._score, hidden_CH, ids_C, temperature, top_p, use_reentrant=False)
            for hidden_CH, ids_C in zip(hidden_NH.split(chunk), ids_N.split(chunk), strict=True)
        ]
        logprobs_N, entropy_N = (torch.cat(part) for part in zip(*pieces, strict=True))
        return logprobs_N, entropy_N.detach()

    def divergence(
        self, hidden_NH: Tensor, reference: Head, then_NH: Tensor, workspace_bytes: int = byte_sizes.WORKSPACE_BYTES
    ) -> Tensor:
        """Return KL(reference || this) at each position, over all ids. `then_NH`: hidden states of the reference."""

        def one(hidden_CH: Tensor, then_CH: Tensor) -> Tensor:
            with torch.no_grad():
                then_CV = reference.logits(then_CH).log_softmax(-1)
            return (then_CV.exp() * (then_CV - self.logits(hidden_CH).log_softmax(-1))).sum(-1)

        chunk = max(1, workspace_bytes // (self.num_ids * byte_sizes.bytes_a_logit(1.0)))
        pairs = zip(hidden_NH.split(chunk), then_NH.split(chunk), strict=True)
        return torch.cat([checkpoint(one, *pair, use_reentrant=False) for pair in pairs])

    def buffer_bytes(self, num_tokens: int, top_p: float = 1.0) -> tuple[int, int]:
        """Return the temporary memory of the forward and of the backward pass over so many tokens."""
        if not self.why_not_fused(top_p):
            return fused_logprobs.buffer_bytes(num_tokens, self._weight())
        held = byte_sizes.unfused_head_bytes(num_tokens, self.num_ids, top_p)
        return held, held

    def _weight(self) -> Tensor:
        return cast(Tensor, self.linear.weight)

    def _score(self, hidden_CH: Tensor, ids_C: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
        logits_CV = self.logits(hidden_CH)
        if temperature != 1.0:
            # Divide by a tensor, as the engine does: a GPU multiplies by the inverse of a plain number, and the last
            # bit may decide.
            logits_CV = logits_CV / logits_CV.new_full((), temperature)
        if top_p < 1:
            logits_CV = logits_CV.masked_fill(outside_nucleus(logits_CV.detach(), ids_C, top_p), -torch.inf)
        log_z_C = logits_CV.logsumexp(-1)
        logprobs_C = logits_CV.gather(-1, ids_C[:, None]).squeeze(-1) - log_z_C
        with torch.no_grad():
            kept_CV = logits_CV if top_p >= 1 else logits_CV.masked_fill(logits_CV == -torch.inf, 0)
            entropy_C = log_z_C - ((logits_CV - log_z_C[:, None]).exp() * kept_CV).sum(-1)
        return logprobs_C, entropy_C

    @torch.no_grad()
    def check(self, module: Any) -> None:
        """Refuse an architecture whose head computes something that this class does not know."""
        device = next(module.parameters()).device
        ids = torch.arange(8, device=device)[None] % self.num_ids
        try:
            hidden = self.hidden(ids, torch.arange(8, device=device)[None], None)
            theirs = module.forward(input_ids=ids).logits[..., : self.num_ids].float()
        except (AttributeError, LookupError, TypeError, ValueError) as error:  # of the code of an unusual model
            raise SpecError(
                f"model: {type(module).__name__} cannot be run as a plain language model: {error}; use another "
                "architecture (docs/families.md lists those that were tried)"
            ) from error
        ours = self.logits(hidden)
        gap = (ours - theirs).abs().max().item()
        # The module's logits are rounded to the model's dtype after the product and after each later step.
        tolerance = max(1e-3, 2 * torch.finfo(hidden.dtype).eps)
        if not gap <= tolerance * max(1.0, theirs.abs().max().item()):
            raise SpecError(
                f"model: the lm-head of {type(module).__name__} is not supported: its logits are {gap:.3g} off; "
                "use an architecture with a plain, scaled or soft-capped head"
            )


def outside_nucleus(logits_CV: Tensor, ids_C: Tensor, top_p: float) -> Tensor:
    """Return the ids that top-p excludes, by the engine's rule: an id stays if all likelier ids together have less than
    `top_p`. The likeliest id always stays, and so does the drawn id, which the engine's logits had included.
    """
    sorted_CV, order_CV = logits_CV.sort(dim=-1, descending=True, stable=True)
    probs_CV = sorted_CV.softmax(-1)
    beyond_CV = probs_CV.cumsum(-1) - probs_CV >= probs_CV.new_full((), top_p)
    beyond_CV[:, 0] = False
    outside_CV = torch.empty_like(beyond_CV).scatter_(-1, order_CV, beyond_CV)
    return outside_CV.scatter_(-1, ids_C[:, None], False)
