"""Tests against a real vLLM. Skipped, with the reason, where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm_cpu import HERE, PYTHON, Vllm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(600))  # an engine starts in 20 to 60 s
            if not PYTHON.is_file():
                why = f"no vLLM environment: {PYTHON} is not there (TANDEM_VLLM_PYTHON names another interpreter)"
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Vllm]]:
    engines: list[Vllm] = []

    def starting(**options: Any) -> Vllm:
        engines.append(Vllm(tmp_path_factory.mktemp("vllm"), **options))
        return engines[-1]

    yield starting
    for engine in engines:
        engine.close()
