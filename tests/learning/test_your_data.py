"""Every file of docs/your_data.md is written, and every command run, on a model made from scratch."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest

import tandem
from tandem.__main__ import main
from tandem.spec.load import load_spec

PAGE = (Path(__file__).parents[2] / "docs" / "your_data.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [
    line.partition("#")[0].split()[1:]
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
    if not line.startswith(("tandem chat", "tandem serve"))
]
HUB = 'path = "HuggingFaceTB/SmolLM2-135M-Instruct"'


def test_the_page_has_a_spec_of_at_most_ten_lines_for_each_thing_that_one_has():
    specs = {name: text for name, text in FILES.items() if name.endswith(".toml")}
    assert specs.keys() == {"tickets.toml", "chats.toml", "pairs.toml", "questions.toml", "ready.toml"}
    for text in specs.values():
        assert HUB in text
        assert len([line for line in text.splitlines() if line]) <= 10
    assert {command[-1] for command in COMMANDS} == specs.keys()


@pytest.mark.usefixtures("one_thread")
def test_the_example_runs_from_the_checkout_on_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(Path(__file__).parents[2] / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    spec = Path("examples/prompts.toml")
    lines = [line for line in spec.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 10
    spec.write_text(spec.read_text().replace(HUB, 'preset = "tiny"'))
    run = tandem.run(load_spec(spec, ["train.steps=2", "eval.tasks=8"]), "runs/example")
    assert run.status["eval"]["metric"] == "accuracy"
    assert '"env/brief"' in (Path("runs/example") / "metrics.jsonl").read_text()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_runs_as_it_stands(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text.replace(HUB, 'preset = "tiny"'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("It is 12, 14, 18, 23 or 35.\n"))
    few = ["--set", "train.steps=2", "--run-dir", "run"] if command[0] == "train" else []
    monkeypatch.setattr("sys.argv", ["tandem", *command, *few])
    try:
        main()
    except SystemExit as end:
        assert not end.code  # noqa: PT017 - the command ends so
    printed = capsys.readouterr().out
    if command[0] == "train":
        assert re.search(r"data: \d rows read as .*, \d used, 0 left out", printed)
        assert (Path("run") / "report.html").exists()
    else:
        assert re.search(r"reward> [\d.]+  correct [01]  brief 0\.\d+", printed)
