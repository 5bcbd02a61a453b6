"""`tandem online serve` over HTTP: what is taught is served, what is refused changes nothing, who may do what."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pages
import pytest
from online_served import SPEC, OnlineServer, fact, online_server

from privacy import readable_by_others
from tandem.io.chat_feedback import feedback_rows


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnlineServer]:
    with online_server(tmp_path_factory.mktemp("online"), SPEC) as server:
        yield server


def served(server: OnlineServer) -> tuple[int, str]:
    told = server.get("/versions/served")
    return told["version"], told["digest"]


def post(server: OnlineServer, path: str, body: Any, **headers: str) -> httpx.Response:
    return server.http.post(path, json=body, headers={"Idempotency-Key": "some-key", **headers})


def test_the_page_is_open_and_holds_nothing(server: OnlineServer):
    url = str(server.http.base_url).rstrip("/")
    text = pages.check_door(url).decode()
    pages.check_policy(url)
    pages.check_source(text)
    assert text.count("method:") == 2, "it reads, asks for an answer, and goes back to a version after a question"
    assert text.count("/activate") == 1
    asked = text.index('at("sure").addEventListener("submit"')
    assert asked < text.index("/activate") < asked + 400
    with server.connect("none") as stranger:
        for path in ("/train/status", "/versions", "/audit", "/v1/models"):
            assert stranger.get(path).status_code == 401


def test_a_job_becomes_a_version_that_the_next_answer_is_made_by(server: OnlineServer):
    before, digest = served(server)
    row = server.wait(server.teach([fact(1), fact(2)], source="me"))
    assert (row["state"], row["parent"], row["attempt"]) == ("published", before, 1)
    assert {gate["gate"] for gate in row["gates"]} == {"finite", "update_norm", "kl"}
    assert all(gate["passed"] for gate in row["gates"])
    after, other = served(server)
    assert after == row["version"] > before
    assert other != digest
    with openai.OpenAI(
        base_url=f"{server.http.base_url}/v1", api_key=server.http.headers["authorization"][7:]
    ) as client:
        told: Any = client.chat.completions.create(
            model="online", messages=[{"role": "user", "content": "code?"}], max_tokens=4
        )
    assert told.weight_version == after
    assert {version for version, _ in told.choices[0].weight_versions} == {after}
    told = server.get(f"/versions/{after}/provenance")
    assert told["served_digest"] == other
    assert (told["samples"], told["job"]["who"], told["job"]["source"]) == ([fact(1), fact(2)], "admin", "me")


def test_token_ids_pairs_and_rewards_are_taught_too(server: OnlineServer):
    ids = {"context_ids": [5], "continuation_ids": [6]}  # one token each: nothing of it is lost
    pair = {"prompt": "hello", "chosen": "good day", "rejected": "what?"}
    jobs = [
        server.teach([ids]),
        server.teach([ids], context_grad="none"),
        server.teach([pair]),
        server.teach([{**fact(3), "reward": 1.0}, {**fact(4), "reward": -1.0}], kl_coef=0.1),
    ]
    rows = [server.wait(job) for job in jobs]
    assert [row["state"] for row in rows] == ["published"] * 4
    assert [row["teaching"]["algorithm"] for row in rows] == ["sft", "sft", "dpo", "reward"]
    trained = [row["metrics"]["tokens/trained"] for row in rows[:2]]
    assert trained == [4.0, 4.0], "one, and the three of a fact that is replayed"


def test_a_demonstration_may_be_learned_by_answering_and_being_judged(server: OnlineServer):
    ids = {"context_ids": [5], "continuation_ids": [6]}
    answer = post(server, "/train", {"samples": [ids], "algorithm": "self_distill"}, **{"Idempotency-Key": "distill"})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "samples.0")
    many = [{"messages": [{"role": "user", "content": "x" * 600}, {"role": "assistant", "content": "y"}]}] * 120
    answer = post(server, "/train", {"samples": many, "algorithm": "self_distill"}, **{"Idempotency-Key": "too-many"})
    assert (answer.status_code, "400000" in answer.text) == (422, True), "no frame between the halves would hold it"
    row = server.wait(server.teach([fact(21), fact(22)], algorithm="self_distill", steps=1))
    assert (row["state"], row["teaching"]["algorithm"]) == ("published", "self_distill"), row["why"]
    assert row["metrics"]["tokens/trained"] >= 8, "four answers to each, of a token at least"
    assert abs(row["metrics"]["loss/kl"]) > 0
    assert row["metrics"]["sync/logprob_gap"] < 1e-3, "the engine's own tokens, of the version that it served"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "samples"),
        ({"samples": []}, "samples"),
        ({"samples": [{}]}, "samples.0"),
        ({"samples": [{"context_ids": [1], "continuation_ids": []}]}, "samples.0"),
        ({"samples": [{"context_ids": [], "continuation_ids": [1]}]}, "samples.0.context_ids"),
        ({"samples": [{"context_ids": [1], "continuation_ids": [10**6]}]}, "samples.0.continuation_ids"),
        ({"samples": [{"messages": [{"role": "user", "content": "x"}]}]}, "samples.0"),
        ({"samples": [fact(1), {"messages": [{"role": "assistant", "content": "y" * 4000}]}]}, "samples.1"),
        ({"samples": [fact(1), {"prompt": "a", "chosen": "b", "rejected": "c"}]}, "samples.1"),
        ({"samples": [fact(1)], "lr": 0.5}, "lr"),
        ({"samples": [fact(1)], "steps": 10**6}, "steps"),
        ({"samples": [fact(1)], "rank": 8}, "rank"),
        ({"samples": [fact(1)], "config": {"rank": 8}}, "config.rank"),
        ({"samples": [fact(1)], "config": {"lr": 0.5}}, "lr"),
        ({"samples": [fact(1)], "config": {"epochs": 2}}, "config.epochs"),
        ({"samples": [{**fact(1), "reward": 1.0}], "known": 0.5}, "known"),
        ({"samples": [fact(1)], "algorithm": "dpo"}, "samples.0"),
    ],
)
def test_what_cannot_be_learned_is_refused_with_its_field(server: OnlineServer, body: Any, field: str):
    jobs = len(server.get("/train/jobs?most=1000")["jobs"])
    answer = post(server, "/train", body, **{"Idempotency-Key": f"bad-{field}-{abs(hash(json.dumps(body)))}"})
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["field"] == field
    assert len(server.get("/train/jobs?most=1000")["jobs"]) == jobs


@pytest.mark.parametrize("path", ["/sessions", "/checkpoint", "/versions/0/activate", "/train/jobs/some-job/cancel"])
def test_a_field_that_nobody_reads_is_refused(server: OnlineServer, path: str):
    answer = post(server, path, {"steps": 3}, **{"Idempotency-Key": f"odd{path}"})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "steps"), answer.text
    assert post(server, path, [1], **{"Idempotency-Key": f"odder{path}"}).status_code == 422


def test_rude_requests_are_refused_and_take_little_memory(server: OnlineServer):
    assert server.process is not None
    status = Path(f"/proc/{server.process.pid}/status")

    def most_mib() -> float:
        return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if "VmHWM" in line)

    server.ask("hello")
    before = most_mib()
    words, lists = "hello " * 10**6, b"[" + b"[]," * 2_000_000 + b"[]]"
    said = [{"role": "user", "content": words}, {"role": "assistant", "content": "x"}]
    answer = post(server, "/train", {"samples": [{"messages": said}]}, **{"Idempotency-Key": "rude-words"})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "samples.0")
    answer = server.http.post("/v1/chat/completions", json={"model": "online", "messages": said})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    for path in ("/train", "/v1/chat/completions"):
        headers = {"Content-Type": "application/json", "Idempotency-Key": "rude-lists"}
        answer = server.http.post(path, content=b'{"samples":%s}' % lists, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert most_mib() - before < 200


def test_a_job_that_a_gate_rejects_leaves_every_bit_as_it_was(server: OnlineServer):
    server.post("/checkpoint")
    before = served(server)
    row = server.wait(server.teach([fact(9)], lr=1e-2, steps=10))
    assert row["state"] == "rejected"
    assert "update_norm" in row["why"]
    (gate,) = [gate for gate in row["gates"] if not gate["passed"]]
    assert gate["value"] > gate["limit"] == 0.3
    assert served(server) == before
    again = server.post("/checkpoint")
    assert again["already"], "nothing is there to be saved"


def test_a_key_means_one_job_and_another_body_is_refused(server: OnlineServer):
    body = {"samples": [fact(5)]}
    first, again = (post(server, "/train", body, **{"Idempotency-Key": "once"}) for _ in range(2))
    assert (first.status_code, first.json()) == (202, again.json())
    other = post(server, "/train", {"samples": [fact(6)]}, **{"Idempotency-Key": "once"})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "key_reused")
    without = [server.http.post("/train", json=body).raise_for_status().json()["id"] for _ in range(2)]
    assert len({first.json()["id"], *without}) == 3, "without a key it is a new job each time"
    assert {server.wait(id)["state"] for id in (first.json()["id"], *without)} == {"published"}


def test_the_older_form_of_a_job_is_taken(server: OnlineServer):
    job = server.http.post("/train", json={"samples": [fact(5)], "config": {"lr": 2e-4}}).raise_for_status().json()
    assert server.wait(job["id"])["teaching"]["lr"] == 2e-4


def test_a_job_ends_when_it_is_known_unless_it_names_its_steps(server: OnlineServer):
    bodies = [{"known": 1e-9, "steps": 3}, {"steps": 3}, {"known": 0.9}, {}]
    rows = [server.wait(server.teach([fact(5)], **body)) for body in bodies]
    assert [row["teaching"]["known"] for row in rows] == [1e-9, 0.0, 0.9, 0.7]
    assert [row["metrics"]["train/steps"] for row in rows] == [1, 3, 2, 2]
    assert [row["metrics"].get("train/known") for row in rows] == [1.0, None, 0.0, 0.0]


@pytest.mark.parametrize("write", ["/feedback", "/sessions", "/checkpoint", "activate", "cancel"])
def test_a_key_that_was_used_is_refused_for_another_write(server: OnlineServer, write: str):
    """Also where the first changed nothing: the version that is active is activated."""
    bodies = {"/feedback": {"metric": "none", "version": 0, "value": 1.0}, "activate": {"why": "because"}}
    path, body, key = write, bodies.get(write, {}), {"Idempotency-Key": f"used-{write}"}
    if write == "activate":
        path = f"/versions/{server.get('/versions')['active']}/activate"
    if write == "cancel":  # the second of two, which waits meanwhile
        path = f"/train/jobs/{[server.teach([fact(8)], steps=3) for _ in range(2)][-1]}/cancel"
    first, again = (post(server, path, body, **key) for _ in range(2))
    assert (first.status_code, again.status_code, first.json()) == (200, 200, again.json())
    others: list[tuple[str, Any]] = [
        ("/train", {"samples": [fact(6)]}),
        ("/feedback", bodies["/feedback"] | {"value": 2.0}),
    ]
    if write in bodies:
        others.append((path, body | {"value": 3.0} if write == "/feedback" else {"why": "otherwise"}))
    for other in others:
        refused = post(server, *other, **key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "key_reused"), other


def test_rollback_and_forward_again_are_bit_identical(server: OnlineServer):
    first = served(server)
    server.wait(server.teach([fact(7)]))
    second = served(server)
    assert server.post(f"/versions/{first[0]}/activate", {"why": "try"})["version"] == first[0]
    assert served(server) == first
    assert server.post(f"/versions/{second[0]}/activate")["version"] == second[0]
    assert served(server) == second
    row = server.get("/audit")["audit"][1]
    assert (row["what"], row["version"], row["why"], row["who"]) == ("activate", first[0], "try", "admin")
    server.post(f"/versions/{first[0]}/activate")
    branch = server.wait(server.teach([fact(8)]))
    assert branch["parent"] == first[0]
    assert branch["version"] > second[0]
    assert post(server, "/versions/999/activate", {}).status_code == 404
    for path in ("/versions/-1/activate", f"/versions/{10**30}/activate", f"/versions/{10**30}/v1/completions"):
        answer = post(server, path, {})
        status = 400 if "/v1/" in path else 422
        assert (answer.status_code, answer.json()["error"]["field"]) == (status, "version")
    assert server.http.get(f"/versions/{10**30}/provenance").status_code == 422


def test_an_older_version_answers_beside_the_one_that_serves(server: OnlineServer):
    known = [each["version"] for each in server.get("/versions")["versions"]]
    assert [each["version"] for each in server.get("/versions?most=2")["versions"]] == known[-2:]
    assert [each["version"] for each in server.get(f"/versions?before={known[2]}")["versions"]] == known[:2]
    for asked in ("most=many", "most=1001", "before=-1", "before=" + "9" * 30):
        answer = server.http.get(f"/versions?{asked}")
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, asked.partition("=")[0])
    chat = {"model": "online", "messages": [{"role": "user", "content": "code?"}], "max_tokens": 8, "temperature": 0.0}
    chat |= {"logprobs": True}
    told = {}
    for version in (known[0], known[1], known[2], known[0]):
        answer = server.http.post(f"/versions/{version}/v1/chat/completions", json=chat).raise_for_status().json()
        assert {each for each, _ in answer["choices"][0]["weight_versions"]} == {version}
        logprobs = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
        assert told.setdefault(version, logprobs) == logprobs
    assert len({tuple(logprobs) for logprobs in told.values()}) == 3
    assert post(server, "/versions/999/v1/chat/completions", chat).status_code == 404


def test_a_waiting_job_and_a_running_one_are_cancelled(server: OnlineServer):
    before = served(server)
    long, waiting = (server.teach([fact(n)], steps=1000, lr=1e-6) for n in (1, 2))
    assert server.post(f"/train/jobs/{waiting}/cancel")["state"] == "cancelled"
    while server.get(f"/train/jobs/{long}")["state"] == "queued":
        pass  # it may not even have reached the trainer process
    assert server.post(f"/train/jobs/{long}/cancel")["state"] in ("cancelling", "cancelled")
    assert server.wait(long)["state"] == server.wait(waiting)["state"] == "cancelled"
    assert served(server) == before
    published = server.get("/train/jobs?most=1000")["jobs"][-1]["id"]
    assert post(server, f"/train/jobs/{published}/cancel", {}).status_code == 409


def test_events_tell_a_job_to_its_end(server: OnlineServer):
    job = server.teach([fact(1)], steps=3)
    with server.http.stream("GET", f"/train/jobs/{job}/events") as events:
        lines = [json.loads(line[6:]) for line in events.iter_lines() if line.startswith("data: ")]
    assert lines[-1]["state"] == "published"
    assert {line["id"] for line in lines} == {job}


def test_keys_do_what_they_are_for_and_nothing_else(server: OnlineServer):
    chat = {"model": "online", "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    wanted = {
        "infer": {"/v1/chat/completions": 200, "/train": 403, "/versions/0/activate": 403, "/checkpoint": 403},
        "train": {"/v1/chat/completions": 200, "/train": 202, "/versions/0/activate": 403, "/checkpoint": 403},
    }
    for name, answers in wanted.items():
        file = server.data_dir / f"token-{name}"
        assert file.stat().st_mode & 0o777 == 0o600
        with server.connect(file.read_text()) as client:
            for path, status in answers.items():
                body = chat if path.startswith("/v1") else {"samples": [fact(2)]} if path == "/train" else {}
                answer = client.post(path, json=body, headers={"Idempotency-Key": f"{name}{path}"})
                assert answer.status_code == status, (name, path, answer.text)
            assert client.get("/audit").status_code == client.get("/a-route-to-come").status_code == 403
    with server.connect("none") as client:
        for path in ("/train/status", "/versions", "/audit", "/v1/models"):
            assert client.get(path).status_code == 401
    job = server.get("/train/jobs")["jobs"][0]
    assert job["who"] == "train"
    server.wait(job["id"])


def test_a_conversation_is_taught_by_its_reward(server: OnlineServer):
    named = server.post("/sessions")
    chat = {"model": "online", "messages": [{"role": "user", "content": "say"}], "max_tokens": 6, "n": 2}
    with server.connect(server.http.headers["authorization"].removeprefix("Bearer "), named["base_url"]) as client:
        told = client.post("chat/completions", json=chat).raise_for_status().json()
    assert told["session_id"] == named["id"]
    answer = post(server, "/train", {"session": named["id"], "reward": 0.5, "algorithm": "dpo"})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "algorithm")
    row = server.wait(server.post("/train", {"session": named["id"], "reward": 0.5})["id"])
    assert (row["state"], row["teaching"]["algorithm"]) == ("published", "reward")
    sampled = told["usage"]["completion_tokens"]
    assert row["metrics"]["tokens/trained"] == sampled, "what was sampled, and nothing is replayed with it"
    assert post(server, "/train", {"session": named["id"], "reward": 1.0}).status_code == 404
    both = post(server, "/train", {"session": "x", "reward": 1.0, "samples": [fact(1)]})
    assert both.status_code == post(server, "/train", {"session": "x"}).status_code == 422


def test_a_conversation_is_rewarded_once_whoever_asks_at_once(server: OnlineServer):
    """By other keys, and by the same one."""
    chat = {"model": "online", "messages": [{"role": "user", "content": "say"}], "max_tokens": 4}
    token = server.http.headers["authorization"].removeprefix("Bearer ")
    for same in (False, True):
        named = server.post("/sessions")
        with server.connect(token, named["base_url"]) as client:
            client.post("chat/completions", json=chat).raise_for_status()
        key, body = uuid.uuid4().hex, {"session": named["id"], "reward": 0.5}

        clients = [server.connect(token) for _ in range(6)]
        keys = [key if same else f"{key}-{number}" for number in range(6)]

        def reward(client: httpx.Client, key: str, body: Any = body) -> httpx.Response:
            return client.post("/train", json=body, headers={"Idempotency-Key": key})

        try:
            for client in clients:
                client.get("/train/status")  # so that no connection has yet to be made
            with ThreadPoolExecutor(6) as threads:
                answers = list(threads.map(reward, clients, keys))
        finally:
            for client in clients:
                client.close()
        taken = [answer for answer in answers if answer.status_code == 202]
        assert len({answer.json()["id"] for answer in taken}) == 1
        assert len(taken) == (6 if same else 1), [answer.text for answer in answers]
        assert {answer.status_code for answer in answers} <= {202, 404, 409}
        server.wait(taken[0].json()["id"])


def test_a_version_that_is_rated_worse_is_taken_back_by_itself(server: OnlineServer):
    before = served(server)
    for value in (1.0, 0.9, 1.0, 0.9):
        assert server.post("/feedback", {"metric": "rating", "version": before[0], "value": value})["watched"]
    assert not server.post("/feedback", {"metric": "else", "version": before[0], "value": 0.0})["watched"]
    worse = server.wait(server.teach([fact(3)]))["version"]
    for value in (0.1, 0.2, 0.1):
        server.post("/feedback", {"metric": "rating", "version": worse, "value": value})
    until = time.monotonic() + 10
    while served(server) != before:
        assert time.monotonic() < until
        time.sleep(0.05)
    row = server.get("/audit")["audit"][0]
    assert (row["what"], row["who"], row["before"], row["version"]) == ("activate", "watch", worse, before[0])
    assert "'rating' went from 0.95 to 0.1333" in row["why"]


def test_a_thumb_is_kept_with_its_chat(server: OnlineServer):
    chat = {"model": "online", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    answers = (server.http.post("/v1/chat/completions", json={**chat, "seed": seed}).json() for seed in range(100))
    told = next(each for each in answers if each["choices"][0]["message"]["content"])  # an empty one makes no pair
    rated = server.http.post("/v1/feedback", json={"id": told["id"], "value": False, "better": "Good day."}).json()
    assert rated["weight_version"] == told["weight_version"]
    (pair,) = feedback_rows(server.data_dir)
    assert (pair["prompt"][0]["content"], pair["chosen"][0]["content"]) == ("hello", "Good day.")


def test_a_request_may_be_pinned_or_begin_again(server: OnlineServer):
    for wish in ("follow", "pin", "restart"):
        told = server.ask("hello", on_update=wish)
        assert len(told["choices"][0]["weight_versions"]) == 1
    chat = {"model": "online", "messages": [{"role": "user", "content": "?"}], "on_update": "restart", "stream": True}
    answer = server.http.post("/v1/chat/completions", json=chat)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "on_update")


def test_what_the_server_keeps_is_for_one_user_of_the_machine(server: OnlineServer):
    assert server.data_dir.stat().st_mode & 0o777 == 0o700
    assert {"jobs", "sessions", "token", "trainer.log", "versions"} <= {path.name for path in server.data_dir.iterdir()}
    assert readable_by_others(server.data_dir) == ["ready.json"]  # an address, a process, and where the token lies


def test_a_stopped_server_goes_on_with_the_same_bytes(server: OnlineServer):
    """One of the last: the server is started again, and told to keep two versions."""
    before = served(server)
    job = server.get("/train/jobs")["jobs"][0]
    assert server.stop() == 0
    server.spec.write_text(SPEC + "[updates]\nkeep = 2\n")
    server.start()
    assert served(server) == before
    assert server.get(f"/train/jobs/{job['id']}") == job
    saved = server.get("/train/status")["checkpointed"] == before[0]
    assert saved or "no checkpoint at the end" in server.log(), "there are two seconds for it"
    assert server.wait(server.teach([fact(11)]))["parent"] == before[0]


def test_versions_beyond_those_to_keep_are_forgotten_and_what_they_need_stays(server: OnlineServer):
    """Two are kept; their files, and an anchor that they are made from."""
    new = [server.wait(server.teach([fact(number)]))["version"] for number in (12, 13)]
    before = served(server)
    server.post("/checkpoint")
    rows = {row["version"]: row["state"] for row in server.get("/versions")["versions"]}
    assert [version for version, state in rows.items() if state == "kept"] == new
    answer = post(server, "/versions/0/activate", {}, **{"Idempotency-Key": "too-old"})
    assert (answer.status_code, "forgotten" in answer.text) == (409, True)
    names = sorted(path.name for path in (server.data_dir / "versions").iterdir())
    assert f"anchor-{new[1]:06d}" in names
    assert len(names) <= 4
    assert server.post(f"/versions/{new[0]}/activate")["version"] == new[0]
    assert server.post(f"/versions/{new[1]}/activate")["version"] == new[1]
    assert served(server) == before
