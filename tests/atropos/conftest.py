"""Tests with the real atroposlib. Skipped, with the reason, where it is not installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "http"))  # services on sockets, as they are tested there
PYTHON = Path(os.environ.get("TANDEM_ATROPOS_PYTHON", ".tandem/atropos/bin/python"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and not PYTHON.is_file():
            why = f"no atroposlib: {PYTHON} is not there; `make test-atropos` makes it"
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def atropos_python() -> str:
    return str(PYTHON.absolute())
