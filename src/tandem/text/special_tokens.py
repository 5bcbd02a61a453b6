"""Mend special tokens that a tokenizer lacks or names wrongly, and say so. An export has the mended ones."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

_PADS = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>", "<|end_of_text|>")
"""Special tokens that released models pad with; the unknown token comes next."""


def mend(tokenizer: Any, end_id: int, inside: Collection[int]) -> tuple[str, ...]:
    """Give a tokenizer the end of sequence and the padding token that it lacks; return a sentence for each change.

    `end_id`: the chat template's end of an assistant's turn. `inside`: ids that the template writes within a prompt. An
    end of sequence among them would end an answer where a turn only begins.
    """
    said: list[str] = []
    eos_id, end = tokenizer.eos_token_id, tokenizer.convert_ids_to_tokens(end_id)
    if eos_id is None:
        said.append(f"the tokenizer names no end of sequence; '{end}' is used, which ends a turn in its chat template")
        tokenizer.eos_token = end
    elif eos_id != end_id and eos_id in inside:
        said.append(
            f"the tokenizer's end of sequence '{tokenizer.eos_token}' does not end a turn in its chat template; "
            f"'{end}' does, and is used"
        )
        tokenizer.eos_token = end
    if tokenizer.pad_token_id is None:
        special = set(tokenizer.all_special_tokens) | {str(token) for token in tokenizer.added_tokens_decoder.values()}
        ends = {end, tokenizer.eos_token}
        choices = [*_PADS, tokenizer.unk_token]
        tokenizer.pad_token = next((pad for pad in choices if pad in special and pad not in ends), tokenizer.eos_token)
        said.append(f"the tokenizer names no padding token; '{tokenizer.pad_token}' is used")
    return tuple(said)
