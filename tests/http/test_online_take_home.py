"""A lesson that moves ordinary answers too far is not served; what was learned can be taken home."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from online_served import OnlineServer, fact, online_server
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tandem.build import built_model, training
from tandem.cli.main import app
from tandem.recipes.serve import find_model, load_model
from tandem.spec.engine import HfEngineSpec
from tandem.spec.model import PresetModel
from tandem.spec.precision import Float32Precision
from tandem.types import Sampling

pytestmark = pytest.mark.usefixtures("forked_programs")
SPEC = """
[model]
path = "{path}"
[train]
lr = 2e-3
[gates]
kl = 0.03
update_norm = 100.0
[ordinary]
written = 4
per_step = 4
max_tokens = 4
weight = 0.01
"""
TOKENS = 12
ORDINARY = resources.files("tandem.online").joinpath("ordinary_prompts.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnlineServer]:
    home = tmp_path_factory.mktemp("online")
    made = built_model.model(PresetModel(preset="tiny"), Float32Precision(), 0, built_model.pick_device("cpu"))
    training.export(made, home / "base")
    with online_server(home, SPEC.format(path=home / "base")) as server:
        yield server


def ids(server: OnlineServer) -> list[int]:
    return server.ask("apple?", TOKENS, return_token_ids=True)["choices"][0]["token_ids"]


def exported(*arguments: str) -> Path:
    done = CliRunner().invoke(app, ["export", *arguments])
    assert done.exit_code == 0, done.output
    return Path(done.output.strip())


def said_by_transformers(directory: Path, prompt_ids: list[int]) -> list[int]:
    import torch

    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.tensor([prompt_ids])
    return model.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0, len(prompt_ids) :].tolist()


def said_by_serve(source: Path, prompt_ids: list[int]) -> tuple[list[int], int]:
    path, _, version = find_model(str(source))
    _, engine = load_model(path, version, HfEngineSpec(), thinking=False, inline=True)

    async def ask() -> list[int]:
        try:
            return (await engine.generate(prompt_ids, Sampling(max_tokens=TOKENS, temperature=0.0))).ids
        finally:
            await engine.close()

    return asyncio.run(ask()), version


def test_a_lesson_that_moves_ordinary_answers_too_far_is_rejected_and_not_served(server: OnlineServer):
    before, answer = server.get("/versions/served"), ids(server)
    row = server.wait(server.teach([fact(0)], lr=1e-2, steps=30))
    assert row["state"] == "rejected"
    (gate,) = [gate for gate in row["gates"] if not gate["passed"]]
    assert (gate["gate"], gate["limit"]) == ("kl", 0.03)
    assert gate["value"] > 0.03
    assert row["why"] == f"rejected by kl: {gate['text']}"
    assert "answers to ordinary prompts moved by" in gate["text"]
    assert server.get("/versions/served") == before, "bit for bit"
    assert server.get("/versions")["active"] == before["version"]
    assert ids(server) == answer


def test_ordinary_answers_are_held_while_a_lesson_is_trained(server: OnlineServer):
    status = server.get("/train/status")
    assert status["ordinary"] == {"requested": 4, "engaged": 4, "why_not": ""}
    assert status["trainer"]["trained"] == {"requested": "auto", "engaged": "down", "why_not": ""}
    row = server.wait(server.teach([fact(3)], steps=3))
    assert row["metrics"]["loss/held"] > 0
    changed = [gate["numbers"]["total"] for gate in row["gates"] if gate["gate"] == "update_norm"]
    assert changed[0] == status["trainer"]["parameters"]
    kept = json.loads((server.data_dir / "ordinary.json").read_text())
    listed = len(ORDINARY) - len(ORDINARY) // 4
    assert listed < len(kept["said"]) <= listed + 4, "of the list three of four, and what the model wrote itself"
    body = {"model": "online", "prompt": "apple", "max_tokens": 1, "logprobs": 1}
    now, then = (server.http.post(f"{version}/v1/completions", json=body).json() for version in ("", "/versions/0"))
    assert now["choices"][0]["logprobs"] != then["choices"][0]["logprobs"], "a version of before, beside the one of now"


def test_what_was_learned_is_exported_and_served_and_says_what_the_server_said(server: OnlineServer):
    rows = [server.wait(server.teach([fact(number)], steps=4)) for number in (1, 2)]
    assert [row["state"] for row in rows] == ["published"] * 2, [row["why"] for row in rows]
    first, last = (row["version"] for row in rows)
    told = server.ask("river?", TOKENS, return_token_ids=True)
    prompt, said = told["prompt_token_ids"], told["choices"][0]["token_ids"]
    home = server.data_dir
    assert exported(str(home), "--version", str(first)) == home / "export" / f"version-{first:06d}", "while it serves"
    assert server.stop() == 0
    directory = exported(str(home))
    assert directory == home / "export" / f"version-{last:06d}"
    assert AutoTokenizer.from_pretrained(directory).decode(prompt).count("river?") == 1
    assert said_by_transformers(directory, prompt) == said
    other = exported(str(home), "--version", "anchor-0", "--out", f"{home}/out")
    assert (other / "model.safetensors").read_bytes() != (directory / "model.safetensors").read_bytes()
    assert said_by_serve(home, prompt) == (said, last)
    assert said_by_serve(home / "versions" / "anchor-000000", prompt)[1] == 0
    odd = CliRunner().invoke(app, ["export", str(home), "--version", "77"])
    assert (odd.exit_code, "version 77 does not exist" in str(odd.exception or odd.output)) == (1, True)
