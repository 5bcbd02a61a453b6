"""Adapters of one base, each a model with a name: a run that trains them, `tandem serve`, and OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import tandem
from tandem.errors import RunError, SpecError, Unproven
from tandem.recipes.adapter_table import AdapterTable
from tandem.recipes.serve import load_model
from tandem.spec.engine import HfEngineSpec
from tandem.types import Sampling

sys.path.insert(0, str(Path(__file__).parents[1] / "control"))

from whole_way import ENVIRONMENT


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("adapters")
    (home / "ascii.py").write_text(ENVIRONMENT)
    spec = {
        "recipe": "rl", "device": "cpu", "model": {"preset": "tiny", "lora": {"rank": 4}},
        "environment": {"name": str(home / "ascii.py")}, "eval": {"tasks": 4},
        "train": {"steps": 3, "lr": 3e-2, "groups_per_step": 2, "group_size": 4, "max_tokens": 6},
        "checkpoint": {"every": 1, "keep_every": 1},
    }  # fmt: skip
    tandem.run(spec, home / "run")
    return home / "run"


def until(true: Callable[[], Any], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_adapter_of_the_last_step_answers_as_the_export_that_has_it_merged(trained: Path):
    async def play() -> None:
        model, engine = await asyncio.to_thread(load_model, trained, 0, HfEngineSpec(), thinking=False, inline=False)
        table = AdapterTable([], [f"first={trained}@1", f"last={trained}@3", f"export={trained}"], None)
        await table.begin(engine)
        whole, merged = await asyncio.to_thread(
            load_model, str(trained / "export"), 3, HfEngineSpec(), thinking=False, inline=False
        )
        prompt, sampling = model.renderer.prompt([{"role": "user", "content": "hello"}]), Sampling(12, seed=1)
        names = list(table.models)
        told = await asyncio.gather(*(each.generate(prompt, sampling) for each in table.models.values()))
        expected = await merged.generate(prompt, sampling)
        by_name = dict(zip(names, told, strict=True))
        assert by_name["last"].ids == by_name["export"].ids == expected.ids
        assert by_name["last"].logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert by_name["first"].logprobs != pytest.approx(expected.logprobs, abs=1e-3)
        assert [(span.version, span.count) for span in by_name["first"].spans] == [(1, len(by_name["first"].ids))]
        assert table.models["export"].version == 3
        await engine.close()
        await merged.close()
        assert whole.context == model.context

    asyncio.run(play())


def test_a_streamed_answer_of_an_adapter_has_the_likeliest_tokens_and_the_engine_goes_on(trained: Path):
    """The engine tells these tokens in another form: a model that took only the usual one would end it for all."""

    async def play() -> None:
        model, engine = await asyncio.to_thread(load_model, trained, 0, HfEngineSpec(), thinking=False, inline=False)
        table = AdapterTable([], [f"last={trained}@3"], None)
        await table.begin(engine)
        prompt = model.renderer.prompt([{"role": "user", "content": "hello"}])
        told: list[tuple[Any, ...]] = []
        asked = Sampling(6, seed=1, top_logprobs=2)
        answer = await table.models["last"].generate(prompt, asked, on_token=lambda *token: told.append(token))
        assert [(token_id, version) for token_id, _, version, _ in told] == [(each, 3) for each in answer.ids]
        assert [ranked for *_, ranked in told] == answer.alternatives
        assert [len(each) for each in answer.alternatives] == [2] * len(answer.ids)
        assert (await engine.generate(prompt, Sampling(2))).ids
        await engine.close()

    asyncio.run(play())


def test_sources_that_are_none_are_refused(trained: Path, tmp_path: Path):
    with pytest.raises(SpecError, match="write NAME=DIR"):
        AdapterTable([], ["name"], None)
    _, engine = load_model(trained, 0, HfEngineSpec(), thinking=False, inline=True)
    for source, error, why in (
        (str(tmp_path), RunError, "no LoRA adapter can be read"),
        (f"{trained}@9", Unproven, "has no checkpoint of step 9"),
    ):
        with pytest.raises(error, match=why):
            asyncio.run(AdapterTable([], [f"x={source}"], None).begin(engine))


def test_a_server_takes_adapters_on_and_gives_them_up_while_it_answers(trained: Path, tmp_path: Path):
    file, ready = tmp_path / "adapters.json", tmp_path / "ready.json"
    file.write_text(json.dumps({"two": f"{trained}@2"}))
    command = [
        sys.executable, "-P", "-m", "tandem", "serve", str(trained), "--step", "1", "--name", "support@1",
        "--port", "0", "--data-dir", str(tmp_path / "data"), "--ready-file", str(ready), "--adapters-file", str(file),
        "--adapter", f"three={trained}@3",
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=env) as server, httpx.Client(timeout=60) as client:
        try:
            until(ready.exists)
            client.base_url = json.loads(ready.read_text())["url"]
            client.headers["Authorization"] = f"Bearer {(tmp_path / 'data/token').read_text()}"

            def versions() -> dict[str, int]:
                return {each["id"]: each["weight_version"] for each in client.get("/v1/models").json()["data"]}

            def told() -> dict[str, str]:
                try:
                    told = json.loads((tmp_path / "adapters.json.told").read_text())
                except FileNotFoundError:  # one is being replaced
                    return {}
                return {name.replace(str(trained), "run"): why for name, why in told.items()}

            def ask(model: str) -> httpx.Response:
                body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
                return client.post("/v1/chat/completions", json=body)

            assert versions() == {"base of run": 1, "support@1": 1, "three": 3, "two": 2}
            answer = ask("support@1").json()
            assert (answer["model"], answer["weight_version"], answer["id"][-10:]) == ("support@1", 1, ".support@1")
            assert ask("two").json()["choices"][0]["weight_versions"][0][0] == 2
            whole = client.post("/v1/responses", json={"model": "two", "input": "hi", "max_output_tokens": 4}).json()
            assert (whole["model"], whole["weight_version"]) == ("two", 2)
            assert told() == {"two=run@2": ""}

            stone = next((trained / "checkpoints/step-3/deploy").glob("adapter_model.safetensors"))
            whole = stone.read_bytes()
            stone.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            file.write_text(json.dumps({"more": f"{trained}@2", "tampered": f"{trained}@3"}))
            until(lambda: "tampered=run@3" in told())
            assert "adapter_model.safetensors" in told()["tampered=run@3"]
            assert told()["more=run@2"] == ""
            assert versions() == {"base of run": 1, "support@1": 1, "three": 3, "more": 2}
            assert (ask("two").status_code, ask("tampered").status_code, ask("more").status_code) == (404, 404, 200)
            stone.write_bytes(whole)
        finally:
            server.terminate()
