"""Images in messages, at the edges where they come in: data files and environments.

An edge gives an image as bytes, a PIL image, the path of a file, or a data URI. Behind it a message only has the
image's digest; the bytes are in the run's ImageStore, written before anything names them.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tandem.errors import ImageError
from tandem.io.image_store import MOST_BYTES, SCHEME, ImageStore, from_data_uri
from tandem.types import Message

_URI = "data:image/png;base64,"  # what an image is, is read from its bytes


def has_images(messages: Sequence[Message]) -> bool:
    return any(_is_image(part) for message in messages for part in _parts(message))


def interned(messages: Sequence[Message], store: ImageStore | None, where: str) -> tuple[Message, ...]:
    """Return the messages with digests for images, whose bytes are in `store` then. ImageError, which names `where` the
    messages come from, for an image that cannot be had, and for every image if there is no store."""

    def kept(part: Mapping[str, Any]) -> Mapping[str, Any]:
        if store is None:
            raise ImageError(
                f"{where}: has an image, but only text is taken here; `tandem train` with a model that sees takes "
                "images (docs/images.md)"
            )
        given = _given(part, where)
        if isinstance(given, str):
            digest = given.removeprefix(SCHEME)
        else:
            named = part.get("path") or part.get("image")
            digest = store.put(given, f"{where}: '{named}'" if _is_path(named) else where)
        return {"type": "image", "image": SCHEME + digest, "size": [*store.size(digest)]}

    return tuple(_converted(message, kept, where) for message in messages)


def portable(messages: Sequence[Message], where: str) -> list[Message]:
    """Return the messages as JSON can have them: images as data URIs. What a worker process cannot read, no other
    process reads for it."""

    def carried(part: Mapping[str, Any]) -> Mapping[str, Any]:
        given = _given(part, where)
        uri = given if isinstance(given, str) else _URI + base64.b64encode(given).decode()
        return {"type": "image", "image": uri}

    return [dict(_converted(message, carried, where)) for message in messages]


def is_portable(content: object) -> bool:
    """Return whether each image of a content is a data URI or a digest."""
    images = [cast("Mapping[str, Any]", part) for part in _parts({"content": content}) if _is_image(part)]
    return all(part["type"] == "image" and str(part.get("image")).startswith(("data:", SCHEME)) for part in images)


def _parts(message: Message) -> Sequence[object]:
    content: object = message.get("content")
    return cast("Sequence[object]", content) if isinstance(content, list | tuple) else ()


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and cast("Mapping[str, Any]", part).get("type") in ("image", "image_url")


def _converted(message: Message, convert: Callable[[Mapping[str, Any]], Mapping[str, Any]], where: str) -> Message:
    """Return a message with its images converted; one without images has a text."""
    parts = _parts(message)
    if not parts:
        return message
    found: list[Mapping[str, Any]] = []
    for part in parts:
        told = cast("Mapping[str, Any]", part if isinstance(part, Mapping) else {})
        if _is_image(told):
            found.append(convert(told))
        elif told.get("type") == "text" and isinstance(told.get("text"), str):
            found.append({"type": "text", "text": told["text"]})
        else:
            named = told.get("type") or "none"
            raise ImageError(f"{where}: a message has a part of type '{named}'; text and image are taken")
    if not has_images([message]):
        return {**message, "content": "".join(part["text"] for part in found)}
    if message.get("role") == "assistant":
        raise ImageError(f"{where}: an assistant's message has an image; models answer with text")
    return {**message, "content": found}


def _given(part: Mapping[str, Any], where: str) -> bytes | str:
    """Return an image's bytes, or its digest after `sha256:` if it has been kept before."""
    value: Any = part.get("path") if part.get("image") is None else part["image"]
    if part["type"] == "image_url":
        url = part.get("image_url")
        value = cast("Mapping[str, Any]", url).get("url") if isinstance(url, Mapping) else url
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) and value.startswith(SCHEME):
        return value
    if isinstance(value, str) and (part["type"] == "image_url" or value.startswith(("data:", "http:", "https:"))):
        return from_data_uri(value, where)
    if isinstance(value, str | Path):
        return _of_file(Path(value), where)
    if hasattr(value, "save"):
        content = io.BytesIO()
        value.save(content, "PNG")
        return content.getvalue()
    if value is None:
        raise ImageError(f"{where}: an image has a 'path', an 'image' or an 'image_url'; this has {', '.join(part)}")
    raise ImageError(
        f"{where}: an image is given as bytes, a PIL image, a path or a data URI, not as {type(value).__name__}"
    )


def _is_path(value: object) -> bool:
    return isinstance(value, Path) or (isinstance(value, str) and not value.startswith("data:"))


def _of_file(path: Path, where: str) -> bytes:
    try:
        if not path.is_file():
            raise ImageError(f"{where}: '{path}' is no file")
        with path.open("rb") as file:
            return file.read(MOST_BYTES + 1)  # one more than is taken
    except OSError as error:
        raise ImageError(f"{where}: '{path}' cannot be read: {error.strerror}") from error
