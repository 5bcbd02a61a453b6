"""The charts of the report: their data, the scripts that may run in the page, and the report of a run that goes on."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from pathlib import Path

import pytest
from test_report import ATTACK, IMPROVED, make_run

from tandem.io.jsonl import append_jsonl
from tandem.obs import report, report_writer
from tandem.obs.chart_data import chart_data, scripts
from tandem.obs.report import write_report
from tandem.obs.report_writer import ReportWriter
from tandem.obs.run_history import read_history

VENDOR = Path(report.__file__).parent / "vendor"


def scripts_of(page: str) -> list[tuple[str, str]]:
    return re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)


def test_the_vendored_library_is_the_published_one():
    told = (VENDOR / "README.md").read_text()
    for name in ("uplot.min.js", "uplot.min.css"):
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() in told


def test_only_the_two_scripts_whose_hashes_the_policy_names_may_run(tmp_path: Path):
    page = write_report(make_run(tmp_path / "run", attack=ATTACK)).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    allowed = re.findall(r"sha256-([A-Za-z0-9+/=]+)", policy[1].replace("&#39;", "'"))
    (kind, data), *code = scripts_of(page)
    assert "application/json" in kind
    assert [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for _, text in code] == allowed
    assert "unsafe-inline" not in policy[1].partition("script-src")[2]
    assert "MIT License" in code[0][1]
    assert json.loads(data)["charts"]


def test_a_chart_has_the_values_of_the_run_and_its_evaluations(tmp_path: Path):
    found = chart_data([read_history(make_run(tmp_path / "run"))])
    assert found is not None
    reward, loss = found["charts"][:2]
    assert reward["title"] == "Reward by optimizer step"
    assert reward["series"][0][:2] == ("reward/mean", [float(step) for step in range(11, 31)])
    label, steps, values, is_points = reward["series"][1]
    assert (label, steps, is_points) == ("held-out accuracy", [0.0, 10.0, 20.0, 30.0], True)
    assert (values[:2], values[-1]) == ([0.0, 0.11], 0.97)
    assert [label for label, *_ in loss["series"]] == ["rl", "warmup"]
    assert "groups/dropped" in found["metrics"]


def test_a_long_run_is_drawn_by_means_and_other_runs_beside_it(tmp_path: Path):
    for name in ("a", "b"):
        run = make_run(tmp_path / name)
        (run / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": step, "stage": "rl", "reward/mean": step}) + "\n" for step in range(1, 5001))
        )
    found = chart_data([read_history(tmp_path / "a"), read_history(tmp_path / "b")])
    assert found is not None
    first, second = found["metrics"]["reward/mean"]
    assert (first[0], second[0], len(first[1])) == ("a", "b", 1000)
    assert (first[1][0], first[2][0]) == (5.0, 3.0)
    path = write_report(tmp_path / "a", [tmp_path / "b"])
    assert path.name == "report-beside.html"
    assert not (tmp_path / "a" / "report.html").exists()


def test_only_the_report_of_a_run_that_goes_on_loads_itself_again(tmp_path: Path):
    going = {**IMPROVED, "state": "running"}
    assert "location.reload()" in (page := write_report(make_run(tmp_path / "a", going)).read_text())
    assert 'id="reload"' in page  # its reader can switch it off
    assert "location.reload()" not in write_report(make_run(tmp_path / "b")).read_text()
    assert scripts().reload in page
    assert sha256_of(scripts().reload) in page  # or the page's policy would not let it run


def sha256_of(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def test_a_report_is_written_in_the_background_at_most_every_minute_and_for_one_hundredth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now, written, go = [0.0], list[float](), threading.Event()

    def slow(run_dir: Path) -> None:
        go.wait(30)
        written.append(now[0])
        now[0] += 3.0  # it takes three seconds

    monkeypatch.setattr(report_writer, "write_report", slow)
    writer = ReportWriter(tmp_path, clock=lambda: now[0])
    for second in (1.0, 59.0, 61.0, 61.0):
        now[0] = second
        started = time.perf_counter()
        writer.step()
        assert time.perf_counter() - started < 1.0  # it does not wait for the report
    go.set()
    writer.close()
    assert written == [61.0]
    for second in (130.0, 363.0, 365.0):  # 300 s after the last: it took 3 s
        now[0] = second
        writer.step()
        writer.close()
    assert written == [61.0, 365.0]


def test_a_report_that_fails_is_logged_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    now = [0.0]
    writer = ReportWriter(tmp_path / "nowhere", clock=lambda: now[0])
    now[0] = 100.0
    writer.step()
    writer.close()
    assert "the report could not be written" in caplog.text


def test_a_report_of_a_run_that_is_being_written_has_its_last_row(tmp_path: Path):
    run = make_run(tmp_path / "run", {**IMPROVED, "state": "running"})
    append_jsonl(run / "metrics.jsonl", {"step": 31, "stage": "rl", "reward/mean": 0.777})
    (_, data), *_ = scripts_of(write_report(run).read_text())
    assert json.loads(data)["metrics"]["reward/mean"][0][2][-1] == 0.777
