import math
import sys

import pytest

from tandem.obs.curves import curves_png, rolling_mean
from tandem.obs.text_charts import terminal_curve

ROWS = [{"step": s, "stage": "warmup", "loss/total": 3.0 / s, "lr": 1e-3} for s in range(1, 6)] + [
    {
        "step": s,
        "stage": "rl",
        "reward/mean": s / 20,
        "loss/total": None if s == 9 else 0.01,
        "lag/max": 1,
        "policy/entropy": 1.0,
    }
    for s in range(6, 20)
]


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_a_picture_is_drawn_and_pyplot_is_never_touched():
    already = "matplotlib.pyplot" in sys.modules
    picture = curves_png(ROWS, "quickstart", evals=[(0, 0.0), (5, 0.1), (19, 0.97)])
    assert size_of(picture) == (1512, 864)
    assert ("matplotlib.pyplot" in sys.modules) == already


def test_the_same_rows_give_the_same_bytes():
    assert curves_png(ROWS, "a") == curves_png(ROWS, "a") != curves_png(ROWS[1:], "a")


@pytest.mark.parametrize(
    "rows",
    [[], ROWS[:1], ROWS[:5], ROWS[5:6], [{"step": 1}], [{"step": 1, "stage": "rl", "reward/mean": None}]],
    ids=["no rows", "one row", "supervised only", "one RL row", "no numbers", "only null"],
)
def test_whatever_is_missing_a_picture_comes_out(rows):
    assert size_of(curves_png(rows, "x", evals=[(1, 0.5)]))


def test_a_title_is_never_read_as_mathematics():
    assert size_of(curves_png(ROWS, r"$\frac{broken$"))


def test_a_rolling_mean_looks_back_only_and_skips_gaps():
    assert rolling_mean([1.0, 3.0, math.nan, 5.0], 2) == [1.0, 2.0, 3.0, 5.0]


def test_a_terminal_curve_rises_from_the_lower_left_to_the_upper_right():
    chart = terminal_curve([0, 1, 2, 3, 4, 5, 6, 7], width=4, height=2, title="reward")
    assert chart.splitlines() == ["reward", " 7 ┤⠀⠀⡠⠊", " 0 ┤⡠⠊⠀⠀", "   └────", "    1  8"]


def test_a_terminal_curve_of_nothing_or_of_one_value_is_still_text():
    assert "nothing to draw" in terminal_curve([], title="reward")
    assert "nothing to draw" in terminal_curve([None, float("nan")])
    assert terminal_curve([0.5]).count("\n") == 9
