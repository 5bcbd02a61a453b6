"""Groups that cannot be trained on are refused by field, and later groups are not affected."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from malformed_groups import CORPUS, GOOD_FRAME, Bad, good, posted
from rollouts_served import RolloutClient, serving_rollouts

from tandem.errors import GroupRefused
from tandem.rollout.wire import codec


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutClient]:
    with serving_rollouts(tmp_path_factory.mktemp("rollouts")) as client:
        client.begin()
        yield client


def test_the_corpus_is_as_long_as_was_asked():
    assert len(CORPUS) >= 60
    assert len({bad.name for bad in CORPUS}) == len(CORPUS)


@pytest.mark.parametrize("bad", CORPUS, ids=lambda bad: bad.name)
def test_a_bad_post_is_refused_by_its_field(client: RolloutClient, bad: Bad):
    headers = {"Content-Type": bad.kind, "Idempotency-Key": bad.name.encode().hex()[:99]} | bad.headers
    answer = client.http.post("/v2/groups", content=bad.body, headers=headers)
    assert answer.status_code in bad.statuses, answer.text
    error = answer.json()["error"]
    assert error.get("field", "").startswith(bad.field), error
    if answer.status_code == 422:
        assert error["field"]


def test_after_all_of_them_the_next_batch_is_as_if_they_had_not_been(client: RolloutClient):
    """Each of them is sent once more, between two good groups, one of them compressed."""
    for body, kind, headers in (
        (posted(good()), "application/json", {}),
        *((bad.body, bad.kind, bad.headers) for bad in CORPUS if len(bad.body) < 10_000),
        (GOOD_FRAME, codec.BINARY, {}),
    ):
        key = {"Idempotency-Key": f"again-{random.random()}"}
        client.http.post("/v2/groups?environment=1", content=body, headers={"Content-Type": kind} | key | headers)
    lease = client.post("/v2/leases", {"epoch": client.epoch, "groups": 2})
    assert [len(each["group"]["trajectories"]) for each in lease["groups"]] == [2, 2]
    assert client.send("/v2/leases", {"epoch": client.epoch, "groups": 1}).status_code == 204
    status = client.get("/v2/status")
    assert status["queue"]["queued"] == 0
    assert status["dropped"]["refused"] > 60
    kept = client.get("/v2/quarantine")["quarantine"]
    assert {"field", "reason", "bytes", "at", "environment", "id"} == set(kept[0])


def test_whatever_happens_to_a_byte_a_frame_is_refused_or_is_still_a_group():
    rng = random.Random(0)
    refused: list[str] = []
    for _ in range(4000):
        body = bytearray(GOOD_FRAME)
        for _ in range(rng.choice((1, 1, 2, 8))):
            place = rng.randrange(len(body))
            match rng.randrange(3):
                case 0:
                    body[place] = rng.randrange(256)
                case 1:
                    del body[place]
                case _:
                    body.insert(place, rng.randrange(256))
        try:
            for group in codec.read_frames(bytes(body)):
                codec.decode(group.frame)
        except GroupRefused as error:
            refused.append(error.field)
    assert all(refused)
    assert len(refused) > 2000
