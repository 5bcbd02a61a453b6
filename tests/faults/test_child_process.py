"""A child process ends with its owner, and no other process is touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import EngineError
from tandem.io import leash
from tandem.io.child_process import Child

# Ready at once, with a worker of its own that it leaves alone: argv are the ready file, and what it does.
SERVICE = """
import json, os, signal, subprocess, sys, time
ready, what = sys.argv[1:]
if "deaf" in what:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
token = ready + ".token"
open(token, "w").write("secret")
open(ready + ".worker", "w").write(str(worker.pid))
pid = int(what.split("=")[1]) if "pid=" in what else os.getpid()
open(ready + ".new", "w").write(json.dumps({"url": "http://127.0.0.1:1", "pid": pid, "token_file": token}))
os.replace(ready + ".new", ready)
if "ends" in what:
    sys.exit(0)
time.sleep(600)
"""


def wait_until(condition: Callable[[], Any], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while its file is read
        return False


def started(directory: Path, what: str = "") -> Child:
    ready = directory / "ready.json"
    return Child([sys.executable, "-c", SERVICE, str(ready), what], ready_file=ready, log=directory / "log.txt")


def worker_of(directory: Path) -> int:
    return int((directory / "ready.json.worker").read_text())


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    child = started(tmp_path)
    yield child
    child.stop(0)


def test_it_says_where_it_is_and_ends_when_told_with_all_that_it_started(child: Child, tmp_path: Path) -> None:
    ready = child.wait_ready(10)
    assert (ready.url, ready.token) == ("http://127.0.0.1:1", "secret")
    assert runs(ready.pid)
    assert child.exit_code is None
    child.stop(grace_s=5)
    assert child.exit_code == 128 + signal.SIGTERM
    assert not runs(ready.pid)
    wait_until(lambda: not runs(worker_of(tmp_path)), 10)
    child.stop()


def test_one_that_does_not_listen_is_killed_after_its_grace(tmp_path: Path) -> None:
    child = started(tmp_path, "deaf")
    ready = child.wait_ready(10)
    began = time.monotonic()
    child.stop(grace_s=0.5)
    assert 0.4 < time.monotonic() - began < 3
    assert child.exit_code == 128 + signal.SIGKILL
    assert not runs(ready.pid)
    wait_until(lambda: not runs(worker_of(tmp_path)), 10)


def test_one_that_was_stopped_is_killed(child: Child) -> None:
    pid = child.wait_ready(10).pid
    os.kill(pid, signal.SIGSTOP)
    child.stop(grace_s=0.3)
    assert not runs(pid)


def test_what_a_dead_one_left_behind_is_ended(tmp_path: Path) -> None:
    child = started(tmp_path, "ends")
    wait_until(lambda: child.exit_code is not None, 10)
    assert child.exit_code == 0
    wait_until(lambda: not runs(worker_of(tmp_path)), 10)
    child.stop()


def test_one_that_cannot_start_tells_why(tmp_path: Path) -> None:
    code = "import sys; print('first'); sys.exit('no such model: x')"
    child = Child([sys.executable, "-c", code], ready_file=tmp_path / "ready", log=tmp_path / "log")
    with pytest.raises(EngineError, match=r"(?s)exit code 1.*first\n  no such model: x$"):
        child.wait_ready(10)


def test_one_that_is_never_ready_is_ended_at_the_deadline(tmp_path: Path) -> None:
    child = Child(["sh", "-c", "echo loading; exec sleep 600"], ready_file=tmp_path / "ready", log=tmp_path / "log")
    with pytest.raises(EngineError, match=r"(?s)not ready within 0\.6 s: still running.*loading"):
        child.wait_ready(0.6)
    assert child.exit_code is not None


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    child = Child([str(tmp_path / "nothing")], ready_file=tmp_path / "ready", log=tmp_path / "log")
    with pytest.raises(EngineError, match="nothing"):
        child.wait_ready(10)


def test_a_stale_ready_file_is_not_believed(tmp_path: Path) -> None:
    stale = {"url": "http://127.0.0.1:9", "pid": os.getpid(), "token_file": "/etc/hostname"}
    (tmp_path / "ready.json").write_text(json.dumps(stale))
    child = started(tmp_path)
    assert child.wait_ready(10).url == "http://127.0.0.1:1"
    child.stop(0)


def test_a_foreign_process_is_refused_and_never_signalled(tmp_path: Path) -> None:
    foreign = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        child = started(tmp_path, f"pid={foreign.pid}")
        with pytest.raises(EngineError, match=f"names process {foreign.pid}, which is not the one started here"):
            child.wait_ready(10)
        assert child.exit_code is not None
        wait_until(lambda: not runs(worker_of(tmp_path)), 10)
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()


OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
from test_child_process import started
ready = started(Path(sys.argv[1]), sys.argv[2]).wait_ready(20)
print(ready.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("what", ["", "deaf", "stopped"])
def test_it_ends_with_its_owner_even_if_that_is_killed(tmp_path: Path, what: str) -> None:
    script = OWNER.format(here=str(Path(__file__).parent))
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), what], stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert owner.stdout is not None
    with owner.stdout:
        pid = int(owner.stdout.readline())
        worker = worker_of(tmp_path)
        if what == "stopped":
            os.kill(pid, signal.SIGSTOP)
        owner.kill()
        owner.wait()
    wait_until(lambda: not runs(pid) and not runs(worker), 6)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's word to a child is Linux's")
def test_it_and_what_it_started_end_even_if_its_leash_is_killed(child: Child, tmp_path: Path) -> None:
    pid = child.wait_ready(10).pid
    worker = worker_of(tmp_path)
    os.kill(os.getsid(pid), signal.SIGKILL)
    wait_until(lambda: not runs(pid), 10)
    wait_until(lambda: child.exit_code is not None, 10)  # the kernel ends the program first
    assert child.exit_code == 128 + signal.SIGKILL
    wait_until(lambda: not runs(worker), 10)


def test_a_thread_that_ends_while_threads_are_looked_at_hides_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory was listed, and is gone; who looks through the others finds what they have started."""
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: ["0", *listed(path)])
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            assert process.pid in leash.children()
        finally:
            process.kill()
