"""Retry calls to storage services, with limits on time and attempts; Retry-After is respected."""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from tandem.errors import ArtifactError
from tandem.io.retry_after import retry_after_s

T = TypeVar("T")
_COMES_RIGHT = (408, 409, 425, 429)
"""Statuses from 400 to 499 after which the same request may succeed later."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    concurrency: int = 4
    bytes_in_flight: int = 64 * 2**20
    timeout_s: float = 600.0
    """Seconds for one artifact."""
    tries: int = 8
    """Attempts of one call."""
    backoff_s: float = 0.5
    """Wait before the second attempt. It doubles each time, and up to half of it is added at random."""
    longest_wait_s: float = 60.0

    def uploads_at_once(self, buffer_bytes: int) -> int:
        return max(1, min(self.concurrency, self.bytes_in_flight // buffer_bytes))


def tried(do: Callable[[], T], limits: Limits, deadline: float, what: str, stop: threading.Event | None = None) -> T:
    """Call `do`, with retries, and return its result. ArtifactError names the last failure; `stop` ends the waits."""
    stop = stop or threading.Event()
    for attempt in range(1, limits.tries + 1):
        try:
            return do()
        except ArtifactError:
            raise
        except Exception as error:
            told = f"{what}: {type(error).__name__}: {error}"
            if _is_hopeless(error):
                raise ArtifactError(told) from error
            wait = _wait(error, attempt, limits)
            if attempt == limits.tries or time.monotonic() + wait > deadline:
                raise ArtifactError(f"{told} (tried {attempt} times)") from error
            _log.info("%s; again in %.1f s", told, wait)
            if stop.wait(wait):
                raise ArtifactError(f"{what}: given up, because another file of the artifact failed") from error
    raise AssertionError("a loop over at least one try returns or raises")


def _is_hopeless(error: Exception) -> bool:
    """Return whether a retry would fail in the same way."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    refused = isinstance(status, int) and 400 <= status < 500 and status not in _COMES_RIGHT
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.EROFS, errno.ELOOP, errno.EINVAL):
        return True
    offline = type(error).__name__ == "OfflineModeIsEnabled"  # HF_HUB_OFFLINE; its package is heavy to import
    return (
        refused
        or offline
        or isinstance(error, PermissionError | IsADirectoryError | NotADirectoryError | TypeError | ValueError)
    )


def _wait(error: Exception, attempt: int, limits: Limits) -> float:
    asked = retry_after(error)
    wait = limits.backoff_s * 2 ** (attempt - 1) * (1 + random.random() / 2) if asked is None else asked
    return min(wait, limits.longest_wait_s)


def retry_after(error: BaseException) -> float | None:
    """Return the seconds of a Retry-After header in an error of any client library, or in its causes."""
    for each in _causes(error):
        for headers in _headers(each):
            for name, value in headers.items():
                if str(name).lower() == "retry-after" and (seconds := retry_after_s(str(value))) is not None:
                    return seconds
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def _headers(error: BaseException) -> Iterator[Mapping[Any, Any]]:
    response: Any = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        metadata = cast("Mapping[str, Any]", response).get("ResponseMetadata")
        candidates: list[Any] = [cast("Mapping[str, Any]", metadata or {}).get("HTTPHeaders")]
    else:
        candidates = [getattr(response, "headers", None), getattr(error, "headers", None)]
    for found in candidates:
        if isinstance(found, Mapping):
            yield cast("Mapping[Any, Any]", found)
