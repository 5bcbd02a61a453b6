"""One torch thread: two would spin for each other on a busy machine."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _on_one_thread(one_thread: None) -> None:
    """All of these, and models made by fixtures too."""
