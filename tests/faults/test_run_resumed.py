"""Runs that are taken up again, in this process: from any checkpoint, after SIGTERM, at their end.

A run with every checkpoint still there stands for one that was killed after each of them.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small_runs import ENVIRONMENT, resume, rl, rows, sft, torch_as_it_was, train

from stopwatch import Stopwatch
from tandem.build import training
from tandem.errors import CheckpointDamaged, RunFenced
from tandem.io.jsonl import JsonlWriter
from tandem.io.sealed_directory import digest_of, verify
from tandem.runs import uploads
from tandem.runs.artifacts import Artifact, ArtifactStore, fetch_artifact
from tandem.runs.checkpoints import Checkpoints
from tandem.runs.lease import DirectoryLease
from tandem.runs.run_ending import digest_run

__all__ = ["torch_as_it_was"]
pytestmark = pytest.mark.usefixtures("one_thread", "torch_as_it_was")


def killed_after(whole: Path, version: int, run_dir: Path) -> Path:
    """As it was when the checkpoint of `version` was its newest, and rows of later steps were written."""
    shutil.copytree(whole, run_dir)
    for later in Checkpoints(run_dir).versions():
        if later > version:
            shutil.rmtree(run_dir / "checkpoints" / f"step-{later}")
    status = json.loads((run_dir / "status.json").read_text())
    (run_dir / "status.json").write_text(json.dumps({**status, "state": "running"}))
    return run_dir


@contextmanager
def at_row(number: int, run: Path, act: Callable[[], object]) -> Iterator[None]:
    """`act` happens when a run that begins here has written so many rows."""
    write, metrics = JsonlWriter.write, run / "metrics.jsonl"

    def written(self: JsonlWriter, row: Mapping[str, Any]) -> None:
        write(self, row)
        if JsonlWriter.write is written and metrics.exists() and metrics.read_bytes().count(b"\n") == number:
            JsonlWriter.write = write
            act()

    JsonlWriter.write = written
    try:
        yield
    finally:
        JsonlWriter.write = write


def content(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): digest_of(path) for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("model", "versions"), [({}, (2, 4)), ({"lora": {"rank": 4}}, (4,))], ids=["GRPO", "LoRA"])
def test_from_any_checkpoint_a_run_comes_to_the_same_bytes(
    tmp_path: Path, model: dict[str, Any], versions: tuple[int, ...]
) -> None:
    """Also from one that was saved after an evaluation (4), which has shared the engine with nobody."""
    train(rl(tmp_path, model=model, steps=3), tmp_path / "whole")
    expected = digest_run(tmp_path / "whole")
    for version in versions:
        run = killed_after(tmp_path / "whole", version, tmp_path / f"killed-{version}")
        assert resume(run)["state"] == "succeeded"
        assert digest_run(run) == expected, f"from step {version}"


def test_an_environment_that_draws_from_the_process_s_own_generators_goes_on_with_its_numbers(tmp_path: Path) -> None:
    """Nothing of ours does; a user's rewards, and libraries that they use, may."""
    draws = "random.random() + numpy.random.random() + torch.rand(()).item()"
    noisy = ENVIRONMENT.replace("return Outcome(", f"return Outcome({draws} + ")
    (tmp_path / "noisy.py").write_text(f"import random\n\nimport numpy\nimport torch\n{noisy}")
    train(rl(tmp_path, environment=str(tmp_path / "noisy.py"), steps=2), tmp_path / "whole")
    run = killed_after(tmp_path / "whole", 3, tmp_path / "killed")
    assert resume(run)["state"] == "succeeded"
    assert digest_run(run) == digest_run(tmp_path / "whole")


def test_a_run_of_which_no_checkpoint_is_whole_says_that_it_failed(tmp_path: Path) -> None:
    train(sft(tmp_path, steps=2), tmp_path / "whole")
    run = killed_after(tmp_path / "whole", 2, tmp_path / "run")
    for weights in run.glob("checkpoints/step-*/weights.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointDamaged, match="no undamaged checkpoint is left"):
        resume(run)
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["failure"]["rule"]) == ("failed", "checkpoint-damaged")
    assert "no undamaged checkpoint is left" in status["error"]


def test_with_a_lag_every_task_that_was_started_is_trained_on_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: dict[int, list[str]] = {}
    real = training.batches

    def noting(*arguments: Any) -> Callable[[list[Any], int], Any]:
        make = real(*arguments)

        def noted(groups: list[Any], version: int) -> Any:
            trained[version] = [group[0].task_id for group in groups]
            return make(groups, version)

        return noted

    monkeypatch.setattr(training, "batches", noting)
    train(rl(tmp_path, steps=4, max_lag=1), tmp_path / "whole")
    whole = dict(trained)
    for version in (3, 4):
        trained.clear()
        assert resume(killed_after(tmp_path / "whole", version, tmp_path / f"killed-{version}"))["steps_done"] == 6
        assert min(trained) == version
        before = [task for step in range(2, version) for task in whole[step]]
        after = [task for step in sorted(trained) for task in trained[step]]
        assert len(after) == 2 * (6 - version)
        assert before + after == [task for step in range(2, 6) for task in whole[step]]
        lags = [row["lag/max"] for row in rows(tmp_path / f"killed-{version}" / "metrics.jsonl") if row["step"] > 2]
        assert max(lags) == 1


def test_sigterm_saves_ends_with_0_and_the_run_goes_on_to_the_same_bytes_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its spec names what it reads relative to where it was begun."""
    monkeypatch.chdir(tmp_path)
    spec = sft(Path(), every=100)  # nothing is saved but for the signal
    train(spec, tmp_path / "whole")
    run = tmp_path / "run"

    with at_row(4, run, partial(signal.raise_signal, signal.SIGTERM)), pytest.raises(SystemExit) as ended:
        train(spec, run)
    assert ended.value.code == 0
    assert json.loads((run / "status.json").read_text())["state"] == "stopped"
    (saved,) = Checkpoints(run).versions()
    assert 4 <= saved < 12
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resume(run)["state"] == "succeeded"
    assert digest_run(run) == digest_run(tmp_path / "whole")


def test_a_run_that_was_taken_over_leaves_everything_to_whoever_has_it_now(tmp_path: Path) -> None:
    run = tmp_path / "run"
    spec = sft(tmp_path) | {"artifacts": {"url": str(tmp_path / "store"), "what": ["results"]}}

    def take_over() -> None:
        leases.append(DirectoryLease(run, take_over=True))
        kept.append((run / "status.json").read_bytes())

    leases: list[DirectoryLease] = []
    kept: list[bytes] = []
    with at_row(4, run, take_over), pytest.raises(RunFenced):
        train(spec, run)
    assert (run / "status.json").read_bytes() == kept[0]
    assert not (run / "report.html").exists()
    assert not (run / "export").exists()
    assert not (tmp_path / "store").exists()
    leases[0].close()
    assert resume(run)["state"] == "succeeded"


def test_a_run_that_succeeded_is_left_as_it_is_and_lacks_nothing(tmp_path: Path) -> None:
    spec = sft(tmp_path, steps=3) | {"artifacts": {"url": str(tmp_path / "store"), "what": ["results"]}}
    train(spec, tmp_path / "run")
    before = content(tmp_path / "run")
    with Stopwatch() as watch:
        assert resume(tmp_path / "run")["state"] == "succeeded"
    assert watch.seconds < 5
    assert content(tmp_path / "run") == before
    # Killed between its last status and what comes after it:
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    del status["artifacts"]
    (tmp_path / "run" / "status.json").write_text(json.dumps(status))
    (tmp_path / "run" / "report.html").unlink()
    shutil.rmtree(tmp_path / "store")
    assert resume(tmp_path / "run")["artifacts"]["state"] == "published"
    assert (tmp_path / "run" / "report.html").exists()
    assert digest_run(tmp_path / "run")


def test_checkpoints_go_up_while_the_run_goes_on_and_stay_as_long_as_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"

    class Slow(ArtifactStore):
        """The first goes up when it would be long gone by `keep_last`."""

        def push(self, name: str, source: Path, *, only: Sequence[str] = ()) -> Artifact:
            until = time.monotonic() + 30
            while (tmp_path / "run" / "metrics.jsonl").read_bytes().count(b"\n") < 8 and time.monotonic() < until:
                time.sleep(0.01)
            return super().push(name, source, only=only)

    monkeypatch.setattr(uploads, "ArtifactStore", Slow)
    spec = sft(tmp_path) | {"artifacts": {"url": str(store), "what": ["checkpoints"]}}
    train(spec, tmp_path / "run")
    events = rows(tmp_path / "run" / "events.jsonl")
    done = next(number for number, event in enumerate(events) if event["stage"] == "done")
    during = [event["name"] for event in events[:done] if event["stage"] == "upload"]
    assert during[0] == "run.step-1"
    assert {event["state"] for event in events if event["stage"] == "upload"} == {"published"}
    there = {path.name for path in store.iterdir()}
    assert there >= {*during, "run.step-11", "run.step-12"}  # and those that are kept, at the end
    back = fetch_artifact(str(store), during[0], tmp_path / "back")
    assert (back / "deploy" / "model.safetensors").exists()
    verify(back.rename(tmp_path / during[0].removeprefix("run.")))
