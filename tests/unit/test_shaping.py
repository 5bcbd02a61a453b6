"""Grammars, penalties and biases: what they do to a row, and that they do it to no other."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch
from test_requests_across_versions import play

from tandem.engine.hf.engine import EmbeddedEngine
from tandem.engine.hf.shaping import Shaper, likeliest
from tandem.errors import SamplingRefused
from tandem.model.presets import make_model
from tandem.text.grammars import Grammars
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Completion, Grammar, Sampling, Shape

RENDERER = Renderer(byte_tokenizer())
NUM_IDS = len(RENDERER.tokenizer)
PROMPT = RENDERER.prompt([{"role": "user", "content": "hi"}])
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"], "additionalProperties": False, "x-guidance": {"whitespace_flexible": False},
}  # fmt: skip
JSON = Shape(grammar=Grammar("response_format", f"start: %json {json.dumps(SCHEMA)}"))


def sampled(*samplings: Sampling, grammars: Any = None) -> list[Completion | BaseException]:
    async def all_of_them() -> Any:
        module = make_model("tiny", RENDERER.tokenizer, seed=0).eval()
        engine = EmbeddedEngine(
            module, num_ids=NUM_IDS, end_ids=RENDERER.end_ids, decode=RENDERER.decode,
            grammars=grammars or Grammars(RENDERER, NUM_IDS),
        )  # fmt: skip
        engine.version = 0
        try:
            asked = (engine.generate(PROMPT, sampling) for sampling in samplings)
            return await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await engine.close()

    return asyncio.run(all_of_them())


def test_rows_with_a_grammar_follow_it_and_the_rows_beside_them_are_as_they_were():
    free = [Sampling(40, seed=seed) for seed in range(4)]
    bound = [Sampling(60, seed=seed, shape=JSON) for seed in range(4)]
    mixed: Any = sampled(*(each for pair in zip(free, bound, strict=True) for each in pair))
    assert [each.ids for each in mixed[::2]] == [each.ids for each in sampled(*free)]  # pyright: ignore
    answers = [json.loads(RENDERER.visible(each.ids)) for each in mixed[1::2]]
    assert all(answer.keys() == {"a", "b"} and 0 <= answer["a"] <= 99 and answer["b"] in "xy" for answer in answers)
    assert len({*map(str, answers)}) > 1
    assert {each.finish_reason for each in mixed[1::2]} == {"stop"}
    forced = [each.logprobs[0] for each in mixed[1::2]]
    assert forced == [0.0] * 4, "the opening brace is the only token that may come"


def test_a_wrong_grammar_is_refused_by_its_field_before_anything_is_sampled():
    for schema, why in (('{"type": "objec"}', "objec"), ('{"not": {}}', "not"), ('{"$ref": "#"}', "response_format")):
        wrong = Shape(grammar=Grammar("response_format", f"start: %json {schema}"))
        (error,) = sampled(Sampling(5, shape=wrong))
        assert isinstance(error, SamplingRefused)
        assert str(error).startswith("response_format: ")
        assert why in str(error)


def test_without_llguidance_the_refusal_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    (error,) = sampled(Sampling(5, shape=JSON))
    assert "pip install llguidance" in str(error)


class Scripted:
    """A grammar that allows no token at place `ends`. It complains of ids that begin again without a reset."""

    def __init__(self, ends: int = 10**6, num_ids: int = NUM_IDS) -> None:
        self.ends, self.num_ids, self.read, self.resets = ends, num_ids, 0, 0

    def why_not(self, grammar: Grammar) -> str:
        return ""

    def matcher(self, grammar: Grammar) -> Scripted:
        return self

    def reset(self) -> None:
        self.read, self.resets = 0, self.resets + 1

    def allowed(self, ids: Sequence[int]) -> bytes | None:
        assert len(ids) >= self.read, "it was not reset"
        self.read = len(ids)
        return b"" if len(ids) == self.ends else b"\xff" * (self.num_ids // 8 + 1)


def test_a_grammar_that_allows_no_token_ends_its_request_and_no_other():
    stuck, free = sampled(Sampling(40, shape=JSON), Sampling(40, seed=1), grammars=Scripted(ends=3))
    assert isinstance(stuck, SamplingRefused)
    assert "after 3 tokens" in str(stuck)
    assert isinstance(free, Completion)


def test_a_matcher_begins_again_with_its_request():
    grammars = Scripted(num_ids=256)

    async def work(engine: EmbeddedEngine, publish: Callable[[int], Awaitable[None]]) -> Completion:
        made: list[int] = []
        sampling = Sampling(max_tokens=240, temperature=0.0, on_update="restart", shape=JSON)
        task = asyncio.create_task(engine.generate([1] * 5, sampling, on_token=lambda *token: made.append(token[2])))
        while len(made) < 25:
            await asyncio.sleep(0.001)
        await publish(1)
        return await task

    made = play(work, grammars=grammars)
    assert [span.version for span in made.spans] == [1]
    assert grammars.resets == 1


def test_a_thought_is_free_and_the_grammar_begins_after_it():
    matcher = Grammars(RENDERER, NUM_IDS).matcher(
        Grammar("response_format", 'start: "yes" | "no"', after="</think>")
    )  # fmt: skip
    thought = RENDERER.encode("so {be} it</think>")
    assert matcher.allowed([]) is matcher.allowed(thought[:-1]) is None
    bits = matcher.allowed(thought)
    assert bits is not None
    may = [token_id for token_id in range(NUM_IDS) if bits[token_id // 8] >> token_id % 8 & 1]
    assert [RENDERER.decode([token_id]) for token_id in may] == ["n", "y"]
    assert matcher.allowed([]) is None, "shorter ids: it begins again"


def test_penalties_biases_and_min_p_are_vllm_s():
    logits, ids = torch.tensor([2.0, -1.0, 0.5, 1.0, -3.0]), [0, 0, 2]

    def shaped(**options: Any) -> list[float]:
        sampling = Sampling(temperature=0.5, shape=Shape(**options))
        return Shaper(sampling, [1], None).shaped(logits, ids).tolist()

    assert shaped(frequency_penalty=0.5) == [1.0, -1.0, 0.0, 1.0, -3.0]
    assert shaped(presence_penalty=0.5) == [1.5, -1.0, 0.0, 1.0, -3.0]
    assert shaped(repetition_penalty=2.0) == [1.0, -2.0, 0.25, 1.0, -3.0], "the prompt counts too"
    assert shaped(logit_bias=((4, 100.0), (0, -1.0))) == [1.0, -1.0, 0.5, 1.0, 97.0]
    least = 0.05  # at temperature 0.5 the shares are e^(2 x), of the likeliest token's: 1, .0025, .0498, .135, 0
    assert [value > -torch.inf for value in shaped(min_p=least)] == [True, False, False, True, False]
    assert logits.tolist() == [2.0, -1.0, 0.5, 1.0, -3.0], "the model's logits stay"


def test_penalties_follow_an_answer_that_grows_and_begins_again():
    shape = Shape(frequency_penalty=1.0, repetition_penalty=2.0)
    shaper, logits = Shaper(Sampling(shape=shape), [3], None), torch.full((4,), 4.0)
    assert shaper.shaped(logits, []).tolist() == [4.0, 4.0, 4.0, 2.0]
    assert shaper.shaped(logits, [0]).tolist() == [1.0, 4.0, 4.0, 2.0]
    assert shaper.shaped(logits, [0, 0, 1]).tolist() == [0.0, 1.0, 4.0, 2.0]
    shaper.reset()
    assert shaper.shaped(logits, [2]).tolist() == [4.0, 4.0, 1.0, 2.0]


def test_the_likeliest_tokens_come_with_every_token():
    greedy, drawn = sampled(Sampling(5, temperature=0.0, top_logprobs=3), Sampling(5, seed=1, top_logprobs=2))
    assert isinstance(greedy, Completion)
    assert isinstance(drawn, Completion)
    assert [len(each) for each in (*greedy.alternatives, *drawn.alternatives)] == [3] * 5 + [2] * 5
    assert [each[0] for each in greedy.alternatives] == [*zip(greedy.ids, greedy.logprobs, strict=True)]
    assert all(each[0][1] >= each[1][1] for each in drawn.alternatives)
    assert likeliest(torch.tensor([-1.0, -0.5]), 9) == [(1, -0.5), (0, -1.0)]
