"""When an engine lends its GPU's memory to the trainer, and what the run says about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.build.run_engines import sleeps
from tandem.recipes.rl import RlRun
from tandem.spec.load import parse_spec

ELSEWHERE = {"url": "http://127.0.0.1:9", "token_file": "token"}


def spec(engine: dict[str, Any], *, bridge: str = "disk", max_lag: int = 0) -> Any:
    train = {"steps": 1, "lr": 1e-4, "groups_per_step": 1, "group_size": 2, "max_tokens": 8, "max_lag": max_lag}
    return parse_spec(
        {
            "recipe": "rl", "model": {"preset": "tiny"}, "environment": {"name": "sort"}, "train": train,
            "engine": {"kind": "vllm", **engine}, "sync": {"bridge": bridge},
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "device", "more", "lends"),
    [
        ({}, "cuda", {}, True),
        ({"gpus": [0, 1], "tensor_parallel": 2}, "cuda", {}, True),
        ({"gpus": [1]}, "cuda", {}, False),
        ({}, "cpu", {}, False),
        ({}, "cuda", {"bridge": "shared"}, False),
        ({}, "cuda", {"max_lag": 1}, False),  # others sample while the trainer steps
        (ELSEWHERE, "cuda", {}, False),
        ({"sleep": "keep"}, "cuda", {}, False),
        ({"sleep": "free"}, "cuda", {"max_lag": 1}, True),
        ({"sleep": "free"}, "cpu", {}, True),  # asked for: it pauses, and says that it can no more
        ({"sleep": "free", **ELSEWHERE}, "cuda", {}, True),
    ],
)
def test_memory_is_lent_where_both_are_on_one_gpu_and_nobody_samples_meanwhile(
    engine: dict[str, Any], device: str, more: dict[str, Any], lends: bool
):
    assert sleeps(spec(engine, **more), device) is lends


def test_an_engine_of_another_kind_has_no_memory_to_lend():
    assert not sleeps(spec({"kind": "server"}), "cuda")


def started(spec: Any, noted: list[Any]) -> RlRun:
    """A run of which only `attached` is there."""
    run: Any = SimpleNamespace(attached=lambda attachment: None, note_option=lambda *note: noted.append(note))
    rl = object.__new__(RlRun)
    rl.run, rl.spec, rl._noted = run, spec, set()
    return rl


@pytest.mark.parametrize(
    ("part", "name", "kind", "field", "value"),
    [
        ("sleep", "engine.sleep", "vllm", "sleep", "free"),
        ("on_update", "requests under way", "vllm", "on_update", "continue"),
        ("rows", "requests at once", "hf", "max_running", 16),
        ("graphs", "CUDA graphs of decode steps", "hf", "eager", False),
        ("prompt_graphs", "CUDA graphs of single prompts", "hf", "eager", False),
    ],
)
def test_an_option_is_asked_for_only_by_a_field_that_the_user_wrote(
    part: str, name: str, kind: str, field: str, value: Any
):
    told = {"engines": [{part: {"requested": "it", "engaged": False, "why_not": "no room"}}]}
    written = spec({"kind": kind, field: value}, **({"bridge": "inproc"} if kind == "hf" else {}))
    left_out = spec({"kind": kind}, **({"bridge": "inproc"} if kind == "hf" else {}))
    noted: list[Any] = []
    started(written, noted).attached(told)
    started(left_out, noted).attached(told)
    started(written.only_asked(left_out.settings()), noted).attached(told)  # as if it had been chosen
    assert noted == [(name, requested, False, "no room") for requested in ("it", "auto", "auto")]


def test_a_run_says_once_whether_it_was_had():
    noted: list[Any] = []
    rl = started(spec({"sleep": "free"}), noted)
    told = {"requested": "free", "engaged": False, "why_not": "no sleep mode"}
    rl.attached({"engines": [{"boot_id": "a"}]})
    assert noted == []
    for boot_id in ("b", "c"):
        rl.attached({"engines": [{"boot_id": boot_id, "sleep": told}]})
    assert noted == [("engine.sleep", "free", False, "no sleep mode")]
    sampled = {"requested": "kept", "engaged": True, "why_not": ""}
    rl.attached({"engines": [{"boot_id": "d", "sampled": sampled, "sleep": told}]})
    assert noted[1:] == [("logprobs of rollouts", "auto", True, "")], "no field asks for it"
    chosen = {"requested": "auto", "engaged": True, "why_not": "", "note": "continue"}
    rl.attached({"engines": [{"boot_id": "d", "on_update": chosen}]})
    assert noted[2:] == [("requests under way", "auto", True, "continue")]
