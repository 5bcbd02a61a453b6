"""A small random model that sees, images without files, and the plain way to score prompts with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from engines import END, filtered
from torch import Tensor

from tandem.engine.hf.engine import EmbeddedEngine
from tandem.errors import ImageError
from tandem.ops.vision import Vision
from tandem.types import Completion, PlacedImage, Sampling

IDS, PAD, UNUSED = 97, 90, 98
"""Token ids below IDS are sampled. UNUSED takes the place of PAD where transformers must find the images' places."""
MERGE = 2


class MadeImages:
    """The images of a run: their pixels are drawn from their digests."""

    pad_id = PAD

    def __init__(self, **grids: tuple[int, int, int]) -> None:
        self._grids = grids

    def grid(self, digest: str) -> tuple[int, int, int]:
        if digest not in self._grids:
            raise ImageError(f"image {digest}: it cannot be read")
        return self._grids[digest]

    def length(self, digest: str) -> int:
        return torch.tensor(self.grid(digest)).prod().item() // MERGE**2

    def pixels(self, digest: str) -> Tensor:
        generator = torch.Generator().manual_seed(int.from_bytes(digest.encode()))
        return torch.rand(int(torch.tensor(self.grid(digest)).prod()), 3 * 2 * 8 * 8, generator=generator) * 2 - 1

    def key(self, digest: str) -> str:
        return digest


IMAGES = MadeImages(cat=(1, 4, 6), dog=(1, 4, 6), map=(1, 8, 4))


def qwen3_vl() -> Any:
    special = {
        "image_token_id": PAD, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
    }  # fmt: skip
    text = {
        "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 160,
        "eos_token_id": END, "pad_token_id": None, "bos_token_id": None,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True, "mrope_section": [6, 5, 5],
        },
    }  # fmt: skip
    tower = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 8,
        "spatial_merge_size": MERGE, "temporal_patch_size": 2, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1], "in_channels": 3,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **special)
    module = transformers.Qwen3VLForConditionalGeneration(config).float().eval()
    for tensor in module.parameters():
        if tensor.ndim > 1:
            torch.nn.init.normal_(tensor, std=0.12)
    return module.requires_grad_(False)


def engine_of(module: Any, **options: Any) -> EmbeddedEngine:
    options = {"vision": Vision(module, IMAGES), "end_ids": frozenset[int]()} | options
    return EmbeddedEngine(module, num_ids=IDS, decode=lambda ids: "", **options)


def asked(*parts: int | str, **sampling: Any) -> tuple[list[int], Sampling]:
    """Return a request. An int is so many tokens of text, drawn; a word is an image."""
    prompt, images = list[int](), list[PlacedImage]()
    generator = torch.Generator().manual_seed(len(parts))
    for part in parts:
        if isinstance(part, str):
            images.append(PlacedImage(part, len(prompt), IMAGES.grid(part), IMAGES.length(part)))
            prompt += [PAD] * IMAGES.length(part)
        else:
            prompt += torch.randint(0, PAD, (part,), generator=generator).tolist()
    return prompt, Sampling(**{"max_tokens": 12, "images": tuple(images), **sampling})


@torch.no_grad()
def scored(module: Any, prompt: Sequence[int], completion: Completion, sampling: Sampling) -> list[float]:
    """Return a completion's logprobs by one forward of transformers. It finds images by their token, which is one that
    no text has."""
    ids_T = torch.tensor([*prompt, *completion.ids])
    kinds_T = torch.zeros_like(ids_T)
    for image in sampling.images:
        kinds_T[image.offset : image.offset + image.length] = 1
    given: dict[str, Any] = {}
    if sampling.images:
        given["pixel_values"] = torch.cat([IMAGES.pixels(image.digest) for image in sampling.images])
        given["image_grid_thw"] = torch.tensor([image.grid for image in sampling.images])
        given["mm_token_type_ids"] = kinds_T[None].int()
    module.config.image_token_id, module.model.rope_deltas = UNUSED, None
    logits_TV = module(input_ids=ids_T.masked_fill(kinds_T == 1, UNUSED)[None], **given).logits[0, :, :IDS].double()
    module.config.image_token_id = PAD
    for token, bias in sampling.shape.logit_bias:
        logits_TV[:, token] += bias
    rows = logits_TV[len(prompt) - 1 : -1]
    return [filtered(row, sampling)[token].log().item() for row, token in zip(rows, completion.ids, strict=True)]
