import io
import logging
import sys
import time

import pytest
from rich.console import Console

from tandem.obs.live_view import LiveView
from tandem.obs.text_charts import sparkline


def row(step: int, **more: float) -> dict:
    return {
        "step": step,
        "stage": "rl",
        "reward/mean": step / 100,
        "loss/total": 0.01,
        "lag/max": 0,
        "time/tokens_per_s": 8000.0,
        **more,
    }


def view(*, terminal: bool, clock=time.monotonic) -> LiveView:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False, color_system=None)
    return LiveView("quickstart", console, clock)


def said(live: LiveView) -> str:
    return live.console.file.getvalue()  # type: ignore[attr-defined]


def test_without_a_terminal_a_run_is_a_dozen_plain_lines():
    live = view(terminal=False)
    with live:
        live.stage("rl", 100, "dr_grpo")
        for step in range(1, 101):
            live.step(row(step))
        live.evaluation("after RL", 0.97, "248/256 tasks")
    lines = said(live).splitlines()
    assert lines[0] == "── RL: 100 steps · dr_grpo"
    assert len(lines) == 13
    assert lines[1].startswith("   rl 10/100 · reward 0.1 · loss 0.01 · tokens/s 8,000 · lag 0")
    assert "reward 0.055 → 0.955" in lines[-2]
    assert lines[-1] == "   evaluation after RL: 97.0 % · 248/256 tasks"
    assert "\x1b" not in said(live)


def test_without_a_terminal_a_slow_run_prints_every_five_seconds():
    now = [0.0]
    live = view(terminal=False, clock=lambda: now[0])
    with live:
        live.stage("rl", 1000)
        for step in range(1, 21):
            now[0] += 2.0
            live.step(row(step))
    steps = [line for line in said(live).splitlines() if line.startswith("   rl ")]
    assert [line.split()[1] for line in steps] == ["3/1000", "6/1000", "9/1000", "12/1000", "15/1000", "18/1000"]
    assert steps[-1].endswith("32:44 left")  # 982 steps of 2 s


def test_in_a_terminal_the_panel_shows_stage_progress_reward_and_the_last_evaluation():
    live = view(terminal=True)
    with live:
        live.stage("rl", 120)
        for step in range(1, 31):
            live.step(row(step))
        live.evaluation("before RL", 0.113)
        live.console.print(live.panel())
    for text in ("tandem · quickstart", "30/120 steps", "reward", "▁▁", "█", "tokens/s 8,000", "before RL: 11.3 %"):
        assert text in said(live)


def test_numbers_that_are_missing_or_null_are_left_out():
    live = view(terminal=True)
    live.stage("sft", 3)
    live.console.print(live.panel())
    live.step({"step": 1, "loss/total": None, "grad/norm": float("nan")})
    live.step({})
    live.console.print(live.panel())
    assert "waiting for the first step" in said(live)
    assert "nan" not in said(live)


def test_what_a_model_wrote_is_never_read_as_markup():
    live = view(terminal=False)
    live.say("[red]not a colour[/red] [/]")
    assert said(live) == "[red]not a colour[/red] [/]\n"


def test_log_lines_go_above_the_panel_and_the_handler_gets_its_stream_back(monkeypatch):
    bare = io.StringIO()
    monkeypatch.setattr(sys, "stderr", bare)
    monkeypatch.setattr(sys, "__stderr__", bare)
    handler = logging.StreamHandler(bare)
    logger = logging.getLogger("tandem.test_live")
    logger.addHandler(handler)
    try:
        live = view(terminal=True)
        with live:
            logger.warning("one reward raised")
        logger.warning("after the run")
    finally:
        logger.removeHandler(handler)
    assert "one reward raised" in said(live)
    assert bare.getvalue() == "after the run\n"


def test_an_error_inside_leaves_the_terminal_whole():
    live = view(terminal=True)
    with pytest.raises(RuntimeError), live:
        raise RuntimeError("training broke")
    assert said(live).rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_an_update_costs_less_than_a_millisecond_while_the_panel_is_drawn():
    live = view(terminal=True)
    with live:
        live.stage("rl", 5001)
        start = time.perf_counter()
        for step in range(5000):
            live.step(row(step))
        spent = time.perf_counter() - start
    assert spent / 5000 < 1e-3  # in the mean: about 3 microseconds


def test_a_sparkline_spans_its_range_and_leaves_gaps_blank():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, None, 7.0], 8) == "▁ █"
    assert sparkline(list(range(800)), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0], 8) == "▄▄"
    assert sparkline([], 8) == sparkline([float("nan")], 8) == ""
