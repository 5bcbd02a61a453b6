"""Positions of tokens and images, as a rotary embedding of three axes has them.

Text advances all three axes together. An image's tokens lie in a grid of time, height and width that begins where the
text before it ended; the text after it goes on behind the longest side, so positions there fall behind the tokens'
own numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
