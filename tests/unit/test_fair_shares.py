"""A user's long answers do not keep another user's short one waiting, and no answer changes by it."""

from __future__ import annotations

import asyncio

from tandem.engine.hf.engine import EmbeddedEngine
from tandem.model.presets import make_model
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Completion, Sampling

LONG = 50


def test_a_late_request_is_answered_while_those_before_it_have_hardly_begun() -> None:
    renderer = Renderer(byte_tokenizer())
    module = make_model("tiny", renderer.tokenizer, seed=0).eval()

    async def scenario() -> tuple[list[Completion], Completion, int, list[Completion]]:
        def engine() -> EmbeddedEngine:
            made = EmbeddedEngine(
                module, num_ids=256, end_ids=frozenset(), decode=renderer.decode, max_running=4, inline=True
            )
            made.version = 1
            return made

        shared, alone, told = engine(), engine(), list[int]()

        def long(number: int) -> Sampling:
            return Sampling(LONG, seed=number, share="many")

        asked = [
            asyncio.create_task(shared.generate([1, 2], long(number), on_token=lambda *_: told.append(1)))
            for number in range(6)
        ]
        while len(told) < 20:
            await asyncio.sleep(0)
        before = len(told)
        late = await shared.generate([3], Sampling(5, seed=7, share="late"))
        between = len(told) - before
        whole = await asyncio.gather(*asked)
        expected = await asyncio.gather(*(alone.generate([1, 2], long(number)) for number in range(6)))
        await shared.close()
        await alone.close()
        return [*whole], late, between, [*expected]

    whole, late, between, expected = asyncio.run(scenario())
    assert len(late.ids) == 5
    assert between < 4 * 15, "some iterations of four rows, and not until one of them ends"
    assert [each.ids for each in whole] == [each.ids for each in expected]
    assert all(len(each.ids) == LONG for each in whole)
