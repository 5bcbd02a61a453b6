"""Sweeps of real runs: each seed is the run that it would be alone, failures are counted, and a sweep can go on."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import tandem
from conftest import Train
from tandem.cli.main import app
from tandem.errors import RunError, SpecError
from tandem.recipes import sweep as sweeps
from tandem.runs.run import Run
from tandem.runs.sweep import Sweep
from tandem.spec.load import parse_spec

ENVIRONMENT = """
from pathlib import Path

from tandem import Outcome, Task


class Sums:
    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": str(n)},)) for n in range(8)]

    async def run(self, task, chat):
        if (Path(__file__).parent / "broken").exists():
            raise OSError("the file server is away")
        return Outcome(float(sum(map(ord, (await chat.reply()).text)) % 7))
"""


def spec_of(directory: Path) -> dict[str, Any]:
    (directory / "sums.py").write_text(ENVIRONMENT)
    return {
        "recipe": "rl",
        "name": "sums",
        "model": {"preset": "tiny"},
        "environment": {"name": f"{directory / 'sums.py'}:Sums"},
        "train": {"steps": 1, "lr": 1e-3, "groups_per_step": 2, "group_size": 4, "max_tokens": 8},
        "eval": {"tasks": 8},
    }


def swept(raw: dict[str, Any], seeds: list[int], directory: Path) -> tuple[Sweep, str]:
    printed = io.StringIO()
    found = tandem.sweep(parse_spec(raw), seeds, directory, console=Console(file=printed, width=120))
    return found, printed.getvalue()


def fails_for(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(spec: Any, place: Path, **options: Any) -> Run:
        if spec.seed == seed:
            raise MemoryError("the GPU is full")
        return tandem.run(spec, place, **options)

    monkeypatch.setattr(sweeps, "run", run)


@pytest.mark.usefixtures("one_thread", "no_report")
def test_each_seed_is_the_run_that_it_would_be_alone(train: Train, tmp_path: Path):
    raw = spec_of(tmp_path)
    found, printed = swept(raw, [0, 1], tmp_path / "sweep")
    alone = train(raw | {"seed": 1}, name="alone")
    second = tmp_path / "sweep" / "seed-1"
    weights = "export/model.safetensors"
    assert (second / weights).read_bytes() == (alone.directory / weights).read_bytes()
    status = json.loads((second / "status.json").read_text())
    assert (found.seeds[1].before, found.seeds[1].after) == (status["eval"]["before_rl"], status["eval"]["after"])
    assert [each.seed for each in found.seeds] == [0, 1]
    assert found.failed == 0
    written = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [each["difference"] for each in written["seeds"]] == [each.difference for each in found.seeds]
    assert (written["verdict"], written["failed"]) == (found.verdict, 0)
    table = (tmp_path / "sweep" / "sweep.md").read_text()
    assert table.strip() in printed
    assert written["conclusion"] in table


@pytest.mark.usefixtures("one_thread", "no_report")
def test_a_failed_seed_does_not_stop_the_others_and_is_run_again_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    raw, place = spec_of(tmp_path), tmp_path / "sweep"
    with monkeypatch.context() as broken:
        fails_for(1, broken)
        first, printed = swept(raw, [0, 1, 2], place)
    assert [each.state for each in first.seeds] == ["succeeded", "failed", "succeeded"]
    assert first.failed == 1
    assert "failed: MemoryError: the GPU is full" in printed
    kept = (place / "seed-0" / "events.jsonl").read_bytes()
    again, printed = swept(raw, [0, 1, 2], place)
    assert [each.state for each in again.seeds] == ["succeeded"] * 3
    assert (place / "seed-0" / "events.jsonl").read_bytes() == kept
    assert printed.count("done already") == 2


@pytest.mark.usefixtures("one_thread", "no_report")
def test_what_was_cut_off_goes_on(tmp_path: Path):
    raw, place = spec_of(tmp_path), tmp_path / "sweep"
    swept(raw, [0], place)
    status = json.loads((place / "seed-0" / "status.json").read_text())
    (place / "seed-0" / "status.json").write_text(json.dumps({**status, "state": "running"}))
    found, _ = swept(raw, [0], place)
    assert found.seeds[0].state == "succeeded"
    assert [each.name for each in place.glob("seed-*")] == ["seed-0"]
    events = [json.loads(line) for line in (place / "seed-0" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["stage"] == "resume"] == [1]


@pytest.mark.usefixtures("one_thread", "no_report")
def test_what_is_no_run_of_this_spec_is_set_aside(tmp_path: Path):
    place = tmp_path / "sweep"
    (place / "seed-0").mkdir(parents=True)
    (place / "seed-0" / "status.json").write_text('{"state": "running"}')
    found, _ = swept(spec_of(tmp_path), [0], place)
    assert (found.seeds[0].state, found.verdict) == ("succeeded", "undecided")
    assert json.loads((place / "seed-0-failed-1" / "status.json").read_text()) == {"state": "running"}


@pytest.mark.usefixtures("one_thread", "no_report")
def test_a_seed_of_another_spec_is_not_counted_as_done(tmp_path: Path):
    raw, place = spec_of(tmp_path), tmp_path / "sweep"
    swept(raw, [0], place)
    other = raw | {"train": raw["train"] | {"lr": 1e-4}}
    with pytest.raises(RunError, match="succeeded with another spec than this one"):
        swept(other, [1, 0], place)
    assert not (place / "seed-1").exists(), "refused before anything was run"


def test_a_wrong_spec_is_wrong_for_every_seed(tmp_path: Path):
    raw = spec_of(tmp_path)
    with pytest.raises(SpecError, match=r"model.warm_start = .*: has no config\.json"):
        swept(raw | {"model": {"preset": "tiny", "warm_start": str(tmp_path)}}, [0, 1], tmp_path / "sweep")
    assert not (tmp_path / "sweep" / "seed-1").exists()


@pytest.mark.parametrize("seeds", [[], [1, 1], [-1]])
def test_seeds_are_named_once_and_are_seeds(tmp_path: Path, seeds: list[int]):
    with pytest.raises(SpecError, match="seed"):
        swept(spec_of(tmp_path), seeds, tmp_path / "sweep")


@pytest.mark.usefixtures("one_thread", "no_report")
def test_the_command_says_by_its_exit_code_whether_a_seed_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import tomli_w

    (tmp_path / "spec.toml").write_text(tomli_w.dumps(spec_of(tmp_path)))
    monkeypatch.chdir(tmp_path)
    words = ["sweep", "spec.toml", "--seeds", "0,3", "--dir", "sweep"]
    (tmp_path / "broken").touch()
    failed = CliRunner().invoke(app, words)
    assert failed.exit_code == 1
    assert "Undecided: 0 judged seeds; an interval needs two. 2 of 2 seeds failed." in failed.output
    (tmp_path / "broken").unlink()
    command = [Path(sys.executable).with_name("tandem"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == [
        "seed-0", "seed-0-failed-1", "seed-3", "seed-3-failed-1", "sweep.json", "sweep.md", "sweep.svg",
    ]  # fmt: skip
