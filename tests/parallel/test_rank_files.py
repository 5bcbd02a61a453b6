"""Versions as files of which every rank writes its rows: the files are those of one rank, or there is no version. Ranks
are threads here; tests/parallel/test_rank_rewards.py has real ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.bridge.files import rank_files
from tandem.bridge.files.checkpoint import DiskBridge
from tandem.bridge.files.rank_files import RankFiles
from tandem.errors import RanksDiverged, SyncError
from tandem.ops.parts import rows_of
from tandem.ops.phase_timer import Phases
from tandem.types import Part, Sent, Weights

Change = Callable[[int, Weights], Weights]
RANKS = 3
BUFFERS = ["rotary"]


def whole(version: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(version)
    return {
        "embed": torch.randn(7, 4, generator=made),  # 3, 3 and 1 rows
        "norm": torch.randn(2, generator=made),  # none on the last rank
        "rotary": torch.arange(3.0),  # every rank has all of it
    }


def weights_of(version: int, rank: int) -> Weights:
    def rows() -> Iterator[Part]:
        for name, tensor in whole(version).items():
            if name in BUFFERS:
                yield Part(name, tensor, 0, 0, tuple(tensor.shape))
            else:
                first, last = rows_of(tensor.shape[0], rank, RANKS)
                yield Part(name, tensor[first:last], first, 0, tuple(tensor.shape))

    return Weights(version, "full", lambda: iter(()), rows=rows)


class Member:
    """A rank, as far as these files see the crew."""

    def __init__(self, rank: int, meeting: threading.Barrier, gathered: dict[int, Any]) -> None:
        self.rank, self.ticks = rank, 0
        self.sees = ""
        """Where the directory of rank 0 is for this rank, if it is elsewhere."""
        self._meeting, self._gathered = meeting, gathered

    def gather(self, value: Any) -> list[Any]:
        self._gathered[self.rank] = value
        self._meeting.wait(10)
        found = [self._gathered[rank] for rank in range(RANKS)]
        self._meeting.wait(10)
        if self.sees and isinstance(found[0].get("value"), str):
            found[0] = {"value": self.sees}
        return found

    def tick(self) -> None:
        self.ticks += 1


def same(rank: int, weights: Weights) -> Weights:
    return weights


class Trainer:
    """All ranks of a trainer, and the bridge of rank 0."""

    def __init__(self, home: Path, skeleton: Path) -> None:
        meeting, gathered = threading.Barrier(RANKS), dict[int, Any]()
        self.members = [Member(rank, meeting, gathered) for rank in range(RANKS)]
        self.meeting = meeting
        first, *self.others = [RankFiles(member, "disk", RANKS) for member in self.members]
        self.bridge = opened(DiskBridge(home, skeleton, buffers=BUFFERS, shard_bytes=100, rank_files=first))
        self.refused: list[str] = []

    def send(self, version: int, change: Change = same) -> Sent:
        def other(rank: int) -> None:
            try:
                self.others[rank - 1].write(change(rank, weights_of(version, rank)), Phases())
            except SyncError as error:
                self.refused.append(str(error))
            except threading.BrokenBarrierError:  # rank 0 has raised: the crew would end this rank
                return

        with ThreadPoolExecutor(RANKS) as threads:
            for rank in range(1, RANKS):
                threads.submit(other, rank)
            try:
                return self.bridge.send(change(0, weights_of(version, 0)))
            except RanksDiverged:
                self.meeting.abort()
                raise


def opened(bridge: DiskBridge) -> DiskBridge:
    forms = {name: ("bfloat16" if name != "rotary" else "float32", list(t.shape)) for name, t in whole(0).items()}
    bridge.source().replies.append({"boot_id": "a", "layout": forms})
    return bridge


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def trainer(tmp_path: Path, skeleton: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path / "ranks", skeleton)
    yield made
    made.bridge.close()


def files_of(home: Path, version: int) -> dict[str, bytes]:
    (directory,) = home.glob(f"tandem-weights-*/1/v-{version:06d}")
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_files_of_several_ranks_are_those_of_one(trainer: Trainer, tmp_path: Path, skeleton: Path) -> None:
    alone = opened(DiskBridge(tmp_path / "one", skeleton, buffers=BUFFERS, shard_bytes=100))
    for version in (1, 2):
        sent = trainer.send(version)
        by_one = alone.send(Weights(version, "full", lambda version=version: iter(whole(version).items())))
        assert sent.fingerprints == by_one.fingerprints
        files = files_of(tmp_path / "ranks", version)
        assert files == files_of(tmp_path / "one", version)
        assert {"buffers.tandem", "model.safetensors", "config.json"} <= files.keys()
    assert all(member.ticks for member in trainer.members)
    alone.close()


def changed(version: int, only: int, change: Callable[[Part], Part | None]) -> Change:
    """On one rank, the parts of `embed` are others."""

    def of(rank: int, weights: Weights) -> Weights:
        def rows() -> Iterator[Part]:
            for part in weights.parts():
                new = change(part) if (rank, part.name) == (only, "embed") else part
                if new is not None:
                    yield new

        return Weights(version, "full", weights.tensors, rows=rows)

    return of


FAULTS: dict[str, tuple[Callable[[Part], Part | None], str]] = {
    "not finite": (lambda part: part._replace(tensor=part.tensor / 0), "rank 1: .*'embed' holds a value that is not"),
    "left out": (lambda part: None, "16 of the 28 elements of 'embed'; the others are left out"),
    "another rank's rows": (lambda part: part._replace(row_start=0), r"rank 1 says that it holds 'embed'.*3 to 6"),
    "another shape": (lambda part: part._replace(full_shape=(9, 4)), r"rank 1: .*'embed' is \[9, 4\]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_on_one_rank_is_named_and_the_next_version_comes(trainer, tmp_path, fault):
    change, says = FAULTS[fault]
    trainer.send(1)
    with pytest.raises(SyncError, match=says):
        trainer.send(2, changed(2, 1, change))
    assert len(trainer.refused) == RANKS - 1  # all ranks gave it up together
    assert not list((tmp_path / "ranks").glob("*/1/v-000002"))
    trainer.send(3)
    assert files_of(tmp_path / "ranks", 3)


def test_what_fails_before_the_files_are_begun_is_told_to_all_ranks(trainer, tmp_path):
    """Two engines that serve other layouts: rank 0 alone knows, and the others wait for its word."""
    source = trainer.bridge.source()
    for boot, rows in (("a", 7), ("b", 8)):
        source.replies.append({"boot_id": boot, "layout": {"embed": ("bfloat16", [rows, 4])}})
    with pytest.raises(SyncError, match="engines a and b do not serve the same"):
        trainer.send(1)
    assert len(trainer.refused) == RANKS - 1
    opened(trainer.bridge)
    trainer.send(2)


def test_a_rank_that_does_not_see_the_directory_is_named(trainer):
    trainer.members[1].sees = "/another/disk"
    with pytest.raises(SyncError, match=r"rank 1: /another/disk.*not seen here; set sync.directory.*version before"):
        trainer.send(1)
    trainer.members[1].sees = ""
    trainer.send(2)


def test_a_rank_that_stayed_behind_is_named(trainer):
    trainer.send(1)
    with pytest.raises(RanksDiverged, match="the weights of rank 2 are those of version 1"):
        trainer.send(2, lambda rank, weights: weights if rank != 2 else weights_of(1, 2))


def test_copies_that_differ_are_named(trainer):
    def other(rank: int, weights: Weights) -> Weights:
        def rows() -> Iterator[Part]:
            for part in weights.parts():
                yield part._replace(tensor=part.tensor + 1) if part.name == "rotary" and rank == 1 else part

        return Weights(1, "full", weights.tensors, rows=rows)

    with pytest.raises(RanksDiverged, match=r"ranks 0, 2 and ranks 1 hold different values of 'rotary'"):
        trainer.send(1, other)


def test_a_full_disk_on_one_rank_costs_that_version_alone(trainer, tmp_path, monkeypatch):
    def full(path: Path, parts: Any, **settings: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")
        return write(path, parts, **settings)

    write = rank_files.row_file.write_parts
    monkeypatch.setattr(rank_files.row_file, "write_parts", full)
    with pytest.raises(SyncError, match=r"rank 1: .*No space left.*the version before stays"):
        trainer.send(1)
    monkeypatch.undo()
    trainer.send(2)
    assert files_of(tmp_path / "ranks", 2)
