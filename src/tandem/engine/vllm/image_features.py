"""Make the part of a request to vLLM that has its images: their pixels, their places, and hashes of their content.

vLLM computes from exactly these pixels, which are the trainer's, at exactly these places, and leaves the prompt's ids
as they are. It keeps an image's features by its hash, and shares cached prefixes by it. So the hash is of the image and
of how its pixels were made, never of its place in a prompt. The pixels travel as vLLM's own processes send them to each
other: msgpack, with a tensor as its type, its shape and its bytes. P patches, V values of one.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

import msgspec
import torch
from torch import Tensor

from tandem.errors import ImageError
from tandem.ops.image_places import why_misplaced
from tandem.protocols import ImageSource
from tandem.types import PlacedImage

_RAW = 3  # vLLM's msgpack extension for the bytes of a tensor
_SENT_AS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.float16}
_MOST_KEPT = 8  # images whose message is kept for the siblings of a group, up to 64 MB each


class ImageFeatures:
    def __init__(self, source: ImageSource, dtype: str) -> None:
        """`dtype`: vLLM's. Its tower rounds pixels to it first; rounded here, they are half as long."""
        self._source, self._dtype = source, _SENT_AS.get(dtype, torch.float32)
        self._message, self._lock = lru_cache(_MOST_KEPT)(self._made), Lock()

    def of(self, prompt_ids: Sequence[int], images: Sequence[PlacedImage]) -> dict[str, Any]:
        """Return `features` of /inference/v1/generate. ImageError if an image's place is not one in this prompt."""
        if why := why_misplaced(prompt_ids, images, self._source):
            raise ImageError(why)
        with self._lock:  # siblings ask at the same time, on threads
            messages = [self._message(image.digest) for image in images]
        return {
            "mm_hashes": {"image": [self._hash(image.digest) for image in images]},
            "mm_placeholders": {"image": [{"offset": image.offset, "length": image.length} for image in images]},
            "kwargs_data": {"image": messages},
        }

    def _hash(self, digest: str) -> str:
        return hashlib.sha256(f"{self._source.key(digest)} {self._dtype}".encode()).hexdigest()

    def _made(self, digest: str) -> str:
        pixels_PV = self._source.pixels(digest).to(self._dtype)
        flat = {"keep_on_cpu": False, "slices": [[0, len(pixels_PV), None]], "dim": 0}
        message = {
            "pixel_values": {"data": _sent(pixels_PV), "field": ["flat", flat]},
            "image_grid_thw": {
                "data": _sent(torch.tensor(self._source.grid(digest))),
                "field": ["batched", {"keep_on_cpu": True}],
            },
        }
        return base64.b64encode(msgspec.msgpack.encode(message)).decode()


def _sent(tensor: Tensor) -> list[Any]:
    content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), msgspec.msgpack.Ext(_RAW, content)]
