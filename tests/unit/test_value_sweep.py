"""What a sweep over values runs, how its runs are named, and what they say together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.errors import SpecError
from tandem.recipes.sweep import sweep
from tandem.runs.sweep import SeedResult, best_of, combine, conclusion, member_name, summarise, table
from tandem.spec.load import parse_over, parse_spec, with_values
from tandem.spec.sweep import SweepSpec, combinations

SFT: dict[str, Any] = {
    "recipe": "sft", "model": {"preset": "tiny"}, "data": {"path": "rows.jsonl"}, "train": {"steps": 4, "lr": 1e-3},
}  # fmt: skip


def sweep_spec(**told: Any) -> SweepSpec:
    found = parse_spec(SFT | {"sweep": told}).sweep
    assert found is not None
    return found


def test_a_grid_is_every_combination_in_order():
    found = combinations(sweep_spec(over={"train.lr": [1e-5, 3e-5], "train.batch_size": [4, 8]}), 0)
    pairs = [(each["train.lr"], each["train.batch_size"]) for each in found]
    assert pairs == [(1e-5, 4), (1e-5, 8), (3e-5, 4), (3e-5, 8)]


def test_tables_of_a_spec_name_a_setting():
    assert sweep_spec(over={"model": {"lora": {"rank": [8, 16]}}}).over == {"model.lora.rank": [8, 16]}


def test_draws_are_the_same_each_time_different_and_in_their_range():
    over = {"train.lr": "1e-6..1e-4", "train.batch_size": "4..64", "train.optimizer.kind": ["adamw", "apollo_mini"]}
    few, many = (combinations(sweep_spec(over=over, random=count), 7) for count in (5, 200))
    assert many[:5] == few
    assert len({repr(each) for each in many}) == 200
    rates = [each["train.lr"] for each in many]
    assert min(rates) >= 1e-6
    assert max(rates) <= 1e-4
    assert 60 < sum(rate < 1e-5 for rate in rates) < 140, "the logarithm is uniform"
    assert {type(each["train.batch_size"]) for each in many} == {int}
    assert combinations(sweep_spec(over=over, random=5), 8) != few


@pytest.mark.parametrize(
    ("text", "over"),
    [
        ("train.lr=1e-5,3e-5", {"train.lr": [1e-5, 3e-5]}),
        ("algorithm.kind=grpo, rloo", {"algorithm.kind": ["grpo", "rloo"]}),
        ('train.schedule={kind = "constant"}, {kind = "linear"}', None),
        ("train.lr=1e-6..1e-4", {"train.lr": "1e-6..1e-4"}),
        ("train.batch_size=8", {"train.batch_size": [8]}),
    ],
)
def test_values_on_the_command_line(text: str, over: dict[str, Any] | None):
    assert parse_over([text]) == (over or {"train.schedule": [{"kind": "constant"}, {"kind": "linear"}]})


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"over": {"train.lr": []}}, r"train\.lr = \[\]: give a list of values, or a range"),
        ({"over": {"train.lr": [1e-5, 1e-5]}}, "a value is given twice"),
        ({"over": {"train.lr": "1e-4..1e-6"}}, r"write a range as low\.\.high"),
        ({"over": {"train.lr": "1e-4"}}, r"write a range as low\.\.high"),
        ({"over": {"seed": [0, 1]}}, "several seeds are sweep.seeds"),
        ({"over": {"train.lr": "1e-6..1e-4"}}, "a range is drawn from; set random to a number of draws"),
        ({"over": {"train.lr": [n / 1e4 for n in range(1, 101)], "train.steps": [*range(1, 12)]}}, "1000 at most"),
        ({"over": {"train.lrr": [1e-5]}}, r"train\.lrr = 1e-05: unknown here; did you mean 'lr'"),
        ({"over": {"train.lr": [1e-5, -1]}}, r"train\.lr = -1: must be positive"),
        ({}, "nothing varies; give --seeds 0,1,2 or --over"),
    ],
)
def test_a_wrong_sweep_is_refused_before_anything_runs(told: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(SpecError, match=message):
        sweep(SFT | {"sweep": told}, directory=tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_names_are_short_different_and_fit_a_directory():
    assert member_name({"train.lr": 3e-5, "model.lora.rank": 8}, None) == "lr-3e-05_rank-8"
    assert member_name({"train.lr": 3e-5, "warmup.lr": 1e-3}, 1) == "train.lr-3e-05_warmup.lr-0.001_seed-1"
    paths = [member_name({"data.path": text}, None) for text in ("a/b.jsonl", "a-b.jsonl", "a_b.jsonl", "x" * 300)]
    assert len(set(paths)) == 4
    assert all("/" not in name and len(name) < 100 for name in paths)
    assert member_name({}, 3) == "seed-3"


def test_another_value_leaves_what_was_left_out_to_be_chosen():
    changed = with_values(parse_spec(SFT), {"model.lora.rank": 8})
    assert changed.model.lora is not None
    assert changed.left_out("precision.weights")


def settings(*after: float | None, metric: str = "accuracy") -> Any:
    found: list[Any] = []
    for number, value in enumerate(after):
        state = "failed" if value is None else "succeeded"
        before = None if value is None else 0.2
        seed = SeedResult(
            0, f"lr-{number}", state, before, value, None, "improved", 1.0, "Full: a | b" if value is None else ""
        )
        status: dict[str, Any] = {"state": state, "eval": {"metric": metric, "tasks": 100, "margin": 0.05}}
        found.append(summarise(Path("s"), [seed], [] if value is None else [status], 0.95, {"train.lr": number}))
    return found


def test_the_best_is_the_highest_accuracy_or_the_lowest_loss():
    assert best_of(settings(0.3, 0.9, None, 0.5)).values == {"train.lr": 1}  # pyright: ignore[reportOptionalMemberAccess]
    assert best_of(settings(0.3, 0.1, None, metric="loss")).values == {"train.lr": 1}  # pyright: ignore[reportOptionalMemberAccess]
    assert best_of(settings(None, None)) is None
    assert conclusion(combine(Path("s"), settings(None, None))) == "No setting has a result. 2 of 2 runs failed."


def test_the_table_has_a_row_for_each_setting_and_what_failed():
    assert table(combine(Path("s"), settings(0.3, 0.9, None))).splitlines() == [
        "| train.lr | runs | accuracy before | after | after - before | interval | verdict |",
        "|---|---|---|---|---|---|---|",
        "| 0 | 1 | 0.200 | 0.300 | +0.100 |  | improved |",
        "| 1 | 1 | 0.200 | 0.900 | +0.700 |  | improved, best |",
        "| 2 | 0 |  |  |  |  | failed: Full: a / b |",
        "",
        "Best of 3: train.lr = 1: held-out accuracy 0.900, +0.700. It was chosen by these tasks, which flatters it: "
        "run it once more with other seeds. 1 of 3 runs failed.",
    ]
