"""The Atropos endpoints, reply by reply, as Atropos clients use them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from atropos_bodies import MALFORMED, encoded, group
from atropos_served import TRAINER, Client, seeds, sequences, serving_atropos

from tandem.rollout.atropos.codec import KEYS


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with serving_atropos(tmp_path) as client:
        yield client


def test_before_anybody_registered(client: Client):
    assert "message" in client.get("/")
    assert client.get("/wandb_info") == {"group": None, "project": None}
    assert client.get("/info") == {"batch_size": -1, "max_token_len": -1}
    assert client.get("/status") == {"current_step": 0, "queue_size": 0}
    reply = client.get("/batch")
    assert (reply["status"], reply["batch"]) == ("error", [])
    assert reply["message"]
    example = client.get("/latest_example")
    assert set(example) == {
        "tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs",
        "messages", "images",
    }  # fmt: skip
    assert not any(example.values())


def test_registration_of_a_trainer_and_its_environments(client: Client):
    environment = {"max_token_length": 512, "desired_name": "maths", "weight": 1.0, "group_size": 4}
    assert client.post("/register-env", environment) == {"status": "wait for trainer to start"}
    uuid = client.post("/register", TRAINER)["uuid"]
    assert 2**64 < uuid < 2**128
    assert client.get("/wandb_info") == {"group": "g", "project": "p"}
    assert client.get("/info") == {"batch_size": 8, "max_token_len": 512}
    assert client.post("/register-env", environment) == {"status": "wait for trainer to start"}
    assert client.get("/batch") == {"batch": None}
    assert client.post("/register-env", environment) == {
        "status": "success", "env_id": 0, "wandb_name": "maths_0", "checkpoint_dir": "c", "starting_step": 0,
        "checkpoint_interval": 5, "num_steps": 100,
    }  # fmt: skip
    assert (
        client.post("/register-env", environment | {"desired_name": "gut & günstig"})["wandb_name"] == "gut & günstig_0"
    )
    again = client.post("/register-env", environment)
    assert (again["env_id"], again["wandb_name"]) == (2, "maths_1")
    assert client.post("/register-env", environment | {"desired_name": None, "weight": -1})["status"] == "success"


def test_a_group_comes_back_as_it_was_posted_with_all_fourteen_keys(client: Client):
    client.begin(batch_size=2)
    client.join()
    post = group(seed=1, messages=[[{"role": "user", "content": "𝔘"}], []], overrides=[{"temperature": 0.5}, {}])
    assert client.post("/scored_data", post) == {"status": "received"}
    assert client.get("/latest_example") == dict.fromkeys(KEYS) | post
    assert client.get("/status") == {"current_step": 0, "queue_size": 1}
    assert client.get("/batch") == {"batch": [dict.fromkeys(KEYS) | post]}
    assert client.get("/status") == {"current_step": 0, "queue_size": 0}


def test_a_list_of_groups(client: Client):
    client.begin(batch_size=6)
    client.join()
    posts = [group(seed=number) for number in range(3)]
    assert client.post("/scored_data_list", posts) == {"status": "received", "groups_processed": 3}
    assert seeds(client.get("/batch")["batch"]) == [post["scores"][0] for post in posts]
    assert client.post("/scored_data_list", []) == {"status": "received", "groups_processed": 0}


def test_a_bad_group_in_a_list_refuses_the_list(client: Client):
    client.begin(batch_size=2)
    client.join()
    answer = client.send(b"[" + encoded(seed=1) + b"," + encoded(seed=2, scores=[1.0]) + b"]", "/scored_data_list")
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "1.scores")
    assert client.get("/status")["queue_size"] == 0


def test_posts_without_an_environment_are_taken(client: Client):
    client.begin(batch_size=2)
    assert client.put(env_id=None) == {"status": "received"}
    assert client.get("/batch")["batch"][0]["env_id"] is None


def test_groups_of_another_size_are_called_buffered_and_are_in_the_next_batch(client: Client):
    client.begin(batch_size=8)
    env_id = client.join(group_size=4)
    assert client.put(size=2, seed=1) == {"status": "buffered", "buffer_size": 2}
    assert client.put(size=4, seed=2) == {"status": "received"}
    assert client.put(size=2, seed=3) == {"status": "buffered", "buffer_size": 0}
    posts = [group(2, seed=5), group(4, seed=6)]
    assert client.post("/scored_data_list", posts) == {
        "status": "received", "groups_processed": 2, "buffered": 1, "last_buffer_size": 2,
    }  # fmt: skip
    assert sequences(client.get("/batch")["batch"]) == 8
    assert client.get("/status-env", {"env_id": env_id})["self_queue_size"] == 1


def test_status_of_an_environment_with_a_body_and_as_a_query(client: Client):
    client.begin(batch_size=32)
    first, second = client.join("a", 2, weight=3.0, min_batch_allocation=0.25), client.join("b", 4)
    for seed in range(4):
        client.put(env_id=first, seed=seed)
        client.put(size=4, env_id=second, seed=10 + seed)
    want = {
        "current_step": 0,
        "queue_size": (4 * 2 + 4 * 4) // 2,
        "unallocated_fraction": 0.75,
        "self_queue_size": 4,
        "max_group_size": 4,
        "env_weight": 0.75,
    }
    client.atropos.forget_counts()
    assert client.get("/status-env", {"env_id": first}) == want
    assert client.get(f"/status-env?env_id={first}") == want
    assert client.get("/status-env", {"env_id": second})["env_weight"] == 0.25
    for path in ("/status-env", "/status-env?env_id=x", "/status-env?env_id=-1", "/status-env?env_id=99"):
        answer = client.http.get(path)
        assert (answer.status_code // 100, answer.json()["error"]["field"]) == (4, "env_id")


def test_leaving(client: Client):
    client.begin()
    env_id = client.join()
    assert client.post("/disconnect-env", {"env_id": env_id}) == {"status": "success"}
    reply = client.post("/disconnect-env", {"env_id": 99})
    assert reply["status"] == "failure"
    assert reply["error"]


def test_malformed_posts_are_refused_by_field_and_the_next_batch_is_whole(client: Client):
    client.begin(batch_size=4)
    client.join()
    client.put(seed=1)
    assert len(MALFORMED) >= 60
    for name, field, body in MALFORMED:
        for path, sent in (("/scored_data", body), ("/scored_data_list", b"[" + body + b"]")):
            answer = client.send(sent, path)
            assert 400 <= answer.status_code < 500, (name, answer.status_code)
            said = answer.json()["error"]["field"]
            assert path.endswith("list") or said.partition(".")[0] == field, (name, said)
    client.put(seed=2)
    assert seeds(client.get("/batch")["batch"]) == [group(seed=1)["scores"][0], group(seed=2)["scores"][0]]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/register", {"batch_size": 0, "max_token_len": 1}, "batch_size"),
        ("/register", {"batch_size": "8", "max_token_len": 1}, "batch_size"),
        ("/register", {"max_token_len": 1}, "batch_size"),
        ("/register-env", {"group_size": -1}, "group_size"),
        ("/register-env", {"group_size": 1, "min_batch_allocation": 2}, "min_batch_allocation"),
        ("/disconnect-env", {"env_id": "x"}, "env_id"),
        ("/disconnect-env", [], "body"),
    ],
)
def test_a_malformed_registration_is_refused_by_field(client: Client, path: str, body: object, field: str):
    answer = client.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, field)


def test_resetting_needs_leave(tmp_path: Path):
    with serving_atropos(tmp_path, may_reset=False) as client:
        client.begin()
        assert client.http.get("/reset_data").status_code == 403
        assert client.get("/info")["batch_size"] == 8


def test_without_leave_to_do_without_everybody_needs_the_token(client: Client):
    for path in ("/status", "/batch", "/reset_data"):
        assert client.http.get(path, headers={"Authorization": ""}).status_code == 401


@pytest.mark.parametrize(
    ("batch_size", "sizes", "ways"),
    [
        (10, [4], "8 or 12"),
        (3, [2], "2 or 4"),
        (8, [6, 5], "6 or 10"),
        (12, [4], ""),
        (11, [4, 3], ""),
        (8, [6, 2], ""),
    ],
)
def test_a_batch_size_that_groups_never_add_up_to_is_said(
    client: Client, batch_size: int, sizes: list[int], ways: str, caplog: pytest.LogCaptureFixture
):
    client.begin(batch_size=batch_size)
    for size in sizes:
        client.join(group_size=size)
    told, again = client.get("/batch"), client.get("/batch")
    assert client.get("/v2/status")["queue"]["why_no_batch"] == told.get("message", "")
    if not ways:
        assert told == {"batch": None}
        return
    assert f"batch_size = {ways}, or" in told["message"]
    assert again == told
    assert [record.message for record in caplog.records].count(told["message"]) == 1, "in the log once"
