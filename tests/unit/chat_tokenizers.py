"""Tokenizers and templates for the tests of the renderer and the recorder; and a way to write ids down as text."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# As in Qwen3: thoughts of earlier turns are cut from history, tool answers are the user's, thinking can be forbidden.
CHATML = """\
{%- set seen = namespace(last_query=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set seen.last_query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content if message.content is string else '' -%}
{%- if message.role == 'assistant' -%}
{%- set thought = '' -%}
{%- if '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > seen.last_query -%}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n' + (call.function | default(call)) | tojson + '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""

# Merges that reach over every seam if text is encoded as a whole: "\n" + "\n", "\n" + "l", "l" + "o", "4" + "2", ...
MERGES = [("Ċ", "Ċ"), ("Ċ", "l"), ("l", "o"), ("lo", "w"), ("4", "2"), ("h", "i"), ("Ġ", "4"), ("o", "k")]


def chatml_tokenizer(template: str = CHATML) -> Any:
    """A byte-level BPE with merges, and Qwen's special tokens."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    words = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    tokenizer.add_tokens([AddedToken(word, special=False) for word in words])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", chat_template=template)


def written(tokenizer: Any, text: str) -> tuple[list[int], list[bool]]:
    """Ids and mask of text in which [[ ]] stands around what is trained; no merge reaches over a bracket."""
    ids: list[int] = []
    trained: list[bool] = []
    for number, piece in enumerate(text.replace("[[", "\0").replace("]]", "\0").split("\0")):
        piece_ids = tokenizer.encode(piece, add_special_tokens=False)
        ids += piece_ids
        trained += [number % 2 == 1] * len(piece_ids)
    return ids, trained
