"""A model whose parts vote on the version of the weights, and whose every token is the four votes.

The embedding, both layers and the attention's memory of earlier positions each add their own vote to the hidden state:
the version modulo 4, in a block of its own. A token's id is those four digits, and greedy sampling always says them. So
a token that mixes weights of two versions that follow each other shows it; so does one whose keys and values are of an
older version than its weights (most of them, at least), or whose stamp is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tandem.ops.named_tensors import live_tensors, move_in
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import WeightKind, Weights

CHOICES, VOTERS = 4, 4  # embedding, layer 0, layer 1, memory
_HIDDEN = CHOICES * VOTERS
_MEMORY = 3


def make(version: int = 0, *, intermediate: int = 64) -> Any:
    """`intermediate`: the wider, the longer a copy of the weights takes."""
    tokenizer = byte_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=_HIDDEN, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, head_dim=_HIDDEN, intermediate_size=intermediate, max_position_embeddings=512,
        mlp_bias=True, tie_word_embeddings=False, dtype="float32", bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    module: Any = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            tensor.fill_(1.0 if "norm" in name else 0.0)
        for token in range(CHOICES**VOTERS):
            for voter, vote in enumerate(read(token)):
                module.lm_head.weight[token, voter * CHOICES + vote] = 16.0
        second = module.model.layers[1].self_attn  # it sees two votes, brought to length 1 by their norm
        unit = (_HIDDEN / 2) ** 0.5
        for vote in range(CHOICES):
            second.v_proj.weight[vote, vote] = 1 / unit
            second.o_proj.weight[_MEMORY * CHOICES + vote, vote] = 1.0
    write(dict(module.named_parameters()), version)
    return module


@torch.no_grad()
def write(tensors: Mapping[str, Tensor], version: int) -> None:
    """All parts vote for this version from now on."""
    vote = torch.nn.functional.one_hot(torch.tensor(version % CHOICES), CHOICES).float()
    places = ["model.embed_tokens.weight", *(f"model.layers.{layer}.mlp.down_proj.bias" for layer in range(2))]
    for voter, name in enumerate(places):
        tensors[name][..., voter * CHOICES : (voter + 1) * CHOICES] = vote.to(tensors[name].device)


def read(token: int) -> tuple[int, ...]:
    return tuple(token // CHOICES**voter % CHOICES for voter in range(VOTERS))


def torn(token: int) -> bool:
    return token >= CHOICES**VOTERS or len(set(read(token))) > 1


def speaks_for(token: int, version: int) -> bool:
    return not torn(token) and read(token)[0] == version % CHOICES


def save(path: Path, version: int = 0, **options: int) -> Path:
    """As a directory that anything loads."""
    make(version, **options).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


class Teacher:
    """What a publisher needs of a trainer: `vote` is a step."""

    def __init__(self, module: Any, version: int = 0) -> None:
        self.module, self.version = module, version

    def vote(self, version: int) -> None:
        write(dict(self.module.named_parameters()), version)
        self.version = version

    def export(self, kind: WeightKind) -> Weights:
        return Weights(self.version, kind, lambda: live_tensors(self.module))

    @torch.no_grad()
    def score(self, ids: Sequence[int], first: int) -> list[float]:
        ids_T = torch.tensor(ids)
        logprobs_TV = self.module(input_ids=ids_T[None]).logits[0, :-1].log_softmax(-1)
        return logprobs_TV.gather(-1, ids_T[1:, None]).squeeze(-1)[first - 1 :].tolist()

    def base(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def live_in(self, storage: Mapping[str, Tensor]) -> None:
        move_in(live_tensors(self.module), storage)
