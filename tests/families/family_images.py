"""What the family suite has for a model that sees: a tokenizer with marks, a processor, drawn images, and rows."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.text.tokenizer import byte_tokenizer
from tandem.types import PlacedImage, Trajectory

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_PLAIN = "{%- if message.content -%}{{- message.content -}}{%- endif -%}"
_PARTS = (
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content or [] -%}"
    "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{- part.text -}}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}"
)
_SIZE = {"shortest_edge": 256, "longest_edge": 65536}
_PROCESSOR = {
    "processor_class": "Qwen3VLProcessor", "size": _SIZE, "patch_size": 8, "merge_size": 2, "temporal_patch_size": 2,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 8,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1], "in_channels": 3,
}  # fmt: skip


def seeing_tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    assert _PLAIN in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(_PLAIN, _PARTS)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    return tokenizer


TOKENIZER = seeing_tokenizer()
START, END, PAD, VIDEO = TOKENIZER.convert_tokens_to_ids(list(MARKS))


def seeing_sizes(text: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the config, with a language model of these sizes."""
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
    return {
        "text_config": {**text, "vocab_size": len(TOKENIZER), "rope_parameters": rotary},
        "vision_config": {**_TOWER, "initializer_range": text["initializer_range"]},
        "vision_start_token_id": START, "vision_end_token_id": END, "image_token_id": PAD, "video_token_id": VIDEO,
        "tie_word_embeddings": False,
    }  # fmt: skip


def write_processor(path: Path) -> None:
    for name, kind in (("", "image"), ("video_", "video")):
        told = {"image": "Qwen2VLImageProcessorFast", "video": "Qwen3VLVideoProcessor"}[kind]
        content = {f"{kind}_processor_type": told, **_PROCESSOR}
        (path / f"{name}preprocessor_config.json").write_text(json.dumps(content), encoding="utf-8")


def drawn(width: int, height: int, seed: int = 0) -> bytes:
    """Return an image of noise as PNG."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return as_png(Image.fromarray(pixels.numpy()))


def as_png(image: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def shown(images: Any, parts: Sequence[str], answer: str) -> Trajectory:
    """Return a recorded answer. `images`: an ImageSource; `parts`: texts, and digests of its images."""
    ids, placed = list[int](), list[PlacedImage]()
    for part in parts:
        if len(part) != 64:
            ids += TOKENIZER.encode(part)
            continue
        placed.append(PlacedImage(part, len(ids) + 1, images.grid(part), images.length(part)))
        ids += [START, *[PAD] * images.length(part), END]
    spoken = TOKENIZER.encode(answer)
    trained = [False] * len(ids) + [True] * len(spoken)
    ids += spoken
    return Trajectory(ids, trained, [0.0] * len(ids), [-1] * len(ids), images=placed)


@torch.no_grad()
def transformers_logprobs(module: Any, row: Trajectory, images: Any) -> Tensor:
    """Return plain transformers' logprobs of a row's trained tokens."""
    logprobs_TV = _logits(module, row.ids, row.images, images)[:-1].log_softmax(-1)
    return logprobs_TV.gather(1, torch.tensor(row.ids[1:])[:, None])[:, 0][torch.tensor(row.trained[1:])]


@torch.no_grad()
def transformers_answer(module: Any, row: Trajectory, images: Any, most: int = 12) -> str:
    """Return plain transformers' greedy answer to a row's prompt."""
    begin = row.trained.index(True)
    ids = row.ids[:begin]
    while len(ids) < begin + most and ids[-1] != TOKENIZER.eos_token_id:
        ids.append(int(_logits(module, ids, row.images, images)[-1].argmax()))
    return TOKENIZER.decode(ids[begin:], skip_special_tokens=True)


def _logits(module: Any, ids: Sequence[int], placed: Sequence[PlacedImage], images: Any) -> Tensor:
    """It finds the images by their tokens."""
    ids_1T, given = torch.tensor([ids]), dict[str, Any]()
    if placed:
        given["pixel_values"] = torch.cat([images.pixels(each.digest) for each in placed])
        given["image_grid_thw"] = torch.tensor([each.grid for each in placed])
        given["mm_token_type_ids"] = (ids_1T == PAD).int()
        module.model.rope_deltas = None
    return module(ids_1T, use_cache=False, **given).logits[0]
