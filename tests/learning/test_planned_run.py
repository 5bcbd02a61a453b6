"""A run keeps its plan, is held against the memory that is free, and shows both sides afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tandem
from tandem.errors import SpecError
from tandem.obs.plan_vs_measured import against_plan
from tandem.obs.run_history import read_history
from tandem.recipes import plan_run
from tandem.runs.run_ending import digest_run
from tandem.spec.load import parse_spec
from tandem.spec.run import RunSpec


def spec(path: Path, **other: object) -> RunSpec:
    rows = [{"prompt": f"say {word}", "completion": word} for word in ("aa", "bb", "cc", "dd")]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return parse_spec(
        {
            "recipe": "sft", "device": "cpu", "model": {"preset": "tiny"}, "data": {"kind": "file", "path": str(path)},
            "train": {"steps": 2, "lr": 1e-3, "batch_size": 2, "micro_tokens": 256}, "eval": {"examples": 2}, **other,
        }
    )  # fmt: skip


def events(directory: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def test_a_run_keeps_its_plan_and_shows_it_beside_what_was_measured(tmp_path):
    tandem.run(spec(tmp_path / "rows.jsonl"), tmp_path / "run")
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert plan["fits"]
    assert plan["gpu"] == "cpu"
    assert plan["free_gib"] > plan["peak_gib"] > plan["least_gib"]
    rows = {row.what: row for row in against_plan(read_history(tmp_path / "run"))}
    assert {"tokens of a step", "training, s", "a step, s"} <= rows.keys()
    memory = next(row for what, row in rows.items() if what.startswith("most memory of the process"))
    assert float(memory.planned) == pytest.approx(plan["trainer_gib"], rel=0.01)
    assert rows["tokens of a step"].planned == rows["tokens of a step"].measured  # of the rows themselves
    assert "Plan against measured" in (tmp_path / "run/report.html").read_text()


def test_what_cannot_fit_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_run, "live_memory", lambda spec: ("cpu", 16.0, 0.1))
    with pytest.raises(SpecError, match=r"needs at least 0\.\d\d GiB, but only 0\.10 GiB of this machine are free"):
        tandem.run(spec(tmp_path / "rows.jsonl"), tmp_path / "run")
    assert "load" not in [event["stage"] for event in events(tmp_path / "run")]


def test_what_may_not_fit_is_said_and_under_strict_refused(tmp_path, monkeypatch):
    plan = plan_run.plan_run(spec(tmp_path / "rows.jsonl"), gpu="cpu")
    free_gib = (plan.least_gib + plan.peak_gib) / 2
    monkeypatch.setattr(plan_run, "live_memory", lambda spec: ("cpu", 16.0, free_gib))
    tandem.run(spec(tmp_path / "rows.jsonl"), tmp_path / "run")
    told = [event for event in events(tmp_path / "run") if event.get("option") == "the plan"]
    assert "the largest micro-batch needs" in str(told[0]["why_not"])
    with pytest.raises(SpecError, match="the largest micro-batch"):
        tandem.run(spec(tmp_path / "rows.jsonl", strict=True), tmp_path / "strict")


def test_a_model_that_the_planner_does_not_know_trains_without_a_plan(tmp_path, monkeypatch):
    def unknown(*args: object, **kwargs: object) -> None:
        raise plan_run.NoPlan("its layers are not known")

    monkeypatch.setattr(plan_run, "plan_run", unknown)
    tandem.run(spec(tmp_path / "rows.jsonl"), tmp_path / "run")
    assert not (tmp_path / "run/plan.json").exists()
    assert [event["why_not"] for event in events(tmp_path / "run") if event["stage"] == "plan"]


def test_a_rehearsal_says_how_it_differs_from_the_plan_and_leaves_the_run_as_it_was(tmp_path):
    plain = tandem.run(spec(tmp_path / "rows.jsonl"), tmp_path / "plain")
    rehearsed = tandem.run(spec(tmp_path / "rows.jsonl"), tmp_path / "rehearsed", rehearse=True)
    told = next(event for event in events(tmp_path / "rehearsed") if event["stage"] == "rehearsed")
    work = json.loads((tmp_path / "rehearsed/plan.json").read_text())["work"]
    assert float(str(told["tokens"])) == work["micro"]["tokens"] == 2 * work["row_tokens"]  # all of a step's two rows
    assert 0.5 < float(str(told["peak_gib"])) / float(str(told["planned_gib"])) < 1.5
    assert digest_run(plain.directory) == digest_run(rehearsed.directory)


def test_a_rehearsal_that_does_not_go_through_ends_the_run_before_it_begins(tmp_path):
    python = tmp_path / "no-python"
    python.write_text("#!/bin/sh\necho there is no vLLM here >&2\nexit 1\n")
    python.chmod(0o755)
    vllm = {"kind": "vllm", "python": str(python), "max_restarts": 0}
    train = {"steps": 1, "lr": 1e-3, "groups_per_step": 2, "group_size": 2, "max_tokens": 8}
    asked = parse_spec(
        {
            "recipe": "rl", "device": "cpu", "model": {"preset": "tiny"}, "environment": {"name": "sort"},
            "engine": vllm, "sync": {"bridge": "disk"}, "train": train, "eval": {"tasks": 2},
        }
    )  # fmt: skip
    with pytest.raises(SpecError, match=r"--rehearse: the rehearsal failed: .*no-python"):
        tandem.run(asked, tmp_path / "run", rehearse=True)
    assert "load" not in [event["stage"] for event in events(tmp_path / "run")]
