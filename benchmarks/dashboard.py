"""Measure the dashboard in Debian's Chromium: first content, 100,000 points, bytes, and a row's way to the screen; then
the pages of a control server, with a real run through its agent.

python benchmarks/dashboard.py [--runs 1000] [--rows 100000] [--axe FILE]

It needs chromium. `--axe`: axe.min.js of the npm package axe-core, to look for faults of WCAG 2.2 AA on every page.
Exit code 1 if a figure is missed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "http"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "control"))

from browser import Page, browsing
from whole_way import Control, until

PAGES = Path(__file__).parents[1] / "src" / "tandem" / "dashboard" / "pages"
SPEC = 'recipe = "rl"\n[model]\npreset = "tiny"\n[environment]\nname = "sort"\n[train]\nsteps = 9\nlr = 1e-4\n'
TIMED = """
(() => { const made = window.uPlot; window.drawn = [];
  window.uPlot = new Proxy(made, { construct(target, given) {
    const began = performance.now(); const plot = Reflect.construct(target, given);
    queueMicrotask(() => queueMicrotask(() => window.drawn.push([plot.data[0].length, performance.now() - began])));
    return plot; } }); })()
"""
TAGS = json.dumps(["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"])


def write_run(place: Path, rows: int) -> None:
    place.mkdir(parents=True)
    (place / "spec.toml").write_text(SPEC)
    status = {"state": "succeeded", "recipe": "rl", "verdict": "", "steps_done": rows, "steps_total": rows}
    (place / "status.json").write_text(json.dumps(status))
    with (place / "metrics.jsonl").open("w") as file:
        for n in range(1, rows + 1):
            file.write(f'{{"step": {n}, "reward/mean": {(n * 7919 % 1000) / 1000}, "loss/total": {1 / n}}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--axe", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        runs, ready = Path(home) / "runs", Path(home) / "ready.json"
        write_run(runs / "long", asked.rows)
        for n in range(asked.runs):
            write_run(runs / f"run-{n:04}", 20)
        command = [sys.executable, "-m", "tandem", "dashboard", str(runs), "--port", "0", "--data-dir", f"{home}/data"]
        served = subprocess.Popen([*command, "--ready-file", str(ready)], stdout=subprocess.DEVNULL)
        try:
            while not ready.exists():
                time.sleep(0.05)
            told = json.loads(ready.read_text())
            address = f"{told['url']}/#token={Path(told['token_file']).read_text().strip()}"
            with browsing(Path(home) / "profile") as browser:
                rows = measured(Page(browser, "about:blank"), address, runs, asked)
        finally:
            served.send_signal(signal.SIGTERM)
            served.wait()
        (Path(home) / "server").mkdir()
        rows += through_control(Control(Path(home) / "server"), asked)
    table(["what", "measured", "at most", "holds"], [[*map(str, row[:3]), "yes" if row[3] else "NO"] for row in rows])
    return int(not all(row[3] for row in rows))


def measured(page: Page, address: str, runs: Path, asked: argparse.Namespace) -> list[list[Any]]:
    page.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
    page.call("Page.navigate", url=address)
    page.wait_for("document.querySelectorAll('tbody tr').length > 100", 60)
    seconds: list[float] = []
    for _ in range(5):
        page.call("Page.reload")
        page.wait_for("window.first", 60)
        seconds.append(page.run("window.first") / 1000)
    first = statistics.median(seconds)
    found = [[f"the first rows of {asked.runs:,} runs, median of 5, s", f"{first:.2f}", 1, first <= 1]]
    page.run(TIMED)
    page.run("void (location.hash = '#/run/long/curves')")
    page.wait_for("window.drawn.length >= 2", 60)
    drawn = max(took for count, took in page.run("window.drawn") if count >= asked.rows)
    found.append([f"one chart of {asked.rows:,} points, ms", f"{drawn:.0f}", 150, drawn <= 150])
    size = sum(len(gzip.compress(path.read_bytes())) for path in [*PAGES.rglob("*.*"), *library()] if is_sent(path))
    found.append(["all files of the pages, gzip, kB", f"{size / 1000:.1f}", 100, size <= 100_000])
    took = sorted(row_to_screen(page, runs / "run-0001"))
    late = took[int(0.95 * len(took))]
    found.append(["a row to the screen, p95 of 40, s", f"{late:.2f}", 2, late <= 2])
    outside = page.run(OUTSIDE)
    found.append(["requests to other servers", outside, 0, outside == 0])
    if asked.axe:
        paths = ("/", *(f"/run/long/{part}" for part in PARTS), "/compare?run=run-0001&run=run-0002")
        faults = [each for path in paths for each in axe(page, path, asked)]
        found.append([f"faults of WCAG 2.2 AA {faults[:3]}", len(faults), 0, not faults])
    found.append([f"errors on the console {page.said[:2]}", len(page.said), 0, not page.said])
    return found


WATCH = """
new MutationObserver((_, it) => {
  if (document.querySelector('tbody tr')) { window.first = performance.now(); it.disconnect(); }
}).observe(document, { childList: true, subtree: true });
"""
OUTSIDE = "performance.getEntriesByType('resource').filter((e) => !e.name.startsWith(location.origin)).length"
PARTS = ("", "curves", "answers", "weights", "log", "attempts", "spec")


def library() -> list[Path]:
    shared = PAGES.parents[1] / "obs"
    return [shared / "look.css", shared / "vendor/uplot.min.js", shared / "vendor/uplot.min.css"]


def is_sent(path: Path) -> bool:
    return path.suffix in (".js", ".css", ".html", ".svg")


def row_to_screen(page: Page, run: Path) -> list[float]:
    page.run(f"void (location.hash = '#/run/{run.name}')")
    page.wait_for("document.body.innerText.includes('Step 20')")
    took: list[float] = []
    for step in range(1000, 1040):
        time.sleep(0.137)  # at another moment between two looks each time
        began = time.monotonic()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}, "reward/mean": 0.5, "loss/total": 0.1}}\n')
            file.flush()
            os.fsync(file.fileno())
        page.wait_for(f"document.body.innerText.includes('Step {step}')")
        took.append(time.monotonic() - began)
    return took


def through_control(control: Control, asked: argparse.Namespace) -> list[list[Any]]:
    """The same pages over a mirror: a row goes from the trainer's file through agent and server to the screen."""
    try:
        run = control.submit(100_000)
        until(lambda: control.steps(run) >= 20)
        with browsing(control.home / "profile") as browser:
            page = Page(browser, f"http://127.0.0.1:{control.port}/#token={control.token}")
            page.wait_for("document.querySelectorAll('tbody tr').length > 0", 60)
            page.run(f"void (location.hash = '#/run/{run}')")
            page.wait_for("/Step \\d+/.test(document.body.innerText)", 60)
            took = list[float]()
            for _ in range(40):
                time.sleep(0.137)
                step, began = control.steps(run), time.monotonic()
                page.wait_for(f"Number(/Step (\\d+)/.exec(document.body.innerText)?.[1] ?? 0) >= {step}", 60)
                took.append(time.monotonic() - began)
            late = sorted(took)[int(0.95 * len(took))]
            found = [
                ["a row through agent and control server to the screen, p95 of 40, s", f"{late:.2f}", 2, late <= 2]
            ]
            if asked.axe:
                pages = ["deployments", "playground", "environments", "targets", "usage", "keys", "audit"]
                paths = (f"/run/{run}", *(f"/{each}" for each in pages))
                faults = [each for path in paths for each in axe(page, path, asked)]
                found.append([f"faults of WCAG 2.2 AA on a control server {faults[:3]}", len(faults), 0, not faults])
            found.append([f"errors on the console of its pages {page.said[:2]}", len(page.said), 0, not page.said])
        control.ask("POST", f"/api/runs/{run}/cancel", {"save": False})
        until(lambda: control.state(run) == "cancelled")
        return found
    finally:
        control.close()


def axe(page: Page, path: str, asked: argparse.Namespace) -> list[str]:
    page.run(f"void (location.hash = '#{path}')")
    time.sleep(1.5)
    page.run(asked.axe.read_text() + "; void 0")
    told = page.run(f"axe.run(document, {{runOnly: {TAGS}}}).then((r) => r.violations.map((v) => v.id))")
    return [f"{path} {each}" for each in told]


if __name__ == "__main__":
    sys.exit(main())
