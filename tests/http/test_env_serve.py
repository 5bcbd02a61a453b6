"""`tandem env serve` with a real rollout service and engine server: groups arrive despite kills of each."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from engine_served import FakeEngine, engine_serving

from tandem.errors import Conflict, GroupRefused, NotKnown, SpecError, StoreError, StoreTimeout
from tandem.recipes.environment_client import _short
from tandem.rollout.queue.types import RegisteredEnvironment
from tandem.rollout.queue.validation import check_name
from tandem.rollout.remote.client import ServiceClient
from tandem.rollout.remote.environment_store import TicketStore
from tandem.rollout.wire import codec
from tandem.spec.environment import HttpJudgeSpec, NoJudge
from tandem.spec.load import parse_judge
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Ticket, Trajectory


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def program(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen(
        [sys.executable, "-m", "tandem", *map(str, arguments)], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        yield running
    finally:
        running.kill()
        running.wait(timeout=10)


class Service:
    """`tandem rollouts serve`, which may be killed and started again."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir, self.port, self.ready = data_dir, free_port(), data_dir / "ready.json"
        self.url = f"http://127.0.0.1:{self.port}"
        self.token_file = data_dir / "token"

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        self.data_dir.mkdir(exist_ok=True)
        self.ready.unlink(missing_ok=True)
        asked = ("--data-dir", self.data_dir, "--port", self.port, "--ready-file", self.ready)
        with program("rollouts", "serve", *asked) as process:
            until = time.monotonic() + 30
            while not self.ready.exists():
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.02)
            self.token_file = Path(json.loads(self.ready.read_text())["token_file"])
            yield process


class Trainer:
    def __init__(self, client: ServiceClient) -> None:
        self.client, self.epoch = client, 0

    async def register(self, **spec: Any) -> None:
        body = {"run_id": "r", "groups_per_step": 2, "max_lag": 3, **spec}
        self.epoch = (await self.client.post("/v2/trainer", body))["epoch"]

    async def step(self) -> list[dict[str, Any]]:
        told: dict[str, Any] = {}
        async with asyncio.timeout(120):
            while not told:
                body = {"epoch": self.epoch, "groups": 2, "wait_s": 5.0}
                told = await self.client.post("/v2/leases", body, wait_s=5.0)
        ids = [group["id"] for group in told["groups"]]
        await self.client.post("/v2/release", {"epoch": self.epoch, "count": len(ids)})
        await self.client.post("/v2/ack", {"epoch": self.epoch, "leases": [told["lease"]]})
        return told["groups"]


def test_groups_come_from_workers_and_an_engine_over_http_also_after_the_service_was_killed(tmp_path: Path):
    tokenizer, service = byte_tokenizer(), Service(tmp_path / "rollouts")
    tokenizer.save_pretrained(tmp_path / "model")
    engine = FakeEngine(version=0)
    engine.pause_s = 0.001
    with engine_serving(engine, Renderer(tokenizer), tmp_path / "engine") as served:
        (tmp_path / "engine-token").write_text(served.token)

        async def scenario() -> None:
            with service.running() as first:
                client = ServiceClient(service.url, service.token_file)
                trainer = Trainer(client)
                await trainer.register()
                asked = (
                    "--rollouts", service.url, "--token-file", service.token_file, "--engine", served.url,
                    "--engine-token-file", tmp_path / "engine-token", "--model", tmp_path / "model",
                    "--group-size", 3, "--max-tokens", 6, "--workers", 4, "--set", "largest=9",
                )  # fmt: skip
                with program("env", "serve", "arithmetic", *asked) as environment:
                    groups = [*await trainer.step(), *await trainer.step()]
                    first.send_signal(signal.SIGKILL)
                    first.wait()
                    with service.running():
                        groups += [*await trainer.step(), *await trainer.step()]
                        assert len({group["order"] for group in groups}) == 8
                        for group in groups:
                            assert len(group["group"]["trajectories"]) == 3
                            for trajectory in group["group"]["trajectories"]:
                                opening = Renderer(tokenizer).prompt(trajectory["messages"][:1])
                                assert trajectory["ids"] == [*opening, 1, 2, 3, 4, 5, 6]  # what the engine says
                                assert trajectory["spans"] == [[-1, len(opening)], [0, 6]]
                        environment.send_signal(signal.SIGTERM)
                        assert await asyncio.to_thread(environment.wait, 15) == 0
                await client.close()

        asyncio.run(scenario())


NOSY = """
import os

from tandem.types import Outcome, Task


class Nosy:
    def tasks(self, split):
        return [Task(f"{split} {n}", ({"role": "user", "content": "what is there?"},)) for n in range(8)]

    async def run(self, task, chat):
        await chat.reply()
        try:
            seen = open("SECRET").read()
        except OSError:
            seen = ""
        return Outcome(0.0, {"seen": float(bool(seen)), "alone": float(os.getpid() == 2)})
"""


def test_an_environment_that_is_served_in_a_sandbox_sees_nothing_else(tmp_path: Path):
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: `make install-system`")
    tokenizer, service = byte_tokenizer(), Service(tmp_path / "rollouts")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "secret").write_text("a key")
    (tmp_path / "nosy.py").write_text(NOSY.replace("SECRET", str(tmp_path / "secret")))
    with engine_serving(FakeEngine(version=0), Renderer(tokenizer), tmp_path / "engine") as served, service.running():
        (tmp_path / "engine-token").write_text(served.token)
        asked = (
            "--rollouts", service.url, "--token-file", service.token_file, "--engine", served.url,
            "--engine-token-file", tmp_path / "engine-token", "--model", tmp_path / "model",
            "--group-size", 2, "--max-tokens", 3, "--workers", 2, "--sandbox",
        )  # fmt: skip

        async def scenario() -> list[dict[str, Any]]:
            client = ServiceClient(service.url, service.token_file)
            trainer = Trainer(client)
            await trainer.register()
            with program("env", "serve", tmp_path / "nosy.py", *asked):
                groups = await trainer.step()
            await client.close()
            return groups

        told = [each["metrics"] for group in asyncio.run(scenario()) for each in group["group"]["trajectories"]]
    assert [(each["seen"], each["alone"]) for each in told] == [(0.0, 1.0)] * 4


# --- the client, and tickets


class Scripted(ThreadingHTTPServer):
    """Answers with what `answers` gives for a path and how often it was asked: a status and a body, or a hang-up."""

    daemon_threads = True

    def __init__(self, answers: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.answers, self.asked = answers, list[tuple[str, str, bytes]]()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Answer(BaseHTTPRequestHandler):
    server: Scripted

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        count = sum(path == self.path for path, _, _ in self.server.asked)
        self.server.asked.append((self.path, self.headers.get("idempotency-key", ""), body))
        status, told = self.server.answers(self.path, count)
        if status == 0:
            self.close_connection = True
            return
        content = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None: ...


def scripted(tmp_path: Path, answers: Any, use: Any, **options: Any) -> tuple[Any, list[tuple[str, str, bytes]]]:
    (tmp_path / "token").write_text("t")

    async def scenario(server: Scripted) -> Any:
        client = ServiceClient(server.url, tmp_path / "token", **options)
        try:
            return await use(client)
        finally:
            await client.close()

    with Scripted(answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            return asyncio.run(scenario(server)), server.asked
        finally:
            server.shutdown()


def test_a_write_is_repeated_under_its_own_key_until_it_is_answered(tmp_path: Path):
    answers = [(503, {}), (0, {}), (429, {}), (507, {}), (200, {"well": 1})]
    told, asked = scripted(tmp_path, lambda _, count: answers[count], lambda client: client.post("/v2/x", {"a": 1}))
    assert told == {"well": 1}
    assert len(asked) == 5
    assert len(set(asked)) == 1  # path, key, body


@pytest.mark.parametrize(
    ("status", "error"), [(404, NotKnown), (409, Conflict), (422, GroupRefused), (401, StoreError), (400, StoreError)]
)
def test_what_a_service_says_no_with_is_a_named_error(tmp_path: Path, status, error):
    told = {"error": {"message": "because", "field": "groups.0"}}
    with pytest.raises(error, match="because"):
        scripted(tmp_path, lambda _, __: (status, told), lambda client: client.post("/v2/x", {}))


def test_patience_ends(tmp_path: Path):
    with pytest.raises(StoreTimeout, match=r"did not answer within 1 s: answered 503"):
        scripted(tmp_path, lambda _, __: (503, {}), lambda client: client.post("/v2/x", {}), patience_s=1.0)


@pytest.mark.parametrize(
    ("status", "told", "error"),
    [
        (404, {}, r"rollouts\.url = 'http://127\.0\.0\.1:\d+': the server there is not a rollout service .* 404"),
        (200, {"body_bytes": 1}, r"the server there is not a rollout service \(GET /limits: 200\)"),
        (401, {}, r"rollouts\.token_file = '.*/token' holds a token that .* refuses"),
    ],
)
def test_what_is_no_rollout_service_or_another_one_is_refused_at_once(tmp_path: Path, status, told, error):
    with pytest.raises(SpecError, match=error):
        scripted(tmp_path, lambda _, __: (status, told), lambda client: client.check_service())


def test_a_service_that_is_not_there_yet_is_waited_for(tmp_path: Path):
    answers = [(502, {}), (0, {}), (200, {"queued_groups": 1})]
    _, asked = scripted(tmp_path, lambda _, count: answers[count], lambda client: client.check_service())
    assert [path for path, _, _ in asked] == ["/limits"] * 3


def test_a_judge_is_told_to_the_command_as_a_spec_tells_it():
    assert parse_judge([]) == NoJudge()
    assert parse_judge(["kind=http", "url=http://h/v1", "model=m"]) == HttpJudgeSpec(
        kind="http", url="http://h/v1", model="m"
    )
    with pytest.raises(SpecError, match="--judge url = "):
        parse_judge(["kind=http", "model=m"])
    with pytest.raises(SpecError, match=r"--judge kind = .*'none', 'engine', 'http'"):
        parse_judge(["kind=htp"])


def test_a_url_without_its_scheme_is_refused(tmp_path: Path):
    with pytest.raises(SpecError, match=r"--rollouts = '127\.0\.0\.1:8200' is not a URL"):
        ServiceClient("127.0.0.1:8200", tmp_path, url_option="--rollouts")


def test_a_token_file_that_never_was_is_an_error_that_names_it(tmp_path: Path):
    async def scenario() -> None:
        client = ServiceClient("http://127.0.0.1:1", tmp_path / "tokne", token_option="--rollouts-token-file")
        async with asyncio.timeout(20):
            await client.post("/v2/x", {})

    with pytest.raises(SpecError, match=r"--rollouts-token-file = '.*/tokne': No such file"):
        asyncio.run(scenario())


def test_the_command_ends_where_its_token_file_is_not_there(tmp_path: Path):
    (tmp_path / "engine-token").write_text("t")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    with engine_serving(FakeEngine(version=0), Renderer(byte_tokenizer()), tmp_path / "engine") as served:
        (tmp_path / "engine-token").write_text(served.token)
        asked = (
            "--rollouts", "http://127.0.0.1:1", "--token-file", tmp_path / "tokne", "--engine", served.url,
            "--engine-token-file", tmp_path / "engine-token", "--model", tmp_path / "model",
        )  # fmt: skip
        ended = subprocess.run(
            [sys.executable, "-m", "tandem", "env", "serve", "arithmetic", *map(str, asked)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert ended.returncode == 2
    assert "--token-file = " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_token_file_that_is_gone_for_a_moment_is_waited_for(tmp_path: Path):
    async def use(client: ServiceClient) -> dict[str, Any]:
        await client.post("/v2/x", {})
        (tmp_path / "token").unlink()
        again = asyncio.create_task(client.post("/v2/x", {}))
        await asyncio.sleep(0.2)
        (tmp_path / "token").write_text("new")
        return await again

    told, asked = scripted(tmp_path, lambda _, count: (200, {"count": count}), use)
    assert (told, len(asked)) == ({"count": 1}, 2)


GROUP = [Trajectory([5, 6], [False, True], [0.0, -0.5], [-1, 0], 1.0)]


def service(path: str, count: int) -> tuple[int, dict[str, Any]]:
    if path == "/v2/environments":
        return 200, {"id": count, "name": f"env_{count}"}
    if path == "/v2/tickets":
        return (404, {}) if count == 1 else (200, {"tickets": [] if count == 2 else [count]})
    return 200, {}


def test_a_seat_that_is_not_known_any_more_is_taken_anew(tmp_path: Path):
    async def use(client: ServiceClient) -> list[Ticket]:
        store = TicketStore(client, RegisteredEnvironment("env"), most_under_way=4)
        tickets = [await store.admit(), await store.admit()]
        await store.put(tickets[0], GROUP)
        await store.drop(tickets[1], "hung")
        return tickets

    tickets, asked = scripted(tmp_path, service, use)
    assert tickets == [Ticket(0), Ticket(3)]
    assert [path for path, _, _ in asked][-2:] == ["/v2/groups?environment=0", "/v2/tickets/3/drop"]
    assert json.loads(asked[-1][2]) == {"environment": 1, "reason": "hung"}
    (sent,) = codec.read_frames(asked[-2][2])
    assert (sent.head.ticket, sent.size) == (0, 1)
    assert codec.decode(sent.frame) == GROUP


def test_whoever_waits_says_what_for_and_says_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def full(path: str, count: int) -> tuple[int, dict[str, Any]]:
        if path == "/v2/environments" and count < 2:
            return 409, {"error": {"code": "conflict", "message": "min_share 0.9 does not fit"}}
        return 200, {"id": 0, "name": "e", "tickets": [count]}

    async def use(client: ServiceClient) -> Ticket:
        return await TicketStore(client, RegisteredEnvironment("env", min_share=0.9), most_under_way=1).admit()

    with caplog.at_level("WARNING"):
        ticket, _ = scripted(tmp_path, full, use)
    assert ticket == Ticket(0)
    (told,) = [
        record.getMessage() for record in caplog.records if record.name == "tandem.rollout.remote.environment_store"
    ]
    assert told == "waiting: rollouts: /v2/environments: min_share 0.9 does not fit"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("path/to/words.py:Words", "words"),
        ("path/to/my words.py", "my-words"),
        ("package.module:Words", "Words"),
        ("gymnasium:ALE/Pong-v5", "Pong-v5"),
        ("arithmetic", "arithmetic"),
        ("x:" + "y" * 300, "y" * 128),
        ("x:\u00e9", "environment"),
    ],
)
def test_names_that_a_service_takes(name: str, short: str):
    assert _short(name) == short
    check_name("name", short)


def test_a_producer_that_is_cancelled_loses_no_ticket(tmp_path: Path):
    came, answers = list[str](), threading.Event()
    answers.set()

    def slow(path: str, count: int) -> tuple[int, dict[str, Any]]:
        came.append(path)
        assert answers.wait(20)
        if path.startswith("/v2/groups") and count == 0:
            return 503, {}  # it is cancelled before it is asked again
        return 200, {"id": 0, "name": "e", "tickets": [count]}

    async def use(client: ServiceClient) -> Ticket:
        store = TicketStore(client, RegisteredEnvironment("env"), most_under_way=1)
        ticket = await store.admit()
        for cancelled in (store.put(ticket, GROUP), store.admit()):
            answers.clear()
            task, before = asyncio.create_task(cancelled), len(came)
            async with asyncio.timeout(20):
                while len(came) == before:
                    await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.sleep(0)
            answers.set()
            await asyncio.gather(task, return_exceptions=True)
        second = await store.admit()  # what the cancelled question brought
        await store.drop_all("engine")
        await store.leave()
        return second

    second, asked = scripted(tmp_path, slow, use)
    assert second == Ticket(1)
    paths = [path for path, _, _ in asked]
    assert sorted(paths) == [
        "/v2/environments", "/v2/environments/0/disconnect", "/v2/groups?environment=0", "/v2/groups?environment=0",
        "/v2/tickets", "/v2/tickets", "/v2/tickets/1/drop",
    ]  # fmt: skip


def traj(**more: Any) -> Trajectory:
    return Trajectory([5, 6], [False, True], [0.0, -0.5], [-1, 0], 1.0, **more)


@pytest.mark.parametrize(
    "unsendable",
    [
        traj(metrics={str(number): 1.0 for number in range(300)}),
        traj(messages=[{"role": "tool", "content": 10**30}]),
        traj(messages=[{"role": "tool", "content": json.loads("[" * 20 + "]" * 20)}]),
        traj(messages=[{"role": "tool", "content": object()}]),
        traj(messages=[{"role": "tool", "content": "\ud800"}]),
        Trajectory([5, 6], [False, False], [0.0, 0.0], [-1, -1], 1.0),
    ],
    ids=["metrics", "huge", "nested", "object", "surrogate", "nothing trained"],
)
def test_a_group_that_cannot_be_sent_gives_its_ticket_back(tmp_path: Path, unsendable: Trajectory):
    async def use(client: ServiceClient) -> TicketStore:
        store = TicketStore(client, RegisteredEnvironment("env"), most_under_way=1)
        await store.put(await store.admit(), [unsendable])
        await store.put(await store.admit(), GROUP)  # there is room again
        return store

    store, asked = scripted(tmp_path, service, use)
    assert (store.put_groups, store.dropped) == (1, {"refused": 1})
    assert asked[2][0] == "/v2/tickets/0/drop"
    assert json.loads(asked[2][2]) == {"environment": 0, "reason": "refused"}


def test_the_ticket_of_a_group_that_the_service_refuses_is_given_back(tmp_path: Path):
    def refuses(path: str, count: int) -> tuple[int, dict[str, Any]]:
        return (422, {}) if path.startswith("/v2/groups") else service(path, count)

    async def use(client: ServiceClient) -> TicketStore:
        store = TicketStore(client, RegisteredEnvironment("env"), most_under_way=1)
        await store.put(await store.admit(), GROUP)
        return store

    store, asked = scripted(tmp_path, refuses, use)
    assert (store.put_groups, store.dropped) == (0, {"refused": 1})
    assert asked[-1][0] == "/v2/tickets/0/drop"
