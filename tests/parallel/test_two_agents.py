"""A run on two hosts, each with an agent of torchrun; both are this host. Rows are cut within each."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from run_commands import ENVIRONMENT, here, write_spec

import tandem
from tandem.runs.run_ending import spec_of

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as free:
        return free.getsockname()[1]


def fixed(port: int, agent: int) -> list[str]:
    """The first agent has rank 0."""
    return ["--node-rank", str(agent), "--master-addr", LOOPBACK, "--master-port", str(port)]


def meeting(port: int, _: int) -> list[str]:
    """Agents number themselves."""
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{LOOPBACK}:{port}", "--local-addr", LOOPBACK]


@contextmanager
def two_agents(
    spec: Path, run: str | Path, *options: str, places: Sequence[Path], how=fixed, ranks_each: int = 2
) -> Iterator[list[subprocess.Popen[str]]]:
    """`places`: the directory in which each agent is started."""
    port = free_port()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", f"{ranks_each}"]
    command = ["-m", "tandem", "train", str(spec), "--run-dir", str(run), "--set", "parallel.shares=4", "--go-on"]
    agents = [
        subprocess.Popen(
            [*torchrun, *how(port, number), *command, *options],
            env=ENVIRONMENT | {"PYTHONFAULTHANDLER": "1"}, cwd=place, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for number, place in enumerate(places)
    ]  # fmt: skip
    try:
        yield agents
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
        for pid in processes_of(run).values():
            os.kill(pid, signal.SIGKILL)


def processes_of(run: str | Path) -> dict[int, int]:
    """The process of each rank of this run; of agents, none."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            told = dict(line.partition("=")[::2] for line in (entry / "environ").read_bytes().decode().split("\0"))
        except OSError:
            continue
        if str(run) in words and "torch.distributed.run" not in words and "RANK" in told:
            found[int(told["RANK"])] = int(entry.name)
    return found


def all_said(agents: Sequence[subprocess.Popen[str]], run: Path) -> list[str]:
    """What the agents printed, once all have ended. If one does not, fail with who is still there."""
    try:
        return [agent.communicate(timeout=200)[0] for agent in agents]
    except subprocess.TimeoutExpired:
        left = {f"agent {number}": agent.pid for number, agent in enumerate(agents) if agent.poll() is None}
        left |= {f"rank {rank}": pid for rank, pid in processes_of(run).items()}
        for pid in left.values():
            os.kill(pid, signal.SIGABRT)  # each prints its stacks
        said = [agent.communicate(timeout=30)[0] for agent in agents]
        pytest.fail(f"still there after 200 s: {left}\n" + "\n".join(text[-6000:] for text in said))


def steps_of(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def test_two_agents_give_the_bytes_of_one_rank(tmp_path):
    spec, run, one = write_spec(tmp_path), tmp_path / "run", tmp_path / "one"
    for ranks_each in (2, 1):  # the second time there is nothing left to do
        with two_agents(spec, run, places=[tmp_path] * 2, how=meeting, ranks_each=ranks_each) as agents:
            said = all_said(agents, run)
        assert [agent.returncode for agent in agents] == [0, 0], "\n".join(text[-3000:] for text in said)
        parallel = spec_of(run).parallel
        assert (parallel.ranks, parallel.hosts) == (4, 2), "as the agents were that trained"
    here("train", spec, "--run-dir", one, "--set", "parallel.shares=4")
    assert tandem.digest_run(run) == tandem.digest_run(one)


def test_a_directory_that_the_other_host_does_not_see_is_refused(tmp_path):
    """The same words name another directory there."""
    spec = write_spec(tmp_path)
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    with two_agents(spec, "runs/mine", places=places, ranks_each=1) as agents:
        said = [agent.communicate(timeout=200)[0] for agent in agents]
        assert processes_of("runs/mine") == {}
    assert agents[0].returncode != 0
    told = " ".join(said[0].split())
    assert f"--run-dir runs/mine: rank 1 on host {socket.gethostname()} does not see it: {places[1]}/" in told
    assert "No such file or directory; name a directory that all hosts share" in told
    run = places[0] / "runs/mine"
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    assert steps_of(run) == 0
    assert not (places[1] / "runs").exists()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_lost_on_the_other_host_ends_both(tmp_path, sent):
    """The other ranks end by themselves; torchrun would end the one that stands still after another 30 s."""
    spec, run = write_spec(tmp_path, steps=400), tmp_path / "run"
    with two_agents(spec, run, "--set", "parallel.deadline_s=6", places=[tmp_path] * 2) as agents:
        until = time.monotonic() + 150
        while time.monotonic() < until and steps_of(run) < 5:
            assert [agent.poll() for agent in agents] == [None, None]
            time.sleep(0.1)
        victims = processes_of(run)
        assert sorted(victims) == [0, 1, 2, 3]
        os.kill(victims[3], sent)
        until = time.monotonic() + 100
        while processes_of(run).keys() - {3}:
            assert time.monotonic() < until
            time.sleep(0.1)
        with suppress(ProcessLookupError):
            os.kill(victims[3], signal.SIGKILL)
        said = [agent.communicate(timeout=100)[0] for agent in agents]
        assert processes_of(run) == {}
    assert all(agent.returncode for agent in agents)
    lost = f"RankLost: rank 3 on host {socket.gethostname()}: shows no sign of life"
    status = json.loads((run / "status.json").read_text())
    assert status["error"].startswith(lost)
    assert lost in " ".join(said[0].split())
    saved = [int(path.name.partition("-")[2]) for path in (run / "checkpoints").glob("step-*")]
    assert max(saved) <= steps_of(run), "nothing is saved without a rank"
