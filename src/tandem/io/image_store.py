"""The images of a run: each is a file named by its content's digest, which is how everything else refers to it.

An image is written durably before anything that names it. A file whose content is not what its name says is refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import string
import warnings
from pathlib import Path
from typing import Any

from tandem.errors import ImageError
from tandem.io import atomic_write

IMAGES = "images"
"""Their directory in a run."""
SCHEME = "sha256:"
MOST_BYTES, MOST_PIXELS = 16 * 2**20, 16 * 2**20
FORMATS = ("PNG", "JPEG", "WEBP")


class ImageStore:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._sizes = dict[str, tuple[int, int]]()

    def put(self, content: bytes, where: str = "image") -> str:
        """Keep an image; return its digest. ImageError, which names `where` it came from, if it is none."""
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self._sizes:
            size = opened(content, where).size
            path = self.directory / digest
            if not path.exists() or path.read_bytes() != content:
                atomic_write.make_directory(self.directory, mode=atomic_write.PRIVATE)
                atomic_write.write_bytes(path, content, mode=0o600)
            self._sizes[digest] = size
        return digest

    def size(self, digest: str) -> tuple[int, int]:
        """Return an image's width and height."""
        if digest not in self._sizes:
            self._sizes[digest] = opened(self.read(digest), f"image {digest[:12]}").size
        return self._sizes[digest]

    def read(self, digest: str) -> bytes:
        if len(digest) != 64 or not set(digest) <= set(string.hexdigits):
            raise ImageError(f"image {digest[:12]!r}: is no SHA-256 in 64 hexadecimal digits")
        try:
            content = (self.directory / digest).read_bytes()
        except OSError as error:
            raise ImageError(
                f"image {digest[:12]}: it cannot be read from {self.directory}: {error.strerror}"
            ) from error
        if hashlib.sha256(content).hexdigest() != digest:
            raise ImageError(f"image {digest[:12]}: the file in {self.directory} has changed since it was kept")
        return content


def opened(content: bytes, where: str = "image") -> Any:
    """Return an image as RGB. ImageError if it is none, or too large; an animation's first frame is taken."""
    from PIL import Image, ImageOps

    if not content:
        raise ImageError(f"{where}: it is empty")
    if len(content) > MOST_BYTES:
        raise ImageError(f"{where}: {len(content):,} bytes are more than the {MOST_BYTES:,} that are taken")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its size, which is checked here
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            if image.width * image.height > MOST_PIXELS:
                raise ImageError(
                    f"{where}: {image.width} x {image.height} pixels are more than the {MOST_PIXELS:,} that are taken"
                )
            if image.mode[0] in "IF":
                raise ImageError(f"{where}: it has more than 8 bits a channel; convert it to 8")
            return _opaque(ImageOps.exif_transpose(image))
    except Image.DecompressionBombError as error:
        raise ImageError(f"{where}: it has more pixels than the {MOST_PIXELS:,} that are taken") from error
    except Image.UnidentifiedImageError as error:
        raise ImageError(f"{where}: it is no image that can be read: {', '.join(FORMATS)} can") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageError(f"{where}: the image cannot be read: {error}") from error


def _opaque(image: Any) -> Any:
    """Return an image as RGB, on white where it is transparent."""
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def from_data_uri(uri: str, where: str = "image") -> bytes:
    """Return the content of `data:image/...;base64,...`. ImageError for every other address: nothing is fetched."""
    head, comma, body = uri.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise ImageError(f"{where}: an image is given as a data URI (data:image/png;base64,...); nothing is fetched")
    if len(body) > MOST_BYTES * 4 // 3 + 4:
        raise ImageError(f"{where}: it is longer than the {MOST_BYTES:,} bytes that are taken")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise ImageError(f"{where}: its base64 cannot be read: {error}") from error
