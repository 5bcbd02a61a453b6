"""What a model's own image processor makes of stored images: patches of pixels, and how many tokens they are."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor

from tandem.errors import ImageError
from tandem.io.image_store import ImageStore, opened

_KEPT_BYTES = 2**28
"""Of pixels, in the host's memory."""


class ModelImages:
    def __init__(self, model: str | Path, store: ImageStore, *, revision: str = "main") -> None:
        from transformers import AutoConfig, AutoImageProcessor

        config: Any = AutoConfig.from_pretrained(model, revision=revision)
        self._store, self._pad_id = store, config.image_token_id
        self._merge: int = config.vision_config.spatial_merge_size
        self._processor: Any = AutoImageProcessor.from_pretrained(model, revision=revision)
        self._fingerprint = hashlib.sha256(json.dumps(self._processor.to_dict(), sort_keys=True, default=str).encode())
        self._lock, self._kept_bytes = Lock(), 0
        self._kept = OrderedDict[str, tuple[Tensor, tuple[int, int, int]]]()
        self._grids = dict[str, tuple[int, int, int]]()

    @property
    def pad_id(self) -> int:
        return self._pad_id

    def grid(self, digest: str) -> tuple[int, int, int]:
        if digest not in self._grids:
            self.pixels(digest)
        return self._grids[digest]

    def length(self, digest: str) -> int:
        time, height, width = self.grid(digest)
        return time * height * width // self._merge**2

    def key(self, digest: str) -> str:
        whole = self._fingerprint.copy()
        whole.update(digest.encode())
        return whole.hexdigest()

    def pixels(self, digest: str) -> Tensor:
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
                return self._kept[digest][0]
        image = opened(self._store.read(digest), digest[:12])
        try:
            made = self._processor(images=[image], return_tensors="pt")
        except ValueError as error:
            raise ImageError(
                f"image {digest[:12]}: {image.width} x {image.height} pixels cannot be given to this model: {error}"
            ) from error
        pixels, (time, height, width) = made["pixel_values"], made["image_grid_thw"][0].tolist()
        with self._lock:
            if digest not in self._kept:
                self._kept[digest], self._kept_bytes = (pixels, (time, height, width)), self._kept_bytes + pixels.nbytes
            self._grids[digest] = (time, height, width)
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                _, (old, _) = self._kept.popitem(last=False)
                self._kept_bytes -= old.nbytes
        return pixels
