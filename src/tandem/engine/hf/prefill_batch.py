"""The prompts of a prefill: equal ones once, padded on the right, with the images that stand in them.

Shapes: S requests, P prompts, T positions of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.engine.hf.admission_queue import Begun, QueuedRequest
from tandem.ops.image_places import rotary_positions
from tandem.types import ImageRows, PlacedImage


class PrefillBatch:
    def __init__(self, wave: Sequence[QueuedRequest], device: torch.device) -> None:
        prompts = dict[Begun, int]()
        copies = [prompts.setdefault(request.begun, len(prompts)) for request in wave]
        lengths = [len(prompt.ids) for prompt in prompts]
        self.width = max(lengths)
        self.adapters = [prompt.adapter for prompt in prompts]
        padded = [[*prompt.ids, *[0] * (self.width - len(prompt.ids))] for prompt in prompts]
        self.ids_PT = torch.tensor(padded, device=device)
        self.copies_S = torch.tensor(copies, device=device)
        """The number of each request's prompt."""
        self.lengths_P = torch.tensor(lengths, device=device)
        self.shifts_P = torch.zeros_like(self.lengths_P)
        """How much later than its place the rotary embedding has the token behind each prompt."""
        self.images: ImageRows | None = None
        if any(prompt.images for prompt in prompts):
            self.images, shifts = _image_rows([prompt.images for prompt in prompts], self.width, device)
            self.shifts_P = torch.tensor(shifts, device=device)


def _image_rows(
    images_P: Sequence[Sequence[PlacedImage]], width: int, device: torch.device
) -> tuple[ImageRows, list[int]]:
    merge = next(image.merge for images in images_P for image in images)
    rotary, shifts = zip(*(rotary_positions(width, images, merge) for images in images_P), strict=True)
    placed = [(row * width + image.offset, image) for row, images in enumerate(images_P) for image in images]
    places_P = torch.cat([torch.arange(begin, begin + image.length) for begin, image in placed])
    digests = [image.digest for _, image in placed]
    return ImageRows(torch.stack(rotary, 1).to(device), places_P.to(device), digests), [*shifts]
