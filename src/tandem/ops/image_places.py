"""Where images stand among tokens: whether they can, and the positions that a rotary embedding of three axes has there.

Text advances all three axes together. An image's tokens lie in a grid of time, height and width that begins where the
text before it ended; the text after it goes on behind the longest side, so positions there fall behind the tokens'
own numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.protocols import ImageSource
from tandem.types import PlacedImage


def rotary_positions(length: int, images: Sequence[PlacedImage], merge: int) -> tuple[Tensor, int]:
    """Return the positions (3 x length) of a sequence that begins with its first token, and how much later than its
    number a token behind it is. `images`: in their order; one may be cut off at the end."""
    parts, at, token = list[Tensor](), 0, 0
    for image in images:
        parts.append(_text(at, image.offset - token))
        at += image.offset - token
        time, height, width = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
        axes = torch.meshgrid(torch.arange(time), torch.arange(height), torch.arange(width), indexing="ij")
        parts.append(torch.stack([axis.flatten() for axis in axes]) + at)
        at, token = at + max(time, height, width), image.offset + image.length
    parts.append(_text(at, max(0, length - token)))
    return torch.cat(parts, 1)[:, :length], at - token


def _text(begin: int, count: int) -> Tensor:
    return torch.arange(begin, begin + count).expand(3, -1)


def why_misplaced(prompt_ids: Sequence[int], images: Sequence[PlacedImage], source: ImageSource) -> str:
    """Return why the images cannot stand so in a prompt; empty if they can. ImageError if one cannot be read."""
    end = 0
    for image in images:
        what, begin = f"image {image.digest[:12]}", image.offset
        grid, length = source.grid(image.digest), source.length(image.digest)
        if (image.grid, image.length) != (grid, length):
            return f"{what}: it has {length} tokens of grid {grid}, not {image.length} of {image.grid}"
        if begin < end or [*prompt_ids[begin : begin + length]] != [source.pad_id] * length:
            return f"{what}: the prompt has no place for its {length} tokens at {begin}"
        end = image.end
    return ""
