"""The whole way of a run on machines that real servers reach: sshd and Slurm, with a kill on the way."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from whole_way import ENVIRONMENT, SEES, Control, Hold, digests_alone, holds, until

from tandem import digest_run
from tandem.spec.load import parse_spec, to_toml
from tandem.spec.toml import read_toml

sys.path.insert(0, str(Path(__file__).parents[1] / "providers"))
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from places import Slurm, Sshd, slurm, sshd  # pyright: ignore[reportMissingImports]
from run_commands import here, write_spec  # pyright: ignore[reportMissingImports]

STEPS = 8


def brought_to_its_end(home: Path, targets: str) -> dict[str, str]:
    """Submit a run to `[targets.there]`, kill the agent and the control plane, and return the run's digests."""
    control = Control(home, f'[targets.there]\ndirectory = "{home}/jobs"\ntandem = "{home}/tandem"\n{targets}')
    try:
        hold = Hold(home, 3)
        run = control.submit(STEPS, "there", callbacks=hold.callbacks)
        until(lambda: hold.reached(3))
        (worker,) = control.processes("--once")
        os.kill(worker, signal.SIGKILL)
        control.kill()
        hold.release()
        control.start()
        until(lambda: control.state(run) in ("succeeded", "failed"), 200)
        told = control.ask("GET", f"/api/runs/{run}")
        assert told["state"] == "succeeded", told
        (job,) = home.glob("jobs/tandem-*")
        assert "goes on with the same trainer" in (job / "console").read_text()
        return digest_run(control.directory(run))
    finally:
        control.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return digests_alone(tmp_path_factory.mktemp("alone"), STEPS)


@pytest.mark.skipif(not sshd(), reason="no sshd here: make install-system")
def test_a_run_on_an_ssh_box_ends_as_the_command_alone_would(tmp_path: Path, alone: dict[str, str]) -> None:
    (tmp_path / "sshd").mkdir()
    server = Sshd(tmp_path / "sshd")
    try:
        login = "".join(f"{name} = {value!r}\n" for name, value in server.login.items())
        assert brought_to_its_end(tmp_path, f'kind = "ssh"\n{login}') == alone
    finally:
        server.kill()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    if not slurm():
        pytest.skip("no Slurm here, or not root: make install-system")
    found = Slurm()
    yield found
    found.kill()


def test_a_run_on_a_slurm_cluster_ends_as_the_command_alone_would(
    tmp_path: Path, alone: dict[str, str], cluster: Slurm
) -> None:
    assert brought_to_its_end(tmp_path, f'kind = "slurm"\nconf = "{cluster.conf}"\n') == alone


def test_a_run_that_slurm_preempts_goes_on_and_its_secret_is_in_the_trainers_environment_alone(
    tmp_path: Path, alone: dict[str, str], cluster: Slurm
) -> None:
    """Preemption sends SIGTERM to the job, as `scancel --signal` does; then the node is another's."""
    canary = f"canary-{os.urandom(8).hex()}".encode()
    targets = f'[targets.there]\ndirectory = "{tmp_path}/jobs"\ntandem = "{tmp_path}/tandem"\n'
    control = Control(tmp_path, f'{targets}kind = "slurm"\nconf = "{cluster.conf}"\n')
    try:
        control.ask("POST", "/api/secrets", {"name": "CANARY", "value": canary.decode()})
        hold = Hold(tmp_path, 3)
        (tmp_path / "sees.py").write_text(SEES + ENVIRONMENT)
        sees = {"name": str(tmp_path / "sees.py")}
        run = control.submit(STEPS, "there", ["CANARY"], environment=sees, callbacks=hold.callbacks)
        until(lambda: hold.reached(3))
        found = control.look_for(canary, [run], cluster.root)
        assert any(holds(Path(f"/proc/{pid}/environ"), canary) for pid in control.processes("train"))
        (agent,) = control.processes("--once")
        assert not holds(Path(f"/proc/{agent}/environ"), canary)
        (job,) = cluster.tell("squeue", "--noheader", "--format=%i", "--states=RUNNING").split()
        cluster.tell("scancel", "--signal=TERM", "--full", job)
        until(hold.was_asked_to_end)
        hold.release()
        until(lambda: control.state(run) == "waiting")
        found += control.look_for(canary, [run], cluster.root)
        until(lambda: control.state(run) in ("succeeded", "failed"), 200)
        found += control.look_for(canary, [run], cluster.root)
        told = control.ask("GET", f"/api/runs/{run}")
        assert (told["state"], told["attempt"]) == ("succeeded", 2), told
        assert (tmp_path / "sees.seen").read_text() == hashlib.sha256(canary).hexdigest()
        assert found == []
        weights = [name for name in alone if "weights" in name]
        assert weights
        assert {name: digest_run(control.directory(run))[name] for name in weights} == {
            name: alone[name] for name in weights
        }
    finally:
        control.close()


def test_a_run_on_two_nodes_loses_a_rank_and_ends_as_one_rank_would_and_a_cancel_ends_both_nodes(
    tmp_path: Path, cluster: Slurm
) -> None:
    """The other node's rank is killed in the middle of a step: the supervisor begins again, on both nodes."""
    hold = Hold(tmp_path, 3)
    spec = write_spec(tmp_path, steps=6)
    raw = {**read_toml(spec), "device": "cpu", "callbacks": hold.callbacks}
    on_two = to_toml(parse_spec({**raw, "parallel": {**raw["parallel"], "ranks": 2, "hosts": 2}}))
    here("train", spec, "--run-dir", tmp_path / "alone")
    canary = f"canary-{os.urandom(8).hex()}".encode()
    targets = f'[targets.there]\ndirectory = "{tmp_path}/jobs"\ntandem = "{tmp_path}/tandem"\n'
    control = Control(tmp_path, f'{targets}kind = "slurm"\nconf = "{cluster.conf}"\n')
    try:
        control.ask("POST", "/api/secrets", {"name": "CANARY", "value": canary.decode()})
        body = {"spec_toml": on_two, "target": "there", "secrets": ["CANARY"]}
        run = control.ask("POST", "/api/runs", body)["id"]
        until(lambda: hold.reached(3), 300)
        (victim,) = ranks_of_the_other_host(control)
        assert holds(Path(f"/proc/{victim}/environ"), canary)
        assert not any(holds(Path(f"/proc/{pid}/environ"), canary) for pid in control.processes("--once"))
        os.kill(victim, signal.SIGKILL)
        hold.release()
        until(lambda: control.state(run) in ("succeeded", "failed"), 200)
        told = control.ask("GET", f"/api/runs/{run}")
        assert (told["state"], told["attempt"]) == ("succeeded", 1), told
        attempts = (control.directory(run) / "attempts.jsonl").read_text().splitlines()
        assert [json.loads(each).get("failure", {}).get("rule") for each in attempts] == ["rank-lost", None]
        assert digest_run(control.directory(run)) == digest_run(tmp_path / "alone")
        hold = Hold(tmp_path, 3)
        cancelled = control.ask("POST", "/api/runs", body)["id"]
        until(lambda: hold.reached(3), 300)
        assert ranks_of_the_other_host(control)
        control.ask("POST", f"/api/runs/{cancelled}/cancel", {})
        until(lambda: not control.processes(), 30)
        until(lambda: control.state(cancelled) == "cancelled")
        assert control.look_for(canary, [run, cancelled], cluster.root) == []
    finally:
        control.close()


def ranks_of_the_other_host(control: Control) -> list[int]:
    found = control.processes("tandem.recipes.follower")
    program = [pid for pid in found if not holds(Path(f"/proc/{pid}/cmdline"), b"leash.py")]
    return [pid for pid in program if holds(Path(f"/proc/{pid}/environ"), b"TANDEM_HOST=1\0")]
