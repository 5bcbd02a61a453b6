"""What a command line owes its user: lists, completion, silence where it was asked for, words while it works."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem.cli import options
from tandem.cli.main import app
from tandem.env.load import ADAPTERS, BUILT_IN
from tandem.obs.live_view import LiveView, busy
from tandem.serve.terminal_chat import converse


def made_run(place: Path, name: str, at: int, status: dict[str, Any] | None, *rows: dict[str, Any]) -> None:
    run = place / name
    run.mkdir(parents=True)
    (run / "spec.toml").write_text("")
    os.utime(run / "spec.toml", (at, at))
    if status is not None:
        (run / "status.json").write_text(json.dumps(status))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_are_listed_with_state_verdict_step_and_reward(tmp_path: Path):
    done = {"state": "succeeded", "verdict": "improved", "recipe": "rl", "steps_total": 90,
            "eval": {"metric": "accuracy", "before_rl": 0.238, "after": 0.982}}  # fmt: skip
    made_run(tmp_path, "second", 200, done, {"step": 89, "reward/mean": 0.5}, {"step": 90, "reward/mean": 0.9375})
    made_run(tmp_path, "first", 100, {"state": "failed", "error": "LogprobGap: too far\nmore", "steps_total": 5})
    made_run(
        tmp_path, "third", 300, {"state": "running", "recipe": "sft", "steps_total": 9}, {"step": 2, "loss/total": 1.5}
    )
    made_run(tmp_path, "fourth", 400, None)
    made_run(tmp_path, "fifth", 500, {"state": "running", "steps_total": 9})
    (tmp_path / "fifth" / "status.json").write_text("{")
    made_run(tmp_path, "sixth", 600, {"state": "running", "steps_total": 9})
    (tmp_path / "sixth" / "liveness.json").write_text("{}")
    (tmp_path / "no-run").mkdir()
    told = CliRunner().invoke(app, ["runs", str(tmp_path)]).output
    lines = [line.replace(f"{tmp_path}/", "").split() for line in told.splitlines()]
    assert lines[0][:4] == ["run", "state", "verdict", "step"]
    assert lines[1] == ["first", "failed", "0/5", "LogprobGap:", "too", "far"]
    assert lines[2] == ["second", "succeeded", "improved", "90/90", "0.9375", "98.2", "%", "(+74.4", "points)"]
    assert lines[3] == ["third", "gone", "2/9", "1.5"]
    assert lines[4] == ["fourth", "not", "begun"]
    assert lines[5][:2] == ["fifth", "damaged"]
    found = json.loads(CliRunner().invoke(app, ["runs", str(tmp_path), "--json"]).output)
    assert [row["state"] for row in found] == ["failed", "succeeded", "gone", "not begun", "damaged", "gone"]
    assert found[1]["after"] == 0.982


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("export RUN --gguf=", "'--gguf': '' must be one of 'f32', 'f16', 'bf16', 'q8_0', 'q4_1'"),
        ("export RUN --gguf q9", "'--gguf': 'q9' must be one of 'f32', 'f16', 'bf16', 'q8_0', 'q4_1'"),
        ("engine serve --kind foo", "'--kind': 'foo' must be one of 'server', 'vllm'"),
        ("serve DIR --port abc", "'--port': 'abc' must be a whole number"),
        ("chat DIR --temperature hot", "'--temperature': 'hot' must be a number"),
        ("chat DIR --temperature 11", "'--temperature': '11' must be less than or equal to 10"),
        ("plan SPEC --memory-gib -1", "'--memory-gib': '-1' must be greater than or equal to 0"),
    ],
)
def test_a_wrong_value_of_an_option_is_refused_in_plain_words(command: str, said: str):
    told = CliRunner().invoke(app, command.split())
    assert told.exit_code == 2
    text = " ".join(told.output.replace("│", " ").split())
    assert f"Invalid value for {said}" in text


HOSTILE = "first\n\x1b]0;owned\x07\x9b2Jlast"
ENVIRONMENT = f"""
from tandem import Outcome, Task


class Hostile:
    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def tasks(self, split):
        said = ({{"role": "user", "content": {HOSTILE!r}}},)
        return [Task({HOSTILE!r} + split + "x" * n * (self.wrong != "ids"), said, {{}}) for n in range(2)]

    async def run(self, task, chat):
        await chat.reply()
        if self.wrong == "run":
            raise ValueError({HOSTILE!r})
        return Outcome(1.0)
"""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("env try hostile.py:Hostile", "user> first\n\\u001b]0;owned\\u0007\\u009b2Jlast\n"),
        ("env try hostile.py:Hostile --set wrong=run", "ValueError: first\n\\u001b]0;owned\\u0007\\u009b2Jlast\n"),
        ("env check hostile.py:Hostile --set wrong=ids", "task id 'first\n\\u001b]0;owned\\u0007\\u009b2Jlast"),
        ("plan \x1b[2Jmine.toml", "tandem: \\u001b[2Jmine.toml: cannot be read"),
    ],
)
def test_no_text_of_others_controls_the_terminal(command: str, said: str, tmp_path: Path):
    (tmp_path / "hostile.py").write_text(ENVIRONMENT)
    tandem = [Path(sys.executable).with_name("tandem"), *command.split()]
    done = subprocess.run(tandem, cwd=tmp_path, input="x\n", capture_output=True, text=True, timeout=60, check=False)
    told = done.stdout + done.stderr
    assert said in told
    assert not [character for character in told if not character.isprintable() and character != "\n"]


def test_commands_print_by_one_function_and_json_keeps_its_meaning(capsys: pytest.CaptureFixture[str]):
    files = sorted(Path(options.__file__).parent.glob("*.py"))
    printing = [file.name for file in files if re.search(r"typer\.echo|(?<!\.)\bprint\(", file.read_text())]
    assert printing == ["options.py"]
    options.echo(json.dumps({"said": HOSTILE}, ensure_ascii=False, indent=2))
    told = capsys.readouterr().out
    assert "\x9b" not in told
    assert json.loads(told) == {"said": HOSTILE}


def test_an_answer_of_a_model_does_not_control_the_terminal(capsys: pytest.CaptureFixture[str]):
    class Hostile:
        def forget(self) -> None: ...

        async def reply(self, said: str, tell: Callable[[str], None]) -> None:
            tell(HOSTILE)

    lines = iter(["hello", "/exit"])
    asyncio.run(converse(Hostile(), ask=lambda _: next(lines)))
    assert "first\n]0;owned2Jlast" in capsys.readouterr().out


def test_the_environments_that_have_a_name_are_listed():
    found = json.loads(CliRunner().invoke(app, ["env", "list", "--json"]).output)
    assert {each["name"].removesuffix(":ID") for each in found} == {*BUILT_IN, *ADAPTERS}
    assert all(len(each["about"]) > 20 for each in found)


@pytest.mark.parametrize(("typed", "offered"), [("tandem wat", ["watch"]), ("tandem env l", ["list"])])
def test_a_shell_completes_commands(typed: str, offered: list[str]):
    asked = {"_TANDEM_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    command = Path(sys.executable).with_name("tandem")
    done = subprocess.run(
        [command], env={**os.environ, **asked}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == offered


def test_quiet_and_json_keep_stdout_for_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[Console] = []

    def run(spec: Any, run_dir: Any, *, rehearse: bool, view: LiveView | None) -> Any:
        assert view is not None
        view.say("a line")
        seen.append(view.console)
        return type("Run", (), {"directory": tmp_path, "status": {"state": "succeeded"}})

    monkeypatch.setattr("tandem.recipes.run", run)
    quickstart = str(Path(__file__).parents[2] / "examples" / "quickstart.toml")
    quiet = CliRunner().invoke(app, ["train", quickstart, "--quiet"])
    assert (quiet.stdout, quiet.stderr) == ("", "")
    as_json = CliRunner().invoke(app, ["train", quickstart, "--json"])
    assert json.loads(as_json.stdout) == {"run": str(tmp_path), "state": "succeeded"}
    assert as_json.stderr == "a line\n"
    assert "cannot be combined" in CliRunner().invoke(app, ["train", quickstart, "--quiet", "--json"]).stderr


def test_the_panel_says_what_a_run_waits_for_and_for_how_long():
    now = [0.0]
    console = Console(file=io.StringIO(), force_terminal=True, width=100, highlight=False, color_system=None)
    view = LiveView("run", console, lambda: now[0])
    view.doing("loading the model")
    now[0] = 65.0
    console.print(view.panel())
    view.step({"step": 1, "reward/mean": 0.5})
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "loading the model · 1:05" in shown
    console.print(view.panel())
    assert console.file.getvalue().removeprefix(shown).count("loading") == 0  # type: ignore[attr-defined]


def test_outside_a_terminal_nothing_is_said_about_loading(capsys: pytest.CaptureFixture[str]):
    with busy("loading"):
        pass
    assert capsys.readouterr() == ("", "")
