"""Rebuild the tokenizer that a GGUF file describes, with the special tokens that the file names.

Two kinds are known: byte-level BPE ("gpt2" in the file), and BPE of sentencepiece ("llama"). A file of the first kind
names its pre-tokenizer. With another one, text would become other tokens than in the model's training; so an unknown
pre-tokenizer is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.io.gguf.header import Gguf

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
"""Types of tokens in a GGUF file."""
_MODELS = _BYTE_LEVEL, _ = ("gpt2", "llama")
_SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SPACE = "▁"  # sentencepiece's

_LETTERS, _OTHERS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPLITS = {
    "llama-bpe": rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}|{_OTHERS}",
    "qwen2": rf"{_SHORT}|{_LETTERS}|\p{{N}}|{_OTHERS}",
}
"""The pieces that text is split into before merging, by the file's name of the pre-tokenizer."""
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
PRE = (*_SPLITS, *_SAME, "smollm", "gpt-2")


def write_tokenizer(file: Gguf, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template. ValueError if the tokenizer is not known."""
    check_tokenizer(file)
    tokens, kinds = _tokens(file)
    byte_level = file.fields["tokenizer.ggml.model"] == _BYTE_LEVEL
    built = _byte_level(file, tokens) if byte_level else _sentencepiece(file, tokens, kinds)
    specials = _specials(file, tokens)
    _add(built, tokens, kinds, set(specials.values()))
    _begin_with_bos(file, built, specials)
    _check(built, tokens)
    built.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(file.of("context_length")),
        **specials,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if template := file.fields.get("tokenizer.chat_template"):
        (directory / "chat_template.jinja").write_text(str(template), encoding="utf-8")


def check_tokenizer(file: Gguf) -> None:
    """Raise ValueError if the file's tokenizer cannot be rebuilt."""
    model, pre = file.fields.get("tokenizer.ggml.model"), file.fields.get("tokenizer.ggml.pre", "default")
    if model not in _MODELS:
        raise ValueError(f"its tokenizer is '{model}'; those that are read from GGUF files are {', '.join(_MODELS)}")
    if model == _BYTE_LEVEL and pre not in PRE:
        raise ValueError(
            f"its pre-tokenizer is '{pre}', and another one would cut text into other tokens than the model knows; "
            f"those that are read from GGUF files are {', '.join(PRE)}"
        )
    if model != _BYTE_LEVEL and "tokenizer.ggml.scores" not in file.fields:
        raise ValueError("its tokenizer has no scores, so its merges cannot be told")
    _specials(file, _tokens(file)[0])


def end_ids_of(file: Gguf) -> list[int]:
    """Return the ids with which an answer ends, as the file names them: end of sequence, of turn, of message."""
    named = (file.fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return sorted({int(number) for number in named if number is not None})


def _tokens(file: Gguf) -> tuple[list[str], list[int]]:
    """Return texts and types by id, without the unused ids with which llama.cpp fills the vocabulary."""
    tokens = [str(token) for token in file.fields.get("tokenizer.ggml.tokens", ())]
    kinds = [int(kind) for kind in file.fields.get("tokenizer.ggml.token_type", ())] or [1] * len(tokens)
    if not tokens or len(kinds) != len(tokens):
        raise ValueError("it holds no tokenizer, or a damaged one; write it with one, or name the original directory")
    while kinds[-1] == _UNUSED and tokens[-1].startswith("[PAD"):
        tokens.pop()
        kinds.pop()
    return tokens, kinds


def _specials(file: Gguf, tokens: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, key in _SPECIALS.items():
        number = file.fields.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and 0 <= int(number) < len(tokens):
            found[name] = tokens[int(number)]
    if "eos_token" not in found:
        raise ValueError("its tokenizer has no end of sequence; write the file again with one")
    return found


def _byte_level(file: Gguf, tokens: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = _SAME.get(name := str(file.fields["tokenizer.ggml.pre"]), name)
    merges = [tuple(merge.split(" ", 1)) for merge in file.fields.get("tokenizer.ggml.merges", ())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS)
    if pre in _SPLITS:
        first: Any = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
    else:
        first = pre_tokenizers.Digits(individual_digits=True) if pre == "smollm" else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, whole]) if first is not None else whole
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: Gguf, tokens: list[str], kinds: list[int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    is_gemma = file.architecture.startswith("gemma")
    if is_gemma:  # llama.cpp writes tokens of several spaces as spaces, and marks them as added
        for number, token in enumerate(tokens):
            if token and not token.strip(" "):
                tokens[number], kinds[number] = _SPACE * len(token), 1
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # Gemma's scores are not in the order of its merges; the order of its tokens is.
    scores = [-number for number in range(len(tokens))] if is_gemma else file.fields["tokenizer.ggml.scores"]
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    merges = _merges(vocabulary, scores)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", _SPACE)
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.fields.get("tokenizer.ggml.add_space_prefix", not is_gemma):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Any) -> list[tuple[str, str]]:
    """Return the merges that a sentencepiece vocabulary implies: the best score first."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, number in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-float(scores[number]), vocabulary[left], vocabulary[right], (left, right)))
    return [merge for *_, merge in sorted(found)]


def _add(tokenizer: Any, tokens: list[str], kinds: list[int], specials: set[str]) -> None:
    from tokenizers import AddedToken

    for token, kind in zip(tokens, kinds, strict=True):
        if kind == _CONTROL or token in specials:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _begin_with_bos(file: Gguf, tokenizer: Any, specials: Mapping[str, str]) -> None:
    """Begin texts that are encoded with special tokens as the file says."""
    from tokenizers import processors

    bos = specials.get("bos_token")
    if bos is None or not file.fields.get("tokenizer.ggml.add_bos_token", False):
        return
    number = tokenizer.token_to_id(bos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, number)]
    )


def _check(tokenizer: Any, tokens: list[str]) -> None:
    """Raise ValueError unless every token has the id that it has in the file."""
    vocabulary = tokenizer.get_vocab()
    for number, token in enumerate(tokens):
        if vocabulary.get(token) != number:
            raise ValueError(f"its token {number} cannot be rebuilt: it is '{token}', as another token is, too")
    if len(vocabulary) != len(tokens):
        raise ValueError(f"its tokenizer would have {len(vocabulary)} tokens, where the file has {len(tokens)}")
