"""How a run ends that a launcher started: the first rank says why, at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from run_commands import ENVIRONMENT, TANDEM, write_spec
from test_two_agents import processes_of, steps_of

pytestmark = pytest.mark.usefixtures("forked_programs")


@contextmanager
def two_ranks(home: Path, every: int) -> Iterator[subprocess.Popen[str]]:
    """An agent of torchrun whose run, in home/run, is in the middle of training."""
    spec, run = write_spec(home, steps=400), home / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *TANDEM[1:]]
    agent = subprocess.Popen(
        [*command, "train", str(spec), "--run-dir", str(run), "--set", f"checkpoint.every={every}"],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and steps_of(run) < 5:
            assert agent.poll() is None
            time.sleep(0.1)
        yield agent
    finally:
        agent.kill()
        agent.communicate()
        for pid in processes_of(run).values():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("every", [0, 2])
def test_a_rank_killed_under_torchrun_is_named_on_the_terminal(tmp_path, every):
    """torchrun answers with SIGTERM to rank 0, at which a run without checkpoints ends at once."""
    with two_ranks(tmp_path, every) as agent:
        os.kill(processes_of(tmp_path / "run")[1], signal.SIGKILL)
        said, _ = agent.communicate(timeout=60)
    assert f"RankLost: rank 1 on host {socket.gethostname()}: shows no sign of life" in " ".join(said.split()), said


def test_a_run_that_torchrun_is_asked_to_end_saves(tmp_path):
    """All ranks show life then, so SIGTERM means what it says."""
    with two_ranks(tmp_path, 100) as agent:
        agent.send_signal(signal.SIGTERM)
        agent.communicate(timeout=60)
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "stopped"
    (saved,) = (tmp_path / "run/checkpoints").glob("step-*")
    assert int(saved.name.partition("-")[2]) == steps_of(tmp_path / "run")


def six_ranks(home: Path, started: Sequence[tuple[int, int, int, int]]) -> list[subprocess.CompletedProcess[str]]:
    """Of three agents with six ranks together start these: the numbers of rank, agent and local rank, and how many
    ranks its agent has. Return how they ended, each within 90 s. The store is here, as it is in torchrun's agent."""
    spec, store = write_spec(home), dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[subprocess.Popen[str]] = []
    for rank, agent, local, of_agent in started:
        told = {
            "RANK": rank, "WORLD_SIZE": 6, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": of_agent, "GROUP_RANK": agent,
            "GROUP_WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
            "TORCHELASTIC_RUN_ID": "here", "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0,
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(
                [*TANDEM, "train", str(spec), "--run-dir", str(home / "run"), "--set", "parallel.shares=6"],
                env={**ENVIRONMENT, **{name: str(value) for name, value in told.items()}},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    try:
        said = [" ".join(process.communicate(timeout=90)[0].split()) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, out)
        for process, out in zip(ranks, said, strict=True)
    ]


REFUSED = "parallel.hosts = 3: agent {} of 3 has 1 of 6 ranks, and every host needs equally many"


def test_an_agent_with_fewer_ranks_than_the_others_is_refused_at_once_by_name(tmp_path):
    """Of agents with 2, 1 and 3 ranks the first fits, as far as its ranks know."""
    ends = six_ranks(tmp_path, [(0, 0, 0, 2), (1, 0, 1, 2), (2, 1, 0, 1)])
    assert all(end.returncode for end in ends)
    lost = f"rank 2 on host {socket.gethostname()}: SpecError: {REFUSED.format(1)}"
    assert f"RankLost: {lost}" in ends[0].stdout
    assert lost in ends[1].stdout


def test_ranks_do_not_wait_for_a_first_rank_that_is_refused(tmp_path):
    """Of agents with 1, 2 and 3 ranks the third rank fits, as far as it knows."""
    first, third = six_ranks(tmp_path, [(0, 0, 0, 1), (2, 1, 1, 2)])
    assert REFUSED.format(0) in first.stdout
    assert (bool(first.returncode), third.returncode) == (True, 0)
