"""The planner, against what a run accounts for and against what was measured on a H200."""

from __future__ import annotations

import json
import random
import tomllib
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tandem.build import built_model, training
from tandem.cli.main import app
from tandem.errors import SpecError
from tandem.ops import byte_sizes as sizes
from tandem.recipes import plan_run as recipes_plan_run
from tandem.runs.planner.calibration import machine, usd_per_hour
from tandem.runs.planner.model_shape import BYTE_VOCABULARY, read_shape, trained_tensors
from tandem.runs.planner.plan import Plan, plan_run
from tandem.runs.planner.plan_text import plan_text
from tandem.spec.algorithm import DistillSpec
from tandem.spec.load import parse_spec
from tandem.spec.model import LoraSpec, PresetModel
from tandem.spec.precision import Bfloat16Precision, Float32Precision
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.memory_accounting import size_bytes
from tandem.types import Trajectory

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
CPU = machine("cpu")
QWEN3 = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}


def checkpoint(tmp_path: Path, size: str) -> str:
    config = {
        "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": size != "8B", "max_position_embeddings": 40960, **QWEN3[size],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def sft(model: dict[str, Any], train: dict[str, Any], **other: Any) -> Any:
    data = {"kind": "file", "path": "a.jsonl"}
    return parse_spec(
        {"recipe": "sft", "model": model, "data": data, "train": {"steps": 3, "lr": 1e-5, **train}, **other}
    )


def grpo(path: str, bridge: str, **engine: Any) -> Any:
    lora = {"lora": {"rank": 16}} if bridge.startswith("adapter") else {}
    train = {"steps": 5, "lr": 1e-6, "groups_per_step": 32, "group_size": 8, "max_tokens": 512}
    return parse_spec(
        {
            "recipe": "rl", "model": {"path": path, **lora}, "precision": {"weights": "bfloat16"},
            "environment": {"name": "sort"}, "train": train, "sync": {"bridge": bridge},
            "engine": {"kind": "vllm", "max_context": 1024, "memory_share": 0.4, **engine},
        }
    )  # fmt: skip


def gib(plan: Plan, phase: str) -> float:
    return next(each.peak_gib for each in plan.phases if each.name == phase)


# --- what leaves the card unused


def test_an_engine_with_room_for_some_of_a_step_is_slow_and_the_plan_says_how_much_room_it_lacks(tmp_path):
    path = checkpoint(tmp_path, "1.7B")
    roomy, small = (plan_run(grpo(path, "shared", memory_share=share), gpu="h200") for share in (0.3, 0.1))
    assert not roomy.faster
    (told,) = small.faster
    # Of 14.0 GiB 2 are vLLM's and 3.2 the weights'; a sequence of 576 tokens takes 112 KiB each.
    assert told == "the engine holds keys and values of 142 of 256 sequences: --set engine.memory_share=0.15"
    assert small.times.rollout_s > 1.4 * roomy.times.rollout_s
    enough = plan_run(grpo(path, "shared", memory_share=0.15), gpu="h200")
    assert not enough.faster
    assert enough.times.rollout_s == roomy.times.rollout_s
    assert told in plan_text(small)


def test_no_share_is_proposed_that_does_not_fit(tmp_path):
    spec = grpo(checkpoint(tmp_path, "8B"), "shared", memory_share=0.15)
    assert not plan_run(spec, gpu="h200", memory_gib=80.0).faster


def test_replicas_hold_each_their_own(tmp_path):
    spec = grpo(checkpoint(tmp_path, "1.7B"), "broadcast", memory_share=0.1, replicas=2, gpus=[1, 2])
    assert not plan_run(spec, gpu="h200").faster
    alone = spec.model_copy(update={"engine": spec.engine.model_copy(update={"replicas": 1, "gpus": (1,)})})
    assert plan_run(alone, gpu="h200").faster
    assert plan_run(spec, gpu="h200").times.rollout_s < 0.6 * plan_run(alone, gpu="h200").times.rollout_s


def test_the_embedded_engine_s_room_is_told_in_its_own_words():
    spec = parse_spec(
        {
            "recipe": "rl", "device": "cpu", "model": {"preset": "small"}, "environment": {"name": "sort"},
            "engine": {"kind": "hf", "kv_gib": 0.01},
            "train": {"steps": 5, "lr": 1e-6, "groups_per_step": 4, "group_size": 8, "max_tokens": 64},
        }
    )  # fmt: skip
    (told,) = plan_run(spec, gpu="cpu").faster
    assert "--set engine.kv_gib=1" in told


def test_a_micro_batch_that_all_but_holds_two_groups_is_told(tmp_path):
    spec = grpo(checkpoint(tmp_path, "1.7B"), "shared")
    train = spec.train.model_copy(update={"micro_tokens": 8192})
    model = spec.model.model_copy(update={"attention": "packed"})
    spec = spec.model_copy(update={"train": train, "model": model})
    plan = plan_run(spec, gpu="h200", prompt_tokens=113, answer_tokens=512)
    assert plan.faster == ["micro-batches have 4,209 of 8,192 tokens: --set train.micro_tokens=8418"]
    fuller = spec.model_copy(update={"train": train.model_copy(update={"micro_tokens": 8418})})
    fuller = plan_run(fuller, gpu="h200", prompt_tokens=113, answer_tokens=512)
    assert (plan.work.num_micro, fuller.work.num_micro) == (32, 16)
    assert fuller.times.train_s < plan.times.train_s


# --- against what was measured on one H200 (docs/PERFORMANCE.md)


@pytest.mark.parametrize(
    ("activations", "rows", "measured_gib"), [("keep", 4, 45.52), ("selective", 4, 31.93), ("recompute", 8, 24.66)]
)
def test_the_peaks_of_1_7b_are_foretold(tmp_path, activations, rows, measured_gib):
    spec = sft(
        {"path": checkpoint(tmp_path, "1.7B"), "activations": activations},
        {"batch_size": rows, "micro_tokens": rows * 2048},
        precision={"weights": "bfloat16"},
    )
    planned = gib(plan_run(spec, gpu="h200", row_tokens=2048), "train") - machine("h200").context_gib
    assert planned == pytest.approx(measured_gib, rel=0.01)


def test_peak_and_seconds_of_an_8b_full_fine_tune_are_foretold(tmp_path):
    spec = sft(
        {"path": checkpoint(tmp_path, "8B"), "activations": "recompute"},
        {"batch_size": 1, "micro_tokens": 4096, "gradient_release": True, "optimizer": {"kind": "apollo_mini"}},
        precision={"weights": "bfloat16"},
    )
    plan = plan_run(spec, gpu="h200", row_tokens=4096)
    assert gib(plan, "train") - machine("h200").context_gib == pytest.approx(43.80, rel=0.01)
    assert plan.times.train_s == pytest.approx(1.5, rel=0.15)
    assert plan.parameters["total"] == 8_190_735_360


def test_the_card_s_memory_beside_a_vllm_awake_and_asleep_is_foretold(tmp_path):
    plan = plan_run(grpo(checkpoint(tmp_path, "0.6B"), "disk", sleep="free"), gpu="h200")
    train = next(each for each in plan.phases if each.name == "train")
    assert gib(plan, "rollout") == pytest.approx(64.7, rel=0.05)
    static = sum(train.parts[name] for name in ("weights", "master", "optimizer", "engine", "process"))
    assert static == pytest.approx(8.7, rel=0.05)
    assert static - train.parts["engine"] == pytest.approx(7.4, rel=0.05)


MEASURED = [  # of benchmarks/gpu/plan.py: tokens of an answer, GiB of trainer and card, s of rollouts and training
    ("0.6b sft full", 0.0, 39.21, 40.17, 0.00, 0.40),
    ("0.6b sft lora", 0.0, 42.62, 43.83, 0.00, 0.48),
    ("1.7b sft full", 0.0, 37.86, 41.25, 0.00, 2.31),
    ("1.7b sft lora", 0.0, 39.21, 40.71, 0.00, 2.31),
    ("8b sft full", 0.0, 45.54, 46.82, 0.00, 1.85),
    ("8b sft lora", 0.0, 51.74, 52.96, 0.00, 1.28),
    ("0.6b grpo full", 216.3, 43.64, 96.00, 2.90, 1.40),
    ("0.6b grpo lora", 212.5, 46.27, 53.08, 4.36, 1.73),
    ("1.7b grpo full", 123.4, 34.38, 87.12, 2.79, 1.55),
    ("1.7b grpo lora", 121.7, 37.78, 55.08, 3.82, 1.60),
]  # fmt: skip
SFT_CASES = {
    "0.6b": ("0.6B", "keep", "keep", 16, 1024, 16384), "1.7b": ("1.7B", "selective", "keep", 32, 0, 8192),
    "8b": ("8B", "recompute", "selective", 8, 1024, 8192),
}  # fmt: skip


def measured_case(name: str, path: Path) -> Any:
    shape, recipe, kind = name.split()
    size, full, adapters, batch_size, row_tokens, micro = SFT_CASES[shape]
    lora = {"lora": {"rank": 16}} if kind == "lora" else {}
    model = {"path": checkpoint(path, size), "activations": adapters if lora else full, **lora}
    train: dict[str, Any] = {
        "steps": 3,
        "lr": 1e-6,
        "micro_tokens": micro // 2 if (shape, kind) == ("8b", "lora") else micro,
    }
    if (shape, kind) == ("8b", "full"):
        train |= {"gradient_release": True, "optimizer": {"kind": "apollo_mini"}}
    whole = {"model": model, "precision": {"weights": "bfloat16"}}
    if recipe == "sft":
        data = {"kind": "file", "path": "a.jsonl", "max_tokens": row_tokens or 2048}
        spec = {**whole, "recipe": "sft", "data": data, "train": {**train, "batch_size": batch_size}}
        return parse_spec(spec), {"row_tokens": row_tokens}
    train |= {"groups_per_step": 16, "group_size": 8, "max_tokens": 512}
    bridge = "adapter_broadcast" if lora else "shared"
    spec = {
        **whole, "recipe": "rl", "environment": {"name": "sort"}, "train": train, "sync": {"bridge": bridge},
        "engine": {"kind": "vllm", "max_context": 1024, "memory_share": 0.35}, "eval": {"tasks": 2},
    }  # fmt: skip
    return parse_spec(spec), {"prompt_tokens": 112}


@pytest.mark.parametrize(("name", "answer", "trainer", "card", "rollout_s", "train_s"), MEASURED)
def test_memory_and_seconds_of_ten_runs_on_one_h200_are_foretold(
    tmp_path, name, answer, trainer, card, rollout_s, train_s
):
    spec, told = measured_case(name, tmp_path)
    plan = plan_run(spec, gpu="h200", memory_gib=140.4, answer_tokens=answer, **told)
    assert plan.trainer_gib == pytest.approx(trainer, rel=0.05)
    assert plan.peak_gib == pytest.approx(card, rel=0.06)
    assert plan.times.rollout_s == pytest.approx(rollout_s, rel=0.15)
    assert plan.times.train_s == pytest.approx(train_s, rel=0.15)


def test_a_teacher_counts(tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    spec = grpo(checkpoint(small, "0.6B"), "shared")
    taught = spec.model_copy(update={"algorithm": DistillSpec(teacher=checkpoint(large, "1.7B"))})
    alone, beside = plan_run(spec, gpu="h200"), plan_run(taught, gpu="h200")
    assert beside.trainer_gib - alone.trainer_gib == pytest.approx(1_720_574_976 * 2 / 2**30, rel=0.01)
    assert beside.times.train_s > alone.times.train_s
    assert beside.least_gib > alone.least_gib


# --- against what a run makes and accounts for


OPTIMIZERS: list[dict[str, str]] = [
    *(
        {"kind": kind}
        for kind in ("adamw", "adamw_8bit", "adamw_offload", "adafactor", "muon", "apollo", "apollo_mini")
    ),
    {"kind": "apollo", "tables": "adamw_8bit"},
]


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: " ".join(each.values()))
@pytest.mark.parametrize("precision", [Float32Precision(), Bfloat16Precision()], ids=["fp32", "bf16"])
def test_what_a_step_accounts_for_and_what_is_saved_are_planned(tmp_path, precision, optimizer, lora):
    rows, length = 4, 64
    spec = sft(
        {"preset": "tiny", **({"lora": lora.model_dump()} if lora else {})},
        {"batch_size": rows, "micro_tokens": rows * length, "optimizer": optimizer},
        precision={"weights": precision.weights},
    )
    model = built_model.model(spec.model, precision, 0, torch.device("cpu"))
    trainer = training.trainer(spec.train, model, training.sft_algorithm(), 0, 0)
    found = trainer.step(batch(spec, model, rows, length))
    plan = plan_run(spec, gpu="cpu", row_tokens=length)
    train = next(each for each in plan.phases if each.name == "train")
    for part in ("weights", "master", "optimizer", "activations", "gradients", "logits"):
        assert train.parts[part] == pytest.approx(found[f"memory/{part}"], rel=0.01, abs=5e-5), part
    held = train.peak_gib - train.parts["process"] - train.parts["freed"]
    assert held == pytest.approx(found["memory/accounted"], rel=0.1)
    trainer.snapshot()(tmp_path)
    sizes = {path.name: size_bytes(load_file(path).values()) for path in tmp_path.rglob("*.safetensors")}
    assert plan.checkpoint_gib * 2**30 == pytest.approx(sum(sizes.values()), rel=0.01)
    copied = sizes["weights.safetensors"] + sizes["optimizer.safetensors"]
    assert plan.copied_gib * 2**30 == pytest.approx(copied, rel=0.01)


def test_room_for_checkpoints_is_planned_where_they_are_saved_beside_training():
    """12 bytes a weight in fp32 with AdamW."""

    def planned(**checkpoint: int) -> Plan:
        return plan_run(sft({"preset": "medium"}, {"steps": 20}, checkpoint=checkpoint), gpu="cpu")

    never, often, once = planned(every=0), planned(every=10), planned(every=20)
    copies = 12 * never.parameters["total"] / 2**30
    assert never.copied_gib == never.checkpoint_gib == 0
    assert gib(often, "train") - gib(never, "train") == pytest.approx(copies, rel=0.001)
    assert often.least_gib - never.least_gib == pytest.approx(copies, rel=0.001)
    assert gib(once, "train") == gib(never, "train")  # when it is saved nobody trains any more
    save = next(each for each in once.phases if each.name == "save")
    always = save.parts["weights"] + save.parts["optimizer"]
    assert save.peak_gib == pytest.approx(always + copies + CPU.context_gib, rel=0.001)


def batch(spec: Any, model: built_model.BuiltModel, rows: int, length: int) -> Any:
    rng = random.Random(0)
    trained, zeros = [False] + [True] * (length - 1), [0.0] * length
    groups = [
        [Trajectory([rng.randrange(256) for _ in range(length)], trained, zeros, [-1] * length)] for _ in range(rows)
    ]
    return training.batches(spec.train, model, training.sft_algorithm())(groups, 0)


@pytest.mark.parametrize("preset", ["tiny", "small", "medium"])
@pytest.mark.parametrize("lora", [None, LoraSpec(rank=8)])
def test_every_trained_tensor_is_known_by_its_shape(preset, lora):
    spec = PresetModel(preset=preset, lora=lora)
    policy = built_model.model(spec, Float32Precision(), 0, torch.device("cpu")).policy
    ours = sorted(tuple(tensor.shape) for _, tensor in policy.trainable())
    assert sorted(dims for dims, _ in trained_tensors(read_shape(spec), lora)) == ours
    assert len(byte_tokenizer()) == BYTE_VOCABULARY


def test_a_merged_copy_of_the_model_is_planned_where_adapters_are_exported(tmp_path):
    lora = {"path": checkpoint(tmp_path, "1.7B"), "lora": {"rank": 16}}
    plan = plan_run(sft(lora, {"batch_size": 1}), gpu="h200", row_tokens=16)
    export = next(each for each in plan.phases if each.name == "export")
    assert export.parts["merged copy"] == pytest.approx(1_720_574_976 * 4 / 2**30, rel=0.01)
    assert plan.peak_gib == export.peak_gib > plan.trainer_gib


def test_an_engine_in_a_process_of_its_own_is_no_part_of_the_trainer_s():
    def planned(kind: str) -> Plan:
        return plan_run(
            parse_spec(
                {
                    "recipe": "rl", "device": "cpu", "model": {"preset": "medium"}, "environment": {"name": "sort"},
                    "engine": {"kind": kind}, "sync": {"bridge": "inproc" if kind == "hf" else "disk"},
                    "train": {"steps": 5, "lr": 1e-6, "groups_per_step": 4, "group_size": 8, "max_tokens": 64},
                }
            ),
            gpu="cpu",
        )  # fmt: skip

    own, beside = planned("hf"), planned("server")
    engine = next(each for each in own.phases if each.name == "train").parts["engine"]
    assert beside.peak_gib > own.peak_gib
    assert beside.trainer_gib == pytest.approx(own.trainer_gib - engine, rel=0.001)


def test_what_the_trainer_allocates_on_a_gpu_holds_the_engine_of_its_own_process(tmp_path):
    """As `memory/peak` does: 10.4 to 10.8 GiB of runs of which the plan without the engine said 9.2."""
    train = {"steps": 5, "lr": 1e-6, "groups_per_step": 32, "group_size": 8, "max_tokens": 64}
    spec = {
        "recipe": "rl", "model": {"path": checkpoint(tmp_path, "0.6B")}, "precision": {"weights": "bfloat16"},
        "environment": {"name": "sort"}, "train": train, "engine": {"kind": "hf"}, "sync": {"bridge": "inproc"},
    }  # fmt: skip
    plan = plan_run(parse_spec(spec), gpu="h200")
    training = next(each for each in plan.phases if each.name == "train")
    assert training.parts["engine"] > 0.5
    assert plan.trainer_gib == pytest.approx(training.peak_gib - training.parts["process"], rel=0.001)


def test_where_a_host_s_memory_is_not_given_back_nothing_takes_another_part_s_place():
    parts = sizes.MemoryParts(10.0, 5.0, 2.0, 1, 1.0, 0.5, 0.5, 0.25)
    assert sizes.heaped(parts, scattered=False) == 10 + 5 + 1 + 2 + 0.25
    assert sizes.heaped(parts, scattered=True) == 10 + 2 * 5 + 1 + 2 + 0.25


def test_with_a_lag_a_step_is_shorter_than_its_parts_and_most_on_two_gpus(tmp_path):
    def planned(bridge: str, lag: int, **engine: Any) -> Any:
        spec = grpo(checkpoint(tmp_path, "1.7B"), bridge, **engine)
        return plan_run(
            spec.model_copy(update={"train": spec.train.model_copy(update={"max_lag": lag})}), gpu="h200"
        ).times

    for bridge, engine in (("broadcast", {"gpus": [1]}), ("disk", {})):
        times = planned(bridge, 0, **engine)
        assert times.step_s == times.rollout_s + times.train_s + times.sync_s
    apart, together = planned("broadcast", 1, gpus=[1]), planned("disk", 1)
    assert apart.step_s == max(apart.rollout_s, apart.train_s + apart.sync_s)
    assert together.step_s == max(together.rollout_s + together.train_s, together.train_s + together.sync_s)


def test_short_answers_are_bound_by_the_host(tmp_path):
    """530 episodes a second, however short."""
    spec = grpo(checkpoint(tmp_path, "0.6B"), "disk")
    short = spec.model_copy(update={"train": spec.train.model_copy(update={"max_tokens": 4})})
    assert plan_run(short, gpu="h200").times.rollout_s == pytest.approx(256 / 530, rel=0.02)
    assert plan_run(spec, gpu="h200").times.rollout_s > 2


def test_the_largest_micro_batch_fits_and_a_larger_one_does_not(tmp_path):
    path = checkpoint(tmp_path, "1.7B")

    def plan(tokens: int) -> Plan:
        train = {"batch_size": tokens // 16, "micro_tokens": tokens}
        return plan_run(sft({"path": path}, train), gpu="h100", row_tokens=16)

    most = plan(16).largest_micro_tokens
    assert plan(most).fits
    assert not plan(most + 1600).fits


# --- what it says


def test_what_does_not_fit_says_what_would(tmp_path):
    spec = sft({"path": checkpoint(tmp_path, "8B")}, {"batch_size": 4}, precision={"weights": "bfloat16"})
    plan = plan_run(spec, gpu="h100")
    assert not plan.fits
    assert plan.changes[-1].endswith("which fits")
    settings = [word for word in plan.changes[-1].split(":")[0].split() if "=" in word]
    assert settings
    assert "does NOT fit" in plan_text(plan)


def test_the_command_s_exit_code_says_whether_it_fits():
    told = CliRunner().invoke(app, ["plan", str(QUICKSTART), "--gpu", "cpu", "--json"])
    assert told.exit_code == 0
    said = json.loads(told.stdout)
    assert {"parameters", "phases", "times", "usd", "bridge", "largest_micro_tokens"} <= said.keys()
    assert said["parameters"]["total"] == 1_084_032
    small = CliRunner().invoke(app, ["plan", str(QUICKSTART), "--gpu", "cpu", "--memory-gib", "0.3"])
    assert small.exit_code == 1


def test_without_a_gpu_a_plan_says_that_it_is_for_another_machine(monkeypatch):
    monkeypatch.setattr(recipes_plan_run, "gpus_here", list)
    told = "this machine has no GPU, so the plan is for 'h200'; `--gpu cpu` plans for this machine"
    lines = CliRunner().invoke(app, ["plan", str(QUICKSTART), "--set", 'device="auto"']).stdout.splitlines()
    assert lines[lines.index("assumed:") + 1].strip() == told
    assert lines[-1].startswith("all steps")  # the result stands last
    assert told not in CliRunner().invoke(app, ["plan", str(QUICKSTART), "--gpu", "cpu"]).stdout


def test_a_plan_says_that_it_does_not_read_arguments_of_vllm(tmp_path):
    path, told = checkpoint(tmp_path, "0.6B"), "a plan does not read engine.arguments"
    given = plan_run(grpo(path, "disk", arguments=["--max-num-batched-tokens", "16384"]), gpu="h200").assumed
    assert any(each.startswith(told) for each in given)
    assert not any(each.startswith(told) for each in plan_run(grpo(path, "disk"), gpu="h200").assumed)


def test_a_price_table_of_one_s_own_is_taken(tmp_path):
    table = tmp_path / "prices.toml"
    table.write_text("h200 = 100.0\n")
    spec = parse_spec(tomllib.loads(QUICKSTART.read_text()))
    plan = plan_run(spec, gpu="h200", prices=table)
    assert plan.usd == pytest.approx(plan.times.steps_s / 36)
    table.write_text("h200 = -1\n")
    with pytest.raises(SpecError, match="dollars an hour"):
        usd_per_hour("h200", table)


def test_what_is_not_known_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 8}))
    with pytest.raises(SpecError, match="'mamba' are not known"):
        plan_run(sft({"path": str(tmp_path)}, {}))
    with pytest.raises(SpecError, match="no figures of it"):
        plan_run(parse_spec(tomllib.loads(QUICKSTART.read_text())), gpu="tpu")


def test_the_parts_are_put_together_in_one_place():
    parts = sizes.MemoryParts(10.0, 5.0, 2.0, 1, 1.0, 1.0, 0.5, 0.25)
    assert sizes.peak(parts) == 16.5
    assert sizes.state_bytes("apollo", (8, 4), 2) == 4 * (2 * prod((2, 8)) + 2)


def test_adapters_on_layers_that_the_model_has_not_are_refused_by_name():
    spec = parse_spec(
        {
            "recipe": "rl",
            "model": {"preset": "tiny", "lora": {"targets": ["nope"]}},
            "environment": {"name": "sort"},
            "train": {"steps": 1, "lr": 1e-4, "groups_per_step": 1, "group_size": 2},
        }
    )
    with pytest.raises(SpecError, match=r"model.lora.targets = \['nope'\]: nope: no linear .*q_proj.*'all-linear'"):
        plan_run(spec, gpu="cpu")
    named = spec.model_copy(update={"model": spec.model.model_copy(update={"lora": LoraSpec(targets=("q_proj",))})})
    longer = named.model_copy(
        update={"model": spec.model.model_copy(update={"lora": LoraSpec(targets=("self_attn.q_proj",))})}
    )
    assert plan_run(named, gpu="cpu").parameters == plan_run(longer, gpu="cpu").parameters
