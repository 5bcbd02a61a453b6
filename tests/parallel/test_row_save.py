"""A save of which every rank writes its rows: it is whole, or an error and no checkpoint. Ranks are threads here."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tandem.errors import CheckpointError, RankLost
from tandem.io import sealed_directory
from tandem.ops.parts import rows_of
from tandem.train import row_save
from tandem.train.row_save import FileParts, RowSave, write_together
from tandem.types import Part

RANKS = 3


class Board:
    """The store of the ranks."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.content[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.content[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.content for key in keys)

    def delete_key(self, key: str) -> None:
        del self.content[key]


class Member:
    """A rank, as far as a save sees the crew."""

    ranks = RANKS

    def __init__(self, rank: int, board: Board, meeting: threading.Barrier, gathered: dict[int, Any]) -> None:
        self.rank, self.broken, self.ticks = rank, "", 0
        self._board, self._meeting, self._gathered = board, meeting, gathered

    def board(self) -> Board:
        return self._board

    def gather(self, value: Any) -> list[Any]:
        self._gathered[self.rank] = value
        self._meeting.wait(10)
        found = [self._gathered[rank] for rank in range(self.ranks)]
        self._meeting.wait(10)
        return found

    def tick(self) -> None:
        self.ticks += 1


@pytest.fixture
def members() -> list[Member]:
    board, meeting, gathered = Board(), threading.Barrier(RANKS), dict[int, Any]()
    return [Member(rank, board, meeting, gathered) for rank in range(RANKS)]


def state(number: int) -> dict[str, Tensor]:
    return {
        "w": torch.full((7, 4), float(number)),
        "w|exp_avg": torch.randn(7, 4, generator=torch.Generator().manual_seed(number)),
        "w|step": torch.tensor(number),
    }


def held(whole: Mapping[str, Tensor], rank: int) -> dict[str, FileParts]:
    parts = [
        Part(name, tensor[slice(*rows_of(7, rank, RANKS))].clone(), rows_of(7, rank, RANKS)[0], 0, (7, 4))
        for name, tensor in whole.items()
        if tensor.ndim
    ]
    if rank == 0:
        parts.append(Part("w|step", whole["w|step"], 0, 0, ()))
    return {"weights.safetensors": FileParts(parts), "deploy/model.safetensors": FileParts(parts[:1], {"format": "pt"})}


def test_files_are_those_of_one_writer(members: list[Member], tmp_path: Path) -> None:
    saves = [RowSave(member) for member in members]
    for number in (1, 2, 3):
        for rank, save in enumerate(saves):
            save.hold(number, held(state(number), rank))
        (directory := tmp_path / str(number)).mkdir()
        saves[0].write(number, directory)
        whole = state(number)
        save_file(whole, tmp_path / "whole")
        save_file({"w": whole["w"]}, tmp_path / "model", metadata={"format": "pt"})
        assert (directory / "weights.safetensors").read_bytes() == (tmp_path / "whole").read_bytes()
        assert (directory / "deploy/model.safetensors").read_bytes() == (tmp_path / "model").read_bytes()
    assert not members[0]._board.content  # a long run leaves nothing in the store


def test_a_save_that_is_never_written_makes_way_for_the_next(members: list[Member], tmp_path: Path) -> None:
    before = set(threading.enumerate())  # other tests of this process may have left theirs
    saves = [RowSave(member) for member in members]
    for number in (1, 2):
        for rank, save in enumerate(saves):
            save.hold(number, held(state(number), rank))
    with pytest.raises(CheckpointError, match="replaced"):
        saves[0].write(1, tmp_path)
    saves[0].write(2, tmp_path)
    for save in saves:
        save.free()
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint" and thread not in before]


def test_a_rank_that_cannot_write_fails_the_save_by_name(members: list[Member], tmp_path: Path) -> None:
    """As a full disk would. The next save is whole."""
    saves = [RowSave(member) for member in members]
    for rank, save in enumerate(saves):
        save.hold(1, held(state(1), rank))
    wrong = held(state(1), 2)["weights.safetensors"].parts[0]._replace(full_shape=(9, 4))
    saves[2].hold(1, {"weights.safetensors": FileParts([wrong])})
    with pytest.raises(CheckpointError, match=r"rank 2: CheckpointError: .*'w'"):
        written(saves, 1, tmp_path / "step-1")
    assert not (tmp_path / "step-1").exists()
    for rank, save in enumerate(saves):
        save.hold(2, held(state(2), rank))
    written(saves, 2, tmp_path / "step-1")
    assert sealed_directory.verify(tmp_path / "step-1")


def test_a_rank_that_writes_nothing_and_says_so_is_no_checkpoint(members: list[Member], tmp_path: Path) -> None:
    saves = [RowSave(member) for member in members]
    for rank, save in enumerate(saves):
        save.hold(1, held(state(1), rank) if rank != 1 else {})
    with pytest.raises(CheckpointError, match=r"weights.safetensors: has 232 bytes .* rank 1 0"):
        written(saves, 1, tmp_path / "step-1")
    assert not list(tmp_path.iterdir())


def test_a_rank_that_is_lost_is_no_checkpoint(members: list[Member], tmp_path: Path) -> None:
    """It says nothing more; the crew finds out."""
    saves = [RowSave(member) for member in members]
    for rank, save in enumerate(saves[:2]):
        save.hold(1, held(state(1), rank))
    threading.Timer(0.3, lambda: setattr(members[0], "broken", "rank 2 on host b: shows no sign of life")).start()
    started = time.monotonic()
    with pytest.raises(RankLost, match="rank 2 on host b"):
        written(saves, 1, tmp_path / "step-1")
    assert time.monotonic() - started < 5
    assert not list(tmp_path.iterdir())


def test_what_is_held_is_not_overwritten_while_it_is_written(
    members: list[Member], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose disk is slow keeps the next snapshot waiting, not the other way round."""
    saves = [RowSave(member) for member in members]
    for rank, save in enumerate(saves):
        save.hold(1, held(state(1), rank))
    under_way, go_on = threading.Barrier(RANKS), threading.Event()  # of both listeners, and of the test
    write_parts = row_save.row_file.write_parts

    def slow(path: Path, parts: Any) -> int:
        if threading.current_thread().name == "checkpoint" and not go_on.is_set():
            under_way.wait(10)
            go_on.wait(10)
        return write_parts(path, parts)

    monkeypatch.setattr(row_save.row_file, "write_parts", slow)
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(saves[0].write, 1, tmp_path)
        under_way.wait(10)
        freeing = pool.submit(saves[1].free)
        time.sleep(0.1)
        assert not freeing.done()
        go_on.set()
        writing.result(10)
        freeing.result(10)


def test_files_that_all_write_inside_an_order_are_those_of_one_writer(members: list[Member], tmp_path: Path) -> None:
    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(lambda member: write_together(member, tmp_path, held(state(1), member.rank)), members))
    save_file(state(1), tmp_path / "whole")
    assert (tmp_path / "weights.safetensors").read_bytes() == (tmp_path / "whole").read_bytes()
    assert all(member.ticks for member in members)


def test_an_export_that_one_rank_cannot_write_fails_on_all(members: list[Member], tmp_path: Path) -> None:
    def write(member: Member) -> str:
        files = held(state(1), member.rank)
        if member.rank == 1:
            files["weights.safetensors"] = FileParts([Part("v", torch.ones(1), 0, 0, (1,))])
        try:
            write_together(member, tmp_path, files)
        except CheckpointError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(RANKS) as pool:
        told = list(pool.map(write, members))
    assert all("rank 1: CheckpointError" in each for each in told)


def written(saves: list[RowSave], number: int, path: Path) -> None:
    with sealed_directory.sealed(path) as directory:
        saves[0].write(number, directory)
