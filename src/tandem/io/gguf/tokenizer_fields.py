"""Say of a tokenizer what a GGUF file says, and prove by encoding that the file's tokenizer is the same.

A file names its pre-tokenizer. The name is found by trying: of those that the reader can rebuild, the one that cuts
sample texts into the same ids. llama.cpp knows the same names.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, cast

from tandem.io.gguf.header import Gguf
from tandem.io.gguf.tokenizer import PRE, write_tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SAMPLES = (
    "Hello, world! It's 1234567 o'clock; we'll see: 3.14 x 10^-2 = ?", "  two  spaces\n\n\tand tabs\r\nlines   \n",
    "def f(x):\n    return x**2  # x's square\n", "Grüße aus Köln, çà et là; ÀÉ ñandú",
    "Привет, мир! 你好，世界。 こんにちは 42",
    "'S 'LL I'VE DON'T don't", "👍🏽 é e\u0301 ½ ² ①", "UPPERlower CamelCase snake_case 100% $5 [a](b) {c} <d>",
)  # fmt: skip


def tokenizer_fields(directory: Path, fields: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return the tokenizer's fields of a model directory. `fields`: the model's. `rows`: of its embeddings. ValueError
    if no GGUF file could say the tokenizer."""
    said = _said(directory, rows)
    if said["tokenizer.ggml.model"] == "llama":
        if why := _why_other(directory, {**fields, **said}):
            raise ValueError(f"its tokenizer cannot be written to a GGUF file: {why}")
        return said
    reasons: list[str] = []
    for name in PRE:
        tried = {**said, "tokenizer.ggml.pre": name}
        if not (why := _why_other(directory, {**fields, **tried})):
            return tried
        reasons.append(f"{name}: {why}")
    raise ValueError(f"its tokenizer cuts text as none that is known here ({'; '.join(reasons)})")


def _why_other(directory: Path, fields: dict[str, Any]) -> str:
    """Return why a file with these fields would have another tokenizer; empty if it would be the same."""
    from tokenizers import Tokenizer

    mine: Any = Tokenizer.from_file(str(directory / "tokenizer.json"))
    mine.no_padding()
    mine.no_truncation()
    with tempfile.TemporaryDirectory() as place:
        try:
            write_tokenizer(Gguf(directory, fields, {}), Path(place))
        except ValueError as error:
            return str(error)
        rebuilt: Any = Tokenizer.from_file(f"{place}/tokenizer.json")
    named = [token for token in fields["tokenizer.ggml.tokens"] if token in mine.get_added_tokens_decoder().values()]
    for text in (*_SAMPLES, "".join(f"a{token}b" for token in named[:8])):
        for with_special in (False, True):
            if (
                mine.encode(text, add_special_tokens=with_special).ids
                != rebuilt.encode(text, add_special_tokens=with_special).ids
            ):
                return f"'{text[:24]}...' becomes other tokens"
    return ""


def _said(directory: Path, rows: int) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    config: dict[str, Any] = _json(directory / "tokenizer_config.json")
    model: dict[str, Any] = told["model"]
    if model.get("type") != "BPE":
        raise ValueError(f"its tokenizer is '{model.get('type')}'; GGUF files are written with BPE alone")
    tokens, kinds = _vocabulary(told, rows)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if not merges:
        raise ValueError(
            "its tokenizer has no merges, as those of model.preset, and llama.cpp loads no file without any"
        )
    said: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    if model.get("byte_fallback"):
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault(merge.replace(" ", ""), rank)
        last = float(-len(merges))
        scores = [-float(ranks[token]) if token in ranks else last for token in tokens]
        prefix = "Prepend" in json.dumps(told.get("normalizer")) or "Metaspace" in json.dumps(told.get("pre_tokenizer"))
        said |= {
            "tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores, "tokenizer.ggml.add_space_prefix": prefix,
        }  # fmt: skip
    else:
        said |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges}
    said |= _special_ids(directory, config, tokens)
    template = directory / "chat_template.jinja"
    written = template.read_text(encoding="utf-8") if template.exists() else config.get("chat_template")
    if isinstance(written, str):
        said["tokenizer.chat_template"] = written
    return said


def _vocabulary(told: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Return texts and types by id, with unused ids for rows of the embeddings that no token has."""
    vocab: dict[str, int] = told["model"]["vocab"]
    unknown = told["model"].get("unk_token")
    found = {number: (token, _NORMAL) for token, number in vocab.items()}
    if told["model"].get("byte_fallback"):
        for token, number in vocab.items():
            kind = _BYTE if len(token) == 6 and token.startswith("<0x") else _UNKNOWN if token == unknown else _NORMAL
            found[number] = (token, kind)
    for added in told.get("added_tokens", ()):
        kind = _CONTROL if added["special"] else _USER_DEFINED
        if added["content"] != unknown or not told["model"].get("byte_fallback"):
            found[added["id"]] = (added["content"], kind)
    if max(found) >= rows:
        raise ValueError(f"its tokenizer has the id {max(found)}, but its embeddings have {rows} rows")
    whole = [found.get(number, (f"[PAD{number}]", _UNUSED)) for number in range(rows)]
    return [token for token, _ in whole], [kind for _, kind in whole]


def _special_ids(directory: Path, config: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Return the ids of special tokens: also ends of an answer that only the generation config names."""
    from tokenizers import Tokenizer

    said: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        told: Any = config.get(f"{name}_token")
        token = cast("dict[str, Any]", told).get("content") if isinstance(told, dict) else told
        if token in tokens:
            said[f"tokenizer.ggml.{key}_token_id"] = tokens.index(token)
    listed: Any = _json(directory / "generation_config.json").get("eos_token_id", [])
    ends: list[Any] = cast("list[Any]", listed) if isinstance(listed, list) else [listed]
    more = [end for end in ends if end not in said.values()]
    for key, end in zip(("eot", "eom"), more, strict=False):
        said[f"tokenizer.ggml.{key}_token_id"] = int(end)
    tokenizer: Any = Tokenizer.from_file(str(directory / "tokenizer.json"))
    first = tokenizer.encode("a").ids[:1]
    said["tokenizer.ggml.add_bos_token"] = first == [said.get("tokenizer.ggml.bos_token_id")]
    return said


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
