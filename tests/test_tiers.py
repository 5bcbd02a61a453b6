"""Each test is in one of the two tiers: `make test` or `make test-slow`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


def tiers() -> Any:
    spec = importlib.util.spec_from_file_location("tiers", TESTS / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_test_that_is_marked_slow_is_where_the_slow_tier_looks():
    """`make test-slow` collects no other files: such a test would run nowhere."""
    found = tiers()
    marked = [path for path in TESTS.rglob("*.py") if "mark." + "slow" in path.read_text(encoding="utf-8")]
    lost = [path for path in marked if not found.is_slow(path) and path.relative_to(TESTS).parts[0] not in found.BOTH]
    assert [str(path.relative_to(TESTS)) for path in lost] == ["conftest.py"]
    assert any(not found.is_slow(path) for path in marked)
