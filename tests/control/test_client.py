"""The client against a real server: retries, typed errors, streams that go on, and mirrors as directories."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from plane import TOKEN, Served, piece, served
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.client import AsyncTandem, Place, Tandem, find_place, save_place
from tandem.client.pull import pull
from tandem.control.tables import Run
from tandem.errors import (
    ControlConflict,
    ControlError,
    ControlInvalid,
    ControlNotAllowed,
    ControlNotKnown,
    ControlSilent,
    SpecError,
)
from tandem.recipes.control import allowed_hosts
from tandem.serve.http.run import Listen, Server
from tandem.shapes.runs import FileInfo
from tandem.spec.load import parse_spec

SPEC_TABLES = {
    "recipe": "rl", "name": "sorts", "model": {"preset": "tiny"}, "environment": {"name": "sort"},
    "train": {"steps": 1, "lr": 1e-3, "groups_per_step": 1, "group_size": 2},
}  # fmt: skip


class LosesAnswers:
    """An app whose answers to some requests are lost on the way: `lose` of them, and streams after `cut` events."""

    def __init__(self, app: Any) -> None:
        self.app, self.state = app, app.state
        self.title, self.lose, self.cut, self.asked = app.title, 0, 0, list[str]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        self.asked.append(f"{scope['method']} {scope['path']}")
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        if "last-event-id" in headers:
            self.asked[-1] += f" after {headers['last-event-id']}"
        lost, events = self.lose > 0, 0
        self.lose -= lost

        async def sent(message: Any) -> None:
            nonlocal events
            if lost:
                return
            events += message.get("body", b"").count(b"data: ")
            await send(message)
            if self.cut and events >= self.cut:
                self.cut = 0
                raise ConnectionResetError("cut by the test")

        await self.app(scope, receive, sent)
        if lost:
            raise ConnectionResetError("lost by the test")


class Running:
    def __init__(self, home: Path, **more: Any) -> None:
        self.plane: Served = served(home, **more)
        self.app = LosesAnswers(self.plane.app)
        self.server = Server(self.app, Listen(home / "listen"), lambda _: None)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.url:
            time.sleep(0.01)

    def client(self, key: str = TOKEN, **more: Any) -> Tandem:
        return Tandem(self.server.url, key, **more)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    made = Running(tmp_path_factory.mktemp("client"))
    yield made
    made.server.should_exit = True
    made.thread.join()


@pytest.fixture
def tandem(running: Running) -> Iterator[Tandem]:
    with running.client() as client:
        yield client


def test_a_submit_whose_answers_are_lost_makes_one_run(running: Running, tandem: Tandem):
    before = len(tandem.runs())
    running.app.lose = 3
    run = tandem.submit(SPEC_TABLES, target="box", max_cost_usd=5)
    assert run.info().state == "queued"
    assert len(tandem.runs()) == before + 1
    assert running.app.asked[-6:-2].count("POST /api/runs") == 4


def test_what_a_spec_leaves_out_is_left_for_the_machine_that_trains(
    running: Running, tandem: Tandem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mine = tmp_path / "mine.toml"
    mine.write_text(tomli_w.dumps(SPEC_TABLES))
    monkeypatch.setenv("TANDEM_CONTROL", running.server.url)
    monkeypatch.setenv("TANDEM_CONTROL_KEY", TOKEN)
    told = CliRunner().invoke(app, ["submit", str(mine), "--target", "box", "--set", "train.lr=0.5", "--json"])
    assert told.exit_code == 0, told.output
    by_command = json.loads(told.stdout)["id"]
    by_hand = tandem.submit(mine, target="box").id
    for run, lr in ((by_command, 0.5), (by_hand, 1e-3)):
        kept = asyncio.run(running.plane.plane.store.read(lambda session, run=run: session.get_one(Run, run).spec_toml))
        sent = parse_spec(tomllib.loads(kept))
        assert (sent.name, sent.train.lr) == ("sorts", lr)
        assert all(map(sent.left_out, ("model.attention", "precision.weights", "engine.kind", "sync.bridge")))


def test_each_refusal_is_an_error_of_its_own_type(running: Running, tandem: Tandem):
    run = tandem.submit(SPEC_TABLES, target="box")
    with pytest.raises(ControlNotKnown, match="there is no run") as unknown:
        tandem.run("run_" + "a" * 26).info()
    assert (unknown.value.status, unknown.value.field) == (404, "run")
    with pytest.raises(ControlInvalid, match="this server has box, free"):
        tandem.submit(SPEC_TABLES, target="moon")
    with pytest.raises(SpecError, match=r"^name: .*pattern") as wrong:
        tandem.set_secret("lower", "canary\0")
    with pytest.raises(SpecError, match=r"^value: .*pattern") as worse:
        tandem.set_secret("HF_TOKEN", "canary\0")
    assert "canary" not in f"{wrong.value} {worse.value}"
    with pytest.raises(SpecError, match="recipe"):  # before it is sent
        tandem.submit({"recipe": "magic"}, target="box")
    with pytest.raises(ControlConflict, match="is queued"):
        run.resume()
    with pytest.raises(ControlNotAllowed, match="revoked"), running.client("tdm_wrong") as stranger:
        stranger.me()
    reader = tandem.make_key("reader", ["runs:read"]).key
    with pytest.raises(ControlNotAllowed, match="runs:write") as lacking, running.client(reader) as client:
        client.run(run.id).cancel()
    assert lacking.value.status == 403
    with pytest.raises(ControlSilent, match="did not answer"):
        Tandem("http://127.0.0.1:9", TOKEN, patience_s=0.3).me()


def test_a_stream_that_breaks_goes_on_after_the_last_event(running: Running, tandem: Tandem):
    run = tandem.submit(SPEC_TABLES, target="box")
    run.cancel()
    running.plane.open_attempt(run.id)
    running.plane.close_attempt(run.id, "cancelled")
    running.app.cut, at = 2, len(running.app.asked)
    events = list(run.follow())
    assert [(each.n, each.kind) for each in events] == [(1, "state"), (2, "want"), (3, "state"), (4, "state")]
    streams = [each for each in running.app.asked[at:] if " after " in each]
    assert [each.rpartition(" ")[2] for each in streams] == ["0", "2"]
    assert run.wait().state == "cancelled"


def test_the_asynchronous_client_does_the_same(running: Running):
    async def all_of_it() -> tuple[str, list[int], int]:
        async with AsyncTandem(running.server.url, TOKEN) as server:
            running.app.lose = 1
            run = await server.submit(SPEC_TABLES, target="box")
            await run.cancel()
            await asyncio.to_thread(running.plane.open_attempt, run.id)
            await asyncio.to_thread(running.plane.close_attempt, run.id, "cancelled")
            running.app.cut = 1
            events = [each.n async for each in run.follow()]
            with pytest.raises(ControlNotKnown):
                await server.run("run_none").info()
            return (await run.wait()).state, events, len(await server.runs())

    state, events, count = asyncio.run(all_of_it())
    assert (state, events) == ("cancelled", [1, 2, 3, 4])
    assert count > 0


def test_a_pull_brings_what_is_new_and_nothing_else(running: Running, tandem: Tandem, tmp_path: Path):
    run = tandem.submit(SPEC_TABLES, target="box")
    attempt, token = running.plane.open_attempt(run.id)
    post = lambda what, **body: running.plane.made(f"/api/attempts/{attempt}/{what}", {"instance": "i", **body}, token)  # noqa: E731
    post("claim")
    post("append", pieces=[piece("m.jsonl", 1, 0, b"one\n"), piece("a/s.json", 1, 0, b"{}")])
    assert run.pull(tmp_path).bytes == 6
    assert run.pull(tmp_path).bytes == 0
    post("append", pieces=[piece("m.jsonl", 1, 4, b"two\n")])
    assert run.pull(tmp_path).bytes == 4
    post("append", pieces=[piece("m.jsonl", 2, 4, b"TWO!\n"), piece("a/s.json", 2, 0, b"[]")])
    assert run.pull(tmp_path).bytes == 11
    assert (tmp_path / "m.jsonl").read_bytes() == b"one\nTWO!\n"
    assert (tmp_path / "a/s.json").read_bytes() == b"[]"
    (tmp_path / "a/s.json").unlink()
    assert run.pull(tmp_path).bytes == 2


@pytest.mark.parametrize("file", ["../x", "/etc/x", "a/../x", ".ssh/x", "a//x"])
def test_a_server_that_names_a_file_outside_the_directory_is_refused(tmp_path: Path, file: str):
    with pytest.raises(ControlError, match="nothing was written"):
        pull(lambda: [FileInfo(file=file, generation=1, size=1)], lambda *_: (b"x", 1, 1), tmp_path / "in")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_link_in_the_directory_is_not_written_through(tmp_path: Path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "log.txt").symlink_to(tmp_path / "target")
    with pytest.raises(ControlError, match="is a link"):
        pull(lambda: [FileInfo(file="log.txt", generation=1, size=1)], lambda *_: (b"x", 1, 1), tmp_path / "in")
    assert not (tmp_path / "target").exists()


def test_the_server_is_found_in_the_environment_and_then_in_the_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_place({}) is None
    path = save_place(Place("https://there/", "secret"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert find_place({}) == Place("https://there", "secret")
    assert "secret" not in repr(find_place({}))
    assert find_place({"TANDEM_CONTROL": "https://there"}) == Place("https://there", "secret")
    elsewhere = {"TANDEM_CONTROL": "https://elsewhere", "TANDEM_CONTROL_KEY": "k"}
    assert find_place(elsewhere) == Place("https://elsewhere", "k")
    with pytest.raises(SpecError, match="put its key into TANDEM_CONTROL_KEY"):
        find_place({"TANDEM_CONTROL": "https://elsewhere"})
    with pytest.raises(SpecError, match="no data directory of a `tandem control serve`"):
        find_place({"TANDEM_CONTROL": str(tmp_path)})
    (tmp_path / "ready.json").write_text(json.dumps({"url": "http://here", "pid": 1}))
    (tmp_path / "token").write_text("t\n")
    assert find_place({"TANDEM_CONTROL": str(tmp_path)}) == Place("http://here", "t")
    with pytest.raises(SpecError, match="is not a URL"):
        save_place(Place("there", "k"))


def test_a_server_behind_a_proxy_answers_to_the_name_in_its_url_as_well(tmp_path: Path):
    here = Listen(tmp_path)
    assert allowed_hosts(here, "") == here.hosts
    assert allowed_hosts(here, "https://Tandem.example.org:8443/") == {*(here.hosts or ()), "tandem.example.org"}
    assert allowed_hosts(Listen(tmp_path, "0.0.0.0", insecure=True), "https://there") is None
    with pytest.raises(SpecError, match="--url = 'there': write where machines reach this server"):
        allowed_hosts(here, "there")


def test_a_spec_says_which_of_its_files_another_machine_may_lack(tmp_path: Path):
    (tmp_path / "mine.py").write_text("class Mine: ...")
    (tmp_path / "rows.jsonl").write_text("{}")
    tables: dict[str, Any] = {**SPEC_TABLES, "environment": {"name": f"{tmp_path}/mine.py:Mine"}}
    assert list(parse_spec(tables).local_files()) == [f"{tmp_path}/mine.py"]
    assert list(parse_spec(SPEC_TABLES).local_files()) == []
