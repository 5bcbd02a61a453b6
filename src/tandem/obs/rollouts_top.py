"""Show a rollout service in a terminal: `tandem rollouts top`. Without a terminal it prints one line per update."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tandem.errors import TandemError
from tandem.obs.readings import clock, count, one_line
from tandem.obs.rollouts_status import ServicePoller
from tandem.obs.sync_report import size
from tandem.obs.text_charts import sparkline

_BAR, _TRACE = 24, 24
_KEPT = 240  # polls in a sparkline
_LAGS_ONE_BY_ONE = 8
_REFUSED = 4
_LINES_BESIDE = 24  # lines of a panel without its environments


class TopView:
    """The last status of the service, and whether it still answers."""

    def __init__(self, source: str, console: Console | None = None) -> None:
        self.source, self.console = source, console or Console(highlight=False)
        self.told: Mapping[str, Any] = {}
        self.trouble = ""
        self._lost_at = 0.0
        self._started_before = math.inf
        self._traces: dict[str, deque[float]] = {}

    def came(self, told: Mapping[str, Any], asked: float, answered: float) -> list[str]:
        """Take a status, with the monotonic times of its request and its arrival. Return news to print."""
        news = [f"{told['url']} answers again"] if self.trouble else []
        # The service started between these two times. If that is after the last process started, it is another process.
        begun_after, begun_before = asked - told["uptime_s"], answered - told["uptime_s"]
        if self.told and begun_after > self._started_before + 0.5:
            news = [f"{told['url']} was restarted; rates and totals count from then"]
            self._started_before = begun_before
        self._started_before = min(self._started_before, begun_before)
        self.told, self.trouble = told, ""
        for name, value in told["rates"].items():
            self._traces.setdefault(name, deque(maxlen=_KEPT)).append(value)
        return news

    def lost(self, error: TandemError, at: float) -> list[str]:
        """Note that the service did not answer, or answered with an error. Return news to print."""
        news = [] if self.trouble else [f"{error}; asking again"]
        self._lost_at = self._lost_at if self.trouble else at
        self.trouble = str(error)
        return news

    def frame(self) -> RenderableType:
        if not self.told:
            return Text("")
        parts = list(_parts(self.told, self._traces, most=max(5, self.console.height - _LINES_BESIDE)))
        if self.trouble:
            gone_s = time.monotonic() - self._lost_at
            gone = f"no answer for {gone_s:.0f} s, so the numbers are old: {self.trouble}"
            parts.insert(0, Text(one_line(gone), style="bold red"))
        title = Text(one_line(f"tandem rollouts · {self.told['url']} · up {clock(self.told['uptime_s'])}"))
        return Panel(Group(*parts), title=title, title_align="left", border_style="dim")

    def line(self) -> str:
        queue, trainer = self.told["queue"], self.told["trainer"]
        parts = [
            f"version {trainer['version']}" if trainer else "no trainer",
            f"{queue['queued']:,} queued",
            f"{queue['playing']:,} playing",
            f"{queue['held']:,} of {queue['slots']:,} slots held",
            f"{queue['leased']:,} leased",
            *(f"{value:,.5g} {name.removesuffix('_per_s')}/s" for name, value in self.told["rates"].items()),
        ]
        return " · ".join(parts)


def watch_rollouts(
    source: str, *, token_file: Path | None = None, every_s: float = 1.0, console: Console | None = None
) -> None:
    """Watch until Ctrl-C. StoreError if the service does not answer at first; later it is waited for."""
    asking, view = ServicePoller(source, token_file), TopView(source, console)
    has_panel = view.console.is_terminal and not view.console.is_dumb_terminal
    try:
        view.came(*_asked(asking))
        if has_panel:
            with Live(console=view.console, get_renderable=view.frame, refresh_per_second=4):
                _go_on(asking, view, every_s)
        else:
            view.console.print(Text(view.line()), soft_wrap=True)
            _go_on(asking, view, every_s, as_lines=True)
    except KeyboardInterrupt:
        pass
    finally:
        asking.close()


def print_frame(told: Mapping[str, Any], console: Console | None = None) -> None:
    """Print one frame."""
    view = TopView(told["url"], console)
    view.came(told, 0.0, 0.0)
    view.console.print(view.frame())


def _asked(asking: ServicePoller) -> tuple[Mapping[str, Any], float, float]:
    asked = time.monotonic()
    return asking.status(), asked, time.monotonic()


def _go_on(asking: ServicePoller, view: TopView, every_s: float, *, as_lines: bool = False) -> None:
    while True:
        time.sleep(every_s)
        try:
            news = view.came(*_asked(asking))
        except TandemError as error:
            news = view.lost(error, time.monotonic())
        for each in [*news, *([view.line()] if as_lines and not view.trouble else [])]:
            view.console.print(Text(one_line(each)), soft_wrap=True)


# --- the frame


def _parts(told: Mapping[str, Any], traces: Mapping[str, Sequence[float]], most: int) -> Iterator[RenderableType]:
    yield _trainer(told)
    if broken := told["stored"].get("broken"):
        yield Text(one_line(f"nothing more is acknowledged until a restart: {broken}"), style="bold red")
    yield _queue(told)
    yield Text()
    yield _lags(told)
    yield Text()
    yield _environments(told["environments"], most)
    yield Text()
    yield _below(told, traces)


def _trainer(told: Mapping[str, Any]) -> Text:
    if told["trainer"] is None:
        return Text("no trainer has registered yet", style="yellow")
    trainer = told["trainer"]
    lag = "any lag" if trainer["max_lag"] < 0 else f"max_lag {trainer['max_lag']}"
    text = f"run {trainer['run_id']} · version {trainer['version']:,} · {lag} · epoch {trainer['epoch']}"
    return Text(one_line(text), style="bold")


def _queue(told: Mapping[str, Any]) -> Table:
    queue = told["queue"]
    leases = f"{count(queue['leases'], 'lease')} with {count(queue['leased'], 'group')}"
    grid = _grid()
    grid.add_row("slots", _bar(queue["held"], queue["slots"]), f"{queue['held']:,} of {queue['slots']:,} held")
    grid.add_row("playing", _bar(queue["playing"], queue["slots"]), f"{queue['playing']:,}")
    room = f"{queue['queued']:,} of at most {queue['most']:,} · {size(told['stored']['bytes'])} on the disk"
    grid.add_row("queued", _bar(queue["queued"], queue["most"]), room)
    grid.add_row("leases", "", leases)
    return grid


def _lags(told: Mapping[str, Any]) -> RenderableType:
    """Return the lags of queued groups and of those handed out, side by side."""
    queued, taken = told["queue"]["lag"], told["taken_lag"]
    rows = lag_rows(queued, taken)
    if not rows:
        return Text("nothing is queued, and nothing was taken yet", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("lag", justify="right")
    for name in ("queued", "taken"):
        table.add_column(name, justify="right")
        table.add_column("", width=_BAR)
    largest = max(row[1] for row in rows), max(row[2] for row in rows)
    for label, waiting, handed_out in rows:
        table.add_row(label, f"{waiting:,}", _bar(waiting, largest[0]), f"{handed_out:,}", _bar(handed_out, largest[1]))
    return table


def lag_rows(queued: Mapping[str, int], taken: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Return (versions, groups queued, groups taken): per lag if these are few, otherwise in ranges that double."""
    lags = sorted({int(lag) for lag in (*queued, *taken)})
    if len(lags) <= _LAGS_ONE_BY_ONE:
        return [(str(lag), queued.get(str(lag), 0), taken.get(str(lag), 0)) for lag in lags]
    counts = [Counter[int](), Counter[int]()]
    for into, numbers in zip(counts, (queued, taken), strict=True):
        for lag, number in numbers.items():
            into[int(lag).bit_length()] += number
    return [
        (_range(bits), counts[0][bits], counts[1][bits]) for bits in sorted({lag.bit_length() for lag in lags})
    ]  # fmt: skip


def _range(bits: int) -> str:
    low, high = (2 ** (bits - 1), 2**bits - 1) if bits else (0, 0)
    return str(low) if low == high else f"{low:,}-{high:,}"


def _environments(rows: Sequence[Mapping[str, Any]], most: int) -> RenderableType:
    if not rows:
        return Text("no environment has registered yet", style="yellow")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("environment", ratio=3, no_wrap=True, overflow="ellipsis")
    for name in ("weight", "wanted", "had", "queued", "playing"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("dropped", ratio=4, no_wrap=True, overflow="ellipsis")
    everything = sum(row["taken"] for row in rows)
    shown = sorted(rows, key=lambda row: (not row["connected"], row["id"]))[:most]
    for row in shown:
        had = f"{row['taken'] / everything:.1%}" if everything else "–"
        drops = {reason: number for reason, number in row["counts"].items() if reason != "put"}
        state = "" if row["connected"] else "  left"
        state = f"  silent {clock(row['silent_s'])}" if row["silent"] else state
        name = Text(one_line(row["name"]), style="dim" if state else "")
        table.add_row(
            name.append(state, style="yellow"), f"{row['weight']:g}", f"{row['share']:.1%}", had, f"{row['queued']:,}",
            f"{row['playing']:,}", Text(_reasons(drops)),
        )  # fmt: skip
    more = [Text(f"and {len(rows) - most} more", style="dim")] if len(rows) > most else []
    return Group(table, *more)


def _below(told: Mapping[str, Any], traces: Mapping[str, Sequence[float]]) -> Table:
    grid = _grid()
    for name, value in told["rates"].items():
        trace = list(traces.get(name, ()))
        grid.add_row(
            name.replace("_per_s", " a second"), Text(f"{value:,.5g}"),
            Text(sparkline(trace, _TRACE) if any(trace[1:]) else "", style="green"),
        )  # fmt: skip
    totals = told["totals"]
    since = " · ".join(f"{totals.get(name, 0):,} {name}" for name in ("put", "taken", "acked", "dropped"))
    table = Table.grid()
    table.add_row(grid)
    table.add_row(Text(f"since its start  {since}"))
    table.add_row(Text(f"dropped  {_reasons(told['dropped']) or 'none'}"))
    names = {row["id"]: row["name"] for row in told["environments"]}
    for row in told["quarantine"][:_REFUSED]:
        who = names.get(row["environment"], "unknown")
        at = time.strftime("%H:%M:%S", time.localtime(row["at"]))
        why = one_line(f"refused  {at} {who}: {row['field']}: {row['reason'].removeprefix(row['field'] + ': ')}")
        table.add_row(Text(why, style="red", overflow="ellipsis", no_wrap=True))
    return table


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim")
    return grid


def _bar(part: float, whole: float) -> Text:
    filled = round(_BAR * min(1.0, part / whole)) if whole else 0
    return Text("█" * max(filled, 1 if part else 0), style="green")


def _reasons(counts: Mapping[str, int]) -> str:
    return one_line(", ".join(f"{reason} {number:,}" for reason, number in sorted(counts.items(), key=lambda e: -e[1])))
