"""Which jobs benchmarks/gpu/real.py starts, where and how often, and what its tables say. A job here ends at once."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
from real_tables import by_way, curves, mean_curve, over_seeds, reached, rows_of, summary
from real_tasks import Asked

real: Any = importlib.import_module("real")  # for type checkers it is the folder tests/real
JOB = """
import json, os, sys, time
from pathlib import Path
place = Path(sys.argv[1]).parent
asked = json.loads(Path(sys.argv[1]).read_text())
tries = place.parents[1] / f"tries-{asked['seed']}"
with tries.open("a") as file:
    file.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
if asked["seed"] == 8 and len(tries.read_text().splitlines()) == 1:
    sys.exit("it broke early")
if asked["seed"] != 5:
    (place / "stepped").touch()
if asked["seed"] == 7:
    sys.exit("it broke late")
curve = [{"step": step, "seconds": 1.0 * step, "tokens": 9.0 * step, "right": "0011"} for step in (0, 3)]
row = {"name": "{kind}-{way}-{seed}".format(**asked), "curve": curve, "train_s": 1.0, "start_s": 1.0, "whole_s": 2.0,
       "tokens": 9.0, "asked": asked}
(place / "found.json").write_text(json.dumps(row))
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "benchmarks" / "gpu").mkdir(parents=True)
    (tmp_path / "benchmarks" / "gpu" / "real_job.py").write_text(JOB)
    monkeypatch.setattr(real, "HERE", tmp_path / "benchmarks" / "gpu")
    monkeypatch.setattr(real, "POLL_S", 0.01)
    monkeypatch.setattr(real, "compiled", lambda way: tmp_path / f"compiled-{way}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    found = real.options().parse_args(["--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "scratch")])
    found.gpus, found.at_once = 2, 1
    found.out.mkdir()
    found.scratch.mkdir()
    return found


def job(seed: int, way: str = "all") -> Asked:
    return Asked("chain_sum", way, seed, 3, "model", "")


def gpus_of(asked: Any, seed: int) -> list[str]:
    tried = asked.scratch / f"tries-{seed}"
    return tried.read_text().split() if tried.exists() else []


def test_jobs_are_spread_over_the_gpus_and_started_again_only_before_their_first_step(
    asked: Any, capsys: pytest.CaptureFixture[str]
):
    jobs = real.Jobs(asked)
    jobs.run([job(0), job(1), job(7), job(8)])
    assert sorted(gpus_of(asked, 0) + gpus_of(asked, 1)) == ["4", "6"]
    assert len(gpus_of(asked, 7)) == 1, "it had stepped"
    assert len(gpus_of(asked, 8)) == 2
    assert jobs.failed == 1
    assert "it broke late" in capsys.readouterr().out
    done = rows_of([asked.out])
    assert set(done) == {"chain_sum-all-0", "chain_sum-all-1", "chain_sum-all-8"}
    assert rows_of([asked.scratch]) == done, "there too, for the next call on this machine"
    assert {name: (row["warm"], row["beside"]) for name, row in done.items()} == {
        "chain_sum-all-0": (False, 1), "chain_sum-all-1": (False, 1), "chain_sum-all-8": (True, 1)
    }  # fmt: skip
    with pytest.raises(SystemExit, match="with --steps 3, not 120"):
        real.refuse_others(done, [Asked("chain_sum", "all", 0, 120, "model", "")])


def test_jobs_share_a_gpu_but_start_one_after_the_other(asked: Any):
    """The first waits for the second before it ends, and the second sees that the first has stepped."""
    waiting = """
    other = place.parents[1] / "tries-6"
    time.sleep(0.05)
    assert not other.exists()
    (place / "stepped").touch()
    while not other.exists() and time.time() < asked["began"] + 30:
        time.sleep(0.01)
    """
    text = JOB.replace('if asked["seed"] == 7', f'if asked["seed"] == 5:{waiting}\nif asked["seed"] == 7', 1)
    (real.HERE / "real_job.py").write_text(text)
    asked.gpus, asked.at_once = 1, 2
    jobs = real.Jobs(asked)
    jobs.run([job(5), job(6)])
    rows = rows_of([asked.out])
    assert jobs.failed == 0
    assert {name: row["beside"] for name, row in rows.items()} == {"chain_sum-all-5": 2, "chain_sum-all-6": 2}
    assert rows["chain_sum-all-5"]["took_s"] < 25, "it did not wait in vain"


def test_jobs_without_vllm_start_together_and_those_of_trl_are_few(asked: Any):
    """Each embedded one waits until the other has been started; one of TRL fails if another one is there."""
    waiting = """
if asked["way"] == "all":
    both = [place.parents[1] / "tries-0", place.parents[1] / "tries-1"]
    while not all(each.exists() for each in both) and time.time() < asked["began"] + 60:
        time.sleep(0.01)
else:
    (place.parents[1] / "of-trl").mkdir()
    time.sleep(0.3)
    (place.parents[1] / "of-trl").rmdir()
"""
    (real.HERE / "real_job.py").write_text(JOB.replace('if asked["seed"] == 7', f'{waiting}if asked["seed"] == 7', 1))
    asked.gpus, asked.at_once, asked.trl_at_once = 1, 4, 1
    jobs = real.Jobs(asked)
    embedded = [Asked("chain_sum", "all", seed, 3, "model", "", engine="hf") for seed in (0, 1)]
    jobs.run([job(2, "trl"), job(3, "trl"), *embedded])
    rows = rows_of([asked.out])
    assert jobs.failed == 0
    assert len(rows) == 4
    assert max(row["took_s"] for row in rows.values()) < 50, "none waited in vain"
    assert rows["chain_sum-all-0"]["beside"] >= 2


def test_a_job_that_would_not_end_in_time_is_not_started(asked: Any, capsys: pytest.CaptureFixture[str]):
    asked.limit_s, asked.job_s, asked.trl_job_s = 100.0, 91.0, 80.0
    real.Jobs(asked).run([job(0), job(1, "trl")])
    assert (gpus_of(asked, 0), len(gpus_of(asked, 1))) == ([], 1)
    assert "chain_sum-all-0: not started" in capsys.readouterr().out


def test_a_job_that_takes_too_long_is_ended(asked: Any, monkeypatch: pytest.MonkeyPatch):
    (real.HERE / "real_job.py").write_text("import time; time.sleep(60)")
    asked.deadline_s = 0.05
    jobs = real.Jobs(asked)
    jobs.run([job(0)])
    (row,) = [json.loads(line) for line in (asked.out / "real.jsonl").read_text().splitlines()]
    assert (jobs.failed, row["error"]) == (1, "ended: it took too long")


def test_all_weights_and_trl_come_before_lora_seed_by_seed(asked: Any):
    asked.tasks, asked.seeds = ["chain_sum", "number_format"], [0, 1]
    names = [each.name for each in real.jobs(asked, Path("model"))]
    assert names[:5] == [
        "chain_sum-all-0",
        "chain_sum-trl-0",
        "number_format-all-0",
        "number_format-trl-0",
        "chain_sum-all-1",
    ]
    assert names[8:] == ["chain_sum-lora-0", "number_format-lora-0", "chain_sum-lora-1", "number_format-lora-1"]
    assert {each.kind: each.steps for each in real.jobs(asked, Path("model"))} == {
        "chain_sum": 120,
        "number_format": 80,
    }


def learned(way: str, seed: int, end_s: float, *rights: str) -> dict[str, Any]:
    points = [
        {"step": 20 * n, "seconds": end_s * n / (len(rights) - 1), "tokens": 1000.0 * n, "right": right}
        for n, right in enumerate(rights)
    ]
    return {
        "name": f"number_format-{way}-{seed}", "kind": "number_format", "way": way, "seed": seed, "curve": points,
        "train_s": end_s, "whole_s": end_s + 50, "tokens": 2000.0, "gpu": "a GPU", "beside": 1, "warm": True,
    }  # fmt: skip


def test_the_table_says_when_trl_s_accuracy_was_reached_and_how_much_sooner():
    """TRL comes to 50 %; Tandem to 75 % at the end, and to 50 % two thirds of the way from 25 %. If TRL was at 50 %
    halfway and stayed there, that is when it came to it."""
    none, half, most = "1" * 10 + "0" * 30, "1" * 20 + "0" * 20, "1" * 30 + "0" * 10
    ours, trl = learned("all", 0, 60.0, none, none, most), learned("trl", 0, 120.0, none, none, half)
    assert reached(mean_curve([ours]), 0.5) == pytest.approx(45.0)
    assert reached(mean_curve([trl]), 0.75) is None
    found = by_way({row["name"]: row for row in (ours, trl)})
    table = [line.strip("| ").split(" | ") for line in summary(["number_format"], found).splitlines()]
    told = dict(zip(table[0], table[2], strict=True))
    assert (told["before %"], told["after %"], told["trained s"]) == ("25.0", "75.0", "60")
    assert told["s to TRL's accuracy"] == "45"
    assert told["sooner"] == "2.67 x"
    stayed = by_way({row["name"]: row for row in (ours, learned("trl", 0, 120.0, none, half, half))})
    assert " 45 | 1.33 x |" in summary(["number_format"], stayed)
    low, high = (float(each.replace("−", "-")) for each in told["against TRL, 95 %"].split(" to "))
    assert 5 < low < 25 < high < 45
    assert "| 40 | 60 | 2,000 | 75.0 | 120 | 2,000 | 50.0 |" in curves("number_format", found)


def test_means_of_seeds_are_compared_though_a_seed_never_came():
    """TRL's mean ends at 50 %, to which its second seed never comes. Ours: 50 and 37.5 % halfway, 100 and 50 % in the
    end, so the mean is at 43.75 % after 30 s and comes to 50 % at 36 s."""
    rights = {
        name: "".join("1" if n < of else "0" for n in range(16)) for name, of in (("some", 6), ("half", 8), ("all", 16))
    }
    none, some, half, all_ = "0" * 16, rights["some"], rights["half"], rights["all"]
    ours = [learned("all", 0, 60.0, none, half, all_), learned("all", 1, 60.0, none, some, half)]
    trl = [learned("trl", 0, 100.0, none, half, all_), learned("trl", 1, 120.0, none, none, none)]
    table = summary(["number_format"], by_way({row["name"]: row for row in ours + trl}))
    assert " | 36 | 45 (30 to 60) | 3.06 x | 3.17 x |" in table
    assert " | 110 | 50, 1 of 2 seeds |" in table
    never = summary(
        ["number_format"], by_way({row["name"]: row for row in [learned("all", 0, 9.0, none, some), trl[0]]})
    )
    assert " | never | never |" in never
    assert " x |" not in never


def test_an_interval_over_seeds_is_welch_s():
    """Of 1, 2, 3 and 2, 4, 6: the variances of the means are 1/3 and 4/3, so there are 2.94 degrees of freedom, taken
    as 2, and t is 4.303."""
    assert over_seeds([0.01, 0.02, 0.03], [0.02, 0.04, 0.06]) == "−3.6 to +7.6"
    assert over_seeds([0.5, 0.5], [0.6, 0.6]) == "+10.0 to +10.0"
    assert over_seeds([0.5], [0.6, 0.6]) == ""


def test_a_setting_of_the_spec_is_read_as_toml_and_is_no_setting_of_trl(asked: Any):
    assert real.setting("train.lr = 1e-5") == ("train.lr", 1e-5)
    with pytest.raises(argparse.ArgumentTypeError, match=r"train\.lr="):
        real.setting("train.lr=")
    done = {name: {"asked": asdict(Asked("chain_sum", name, 0, 1, "", ""))} for name in ("trl", "all")}
    done = {f"chain_sum-{name}-0": row for name, row in done.items()}
    wanted = Asked("chain_sum", "trl", 0, 1, "", "", settings={"train.lr": 1e-5})
    real.refuse_others(done, [wanted])
    with pytest.raises(SystemExit, match="--settings"):
        real.refuse_others(done, [replace(wanted, way="all")])


def test_a_damaged_piece_of_the_model_is_refused(tmp_path: Path):
    (tmp_path / "m.gguf.aa").write_bytes(b"half")
    (tmp_path / "SHA256").write_text("0" * 64 + "  m.gguf.aa\n")
    with pytest.raises(SystemExit, match=r"m\.gguf\.aa is damaged"):
        real.checked_parts(tmp_path)
