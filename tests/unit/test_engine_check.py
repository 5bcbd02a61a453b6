"""`tandem engine check`: what is not so fails, and only what passed is recorded. Without vLLM: engines that lie."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.build import standalone_engines
from tandem.cli.main import app
from tandem.errors import EngineError, SpecError
from tandem.model.presets import make_model
from tandem.obs.sync_bench_report import Bench, BenchRow
from tandem.recipes import engine_commands, sync_bench
from tandem.recipes.engine_commands import OneCheck, check_engine
from tandem.spec.engine import VllmEngineSpec
from tandem.spec.run import RlSpec
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Completion, Sampling, Span

END, VERSION = 99, 2


class Scripted:
    """Tokens and logprobs that depend on the prompt, the seed and the place; then what `lie` makes of them."""

    version = VERSION

    def __init__(self, lie: Callable[[Completion, Sampling], Completion] = lambda told, sampling: told) -> None:
        self.lie = lie

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        seed = sampling.seed if sampling.temperature else 0
        ids = [(7 * place + 13 * seed + sum(prompt)) % 90 for place in range(sampling.max_tokens)]
        ends = [place for place, token in enumerate(ids) if token in sampling.stop_ids]
        ids = ids[: ends[0] + 1] if ends else ids
        logprobs = [-0.01 * token for token in ids]
        reason = "stop" if ends else "length"
        return self.lie(Completion(ids, logprobs, [Span(VERSION, len(ids))], reason), sampling)

    def score(self, ids: Sequence[int], first: int) -> list[float]:
        return [-0.01 * token for token in ids[first:]]


def outcomes(engine: Any) -> list[OneCheck]:
    prompts = [[5, 7, 9], [1, 2, 3, 4]]
    served = engine_commands.ServedVersion(engine, engine, prompts, frozenset({END}), 0.01)
    return asyncio.run(engine_commands.request_checks(served))


def test_an_engine_that_does_as_it_should_passes():
    found = outcomes(Scripted())
    assert {check.state for check in found} == {"passed"}
    assert "logprobs match the trainer's: passed: within 0 nats a token in each of 4 answers; 0.01 are allowed" in [
        str(check) for check in found
    ]


def one_fewer(told: Completion, sampling: Sampling) -> Completion:
    return replace(told, ids=told.ids[:-1], logprobs=told.logprobs[:-1], spans=[Span(VERSION, len(told.ids) - 1)])


def no_logprob(told: Completion, sampling: Sampling) -> Completion:
    return replace(told, logprobs=told.logprobs[:-1])


def other_logprobs(told: Completion, sampling: Sampling) -> Completion:
    return replace(told, logprobs=[value - 0.1 for value in told.logprobs])


def nan_logprobs(told: Completion, sampling: Sampling) -> Completion:
    return replace(told, logprobs=[float("nan") for _ in told.logprobs])


def one_answer_for_all_seeds(told: Completion, sampling: Sampling) -> Completion:
    return told if sampling.stop_ids else replace(told, ids=[3] * len(told.ids), logprobs=[-0.03] * len(told.ids))


def never_stops(told: Completion, sampling: Sampling) -> Completion:
    return replace(told, finish_reason="length")


def old_version(told: Completion, sampling: Sampling) -> Completion:
    return replace(told, spans=[Span(VERSION - 1, 1), Span(VERSION, len(told.ids) - 1)])


def refuses(told: Completion, sampling: Sampling) -> Completion:
    raise EngineError("engine: no")


@pytest.mark.parametrize(
    ("lie", "fails"),
    [
        (one_fewer, "as many tokens as asked for"),
        (no_logprob, "as many tokens as asked for"),
        (other_logprobs, "logprobs match the trainer's"),
        (nan_logprobs, "logprobs match the trainer's"),
        (one_answer_for_all_seeds, "a seed gives the same tokens again"),
        (never_stops, "a stop id ends the answer"),
        (old_version, "every token has the version served"),
        (refuses, "every token has the version served"),
    ],
)
def test_an_engine_that_lies_fails(lie: Any, fails: str):
    failed = {check.name: check.why for check in outcomes(Scripted(lie)) if check.state == "failed"}
    assert failed.get(fails)


def test_other_tokens_for_the_same_seed_fail():
    count = 0

    def other_each_time(told: Completion, sampling: Sampling) -> Completion:
        nonlocal count
        count += 1
        return replace(told, ids=[(token + count) % 90 for token in told.ids])

    failed = {check.name: check.why for check in outcomes(Scripted(other_each_time)) if check.state == "failed"}
    assert failed["a seed gives the same tokens again"] == "one seed gave two answers"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    found: list[list[str]] = []

    def record(python: str, version: str, checks: list[str]) -> Path:
        found.append(checks)
        return Path("record.json")

    monkeypatch.setattr(standalone_engines, "record_passed", record)
    monkeypatch.setattr(standalone_engines, "vllm_version", lambda python: "9.9.9")

    def requests(
        python: str, device: str, model: str = "", bridge: str = "", dtype: str = "auto", *_: Any
    ) -> list[OneCheck]:
        kind = "" if dtype == "auto" else f" in {dtype}"
        return [OneCheck(f"requests{model and f' to {model}'}{kind}", "passed")]

    monkeypatch.setattr(engine_commands, "_request_checks", requests)
    return found


def benched(monkeypatch: pytest.MonkeyPatch, **rows: BenchRow) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    def bench(shape: str, bridges: Sequence[str], **options: Any) -> Bench:
        asked.append(options)
        (name,) = bridges
        return Bench("cpu", shape, 1, "", 1.0, (rows.get(name, BenchRow(name, "vllm", verified=True, rounds=2)),))

    monkeypatch.setattr(sync_bench, "bench_sync", bench)
    return asked


def test_what_passed_is_recorded_and_what_cannot_be_here_is_no_failure(
    recorded: list[list[str]], monkeypatch: pytest.MonkeyPatch
):
    asked = benched(monkeypatch, shared=BenchRow("shared", "vllm", skipped="no GPU"))
    told: list[str] = []
    assert check_engine("/p/python", device="cpu", tell=told.append).passed
    assert recorded == [["requests", "broadcast", "adapter", "adapter_broadcast", "disk", "restart"]]
    assert {(each["python"], each["unchecked"], each["engine"]) for each in asked} == {("/p/python", True, "vllm")}
    assert "shared: not here: no GPU" in told
    assert len(told) == 1 + len(engine_commands.CHECKED_BRIDGES) + 1 + 1


def test_one_model_says_nothing_of_the_version(recorded: list[list[str]], monkeypatch: pytest.MonkeyPatch):
    asked = benched(monkeypatch)
    found = check_engine("/p/python", model="mine", device="cpu")
    assert [str(check) for check in found.checks] == ["disk: requests to mine: passed"]
    found = check_engine("/p/python", model="mine", device="cuda", options={"eager": True})
    assert [str(check) for check in found.checks] == ["shared: requests to mine: passed"]  # the bridge of a run there
    found = check_engine("/p/python", model="mine", bridges=["adapter", "restart"], device="cpu")
    assert [check.name for check in found.checks] == ["adapter: requests to mine", "restart: requests to mine"]
    found = check_engine("/p/python", model="mine", dtype="bfloat16", device="cpu")
    assert [check.name for check in found.checks] == ["disk: requests to mine in bfloat16"]
    assert (recorded, asked) == ([], [])


def test_a_bridge_that_cannot_be_checked_is_refused(recorded: list[list[str]]):
    with pytest.raises(SpecError, match=r"--bridge = 'inproc': there are shared, broadcast, "):
        check_engine("/p/python", model="mine", bridges=["inproc"], device="cpu")
    with pytest.raises(SpecError, match="--target: name a bridge that carries adapters"):
        check_engine("/p/python", model="mine", bridges=["disk"], targets=["q_proj"], device="cpu")
    for given in ({"bridges": ["disk"]}, {"dtype": "float32"}, {"options": {"eager": True}}):
        with pytest.raises(SpecError, match=r"--(bridge|dtype|set): name a model, too"):
            check_engine("/p/python", device="cpu", **given)


@pytest.mark.parametrize("name", ["python", "url", "replicas"])
def test_a_field_that_a_check_takes_from_elsewhere_is_refused(recorded: list[list[str]], name: str):
    with pytest.raises(SpecError, match=f"--set {name}: "):
        check_engine("/p/python", model="mine", device="cpu", options={name: "other"})


def test_the_type_and_the_engine_table_that_are_asked_for_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    found: list[RlSpec] = []

    async def note(spec: RlSpec, *_: Any, **more: Any) -> list[OneCheck]:
        found.append(spec)
        return []

    monkeypatch.setattr(standalone_engines, "vllm_version", lambda python: "9.9.9")
    monkeypatch.setattr(engine_commands, "served_and_asked", note)
    module = make_model("tiny", byte_tokenizer(), 0)
    module.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    command = ["engine", "check", "--python", "/p/python", "--model", str(tmp_path), "--device", "cpu"]
    asked = CliRunner().invoke(app, [*command, "--dtype", "bfloat16", "--set", "max_context=64", "--set", "eager=true"])
    assert asked.exit_code == 0, asked.output
    check_engine("/p/python", model=str(tmp_path), device="cpu")
    (spec, plain) = found
    assert (spec.precision.weights, plain.precision.weights) == ("bfloat16", "float32")
    assert isinstance(spec.engine, VllmEngineSpec)
    assert (spec.engine.max_context, spec.engine.eager, spec.engine.python) == (64, True, "/p/python")
    assert CliRunner().invoke(app, [*command, "--bridge", "adapter", "--target", "q_proj"]).exit_code == 0
    assert found[-1].model.lora is not None
    assert found[-1].model.lora.targets == ("q_proj",)


@pytest.mark.parametrize(
    "row", [BenchRow("disk", "vllm", error="SyncError: torn"), BenchRow("disk", "vllm", rounds=2)], ids=str
)
def test_one_failure_and_nothing_is_recorded(recorded: list[list[str]], monkeypatch: pytest.MonkeyPatch, row: BenchRow):
    benched(monkeypatch, disk=row)
    found = check_engine("/p/python", device="cpu")
    assert not found.passed
    assert recorded == []
    assert [check.name for check in found.checks if check.state == "failed"] == ["disk"]
