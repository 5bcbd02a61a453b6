"""Whole runs whose environment is played in sandboxes: the same bytes as without, stopped and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import tandem
from conftest import Train, Trained
from tandem.env.sandbox.outside import Sandbox
from tandem.errors import OwnCodeFailed, SpecError
from tandem.rollout.workers.forkserver_client import ForkServerClient, Order

OWN = """
import os

from tandem.types import Outcome, Task


class Own:
    replies_first = True

    def tasks(self, split):
        return [Task(f"{split} {n}", ({"role": "user", "content": str(n)},), {"n": n}) for n in range(8)]

    async def run(self, task, chat):
        reply = await chat.reply()
        return Outcome(float(len(reply.text) % 3 == task.payload["n"] % 3), {"alone": float(os.getpid() == 2)})
"""


@pytest.fixture
def able() -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: `make install-system`")
    try:
        ForkServerClient(Order("sort", sandbox=Sandbox())).close()
    except SpecError as error:
        pytest.skip(f"this machine refuses sandboxes: {error}")


def spec_of(file: Path, **environment: Any) -> dict[str, Any]:
    return {
        "recipe": "rl",
        "model": {"preset": "tiny"},
        "environment": {"name": str(file), "workers": 4, **environment},
        "train": {"steps": 3, "lr": 1e-3, "groups_per_step": 3, "group_size": 4, "max_tokens": 8},
        "eval": {"tasks": 4},
    }


def same(trained: Trained) -> list[dict[str, float]]:
    """Return the metrics that do not depend on time, on memory or on which process plays."""
    rows = trained.rows("metrics")
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/", "env/alone"))} for row in rows]


@pytest.mark.usefixtures("one_thread", "able")
def test_a_run_in_sandboxes_has_the_bytes_of_one_without_and_says_that_they_are_engaged(train: Train, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    plain = train(spec_of(tmp_path / "own.py"), name="plain")
    boxed = train(spec_of(tmp_path / "own.py", sandbox="bwrap"), name="boxed")
    assert same(plain) == same(boxed)
    assert all(row["env/alone"] == 1.0 for row in boxed.rows("metrics"))
    (said,) = (row for row in boxed.rows("events") if row.get("option") == "environment.sandbox")
    assert (said["requested"], said["engaged"]) == ("bwrap", True)
    assert said["note"].startswith("network: none; read: nothing more; write: nothing more; one for each episode;")
    assert not [row for row in plain.rows("events") if row.get("option") == "environment.sandbox"]


@pytest.mark.usefixtures("one_thread", "able")
def test_a_run_that_is_resumed_has_its_sandbox_again_or_does_not_go_on(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "own.py").write_text(OWN)
    spec = spec_of(tmp_path / "own.py", sandbox="bwrap", sandbox_each="worker") | {"checkpoint": {"every": 1}}

    class Stop:
        last = 2

        def on_step(self, step: Any) -> None:
            if step.version == self.last:
                raise RuntimeError("that is enough")

    stop = Stop()
    with pytest.raises(OwnCodeFailed, match="that is enough"):
        tandem.run(spec, tmp_path / "run", callbacks=[stop])
    stop.last = 0
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SpecError, match="bubblewrap is not installed here"):
        tandem.resume(tmp_path / "run", callbacks=[stop])
    monkeypatch.undo()
    resumed = tandem.resume(tmp_path / "run", callbacks=[stop])
    assert resumed["state"] == "succeeded"
    told = [
        line for line in (tmp_path / "run/events.jsonl").read_text().splitlines() if '"environment.sandbox"' in line
    ]
    assert len(told) == 2
    assert all('"engaged": true' in line and "one for each worker" in line for line in told)
