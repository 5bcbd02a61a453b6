"""Which failures of a store are worth another try, and how long it waits for one."""

from __future__ import annotations

import errno
import time
from types import SimpleNamespace

import pytest

from tandem.errors import ArtifactError
from tandem.runs.storage_retry import Limits, tried

TRIES = 3


class Answered(Exception):
    """As HTTP clients raise it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}")
        self.response = SimpleNamespace(status_code=status, headers={})


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
