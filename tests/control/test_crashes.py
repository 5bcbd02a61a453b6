"""The loop crashes at its boundaries: a short form of benchmarks/control_crashes.py, with designs that it must find."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tandem.control.store import Store


@pytest.fixture
def crashes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import control_crashes

    yield control_crashes
    sys.modules.pop("control_crashes", None)


@pytest.mark.parametrize("first", [0, pytest.param(60, marks=pytest.mark.slow)])
def test_no_crash_doubles_a_run_or_ends_it_wrongly(crashes: ModuleType, store: Store, first: int):
    done = asyncio.run(crashes.many(store, 40 if first else 6, first=first))
    assert [each.problems for each in done if each.problems] == []
    assert sum(each.crashes for each in done) >= len(done)
    assert sum(each.duplicates for each in done) > 0


def test_a_planted_design_is_found(crashes: ModuleType, store: Store):
    assert [each for each in asyncio.run(crashes.many(store, 1, "claim-ignored")) if each.problems]
