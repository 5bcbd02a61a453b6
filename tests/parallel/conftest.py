"""One crew at a time: each is several processes, and their deadlines are real seconds."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_crew_at_a_time() -> Iterator[None]:
    with (Path(tempfile.gettempdir()) / "tandem-one-crew.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
