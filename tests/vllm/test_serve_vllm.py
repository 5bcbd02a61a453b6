"""`tandem serve --engine vllm`: adapters of one base behind names, and what shapes an answer, over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm_cpu import PYTHON

import tandem
from tandem.recipes.adapter_table import AdapterTable
from tandem.recipes.serve import load_model
from tandem.spec.engine import HfEngineSpec
from tandem.types import Completion, Sampling

sys.path.insert(0, str(Path(__file__).parents[1] / "control"))

from whole_way import ENVIRONMENT

SHARED = {"max_tokens": 8, "temperature": 0, "logprobs": True, "return_token_ids": True}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("adapters")
    (home / "ascii.py").write_text(ENVIRONMENT)
    spec = {
        "recipe": "rl", "device": "cpu", "model": {"preset": "tiny", "lora": {"rank": 4}},
        "environment": {"name": str(home / "ascii.py")}, "eval": {"tasks": 4},
        "train": {"steps": 4, "lr": 3e-2, "groups_per_step": 2, "group_size": 4, "max_tokens": 6},
        "checkpoint": {"every": 1, "keep_every": 1},
    }  # fmt: skip
    tandem.run(spec, home / "run")
    return home / "run"


class Served:
    """`tandem serve` of step 1, with step 4 beside it, and a file that may name more."""

    def __init__(self, trained: Path, home: Path) -> None:
        self.trained, self.file, ready = trained, home / "adapters.json", home / "ready.json"
        self.file.write_text("{}")
        command = [
            sys.executable, "-P", "-m", "tandem", "serve", str(trained), "--step", "1", "--name", "first",
            "--engine", "vllm", "--set", f"python={PYTHON}", "--set", "max_context=512", "--set", "max_running=8",
            "--adapter", f"last={trained}@4", "--adapters-file", str(self.file), "--adapter-slots", "3",
            "--max-rank", "8", "--port", "0", "--data-dir", str(home / "data"), "--ready-file", str(ready),
        ]  # fmt: skip
        path = os.pathsep.join([str(Path(tandem.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        self._log = (home / "log").open("wb")
        self.process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, stdout=self._log, stderr=self._log
        )
        self.until(lambda: ready.exists() or self.process.poll() is not None, 400)
        assert ready.exists(), (home / "log").read_text()[-3000:]
        token = (home / "data/token").read_text().strip()
        self.http = httpx.Client(
            base_url=json.loads(ready.read_text())["url"], headers={"Authorization": f"Bearer {token}"}, timeout=120
        )

    def until(self, true: Callable[[], Any], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def name(self, **sources: str) -> dict[str, str]:
        """Write the file, and return what the server says of it."""
        told = self.file.with_name(f"{self.file.name}.told")
        told.unlink(missing_ok=True)
        self.file.write_text(json.dumps(sources))
        self.until(told.exists)
        return {name.partition("=")[0]: why for name, why in json.loads(told.read_text()).items()}

    def chat(self, model: str = "last", **asked: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], **SHARED, **asked}
        return self.http.post("/v1/chat/completions", json=body)

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait(60)
        self._log.close()


@pytest.fixture(scope="module")
def served(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(trained, tmp_path_factory.mktemp("served"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(trained: Path) -> dict[str, Completion]:
    """What the embedded engine answers, by the step of its adapter."""

    async def play() -> dict[str, Completion]:
        model, engine = await asyncio.to_thread(load_model, trained, 0, HfEngineSpec(), thinking=False, inline=False)
        table = AdapterTable([], [f"{step}={trained}@{step}" for step in (1, 2, 3, 4)], None)
        await table.begin(engine)
        prompt, sampling = model.renderer.prompt([{"role": "user", "content": "hello"}]), Sampling(8, temperature=0)
        told = {name: await each.generate(prompt, sampling) for name, each in table.models.items()}
        told["base"] = await engine.generate(prompt, sampling)
        await engine.close()
        return told

    return asyncio.run(play())


def alike(answer: httpx.Response, expected: Completion) -> bool:
    choice = answer.json()["choices"][0]
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    return choice["token_ids"] == expected.ids and logprobs == pytest.approx(expected.logprobs, abs=2e-3)


def test_each_name_answers_as_its_adapter_does_on_the_embedded_engine(
    served: Served, expected: dict[str, Completion], trained: Path
):
    assert {each["id"] for each in served.http.get("/v1/models").json()["data"]} == {"base of run", "first", "last"}
    assert served.name(second=f"{trained}@2") == {"second": ""}
    steps = {"first": "1", "second": "2", "last": "4", "base of run": "base"}
    for name, step in steps.items():
        told = served.chat(name)
        assert alike(told, expected[step]), name
        assert not any(alike(told, other) for each, other in expected.items() if each != step)
        assert step == "base" or told.json()["weight_version"] == int(step)
    # A fourth has no slot; one that goes makes room.
    assert "all 3 slots" in served.name(second=f"{trained}@2", third=f"{trained}@3")["third"]
    assert served.chat("third").status_code == 404
    served.name()
    assert served.name(third=f"{trained}@3") == {"third": ""}
    assert alike(served.chat("third"), expected["3"])
    assert served.chat("second").status_code == 404


def test_an_adapter_whose_file_differs_from_its_seal_is_refused(served: Served, trained: Path, tmp_path: Path):
    served.name()
    (copy := tmp_path / "run").mkdir()
    shutil.copytree(trained, copy, dirs_exist_ok=True)
    weights = next((copy / "checkpoints").rglob("adapter_model.safetensors"))
    step = next(part for part in weights.parts if part.startswith("step"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    why = served.name(spoiled=f"{copy}@{int(step.removeprefix('step').strip('-_') or 0)}")["spoiled"]
    assert "is not served" in why or "no checkpoint" in why, why


def test_a_json_schema_is_followed(served: Served):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    told = served.chat(response_format=form, max_tokens=200, temperature=1, seed=3)
    assert told.status_code == 200, told.text
    choice = told.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert set(json.loads(choice["message"]["content"])) == {"n"}


def test_a_bias_and_penalties_change_what_is_sampled(served: Served):
    plain = served.chat().json()["choices"][0]["token_ids"]
    barred = served.chat(logit_bias={str(plain[0]): -100}).json()["choices"][0]["token_ids"]
    assert plain[0] not in barred
    forced = served.chat(logit_bias={str(plain[0]): 100}).json()["choices"][0]["token_ids"]
    assert set(forced) == {plain[0]}
    fewer = served.chat(logit_bias={str(plain[0]): 1.5}, presence_penalty=2, frequency_penalty=2).json()
    assert fewer["choices"][0]["token_ids"] != plain


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"top_logprobs": 2}, "top_logprobs: tokens of vLLM come with the logprob of the sampled one alone"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "vLLM takes JSON schemas only"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}, "JSON schemas"),
    ],
)
def test_what_vllm_cannot_shape_is_refused_in_words(served: Served, asked: dict[str, Any], words: str):
    told = served.chat(**asked)
    assert told.status_code in (400, 422)
    assert words in told.json()["error"]["message"]
    assert served.chat().status_code == 200


def test_a_server_whose_vllm_was_killed_ends_so_that_it_is_started_again(served: Served):
    vllm = child_of(child_of(served.process.pid))  # the one between them is its leash
    os.kill(vllm, signal.SIGKILL)
    assert served.process.wait(60) == 1


def child_of(pid: int) -> int:
    told = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True)
    return int(told.stdout.split()[0])
