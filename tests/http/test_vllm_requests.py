"""What an OpenAI request asks of vLLM, where it is the engine: its own fields, or a refusal by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_served import EngineServed, engine_serving
from test_engine_sleep import Vllm, engine_on

from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


class Asked(Vllm):
    """Keeps what its completions are asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []

    @asynccontextmanager
    async def stream(self, path: str, body: Any, *, urgent: bool) -> Any:
        self.asked.append(body["sampling_params"])
        async with super().stream(path, body, urgent=urgent) as answer:
            yield answer


@pytest.fixture
def vllm() -> Asked:
    return Asked()


@pytest.fixture
def served(vllm: Asked, tmp_path: Path) -> Iterator[EngineServed]:
    with engine_serving(engine_on(vllm), Renderer(byte_tokenizer()), tmp_path) as made:
        yield made


def chat(served: EngineServed, **options: Any) -> tuple[int, dict[str, Any]]:
    model = served.client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    answer = served.client.post("/v1/chat/completions", json=body | options)
    return answer.status_code, answer.json()


def test_penalties_biases_and_schemas_are_vllm_s_own(served: EngineServed, vllm: Asked):
    assert chat(served)[0] == 200
    penalties = {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.5, "min_p": 0.125}
    assert chat(served, **penalties, logit_bias={"7": 2})[0] == 200
    assert chat(served, response_format=FORM)[0] == 200
    plain, penalised, formed = vllm.asked
    assert not {*penalties, "logit_bias", "structured_outputs"} & plain.keys()
    assert penalties.items() <= penalised.items()
    assert (penalised["logit_bias"], "structured_outputs" in penalised) == ({7: 2.0}, False)
    assert formed["structured_outputs"] == {"json": '{"type": "object", "properties": {"a": {"type": "integer"}}}'}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"response_format": FORM, "reasoning_effort": "high"}, "response_format"),
    ],
)
def test_what_vllm_is_not_asked_for_is_refused_by_name(served: EngineServed, vllm: Asked, options: Any, field: str):
    status, told = chat(served, **options)
    assert (status, told["error"]["param"], vllm.asked) == (400, field, [])
    assert "vLLM" in told["error"]["message"]
