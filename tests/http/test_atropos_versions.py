"""Posts of an Atropos environment that samples from a gateway: versions are the engine's, or unknown."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from atropos_bodies import encoded
from atropos_served import Client, serving_atropos
from gateway_served import Gateway, gateway_serving
from served import ScriptedEngine

from tandem.rollout.atropos import version_lookup
from tandem.rollout.atropos.version_lookup import GatewayStamps
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer

PROMPT = [70, 71, 72]


@dataclass
class Both:
    client: Client
    gateway: Gateway
    engine: ScriptedEngine

    def sample(self, prompt: list[int] = PROMPT, **options: Any) -> tuple[list[int], list[float]]:
        """As VLLMServer of atroposlib asks and reads."""
        body = {"prompt": {"prompt_token_ids": prompt}, "logprobs": 0, "max_tokens": 8} | options
        answer = self.gateway.post("/generate", body)
        assert answer.status_code == 200, answer.text
        tokens = [next(iter(each[0].items())) for each in answer.json()["logprobs"][0]]
        return [int(id) for id, _ in tokens], [logprob for _, logprob in tokens]

    def ours(self, path: str, **body: Any) -> Any:
        key = {"Idempotency-Key": f"{path.replace('/', '.')}-{time.monotonic_ns()}"}
        answer = self.client.http.post(f"/v2/{path}", json=body, headers=key)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def taken(self, count: int = 1) -> list[Any]:
        return self.ours("leases", epoch=1, groups=count)["groups"]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(byte_tokenizer())


@pytest.fixture
def both(tmp_path: Path, renderer: Renderer) -> Iterator[Both]:
    engine = ScriptedEngine(renderer)
    engine.script, engine.flip = "abcdef", 3
    with gateway_serving(engine, renderer, tmp_path / "gateway") as gateway, _service(tmp_path, gateway) as client:
        yield Both(client, gateway, engine)


def _service(tmp_path: Path, gateway: Gateway) -> Any:
    return serving_atropos(tmp_path / "rollouts", gateway=GatewayStamps(gateway.url, gateway.data_dir / "token"))


def begin(both: Both, **changes: Any) -> int:
    sampling = {"sampling": {"temperature": 1.0, "top_p": 1.0}}
    both.ours("trainer", run_id="ours", groups_per_step=2, max_lag=9, version=4, extra=sampling, **changes)
    return both.client.join()


def post(env_id: int, *sequences: tuple[list[int], list[float]], prompt: list[int] = PROMPT, **more: Any) -> bytes:
    n = len(prompt)
    return encoded(
        env_id=env_id,
        tokens=[prompt + ids for ids, _ in sequences],
        masks=[[-100] * n + ids for ids, _ in sequences],
        inference_logprobs=[[1.0] * n + logprobs for _, logprobs in sequences],
        scores=[float(k) for k in range(len(sequences))],
        **more,
    )


def spans(group: Any) -> list[Any]:
    return [each["spans"] for each in group["group"]["trajectories"]]


def test_a_post_has_the_versions_that_sampled_it_also_after_the_gateway_was_started_again(
    tmp_path: Path, renderer: Renderer
):
    engine = ScriptedEngine(renderer)
    engine.script, engine.flip = "abcdef", 3
    with gateway_serving(engine, renderer, tmp_path / "gateway") as gateway:
        both = Both(None, gateway, engine)  # pyright: ignore[reportArgumentType]
        sampled = both.sample()
    with gateway_serving(engine, renderer, tmp_path / "gateway") as gateway, _service(tmp_path, gateway) as client:
        both = Both(client, gateway, engine)
        env_id = begin(both)
        ids, logprobs = sampled
        assert client.send(post(env_id, sampled, (ids[:4], logprobs[:4]))).status_code == 200
        (group,) = both.taken()
        assert spans(group) == [[[-1, 3], [3, 3], [4, len(ids) - 3]], [[-1, 3], [3, 3], [4, 1]]]
        assert group["lag"] == 1
        assert client.atropos.counts["tokens_stamped"] == len(ids) + 4
        assert client.atropos.counts["tokens_unknown"] == 0


def test_a_turn_that_goes_on_from_another_is_known_too(both: Both):
    env_id = begin(both)
    first, first_logprobs = both.sample()
    glue = [80, 81]
    second, second_logprobs = both.sample([*PROMPT, *first, *glue])
    ids = [*PROMPT, *first, *glue, *second]
    body = encoded(
        1, env_id=env_id, tokens=[ids], masks=[[-100] * 3 + first + [-100] * 2 + second],
        inference_logprobs=[[1.0] * 3 + first_logprobs + [1.0] * 2 + second_logprobs], scores=[1.0],
    )  # fmt: skip
    assert both.client.send(body).status_code == 200
    (group,) = both.taken()
    more = len(first) - 3
    assert spans(group) == [[[-1, 3], [3, 3], [4, more], [-1, 2], [3, 3], [4, more]]]


def test_what_was_sampled_elsewhere_or_changed_is_unknown_and_counted(both: Both):
    env_id = begin(both)
    ids, logprobs = both.sample()
    changed = [*ids[:2], 99, *ids[3:]]
    assert both.client.send(post(env_id, (changed, logprobs), ([1, 2, 3], [-0.5] * 3))).status_code == 200
    (group,) = both.taken()
    assert spans(group) == [[[-1, 3], [3, 2], [-2, len(ids) - 2]], [[-1, 3], [-2, 3]]]
    assert both.client.atropos.counts["tokens_unknown"] == len(ids) - 2 + 3
    assert both.client.get("/v2/status")["totals"]["tokens_unknown"] == len(ids) - 2 + 3


def test_a_post_without_logprobs_gets_them_from_the_record_or_is_refused(both: Both):
    env_id = begin(both)
    ids, logprobs = both.sample()
    bare = {"inference_logprobs": None}
    known = encoded(1, env_id=env_id, tokens=[PROMPT + ids], masks=[[-100] * 3 + ids], scores=[1.0], **bare)
    assert both.client.send(known).status_code == 200
    (group,) = both.taken()
    assert group["group"]["trajectories"][0]["logprobs"] == pytest.approx([0.0] * 3 + logprobs)
    assert spans(group) == [[[-1, 3], [3, 3], [4, len(ids) - 3]]]
    other = [*ids, 99]
    body = encoded(1, env_id=env_id, tokens=[PROMPT + other], masks=[[-100] * 3 + other], scores=[1.0], **bare)
    refused = both.client.send(body)
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "inference_logprobs")


def test_a_gateway_that_does_not_answer_costs_the_versions_and_no_group(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(version_lookup, "PATIENCE_S", 0.2)
    (tmp_path / "token").write_text("none")
    silent = GatewayStamps("http://127.0.0.1:1", tmp_path / "token")
    with serving_atropos(tmp_path / "rollouts", gateway=silent) as client:
        both = Both(client, None, None)  # pyright: ignore[reportArgumentType]
        env_id = begin(both)
        assert client.send(post(env_id, ([5, 6], [-0.5, -0.5]))).status_code == 200
        (group,) = both.taken()
        assert spans(group) == [[[-1, 3], [-2, 2]]]
        assert client.atropos.counts["unstamped_posts"] == 1
        bare = encoded(1, env_id=env_id, inference_logprobs=None)
        assert client.send(bare).status_code == 503, "it may be known in a moment"


def with_temperature(both: Both, env_id: int) -> bytes:
    return post(env_id, both.sample(temperature=0.5))


def with_params(both: Both, env_id: int) -> bytes:
    return post(env_id, both.sample(), generation_params={"temperature": 0.5})


def with_override(both: Both, env_id: int) -> bytes:
    return post(env_id, both.sample(), overrides=[{"temperature": 0.5}])


def with_images(both: Both, env_id: int) -> bytes:
    return post(env_id, both.sample(), images=[["data"]])


def with_teacher(both: Both, env_id: int) -> bytes:
    ids, logprobs = both.sample()
    all_ids = [[id] for id in PROMPT + ids]
    return post(env_id, (ids, logprobs), distill_token_ids=[all_ids], distill_logprobs=[[[-1.0]] * len(all_ids)])


@pytest.mark.parametrize(
    ("made", "field", "says"),
    [
        (with_temperature, "generation_params.temperature", "temperature = 0.5, and the trainer .* with 1"),
        (with_params, "generation_params.temperature", "set train.temperature = 0.5"),
        (with_override, "generation_params.temperature", "set train.temperature = 0.5"),
        (with_images, "images", "text environment"),
        (with_teacher, "distill_token_ids", "algorithm.kind = 'distill'"),
    ],
)
def test_what_our_trainer_would_get_wrong_is_refused_with_the_way_out(
    both: Both, made: Callable[[Both, int], bytes], field: str, says: str
):
    env_id = begin(both)
    refused = both.client.send(made(both, env_id))
    assert refused.status_code == 422
    assert refused.json()["error"]["field"] == field
    assert re.search(says, refused.json()["error"]["message"]), refused.text


def test_a_temperature_that_is_the_trainers_is_taken_and_ref_logprobs_are_counted(both: Both):
    env_id = begin(both)
    ids, logprobs = both.sample(temperature=1.0, top_k=-1)
    body = post(env_id, (ids, logprobs), generation_params={"temperature": 1}, ref_logprobs=[[-1.0] * (3 + len(ids))])
    assert both.client.send(body).status_code == 200
    assert both.client.get("/v2/status")["totals"]["ignored_ref_logprobs"] == 1


def test_advantages_by_token_reach_the_trainer(both: Both):
    env_id = begin(both)
    ids, logprobs = both.sample()
    said = [0.0] * 3 + [0.25 * k for k in range(len(ids))]
    assert both.client.send(post(env_id, (ids, logprobs), advantages=[said])).status_code == 200
    (group,) = both.taken()
    assert group["group"]["trajectories"][0]["advantages"] == said


def test_logprobs_of_a_prompt_are_refused_with_the_way_out(both: Both):
    """As `get_logprobs` of atroposlib's VLLMServer asks."""
    body = {"prompt": {"prompt_token_ids": PROMPT}, "prompt_logprobs": 1, "max_tokens": 1, "temperature": 0.0}
    refused = both.gateway.post("/generate", body)
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "prompt_logprobs")
    assert "algorithm.kind = 'distill'" in refused.json()["error"]["message"]
