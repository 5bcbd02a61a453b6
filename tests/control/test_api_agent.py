"""The agent's routes: one claim wins, a mirror is byte-exact whatever is sent twice, a fenced agent writes nothing."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from plane import SPEC, Served, piece, served


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Served]:
    made = served(tmp_path)
    yield made
    made.plane.store.close()


class Agent:
    def __init__(self, plane: Served, run: str, instance: str = "i") -> None:
        self.plane, self.run, self.instance = plane, run, instance
        self.attempt, self.token = plane.open_attempt(run)

    def post(self, what: str, **body: Any) -> Any:
        return self.plane.ask(
            "POST", f"/api/attempts/{self.attempt}/{what}", self.token, {"instance": self.instance, **body}
        )

    def append(self, *pieces: Any, **more: Any) -> dict[str, tuple[int, int]]:
        answer = self.post("append", pieces=pieces, **more)
        assert answer.status_code == 200, answer.text
        return {file: (each["generation"], each["size"]) for file, each in answer.json()["streams"].items()}


@pytest.fixture
def agent(plane: Served) -> Agent:
    made = Agent(plane, plane.submit())
    assert made.post("claim").status_code == 200
    return made


def test_one_execution_claims_and_gets_the_spec(plane: Served):
    agent = Agent(plane, plane.submit())
    first = agent.post("claim")
    assert (first.status_code, first.json()["spec_toml"], first.json()["n"]) == (200, SPEC, 1)
    assert agent.post("claim").status_code == 200  # the same one, again
    agent.instance = "other"
    other = agent.post("claim")
    assert (other.status_code, "spec" in other.text) == (409, False)


def test_a_piece_goes_on_where_the_file_ends_and_nowhere_else(agent: Agent):
    assert agent.append(piece("log.txt", 1, 0, b"abc")) == {"log.txt": (1, 3)}
    assert agent.append(piece("log.txt", 1, 3, b"def"), piece("a/b.txt", 1, 0, b"")) == {
        "log.txt": (1, 6), "a/b.txt": (1, 0),
    }  # fmt: skip
    assert agent.append(piece("log.txt", 1, 3, b"def")) == {"log.txt": (1, 6)}  # sent twice
    assert agent.append(piece("log.txt", 1, 9, b"xyz")) == {"log.txt": (1, 6)}  # one before was lost
    assert agent.append(piece("log.txt", 3, 0, b"xyz")) == {"log.txt": (1, 6)}  # a generation was skipped
    assert agent.append(piece("log.txt", 2, 4, b"XY")) == {"log.txt": (2, 6)}  # cut back to four bytes
    assert agent.append(piece("log.txt", 2, 4, b"XY")) == {"log.txt": (2, 6)}
    path = agent.plane.plane.mirror.directory / agent.run / "log.txt"
    assert path.read_bytes() == b"abcdXY"
    assert agent.append(piece("log.txt", 3, 0, b"new")) == {"log.txt": (3, 3)}
    assert path.read_bytes() == b"new"


def test_a_piece_with_other_bytes_than_its_digest_is_refused(agent: Agent):
    wrong = dict(piece("log.txt", 1, 0, b"abc"), sha256="0" * 64)
    assert agent.post("append", pieces=[wrong]).status_code == 422
    assert agent.append(piece("log.txt", 1, 0, b"abd")) == {"log.txt": (1, 3)}


OUTSIDE = [
    "../x", "/etc/x", "a/../../x", ".hidden", "a//b", "a/.b", "a/", "a\\b", "a\nb", "a\0b", "x" * 250, "a/" * 9 + "a",
]  # fmt: skip


def test_a_path_that_leads_out_of_the_mirror_is_refused(agent: Agent):
    before = sorted(agent.plane.plane.mirror.directory.parent.rglob("*"))
    for file in OUTSIDE:
        answer = agent.post("append", pieces=[piece(file, 1, 0, b"x")])
        assert answer.status_code == 422, (file, answer.text)
        read = agent.plane.ask("GET", f"/api/runs/{agent.run}/files/{quote(file, safe='')}")
        assert read.status_code == 404, file
    assert sorted(agent.plane.plane.mirror.directory.parent.rglob("*")) == before


def test_a_fenced_agent_writes_nothing(plane: Served, agent: Agent):
    agent.append(piece("log.txt", 1, 0, b"abc"))
    plane.close_attempt(agent.run)
    answer = agent.post("append", pieces=[piece("log.txt", 1, 3, b"def")])
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "fenced")
    second = Agent(plane, agent.run, "second")
    claimed = second.post("claim").json()
    assert (claimed["n"], claimed["streams"]) == (2, {"log.txt": {"generation": 1, "size": 3}})
    assert agent.post("end", state="succeeded").status_code == 409
    assert agent.post("claim").status_code == 409
    assert (plane.plane.mirror.directory / agent.run / "log.txt").read_bytes() == b"abc"


def test_an_end_is_written_once_the_mirror_is_right_and_the_token_is_dead_then(plane: Served, agent: Agent):
    agent.append(piece("log.txt", 1, 0, b"abc"))
    digest = {"size": 4, "sha256": hashlib.sha256(b"abcd").hexdigest()}
    files = {"log.txt": digest, "other.txt": digest}
    told = agent.post("end", state="succeeded", files=files).json()
    assert (told["written"], sorted(told["differ"])) == (False, ["log.txt", "other.txt"])
    agent.append(piece("log.txt", 1, 3, b"d"), piece("other.txt", 1, 0, b"abcd"))
    assert agent.post("end", state="succeeded", files=files).json() == {"written": True, "differ": {}}
    assert agent.post("end", state="failed", why="later").json()["written"]  # the first word counts
    late = agent.post("append", pieces=[piece("log.txt", 1, 4, b"e")])
    assert (late.status_code, late.json()["error"]["code"]) == (409, "fenced")
    plane.close_attempt(agent.run, "succeeded")
    assert plane.ask("GET", f"/api/runs/{agent.run}").json()["state"] == "succeeded"


def test_an_owner_who_cancels_is_heard_at_the_next_sign_of_life(plane: Served, agent: Agent):
    assert agent.post("append").json()["want"] == "run"
    plane.ask("POST", f"/api/runs/{agent.run}/cancel", body={"save": True})
    assert agent.post("append").json()["want"] == "stop"
    plane.ask("POST", f"/api/runs/{agent.run}/cancel")
    assert agent.post("append").json()["want"] == "cancel"


def test_a_mirror_is_byte_exact_after_lost_doubled_and_reordered_requests_and_restarts(tmp_path: Path):
    plane, rng = served(tmp_path), random.Random(0)
    agent = Agent(plane, plane.submit())
    agent.post("claim")
    truth, at = {"m.jsonl": b"", "s.json": b""}, {"m.jsonl": (0, 0), "s.json": (0, 0)}
    sent: list[Any] = []
    for turn in range(60):
        match rng.randrange(4):
            case 0 if truth["m.jsonl"]:  # a resume cuts it back
                kept = rng.randrange(len(truth["m.jsonl"]) + 1)
                truth["m.jsonl"] = truth["m.jsonl"][:kept]
                new = [("m.jsonl", at["m.jsonl"][0] + 1, min(kept, at["m.jsonl"][1]))]
            case 1:
                truth["s.json"] = rng.randbytes(rng.randrange(1, 50))
                new = [("s.json", at["s.json"][0] + 1, 0)]
            case _:
                truth["m.jsonl"] += rng.randbytes(rng.randrange(1, 50))
                new = [("m.jsonl", at["m.jsonl"][0] or 1, at["m.jsonl"][1])]
        pieces = [piece(file, generation, offset, truth[file][offset:]) for file, generation, offset in new]
        sent.append(pieces)
        if rng.random() < 0.3:
            agent.append(*rng.choice(sent))  # an old request arrives again
        if rng.random() < 0.2:
            continue  # it was lost
        answer = agent.append(*pieces)
        at |= answer
        if turn % 20 == 10:
            plane.plane.store.close()
            again = served(tmp_path)
            plane.app, plane.plane = again.app, again.plane
    for file, content in truth.items():  # what is not right is sent again, as at an end
        generation, _ = at[file]
        found = plane.plane.mirror.directory / agent.run / file
        if not found.exists() or found.read_bytes() != content:
            at |= agent.append(piece(file, generation, 0, b""))
            at |= agent.append(piece(file, at[file][0] + 1, 0, content))
    files = {
        file: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()} for file, content in truth.items()
    }
    assert agent.post("end", state="succeeded", files=files).json()["written"]
    for file, content in truth.items():
        read = plane.ask("GET", f"/api/runs/{agent.run}/files/{file}")
        assert (read.content, read.headers["x-size"]) == (content, str(len(content)))
    listed = plane.ask("GET", f"/api/runs/{agent.run}/files").json()["items"]
    assert [(each["file"], each["size"]) for each in listed] == [(file, len(truth[file])) for file in sorted(truth)]
    plane.plane.store.close()


def test_a_file_is_read_in_parts_and_never_shown_as_a_page(plane: Served, agent: Agent):
    agent.append(piece("log.txt", 1, 0, b"<script>alert(1)</script>"))
    part = plane.ask("GET", f"/api/runs/{agent.run}/files/log.txt?offset=1&limit=6")
    assert (part.content, part.headers["x-generation"], part.headers["x-size"]) == (b"script", "1", "25")
    assert part.headers["content-type"] == "application/octet-stream"
    assert (part.headers["content-disposition"], part.headers["x-content-type-options"]) == ("attachment", "nosniff")
    assert plane.ask("GET", f"/api/runs/{agent.run}/files/log.txt?offset=99").content == b""
    assert plane.ask("GET", f"/api/runs/{agent.run}/files/none.txt").status_code == 404


def test_no_generation_means_two_contents_after_a_restart(tmp_path: Path):
    plane = served(tmp_path)
    agent = Agent(plane, plane.submit())
    agent.post("claim")
    for generation in range(1, 5):
        agent.append(piece("s.json", generation, 0, b"%d" % generation), piece("log.txt", 1, generation - 1, b"x"))
    plane.plane.store.close()
    again = served(tmp_path)
    plane.app, plane.plane = again.app, again.plane
    streams = agent.post("claim").json()["streams"]
    assert streams["log.txt"] == {"generation": 1, "size": 4}  # it only grew, and goes on
    assert streams["s.json"]["generation"] > 4
    assert agent.append(piece("s.json", 5, 0, b"5")) == {"s.json": (streams["s.json"]["generation"], 1)}
    plane.plane.store.close()
