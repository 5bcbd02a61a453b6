"""Compute what a model's vision tower makes of images, and keep it: the tower is frozen, so it never changes.

Each image is computed alone, so its features do not depend on the images beside it, in the trainer or in an engine.

Shapes: P places of images, H hidden.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tandem.ops.byte_sizes import IMAGE_CACHE_BYTES
from tandem.spec.model import SEEING

if TYPE_CHECKING:
    from tandem.protocols import ImageSource

TOWER = r".*\bvisual\..*"
"""A regular expression for the names of its modules."""


def sees(config: Any) -> bool:
    """Return whether a model of this config can be given images."""
    return config.model_type == SEEING


def freeze_tower(module: Any) -> None:
    """Exclude the vision tower of a model that sees from training."""
    if sees(module.config):
        module.base_model.visual.requires_grad_(False)


def copied(whole: Any, module: Any) -> Any:
    """Return a copy of a module, or of what wraps it, that has the same vision tower, because it never changes."""
    tower = module.base_model.visual if sees(module.config) else None
    return copy.deepcopy(whole, None if tower is None else {id(tower): tower})


class Features(NamedTuple):
    """What takes the places of images."""

    embeds_PH: Tensor
    """In place of the tokens' embeddings."""
    deep: list[Tensor]
    """P x H for each of the first layers, to add to what the layer returns."""


class Vision:
    """The frozen vision tower of one module. Threads may share it."""

    def __init__(self, module: Any, images: ImageSource, cache_bytes: int = IMAGE_CACHE_BYTES) -> None:
        self.images = images
        self.merge: int = module.config.vision_config.spatial_merge_size
        """The side of a square of patches that becomes one token."""
        self._body = module.base_model
        self._limit = cache_bytes
        self._kept, self._kept_bytes = OrderedDict[str, Features](), 0
        self._lock = Lock()
        self._check_frozen()

    def features(self, digests: Sequence[str]) -> Features:
        """Return the features of images, one after the other."""
        with self._lock:
            found = {digest: self._of(digest) for digest in dict.fromkeys(digests)}
        each = [found[digest] for digest in digests]
        deep = [torch.cat(layer) for layer in zip(*(features.deep for features in each), strict=True)]
        return Features(torch.cat([features.embeds_PH for features in each]), deep)

    def _of(self, digest: str) -> Features:
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return self._kept[digest]
        features = self._kept[digest] = self._compute(digest)
        self._kept_bytes += _size_bytes(features)
        while self._kept_bytes > self._limit and self._kept:
            self._kept_bytes -= _size_bytes(self._kept.popitem(last=False)[1])
        return features

    @torch.no_grad()
    def _compute(self, digest: str) -> Features:
        self._check_frozen()  # kept features would be those of older weights
        tower = self._body.visual
        pixels = self.images.pixels(digest).to(tower.device, tower.dtype)
        grid = torch.tensor([self.images.grid(digest)], device=tower.device)
        out = self._body.get_image_features(pixels, grid, return_dict=True)
        return Features(out.pooler_output[0], [layer[0] for layer in out.deepstack_features])

    def _check_frozen(self) -> None:
        assert not any(each.requires_grad for each in self._body.visual.parameters()), "the vision tower is trained"


def _size_bytes(features: Features) -> int:
    return sum(tensor.nbytes for tensor in (features.embeds_PH, *features.deep))
