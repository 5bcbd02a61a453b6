"""Fifty attempts to get out of an environment's sandbox: none succeeds, and the episode beside it notices nothing.

Nothing here is measured in seconds: an attempt is over when its episode is.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import escaping_environment
import pytest
from test_environment_faults import Engine
from test_environment_workers import AMPLE_S, FAULTS, LIMIT_S, order, play_one, produce, setting_of, with_workers
from test_environment_workers import mark as mark

from tandem.env.load import load_environment
from tandem.env.sandbox.outside import Sandbox
from tandem.errors import EpisodeFailed, SpecError
from tandem.rollout.episode import play
from tandem.rollout.workers.forkserver_client import Order
from tandem.rollout.workers.pool import WorkerEnvironment
from tandem.types import Completion

SOURCE = Path(escaping_environment.__file__)
FAILS = {
    "takes_memory_in_many_processes": "crashed",
    "forks": "",  # the kernel refuses the 257th process, or the fork server kills it
    "forks_away": "",
    "signals_everything": "",
    "stops_what_is_above_it": "",
    "signals_low_numbers": "",
    "hangs": "hung",
}
"""Attempts whose episode may fail, and by what; empty: or ends well."""
NOT_ATTEMPTS = {"tasks", "run", "neighbour"}
ATTEMPTS = sorted(
    name
    for name, _ in inspect.getmembers(escaping_environment.Escaping, inspect.isfunction)
    if not name.startswith("_") and name not in NOT_ATTEMPTS
)


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """What this test starts inherits limits: a sandbox with a hole must not cost the machine its memory."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (min(2**30, before[1]) if before[1] >= 0 else 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def able() -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: `make install-system`")
    try:
        WorkerEnvironment(replace(order(), pass_env=(), sandbox=Sandbox()), 1).close()
    except SpecError as error:
        pytest.skip(f"this machine refuses sandboxes, as the refusal's own test requires: {error}")


@dataclass(frozen=True)
class Place:
    """What an attempt is after, outside."""

    at: dict[str, Any]
    victim: subprocess.Popen[bytes]
    listening: list[socket.socket]

    def was_reached(self) -> bool:
        for each in self.listening:
            each.settimeout(0)
            try:
                each.accept()[0].close()
            except BlockingIOError:
                continue
            return True
        return False


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        (tmp_path / "run" / "token").write_text("s3cret")
        (tmp_path / "shared").mkdir()
        own = tmp_path / "escaping.py"
        shutil.copy(SOURCE, own)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract, by_path = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        name = f"tandem-test-{os.getpid()}-{tmp_path.name}"
        abstract.bind("\0" + name)
        (path_socket := Path(os.path.relpath(tmp_path / "s"))).unlink(missing_ok=True)
        by_path.bind(str(path_socket))
        for each in (abstract, by_path):
            each.listen()
        victim = stack.enter_context(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]))
        stack.callback(victim.kill)
        yield Place(
            {
                "secret": str(tmp_path / "run" / "token"),
                "shared": str(tmp_path / "shared"),
                "own": str(own),
                "home": os.path.expanduser("~"),
                "host_pid": victim.pid,
                "tcp": tcp.getsockname()[1],
                "abstract": name,
                "path_socket": str(tmp_path / "s"),
            },
            victim,
            [tcp, abstract, by_path],
        )


class Held(Engine):
    """Answers the neighbour only when the attempt is over."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.over = asyncio.Event(), asyncio.Event()

    async def generate(self, prompt_ids, sampling, **unused) -> Completion:
        self.asked.set()
        await self.over.wait()
        return await super().generate(prompt_ids, sampling)


@dataclass(frozen=True)
class Seen:
    said: str
    out: float
    failed: str
    neighbour: float
    again: float
    """The reward of the neighbour's task, played once more afterwards."""


def order_of(kind: str, place: Place, sandbox: Sandbox | None, limit_s: float = 60.0) -> Order:
    made = order(name=place.at["own"], limit_s=limit_s)
    return replace(made, params={"kind": kind, "at": place.at}, memory_bytes=2**29, sandbox=sandbox)


def attempted(kind: str, place: Place, sandbox: Sandbox | None) -> Seen:
    limit_s = 2.0 if kind == "hangs" else 60.0
    wanted = order_of(kind, place, sandbox, limit_s)

    async def use(environment: WorkerEnvironment) -> Seen:
        attempt, neighbour = environment.tasks("train")
        engine = Held()
        beside = asyncio.create_task(play(setting_of(environment, engine, 120.0, limit_s=120.0), neighbour, [0], 0))
        await asyncio.wait([beside, asyncio.ensure_future(engine.asked.wait())], return_when=asyncio.FIRST_COMPLETED)
        said, out, failed = "", 0.0, ""
        for _ in range(2):  # the second finds what the first has left
            try:
                played = await play(setting_of(environment, limit_s=limit_s), attempt, [0], 0)
                said, out = str(list(played.messages)[-1]), max(out, played.reward)
            except EpisodeFailed as error:
                failed, said = error.kind, str(error)
        if kind == "goes_on_after_its_end":
            out = max(out, await still_written(Path(place.at["shared"], "alive")))
        engine.over.set()
        reward = (await beside).reward
        again = (await play(setting_of(environment), neighbour, [0], 0)).reward
        return Seen(said, out, failed, reward, again)

    return with_workers(wanted, use, workers=2)


async def still_written(file: Path) -> float:
    """Return 1 if a process still writes to the file some time after its episode."""
    before = None
    for _ in range(600):
        now = file.read_text()
        if before is not None and now == before:
            return 0.0
        before = now
        await asyncio.sleep(0.3)
    return 1.0


@pytest.mark.parametrize("kind", ATTEMPTS)
def test_no_attempt_gets_out_and_the_neighbour_is_unharmed(kind: str, place: Place, able: None):
    before = Path(place.at["own"]).read_bytes()
    seen = attempted(kind, place, Sandbox(write=(place.at["shared"],)))
    assert seen.out == 0.0, seen.said
    assert not seen.failed or kind in FAILS, seen.said
    if FAILS.get(kind):
        assert seen.failed == FAILS[kind], seen.said
    assert (seen.neighbour, seen.again) == (1.0, 1.0)
    assert place.victim.poll() is None
    assert not place.was_reached()
    assert Path(place.at["own"]).read_bytes() == before


def test_there_are_thirty_attempts_at_least():
    assert len(ATTEMPTS) >= 30


GETS_OUT = ["reads_a_file_of_the_user", "connects_to_this_machine", "signals_a_process_outside", "reads_accounts"]


@pytest.mark.parametrize("kind", GETS_OUT)
def test_the_same_attempt_gets_out_of_a_worker_without_a_sandbox(kind: str, place: Place):
    """So the attempts are real ones."""
    wanted = order_of(kind, place, None)

    async def use(environment: WorkerEnvironment) -> float:
        return (await play(setting_of(environment), environment.tasks("train")[0], [0], 0)).reward

    assert with_workers(wanted, use) == 1.0
    if kind == "signals_a_process_outside":
        assert place.victim.wait(30) == -signal.SIGKILL


def test_what_is_opened_by_name_is_open(place: Place, able: None):
    """The network of this machine, a file to read, and a directory to write."""
    read = Sandbox(read=(place.at["secret"],))
    assert attempted("reads_a_file_of_the_user", place, read).out == 1.0
    assert attempted("connects_to_this_machine", place, Sandbox(network=True)).out == 1.0
    assert not Path(place.at["shared"], "link").is_symlink()
    attempted("reads_by_a_symlink_in_what_is_shared", place, Sandbox(write=(place.at["shared"],)))
    assert Path(place.at["shared"], "link").is_symlink()


def test_tasks_and_demonstrations_in_a_sandbox_are_the_same(able: None):
    import random

    wanted = replace(order(name="arithmetic"), sandbox=Sandbox())
    here = load_environment("arithmetic")
    made = WorkerEnvironment(wanted, 1)
    try:
        assert [task.id for task in made.tasks("eval")] == [task.id for task in here.tasks("eval")]
        ours: Any = here
        task = here.tasks("train")[3]
        assert made.demonstrate(made.tasks("train")[3], random.Random(1)) == ours.demonstrate(task, random.Random(1))
    finally:
        made.close()


def test_closing_leaves_no_process_even_of_bubblewrap(able: None, mark: str):
    """The fixture `mark` looks for processes that are left; this one has some while the sandbox is open."""
    from test_environment_workers import marked

    made = WorkerEnvironment(replace(order(), sandbox=Sandbox()), 2)
    made.tasks("train")
    assert len(marked(mark)) >= 5  # leash, bubblewrap twice, fork server, worker
    made.close()
    until = time.monotonic() + 30
    while left := marked(mark):
        assert time.monotonic() < until, left
        time.sleep(0.02)


def test_a_machine_that_allows_workers_no_namespaces_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, able: None
):
    """As a machine whose AppArmor lets bubblewrap make a user namespace, and what runs in it none."""
    real = shutil.which("bwrap")
    (tmp_path / "bwrap").write_text(f'#!/bin/sh\nexec {real} --disable-userns "$@"\n')
    (tmp_path / "bwrap").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SpecError, match=r"environment\.sandbox = 'bwrap': this machine cannot make a sandbox \(.*\)"):
        WorkerEnvironment(replace(order(), sandbox=Sandbox()), 1)


@pytest.mark.parametrize(
    "kind", ["sleeps", "exits", "faults", "leaves_a_child", "eats_memory", "floods", "says_no_json"]
)
def test_a_fault_in_a_sandbox_is_told_as_one_without(kind: str, able: None):
    limit_s = LIMIT_S if FAULTS[kind] == "hung" else AMPLE_S
    played = produce(replace(order(kind, limit_s=limit_s), sandbox=Sandbox()), groups=2, retries=1)
    assert {each.task_id for group in played.kept for each in group} <= {"train-1", "train-3"}
    assert played.dropped.keys() == {FAULTS[kind]}


@pytest.mark.parametrize("each_episode", [True, False])
def test_how_a_worker_in_a_sandbox_ended_is_told_with_its_last_words(each_episode: bool, able: None):
    with pytest.raises(EpisodeFailed, match=r"signal 11 \(SIGSEGV\); its last output:\n  Fatal Python error"):
        play_one(replace(order("faults"), sandbox=Sandbox(for_each_episode=each_episode)))
