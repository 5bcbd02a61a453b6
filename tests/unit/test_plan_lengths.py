"""A plan knows how long the rows and prompts are that a run trains on."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tandem.build import training
from tandem.cli.main import app
from tandem.errors import SpecError
from tandem.obs.plan_vs_measured import Beside, against_plan
from tandem.obs.run_history import History, read_history
from tandem.ops.byte_sizes import shares_masked, shares_never
from tandem.protocols import Algorithm
from tandem.recipes.plan_run import plan_run
from tandem.recipes.random_checkpoints import SHAPES
from tandem.rollout.producer import task_order
from tandem.runs.planner import plan as plans
from tandem.runs.planner.calibration import machine
from tandem.runs.planner.lengths import Micro, RecordedGroup, recorded_steps
from tandem.spec.load import parse_spec, to_toml
from tandem.spec.preference import DpoSpec
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.batch_packing import make_batch
from tandem.types import Group, MicroBatch, Trajectory

WORDS = ("aa", "bbbb", "cc", "dddddddddd", "e", "ff", "ggg", "h")


def rows(path: Path, texts: Any = WORDS) -> dict[str, Any]:
    path.write_text("\n".join(json.dumps({"prompt": f"say {text[:9]}", "completion": text}) for text in texts))
    return {"kind": "file", "path": str(path), "eval_share": 0.0}


def sft(data: dict[str, Any], model: dict[str, Any] | None = None, **train: Any) -> Any:
    stage = {"steps": 3, "lr": 1e-5, "batch_size": 4, **train}
    return parse_spec(
        {"recipe": "sft", "device": "cpu", "model": model or {"preset": "tiny"}, "data": data, "train": stage}
    )


@pytest.fixture
def smollm2(tmp_path: Path) -> dict[str, Any]:
    """Config and tokenizer, no weights: all that a plan needs."""
    home = tmp_path / "smollm2"
    byte_tokenizer(48_886).save_pretrained(home)
    (home / "config.json").write_text(json.dumps(SHAPES["smollm2-135m"]))
    return {"path": str(home), "lora": {"rank": 16}}


def test_adapters_on_short_rows_fit_a_machine_that_full_micro_batches_would_not(tmp_path, smollm2):
    """With 16,384 tokens it would be 14 GiB; the run takes 1.4 (benchmarks/plan.py)."""
    spec = sft(rows(tmp_path / "rows.jsonl"), smollm2)
    (tmp_path / "spec.toml").write_text(to_toml(spec))
    told = CliRunner().invoke(app, ["plan", str(tmp_path / "spec.toml"), "--gpu", "cpu", "--memory-gib", "2"])
    assert told.exit_code == 0, told.output
    assert "8 rows were read: sequences have" in told.output
    assert not plans.plan_run(spec, gpu="cpu", memory_gib=2.0).fits


def test_a_plan_of_rows_and_prompts_leaves_torch_out_of_the_process(tmp_path, smollm2):
    (tmp_path / "spec.toml").write_text(to_toml(sft(rows(tmp_path / "rows.jsonl"), smollm2)))
    script = (
        "import sys; from tandem.recipes.plan_run import plan_run; from tandem.spec.load import load_spec; "
        f"plan = plan_run(load_spec({str(tmp_path / 'spec.toml')!r}), gpu='cpu'); "
        "assert plan.work.lengths == 'read'; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# --- the same micro-batches as the trainer's


def recording(rng: random.Random, prompt: list[int], answer: int) -> Trajectory:
    ids = prompt + [rng.randrange(256) for _ in range(answer)]
    trained = [False] * len(prompt) + [True] * answer
    return Trajectory(ids, trained, [0.0] * len(ids), [-1] * len(ids), reward=float(rng.random()))


def as_planned(micro: MicroBatch) -> Micro:
    count, width = micro.ids_BT.shape
    masked = bool((micro.segments_BT > 0).any())
    return Micro(count * width, width, len(micro.target_N), masked, count * width**2)


@pytest.mark.parametrize("pairs", [False, True], ids=["sft", "preference"])
@pytest.mark.parametrize("micro_tokens", [150, 400, 16384])
@pytest.mark.parametrize("longest", [40, 130])
@pytest.mark.parametrize("multiple", [1, 4])
def test_planned_micro_batches_are_those_that_are_trained_on(pairs, micro_tokens, longest, multiple):
    rng = random.Random(longest)
    groups: list[Group] = []
    for _ in range(11):
        prompt = [rng.randrange(256) for _ in range(rng.randint(3, longest))]
        groups.append([recording(rng, prompt, rng.randint(1, longest)) for _ in range(2 if pairs else 1)])
    shares = shares_masked(128) if pairs else shares_never
    read = [
        RecordedGroup(
            tuple(len(each.ids) for each in group),
            tuple(sum(each.trained) for each in group),
            min(each.trained.index(True) for each in group),
        )
        for group in groups
    ]
    planned = recorded_steps(
        read, steps=4, batch_size=5, micro_tokens=micro_tokens, seed=3, shares=shares, together=pairs, packed=False,
        multiple=multiple,
    )  # fmt: skip
    algorithm: Algorithm = training.preference_algorithm(DpoSpec()) if pairs else training.sft_algorithm()
    which = task_order(len(groups), 3)
    for step, found in enumerate(planned):
        taken = [groups[which(5 * step + place)] for place in range(5)]
        batch = make_batch(
            taken, algorithm, micro_tokens=micro_tokens, version=0, shares=shares, device=torch.device("cpu"),
            multiple=multiple,
        )  # fmt: skip
        assert [as_planned(micro) for micro in batch.micro] == found


# --- what is read, and what is not


def test_of_a_large_file_the_first_rows_are_read_and_the_plan_says_so(tmp_path):
    data = rows(tmp_path / "rows.jsonl", ["short"] * 2000 + ["long" * 100] * 10)
    plan = plan_run(sft(data), gpu="cpu")
    assert plan.assumed[0].startswith("the first 2,000 rows were read")
    assert plan.work.row_tokens < 40


def test_a_data_set_that_is_not_here_is_not_downloaded_and_the_plan_says_what_it_assumes():
    plan = plan_run(sft({"kind": "dataset", "name": "no/such-data"}), gpu="cpu")
    assert plan.work.lengths == "assumed"
    assert "'no/such-data' is not on this machine" in " ".join(plan.assumed)
    assert "no example has more than 2048 tokens" in " ".join(plan.assumed)


def test_rows_that_the_run_leaves_out_are_left_out(tmp_path):
    data = rows(tmp_path / "rows.jsonl", ["short", "long" * 100]) | {"max_tokens": 100, "allow_bad_rows": True}
    assert plan_run(sft(data), gpu="cpu").work.row_tokens < 40


def test_the_prompts_of_an_environment_are_read():
    train = {"steps": 5, "lr": 1e-6, "groups_per_step": 4, "group_size": 8, "max_tokens": 32}
    environment = {"name": "sort", "params": {"letters": 20}}
    spec = parse_spec({"recipe": "rl", "model": {"preset": "tiny"}, "environment": environment, "train": train})
    plan = plan_run(spec, gpu="cpu")
    # <|user|>sort abc...<|end|><|assistant|>
    assert plan.work.row_tokens - plan.work.answer_tokens == len("sort ") + 20 + 3
    assert plan_run(spec, gpu="cpu", prompt_tokens=500).work.row_tokens == 532


def test_short_answers_leave_a_decode_step_with_few_rows_until_the_longest_one_ends():
    """As many steps as one answer may have tokens, with as many rows as are left on average."""
    spec = parse_spec({
        "recipe": "rl", "model": {"preset": "tiny"}, "environment": {"name": "sort"},
        "engine": {"kind": "hf", "max_running": 512}, "precision": {"weights": "bfloat16"},
        "train": {"steps": 5, "lr": 1e-5, "groups_per_step": 32, "group_size": 16, "max_tokens": 64},
    })  # fmt: skip
    whole, half, few = (plan_run(spec, gpu="h200", answer_tokens=n).times.rollout_s for n in (64, 32, 8))
    row_s = machine("h200").decode_row_s
    assert whole - half == pytest.approx(64 * 512 / 2 * row_s, rel=0.01)
    assert half - few == pytest.approx(64 * 512 * (1 / 2 - 1 / 8) * row_s, rel=0.01)


def test_adapters_on_a_layer_that_does_not_exist_are_refused_with_the_names_that_do(tmp_path):
    spec = sft(rows(tmp_path / "rows.jsonl"), {"preset": "tiny", "lora": {"targets": ["q_proj", "nope"]}})
    with pytest.raises(SpecError, match=r"model.lora.targets = .*: nope: no linear layer .* q_proj, k_proj"):
        plan_run(spec, gpu="cpu")


def test_adapters_on_a_layer_of_one_block_are_counted_once(tmp_path):
    def adapters(*targets: str) -> int:
        spec = sft(rows(tmp_path / "rows.jsonl"), {"preset": "tiny", "lora": {"rank": 4, "targets": list(targets)}})
        return plan_run(spec, gpu="cpu").parameters["adapters"]

    assert adapters("mlp.up_proj") == 4 * adapters("layers.0.mlp.up_proj") == 4 * 4 * (128 + 512)


# --- beside what was measured


def history(home: Path, *, lengths: str, tokens: float, peak: float, train_s: float = 2.0, **plan: Any) -> History:
    work = {"lengths": lengths, "step_tokens": 1000.0}
    whole = {"gpu": "h200", "trainer_gib": 10.0, "work": work, "times": {"train_s": 3.0}, **plan}
    (home / "plan.json").write_text(json.dumps(whole))
    (home / "status.json").write_text("{}")
    row = {"step": 1, "stage": "train", "memory/peak": peak, "tokens/computed": tokens, "time/train_s": train_s}
    row["time/generate_s"] = 0.5
    (home / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return read_history(home)


def test_an_upper_bound_is_called_one_and_what_is_not_comparable_has_no_deviation(tmp_path):
    memory, tokens, seconds = against_plan(history(tmp_path, lengths="assumed", tokens=20.0, peak=2.0))
    assert memory == Beside("most memory allocated on the GPU, GiB", "at most 10", "2", "")
    assert (tokens.off_by, seconds.off_by) == ("", "")
    exceeded, *_ = against_plan(history(tmp_path, lengths="assumed", tokens=20.0, peak=12.5))
    assert exceeded.off_by == "-20 %"


def test_what_means_the_same_is_compared(tmp_path):
    memory, tokens, seconds = against_plan(history(tmp_path, lengths="read", tokens=1000.0, peak=8.0))
    assert (memory.planned, memory.off_by, tokens.off_by, seconds.off_by) == ("10", "+25 %", "+0 %", "+50 %")
    far, *_, slow = against_plan(history(tmp_path, lengths="read", tokens=1000.0, peak=0.2, train_s=12.0))
    assert (far.off_by, slow.off_by) == ("50.0 times", "1/4.0 of it")


def test_rollouts_that_a_step_does_not_wait_for_are_not_compared_with_its_wait(tmp_path):
    def compared(step_s: float) -> list[str]:
        times = {"rollout_s": 4.0, "train_s": 3.0, "sync_s": 5.0, "step_s": step_s}
        found = against_plan(history(tmp_path, lengths="read", tokens=1000.0, peak=8.0, times=times))
        return [each.what for each in found if each.what.endswith(", s")]

    assert compared(12.0) == ["rollouts, s", "training, s"]
    assert compared(8.0) == ["training, s"]


def test_a_cpu_s_memory_is_its_process_s_unless_something_else_was_there_before(tmp_path):
    alone, _, seconds = against_plan(
        history(tmp_path, lengths="read", tokens=1000.0, peak=8.0, gpu="cpu", before_gib=0.3)
    )
    assert (alone.what, alone.off_by) == ("most memory of the process, GiB", "+25 %")
    assert seconds.off_by == ""  # of another CPU
    beside, *_ = against_plan(history(tmp_path, lengths="read", tokens=1000.0, peak=8.0, gpu="cpu", before_gib=3.0))
    assert (beside.what, beside.off_by) == ("most memory of the process (3 before the run), GiB", "")
