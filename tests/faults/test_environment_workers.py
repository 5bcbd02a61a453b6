"""Faults in worker processes: each costs its own episode and leaves no process behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from test_environment_faults import Dead, Engine, Plain, Silent

from tandem.env.expected import expected_of
from tandem.env.load import load_environment
from tandem.errors import EngineError, EngineSilent, EnvironmentFailed, EpisodeFailed, SpecError
from tandem.rollout.episode import Setting, play
from tandem.rollout.producer import EnvironmentProducer
from tandem.rollout.store import MemoryStore
from tandem.rollout.workers.forkserver_client import Order
from tandem.rollout.workers.pool import WorkerEnvironment
from tandem.types import Group, Sampling, Trajectory

HOSTILE = str(Path(__file__).with_name("hostile_environment.py"))
LIMIT_S, AMPLE_S = 0.4, 20.0  # of an episode: one that hangs, and one that does not
MARK = "TANDEM_TEST_MARK"
T = TypeVar("T")


@pytest.fixture(autouse=True)
def mark(monkeypatch) -> Iterator[str]:
    """In the environment variables of every process that a test starts, however far it went."""
    value = f"mark-{os.getpid()}-{random.getrandbits(64)}"
    monkeypatch.setenv(MARK, value)
    yield value
    until = time.monotonic() + 10.0
    while left := marked(value):
        assert time.monotonic() < until, f"{len(left)} processes are left: {left}"
        time.sleep(0.02)


def marked(value: str) -> list[str]:
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={value}".encode() in (entry / "environ").read_bytes():
                found.append(f"{entry.name} {(entry / 'cmdline').read_bytes()[-60:]!r}")
    return found


def order(kind: str = "well", name: str = HOSTILE, limit_s: float = AMPLE_S, **params: Any) -> Order:
    given = {"kind": kind, **params} if name == HOSTILE else params
    return Order(name, given, limit_s, load_timeout_s=20.0, memory_bytes=2**30, pass_env=(MARK,))


@contextmanager
def opened(wanted: Order, workers: int = 2) -> Iterator[WorkerEnvironment]:
    made = WorkerEnvironment(wanted, workers)
    try:
        yield made
    finally:
        made.close()


def setting_of(
    environment: Any, engine: Any = None, engine_deadline_s: float = 5.0, retries: int = 0, limit_s: float = AMPLE_S
) -> Setting:
    return Setting(
        environment, engine or Engine(), Plain(), Sampling(), 64, engine_deadline_s, limit_s, retries=retries
    )  # fmt: skip


@dataclass
class Played:
    kept: list[Group] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    metrics: dict[str, float] = field(default_factory=dict)
    restarts: Counter[str] = field(default_factory=Counter)


def with_workers(wanted: Order, use: Callable[[WorkerEnvironment], Awaitable[T]], workers: int = 2) -> T:
    async def scenario() -> T:
        with opened(wanted, workers) as environment:
            try:
                return await use(environment)
            finally:
                environment.close()
                await asyncio.sleep(0)

    return asyncio.run(scenario())


def produce(wanted: Order, groups: int, workers: int = 8, **settings: Any) -> Played:
    """The real producer and store, until so many groups are kept."""

    async def use(environment: WorkerEnvironment) -> Played:
        store = MemoryStore(groups + 4, take_timeout_s=20.0)
        setting = setting_of(environment, limit_s=wanted.episode_timeout_s, **settings)
        producer = EnvironmentProducer(setting, store, lambda _: True, group_size=2, seed=0, max_failed_share=1.0)
        running = asyncio.create_task(producer.run())
        try:
            kept = await store.take(groups)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await asyncio.sleep(0.2)  # what was cancelled comes back
        return Played(kept, store.dropped, producer.drain_metrics(), environment.restarts)

    return with_workers(wanted, use, workers)


def play_one(wanted: Order, index: int = 0, **settings: Any) -> Trajectory:
    async def use(environment: WorkerEnvironment) -> Trajectory:
        setting = setting_of(environment, limit_s=wanted.episode_timeout_s, **settings)
        return await play(setting, environment.tasks("train")[index], [0], 0)

    return with_workers(wanted, use)


# --- what goes well


def test_an_episode_in_a_worker_is_recorded_as_one_in_this_process():
    here = asyncio.run(play(setting_of(load_environment(HOSTILE)), load_environment(HOSTILE).tasks("train")[0], [0], 0))
    there = play_one(order())
    assert there.metrics.pop("process") != here.metrics.pop("process") == os.getpid()
    assert there == replace(here, messages=there.messages)
    assert list(there.messages) == list(here.messages)


def test_as_many_episodes_are_played_at_once_as_there_are_workers():
    class Counting(Engine):
        now = most = 0

        async def generate(self, prompt_ids, sampling, **unused):
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.02)
            self.now -= 1
            return await super().generate(prompt_ids, sampling)

    engine = Counting()

    async def use(environment: WorkerEnvironment) -> list[Trajectory]:
        setting, task = setting_of(environment, engine), environment.tasks("train")[1]
        return await asyncio.gather(*(play(setting, task, [0], seed) for seed in range(9)))

    played = with_workers(order(), use, workers=3)
    assert engine.most == 3
    assert len({trajectory.metrics["process"] for trajectory in played}) == 3


def test_waiting_for_a_worker_is_nobodys_time():
    async def use(environment: WorkerEnvironment) -> list[Trajectory]:
        setting = setting_of(environment, Engine(takes_s=LIMIT_S / 2), limit_s=LIMIT_S)
        task = environment.tasks("train")[1]
        return await asyncio.gather(*(play(setting, task, [0], seed) for seed in range(4)))

    assert len(with_workers(order(limit_s=LIMIT_S), use, workers=1)) == 4


def test_tasks_come_without_their_payloads_and_demonstrations_are_the_same():
    with opened(order()) as there:
        here = load_environment(HOSTILE)
        for split in ("train", "eval"):
            told = there.tasks(split)
            assert [(t.id, t.messages) for t in told] == [(t.id, t.messages) for t in here.tasks(split)]
        ours, theirs = random.Random(5), random.Random(5)
        for index in range(3):
            shown: Any = here
            expected = shown.demonstrate(here.tasks("train")[index], ours)
            assert there.demonstrate(there.tasks("train")[index], theirs) == expected
        assert ours.getstate() == theirs.getstate()


def test_tasks_come_with_what_their_answers_are_compared_with():
    here = load_environment("arithmetic").tasks("train")[:50]
    with opened(order(name="arithmetic")) as there:
        told = there.tasks("train")[:50]
    assert [expected_of(task).answers() for task in told] == [{"answer": str(t.payload["answer"])} for t in here]


def test_a_built_in_environment_plays_there_too():
    with opened(order(name="guess")) as environment:
        assert len(environment.tasks("eval")) > 100
        assert environment.demonstrate(environment.tasks("train")[0], random.Random(0))[0]["role"] == "assistant"


def test_a_worker_sees_no_variable_that_was_not_let_through(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    code = (
        Path(HOSTILE).read_text().replace('"process": os.getpid()', '"seen": len(os.environ.get("WANDB_API_KEY", ""))')
    )
    (tmp_path / "looks.py").write_text(code)
    wanted = order(name=str(tmp_path / "looks.py"))
    assert play_one(wanted).metrics["seen"] == 0
    assert play_one(replace(wanted, pass_env=(MARK, "WANDB_API_KEY"))).metrics["seen"] == 6


# --- what goes wrong

FAULTS = {
    "waits": "hung",
    "sleeps": "hung",
    "ignores_sigterm": "hung",
    "holds_the_gil": "hung",
    "floods": "hung",
    "exits": "crashed",
    "faults": "crashed",
    "forks": "crashed or hung",
    "leaves_a_child": "crashed",
    "eats_memory": "out_of_memory",
    "raises": "raised",
    "says_no_json": "protocol",
    "says_too_much": "protocol",
    "forges_tokens": "protocol",
    "gives_nan": "protocol",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_costs_its_own_group_and_leaves_no_process(kind):
    """Every other task is played badly; two tries each."""
    limit_s = LIMIT_S if "hung" in FAULTS[kind] else AMPLE_S
    played = produce(order(kind, limit_s=limit_s), groups=2, retries=1)
    assert {each.task_id for group in played.kept for each in group} <= {"train-1", "train-3"}
    assert played.dropped
    assert played.dropped.keys() <= set(FAULTS[kind].split(" or "))
    retried = sum(count for name, count in played.metrics.items() if name.startswith("episodes/retried/"))
    assert retried >= played.dropped.total()


@pytest.mark.parametrize("kind", ["sleeps", "exits", "leaves_a_child", "ends_well_before_its_child"])
def test_what_an_episode_leaves_is_gone_while_the_run_goes_on(kind, mark):
    async def use(environment: WorkerEnvironment) -> None:
        with pytest.raises(EpisodeFailed):
            await play(setting_of(environment, limit_s=LIMIT_S), environment.tasks("train")[0], [0], 0)
        until = time.monotonic() + 10.0
        while (
            len(left := marked(mark)) > 3 or not environment.restarts
        ):  # the leash, the fork server, the one that told the tasks
            assert time.monotonic() < until, left
            await asyncio.sleep(0.02)

    with_workers(order(kind, limit_s=LIMIT_S), use)


def test_what_goes_wrong_once_costs_nothing(tmp_path: Path):
    played = produce(order("exits", once=str(tmp_path / "once")), groups=3, retries=1)
    assert played.dropped == {}
    assert played.metrics["episodes/retried/crashed"] == 1


def test_how_a_worker_ended_is_told_with_its_last_words():
    with pytest.raises(EpisodeFailed, match=r"signal 11 \(SIGSEGV\); its last output:\n  Fatal Python error") as error:
        play_one(order("faults"))
    assert error.value.kind == "crashed"


def test_workers_are_not_replaced_without_end():
    async def use(environment: WorkerEnvironment) -> list[EpisodeFailed]:
        setting, task = setting_of(environment), environment.tasks("train")[0]
        failed: list[EpisodeFailed] = []
        for _ in range(18):
            with pytest.raises(EpisodeFailed) as error:
                await play(setting, task, [0], 0)
            failed.append(error.value)
            await asyncio.sleep(0.01)
        assert environment.restarts.total() == 14
        return failed

    failed = with_workers(order("exits"), use, workers=1)
    assert "workers in a row ended" in str(failed[-1])
    assert "exit code 3" in str(failed[-1])


@pytest.mark.parametrize(("engine", "named"), [(Dead(), EngineError), (Silent(), EngineSilent)], ids=["dead", "silent"])
def test_a_dead_engine_is_not_the_environments_failure(engine, named):
    with pytest.raises(named):
        play_one(order(), engine=engine, engine_deadline_s=0.1)


def test_an_engine_that_takes_longer_than_an_episode_costs_nobody():
    assert play_one(order(limit_s=LIMIT_S), engine=Engine(takes_s=2 * LIMIT_S)).reward == 1.0


def test_a_fork_server_that_dies_is_started_again_and_leaves_nothing_of_its_workers(mark):
    async def use(environment: WorkerEnvironment) -> float:
        setting = setting_of(environment, retries=1)
        await play(setting, environment.tasks("train")[0], [0], 0)
        os.kill(fork_server_of(mark), signal.SIGKILL)
        await asyncio.sleep(0.1)
        return (await play(setting, environment.tasks("train")[1], [0], 0)).reward

    assert with_workers(order("keeps_a_child"), use) == 1.0


def fork_server_of(value: str) -> int:
    """The one whose parent is a leash."""
    for line in marked(value):
        pid = int(line.split()[0])
        with suppress(OSError):
            parent = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1]
            if b"leash.py" in Path("/proc", parent, "cmdline").read_bytes():
                return pid
    raise AssertionError("there is no fork server")


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        ("import os; os._exit(7)", EnvironmentFailed, "exit code 7"),
        ("1 / 0", EnvironmentFailed, "importing it raised ZeroDivisionError"),
        ("x = 5", SpecError, "no class in it has tasks and run"),
        ("import time; time.sleep(1000)", EnvironmentFailed, "loading it took longer than 1 s"),
    ],
)
def test_what_cannot_be_loaded_is_an_error_before_the_run(tmp_path: Path, code, error, said):
    (tmp_path / "bad.py").write_text(code)
    wanted = replace(order(name=str(tmp_path / "bad.py")), load_timeout_s=1.0 if "sleep" in code else 20.0)
    with pytest.raises(error, match=said):
        WorkerEnvironment(wanted, 1)


OWNER = """
import asyncio, sys, time
sys.path[:0] = {path!r}
from test_environment_workers import *
async def main():
    environment = WorkerEnvironment(order("ignores_sigterm"), 2)
    setting = replace(setting_of(environment), episode_timeout_s=60.0)
    episodes = [asyncio.create_task(play(setting, environment.tasks("train")[0], [0], 0)) for _ in range(2)]
    await asyncio.sleep(0.3)
    print("playing", flush=True)
    await asyncio.gather(*episodes)
asyncio.run(main())
"""


def test_a_run_that_is_killed_leaves_no_worker(mark):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(path=[str(Path(__file__).parent)])], stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "playing\n"
        assert len(marked(mark)) >= 5  # itself, the leash, the fork server, two workers
        owner.send_signal(signal.SIGKILL)
    # The fixture waits until all of them are gone.


def test_throughput_with_a_tenth_of_episodes_hanging_or_crashing(monkeypatch):
    """The short form of benchmarks/env_faults.py; a busy machine disturbs some pairs, and hardly six."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import env_faults

    ratios, disturbed = list[float](), 0
    while len(ratios) + disturbed < 6 and max(ratios, default=0.0) < 0.6:
        clean, faulty = env_faults.measure(0.0, groups=16), env_faults.measure(0.1, groups=16)
        assert faulty.faults > 0
        assert clean.orphans == faulty.orphans == 0
        if clean.faults:  # an episode of no work took longer than its second
            disturbed += 1
        else:
            ratios.append(faulty.groups_per_s / clean.groups_per_s)
    assert max(ratios, default=0.0) >= 0.6, (ratios, disturbed)
