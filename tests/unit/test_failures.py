"""Failures against the table of rules: labelled texts, real exceptions, and what a run says of its own."""

from __future__ import annotations

import errno
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import CheckpointDamaged, CheckpointError, EngineError, ProducerDied, SpecError, StoreTimeout
from tandem.runs.failure_diagnosis import Failure, classify_end, classify_error, exits_by_class, kinds, rules

DATA = Path(__file__).with_name("data")
Labelled = tuple[str, dict[str, Any]]


class Unheard(Exception):
    """Of no kind that a rule knows."""


def labelled(name: str) -> list[Labelled]:
    table = tomllib.loads((DATA / name).read_text())
    return [(label, case) for label, cases in table.items() for case in cases]


SEEN = labelled("failure_texts.toml")


def classified(case: dict[str, Any]) -> Failure:
    return classify_end(case["text"], case.get("exit_code"))


def wrong(cases: list[Labelled]) -> list[str]:
    found = [(label, case, classified(case)) for label, case in cases]
    return [
        f"{case['text'][:90]!r} is {label}, taken for {failure.failure_class} by {failure.rule}"
        for label, case, failure in found
        if failure.failure_class != label
    ]


def test_the_texts_that_the_rules_were_made_with():
    assert len(SEEN) >= 80
    assert wrong(SEEN) == []


def test_every_class_has_its_own_exit_code_and_every_rule_its_own_name_and_a_next_step():
    codes = [kind.exit_code for kind in kinds().values()]
    assert len(set(codes)) == len(codes) == 8
    assert 0 not in codes
    names = [rule.id for rule in rules()]
    assert len(set(names)) == len(names)
    assert all(rule.next and (rule.types or rule.text or rule.exit_codes or rule.signals) for rule in rules())
    assert all(re.fullmatch(r"[a-z][a-z-]+", name) for name in names)


def test_a_process_of_ours_that_ended_without_a_word_is_of_the_class_of_its_exit_code():
    ends = {name: classify_end("", kind.exit_code) for name, kind in kinds().items()}
    assert {name: end.failure_class for name, end in ends.items()} == {name: name for name in kinds()}
    assert {name: (end.next, end.retriable) for name, end in ends.items()} == {
        name: (kind.next, kind.retriable) for name, kind in kinds().items()
    }
    assert classify_end("torch.OutOfMemoryError: CUDA out of memory", 6).failure_class == "out_of_memory"


def test_any_key_of_a_rule_that_fits_is_enough():
    killed = {classify_end("", 137).rule, classify_end("", -9).rule}
    full = {classify_end(text, 1).rule for text in ("torch.OutOfMemoryError: x", "CUDA error: out of memory")}
    assert (killed, full) == ({"killed"}, {"gpu-memory"})


def test_what_a_user_must_change_is_never_retriable():
    assert not any(rule.retriable for rule in rules() if rule.failure_class in ("user", "data", "numerics"))


def test_what_no_rule_knows_is_tried_again_only_if_no_code_raised_it():
    assert not classify_error(Unheard("nobody knows")).retriable
    assert not classify_end("Traceback (most recent call last):\nmy_env.NoSuchGameError: nobody knows", 1).retriable
    assert classify_error(OSError("nobody knows")).retriable
    assert classify_end("", 1).retriable
    assert classify_end("Fatal Python error: Segmentation fault", -11).retriable


def failed(work: Any) -> Failure:
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - of whatever kind
        return classify_error(error)
    raise AssertionError("it did not fail")


def test_real_exceptions():
    import torch

    def wrapped(cause: BaseException) -> None:
        try:
            raise cause
        except BaseException as error:
            raise ProducerDied(f"producer: {type(error).__name__}: {error}") from error

    def raises(error: BaseException) -> Any:
        def work() -> None:
            raise error

        return work

    full = OSError(errno.ENOSPC, "No space left on device")
    for work, expected in (
        (lambda: Path("/nowhere/at/all").read_text(), "user"),
        (lambda: torch.ones(2, 3) @ torch.ones(2, 3), "user"),
        (lambda: torch.empty(1 << 60), "out_of_memory"),
        (raises(SpecError("model.path = 'x': CUDA out of memory is only quoted here")), "user"),
        (raises(full), "infra_retriable"),
        (lambda: wrapped(full), "infra_retriable"),
        (lambda: wrapped(TimeoutError()), "infra_retriable"),
        (lambda: wrapped(KeyError("x")), "user"),
        (raises(StoreTimeout("store: no group in 600 s")), "stalled"),
        (raises(EngineError("engine: 'vllm serve' ended while it started: torch.OutOfMemoryError: CUDA out of memory")),
         "out_of_memory"),
        (raises(ExceptionGroup("two", [ConnectionResetError(104, "reset")])), "infra_retriable"),
        (raises(RuntimeError("nobody knows")), "user"),
        (raises(Unheard("nobody knows")), "unknown"),
    ):  # fmt: skip
        assert failed(work).failure_class == expected


def test_a_damaged_checkpoint_is_not_said_to_be_another_run_s():
    damaged = classify_error(CheckpointDamaged("checkpoints/step-3/weights.safetensors: is missing"))
    assert (damaged.failure_class, damaged.rule) == ("user", "checkpoint-damaged")
    assert "put back" in damaged.next
    assert classify_error(CheckpointError("another model")).rule == "checkpoint-of-another-run"


def test_the_page_shows_the_rules_as_they_are():
    docs = Path(__file__).parents[2] / "docs"
    place = importlib.util.spec_from_file_location("make_failures", docs / "make_failures.py")
    assert place is not None
    assert place.loader is not None
    make_failures = importlib.util.module_from_spec(place)
    place.loader.exec_module(make_failures)
    assert (docs / "failures.md").read_text() == make_failures.text(), "run: python docs/make_failures.py"


def test_a_run_that_fails_says_why_and_its_exit_code_is_its_class_s(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "no answer"}]}\n')
    spec = tmp_path / "spec.toml"
    spec.write_text(
        'recipe = "sft"\n[model]\npreset = "tiny"\n[data]\nkind = "file"\npath = "rows.jsonl"\n'
        "[train]\nsteps = 1\nlr = 1e-3\n"
    )
    command = [sys.executable, "-m", "tandem", "train", str(spec), "--run-dir", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stderr
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    message = status["error"].partition(": ")[2]
    assert (done.stdout.count(message), done.stderr.count(f"tandem: {message}\n")) == (1, 1), done.stdout + done.stderr
    assert done.stderr.splitlines()[-1].startswith("tandem: next: mend the rows that the message names")
    assert done.stderr.splitlines()[-1].endswith("(failure class data, rule data)")
    assert (status["state"], status["failure"]["class"], status["failure"]["rule"]) == ("failed", "data", "data")
    event = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])
    assert (event["stage"], event["class"], event["next"]) == ("error", "data", status["failure"]["next"])


def test_ctrl_c_that_a_library_made_an_error_of_is_still_ctrl_c():
    """transformers do, when it comes while they import a model's code."""
    theirs = ModuleNotFoundError("Could not import module 'Qwen3ForCausalLM'")
    with pytest.raises(KeyboardInterrupt), exits_by_class():
        raise theirs from KeyboardInterrupt()
