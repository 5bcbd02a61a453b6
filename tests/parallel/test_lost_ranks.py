"""A rank that raises, dies or stands still ends the crew with its name, and no process is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import crew_member
import pytest
import tomli_w
import torch
import torch.distributed as dist

from tandem.errors import RankLost
from tandem.recipes.crew import own_store
from tandem.runs.rank_processes import RankProcesses
from tandem.spec.load import parse_spec
from tandem.train.crew import Crew, call_off

SCENARIOS = {
    "raises": "rank {last} on host {host}: ValueError: CUDA out of memory, or so",
    "hangs": "rank {last} on host {host}: has made no progress in an order for 4 s (parallel.deadline_s)",
    "hangs in a round": "rank {last} on host {host}: has made no progress in an order for 4 s (parallel.deadline_s)",
    "killed": "rank {last} on host {host}: shows no sign of life",
    "stopped": "rank {last} on host {host}: shows no sign of life",
    "killed while idle": "rank {last} on host {host}: shows no sign of life",
    "stopped while idle": "rank {last} on host {host}: shows no sign of life",
}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


@pytest.fixture(scope="module")
def forked() -> Any:
    """Starts processes by fork from one that has torch imported: there are 23 of them, and an import takes a second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tandem.optim.by_owner", "tandem.train.crew"])
    return context


def play(forked: Any, ranks: int, scenario: str) -> tuple[str, str]:
    """The error's class and text on rank 0. All other processes end by themselves, but for one that stands still."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ours, theirs = forked.Pipe()
    processes = [
        forked.Process(target=crew_member.main, args=(rank, ranks, port, scenario, theirs)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        pids = next_of(ours)
        sent = SIGNALS.get(scenario.split()[0])
        if sent is not None:
            time.sleep(0.3)
            os.kill(pids[-1], sent)
        kind, text = next_of(ours)
        ends = processes if sent != signal.SIGSTOP else processes[:-1]
        for process in ends:
            process.join(30)
        codes = [process.exitcode for process in ends]
        assert codes[0] == 0
        assert None not in codes
        assert all(code != 0 for code in codes[1:]) or kind != "RankLost"
        return kind, text
    finally:
        for process in processes:
            process.kill()
            process.join()


def next_of(ours: Any) -> Any:
    assert ours.poll(90), "rank 0 tells nothing"
    return ours.recv()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_lost_rank_is_named(forked, scenario):
    started = time.monotonic()
    kind, text = play(forked, 3, scenario)
    assert kind == "RankLost"
    assert text.startswith(SCENARIOS[scenario].format(last=2, host=socket.gethostname()))
    assert time.monotonic() - started < 60


def test_a_rank_that_refuses_an_order_is_an_answer_and_the_crew_goes_on(forked):
    assert play(forked, 2, "refuses") == ("SyncError", f"rank 1 on host {socket.gethostname()}: no engine")


SPEC = {
    "recipe": "sft", "model": {"preset": "tiny"}, "data": {"kind": "file", "path": "rows.jsonl"},
    "train": {"steps": 1, "lr": 1e-3}, "parallel": {"ranks": 2, "deadline_s": 6.0},
}  # fmt: skip


def place(port: int) -> dict[str, str]:
    """What tells a process that it is rank 1 of 2."""
    return {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip


def test_a_rank_whose_rank_0_stands_still_before_they_have_met_ends_by_itself(tmp_path):
    """A connection to a stopped process is accepted by the kernel, and never answered."""
    (tmp_path / "spec.toml").write_text(tomli_w.dumps(parse_spec(SPEC).model_dump(mode="json", exclude_none=True)))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = subprocess.run(
            [sys.executable, "-m", "tandem.recipes.follower", str(tmp_path)],
            env=os.environ | place(silent.getsockname()[1]), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert "rank 0 has not answered for" in done.stderr


_STARTS = """
import os, signal, sys, time
from pathlib import Path
from tandem.runs.rank_processes import Starting

Starting(Path(sys.argv[1]), int(os.environ["RANK"]))
time.sleep(1.0)
if os.environ["RANK"] == "2":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""


def test_a_rank_that_stands_still_while_it_starts_is_named_and_one_that_starts_slowly_is_not(tmp_path):
    started = time.monotonic()
    processes = RankProcesses(3, tmp_path, [sys.executable, "-c", _STARTS, str(tmp_path)])
    try:
        store = own_store(processes)
        with pytest.raises(RankLost, match=f"rank 2 on host {socket.gethostname()}: shows no sign of life for "):
            Crew(store, 0, 3, device=torch.device("cpu"), deadline_s=8.0, children=processes)
        assert 8 < time.monotonic() - started < 90
    finally:
        processes.close(0.0)


_CALLED_OFF = """
import atexit, sys, time
from pathlib import Path
from tandem.recipes.crew import end_follower, follow
from tandem.runs.run_ending import spec_of

class Slow:
    def find_spec(self, name, *_):
        if name == "torch.distributed":
            time.sleep(1.5)

sys.meta_path.insert(0, Slow())
atexit.register(print, "Python takes itself down")
follow(spec_of(Path(sys.argv[1])), patience_s=1.0)
end_follower()
"""


def test_a_rank_that_is_not_needed_ends_at_once_and_its_own_imports_are_no_silence_of_rank_0(tmp_path):
    """While Python takes itself down, threads of torch that still run may abort it, or wait for each other."""
    (tmp_path / "spec.toml").write_text(tomli_w.dumps(parse_spec(SPEC).model_dump(mode="json", exclude_none=True)))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call_off(store)
    done = subprocess.run(
        [sys.executable, "-c", _CALLED_OFF, str(tmp_path)],
        env=os.environ | place(store.port), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
