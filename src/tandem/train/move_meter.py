"""Measure what an update moves: the mean difference of logprobs from before to after it, on a few of a step's tokens.

The same few tokens are computed twice, just before the update and just after it, in the same shape. The logprobs of the
training pass would not do: in 16 bits a batch of another shape is rounded otherwise, and a small update would seem to
move as much as rounding does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from tandem.ops.packed_attention import pack
from tandem.types import ImageRows, MicroBatch, PackedRows

_TOKENS, _LEAST_TOKENS, _SHARE_OF_TOKENS = 1024, 512, 8
"""Trained tokens that suffice, and of a small micro-batch an eighth, but at least 512. By token the differences spread
by about their mean, so the mean of 1,024 is off by about 3 %, and by more where tokens of a sequence move together: it
serves as a bound of twice its size, and with 128 tokens of a tiny model's short answers that was once too little."""
_SEQUENCES = 8
"""At least so many sequences share those tokens, if there are as many: what one answer moves by may be unusual."""
_POSITIONS, _LEAST_POSITIONS, _SHARE_OF_POSITIONS = 3072, 1024, 2
"""Positions to compute at most beside the first sequence, prompts included, and of a small micro-batch half, but at
least 1,024. Where prompts are so long that no other prompt has room, siblings that share the first one have."""
_TRIED = 256
"""Sequences to try at most, each of which takes the CPU 50 us."""


class MoveMeter:
    """Measures one update after the other: `note` the step's micro-batches, `before` the update, `after` it."""

    def __init__(self) -> None:
        self._micro: MicroBatch | None = None
        self._scored: tuple[MicroBatch, Tensor] | None = None

    def note(self, micro: MicroBatch) -> None:
        """The micro-batch with the most trained tokens is kept; a part of it is measured."""
        if len(micro.target_N) > (0 if self._micro is None else len(self._micro.target_N)):
            self._micro = micro

    def before(self, score: Callable[[MicroBatch], Tensor]) -> None:
        micro, self._micro, self._scored = self._micro, None, None
        if micro is not None:
            few = few_tokens(micro)
            self._scored = few, score(few)

    def after(self, score: Callable[[MicroBatch], Tensor]) -> float:
        """Return what the update moved, in nats a token; NaN if the step had no micro-batch."""
        scored, self._scored = self._scored, None
        return math.nan if scored is None else (score(scored[0]) - scored[1]).abs().mean().item()


def few_tokens(micro: MicroBatch) -> MicroBatch:
    """Return a part of a micro-batch as one row: of some sequences, spread over it, the prompt and the first trained
    tokens. Their logprobs are the same, because no token depends on a later one."""
    if micro.ids_BT.numel() <= _LEAST_POSITIONS:
        return micro
    kept, chosen = _choose(micro)
    places = torch.nonzero(kept).flatten()
    images = None
    if micro.images is not None:
        runs = _image_runs(micro.images)
        if len(runs) != len(micro.images.digests):  # images without a token between them cannot be told apart
            return micro
        images = _images_within(micro.images, runs, kept)
    device = micro.ids_BT.device
    new_place_of = (kept.cumsum(0) - 1).to(device)
    places, chosen = places.to(device), chosen.to(device)
    owners, parents = (each.cpu()[kept] for each in _segments(micro))
    numbers, segments_T = owners.unique(return_inverse=True)
    parents_T = torch.searchsorted(numbers, parents)
    packed = pack(segments_T[None], parents_T[None], device)
    if micro.packed.spans[4] is not None and packed.spans[4] is None:  # layers would be compiled again without keys
        keys = torch.arange(len(places), device=device)
        packed = PackedRows((*packed.spans[:4], keys), packed.tokens_T, packed.place_of)
    return replace(
        micro,
        ids_BT=micro.ids_BT.flatten()[places][None],
        positions_BT=micro.positions_BT.flatten()[places][None],
        segments_BT=segments_T[None].to(device),
        parents_BT=parents_T[None].to(device),
        packed=packed,
        source_N=new_place_of[micro.source_N[chosen]],
        target_N=new_place_of[micro.target_N[chosen]],
        credit_N=micro.credit_N[chosen],
        behaviour_N=micro.behaviour_N[chosen],
        versions_N=micro.versions_N[chosen],
        length_N=micro.length_N[chosen],
        sequence_N=micro.sequence_N[chosen],
        reference_N=None if micro.reference_N is None else micro.reference_N[chosen],
        images=images,
    )


def _choose(micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return which flat positions to compute, and the indices of the trained tokens to score; both on the CPU."""
    owners, parents = (each.cpu() for each in _segments(micro))
    target_N = micro.target_N.cpu()
    _, counts = micro.sequence_N.cpu().unique_consecutive(return_counts=True)
    ends = counts.cumsum(0).tolist()
    enough = min(max(len(target_N) // _SHARE_OF_TOKENS, _LEAST_TOKENS), _TOKENS)
    room = min(max(len(owners) // _SHARE_OF_POSITIONS, _LEAST_POSITIONS), _POSITIONS)
    share = enough // min(len(ends), _SEQUENCES)
    order_T = torch.arange(len(owners))
    kept, num_tokens = torch.zeros(len(owners), dtype=torch.bool), 0
    chosen: list[Tensor] = []
    for each in islice(_spread(len(ends)), _TRIED):
        begin = ends[each - 1] if each else 0
        end = min(begin + share, ends[each])
        last = target_N[end - 1]
        own = (owners == owners[last]) & (order_T <= last)
        with_it = kept | own | (owners == parents[last]) & (order_T <= last)
        new = int(with_it.sum()) - int(kept.sum())
        if chosen and new > room:
            continue
        room -= new if chosen else 0
        kept = with_it
        chosen.append(torch.arange(begin, end))
        num_tokens += end - begin
        if num_tokens >= enough:
            break
    return kept, torch.cat(chosen).sort().values


def _segments(micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return of each flat position its segment and the segment that it also sees, by numbers of the whole micro-batch;
    below 0 for padding."""
    rows, width = micro.segments_BT.shape
    first_B1 = torch.arange(rows, device=micro.segments_BT.device)[:, None] * (width + 1)
    numbers = (each.where(each < 0, each + first_B1) for each in (micro.segments_BT, micro.parents_BT))
    owners, parents = (each.flatten() for each in numbers)
    return owners, parents


def _spread(count: int) -> Iterator[int]:
    """Yield 0 to count - 1, with far steps first: 0, 8, 16, 24, 1, 9, ..."""
    step = max(1, count // _SEQUENCES)
    return (each for first in range(step) for each in range(first, count, step))


def _image_runs(images: ImageRows) -> list[Tensor]:
    """Return the flat positions of each image: a run without a gap."""
    places_P = images.places_P.cpu()
    gaps = torch.nonzero(places_P.diff() != 1).flatten() + 1
    return list(places_P.tensor_split(gaps.tolist()))


def _images_within(images: ImageRows, runs: list[Tensor], kept: Tensor) -> ImageRows | None:
    """Return the images whose positions are kept. None is cut: an image is never trained, so it is behind the last kept
    token of its sequence, or before it."""
    stay = [number for number, places in enumerate(runs) if kept[places[0]]]
    if not stay:
        return None
    device, new_place_of = images.places_P.device, kept.cumsum(0) - 1
    return ImageRows(
        images.rotary_3BT.flatten(1)[:, torch.nonzero(kept).flatten().to(device)][:, None],
        new_place_of[torch.cat([runs[number] for number in stay])].to(device),
        [images.digests[number] for number in stay],
    )
