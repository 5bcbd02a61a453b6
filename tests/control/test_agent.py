"""The whole way of a run on this machine: submitted over HTTP, started by the local provider, brought to its end by the
real agent and the real trainer; and what is killed on the way."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from whole_way import ENVIRONMENT, SEES, Control, Hold, digests_alone, holds, not_mirrored, spec_of, until

from stopwatch import Stopwatch
from tandem import digest_run
from tandem.agent.attempt import Agent
from tandem.agent.link import Link
from tandem.control.decide import POLL_MS
from tandem.io.process_identity import identity
from tandem.shapes.agent import FENCED

STEPS = 8


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    found = Control(tmp_path_factory.mktemp("control"))
    yield found
    found.close()


@pytest.fixture
def control(shared: Control) -> Control:
    """One for all tests; each begins when the processes of the one before have ended."""
    until(lambda: not shared.processes(), 30)
    return shared


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return digests_alone(tmp_path_factory.mktemp("alone"), STEPS)


def test_an_agent_that_no_control_plane_answers_ends_but_not_before_its_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        link = Link(f"http://127.0.0.1:{silent.getsockname()[1]}/api/attempts/attempt_x", "token")
        agent = Agent(link, tmp_path, every_s=0.02, claim_s=0.1)
        assert agent.run() == FENCED
        trainer = subprocess.Popen(["sleep", "0.5"])  # that an agent before it, which was killed, has started
        (tmp_path / "trainer.json").write_text(json.dumps({"program": identity(trainer.pid)}))
        assert agent.run() == FENCED
        assert trainer.wait() == 0
        link.close()


def ends(control: Control, run: str, state: str = "succeeded") -> None:
    until(lambda: control.state(run) in ("succeeded", "failed", "stopped", "cancelled"), 200)
    found = control.ask("GET", f"/api/runs/{run}")
    assert found["state"] == state, (found, console(control))


def console(control: Control) -> str:
    return "\n".join(path.read_text()[-3000:] for path in control.home.glob("jobs/tandem-*/*") if path.is_file())


def attempts(control: Control, run: str) -> list[Path]:
    return sorted(control.home.glob(f"jobs/tandem-*{run}-*"))


def test_a_submitted_run_ends_as_the_command_alone_would(control: Control, alone: dict[str, str]) -> None:
    run = control.submit(STEPS)
    ends(control, run)
    assert digest_run(control.directory(run)) == alone
    assert not_mirrored(control, run) == []
    assert "trainer has begun" in console(control)
    assert json.loads((control.mirror(run) / "status.json").read_text())["state"] == "succeeded"
    (attempt,) = attempts(control, run)
    assert (control.mirror(run) / "console.txt").read_bytes() == (attempt / "trainer.log").read_bytes()
    until(lambda: not control.processes(), 20)
    tokens = [path for path in control.home.rglob("*") if path.is_file() and b"tda_" in path.read_bytes()]
    assert tokens == []


def test_agent_guard_and_control_are_killed_on_the_way_and_the_run_ends_the_same(
    control: Control, alone: dict[str, str]
) -> None:
    hold = Hold(control.home, 3)
    run = control.submit(STEPS, callbacks=hold.callbacks)
    until(lambda: hold.reached(3))
    trainer = control.processes("train")
    (worker,) = control.processes("--once")
    os.kill(worker, signal.SIGKILL)  # its guard starts another, which goes on with the same trainer
    until(lambda: "goes on with the same trainer" in console(control))
    assert control.processes("train") == trainer
    control.kill()
    hold.at(6)
    until(lambda: hold.reached(6))  # it trains on meanwhile
    control.start()
    assert control.state(run) == "running"
    (attempt,) = attempts(control, run)
    guard = int((attempt / ".job/pid").read_text().split()[0])
    os.kill(guard, signal.SIGKILL)  # the agent goes on without it
    hold.release()
    ends(control, run)
    assert len(attempts(control, run)) == 1
    assert digest_run(control.directory(run)) == alone
    assert not_mirrored(control, run) == []


def test_a_run_whose_processes_all_die_is_resumed_by_a_further_attempt_once_its_lease_is_over(
    control: Control, alone: dict[str, str]
) -> None:
    hold = Hold(control.home, 3)
    run = control.submit(STEPS, callbacks=hold.callbacks)
    until(lambda: hold.reached(3))
    for pid in control.processes():
        os.kill(pid, signal.SIGKILL)
    hold.release()
    time.sleep(3 * POLL_MS / 1000)  # the control plane has seen that the job is gone
    assert control.state(run) == "running"
    control.end_lease(run)
    ends(control, run)
    assert len(attempts(control, run)) == 2
    assert digest_run(control.directory(run)) == alone
    assert not_mirrored(control, run) == []


def test_a_supervisor_that_is_killed_is_followed_by_a_further_attempt(control: Control, alone: dict[str, str]) -> None:
    hold = Hold(control.home, 3)
    run = control.submit(STEPS, callbacks=hold.callbacks)
    until(lambda: hold.reached(3))
    (attempt,) = attempts(control, run)
    told = json.loads((attempt / "trainer.json").read_text())
    supervisor = int(told["program"].partition(":")[0])
    os.kill(supervisor, signal.SIGKILL)
    hold.release()
    ends(control, run)
    assert len(attempts(control, run)) == 2
    assert digest_run(control.directory(run)) == alone


def test_a_cancelled_run_is_gone_within_ten_seconds(control: Control) -> None:
    run = control.submit(100_000)
    until(lambda: control.steps(run) >= 2)
    with Stopwatch() as watch:
        control.ask("POST", f"/api/runs/{run}/cancel", {})
        until(lambda: not control.processes(), 30)
    assert watch.seconds < 10
    ends(control, run, "cancelled")


def test_a_run_ends_at_its_limit_though_the_control_plane_is_away(tmp_path: Path) -> None:
    here = f'[targets.here]\nkind = "local"\ndirectory = "{tmp_path}/jobs"\ntandem = "{tmp_path}/tandem"\n'
    control = Control(tmp_path, here + "usd_per_hour = 3600\n")
    try:
        body = {"spec_toml": spec_of(tmp_path, 10**6), "target": "here", "max_cost_usd": 20.0}
        run = control.ask("POST", "/api/runs", body)["id"]
        until(lambda: any(each["claimed_at"] for each in control.ask("GET", f"/api/runs/{run}/attempts")["items"]))
        control.kill()
        until(lambda: not control.processes(), 25)
        control.start()
        until(lambda: control.state(run) == "stopped", 30)
        assert control.ask("GET", f"/api/runs/{run}")["why"] == "it has cost what it may: max_cost_usd = 20"
        assert control.ask("GET", "/api/usage")["items"][0]["usd"] <= 21
    finally:
        control.close()


def test_a_wrong_spec_fails_with_its_reason_and_is_not_tried_again(control: Control) -> None:
    run = control.submit(2, model={"path": str(control.home / "no-such-model")})
    ends(control, run, "failed")
    assert len(attempts(control, run)) == 1
    assert "no-such-model" in control.ask("GET", f"/api/runs/{run}")["why"]


def test_a_secret_is_in_the_trainers_environment_and_nowhere_else(control: Control) -> None:
    """Through a success, a crash and a cancel: no file, command line or answer has it."""
    canary = f"canary-{os.urandom(8).hex()}"
    found: list[object] = []
    control.ask("POST", "/api/secrets", {"name": "CANARY", "value": canary})
    (control.home / "sees.py").write_text(SEES + ENVIRONMENT)
    (control.home / "breaks.py").write_text(SEES + ENVIRONMENT + "\nraise RuntimeError('broken')\n")
    seen = hashlib.sha256(canary.encode()).hexdigest()

    def watched(run: str, *states: str) -> Callable[[], bool]:
        def look() -> bool:
            found.extend(path for path in Path("/proc").glob("[0-9]*/cmdline") if holds(path, canary.encode()))
            return control.state(run) in states

        return look

    def submitted(steps: int, code: str) -> str:
        return control.submit(steps, secrets=["CANARY"], environment={"name": str(control.home / code)})

    succeeds, breaks = submitted(2, "sees.py"), submitted(2, "breaks.py")
    until(watched(succeeds, "succeeded", "failed"))
    until(watched(breaks, "succeeded", "failed"))
    assert [control.state(each) for each in (succeeds, breaks)] == ["succeeded", "failed"], console(control)
    goes_on = submitted(100_000, "sees.py")
    until(lambda: control.steps(goes_on) >= 2)
    (agent,) = control.processes("--once")
    assert canary.encode() not in Path(f"/proc/{agent}/environ").read_bytes()
    assert any(canary.encode() in Path(f"/proc/{pid}/environ").read_bytes() for pid in control.processes("train"))
    control.ask("POST", f"/api/runs/{goes_on}/cancel", {})
    until(watched(goes_on, "cancelled"))
    assert (control.home / "sees.seen").read_text() == seen == (control.home / "breaks.seen").read_text()
    assert "broken" in console(control)
    found += control.look_for(canary.encode(), (succeeds, breaks, goes_on))
    assert found == []
