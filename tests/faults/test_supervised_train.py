"""`tandem train --supervise` with real runs: the process is killed, or the spec is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.runs.liveness import read_sign

pytestmark = pytest.mark.usefixtures("forked_programs")
STEPS = 30


def spec_of(home: Path, **changes: Any) -> Path:
    rows = (
        [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n} it is"}] for n in range(40)
    )
    (home / "rows.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    spec = f"""
recipe = "sft"
[model]
preset = "tiny"
[data]
kind = "file"
path = "{home / changes.get("rows", "rows.jsonl")}"
[train]
steps = {STEPS}
lr = 1e-3
batch_size = 4
[checkpoint]
every = 5
"""
    path = home / "spec.toml"
    path.write_text(spec)
    return path


@contextmanager
def supervised(*arguments: object, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as told:
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem", *map(str, arguments)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=told, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=10)


def wait_for(seen: Callable[[], object], process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 60
    while not seen():
        assert time.monotonic() < until, log.read_text()
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_whose_process_is_killed_goes_on_and_ends_well(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log.txt"
    with supervised("train", spec_of(tmp_path), "--supervise", "--run-dir", run, log=log) as process:
        wait_for(lambda: (run / "checkpoints" / "step-5").exists(), process, log)
        sign = read_sign(run)
        assert sign is not None
        os.kill(int(sign.process.partition(":")[0]), signal.SIGKILL)
        assert process.wait(timeout=90) == 0, log.read_text()
    first, second = rows(run / "attempts.jsonl")
    assert (first["exit_code"], first["failure"]["class"]) == (137, "infra_retriable")
    assert second["then"] == "done"
    assert json.loads((run / "status.json").read_text())["state"] == "succeeded"
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert any(row["stage"] == "resume" for row in rows(run / "events.jsonl"))


def test_what_the_user_must_change_is_not_tried_again_and_the_exit_code_says_whose_it_is(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log.txt"
    (tmp_path / "odd.jsonl").write_text('{"nothing": 1}\n' * 40)
    with supervised("train", spec_of(tmp_path, rows="odd.jsonl"), "--supervise", "--run-dir", run, log=log) as process:
        code = process.wait(timeout=90)
    (attempt,) = rows(run / "attempts.jsonl")
    assert attempt["failure"]["retriable"] is False
    assert code == attempt["failure"]["exit_code"] > 1
    assert "odd.jsonl" in log.read_text()
    with supervised("train", tmp_path / "spec.toml", "--supervise", "--run-dir", run, log=log) as process:
        assert process.wait(timeout=60) == 2  # there is a run: nothing is begun, and nothing resumed, over it
    assert "is not empty" in log.read_text()
    assert len(rows(run / "attempts.jsonl")) == 1


def test_a_run_that_is_resumed_and_fails_exits_by_its_class_too(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log.txt"
    run.mkdir()
    spec_of(tmp_path, rows="no.jsonl").rename(run / "spec.toml")
    with supervised("resume", run, log=log) as process:
        code = process.wait(timeout=90)
    failure = json.loads((run / "status.json").read_text())["failure"]
    assert code == failure["exit_code"] > 1
    assert f"rule {failure['rule']})" in log.read_text()
