"""Files of which every rank writes its rows.

A checkpoint is written by a thread of each rank, while training goes on:

    rank 0                                     ranks 1 to N-1
    an order: all copy their parts to the host (`hold`); the others' threads wait for write/7
    headers and sizes of all files
    write/7 = the directory                 -> write their parts, until they are on the disk
    writes its own parts
    written/7/1, written/7/2               <-  how many bytes in each file, or what failed
    every byte is there: the caller may seal the directory

A rank that fails fails the save; a rank that is lost, or that leaves bytes out, never gets a seal.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tandem.errors import CheckpointError, RankLost
from tandem.io import row_file
from tandem.io.rank_answers import tried, what_failed
from tandem.types import Part

_LOOK_S = 0.02
Sizes = dict[str, int]


class Ranks(Protocol):
    """What this needs of train/crew.py."""

    rank: int
    ranks: int

    @property
    def broken(self) -> str: ...  # which rank is lost and why; empty while none is
    def board(self) -> Any: ...  # a client of the ranks' store, for another thread
    def gather(self, value: Any) -> list[Any]: ...
    def tick(self) -> None: ...


class FileParts(NamedTuple):
    """What this rank writes into a file. Rank 0 has some part of every tensor."""

    parts: Sequence[Part]
    metadata: Mapping[str, str] | None = None


class RowSave:
    """What a rank holds of one save at a time, until it is written or the next one takes its place."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._number, self._files = 0, dict[str, FileParts]()
        self._listener: threading.Thread | None = None
        self._superseded = threading.Event()

    def free(self) -> None:
        """Wait until this rank no longer reads what it holds; its memory may be written to then."""
        self._superseded.set()
        if self._listener is not None:
            self._listener.join()
            self._listener = None

    def hold(self, number: int, files: Mapping[str, FileParts]) -> None:
        """Keep these parts for the save of this number. `files`: by their path in its directory."""
        self.free()
        self._superseded = threading.Event()
        self._number, self._files = number, dict(files)
        if self._ranks.rank:
            self._listener = threading.Thread(target=self._listen, name="checkpoint", daemon=True)
            self._listener.start()

    def write(self, number: int, directory: Path) -> None:
        """Rank 0, on any thread: write what all ranks hold, and return when it is on the disk. CheckpointError: a rank
        could not write. RankLost: a rank is gone."""
        if number != self._number:
            raise CheckpointError(f"{directory}: what ranks held of save {number} has been replaced")
        board = self._ranks.board()
        sizes = _begun(directory, self._files)
        board.set(f"write/{number}", str(directory.absolute()))
        answers: list[dict[str, Any]] = [_written(directory, self._files, lambda: None)]
        for rank in range(1, self._ranks.ranks):
            answers.append(json.loads(self._awaited(board, f"written/{number}/{rank}")))
        for key in (f"write/{number}", *(f"written/{number}/{rank}" for rank in range(1, self._ranks.ranks))):
            board.delete_key(key)
        if failed := what_failed(answers):
            raise CheckpointError(failed)
        _check_sizes(directory, sizes, [answer["value"] for answer in answers])

    def _awaited(self, board: Any, key: str) -> str:
        while not board.check([key]):
            if self._ranks.broken:
                raise RankLost(self._ranks.broken)
            time.sleep(_LOOK_S)
        return board.get(key).decode()

    def _listen(self) -> None:
        number, files, superseded = self._number, self._files, self._superseded
        with suppress(ConnectionError, RuntimeError):  # the store is gone, and rank 0 with it
            board = self._ranks.board()
            while not board.check([f"write/{number}"]):
                if superseded.wait(_LOOK_S):
                    return
            answer = _written(Path(board.get(f"write/{number}").decode()), files, lambda: None)
            board.set(f"written/{number}/{self._ranks.rank}", json.dumps(answer))


def write_together(ranks: Ranks, directory: Path, files: Mapping[str, FileParts]) -> None:
    """Inside an order, called by all ranks: write files at once, from where the tensors are."""
    sizes = _begun(directory, files) if ranks.rank == 0 else {}
    ranks.gather(None)
    answers = ranks.gather(_written(directory, files, ranks.tick))
    if failed := what_failed(answers):
        raise CheckpointError(failed)
    if ranks.rank == 0:
        _check_sizes(directory, sizes, [answer["value"] for answer in answers])


class Made(Protocol):
    """Files of tensors that all ranks make together, one tensor at a time, and rank 0 has whole."""

    def files(self) -> dict[str, list[Part]]: ...  # without values
    def parts(self, file: str) -> Iterator[Part]: ...
    def write_companions(self, directory: Path) -> None: ...


def write_as_made(ranks: Ranks, directory: Path, made: Made) -> None:
    """Inside an order, called by all ranks: rank 0 writes each tensor as it is made."""
    for file, parts in made.files().items():
        coming = _ticking(made.parts(file), ranks.tick)
        if ranks.rank == 0:
            row_file.begin(directory / file, parts, {"format": "pt"})
            row_file.write_parts(directory / file, coming)
        else:
            for _ in coming:
                pass
    if ranks.rank == 0:
        made.write_companions(directory)


def _begun(directory: Path, files: Mapping[str, FileParts]) -> Sizes:
    sizes: Sizes = {}
    for file, held in files.items():
        (directory / file).parent.mkdir(exist_ok=True)
        sizes[file] = row_file.begin(directory / file, held.parts, held.metadata)
    return sizes


def _written(directory: Path, files: Mapping[str, FileParts], tick: Callable[[], None]) -> dict[str, Any]:
    """Return how many bytes of each file this rank has written, or what failed."""

    def write() -> Sizes:
        return {
            file: row_file.write_parts(directory / file, _ticking(held.parts, tick)) for file, held in files.items()
        }

    return tried(write)


def _ticking(parts: Iterable[Part], tick: Callable[[], None]) -> Iterator[Part]:
    for part in parts:
        tick()
        yield part


def _check_sizes(directory: Path, sizes: Sizes, written: Sequence[Sizes]) -> None:
    for file, size in sizes.items():
        done = [each.get(file, 0) for each in written]
        if sum(done) != size:
            told = ", ".join(f"rank {rank} {count:,}" for rank, count in enumerate(done))
            raise CheckpointError(f"{directory / file}: has {size:,} bytes of tensors, and ranks wrote others: {told}")
