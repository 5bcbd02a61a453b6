"""`tandem top`: all runs in a terminal, live."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tandem.shapes.runs import RunInfo

Row = dict[str, Any]

_BAR, _LINES_BESIDE = 16, 6
_LIVE = ("running", "starting", "waiting", "queued", "not begun")
_STYLES = {
    "running": "blue", "succeeded": "green", "failed": "red", "gone": "red", "stalled": "red", "damaged": "red",
    "stopped": "yellow", "cancelled": "yellow",
}  # fmt: skip


def top(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Directory that holds runs. Default: the control server, or runs/."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the table once and exit.")] = False,
) -> None:
    """Show all runs in the terminal, live: what each does now, how fast, and what it earns. Ctrl-C ends the view only.
    Without a terminal the table is printed once."""
    from rich.console import Console
    from rich.live import Live

    from tandem.errors import TandemError

    rows, where = _rows_of(directory)
    console = Console(highlight=False)
    told = [rows()]
    if once or not console.is_terminal:
        console.print(frame(told[-1], where, len(told[-1])))
        return
    trouble = ""

    def shown() -> RenderableType:
        return frame(told[-1], trouble or where, max(3, console.height - _LINES_BESIDE))

    try:
        with Live(console=console, get_renderable=shown, refresh_per_second=4):
            while True:
                time.sleep(1.0)
                try:
                    told[-1], trouble = rows(), ""
                except (TandemError, OSError) as error:
                    trouble = f"{where}: no answer, so this is old: {error}"
    except KeyboardInterrupt:
        pass


def _rows_of(directory: Path | None) -> tuple[Callable[[], list[Row]], str]:
    """Return what looks at the runs, and where they are."""
    from tandem.client import Tandem, find_place
    from tandem.errors import RunError

    if directory is None and find_place() is not None:
        server = Tandem()
        return lambda: [_row_of(each) for each in server.runs()], server.url
    from tandem.dashboard.views import Runs

    place = directory or Path("runs")
    if not place.is_dir():
        raise RunError(f"{place}: is not a directory; name the one that holds your runs, or train first")
    runs = Runs(place)

    def look() -> list[Row]:
        found: list[Row] = runs.all()["runs"]
        return [{**row, "metrics": runs.sight(row["run"])["metrics"]} if row["state"] == "running" else row
                for row in found]  # fmt: skip

    return look, str(place)


def _row_of(info: RunInfo) -> Row:
    """Return a row as `Runs.all` has them, of a run on a control server."""
    return {
        "run": info.id, "title": f"{info.name} {info.id[:10]}", "state": info.state, "verdict": info.verdict,
        "step": info.step, "steps_total": info.steps_total, "error": info.why or info.error,
        "stage": f"{info.stage or 'begins'} on {info.target}, {info.cost_usd:.2f} USD",
    }  # fmt: skip


def frame(rows: list[Row], where: str, most: int) -> RenderableType:
    """Return the table: runs on their way first, then the newest."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from tandem.obs.readings import count, one_line

    states = [_state(row) for row in rows]
    counts = " · ".join(f"{states.count(each):,} {each}" for each in dict.fromkeys(states))
    head = Text(one_line(f"tandem · {where} · {counts or 'no run yet: tandem init writes a first spec'}"), style="bold")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    for name, ratio in (("run", 2), ("state", 0), ("step", 0), ("", 0), ("held out", 3), ("now", 5)):
        table.add_column(name, ratio=ratio or None, no_wrap=True, overflow="ellipsis")
    ordered = sorted(rows, key=lambda row: row["state"] not in _LIVE)  # stable: the newest first in each part
    for row in ordered[:most]:
        state = _state(row)
        table.add_row(
            one_line(row["title"]), Text(state, style=_STYLES.get(state, "")), _steps(row), _bar(row), _held_out(row),
            Text(one_line(_now(row)), style="" if state == "running" else "dim"),
        )  # fmt: skip
    left_out = [Text(f"and {count(len(rows) - most, 'run')} more", style="dim")] if len(rows) > most else []
    return Group(head, table, *left_out)


def _state(row: Row) -> str:
    return "stalled" if row["state"] == "running" and row.get("liveness") == "stalled" else str(row["state"])


def _steps(row: Row) -> str:
    return f"{row['step']:,}/{row['steps_total']:,}" if row.get("steps_total") else ""


def _bar(row: Row) -> str:
    share = min(1.0, row["step"] / row["steps_total"]) if row.get("steps_total") else 0.0
    return "━" * round(_BAR * share) + " " * (_BAR - round(_BAR * share))


def _held_out(row: Row) -> str:
    from tandem.obs.claims import figure_of

    found = [figure_of(row["metric"], row[each]) for each in ("before", "after") if row.get(each) is not None]
    return " → ".join(found) + (f" {row['verdict']}" if row.get("verdict") else "")


def _now(row: Row) -> str:
    from tandem.obs.readings import readings

    told = " · ".join(f"{label} {text}" for label, text in readings(row.get("metrics") or {}))
    if row["state"] == "running":
        return told or str(row.get("stage") or "")
    if row["state"] == "gone":
        return f"its process is gone; tandem resume {row['run']} continues it"
    return str(row.get("error") or "")
