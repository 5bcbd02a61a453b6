"""Show a run while it trains: a panel in a terminal, plain lines elsewhere.

The trainer's thread only stores numbers, in microseconds; a thread of rich draws them a few times a second.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tandem.obs.claims import figure_of, printable
from tandem.obs.readings import clock, count, readings
from tandem.obs.run_history import number
from tandem.obs.text_charts import sparkline
from tandem.types import Measure

REFRESH_PER_SECOND = 3
PLAIN_EVERY_S = 5.0
_KEPT = 600  # latest steps in a sparkline
_TRACED = {"reward": ("reward/mean", "green"), "loss": ("loss/total", "yellow")}
_STAGES = {"warmup": "warm-up", "sft": "supervised training", "preference": "preference training", "rl": "RL"}


class OutlivedConsole(Console):
    """A console whose run continues when the reader of its output ends (`tandem train SPEC | head`); it prints no
    more."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # otherwise the interpreter reports an error at exit
        os.close(nowhere)


class LiveView:
    """The live view of a run. Use it as a context; call stage(), step() after every optimizer step, evaluation(),
    say()."""

    def __init__(
        self, name: str = "run", console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or OutlivedConsole(highlight=False)
        self._name = name
        self._clock = clock
        self._started = clock()
        self._open = ExitStack()
        self._last_eval = ""
        self._doing, self._doing_since = "", clock()
        self._reset("", 0, 0)

    def __enter__(self) -> LiveView:
        if self._has_panel:
            live = Live(console=self.console, get_renderable=self.panel, refresh_per_second=REFRESH_PER_SECOND)
            self._open.enter_context(live)
            self._open.enter_context(_logging_above_the_panel())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._say_how_the_stage_went()
        self._open.close()

    def stage(self, name: str, total_steps: int, note: str = "", *, done: int = 0) -> None:
        """Begin a stage; `done` of its steps were taken before a resume."""
        self._say_how_the_stage_went()
        self._reset(name, total_steps, done)
        self.say(f"── {self._title()}: {count(total_steps, 'step')}{' · ' + note if note else ''}")

    def doing(self, what: str) -> None:
        """Show what the run waits for until the next step, with the seconds so far; in a terminal only."""
        self._doing, self._doing_since = what, self._clock()

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a row of metrics.jsonl."""
        self._doing = ""
        self._done += 1
        self._row = row
        self._times.append(self._clock())
        for name, (key, _) in _TRACED.items():
            if (value := number(row.get(key))) is not None:
                self._traces[name].append(value)
        if not self._has_panel and self._plain_line_due():
            self._print_step()
        if self._done == self._total:
            self._say_how_the_stage_went()

    def evaluation(self, name: str, value: float, note: str = "", *, metric: Measure = "accuracy") -> None:
        """Show an evaluation: the mean over held-out tasks or rows; accuracy as a fraction."""
        said = figure_of(metric, value)
        self._last_eval = (
            f"{name}: {said if metric == 'accuracy' else f'{metric} {said}'}{' · ' + note if note else ''}"
        )
        self.say(f"   evaluation {self._last_eval}")

    def say(self, text: str) -> None:
        """Print a line that stays. It is never read as markup, because it may contain a model's text."""
        self.console.print(Text(printable(text)), soft_wrap=True)

    def panel(self) -> RenderableType:
        """Return the panel with the current numbers."""
        total, elapsed = max(self._total, self._done, 1), clock(self._clock() - self._started)
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        head.add_row(
            Text(self._title(), style="bold"),
            ProgressBar(total=total, completed=self._done, pulse=bool(self._doing) and not self._done),
            Text(" · ".join([f"{self._done:,}/{self._total:,} steps", elapsed, self._eta()])),
        )
        parts: list[RenderableType] = [head, self._charts(), self._numbers()]
        if self._doing:
            parts.append(Text(f"{self._doing} · {clock(self._clock() - self._doing_since)}", style="yellow"))
        if self._last_eval:
            parts.append(Text(f"evaluation  {self._last_eval}", style="cyan"))
        return Panel(Group(*parts), title=Text(f"tandem · {self._name}"), title_align="left", border_style="dim")

    @property
    def _has_panel(self) -> bool:
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def _reset(self, name: str, total_steps: int, done: int) -> None:
        self._stage, self._total, self._done, self._first = name, total_steps, done, done
        self._row: Mapping[str, Any] = {}
        self._traces: dict[str, deque[float]] = {name: deque(maxlen=_KEPT) for name in _TRACED}
        self._times: deque[float] = deque([self._clock()], maxlen=32)
        self._stage_started = self._last_print = self._clock()

    def _say_how_the_stage_went(self) -> None:
        """Print a line about the ended stage, which stays in the scrollback."""
        if self._done > self._first:
            self._first, first = self._done, self._first
            steps, took = count(self._done - first, "step"), clock(self._clock() - self._stage_started)
            moves = [_moved(name, values) for name, trace in self._traces.items() if (values := list(trace))]
            self.say(" · ".join([f"   {self._title()}: {steps} in {took}", *moves]))

    def _title(self) -> str:
        return _STAGES.get(self._stage, self._stage) or "starting"

    def _charts(self) -> RenderableType:
        width = max(8, min(60, self.console.width - 34))
        grid = Table.grid(padding=(0, 2))
        for name, (_, style) in _TRACED.items():
            if values := list(self._traces[name]):
                now = Text(f"{values[-1]:>8.4g}", style="bold")
                grid.add_row(name, now, Text(sparkline(values, width), style=style))
        return grid if grid.row_count else Text("waiting for the first step", style="dim")

    def _numbers(self) -> Text:
        return Text("   ".join(f"{label} {text}" for label, text in readings(self._row, without=_TRACED)), style="dim")

    def _eta(self) -> str:
        left = self._total - self._done
        if left <= 0:
            return "done"
        if len(self._times) < 3:
            return "– left"
        return f"{clock((self._times[-1] - self._times[0]) / (len(self._times) - 1) * left)} left"

    def _plain_line_due(self) -> bool:
        every = max(1, self._total // 10)
        return (
            self._done % every == 0 or self._done == self._total or (self._clock() - self._last_print >= PLAIN_EVERY_S)
        )

    def _print_step(self) -> None:
        self._last_print = self._clock()
        numbers = [f"{name} {trace[-1]:.4g}" for name, trace in self._traces.items() if trace]
        numbers += [f"{label} {text}" for label, text in readings(self._row, without=_TRACED)]
        self.say(f"   {self._stage or 'step'} {self._done}/{self._total} · {' · '.join(numbers)} · {self._eta()}")


@contextmanager
def busy(what: str) -> Generator[None]:
    """Show on a terminal's stderr that the command does this, while the context is open; elsewhere print nothing."""
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    with console.status(Text(what)):
        yield


@contextmanager
def _logging_above_the_panel() -> Generator[None]:
    """Send log lines to rich's stream, which prints above the panel. An earlier handler has the bare stream and would
    write into the panel."""
    names = [name for name, logger in logging.Logger.manager.loggerDict.items() if isinstance(logger, logging.Logger)]
    moved: list[tuple[logging.StreamHandler[Any], Any]] = []
    for logger in [logging.getLogger(), *map(logging.getLogger, names)]:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.__stderr__, sys.__stdout__):
                moved.append((handler, handler.setStream(sys.stderr)))
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)


def _moved(name: str, values: list[float]) -> str:
    """Return the mean of the first tenth and of the last tenth; single steps are noise."""
    part = max(1, len(values) // 10)
    return f"{name} {sum(values[:part]) / part:.3g} → {sum(values[-part:]) / part:.3g}"
