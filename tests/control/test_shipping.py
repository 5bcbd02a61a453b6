"""What an agent sends of a run directory, against the real mirror: the same bytes in the end, whatever happened."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from plane import Served, served

from tandem.agent.shipping import Shipper
from tandem.shapes.agent import PIECE_BYTES, Stream


class Mirrored:
    """A run directory, its shipper, and the mirror; some answers get lost."""

    def __init__(self, home: Path, lost: float = 0.0, seed: int = 0) -> None:
        self.here, self.random, self.lost = home / "here", random.Random(seed), lost
        self.here.mkdir()
        self.served: Served = served(home)
        self.run = self.served.submit()
        self.there = home / "runs" / self.run
        self.shipper = Shipper(self.here, {})
        self.sent = 0

    def streams(self) -> Mapping[str, Stream]:
        return asyncio.run(self.served.plane.mirror.streams(self.run))

    def ship(self) -> None:
        while pieces := self.shipper.pieces():
            self.sent += sum(len(piece.data) for piece in pieces)
            answer = asyncio.run(self.served.plane.mirror.append(self.run, pieces))
            if self.random.random() >= self.lost:
                self.shipper.answered(answer)

    def end(self) -> None:
        self.shipper.ended = True
        self.ship()
        assert asyncio.run(self.served.plane.mirror.differing(self.run, self.shipper.digests())) == {}

    def write(self, file: str, data: bytes) -> None:
        """Replace a file, as atomic_write does."""
        (self.here / ".tmp").write_bytes(data)
        (self.here / ".tmp").replace(self.here / file)

    def append(self, file: str, data: bytes) -> None:
        with (self.here / file).open("ab") as opened:
            opened.write(data)


@pytest.fixture
def mirrored(tmp_path: Path) -> Mirrored:
    return Mirrored(tmp_path)


def test_what_grows_is_sent_once_and_what_is_replaced_is_sent_whole(mirrored: Mirrored) -> None:
    for step in range(20):
        mirrored.append("metrics.jsonl", b"x" * 1000)
        mirrored.write("status.json", b"%010d" % step)
        mirrored.ship()
    assert mirrored.sent == 20 * 1000 + 20 * 10
    assert (mirrored.there / "metrics.jsonl").read_bytes() == b"x" * 20_000
    assert (mirrored.there / "status.json").read_bytes() == b"%010d" % 19
    assert {file: stream.generation for file, stream in mirrored.streams().items()} == {
        "metrics.jsonl": 1,
        "status.json": 20,
    }


def test_rows_that_a_resume_cut_back_and_wrote_again_are_those_of_the_mirror(mirrored: Mirrored) -> None:
    mirrored.append("metrics.jsonl", b"one\ntwo\nthree\n")
    mirrored.ship()
    mirrored.write("metrics.jsonl", b"one\n")
    mirrored.append("metrics.jsonl", b"TWO\nTHREE\nfour\n")  # longer than before, and not the same
    mirrored.end()
    assert (mirrored.there / "metrics.jsonl").read_bytes() == b"one\nTWO\nTHREE\nfour\n"


def test_a_large_file_goes_over_in_pieces_and_weights_do_not(mirrored: Mirrored) -> None:
    large = random.Random(1).randbytes(5 * PIECE_BYTES + 7)
    mirrored.append("log.txt", large)
    (mirrored.here / "checkpoints").mkdir()
    for file in ("checkpoints/state.json", "adapter.safetensors", "lease.tmp", ".hidden"):
        mirrored.append(file, b"not this")
    mirrored.end()
    assert [path.name for path in mirrored.there.iterdir()] == ["log.txt"]
    assert (mirrored.there / "log.txt").read_bytes() == large


def test_an_agent_that_begins_again_sends_its_files_again_and_a_file_that_is_gone_becomes_empty(
    mirrored: Mirrored,
) -> None:
    mirrored.append("log.txt", b"one")
    mirrored.append("stacks.txt", b"stacks")
    mirrored.ship()
    mirrored.shipper = Shipper(mirrored.here, mirrored.streams())
    mirrored.append("log.txt", b" two")
    (mirrored.here / "stacks.txt").unlink()
    mirrored.end()
    assert (mirrored.there / "log.txt").read_bytes() == b"one two"
    assert (mirrored.there / "stacks.txt").read_bytes() == b""


def test_kept_samples_are_sent_once_the_trainer_has_ended(mirrored: Mirrored) -> None:
    (mirrored.here / "samples").mkdir()
    mirrored.append("samples/index.sqlite3", b"pages")
    mirrored.ship()
    assert not mirrored.there.exists()
    mirrored.end()
    assert (mirrored.there / "samples/index.sqlite3").read_bytes() == b"pages"


def test_a_file_that_is_refused_is_left_out_and_the_others_go_on(mirrored: Mirrored) -> None:
    mirrored.append("log.txt", b"one")
    assert [piece.file for piece in mirrored.shipper.pieces()] == ["log.txt"]
    mirrored.shipper.refused("too many bytes")
    mirrored.append("metrics.jsonl", b"row")
    mirrored.end()
    assert [path.name for path in mirrored.there.iterdir()] == ["metrics.jsonl"]
    assert mirrored.shipper.left_out == {"log.txt"}


@pytest.mark.parametrize("seed", range(4))
def test_the_mirror_is_byte_equal_after_any_writes_and_lost_answers(tmp_path: Path, seed: int) -> None:
    mirrored, chance = Mirrored(tmp_path, lost=0.3, seed=seed), random.Random(seed)
    names = ["metrics.jsonl", "log.txt", "status.json", "engines/0.log", "curves.png"]
    (mirrored.here / "engines").mkdir()
    for _ in range(60):
        file, path = (name := chance.choice(names)), mirrored.here / name
        match chance.randrange(4):
            case 0 | 1:
                mirrored.append(file, chance.randbytes(chance.randrange(2000)))
            case 2 if path.exists():
                mirrored.write(file, path.read_bytes()[: chance.randrange(1500)] + chance.randbytes(10))
            case _:
                mirrored.write(file, chance.randbytes(chance.randrange(300)))
        if chance.random() < 0.5:
            mirrored.ship()
        if chance.random() < 0.05:
            mirrored.shipper = Shipper(mirrored.here, mirrored.streams())
    mirrored.end()
    files = [path.relative_to(mirrored.here) for path in mirrored.here.rglob("*") if path.is_file()]
    assert files
    for file in files:
        assert (mirrored.there / file).read_bytes() == (mirrored.here / file).read_bytes(), file
