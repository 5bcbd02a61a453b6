"""`tandem explain`: the named error of a run and what to do, from what its directory and its server say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.errors import RunError
from tandem.runs.explain import explain_run, explain_text
from tandem.runs.failure_diagnosis import classify_error


def run_dir(home: Path, status: dict[str, Any], log: str = "") -> Path:
    (home / "spec.toml").write_text("")
    (home / "status.json").write_text(json.dumps({"steps_total": 9, "steps_done": 4, **status}))
    (home / "log.txt").write_text(log)
    return home


def told(found: dict[str, Any]) -> str:
    return "\n".join(explain_text(found))


def test_a_failed_run_names_its_error_its_class_and_what_to_do(tmp_path: Path):
    failure = classify_error(MemoryError("no room for 3 GiB")).row()
    status = {"state": "failed", "error": "MemoryError: no room for 3 GiB", "failure": failure}
    run_dir(tmp_path, status, "step 1\nstep 2\n\nMemoryError: no room for 3 GiB\n")
    found = explain_run(str(tmp_path))
    assert (found["state"], found["why"], found["failure"]["class"]) == (
        "failed", "MemoryError: no room for 3 GiB", "out_of_memory",
    )  # fmt: skip
    assert found["next"] == f"{failure['next']}; then `tandem resume {tmp_path}`"
    assert found["evidence"][-1] == {"file": "log.txt", "line": 4, "text": "MemoryError: no room for 3 GiB"}
    text = told(found)
    assert text.startswith(f"{tmp_path}: failed, at step 4 of 9\n   why: MemoryError")
    assert "failure class out_of_memory" in text
    shown = CliRunner().invoke(app, ["explain", str(tmp_path), "--json"])
    assert (shown.exit_code, json.loads(shown.stdout)) == (1, found)


def test_a_failure_that_only_the_last_lines_show_is_found_there(tmp_path: Path):
    run_dir(tmp_path, {"state": "running"}, "step 1\n")
    (tmp_path / "console.txt").write_text("Traceback (most recent call last):\n  x\ntorch.OutOfMemoryError: CUDA out\n")
    found = explain_run(tmp_path, name="run_x", state="failed", why="exit code 1")
    assert (found["failure"]["class"], found["failure"]["rule"]) == ("out_of_memory", "gpu-memory")
    assert found["evidence"][0]["file"] == "console.txt"


@pytest.mark.parametrize(
    ("state", "why", "then"),
    [
        ("failed", "'box' started no job within 600 s; no attempt is left of 4", "`tandem targets` says"),
        ("failed", "its job ended before it claimed the attempt: ended with code 1", "in `console`"),
        ("waiting", "its machine ended it, and its lease ran out: gone", "`tandem resume run_x` goes on"),
        ("stopped", "it has cost what it may: max_cost_usd = 2", "submit it again with a higher --max-cost"),
        ("stopped", "", "`tandem resume run_x` goes on"),
        ("cancelled", "", "`tandem resume run_x` goes on"),
        ("succeeded", "", "`tandem report run_x`"),
        ("running", "", "`tandem watch run_x` follows it"),
    ],
)
def test_what_the_server_says_decides_what_comes_next(tmp_path: Path, state: str, why: str, then: str):
    found = explain_run(tmp_path, name="run_x", state=state, why=why, ended=[{"attempt": 1, "why": "gone"}])
    assert then in found["next"]
    assert "attempt 1: gone" in told(found)


def test_the_words_of_the_server_are_those_that_are_looked_for():
    """They are in tandem.control.decide, which a light command does not import."""
    from tandem.control import decide
    from tandem.runs.explain import BY_SERVER

    source = Path(decide.__file__).read_text()
    assert [words for words in BY_SERVER if words not in source] == []


def test_a_run_whose_process_is_gone_and_a_directory_that_is_none(tmp_path: Path):
    run_dir(tmp_path, {"state": "running"})
    found = explain_run(tmp_path)
    assert "its process is gone, and it has not ended" in told(found)
    assert found["next"] == f"`tandem resume {tmp_path}` goes on from the last checkpoint"
    with pytest.raises(RunError, match="is not a run directory"):
        explain_run(tmp_path / "none")


def test_what_a_run_prints_does_not_control_the_terminal(tmp_path: Path):
    run_dir(tmp_path, {"state": "failed", "error": "x\x1b[31m"}, "red \x1b[31m\n")
    shown = CliRunner().invoke(app, ["explain", str(tmp_path)])
    assert "\x1b" not in shown.stdout
    assert "red \\u001b[31m" in shown.stdout


def test_the_first_bad_step_is_told_whatever_else_is_in_the_metrics(tmp_path: Path):
    """A row of an evaluation, or one that another program wrote, has no step."""
    run_dir(tmp_path, {"state": "failed", "error": "stopped"})
    rows = [{"stage": "rl", "note": "no step"}, *({"step": n, "stage": "rl", "grad/norm": 1.0} for n in range(1, 31))]
    rows.append({"step": 31, "stage": "rl", "grad/norm": 99.0})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = explain_run(tmp_path)
    assert found["bad_step"]["step"] == 31
    assert "first bad step 31: the gradient's norm is 99 times" in told(found)
