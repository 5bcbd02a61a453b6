"""`tandem atropos`: specs that it refuses, and the command lines of its processes. tests/atropos starts real ones."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import SpecError
from tandem.obs.claims import headline
from tandem.recipes import atropos_run, run
from tandem.spec.load import load_spec, parse_spec, to_toml

SPEC: dict[str, Any] = {
    "recipe": "rl",
    "model": {"path": "some/model"},
    "rollouts": {
        "kind": "atropos",
        "environments": ["python env.py serve --env.group_size=4 --openai.server_type sglang"],
    },
    "engine": {"kind": "server", "max_context": 96},
    "sync": {"bridge": "broadcast"},
    "train": {"steps": 3, "lr": 1e-4, "groups_per_step": 2, "group_size": 4, "max_tokens": 8, "max_lag": 1},
}


def planned(tmp_path: Path, **changes: Any) -> Any:
    return atropos_run.plan_processes(parse_spec(SPEC | changes), tmp_path / "run")


def after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_an_environment_is_given_what_it_does_not_say_itself(tmp_path: Path):
    plan = planned(tmp_path)
    plan.token_file("gateway").parent.mkdir(parents=True)
    plan.token_file("gateway").write_text("secret\n")
    (words,) = plan.rollouts.environments
    command = atropos_run.environment_command(plan, words, "policy")
    assert command[: len(shlex.split(words))] == shlex.split(words)
    assert after(command, "--openai.base_url") == f"http://127.0.0.1:{plan.ports['gateway']}/v1"
    assert after(command, "--env.rollout_server_url") == f"http://127.0.0.1:{plan.ports['rollouts']}"
    assert (after(command, "--openai.api_key"), after(command, "--openai.model_name")) == ("secret", "policy")
    assert command.count("--openai.server_type") == 1
    assert "vllm" not in command
    assert not any(word.startswith("-") and not word.startswith("--") for word in command), "theirs takes it for a flag"


def test_the_trainer_gets_the_same_spec_with_the_urls_and_a_second_start_goes_on(tmp_path: Path):
    plan = planned(tmp_path)
    command = atropos_run.trainer_command(plan)
    spec = load_spec(after(command, "train"))
    assert spec.rollouts.url == plan.url("rollouts")  # pyright: ignore
    assert spec.engine.url == plan.url("engine")  # pyright: ignore
    assert spec.train == plan.spec.train
    assert planned(tmp_path).ports == plan.ports, "its spec names them"
    plan.run_dir.mkdir()
    (plan.run_dir / "spec.toml").write_text("")
    assert after(atropos_run.trainer_command(plan), "resume") == str(plan.run_dir)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engine": {"kind": "server", "replicas": 2}}, "engine: `tandem atropos` starts one engine"),
        ({"engine": {"kind": "server", "url": "http://127.0.0.1:9", "token_file": "t"}}, "no url"),
        ({"rollouts": {"kind": "service", "url": "http://127.0.0.1:9", "token_file": "t"}}, "set it to 'atropos'"),
    ],
)
def test_what_it_cannot_start_is_refused(tmp_path: Path, changes: dict[str, Any], says: str):
    with pytest.raises(SpecError, match=says):
        planned(tmp_path, **changes)


def test_a_run_of_atropos_s_environments_is_refused_by_train_with_the_command_that_starts_it(tmp_path: Path):
    with pytest.raises(SpecError, match="start this spec with `tandem atropos SPEC`"):
        run(parse_spec(SPEC), tmp_path / "run")


def test_a_program_that_is_not_there_is_named(tmp_path: Path):
    plan = planned(tmp_path)
    processes = atropos_run.RunProcesses(plan, lambda text: None)
    with processes:
        processes.begin("gateway", [str(tmp_path / "nothing")])
        with pytest.raises(Exception, match=r"gateway: '.*nothing' ended while it started: exit code"):
            processes.wait_ready("gateway", 20)


# --- no environment of its own


def without(**changes: Any) -> dict[str, Any]:
    service = {"kind": "service", "url": "http://127.0.0.1:9", "token_file": "t"}
    return SPEC | {"rollouts": service} | changes


def test_a_run_on_a_service_needs_no_environment_and_its_spec_reads_back():
    spec = parse_spec(without())
    assert spec.environment is None  # pyright: ignore
    import tomllib

    assert parse_spec(tomllib.loads(to_toml(spec))) == spec


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollouts": {"kind": "local"}}, "environment: is missing; add it"),
        ({"eval": {"every": 2}}, "eval.every = 2: evaluations need an environment"),
        ({"warmup": {"steps": 5, "lr": 1e-3}}, "warmup.data.kind = 'demonstrations': demonstrations come from"),
    ],
)
def test_an_environment_that_is_needed_is_asked_for(changes: dict[str, Any], says: str):
    with pytest.raises(SpecError, match=says):
        parse_spec(without(**changes))


def test_a_run_that_held_nothing_out_claims_nothing_and_tells_its_training_reward():
    told = {"training_reward_first": 0.05, "training_reward_last": 0.15, "training_reward_steps": 4}
    status = {"state": "succeeded", "verdict": "undecided", "steps_done": 20, "eval": told}
    assert headline(json.loads(json.dumps(status))) == (
        "Finished after 20 steps. It was not evaluated, so there is no verdict. The mean training reward was 0.05 over "
        "the first 4 steps and 0.15 over the last 4 steps."
    )
