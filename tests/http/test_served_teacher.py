"""A teacher that a server has: it scores given tokens as the trainer would, and is refused by name if it cannot."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
import torch
from served import MODEL, Served

from tandem.algo import distill
from tandem.errors import EngineError, EngineLost, SpecError
from tandem.model.policy import CausalPolicy
from tandem.model.presets import make_model
from tandem.ops.byte_sizes import shares_never, shares_unmasked
from tandem.protocols import Algorithm
from tandem.rollout.teacher import PROBE, ServedTeacher
from tandem.spec.algorithm import DistillSpec
from tandem.spec.load import parse_spec
from tandem.train.batch_packing import make_batch, plain_row
from tandem.train.micro_wire import pack, unpack
from tandem.types import Batch, Group, Trajectory

CPU = torch.device("cpu")
IDS = [5, 77, 3, 104, 101, 108, 108, 111, 5, 9]


@pytest.fixture(scope="module")
def policy(renderer: Any) -> CausalPolicy:
    """The model that `served` has."""
    return CausalPolicy(make_model("tiny", renderer.tokenizer, seed=0), renderer.tokenizer)


def teacher_of(served: Served, model: str = MODEL, **options: Any) -> ServedTeacher:
    return ServedTeacher(f"{served.url}/v1", model, served.token, **{"timeout_s": 20.0, **options})


def answers() -> list[Group]:
    rng = random.Random(3)
    groups: list[Group] = []
    for _ in range(2):
        prompt = [rng.randrange(250) for _ in range(4)]
        groups.append([])
        for length in (3, 6):
            ids = prompt + [rng.randrange(250) for _ in range(length)]
            trained = [False] * 4 + [True] * length
            logprobs = [0.0] * 4 + [-rng.uniform(3, 6) for _ in range(length)]
            groups[-1].append(Trajectory(ids, trained, logprobs, [-1] * 4 + [0] * length, reward=float(length)))
    return groups


def test_the_logprobs_of_a_prompt_are_those_of_the_trainer(served: Served, policy: CausalPolicy):
    body = {"model": MODEL, "prompt": [IDS, IDS[:4]], "n": 2, "max_tokens": 1, "prompt_logprobs": 0}
    choices = served.post(body, "/v1/completions").json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [10, 10, 4, 4]
    expected = policy.score(plain_row(IDS, 1, CPU), 1.0).tolist()
    for choice in choices:
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        found = [entry[str(token_id)]["logprob"] for entry, token_id in zip(rest, IDS[1:], strict=False)]
        assert found == pytest.approx(expected[: len(rest)], abs=1e-4)
    plain = served.post({"model": MODEL, "prompt": IDS, "max_tokens": 1}, "/v1/completions").json()
    assert "prompt_logprobs" not in plain["choices"][0]
    streamed = served.post({**body, "stream": True}, "/v1/completions")
    assert (streamed.status_code, "leave stream out" in streamed.text) == (400, True)


@pytest.mark.parametrize("shares", [shares_never, shares_unmasked], ids=["alone", "prompts shared"])
def test_the_loss_is_that_of_a_teacher_in_this_process(
    served: Served, policy: CausalPolicy, renderer: Any, shares: Any
):
    student = CausalPolicy(make_model("tiny", renderer.tokenizer, seed=9), renderer.tokenizer)

    def batch_of(algorithm: Algorithm, groups: list[Group]) -> Batch:
        return make_batch(groups, algorithm, micro_tokens=64, version=0, shares=shares, device=CPU)

    def loss_of(algorithm: Algorithm, batch: Batch, micro: Any) -> tuple[float, Mapping[str, float]]:
        loss, sums = algorithm.loss(student.logprobs(micro, 1.0), micro, batch.totals)
        return loss.item(), {name: torch.as_tensor(value).item() for name, value in sums.items()}

    there, here = (distill.make(DistillSpec(teacher=name, reward_coef=0.3)) for name in ("http://any/v1", "here"))
    assert (there.needs_reference, here.needs_reference) == (False, True)
    scored = answers()
    asyncio.run(teacher_of(served).score(scored))
    one, other = batch_of(there, scored), batch_of(here, answers())
    assert len(one.micro) == len(other.micro)
    sent = unpack(pack(one.micro), CPU)  # to other ranks
    for micro, mine in zip(sent, other.micro, strict=True):
        mine.reference_N = policy.score(mine, 1.0)
        (value, sums), (expected, theirs) = loss_of(there, one, micro), loss_of(here, other, mine)
        assert value == pytest.approx(expected, abs=1e-4)
        assert sums == pytest.approx(theirs, abs=1e-3)


def test_answers_without_a_reward_are_scored_too():
    spec = DistillSpec(teacher="http://any/v1")
    groups = answers()
    for each in groups[0]:
        each.teacher_logprobs = [-1.0] * len(each.ids)
    batch = make_batch(groups[:1], distill.make(spec), micro_tokens=64, version=0, shares=shares_never, device=CPU)
    assert sum(len(micro.target_N) for micro in batch.micro) == 9
    assert all(micro.reference_N is not None and micro.reference_N.eq(-1).all() for micro in batch.micro)


OPENING = "<|user|>2 + 2?<|end|><|assistant|>"


def test_a_teacher_is_found_and_compared_before_the_run(served: Served, scripted: Served, renderer: Any):
    asyncio.run(teacher_of(served, model="").begin(renderer.encode, OPENING))
    with pytest.raises(EngineError, match=r"algorithm.teacher = '.*': its tokenizer is not the policy's"):
        asyncio.run(teacher_of(served).begin(lambda text: renderer.encode(text.lower()), OPENING))
    with pytest.raises(EngineError, match=r"answered 404: .*there is no model 'other'"):
        asyncio.run(teacher_of(served, model="other").begin(renderer.encode, OPENING))
    with pytest.raises(EngineError, match=r"answered 400: .*this engine gives no logprobs of given tokens"):
        asyncio.run(teacher_of(scripted).begin(renderer.encode, OPENING))
    with pytest.raises(EngineError, match="answered 401"):
        asyncio.run(ServedTeacher(f"{served.url}/v1", MODEL, "wrong", timeout_s=5).begin(renderer.encode, OPENING))
    with pytest.raises(EngineError, match=r"answered 400: .*no room in a context of 256"):
        asyncio.run(teacher_of(served).score([[Trajectory([5] * 256, [True] * 256, [0.0] * 256, [0] * 256)]]))


class Answers:
    """Stands for a server of another make."""

    def __init__(self, *answers: Any) -> None:
        self.left = list(answers)

    async def post(self, body: Mapping[str, Any]) -> httpx.Response:
        answer = self.left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(200, json=answer)


def other_make(*told: Any) -> ServedTeacher:
    teacher = ServedTeacher("http://teacher/v1", "big", "", timeout_s=7)
    teacher.route = Answers(*told)  # pyright: ignore[reportAttributeAccessIssue]
    return teacher


def scored(entries: Any) -> dict[str, Any]:
    return {"choices": [{"text": "", "prompt_logprobs": entries}]}


def test_an_answer_of_vllm_is_read(renderer: Any):
    """It writes a beginning-of-text token before a text, and may name the likeliest token beside the one asked for."""

    def read(text: str) -> dict[str, Any]:
        return {"choices": [{"text": "", "prompt_token_ids": [256, *renderer.encode(text)]}]}

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"300": {"logprob": -0.1, "rank": 1}, str(token_id): {"logprob": logprob, "rank": 4}}

    probed = scored([None, *(entry(each, -1.0) for each in renderer.encode(PROBE)[1:])])
    teacher = other_make(read(PROBE), read(OPENING), probed, scored([None, entry(7, -2.5), entry(8, 0.0)]))
    asyncio.run(teacher.begin(renderer.encode, OPENING))
    answer = Trajectory([6, 7, 8], [False, True, True], [0.0] * 3, [0] * 3)
    asyncio.run(teacher.score([[answer]]))
    assert answer.teacher_logprobs == [0.0, -2.5, 0.0]


REFUSED = {
    "no prompt_logprobs": (scored(None), "has no prompt_logprobs, so it cannot score given tokens"),
    "too few": (scored([None, {"7": {"logprob": -1.0}}]), "3 tokens were sent, and 2 prompt_logprobs came back"),
    "other tokens": (scored([None, {"9": {"logprob": -1.0}}, None]), "the logprob of token 7 is None"),
    "above 0": (scored([None, {"7": {"logprob": 0.5}}, None]), "the logprob of token 7 is 0.5"),
    "no answer of the API": ({"detail": "no"}, "is not one of OpenAI's API"),
    "nothing in time": (TimeoutError(), r"no answer within algorithm.teacher_timeout_s = 7 s"),
    "hung up": (httpx.ConnectError("refused"), "ConnectError: refused"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_server_that_cannot_score_is_named(case: str):
    told, said = REFUSED[case]
    kind = EngineLost if isinstance(told, Exception) else EngineError
    with pytest.raises(kind, match=rf"algorithm.teacher = 'http://teacher/v1': .*{said}"):
        asyncio.run(other_make(told).score([[Trajectory([6, 7, 8], [True] * 3, [0.0] * 3, [0] * 3)]]))
    with pytest.raises(EngineError, match="its answer has no prompt_token_ids"):
        asyncio.run(other_make(scored(None)).begin(lambda text: [1], OPENING))


WRONG = {
    "temperature": ({"train": {"temperature": 0.7}}, r"train.temperature = 0.7: a served teacher gives logprobs at"),
    "revision": ({"algorithm": {"teacher_revision": "v2"}}, "teacher_revision = 'v2': has no effect"),
    "model of a directory": ({"algorithm": {"teacher": "dir", "teacher_model": "x"}}, "teacher_model = 'x': has no"),
    "two keys": ({"algorithm": {"teacher_key_env": "A", "teacher_key_file": "b"}}, "both name the server's key"),
    "no http": ({"algorithm": {"teacher": "ftp://x"}}, "no directory, no hub id, and no http"),
    "ranks": (
        {"algorithm": {"teacher": "dir"}, "parallel": {"ranks": 2}, "engine": {"kind": "server"},
         "sync": {"bridge": "broadcast"}},
        "or serve the teacher and give its URL",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(case: str):
    spec: dict[str, Any] = {
        "recipe": "rl", "model": {"preset": "tiny"}, "environment": {"name": "sort"},
        "train": {"steps": 1, "lr": 1e-3, "groups_per_step": 2, "group_size": 2},
        "algorithm": {"kind": "distill", "teacher": "http://127.0.0.1:1/v1"},
    }  # fmt: skip
    changes, said = WRONG[case]
    for table, values in changes.items():
        spec[table] = {**spec.get(table, {}), **values}
    with pytest.raises(SpecError, match=said):
        parse_spec(spec)


def test_ranks_go_with_a_served_teacher():
    spec = parse_spec({
        "recipe": "rl", "model": {"preset": "tiny"}, "environment": {"name": "sort"},
        "train": {"steps": 1, "lr": 1e-3, "groups_per_step": 2, "group_size": 2}, "engine": {"kind": "server"},
        "sync": {"bridge": "broadcast"}, "parallel": {"ranks": 2},
        "algorithm": {"kind": "distill", "teacher": "http://127.0.0.1:1/v1"},
    })  # fmt: skip
    assert spec.parallel.ranks == 2
