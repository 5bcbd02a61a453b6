"""`tandem init` writes a spec that is accepted, whatever the four answers are."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.env.load import load_environment
from tandem.errors import SpecError
from tandem.recipes.random_checkpoints import SHAPES
from tandem.runs.first_spec import FirstAnswers, first_spec, gpus, model_billions, rate, write_first_spec
from tandem.runs.planner.calibration import machine
from tandem.runs.planner.memory import needed_gib
from tandem.runs.planner.model_shape import shape_of
from tandem.runs.planner.workload import work_of
from tandem.spec.load import load_spec, parse_spec
from tandem.spec.run import PreferenceSpec, RlSpec, SftSpec

MODELS = (
    "tiny", "small", "medium", "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B",
    "meta-llama/Llama-3.2-3B-Instruct", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B",
)  # fmt: skip
TASKS = {
    "rewards": ("arithmetic", "sort", "guess", "gsm8k", "math", "my.module:Task", "task.py"),
    "imitate": ("rows.jsonl", "rows.parquet", "org/rows"),
    "prefer": ("pairs.jsonl", "org/pairs"),
}
KINDS: dict[str, type] = {"rewards": RlSpec, "imitate": SftSpec, "prefer": PreferenceSpec}
EVERY: list[tuple[Any, ...]] = [
    (goal, model, task, gpu, vllm)
    for goal, tasks in TASKS.items()
    for model, task, gpu, vllm in product(MODELS, tasks, gpus(), (False, True))
]


def test_every_combination_of_answers_is_a_valid_spec_or_too_large_by_name() -> None:
    too_large, reasons = set[tuple[str, str]](), set[str]()
    for goal, model, task, gpu, vllm in EVERY:
        try:
            text = first_spec(FirstAnswers(goal, model, task, gpu, vllm=vllm))  # type: ignore[arg-type]
        except SpecError as error:
            too_large.add((model, gpu))
            reasons.add(str(error).partition(" parameters ")[2].partition(gpu if gpu != "none" else "(")[0])
            continue
        spec = parse_spec(tomllib.loads(text))
        assert isinstance(spec, KINDS[goal])
    assert reasons == {"do not fit --gpu ", "are too many for a CPU "}
    assert ("Qwen/Qwen3-32B", "16") in too_large
    assert not {pair for pair in too_large if pair[0] in MODELS[:4]}
    assert not {pair for pair in too_large if pair[1] == "h200" and pair[0] != "Qwen/Qwen3-32B"}


SIZES = {"smollm2-135m": 0.135, "qwen3-0.6b": 0.6, "qwen3-1.7b": 1.7, "qwen3-8b": 8.2}


@pytest.mark.parametrize(("shape", "billions"), SIZES.items())
def test_what_is_written_fits_by_the_plan(shape: str, billions: float, tmp_path: Path) -> None:
    ways = set[tuple[Any, ...]]()
    for (goal, task), vllm, gpu in product(
        (("rewards", "gsm8k"), ("imitate", "rows.jsonl"), ("prefer", "rows.jsonl")), (False, True), gpus()
    ):
        if gpu == "none" or (vllm and goal != "rewards"):
            continue
        answers = FirstAnswers(goal, str(tmp_path), task, gpu, billions, vllm=vllm)  # type: ignore[arg-type]
        with suppress(SpecError):
            spec = parse_spec(tomllib.loads(first_spec(answers)))
            way = (goal, vllm, spec.model.lora and spec.model.lora.base, spec.train.micro_tokens)
            if way in ways:
                continue  # it fits a smaller GPU
            ways.add(way)
            kind = gpu if gpu in ("h100", "h200") else "h100"
            rows: dict[str, Any] = {"prompt_tokens": 64} if goal == "rewards" else {"row_tokens": 1024}
            target, model = machine(kind, gpus()[gpu]), shape_of(SHAPES[shape], shape)
            work = work_of(spec, model, target.answer_share, **rows, on_gpu=True)
            assert needed_gib(spec, model, work, target) <= target.limit_gib, answers
    assert {"rewards", "imitate", "prefer"} == {way[0] for way in ways}


def table(**answers: Any) -> dict[str, Any]:
    given = {"goal": "rewards", "model": "Qwen/Qwen3-0.6B", "task": "arithmetic", "gpu": "h200", **answers}
    return tomllib.loads(first_spec(FirstAnswers(**given)))


def test_what_fits_is_trained_and_the_engine_goes_with_it() -> None:
    whole = table(vllm=True)
    assert "lora" not in whole["model"]
    assert (whole["engine"]["kind"], whole["sync"]["bridge"]) == ("vllm", "shared")
    adapted = table(model="Qwen/Qwen3-8B", vllm=True)
    assert adapted["model"]["lora"] == {"rank": 16}
    assert adapted["sync"]["bridge"] == "adapter_broadcast"
    assert table(goal="imitate", model="Qwen/Qwen3-8B", task="rows.jsonl", gpu="32")["model"]["lora"]["base"] == "nf4"
    assert "engine" not in table()
    on_cpu = table(gpu="none")
    assert "precision" not in on_cpu
    assert on_cpu["environment"]["params"] == {"prompt": "What is {problem}?"}


def test_the_measured_rates_are_those_that_were_measured_and_larger_models_get_less() -> None:
    assert rate("rewards", 0.135, "full") == 2e-5
    assert rate("rewards", 0.135, "lora") == 3e-4
    full, adapted = ([rate("rewards", size, way) for size in (0.135, 0.6, 1.7, 8, 70)] for way in ("full", "lora"))
    assert full == [2e-5, 9e-6, 6e-6, 3e-6, 1e-6]
    assert adapted == [3e-4, 2e-4, 2e-4, 1e-4, 6e-5]


def test_the_size_is_read_from_files_or_the_name(tmp_path: Path) -> None:
    assert model_billions("Qwen/Qwen2.5-1.5B-Instruct") == 1.5
    assert model_billions("HuggingFaceTB/SmolLM2-135M-Instruct") == 0.135
    (tmp_path / "model.safetensors").write_bytes(bytes(4_000_000))
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    assert model_billions(str(tmp_path)) == pytest.approx(0.001)
    with pytest.raises(SpecError, match="give --billions"):
        model_billions("org/large-model")


def test_steps_follow_the_rows_of_the_file(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 1000)
    assert table(goal="imitate", task=str(rows))["train"]["steps"] == 94  # three times 1,000 rows, 32 at a time
    assert table(goal="prefer", task=str(rows))["train"]["steps"] == 32


def test_questions_in_a_file_become_an_environment_with_a_reward(tmp_path: Path) -> None:
    rows = tmp_path / "questions.csv"
    rows.write_text("question,answer\n" + "".join(f"What is {n} + 1?,{n + 1}\n" for n in range(40)))
    written = table(goal="rewards", task=str(rows))["environment"]
    assert len(load_environment(written["name"], written["params"]).tasks("eval")) == 8
    assert table(goal="imitate", task=str(rows))["data"] == {"kind": "file", "path": str(rows)}
    with pytest.raises(SpecError, match="made from scratch and answers no question rightly"):
        table(goal="rewards", task=str(rows), model="tiny")


def test_an_existing_file_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    out.write_text("mine")
    with pytest.raises(SpecError, match="exists already"):
        write_first_spec(FirstAnswers("rewards", "tiny", "sort", "none"), out)
    assert out.read_text() == "mine"


def test_options_answer_all_questions_and_a_missing_one_is_named_without_a_terminal(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    given = ["init", "--goal", "rewards", "--model", "Qwen/Qwen3-0.6B", "--task", "sort", "--out", str(out)]
    missing = CliRunner().invoke(app, given)
    assert str(missing.exception).startswith("--gpu: is missing, and there is no terminal to ask in; Which GPU?")
    assert not out.exists()
    done = CliRunner().invoke(app, [*given, "--gpu", "24"])
    assert done.exit_code == 0, done.output
    assert f"  tandem train {out}" in done.stdout
    assert f"  tandem plan {out} --memory-gib 24 " in done.stdout
    assert isinstance(load_spec(out), RlSpec)
    on_cpu = CliRunner().invoke(app, [*given[:-1], str(tmp_path / "cpu.toml"), "--gpu", "none"])
    assert f"  tandem plan {tmp_path / 'cpu.toml'} --gpu cpu " in on_cpu.stdout


def test_in_a_terminal_it_asks_for_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(question: str, default: str) -> str:
        asked.append(question.partition("?")[0])
        return default

    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("typer.prompt", answer)
    from tandem.cli.init import init

    init(model="tiny", task="sort", out=tmp_path / "first.toml")
    assert asked == ["What for", "Which GPU"]
    assert isinstance(load_spec(tmp_path / "first.toml"), RlSpec)


def test_a_wrong_answer_is_asked_again_at_once(tmp_path: Path) -> None:
    typed = "learn\nimitate\n25\nnone\n"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tandem.cli.init.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
        out = tmp_path / "first.toml"
        told = CliRunner().invoke(app, ["init", "--model", "tiny", "--task", "rows.jsonl", "--out", str(out)], typed)
    assert told.exit_code == 0, told.output
    assert "'learn': choose rewards, imitate, prefer\n" in told.stderr
    assert "'25': choose none, 8, " in told.stderr
    assert load_spec(out).recipe == "sft"
