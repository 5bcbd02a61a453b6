"""The closing text of `tandem train`: the verdict and its numbers, the files of the run, and the next commands."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.io.gguf.families import architecture_of
from tandem.obs.claims import (
    caveat,
    change,
    ends,
    evidence,
    figure,
    headline,
    interval,
    interval_name,
    interval_text,
    printable,
)
from tandem.obs.plan_vs_measured import against_plan
from tandem.obs.run_history import History, evaluations, number, read_history
from tandem.obs.text_charts import terminal_curve

_STYLES = {
    "improved": "bold green", "unchanged": "bold yellow", "undecided": "bold yellow", "worse": "bold red",
}  # fmt: skip
_FILES = (
    ("report.html", "everything about this run, in one file"),
    ("curves.png", "the curves"),
    ("export/", "the model in Hugging Face format"),
    ("metrics.jsonl", "every step's numbers"),
    ("log.txt", "what was logged"),
)


def closing_text(
    run_dir: Path, status: Mapping[str, Any], *, needs_vllm: bool = False, with_error: bool = True
) -> RenderableType:
    """Return the closing text. `status`: the content of status.json. `needs_vllm`: the embedded engine refuses what was
    trained. `with_error`: say why the run failed, too."""
    history = read_history(run_dir)
    style = _STYLES.get(str(status.get("verdict")), "bold red" if status.get("state") == "failed" else "bold")
    parts: list[RenderableType] = [Text(""), Text(printable(headline(status)), style=style)]
    if difference := evidence(status):
        parts.append(Text(difference))
    if with_error and (error := status.get("error")):
        parts.append(Text(printable(str(error))))
    if said := caveat(status):
        parts.append(Text(said, style="dim"))
    for block in (
        _evaluations(history, status),
        _curve(history),
        _planned(history),
        _places(run_dir),
        _next(run_dir, status, needs_vllm),
    ):
        if block is not None:
            parts += [Text(""), block]
    return Group(*parts)


def _evaluations(history: History, status: Mapping[str, Any]) -> RenderableType | None:
    found = evaluations(history)
    if not found:
        return None
    baseline, _ = ends(status)
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("held out")
    table.add_column(history.measure, justify="right")
    if baseline is not None:
        table.add_column("against before RL" if "before_rl" in history.eval else "against before", justify="right")
    if interval(status):
        table.add_column(interval_name(status), justify="right")
    for item in found:
        cells = [item.label, figure(status, item.value)]
        if baseline is not None:
            cells.append("" if item.value == baseline else change(status, item.value - baseline))
        if interval(status):
            cells.append(interval_text(status) if item.is_final else "")
        table.add_row(*cells)
    return table


def _curve(history: History) -> RenderableType | None:
    key, title = ("reward/mean", "mean reward by RL step")
    if not any(key in row for row in history.rows):
        key, title = ("loss/total", "training loss by step")
    values = [number(row.get(key)) for row in history.rows if key in row]
    return Text(terminal_curve(values, width=60, height=7, title=title)) if values else None


def _planned(history: History) -> RenderableType | None:
    found = against_plan(history)
    if not found:
        return None
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("plan")
    for name in ("planned", "measured", "off by"):
        table.add_column(name, justify="right")
    for row in found:
        table.add_row(row.what, row.planned, row.measured, row.off_by)
    return table


def _places(run_dir: Path) -> RenderableType | None:
    found = [(str(run_dir / name), what) for name, what in _FILES if (run_dir / name).exists()]
    return _pairs(found, style="") if found else None


def _has_gguf(config: Path) -> bool:
    """Return whether a GGUF file can have this model. A config that cannot be read does not speak against it."""
    try:
        architecture_of(json.loads(config.read_text(encoding="utf-8")))
    except OSError:
        return True
    except ValueError:
        return False
    return True


def _next(run_dir: Path, status: Mapping[str, Any], needs_vllm: bool) -> RenderableType:
    """Return the next commands, which work in the current directory."""
    tandem, run = _command(), shlex.quote(str(run_dir))
    commands: list[tuple[str, str]] = []
    if status.get("algorithm") == "reward_model" and (run_dir / "export").exists():
        commands = [
            (f"{tandem} export {run}", "a copy with a model card; transformers loads it as a model with one label"),
            (f"{tandem} init", "a spec for GRPO; docs/data.md says how this model becomes its reward"),
        ]
    elif (run_dir / "export").exists():
        config = run_dir / "export" / "config.json"
        commands = [
            *([] if needs_vllm else [(f"{tandem} chat {run}", "talk to the model")]),
            (f"{tandem} serve {run}{' --engine vllm' * needs_vllm}", "an OpenAI-compatible API on this machine"),
            (f"{tandem} env new my_env", "a task of your own to train on")
            if status.get("recipe") == "rl"
            else (f"{tandem} export {run} --gguf q8_0", "a file for llama.cpp and Ollama")
            if _has_gguf(config)
            else (f"{tandem} export {run}", "a copy with a model card"),
        ]
    else:
        if how := _goes_on(run_dir, status):
            commands = [(f"{tandem} resume {run}", how)]
        commands += [
            (f"{tandem} report {run}", "write the report again"),
            (f"less {shlex.quote(str(run_dir / 'log.txt'))}", "read what happened"),
        ]
        if status.get("recipe") == "rl":
            commands.append((f"{tandem} env try {run}/spec.toml", "play its environment yourself"))
    return Group(Text("Next:"), _pairs([(f"  {command}", what) for command, what in commands], style="bold cyan"))


def _goes_on(run_dir: Path, status: Mapping[str, Any]) -> str:
    """Return what `tandem resume` would do; empty after a failure that would occur again at the same step."""
    names = [path.name.removeprefix("step-") for path in run_dir.glob("checkpoints/step-*")]
    saved = [int(name) for name in names if name.isdecimal()]
    where = f"continue from step {max(saved)}" if saved else "start it again: nothing is saved yet"
    if status.get("state") != "failed":
        return where
    return f"{where}, once the cause is fixed" if saved else ""


def _command() -> str:
    """Return the command to call tandem: its name if the shell finds it, else the path beside this Python."""
    if shutil.which("tandem"):
        return "tandem"
    beside = Path(sys.executable).with_name("tandem")
    here = os.path.relpath(beside)
    return shlex.quote(here if not here.startswith("..") else str(beside))


def _pairs(pairs: Sequence[tuple[str, str]], style: str) -> RenderableType:
    """Return two columns. A table would break long paths over two lines, which cannot be copied."""
    width = max(len(left) for left, _ in pairs) + 3
    lines = [Text.assemble((f"{left:<{width}}", style), (right, "dim")) for left, right in pairs]
    return Text("\n", no_wrap=True, overflow="ignore").join(lines)
