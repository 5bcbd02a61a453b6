"""A run has one process at a time, and one that lost it writes no more."""

from __future__ import annotations

import io
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from stopwatch import Stopwatch
from tandem.errors import RunError, RunFenced, RunOwned
from tandem.io.jsonl import JsonlWriter, cut_back, read_jsonl
from tandem.obs.live_view import LiveView
from tandem.runs.lease import DirectoryLease, begin
from tandem.runs.run import Run
from tandem.runs.run_ending import finished

HOLDS = """
import sys, time
from pathlib import Path
from tandem.errors import RunOwned
from tandem.runs.lease import DirectoryLease
try:
    lease = DirectoryLease(Path(sys.argv[1]))
except RunOwned:
    print("refused", flush=True)
else:
    print("holds", lease.epoch, flush=True)
    time.sleep(float(sys.argv[2]))
"""


@contextmanager
def holders(directory: Path, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, "-c", HOLDS, str(directory), "60"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield processes
    finally:
        for each in processes:
            each.kill()
            each.communicate()


def first_word(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().split()[0]


def test_of_processes_that_want_a_run_at_once_one_has_it(tmp_path: Path) -> None:
    with holders(tmp_path, 4) as asking:
        assert sorted(first_word(each) for each in asking) == ["holds", "refused", "refused", "refused"]


def test_nobody_waits_for_a_process_that_was_killed_and_one_that_is_stopped_holds_on(tmp_path: Path) -> None:
    with holders(tmp_path, 1) as (process,):
        assert first_word(process) == "holds"
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(RunOwned, match=f"process {process.pid} works on this run"):
            DirectoryLease(tmp_path)
        process.kill()
        with Stopwatch() as watch:
            lease = DirectoryLease(tmp_path)
        assert watch.seconds < 1
        assert lease.epoch == 2
        lease.close()


def test_whoever_was_taken_over_is_refused_and_what_it_has_open_leads_nowhere(tmp_path: Path) -> None:
    old, rows = DirectoryLease(tmp_path), JsonlWriter(tmp_path / "metrics.jsonl")
    rows.write({"step": 1})
    old.check()
    new = DirectoryLease(tmp_path, take_over=True)
    cut_back(tmp_path / "metrics.jsonl")
    rows.write({"step": 2})
    with pytest.raises(RunFenced, match="taken over"):
        old.check()
    new.check()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1}]
    assert json.loads((tmp_path / "epoch.json").read_text())["epoch"] == 2
    old.close()  # gives up nothing that is not its own
    with pytest.raises(RunOwned):
        DirectoryLease(tmp_path)
    new.close()
    rows.close()


def test_a_directory_is_begun_once_with_its_spec_in_it(tmp_path: Path) -> None:
    begin(tmp_path / "run", "recipe = 1\n")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["spec.toml"]
    with pytest.raises(RunError, match=r"is not empty.*tandem resume"):
        begin(tmp_path / "run", "recipe = 2\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (tmp_path / "run" / "spec.toml").read_text() == "recipe = 1\n"


@pytest.mark.parametrize("content", ["", "garbage{", "[]", '{"epoch": "x"}'])
def test_of_a_damaged_epoch_or_status_nothing_is_guessed(tmp_path: Path, content: str) -> None:
    """A first epoch once more would be a zombie's own."""
    (tmp_path / "epoch.json").write_text(content)
    for _ in range(2):  # nor is the lock kept
        with pytest.raises(RunError, match=r"epoch\.json: is damaged; if no process"):
            DirectoryLease(tmp_path)
    (tmp_path / "epoch.json").unlink()
    DirectoryLease(tmp_path).close()
    (tmp_path / "status.json").write_text(content.replace('{"epoch": "x"}', '"succeeded"'))
    with pytest.raises(RunError, match=r"status.json cannot be read: .*; move it away, and `tandem resume"):
        finished(tmp_path)


ZOMBIE = """
import io, logging, sys
from pathlib import Path
from rich.console import Console
from tandem.errors import RunFenced
from tandem.obs.live_view import LiveView
from tandem.runs.lease import DirectoryLease
from tandem.runs.run import Run

directory, view = Path(sys.argv[1]), LiveView("run", Console(file=io.StringIO()))
try:
    with Run(directory, name="run", recipe="sft", view=view, lease=DirectoryLease(directory)):
        logging.getLogger("tandem.x").warning("before")
        print("logs", flush=True)
        sys.stdin.readline()
        logging.getLogger("tandem.x").warning("of the zombie")
except RunFenced:
    print("fenced", flush=True)
"""


def test_what_a_process_logs_that_lost_the_run_is_not_in_the_log_of_the_one_that_has_it(tmp_path: Path):
    run = tmp_path / "run"
    begin(run, "recipe = 'sft'\n")
    zombie = subprocess.Popen(
        [sys.executable, "-c", ZOMBIE, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert zombie.stdout is not None
    assert zombie.stdout.readline() == "logs\n"
    winner = Run(
        run, name="run", recipe="sft", view=LiveView("run", Console(file=io.StringIO())),
        lease=DirectoryLease(run, take_over=True),
    )  # fmt: skip
    with winner:
        logging.getLogger("tandem.x").warning("of the winner")
        assert zombie.communicate("go on\n", timeout=60)[0] == "fenced\n"
    said = [line.split(": ", 1)[1] for line in (run / "log.txt").read_text().splitlines()]
    assert said == ["before", "of the winner"]
