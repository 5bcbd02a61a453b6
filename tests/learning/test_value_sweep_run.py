"""Sweeps over values, of real runs: one that breaks does not end the others, and the same command resumes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

import tandem
from tandem.cli.main import app
from tandem.errors import SpecError
from tandem.recipes import sweep as sweeps
from tandem.runs.run import Run
from tandem.runs.sweep import Sweep

pytestmark = pytest.mark.usefixtures("one_thread", "no_report")

SPEC: dict[str, Any] = {
    "recipe": "sft", "name": "letters", "model": {"preset": "tiny"}, "data": {"path": "rows.jsonl", "eval_share": 0.25},
    "train": {"steps": 8, "lr": 1e-3, "batch_size": 8},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"prompt": letter * 3, "completion": letter}) for letter in "abcdefghijklmnopqrstuvwx" * 2]
    Path("rows.jsonl").write_text("\n".join(rows) + "\n")


def swept(spec: dict[str, Any], **options: Any) -> tuple[Sweep, str]:
    printed = io.StringIO()
    found = tandem.sweep(spec, directory="sweep", console=Console(file=printed, width=200), **options)
    return found, printed.getvalue()


def test_a_grid_has_a_table_and_a_picture_and_each_run_has_its_values():
    found, printed = swept(SPEC, over={"train.lr": [1e-3, 1e-4], "train.batch_size": [4, 8]})
    names = ["lr-0.001_batch_size-4", "lr-0.001_batch_size-8", "lr-0.0001_batch_size-4", "lr-0.0001_batch_size-8"]
    assert [each.directory for each in found.seeds] == names
    for name, values in zip(names, ("1e-3 4", "1e-3 8", "1e-4 4", "1e-4 8"), strict=True):
        train = tandem.load_spec(Path("sweep") / name / "spec.toml").train
        assert (train.lr, train.batch_size) == (float(values.split()[0]), int(values.split()[1]))
    after = [each.after for each in found.seeds]
    best = names[after.index(min(after))]
    assert member_of(found.values) == best, "the lowest loss"
    table = (Path("sweep") / "sweep.md").read_text()
    assert len(re.findall(r"^\| 0\.\d+ \| [48] \| 1 \|", table, re.M)) == 4
    assert table.count(", best |") == 1
    assert "Best of 4: train.lr = 0.001" in table
    assert table.splitlines()[2] in printed
    svg = ElementTree.parse("sweep/sweep.svg").getroot()
    assert svg.tag.endswith("svg")
    assert "train.lr = 0.0001, train.batch_size = 8" in (Path("sweep") / "sweep.svg").read_text()
    written = json.loads((Path("sweep") / "sweep.json").read_text())
    assert [each["values"]["train.batch_size"] for each in written["settings"]] == [4, 8, 4, 8]


def member_of(values: Any) -> str:
    return f"lr-{values['train.lr']}_batch_size-{values['train.batch_size']}"


def test_one_that_breaks_does_not_end_the_sweep_and_is_run_again(monkeypatch: pytest.MonkeyPatch):
    started: list[float] = []

    def run(spec: Any, place: Path, **options: Any) -> Run:
        started.append(spec.train.lr)
        if spec.train.lr == 1e-4 and len(started) < 4:
            raise MemoryError("the GPU is full")
        return tandem.run(spec, place, **options)

    monkeypatch.setattr(sweeps, "run", run)
    over = {"train.lr": [1e-3, 1e-4, 1e-5]}
    found, printed = swept(SPEC, over=over)
    assert (found.failed, [each.failed for each in found.settings]) == (1, [0, 1, 0])
    assert "| 0.0001 | 0 |  |  |  |  | failed: MemoryError: the GPU is full |" in printed
    assert "1 of 3 runs failed." in printed
    found, printed = swept(SPEC, over=over)
    assert (started, found.failed) == ([1e-3, 1e-4, 1e-5, 1e-4], 0)
    assert printed.count("done already") == 2


def test_values_that_only_one_run_cannot_have_are_its_failure():
    found, _ = swept(SPEC, over={"data.path": ["rows.jsonl", "absent.jsonl"]})
    assert [each.failed for each in found.settings] == [0, 1]
    assert "absent.jsonl" in found.settings[1].seeds[0].error


def test_seeds_of_each_value_are_combined():
    found, _ = swept(SPEC, seeds=[0, 1], over={"train.lr": [1e-3, 1e-5]})
    assert [each.directory for each in found.seeds[:2]] == ["lr-0.001_seed-0", "lr-0.001_seed-1"]
    assert all(each.after is not None and each.after.std is not None for each in found.settings)
    assert found.values == {"train.lr": 1e-3}


def test_a_spec_has_its_sweep_and_the_command_runs_it(tmp_path: Path):
    text = 'recipe = "sft"\nmodel = { preset = "tiny" }\ndata = { path = "rows.jsonl", eval_share = 0.25 }\n'
    text += "train = { steps = 4, lr = 1e-3, batch_size = 8 }\n[sweep]\nrandom = 2\n"
    Path("mine.toml").write_text(text + 'over.train.lr = "1e-5..1e-2"\nover.train.batch_size = [4, 8]\n')
    with pytest.raises(SpecError, match="start them with `tandem sweep SPEC`"):
        tandem.run("mine.toml", "alone")
    told = CliRunner().invoke(app, ["sweep", "mine.toml", "--dir", "of-spec"])
    assert told.exit_code == 0, told.output
    assert "Best of 2: train.lr = " in told.output
    told = CliRunner().invoke(app, ["sweep", "mine.toml", "--over", "train.lr=1e-3", "--dir", "mine", "--random", "1"])
    assert [path.name for path in Path("mine").iterdir() if path.is_dir()] == ["lr-0.001"]
    assert tandem.load_spec("mine/lr-0.001/spec.toml").sweep is None
