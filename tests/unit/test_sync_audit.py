"""`tandem sync audit`: a sound ledger passes, and each fault that is planted in one is named, by its own rule."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.errors import NothingLearned
from tandem.io.atomic_write import write_json
from tandem.io.jsonl import JsonlWriter, read_jsonl
from tandem.obs.live_view import LiveView
from tandem.obs.sync_audit import RULES, audit_sync, proof_of
from tandem.obs.sync_report import audit_json, audit_text
from tandem.runs.lease import DirectoryLease, begin
from tandem.runs.run import Run
from tandem.spec.load import parse_spec

TANDEM = Path(sys.executable).with_name("tandem")
FIRST, LAST = 8, 14
"""Versions: a warm-up makes the first, RL the others."""

Rows = list[dict[str, Any]]
Fault = Callable[["Files"], object]


class Files:
    """A run directory before it is written, so that a fault can be planted anywhere."""

    def __init__(self, lag: int = 1) -> None:
        self.status: dict[str, Any] = {"state": "succeeded", "recipe": "rl", "steps_done": LAST, "steps_total": LAST}
        self.spec = 'recipe = "rl"\n'
        self.events: Rows = [{"stage": "boot"}, {"stage": "warmup"}, {"stage": "rl"}, {"stage": "done"}]
        self.metrics: Rows = [
            {"step": step, "stage": "warmup", "update/served_fraction": 1.0} for step in range(1, FIRST + 1)
        ]
        for step in range(FIRST + 1, LAST + 1):
            behind = float(min(lag, step - 1 - FIRST))
            self.metrics.append({"step": step, "stage": "rl", "lag/max": behind, "update/served_fraction": 0.9})
        self.ledger: Rows = [proof(0)]  # the evaluation before training
        self.ledger += [proof(version) for version in (FIRST, *range(FIRST, LAST + 1))]
        for epoch, row in enumerate(self.ledger):
            row["cache_epoch"] = epoch + 1

    def row(self, version: int) -> dict[str, Any]:
        """The last one of that version."""
        return [row for row in self.ledger if row["version"] == version][-1]

    def without(self, *versions: int) -> None:
        self.ledger = [row for row in self.ledger if row["version"] not in versions]

    def write(self, directory: Path) -> Path:
        directory.mkdir(exist_ok=True)
        write_json(directory / "status.json", self.status)
        (directory / "spec.toml").write_text(self.spec)
        for name in ("metrics", "events", "ledger"):
            path = directory / f"{'sync' if name == 'ledger' else name}.jsonl"
            path.unlink(missing_ok=True)
            with JsonlWriter(path) as writer:
                for row in getattr(self, name):
                    writer.write(row)
        return directory


def proof(version: int, **other: Any) -> dict[str, Any]:
    return {
        "version": version,
        "mode": "broadcast",
        "verified": "digest",
        "tensors": 48,
        "bytes_moved": 4_000_000,
        "seconds": {"gather": 0.001, "move": 0.003, "canary": 0.01, "total": 0.016},
        "digest": f"{version:016x}",
        "engines": ["boot-1"],
        "cache_epoch": 1,
        "logprob_gap": 2e-7,
        "gap_limit": 1e-4,
        "canary_tokens": 4,
        "attempts": 1,
        **other,
    }


def findings(directory: Path) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(found.severity, found.rule, found.versions) for found in audit_sync(directory).findings]


def test_a_sound_run_is_proven_and_has_no_findings(tmp_path: Path):
    audit = audit_sync(Files().write(tmp_path / "run"))
    assert audit.proven
    assert audit.findings == []
    assert audit_text(audit).splitlines()[0] == (
        f"Every version has its proof: {LAST - FIRST + 2} versions (0, {FIRST} to {LAST}), by broadcast."
    )


# --- failures: each by the one rule that is meant for it, and with the version that it is about


def _change(version: int, **values: Any) -> Fault:
    return lambda run: run.row(version).update(values)


def _older_tokens(run: Files) -> None:
    run.without(FIRST + 2)
    run.spec = "[sync]\nevery = 2\n"  # so that nobody is trained from without a proof
    next(row for row in run.metrics if row["step"] == FIRST + 5)["lag/max"] = 2.0


def _swap(run: Files) -> None:
    """Where it stands matters, not what it says: the epochs are put right."""
    run.without(0)
    run.ledger[-3], run.ledger[-2] = run.ledger[-2], run.ledger[-3]
    for epoch, row in enumerate(run.ledger):
        row["cache_epoch"] = epoch


def _lose_rows(run: Files) -> None:
    run.metrics = [row for row in run.metrics if row["step"] not in (FIRST + 2, FIRST + 3)]


FAILURES: dict[str, tuple[Fault, str, tuple[int, ...]]] = {
    "trained from, without proof": (lambda run: run.without(LAST - 1), "unproven", (LAST - 1,)),
    "trained on and from, without proof": (lambda run: run.without(FIRST + 3), "unproven", (FIRST + 3,)),
    "trained on, without proof": (_older_tokens, "unproven", (FIRST + 2,)),
    "the last version, without proof": (lambda run: run.without(LAST), "unproven", (LAST,)),
    "nothing verified": (_change(LAST, verified="none"), "not_verified", (LAST,)),
    "verified in a way that nobody knows": (_change(LAST, verified="surely"), "not_verified", (LAST,)),
    "a proof of no tensors": (_change(LAST, digest=""), "not_verified", (LAST,)),
    "gap over its limit": (_change(9, logprob_gap=2e-4), "gap", (9,)),
    "a gap that is not a number": (_change(9, logprob_gap=float("nan")), "gap", (9,)),
    "no limit": (_change(9, gap_limit=None), "gap", (9,)),
    "canary missing": (_change(9, canary_tokens=0), "canary_missing", (9,)),
    "the epoch stands still": (_change(10, cache_epoch=4), "cache_epoch", (10,)),
    "the epoch goes back": (_change(LAST, cache_epoch=1), "cache_epoch", (LAST,)),
    "out of order": (_swap, "out_of_order", (LAST - 2,)),
    "twice, with different digests": (_change(FIRST, digest="0badbadbadbadbad"), "twice_and_different", (FIRST,)),
    "old weights sent again": (_change(10, digest=f"{9:016x}"), "stale", (10,)),
    "a tensor fewer": (_change(LAST, tensors=47), "tensors", (LAST,)),
    "rows of steps lost": (_lose_rows, "steps_missing", ()),
    "the last rows of steps lost": (lambda run: run.metrics.pop(), "steps_missing", ()),
    "a row that is none": (_change(0, bytes_moved="many"), "damaged", ()),
    "engines that are no list": (_change(0, engines=5), "damaged", ()),
    "a transport that is no object": (_change(0, transport=5), "damaged", ()),
    "a digest that is no text": (_change(0, digest=[1]), "damaged", ()),
    "a version that no number holds": (lambda run: run.row(0).update({"version": 10**400}), "damaged", ()),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_planted_fault_is_found_by_its_rule(tmp_path: Path, name: str):
    plant, rule, versions = FAILURES[name]
    run = Files()
    plant(run)
    directory = run.write(tmp_path / "run")
    assert findings(directory) == [("failure", rule, versions)]
    audit = audit_sync(directory)
    assert not audit.proven
    assert audit_text(audit).startswith("NOT PROVEN: ")


def test_a_damaged_line_in_the_middle_is_a_failure_and_the_rest_is_still_read(tmp_path: Path):
    directory = Files().write(tmp_path / "run")
    lines = (directory / "sync.jsonl").read_text().splitlines(keepends=True)
    lines[0] = lines[0].replace(":", ";", 1)
    (directory / "sync.jsonl").write_text("".join(lines))
    assert findings(directory) == [("failure", "damaged", ())]
    assert "sync.jsonl:1 cannot be read" in audit_text(audit_sync(directory))
    assert len(audit_sync(directory).proofs) == len(lines) - 1


def test_a_ledger_that_is_gone_leaves_every_version_unproven(tmp_path: Path):
    directory = Files().write(tmp_path / "run")
    (directory / "sync.jsonl").unlink()
    assert {rule for _, rule, _ in findings(directory)} == {"unproven"}
    without = {version for _, _, versions in findings(directory) for version in versions}
    assert without == set(range(FIRST, LAST + 1))


def test_metrics_that_are_gone_cannot_vouch_for_a_run(tmp_path: Path):
    directory = Files().write(tmp_path / "run")
    (directory / "metrics.jsonl").unlink()
    assert findings(directory) == [("failure", "steps_missing", ())]


def test_a_version_far_away_costs_nothing_and_is_out_of_order(tmp_path: Path):
    run = Files()
    run.ledger.insert(1, proof(3_000_000, cache_epoch=1))
    run.ledger[0]["cache_epoch"] = 0
    directory = run.write(tmp_path / "run")
    tracemalloc.start()
    try:
        assert findings(directory) == [("failure", "out_of_order", (FIRST,))]
        assert tracemalloc.get_traced_memory()[1] < 5 * 2**20
    finally:
        tracemalloc.stop()


def test_events_and_metrics_with_odd_values_are_read_past(tmp_path: Path):
    run = Files()
    run.events += [{"stage": "error", "kind": ["SyncError"]}, {"stage": ["boot"]}, {"stage": "resume", "step": "x"}]
    run.metrics.append({"step": 10**400})
    assert findings(run.write(tmp_path / "run")) == []


# --- a step back is free at a boot, and nowhere else


def _versions(run: Files, *versions: int) -> None:
    """Of a ledger that says nothing else than these; what was trained on is not told."""
    run.ledger = [proof(version, cache_epoch=epoch) for epoch, version in enumerate(versions)]
    run.metrics = [{"step": 1, "stage": "sft"}]
    run.status |= {"recipe": "sft", "steps_done": 1}


def _told(run: Files, directory: Path) -> list[tuple[str, str, tuple[int, ...]]]:
    found = findings(run.write(directory))
    return [each for each in found if each[1] in ("out_of_order", "resumed")]


def test_a_step_back_elsewhere_than_at_the_boot_is_a_failure(tmp_path: Path):
    run = Files()
    _versions(run, 0, 1, 2, 2, 3, 1)
    run.events = [{"stage": "boot", "proofs": 0}, {"stage": "boot", "proofs": 3}, {"stage": "resume", "step": 2}]
    assert _told(run, tmp_path / "run") == [("failure", "out_of_order", (1,))]
    run.events[1]["proofs"] = 5
    assert _told(run, tmp_path / "run") == [("note", "resumed", (1,))]
    run.events.append({"stage": "boot", "proofs": 2})  # what the boot before it wrote was cut off
    assert _told(run, tmp_path / "run") == [("failure", "out_of_order", (1,))]


def test_where_boots_do_not_say_after_which_row_they_began_the_step_of_the_resume_decides(tmp_path: Path):
    run = Files()
    _versions(run, 0, 1, 2, 2, 3, 1)
    run.events = [{"stage": "boot"}, {"stage": "boot"}, {"stage": "resume", "step": 2}]
    assert _told(run, tmp_path / "run") == [("failure", "out_of_order", (1,))]
    run.events[2]["step"] = 1
    assert _told(run, tmp_path / "run") == [("note", "resumed", (1,))]


@pytest.mark.parametrize("events", [[{"stage": "boot"}, {"stage": "boot"}], []], ids=["bare", "none"])
def test_where_nothing_says_where_a_boot_was_that_is_said(tmp_path: Path, events: Rows):
    run = Files()
    _versions(run, 0, 1, 2, 2, 3, 1)
    run.events = events
    assert _told(run, tmp_path / "run") == [("failure", "out_of_order", (1,))]
    assert "whether the run was resumed there cannot be told" in audit_text(audit_sync(tmp_path / "run"))


# --- notes: worth knowing, and no failure


def _new_engine(run: Files) -> None:
    for row in run.ledger:
        if row["version"] >= 11:
            row |= {"engines": ["boot-2"], "cache_epoch": row["version"] - 10}


def _other_mode(run: Files) -> None:
    for row in run.ledger:
        if row["version"] >= 12:
            row |= {"mode": "disk", "tensors": 49}


def _resumed(run: Files) -> None:
    run.events[0]["proofs"] = 0
    run.events += [{"stage": "boot", "proofs": len(run.ledger)}, {"stage": "resume", "step": 11}]
    again = [{**row, "cache_epoch": row["cache_epoch"] + 20} for row in run.ledger if row["version"] >= 11]
    run.ledger += again
    run.metrics += [row for row in run.metrics if row["step"] >= 12]


def _ended(run: Files) -> None:
    run.status |= {"state": "failed"}
    run.events[-1] = {"stage": "error", "kind": "LogprobGap", "message": "another model is computed"}


NOTES: dict[str, tuple[Fault, str, tuple[int, ...]]] = {
    "engine changed": (_new_engine, "engine_changed", (11,)),
    "several attempts": (_change(10, attempts=3), "attempts", (10,)),
    "mode changed": (_other_mode, "mode_changed", (12,)),
    "resumed": (_resumed, "resumed", (11,)),
    "ended by a sync that failed": (_ended, "ended", ()),
}


@pytest.mark.parametrize("name", NOTES)
def test_what_is_worth_knowing_is_a_note_and_no_failure(tmp_path: Path, name: str):
    plant, rule, versions = NOTES[name]
    run = Files()
    plant(run)
    directory = run.write(tmp_path / "run")
    assert findings(directory) == [("note", rule, versions)]
    assert audit_sync(directory).proven


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__.strip("_"))
def test_no_rule_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: Any):
    """Without it, some fault of the tables above would pass unseen."""
    monkeypatch.setattr("tandem.obs.sync_audit.RULES", tuple(each for each in RULES if each is not rule))
    unseen: list[str] = []
    for name, (plant, *_) in {**FAILURES, **NOTES}.items():
        run = Files()
        plant(run)
        if findings(run.write(tmp_path / "run")) == []:
            unseen.append(name)
    assert unseen


def test_a_last_line_that_was_cut_short_is_a_note(tmp_path: Path):
    run = Files()
    run.status["state"] = "running"
    directory = run.write(tmp_path / "run")
    with (directory / "sync.jsonl").open("a") as file:
        file.write('{"version": 15, "mo')
    assert findings(directory) == [("note", "torn", ())]
    assert audit_sync(directory).proven


# --- what is no fault


def test_a_version_between_two_publications_needs_no_proof_of_its_own(tmp_path: Path):
    run = Files(lag=0)
    run.without(FIRST + 1, FIRST + 3, FIRST + 5)
    run.spec = "[sync]\nevery = 2\n"
    for row in run.metrics:
        if row.get("stage") == "rl":
            row["lag/max"] = float((row["step"] - 1 - FIRST) % 2)
    assert findings(run.write(tmp_path / "run")) == []
    run.without(FIRST + 2)
    assert {versions for _, _, versions in findings(run.write(tmp_path / "run"))} == {(FIRST + 2,), (FIRST + 3,)}


def test_a_run_that_goes_on_may_have_a_proof_more_than_steps(tmp_path: Path):
    run = Files()
    run.status |= {"state": "running", "steps_done": LAST - 2}
    run.metrics = run.metrics[:-1]
    assert findings(run.write(tmp_path / "run")) == []


def test_an_update_that_moved_nothing_may_have_the_same_digest(tmp_path: Path):
    run = Files()
    run.row(10)["digest"] = run.row(9)["digest"]
    run.metrics[9]["update/served_fraction"] = 0.0
    assert findings(run.write(tmp_path / "run")) == []


def test_one_memory_has_one_digest_whatever_the_version_and_another_after_the_engine_was_taken_back(tmp_path: Path):
    run = Files()
    for row in run.ledger:
        row |= {"verified": "identity", "digest": "aa", "mode": "shared"}
    run.row(FIRST)["digest"] = "bb"
    assert findings(run.write(tmp_path / "run")) == []


def test_training_on_recordings_needs_no_proof(tmp_path: Path):
    run = Files()
    run.status["recipe"], run.ledger, run.metrics = "sft", [], [{"step": 1, "stage": "sft"}]
    directory = run.write(tmp_path / "run")
    assert findings(directory) == []
    assert audit_text(audit_sync(directory)).startswith("Nothing to prove")


def test_each_engine_has_an_epoch_of_its_own(tmp_path: Path):
    """One that comes back must have gone on from where it was."""
    run = Files()
    run.row(10).update(engines=["boot-2"], cache_epoch=1)
    assert [rule for _, rule, _ in findings(run.write(tmp_path / "run"))] == ["engine_changed"]
    run.row(11)["cache_epoch"] = 2
    assert ("failure", "cache_epoch", (11,)) in findings(run.write(tmp_path / "run"))


# --- the surface


def audited(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [TANDEM, "sync", "audit", directory, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_exit_codes_say_proven_not_proven_and_no_run(tmp_path: Path):
    run = Files()
    assert audited(run.write(tmp_path / "run")).returncode == 0
    run.without(FIRST + 3)
    assert audited(run.write(tmp_path / "run")).returncode == 1
    done = audited(tmp_path)
    assert done.returncode == 2
    assert "is not a run directory" in done.stderr


def test_json_has_every_version_and_nothing_else_is_on_stdout(tmp_path: Path):
    run = Files()
    run.row(LAST)["logprob_gap"] = float("inf")
    done = audited(run.write(tmp_path / "run"), "--json")
    told = json.loads(done.stdout)
    assert told == audit_json(audit_sync(tmp_path / "run"))
    assert told["proven"] is False
    assert [row["version"] for row in told["versions"]] == [row["version"] for row in run.ledger]
    assert told["versions"][-1]["logprob_gap"] is None
    assert [found["rule"] for found in told["findings"]] == ["gap"]


def test_the_text_shows_the_versions_that_failed_and_stays_short(tmp_path: Path):
    run = Files()
    for version in range(LAST + 1, 500):
        run.ledger.append(proof(version, cache_epoch=version + 5))
        run.metrics.append({"step": version, "stage": "rl", "lag/max": 0.0})
    run.status["steps_done"] = 499
    for version in range(100, 300):
        run.row(version)["canary_tokens"] = 0
    text = audit_text(audit_sync(run.write(tmp_path / "run")))
    assert text.splitlines()[0] == "NOT PROVEN: no sound proof of 100 to 299 (200 findings)."
    assert len(text.splitlines()) < 30
    assert "not sampled" in text


def test_the_text_of_a_run_cannot_steer_the_terminal(tmp_path: Path):
    run = Files()
    run.row(LAST)["mode"] = "disk\x1b[31m"
    assert "\x1b" not in audit_text(audit_sync(run.write(tmp_path / "run")))


def test_a_real_run_is_proven(real_run: Path):
    audit = audit_sync(real_run)
    assert audit.proven
    assert audit.findings == []
    assert len(audit.proofs) == len(read_jsonl(real_run / "sync.jsonl")) > 2
    assert len(audit.steps) == 2
    assert [row["proofs"] for row in read_jsonl(real_run / "events.jsonl") if row["stage"] == "boot"] == [0]


@pytest.fixture
def real_run(tmp_path: Path, one_thread: None) -> Path:
    spec = parse_spec(
        {
            "recipe": "rl",
            "model": {"preset": "tiny"},
            "environment": {"name": "guess"},
            "train": {"steps": 2, "lr": 1e-3, "groups_per_step": 2, "group_size": 4, "max_tokens": 4},
            "eval": {"tasks": 2},
        }
    )
    with suppress(NothingLearned):
        tandem.run(spec, tmp_path / "run")
    return tmp_path / "run"


def test_a_run_that_goes_on_says_after_which_row_of_the_ledger(tmp_path: Path):
    begin(tmp_path / "run", 'recipe = "rl"\n')
    earlier: dict[str, Any] | None = None
    for versions in ((0, 1, 2, 3), (1, 2)):
        lease, view = DirectoryLease(tmp_path / "run"), LiveView("run")
        with Run(tmp_path / "run", name="run", recipe="rl", view=view, lease=lease, earlier=earlier) as run:
            for version in versions:
                run.synced(proof_of(proof(version)))
                earlier = run.state() if version == 1 else earlier
        lease.close()
    boots = [row for row in read_jsonl(tmp_path / "run" / "events.jsonl") if row["stage"] == "boot"]
    assert [boot["proofs"] for boot in boots] == [0, 2]
    assert [row["version"] for row in read_jsonl(tmp_path / "run" / "sync.jsonl")] == [0, 1, 1, 2]
