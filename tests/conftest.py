"""What tests of every kind share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from standstill import Standstill

_PAUSE_S, _REPEATS = 0.25, 2
_machine = Standstill()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Iterator[None]:
    with _machine:
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leases, deadlines and patience are real seconds here, between real processes. If the machine stands still in the
    middle of one, its failure says nothing of the code: the test is done again, and what it said is told. What fails on
    a machine that works has failed."""
    if config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            item.add_marker(pytest.mark.flaky(reruns=_REPEATS, condition=_machine_stood_still))


def pytest_runtest_setup() -> None:
    _machine.begin()


def _machine_stood_still() -> bool:
    return _machine.longest_s() > _PAUSE_S


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a hub on loopback: HF_HUB_OFFLINE in the environment would forbid it, too."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny matrices are faster on one thread, and a second one spins where cores are shared."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
