"""Load a model's tokenizer, or make a byte-level one from scratch."""

from __future__ import annotations

import hashlib
import json
from itertools import islice, product
from string import ascii_lowercase
from typing import Any

from tandem.errors import SpecError
from tandem.io.gguf.directory import model_directory
from tandem.io.model_path_check import refuse_no_model

END, PAD = "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant", "tool")

# One special token opens a turn and one closes it: prompts are short, and no merge crosses a boundary.
CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|system|>' -}}
{%- for tool in tools -%}{{- (tool.function | default(tool)) | tojson -}}{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.content -%}{{- message.content -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + (call.function | default(call)) | tojson + '</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}{%- if enable_thinking -%}{{- '<think>' -}}{%- endif -%}
{%- endif -%}
"""


def byte_tokenizer(idle: int = 0) -> Any:
    """Make a tokenizer of 256 bytes and a few special tokens. It represents any text, needs no training, and round
    trips keep the ids. `idle`: number of additional unused ids, for the vocabulary size of a released model."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("".join(letters) for letters in product(ascii_lowercase, repeat=4))
    symbols = [*alphabet, *islice(words, idle)]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, PAD, *(f"<|{role}|>" for role in ROLES)])
    tokenizer.add_tokens(
        [AddedToken(word, special=False) for word in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )


def load_tokenizer(path: str, revision: str = "main", field: str = "model.path") -> Any:
    """Load a tokenizer. `field`: the field of the spec that errors name."""
    from transformers import AutoTokenizer

    refuse_no_model(path, revision, field, weights=False)
    path = model_directory(path, field)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SpecError(f"{field} = '{path}': no tokenizer can be loaded from it: {error}") from error
    return _with_template(tokenizer, path, field)


def light_tokenizer(path: str, revision: str = "main", field: str = "model.path") -> Any:
    """Return a model's tokenizer without importing torch, for counting tokens.

    `load_tokenizer` may choose another class with the same vocabulary and merges.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging as transformers_logging

    path = model_directory(path, field)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it warns if a model names another class
    try:
        return _with_template(PreTrainedTokenizerFast.from_pretrained(path, revision=revision), path, field)
    except (OSError, ValueError) as error:
        raise SpecError(f"{field} = '{path}': no tokenizer can be loaded from it: {error}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)


def _with_template(tokenizer: Any, path: str, field: str) -> Any:
    if tokenizer.chat_template is None:
        raise SpecError(
            f"{field} = '{path}': its tokenizer has no chat template; put a chat_template.jinja beside the weights, "
            "or use the instruction-tuned variant of the model"
        )
    return tokenizer


def fingerprint(tokenizer: Any) -> str:
    """Return a fingerprint: equal ones turn the same conversation into the same ids."""
    told = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "special": sorted(tokenizer.all_special_ids),
        "template": tokenizer.chat_template,
    }
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=8).hexdigest()
