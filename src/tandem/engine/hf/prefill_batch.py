"""The prompts of a prefill: equal ones once, padded to one length, with the images that stand in them. They are
launched kernel by kernel.

Shapes: S requests, P prompts, T positions of the longest, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.hf.admission_queue import Begun, QueuedRequest
from tandem.engine.hf.kv_cache import KvCache
from tandem.engine.hf.row_state import RowState
from tandem.ops import attention_masks
from tandem.ops.image_places import rotary_positions
from tandem.ops.lm_head import Head
from tandem.types import ImageRows, PlacedImage


class PrefillBatch:
    def __init__(self, wave: Sequence[QueuedRequest], device: torch.device, *, end_together: bool) -> None:
        """`end_together`: prompts are padded on the left, as recurrent layers need it."""
        self._wave = wave
        prompts = dict[Begun, int]()
        copies = [prompts.setdefault(request.begun, len(prompts)) for request in wave]
        lengths = [len(prompt.ids) for prompt in prompts]
        self.width = max(lengths)
        self.adapters = [prompt.adapter for prompt in prompts]
        self._end_together = end_together and min(lengths) < self.width
        pads = [[0] * (self.width - length) for length in lengths]
        each = zip(prompts, pads, strict=True)
        padded = [[*pad, *prompt.ids] if self._end_together else [*prompt.ids, *pad] for prompt, pad in each]
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

    def logits(self, head: Head, cache: KvCache, state: RowState) -> Tensor:
        """Put the requests into the rows behind the live ones. Return the logits after each request's prompt. Equal
        prompts are computed once."""
        first, copies_S = cache.num_rows, self.copies_S
        cache.targets, cache.copies, cache.view = slice(first, first + len(copies_S)), copies_S, self.width
        positions_T = torch.arange(self.width, device=copies_S.device)
        if self._end_together:
            hidden_PH = hidden_of_ends(head, cache, self.ids_PT, self.lengths_P)
        else:
            # Padding is on the right: no real token attends to it, and decoding overwrites its positions before it
            # reads them.
            mask = attention_masks.of_prompts(head.config, positions_T)
            positions_PT = positions_T[None].expand_as(self.ids_PT)
            hidden_PTH = head.hidden(self.ids_PT, positions_PT, mask, cache, images=self.images)
            hidden_PH = hidden_PTH[torch.arange(len(hidden_PTH), device=copies_S.device), self.lengths_P - 1]
        logits_PV = head.logits(hidden_PH)
        state.begin(first, self._wave, self.lengths_P[copies_S], self.shifts_P[copies_S])
        return logits_PV[copies_S]


def hidden_of_ends(head: Head, cache: KvCache, ids_PT: Tensor, lengths_P: Tensor) -> Tensor:
    """Return what a model with recurrent layers computes of the last token of each prompt, padded on the left."""
    positions_T = torch.arange(ids_PT.shape[1], device=ids_PT.device)
    pads_P = len(positions_T) - lengths_P
    mask = attention_masks.of_prompts_that_end_together(head.config, pads_P, positions_T)
    cache.own_PT = (positions_T + pads_P[:, None]).clamp_max(len(positions_T) - 1)
    try:
        return head.hidden(ids_PT, (positions_T - pads_P[:, None]).clamp_min(0), mask, cache)[:, -1]
    finally:
        cache.own_PT = None


def _image_rows(
    images_P: Sequence[Sequence[PlacedImage]], width: int, device: torch.device
) -> tuple[ImageRows, list[int]]:
    merge = next(image.merge for images in images_P for image in images)
    rotary, shifts = zip(*(rotary_positions(width, images, merge) for images in images_P), strict=True)
    placed = [(row * width + image.offset, image) for row, images in enumerate(images_P) for image in images]
    places_P = torch.cat([torch.arange(begin, begin + image.length) for begin, image in placed])
    digests = [image.digest for _, image in placed]
    return ImageRows(torch.stack(rotary, 1).to(device), places_P.to(device), digests), [*shifts]
