"""Adapter versions in files that are overwritten: a reader gets the version that it asked for, or an error."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from bridges import bits, reply, tensors_for, weights_of

from tandem.bridge.files.adapter import AdapterBridge
from tandem.bridge.files.reader import FilesSource
from tandem.bridge.files.reusable_files import ReusableFiles
from tandem.errors import SyncError
from tandem.io.file_system import memory_backed
from tandem.ops.digest import fingerprints
from tandem.types import Sent, Weights

FILE = "adapter_model.safetensors"


class Both:
    """A trainer's end and an engine's, which copies what it reads unless `copied` is False."""

    def __init__(self, *, copied: bool = True, directory: Path | None = None) -> None:
        self.bridge = AdapterBridge(directory, deadline_s=10)
        self.source = self.bridge.source()
        self.engine = FilesSource(dict(self.source.link), "adapter", "adapter", torch.device("cpu"))
        self.home = Path(self.source.link["directory"]).parent
        if copied:
            self.engine.reuse_buffer()
            self.engine.verify_where_served()
        self.source.attached(reply() | ({"copied": True} if copied else {}))

    def send(self, version: int, scale: float = 1.0) -> Sent:
        tensors = {name: tensor * scale for name, tensor in tensors_for("adapter", version).items()}
        return self.bridge.send(weights_of(version, "adapter", tensors))

    def carry(self, version: int) -> tuple[Sent, Weights]:
        return self.send(version), self.engine.receive(version)

    def file(self, weights: Weights) -> os.stat_result:
        return (Path(weights.path) / FILE).stat()


@pytest.fixture
def both() -> Iterator[Both]:
    made = Both()
    yield made
    made.bridge.close()


def test_two_versions_stay_and_the_one_before_them_is_written_over(both: Both):
    files: list[int] = []
    for version in range(1, 9):
        sent, weights = both.carry(version)
        assert sent.transport == {"requested": "auto", "engaged": "files", "why": ""}
        assert fingerprints(dict(weights.tensors())) == sent.fingerprints == weights.expected
        files.append(both.file(weights).st_ino)
    assert files[3:] == [*files[:3], *files[:2]]
    assert len(set(files)) == 3


def test_what_lies_there_is_a_file_as_peft_writes_it(both: Both):
    from safetensors.torch import load_file

    for version in range(1, 6):
        sent, weights = both.carry(version)
        assert fingerprints(load_file(Path(weights.path) / FILE)) == sent.fingerprints


@pytest.mark.parametrize("why", ["may go on reading", "sync.directory is given"])
def test_where_somebody_may_still_read_an_older_one_each_is_a_new_file(why: str, tmp_path: Path):
    """An engine that serves what it has mapped must not find the next version there."""
    both = Both(copied=False) if why.startswith("may") else Both(directory=tmp_path)
    held: list[tuple[Weights, Any]] = []
    for version in range(1, 7):
        sent, weights = both.carry(version)
        assert sent.transport["engaged"] == "new files"
        assert why in sent.transport["why"]
        if why.startswith("may"):
            held.append((weights, bits(weights.tensors())))
    for weights, found in held:
        assert bits(weights.tensors()) == found
    both.bridge.close()


def test_a_version_that_is_written_over_while_somebody_reads_it_is_not_taken_for_what_it_was(both: Both):
    both.send(1)
    late = both.engine.receive(1)
    path = Path(late.path)
    for version in (2, 3, 4):
        both.send(version)
    assert not path.exists()
    with pytest.raises(SyncError, match="asked for version 1"):
        both.engine.receive(1)


def test_another_form_is_another_file(both: Both):
    for version in range(1, 5):
        _, weights = both.carry(version)
    size = both.file(weights).st_size
    smaller = dict(list(tensors_for("adapter", 5).items())[:1])
    for version in range(5, 10):
        sent = both.bridge.send(weights_of(version, "adapter", smaller))
        weights = both.engine.receive(version)
        assert fingerprints(dict(weights.tensors())) == sent.fingerprints
    assert both.file(weights).st_size < size
    assert files_held(both.home) == 3


def test_a_version_that_somebody_deleted_costs_no_other(both: Both):
    for version in range(1, 5):
        sent, weights = both.carry(version)
        if version == 2:
            shutil.rmtree(weights.path)
    for version in range(5, 12):
        sent, weights = both.carry(version)
        assert fingerprints(dict(weights.tensors())) == sent.fingerprints
    assert files_held(both.home) == 3


def test_a_version_that_is_refused_leaves_the_ones_before_and_the_next_is_well(both: Both):
    for version in range(1, 5):
        both.carry(version)
    with pytest.raises(SyncError, match=r"not finite|infinite|no number"):
        both.send(5, scale=float("nan"))
    assert fingerprints(dict(both.engine.receive(4).tensors())) == both.engine.receive(4).expected
    sent, weights = both.carry(6)
    assert fingerprints(dict(weights.tensors())) == sent.fingerprints


def test_where_there_is_no_room_it_is_an_error_and_not_the_end(both: Both, monkeypatch: pytest.MonkeyPatch):
    """A page that is written and finds none would end this process."""
    both.carry(1)

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as there:
        there.setattr(os, "posix_fallocate", full)
        with pytest.raises(SyncError, match=r"version 2 was not written .*No space left"):
            both.send(2)
    sent, weights = both.carry(3)
    assert fingerprints(dict(weights.tensors())) == sent.fingerprints


def test_nothing_is_left_when_it_is_closed():
    both = Both()
    home = both.home
    assert home.parent == memory_backed()
    before = len(os.listdir("/proc/self/fd"))
    both.bridge.close()
    both = Both()
    for version in range(1, 6):
        both.carry(version)
    both.bridge.close()
    assert not home.exists()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_thread_that_was_left_behind_writes_beside_the_next_one(tmp_path: Path):
    """As a deadline leaves one: neither takes the other's file, and nothing but the disk's errors is raised."""
    sheets, raw, wrong = ReusableFiles(tmp_path), torch.arange(256, dtype=torch.uint8).repeat(16), list[str]()
    was = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def write(number: int) -> None:
        for turn in range(400):
            sheets.put(raw + number, path := tmp_path / f"{number}-{turn}")
            if path.read_bytes() != (raw + number).numpy().tobytes():
                wrong.append(str(path))
            path.unlink() if turn % 3 == 0 else sheets.take_back(path)

    try:
        with ThreadPoolExecutor(3) as threads:
            for each in [threads.submit(write, number) for number in range(3)]:
                each.result()
    finally:
        sys.setswitchinterval(was)
    assert wrong == []
    sheets.close()
    with pytest.raises(OSError, match="closed"):
        sheets.put(raw, tmp_path / "late")


def files_held(under: Path) -> int:
    """Files of adapters that this process has open, each twice: as itself and as its mapping."""
    links: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    found = [link for link in links if link.startswith(str(under)) and not link.endswith("/lock")]
    assert sorted(found)[::2] == sorted(found)[1::2]
    return len(found) // 2


def test_what_is_dropped_without_being_closed_gives_its_memory_back(tmp_path: Path):
    sheets, raw = ReusableFiles(tmp_path), torch.arange(256, dtype=torch.uint8)
    for number in range(3):
        sheets.put(raw, tmp_path / f"{number}")
    sheets.take_back(tmp_path / "0")
    assert files_held(tmp_path) == 3
    del sheets
    gc.collect()
    assert files_held(tmp_path) == 0


def test_an_engine_that_joins_and_does_not_copy_ends_it(both: Both):
    for version in range(1, 5):
        both.carry(version)
    assert files_held(both.home) == 3
    both.source.attached(reply("engine-2"))
    assert both.carry(5)[0].transport["engaged"] == "new files"
    both.carry(6)
    both.carry(7)
    both.carry(8)
    assert files_held(both.home) == 0
