"""A version that is kept on the host beside a GPU's weights: it can be changed there, and stays whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.online import version_store
from tandem.online.version_store import VersionStore
from tandem.online.weight_deltas import HeldVersion

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "w": (torch.randn(512, 256, device="cuda") * 0.02).to(torch.bfloat16),
        "n": torch.ones(16, device="cuda"),
        "t": torch.randn(32, 64, device="cuda").T,
    }


def nudge(live: dict[str, Tensor]) -> None:
    live["w"].view(torch.int16)[::7] += 1
    live["n"] *= 1.5
    live["t"] += 0.25


def equal(held: HeldVersion, wanted: dict[str, Tensor]) -> bool:
    return all(torch.equal(held.tensors[name].cpu(), tensor.cpu()) for name, tensor in wanted.items())


def test_it_follows_an_update_and_goes_back(tmp_path: Path):
    store, live = VersionStore(tmp_path), weights()
    store.anchor(0, live)
    held, first = HeldVersion.of(0, live).at_rest(), {name: tensor.clone() for name, tensor in live.items()}
    assert all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in held.tensors.values())
    nudge(live)
    store.update(1, held, live)
    assert held.version == 1
    assert equal(held, live)
    assert held.digests == HeldVersion.of(1, live).digests
    with held.on_device_of(live):
        assert all(tensor.is_cuda for tensor in held.tensors.values())
        store.move(held, 0)
        held.restore(live)
    assert held.version == 0
    assert equal(held, first)
    assert equal(held, live)
    assert all(tensor.is_pinned() for tensor in held.tensors.values())


def test_an_update_that_cannot_be_written_leaves_it_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, live = VersionStore(tmp_path), weights()
    store.anchor(0, live)
    held, first = HeldVersion.of(0, live).at_rest(), {name: tensor.clone() for name, tensor in live.items()}
    numbers = dict(held.digests)
    nudge(live)

    def full(*_: object) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(version_store, "save_file", full)
        with pytest.raises(OSError, match="no room"):
            store.update(1, held, live)
    assert (held.version, held.digests) == (0, numbers)
    assert equal(held, first)
    store.update(1, held, live)
    assert equal(held, live)


def test_what_fails_beside_leaves_it_as_it_was(tmp_path: Path):
    store, live = VersionStore(tmp_path), weights()
    store.anchor(0, live)
    held, first = HeldVersion.of(0, live).at_rest(), {name: tensor.clone() for name, tensor in live.items()}
    numbers = dict(held.digests)
    nudge(live)

    def interrupted() -> None:
        with held.on_device_of(live):
            store.update(1, held, live)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (held.version, held.digests) == (0, numbers)
    assert equal(held, first)


def test_the_weights_themselves_go_back_and_it_follows(tmp_path: Path):
    store, live = VersionStore(tmp_path, threads=2), weights()
    store.anchor(0, live)
    held, first = HeldVersion.of(0, live).at_rest(), {name: tensor.clone() for name, tensor in live.items()}
    for version in (1, 2, 3):
        nudge(live)
        store.update(version, held, live)
    last = {name: tensor.clone() for name, tensor in live.items()}
    for version, wanted in ((0, first), (3, last)):
        with held.using(live):
            store.move(held, version)
        assert held.version == version
        assert equal(held, wanted)
        assert all(torch.equal(live[name], tensor) for name, tensor in wanted.items())
        assert all(tensor.is_pinned() for tensor in held.tensors.values())


def test_weights_whose_way_back_fails_are_as_they_were(tmp_path: Path):
    store, live = VersionStore(tmp_path), weights()
    store.anchor(0, live)
    held = HeldVersion.of(0, live).at_rest()
    nudge(live)
    store.update(1, held, live)
    last = {name: tensor.clone() for name, tensor in live.items()}

    def interrupted() -> None:
        with held.using(live):
            store.move(held, 0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert held.version == 1
    assert equal(held, last)
    assert all(torch.equal(live[name], tensor) for name, tensor in last.items())
