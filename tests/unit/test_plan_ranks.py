"""A plan of a trainer of several ranks: GiB of each, seconds, and how many GPUs a run needs."""

from __future__ import annotations

import argparse
import json
import sys
import weakref
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.ops.byte_sizes import keeps_gathered, sums_of_ranks
from tandem.ops.parts import rows_of
from tandem.recipes import plan_run as recipes
from tandem.recipes.random_checkpoints import SHAPES
from tandem.runs.planner import plan as plans
from tandem.runs.planner import step_time
from tandem.runs.planner.calibration import machine
from tandem.runs.planner.memory import phases
from tandem.runs.planner.model_shape import read_shape, trained_tensors
from tandem.runs.planner.plan import Plan, plan_run
from tandem.runs.planner.plan_text import plan_text
from tandem.runs.planner.rank_share import Rank, sums_kept
from tandem.runs.planner.workload import work_of
from tandem.spec.hardware import Hardware, choose
from tandem.spec.load import parse_spec, to_toml
from tandem.spec.model import PresetModel
from tandem.spec.parallel import ParallelSpec, settled
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.gradient_tree import TreeSum

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
import ranks as measured_ranks

GIB = 2**30


def checkpoint(home: Path, shape: str) -> str:
    """Config and tokenizer, no weights."""
    byte_tokenizer(151_643).save_pretrained(home)
    (home / "config.json").write_text(json.dumps(SHAPES[shape]))
    return str(home)


def sft(model: dict[str, Any], ranks: int, *, shares: int = 0, train: Any = None, **other: Any) -> Any:
    train = {"steps": 3, "lr": 1e-5, "batch_size": 64, **(train or {})}
    return parse_spec(
        {
            "recipe": "sft", "model": model, "data": {"kind": "file", "path": "a.jsonl"}, "train": train,
            "parallel": {"ranks": ranks, "shares": shares}, **other,
        }
    )  # fmt: skip


def of_8b(home: Path, ranks: int, **train: Any) -> Any:
    model = {"path": checkpoint(home, "qwen3-8b"), "activations": "recompute"}
    return sft(model, ranks, train=train, precision={"weights": "bfloat16"})


def part(plan: Plan, name: str, phase: str = "train") -> float:
    return next(each.parts[name] for each in plan.phases if each.name == phase)


# --- GiB of a rank


@pytest.mark.parametrize(
    ("shape", "gpu", "ranks", "measured_gib", "more"),
    [
        ("qwen3-1.7b", "h100", 1, 48.4, {"gather": "layer", "sums": "round"}),
        ("qwen3-1.7b", "h100", 2, 31.8, {"gather": "layer", "sums": "round"}),
        ("qwen3-8b", "h200", 4, 98.5, {"rows": 58, "micro_tokens": 12288, "optimizer": "adamw_8bit"}),
    ],
)
def test_the_peaks_of_several_ranks_are_foretold(tmp_path, shape, gpu, ranks, measured_gib, more):
    """The spec of `benchmarks/gpu/ranks.py sft`, and its rows; measured in docs/PERFORMANCE.md."""
    checkpoint(tmp_path / "checkpoint", shape)
    measured_ranks.write_rows(tmp_path / "rows.jsonl", 64 * ranks + 200)
    asked = {
        "shape": shape, "compile": True, "activations": "selective", "lora": False, "deadline_s": 120.0, "steps": 6,
        "rows": 30, "micro_tokens": 16384, "optimizer": "adamw", "gather": "auto", "sums": "auto", "trace": False,
        "checkpoint": tmp_path / "checkpoint", **more,
    }  # fmt: skip
    spec = measured_ranks.spec_of(argparse.Namespace(**asked), tmp_path, ranks, batch_size=asked["rows"] * ranks)
    plan = recipes.plan_run(parse_spec(spec), gpu=gpu)
    assert plan.trainer_gib == pytest.approx(measured_gib, rel=0.02)


@pytest.mark.parametrize(
    ("asked", "float32_gib", "gpu_gib", "becomes"),
    [
        ("auto", 30.5, 139.8, "step"), ("auto", 30.5, 79.2, "running"), ("auto", 0.0, 139.8, "step"),
        ("auto", 0.0, 0.0, "round"), ("round", 0.1, 139.8, "round"), ("step", 122.0, 79.2, "step"),
        ("step", 0.1, 0.0, "step"), ("running", 0.1, 0.0, "running"),
    ],
)  # fmt: skip
def test_a_rank_adds_up_its_own_gradients_where_they_take_little_or_where_asked(asked, float32_gib, gpu_gib, becomes):
    assert sums_of_ranks(asked, float32_gib * GIB, gpu_gib * GIB) == becomes


def test_deterministic_runs_add_in_the_order_of_rounds_unless_asked():
    """Or a CPU, one GPU and two GPUs would differ by what fits."""
    for asked, deterministic, settled_to in (
        ("auto", True, "round"), ("auto", False, "auto"), ("step", True, "step"), ("round", False, "round"),
    ):  # fmt: skip
        assert settled(ParallelSpec(ranks=2, sums=asked), deterministic=deterministic).sums == settled_to


@pytest.mark.parametrize(
    ("asked", "whole_gib", "gpu_gib", "kept"),
    [
        ("auto", 15.3, 139.8, True), ("auto", 15.3, 79.2, False), ("auto", 0.1, 0.0, False),
        ("layer", 0.1, 139.8, False), ("step", 15.3, 79.2, True), ("step", 0.1, 0.0, True),
    ],
)  # fmt: skip
def test_gathered_weights_are_kept_where_they_take_little_or_where_asked(asked, whole_gib, gpu_gib, kept):
    assert keeps_gathered(asked, whole_gib * GIB, gpu_gib * GIB) == kept


@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_ranks_hold_all_rows_once(ranks):
    """Of 266 ids and vectors of 32: 4 does not divide the first, 7 neither."""
    shape = read_shape(PresetModel(preset="tiny"))
    one, several = (plan_run(sft({"preset": "tiny"}, count), gpu="cpu", row_tokens=64) for count in (1, ranks))
    tensors = [dims for dims, _ in trained_tensors(shape, None)]
    first = sum(prod((rows_of(dims[0], 0, ranks)[1], *dims[1:])) for dims in tensors)
    assert part(several, "weights") * GIB == 4 * first
    assert part(several, "optimizer") * GIB == 8 * first
    assert len(several.ranks_gib) == several.ranks == ranks
    assert list(several.ranks_gib) == sorted(several.ranks_gib, reverse=True)
    every = [sum(prod((bottom - top, *dims[1:])) for dims in tensors for top, bottom in [rows_of(dims[0], rank, ranks)])
             for rank in range(ranks)]  # fmt: skip
    assert sum(every) == one.parameters["total"]
    spread = several.ranks_gib[0] - several.ranks_gib[-1]  # weight, two moments, gradient, and 20 bytes in an update
    assert spread == pytest.approx((4 + 8 + 4 + 20) * (every[0] - every[-1]) / GIB)


def test_ranks_update_their_rows_by_an_optimizer_whose_file_says_so(tmp_path):
    """The file is read, and not run."""
    (tmp_path / "mine.py").write_text(
        "raise SystemExit\nclass Rows:\n    by_rows = True\nclass Whole:\n    by_rows: bool = False\n"
    )
    rows, whole, adamw = (
        part(plan_run(of_8b(tmp_path, 2, optimizer=optimizer), gpu="h100", row_tokens=512), "update")
        for optimizer in (
            {"kind": "own", "name": f"{tmp_path}/mine.py:Rows"}, {"kind": "own", "name": f"{tmp_path}/mine.py:Whole"},
            {"kind": "adafactor"},
        )
    )  # fmt: skip
    assert whole == adamw
    assert rows == pytest.approx(40 * 2**23 / GIB)  # a piece of an update


def test_the_owner_of_an_embedding_holds_all_of_it_in_an_update(tmp_path):
    """`Owners.most_numbers` of 8 ranks: the table, and a rank's rows of it and of what other ranks own meanwhile."""
    one, eight = (
        plan_run(of_8b(tmp_path, ranks, optimizer={"kind": "adafactor"}), gpu="h100", row_tokens=512)
        for ranks in (1, 8)
    )
    table = 151_936 * 4096
    assert part(one, "update") * GIB == pytest.approx(40 * table)
    assert 1.1 < part(eight, "update") * GIB / (40 * table) < 1.4


def test_hosts_hold_the_same_rows_each():
    parallel = {"ranks": 4, "hosts": 2}
    two, four = (plan_run(sft({"preset": "tiny"}, ranks), gpu="cpu", row_tokens=64) for ranks in (2, 4))
    apart = plan_run(sft({"preset": "tiny"}, 4, parallel=parallel), gpu="cpu", row_tokens=64)
    assert part(apart, "weights") == part(two, "weights") > part(four, "weights")
    assert part(apart, "optimizer") == part(two, "optimizer") > part(four, "optimizer")
    assert apart.times.ranks_s is None  # the link between hosts is not known


def test_adapters_are_whole_on_every_rank_and_the_base_is_by_rows(tmp_path):
    model = {"path": checkpoint(tmp_path, "qwen3-1.7b"), "lora": {"rank": 16}}
    bf16 = {"weights": "bfloat16"}
    one, four = (plan_run(sft(model, ranks, precision=bf16), gpu="h100", row_tokens=512) for ranks in (1, 4))
    adapters = one.parameters["adapters"] * 4 / GIB
    assert part(four, "weights") == pytest.approx((part(one, "weights") - adapters) / 4 + adapters, rel=1e-4)
    assert part(four, "optimizer") == part(one, "optimizer")
    assert part(four, "gradients") == part(one, "gradients")
    assert part(four, "in reduction") == 4 * part(one, "gradients")  # those of all ranks, until they are added
    by_layer, kept = (
        plan_run(sft(model, 4, precision=bf16, parallel={"ranks": 4, "gather": gather}), gpu="h100", row_tokens=512)
        for gather in ("layer", "step")
    )
    assert part(by_layer, "gathered") * GIB == 2 * (151_936 * 2048 + 2048 + 2 * layer_numbers("qwen3-1.7b"))
    assert part(four, "gathered") == part(kept, "gathered")  # 3.2 GiB are little of an H100
    assert part(kept, "gathered") * GIB == 2 * (151_936 * 2048 + 2048 + 28 * layer_numbers("qwen3-1.7b"))
    assert kept.times.ranks_s is not None
    assert by_layer.times.ranks_s is not None
    assert kept.times.ranks_s < by_layer.times.ranks_s / 20  # what is left are the gradients of adapters
    assert part(four, "merged copy", "export") < part(one, "merged copy", "export")


def layer_numbers(shape: str) -> int:
    return measured_ranks.layer_weights(shape) + 2 * SHAPES[shape]["hidden_size"] + 2 * 128


@pytest.mark.parametrize("rounds", range(1, 18))
def test_as_many_sums_are_planned_as_the_tree_keeps(rounds):
    tree, alive, most = TreeSum(), list[Any](), 0
    for _ in range(rounds):
        most = max(most, sum(each() is not None for each in alive))
        gradient = torch.zeros(1)
        alive.append(weakref.ref(gradient))
        tree.add({"w": gradient})
        del gradient
    assert sums_kept(rounds) == most


def test_shares_on_one_rank_keep_sums_too():
    train = {"batch_size": 8, "micro_tokens": 64}
    plain, shared = (
        plan_run(sft({"preset": "medium"}, 1, shares=shares, train=train), gpu="cpu", row_tokens=64)
        for shares in (1, 8)
    )
    assert shared.work.rounds == 8
    assert part(shared, "earlier gradients") == pytest.approx(3 * part(plain, "gradients"))
    assert shared.peak_gib > plain.peak_gib


def test_ranks_share_a_host_s_memory_and_have_a_gpu_each():
    spec = sft({"preset": "medium"}, 4)
    host, gpus = (plan_run(spec, gpu=kind, row_tokens=128) for kind in ("cpu", "h100"))
    assert host.peak_gib == pytest.approx(sum(host.ranks_gib), rel=0.01)
    assert host.trainer_gib == pytest.approx(host.ranks_gib[0])
    assert host.least_gib > 4 * part(host, "process")
    assert gpus.peak_gib == max(gpus.ranks_gib)
    enough = host.peak_gib / 0.95
    assert plan_run(spec, gpu="cpu", memory_gib=1.01 * enough, row_tokens=128).fits
    assert not plan_run(spec, gpu="cpu", memory_gib=0.99 * enough, row_tokens=128).fits
    assert "their processes share this host's memory" in plan_text(host)


def test_an_engine_beside_the_trainer_is_on_the_first_rank_s_gpu(tmp_path):
    spec = parse_spec(
        {
            "recipe": "rl", "model": {"path": checkpoint(tmp_path, "qwen3-1.7b"), "lora": {"rank": 16}},
            "precision": {"weights": "bfloat16"}, "environment": {"name": "sort"},
            "parallel": {"ranks": 2, "gather": "layer"},
            "train": {"steps": 5, "lr": 1e-6, "groups_per_step": 8, "group_size": 8, "max_tokens": 64},
            "sync": {"bridge": "adapter"}, "engine": {"kind": "vllm", "memory_share": 0.4},
        }
    )  # fmt: skip
    plan = plan_run(spec, gpu="h100")
    assert plan.ranks_gib[0] > 0.4 * 79.2 > 2 * plan.ranks_gib[1]
    assert plan.peak_gib == plan.ranks_gib[0]


# --- how many GPUs


def test_what_does_not_fit_on_one_gpu_says_on_how_many_it_does(tmp_path):
    plan = plan_run(of_8b(tmp_path, 1), gpu="h100", row_tokens=2048)
    ((ranks, gib),) = plan.ranks_that_fit.items()
    assert not plan.fits
    assert f"does not fit on 1, fits on {ranks} ({gib:.1f} GiB a rank)" in plan_text(plan)
    there = plan_run(of_8b(tmp_path, ranks), gpu="h100", row_tokens=2048)
    assert there.fits
    assert max(there.ranks_gib) == pytest.approx(gib)
    assert not there.ranks_that_fit
    assert f"{ranks} x h100" in plan_text(there)
    half = plan_run(of_8b(tmp_path, ranks // 2), gpu="h100", row_tokens=2048)
    assert not half.fits
    assert half.ranks_that_fit == plan.ranks_that_fit


def test_the_command_says_it_as_json_too(tmp_path):
    (tmp_path / "spec.toml").write_text(to_toml(of_8b(tmp_path, 1)))
    told = CliRunner().invoke(
        app, ["plan", str(tmp_path / "spec.toml"), "--gpu", "h100", "--row-tokens", "2048", "--json"]
    )
    said = json.loads(told.stdout)
    assert told.exit_code == 1
    assert (said["ranks"], said["fits"], list(said["ranks_that_fit"])) == (1, False, ["4"])
    assert said["ranks_that_fit"]["4"] < 76.8 < said["ranks_gib"][0] == said["peak_gib"]


def test_what_more_ranks_do_not_divide_is_said_to_stand_in_the_way(tmp_path):
    plan = plan_run(of_8b(tmp_path, 1, micro_tokens=400_000), gpu="h100", row_tokens=400_000)
    assert not plan.ranks_that_fit
    assert "nor on any number up to 8" in plan_text(plan)
    assert "GiB, most of it for activations, " in plan.why_no_ranks
    assert plan.why_no_ranks.endswith("every rank has all of it")


def test_what_several_ranks_refuse_is_said_instead(tmp_path):
    plan = plan_run(of_8b(tmp_path, 1, gradient_release=True), gpu="h100", memory_gib=20, row_tokens=2048)
    assert not plan.fits
    assert "several ranks are refused: train.gradient_release = true: with parallel.shares" in plan.why_no_ranks


def test_changes_that_ranks_refuse_are_not_proposed(tmp_path):
    plan = plan_run(of_8b(tmp_path, 2), gpu="h100", memory_gib=40, row_tokens=2048)
    assert plan.changes
    assert not any("apollo" in change for change in plan.changes)


# --- seconds


def test_ranks_take_less_time_than_one_and_what_goes_between_them_counts(tmp_path):
    spec = {ranks: of_8b(tmp_path, ranks) for ranks in (1, 2, 4)}
    times = {ranks: plan_run(each, gpu="h100", row_tokens=2048).times for ranks, each in spec.items()}
    assert times[1].ranks_s == 0.0
    for ranks in (2, 4):
        between, rounds = times[ranks].ranks_s, 8 / ranks
        layers = 36 * layer_numbers("qwen3-8b")
        root = 2 * 151_936 * 4096 + 4096
        sent = (2 * (2 * layers + root) + 2 * (layers + root)) * (ranks - 1) / ranks
        assert between is not None
        assert between == pytest.approx(rounds * sent / 194e9, rel=0.001)
        assert times[ranks].train_s - between == pytest.approx(times[1].train_s / ranks, rel=0.02)


def test_what_goes_between_ranks_is_not_calibrated_on_a_cpu_and_between_hosts(tmp_path):
    host = plan_run(sft({"preset": "tiny"}, 2), gpu="cpu", row_tokens=64)
    many = plan_run(of_8b(tmp_path, 16), gpu="h100", row_tokens=2048)
    for plan in (host, many):
        assert plan.times.ranks_s is None
        assert plan.times.not_calibrated == ("what goes between ranks",)
        assert "of which between ranks not calibrated" in plan_text(plan)
        assert plan.as_json()["times"]["ranks_s"] is None


def test_a_bridge_without_figures_is_not_calibrated(monkeypatch):
    spec = parse_spec(
        {
            "recipe": "rl", "model": {"preset": "tiny"}, "environment": {"name": "sort"},
            "engine": {"kind": "server"}, "sync": {"bridge": "disk"},
            "train": {"steps": 5, "lr": 1e-6, "groups_per_step": 4, "group_size": 8, "max_tokens": 64},
        }
    )  # fmt: skip
    known = plan_run(spec, gpu="h200")
    target = replace(machine("h200"), sync={})
    monkeypatch.setattr(plans, "machine", lambda kind, memory_gib: target)
    plan = plan_run(spec, gpu="h200")
    assert plan.times.sync_s is None
    assert plan.times.step_s == pytest.approx(known.times.step_s - (known.times.sync_s or 0.0))
    assert "sync not calibrated" in plan_text(plan)
    assert "without sync over 'disk': not calibrated on 'h200'" in plan_text(plan)
    shape = read_shape(spec.model)
    assert step_time.times(spec, shape, work_of(spec, shape, 0.7), target).not_calibrated == ("sync over 'disk'",)


def in_engine(home: Path, ranks: int) -> Any:
    return parse_spec(
        {
            "recipe": "rl", "model": {"path": checkpoint(home, "qwen3-8b")}, "environment": {"name": "guess"},
            "precision": {"weights": "bfloat16"}, "sync": {"bridge": "shared"}, "parallel": {"ranks": ranks},
            "engine": {"kind": "vllm", "tensor_parallel": ranks, "memory_share": 0.3},
            "train": {"steps": 1, "lr": 1e-6, "groups_per_step": 4, "group_size": 8, "max_tokens": 64},
        }
    )  # fmt: skip


def test_an_engine_is_counted_beside_each_rank_whose_gpu_it_has(tmp_path):
    """Also where its GPUs are named, and each GPU is paid for once."""
    spec, h200 = in_engine(tmp_path, 2), machine("h200")

    def planned(**engine: Any) -> Any:
        bridge = "shared" if len(engine["gpus"]) == engine.get("tensor_parallel", 2) == 2 else "disk"
        tables = {**spec.model_dump(mode="json"), "sync": {"bridge": bridge}}
        return plan_run(parse_spec({**tables, "engine": {**tables["engine"], "sleep": "keep", **engine}}), gpu="h200")

    unnamed, named = plan_run(spec, gpu="h200"), planned(gpus=[0, 1])
    assert named.ranks_gib == unnamed.ranks_gib
    assert named.usd == unnamed.usd
    beside = planned(gpus=[1], tensor_parallel=1, replicas=3, memory_share=0.1)
    first, second = beside.ranks_gib
    assert second - first == pytest.approx(3 * (0.1 * h200.memory_gib + h200.asleep_gib), rel=0.02)
    assert beside.peak_gib == max(first, second)
    apart = planned(gpus=[1, 2, 3], tensor_parallel=1, replicas=3, memory_share=0.1)
    assert apart.ranks_gib[1] - apart.ranks_gib[0] == pytest.approx(0.1 * h200.memory_gib + h200.asleep_gib, rel=0.02)
    assert apart.usd / apart.times.steps_s == pytest.approx(2 * beside.usd / beside.times.steps_s)


def test_ranks_in_the_memory_of_workers_have_one_beside_each_of_them(tmp_path):
    spec = in_engine(tmp_path, 2)
    plan = plan_run(spec, gpu="h200")
    assert "engaged: each of 2 ranks trains in the memory of vLLM's worker on its GPU" in plan_text(plan)
    shape, h200 = read_shape(spec.model), machine("h200")
    of_ranks = [phases(spec, shape, plan.work, h200, Rank.of(spec, number)) for number in range(2)]
    engine = [next(phase.parts["engine"] for phase in each if phase.name == "train") for each in of_ranks]
    assert engine[0] == engine[1] > 0.3 * h200.memory_gib
    assert [phase.parts["weights"] for phase in of_ranks[1] if phase.name == "train"] == [0.0]
    _, why = plans._bridge(in_engine(tmp_path, 3), shape)
    assert why.startswith("requested, not engaged: the model has 8 heads of keys and values, which cannot be dealt")


def test_a_run_s_plan_of_other_ranks_keeps_what_was_chosen_for_its_machine(tmp_path: Path):
    user = parse_spec(
        {
            "recipe": "sft", "model": {"path": checkpoint(tmp_path, "qwen3-1.7b")},
            "data": {"kind": "file", "path": str(tmp_path / "rows.jsonl")},
            "train": {"steps": 100, "lr": 1e-5, "batch_size": 64},
        }
    )  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("")
    whole, _ = choose(user, Hardware("cuda", "h200", 24.0))
    planned = [
        recipes.plan_run(spec, gpu="h200", memory_gib=24.0, row_tokens=1024, in_a_run=True)
        for spec in (whole, whole.only_asked(user.settings()))
    ]
    assert planned[0].ranks_that_fit
    assert planned[1].ranks_that_fit == planned[0].ranks_that_fit


def test_a_running_sum_takes_the_place_of_earlier_rounds(tmp_path: Path):
    model = {"path": checkpoint(tmp_path, "qwen3-1.7b")}
    (tmp_path / "a.jsonl").write_text("")
    peaks = {}
    for sums in ("round", "running"):
        spec = sft(model, 2, precision={"weights": "bfloat16"}, train={"micro_tokens": 2048})
        spec = parse_spec({**spec.as_written(), "parallel": {"ranks": 2, "sums": sums}})
        plan = recipes.plan_run(spec, gpu="h200", row_tokens=1024)
        (parts,) = (each.parts for each in plan.phases if each.name == "train")
        peaks[sums] = plan.trainer_gib, parts.get("earlier gradients", 0), parts["gradients"]
    (of_tree, earlier, gradients), (running, none, _) = peaks["round"], peaks["running"]
    assert none == 0
    assert earlier == pytest.approx(sums_kept(16) * gradients)
    assert of_tree - running == pytest.approx(earlier, rel=0.35)
