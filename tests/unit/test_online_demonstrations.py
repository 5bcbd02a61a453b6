"""Answers of the served model reach the trainer after both prompts, each judged by its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import voting_model as votes
from tandem.algo import self_distill
from tandem.engine.hf.engine import EmbeddedEngine
from tandem.online.messages import Sequence1, groups_from_wire
from tandem.online.self_distillation import ANSWERS, JudgedAnswers, most_tokens, sample_answers
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer

PAIRS = [
    [Sequence1([1, 2, 3, 9, 9], 3, "11"), Sequence1([7, 7, 1, 2, 3, 9, 9], 5, "11")],
    [Sequence1([4, 9], 1, "1"), Sequence1([7, 4, 9], 2, "1")],
]


def test_each_answer_follows_both_prompts_and_is_judged_by_its_own():
    renderer = Renderer(byte_tokenizer())
    engine = EmbeddedEngine(
        votes.make(2), num_ids=len(renderer.tokenizer), end_ids=renderer.end_ids, decode=renderer.decode, inline=True
    )
    engine.version = 2

    async def run() -> list[list[Sequence1]]:
        try:
            return await sample_answers(engine, PAIRS)
        finally:
            await engine.close()

    groups = asyncio.run(run())
    assert [len(group) for group in groups] == [2 * ANSWERS] * 2
    for pair, group in zip(PAIRS, groups, strict=True):
        for own, judged in zip(group[:ANSWERS], group[ANSWERS:], strict=True):
            assert own.ids[: own.first] == pair[0].ids[: pair[0].first]
            assert judged.ids[: judged.first] == pair[1].ids[: pair[1].first]
            said = own.ids[own.first :]
            assert said == judged.ids[judged.first :]
            assert len(said) == most_tokens(len(pair[0].ids) - pair[0].first)
            assert all(votes.speaks_for(token, 2) for token in said)
            assert own.versions == [-1] * own.first + [2] * len(said)

    def score(ids: Sequence[int], first: int) -> list[float]:
        assert ids[0] == 7, "only after the judge's prompt"
        return [-float(len(ids)) - at for at in range(len(ids) - first)]

    judge = JudgedAnswers(groups_from_wire(groups, "job"), score)
    assert [len(group) for group in judge.groups] == [1] * 2 * ANSWERS
    assert len({group[0].task_id for group in judge.groups}) == 2 * ANSWERS
    credit = self_distill.make(judge, advantage_clip=0.0).credit(judge.groups)
    own = judge.groups[0][0]
    expected = [-17.0 - at - logprob for at, logprob in enumerate(own.logprobs[3:])]
    assert credit[0] == [expected]
