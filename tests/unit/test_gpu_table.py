"""The table of what H200s must do: who measures beside whom, and what is no figure. Its commands write at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
import table as page
from figures import MEASUREMENTS, Figure, Measurement, at, first_token, of_the_first, pooled, second_against_first

SCRIPT = """
import json, os, sys, time
from pathlib import Path
started = time.time()
time.sleep(0.2)
found = {"rate": float(sys.argv[1]), "gpus": os.environ["CUDA_VISIBLE_DEVICES"], "when": [started, time.time()]}
Path(os.environ["OUT"], "it.json").write_text(json.dumps(found))
sys.exit(int(sys.argv[2]))
"""
RATE = Figure("a rate", "tokens/s", at("rate"), 100, 200, more=True)


def measurement(name: str, rate: float = 100, code: int = 0, gpus: int = 1) -> Measurement:
    return Measurement(name, f"script.py {rate} {code}", "it.json", [RATE], gpus)


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setattr(page, "HERE", tmp_path)


def made(asked: list[Measurement], gpus: str, out: Path, *, beside: bool) -> dict[str, page.Made]:
    return {each.measurement.name: each for each in page.make_all(asked, list(gpus), out, beside=beside)}


def overlap(one: Any, other: Any) -> bool:
    return max(one["when"][0], other["when"][0]) < min(one["when"][1], other["when"][1])


@pytest.mark.parametrize(("beside", "small"), [(True, 6), (False, 1)])
def test_no_gpu_is_measured_by_two_at_a_time(tmp_path: Path, *, beside: bool, small: int):
    asked = [*(measurement(f"small-{n}") for n in range(small)), *(measurement(f"large-{n}", gpus=2) for n in range(2))]
    found = [each.found for each in made(asked, "0123", tmp_path, beside=beside).values()]
    pairs = [(one, other) for n, one in enumerate(found) for other in found[:n]]
    at_once = [(one, other) for one, other in pairs if overlap(one, other)]
    assert all(not set(one["gpus"].split(",")) & set(other["gpus"].split(",")) for one, other in at_once)
    assert bool(at_once) is beside
    assert sorted(len(each["gpus"].split(",")) for each in found) == [1] * small + [2] * 2


def test_what_needs_more_gpus_than_there_are_is_told_and_not_made(tmp_path: Path):
    found = made([measurement("small"), measurement("large", gpus=4)], "01", tmp_path, beside=True)
    assert page.told(found["large"], RATE)[1::3] == ["none", "needs 4 GPUs"]
    assert page.told(found["small"], RATE) == ["a rate", "100 tokens/s", ">= 100 tokens/s", "200", "met"]


@pytest.mark.parametrize(("rate", "told"), [(99, "MISSED"), (100, "met"), (200, "goal"), (float("nan"), "MISSED")])
def test_a_figure_is_held_against_what_it_must_be(rate: float, told: str):
    assert RATE.verdict(rate) == told
    assert Figure("a time", "s", at("rate"), -100, -200).verdict(-rate) == told


def test_a_command_that_fails_has_no_figure_whatever_it_wrote(tmp_path: Path):
    found = made([measurement("broken", rate=300, code=3)], "0", tmp_path, beside=False)["broken"]
    assert page.told(found, RATE)[1] == "none"
    assert "exit code 3" in found.failed


def test_what_another_day_wrote_is_no_figure(tmp_path: Path):
    asked = measurement("again")
    made([asked], "0", tmp_path, beside=False)
    (tmp_path / "script.py").write_text("")
    assert page.told(made([asked], "0", tmp_path, beside=False)["again"], RATE)[1] == "none"


@pytest.mark.parametrize(
    ("row", "why"), [({"verified": ["digest", "unverified"], "step_s": 1}, "proven"), ({"error": "it broke"}, "broke")]
)
def test_what_is_not_proven_is_no_figure(row: Any, why: str):
    asked = Figure("a step", "s", of_the_first(at("step_s")), 9, 6)
    told = page.told(page.Made(measurement("step"), found=[row]), asked)
    assert told[1] == "none"
    assert why in told[-1]


def test_figures_of_several_numbers():
    case = {"verified": ["digest"], "sampled": 100.0}
    assert second_against_first([case | {"step_s": 2.0}, case | {"step_s": 1.0}]) == 2
    assert pooled(2)({"rates": {"1": [9, 10, 10], "2": [9, 19, 21]}}) == 2  # the first round warms up
    assert first_token({"sync_ms": [1, 20, 90], "first_token": [500, 500, *[10, 20, 30] * 3]}) == 40


def test_it_ends_with_1_if_a_figure_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(page, "MEASUREMENTS", [measurement("good"), measurement("bad", rate=99)])
    monkeypatch.setattr(page.torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("OUT", str(tmp_path))
    for only, code in (("good", None), ("bad", 1)):
        monkeypatch.setattr(sys, "argv", ["table.py", "--only", only])
        if code:
            with pytest.raises(SystemExit, match="1"):
                page.main()
        else:
            page.main()
    assert "MISSED" in capsys.readouterr().out
    assert json.loads((tmp_path / "table" / "table.json").read_text())[0][-1] == "MISSED"


def test_each_measurement_has_a_place_of_its_own_and_a_command_of_this_folder():
    assert len({each.name for each in MEASUREMENTS}) == len(MEASUREMENTS)
    folder = Path(__file__).parents[2] / "benchmarks" / "gpu"
    for each in MEASUREMENTS:
        script, *words = each.command.split()
        text = "".join((folder / name).read_text() for name in (script, "standing.py", "rollouts.py"))
        assert all(f'"{word}"' in text for word in words if word.startswith("--")), each.command
