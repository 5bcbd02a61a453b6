"""Which failures of a store are worth another try, and how long it waits for one."""

from __future__ import annotations

import errno
import threading
import time
from types import SimpleNamespace

import pytest

from tandem.errors import ArtifactError
from tandem.runs.storage_retry import Limits, tried

TRIES = 3


class Answered(Exception):
    """As HTTP clients raise it."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"{status}")
        self.response = SimpleNamespace(status_code=status, headers=headers)


class Waits(threading.Event):
    """Records how long it is waited for, and lets no time pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        return False


def times_asked(error: Exception) -> int:
    asked: list[Exception] = []

    def fail() -> None:
        asked.append(error)
        raise error

    with pytest.raises(ArtifactError, match="a file: "):
        tried(fail, Limits(tries=TRIES, backoff_s=0.0), time.monotonic() + 60, "a file")
    return len(asked)


@pytest.mark.parametrize(
    "error",
    [Answered(400), Answered(403), Answered(404), PermissionError(13, "no"), OSError(errno.EROFS, "no"), ValueError()],
    ids=str,
)
def test_what_is_refused_for_what_it_is_is_asked_once(error: Exception) -> None:
    assert times_asked(error) == 1


@pytest.mark.parametrize(
    "error", [Answered(500), Answered(503), Answered(429), ConnectionResetError(), OSError(errno.EIO, "no")], ids=str
)
def test_what_may_pass_is_asked_as_often_as_allowed(error: Exception) -> None:
    assert times_asked(error) == TRIES


@pytest.mark.parametrize(("asked", "waited"), [("7", 7.0), ("0", 0.0), ("100000", 60.0)])
def test_it_waits_as_long_as_the_store_asks_and_no_longer_than_the_limit(asked: str, waited: float) -> None:
    waits, error = Waits(), Answered(503, **{"Retry-After": asked})

    def fail() -> None:
        raise error

    with pytest.raises(ArtifactError, match="tried 3 times"):
        tried(fail, Limits(tries=TRIES, backoff_s=0.5, longest_wait_s=60.0), time.monotonic() + 600, "a file", waits)
    assert waits.seconds == [waited] * (TRIES - 1)
