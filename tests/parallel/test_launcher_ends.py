"""How a run ends that a launcher started: the first rank says why, at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from run_commands import ENVIRONMENT, TANDEM, write_spec
from test_two_agents import free_port, processes_of, steps_of


@pytest.mark.parametrize("every", [0, 2])
def test_a_rank_killed_under_torchrun_is_named_on_the_terminal(tmp_path, every):
    """torchrun answers with SIGTERM to rank 0, at which a run without checkpoints ends at once."""
    spec, run = write_spec(tmp_path, steps=400), tmp_path / "run"
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
        os.kill(processes_of(run)[1], signal.SIGKILL)
        said, _ = agent.communicate(timeout=60)
    finally:
        agent.kill()
        agent.communicate()
        for pid in processes_of(run).values():
            os.kill(pid, signal.SIGKILL)
    assert f"RankLost: rank 1 on host {socket.gethostname()}: shows no sign of life" in " ".join(said.split())


def test_an_agent_with_fewer_ranks_than_the_others_is_refused_at_once_by_name(tmp_path):
    """Of agents with 2, 1 and 3 ranks the first fits, as far as its ranks know."""
    spec, run, port = write_spec(tmp_path), tmp_path / "run", free_port()
    started = time.monotonic()
    ranks: list[subprocess.Popen[str]] = []
    for rank, agent, local, of_agent in ((0, 0, 0, 2), (1, 0, 1, 2), (2, 1, 0, 1)):
        told = {
            "RANK": rank, "WORLD_SIZE": 6, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": of_agent, "GROUP_RANK": agent,
            "GROUP_WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(
                [*TANDEM, "train", str(spec), "--run-dir", str(run), "--set", "parallel.shares=6"],
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
    assert time.monotonic() - started < 90
    assert all(process.returncode for process in ranks)
    refused = "SpecError: parallel.hosts = 3: agent 1 of 3 has 1 of 6 ranks, and every host needs equally many"
    assert f"RankLost: rank 2 on host {socket.gethostname()}: {refused}" in said[0]
    assert f"rank 2 on host {socket.gethostname()}: {refused}" in said[1]
