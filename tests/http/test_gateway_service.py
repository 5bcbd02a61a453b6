"""The gateway between a remote engine and a rollout service, both on real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_served import engine_serving
from gateway_served import Gateway, Logged, Says, gateway_serving
from served import wait_until

from tandem.build.standalone_engines import followed
from tandem.engine.server.read_only_client import ReadOnlyClient
from tandem.errors import EngineLost, SpecError
from tandem.recipes.gateway import serve_gateway, to_files, to_service
from tandem.rollout.queue.queue import RolloutQueue
from tandem.serve.http.run import Listen, Server
from tandem.serve.http.service import Service, create_app
from tandem.serve.rollouts.service import rollouts_service
from tandem.text.renderer import Renderer
from tandem.types import Sampling

HI = [{"role": "user", "content": "hi"}]


@contextmanager
def served(make: Any, data_dir: Path, port: int = 0) -> Iterator[tuple[str, Path]]:
    """A service on a socket, and its token file."""
    listen = Listen(data_dir, port=port)
    token = listen.token()
    server = Server(create_app(make(), token=token, hosts=listen.hosts), listen, tell=lambda _: None)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.url or not thread.is_alive())
        yield server.url, listen.token_file
    finally:
        server.should_exit = True
        thread.join(timeout=15)


TRAINER = {"run_id": "r", "groups_per_step": 4, "max_lag": 9, "version": 3}


def queue_of(data_dir: Path) -> Service:
    return rollouts_service(RolloutQueue(data_dir / "queue"))


# --- to a rollout service


def test_a_rewarded_group_is_in_the_rollout_service_once(renderer: Renderer, tmp_path: Path) -> None:
    """Also where it was delivered and the gateway died before it knew."""
    with served(lambda: queue_of(tmp_path / "rollouts"), tmp_path / "rollouts") as (url, token_file):
        headers = {"Authorization": f"Bearer {token_file.read_text()}", "Idempotency-Key": "t"}
        assert httpx.post(f"{url}/v2/trainer", json=TRAINER, headers=headers).status_code == 200

        def deliver(gateway: str) -> Any:
            return to_service(url, token_file, owner=gateway, refused=to_files(tmp_path))

        def dies_before_it_knows(gateway: str) -> Any:
            async def delivers(group: Any) -> None:
                await deliver(gateway)(group)
                raise OSError("and is gone")

            return delivers

        data_dir = tmp_path / "gateway"
        with gateway_serving(Says(renderer, "x"), renderer, data_dir, deliver=dies_before_it_knows("g")) as gateway:
            session = gateway.open(task_id="t", group="pairs", group_size=1)
            gateway.chat(HI, session, n=2)
            turns = gateway.shown(session)["turns"]
            gateway.reward(session, 0.5, metrics={"correct": 1})
            wait_until(lambda: b"tandem_delivery_failures_total 1.0" in gateway.client.get("/metrics").content)
        with gateway_serving(Says(renderer, "x"), renderer, data_dir, deliver=deliver("g")) as gateway:
            wait_until(lambda: b"tandem_sessions_undelivered 0.0" in gateway.client.get("/metrics").content)
        (only,) = httpx.get(f"{url}/v2/groups", headers=headers).json()["groups"]
        trajectories = httpx.get(f"{url}/v2/groups/{only}", headers=headers).json()["group"]["trajectories"]
    assert [each["ids"] for each in trajectories] == [turn["context"] + turn["ids"] for turn in turns]
    assert [each["spans"] for each in trajectories] == [[[-1, len(t["context"])], *t["spans"]] for t in turns]
    assert {(each["reward"], each["task_id"]) for each in trajectories} == {(0.5, "t")}
    assert [each["extra"]["branch"] for each in trajectories] == [turn["id"] for turn in turns]


def test_a_rollout_service_that_began_anew_gets_its_groups(renderer: Renderer, tmp_path: Path) -> None:
    """The new service does not know the gateway, which is registered at the old one."""
    where: list[Any] = []

    async def deliver(group: Any) -> None:
        await where[0](group)

    with gateway_serving(Says(renderer, "x"), renderer, tmp_path / "gateway", deliver=deliver) as gateway:
        token_file, port = tmp_path / "token", 0
        for data_dir in (tmp_path / "a", tmp_path / "b"):
            with served(lambda data_dir=data_dir: queue_of(data_dir), data_dir, port) as (url, its_token_file):
                token_file.write_text(its_token_file.read_text())
                port = int(url.rpartition(":")[2])
                where = where or [to_service(url, token_file, owner="g", refused=to_files(tmp_path))]
                headers = {"Authorization": f"Bearer {token_file.read_text()}", "Idempotency-Key": "t"}
                assert httpx.post(f"{url}/v2/trainer", json=TRAINER, headers=headers).status_code == 200
                session = gateway.open()
                gateway.chat(HI, session)
                gateway.reward(session)
                wait_until(lambda: b"tandem_sessions_undelivered 0.0" in gateway.client.get("/metrics").content)
                assert len(httpx.get(f"{url}/v2/groups", headers=headers).json()["groups"]) == 1


def test_a_group_that_the_service_refuses_for_good_lies_in_a_file(renderer: Renderer, tmp_path: Path) -> None:
    with served(lambda: queue_of(tmp_path / "rollouts"), tmp_path / "rollouts") as (url, token_file):
        headers = {"Authorization": f"Bearer {token_file.read_text()}", "Idempotency-Key": "t"}
        assert httpx.post(f"{url}/v2/trainer", json=TRAINER | {"num_ids": 2}, headers=headers).status_code == 200
        deliver = to_service(url, token_file, owner="g", refused=to_files(tmp_path / "gateway" / "trajectories"))
        with gateway_serving(Says(renderer, "x"), renderer, tmp_path / "gateway", deliver=deliver) as gateway:
            session = gateway.open()
            gateway.chat(HI, session)
            gateway.reward(session)
            assert [row["reward"] for row in gateway.delivered(session)] == [1.0]
            wait_until(lambda: gateway.client.get("/refused").json()["count"] == 1)
            (refused,) = gateway.client.get("/refused").json()["groups"]
            assert refused["name"] == session
            assert "the model has 2" in refused["reason"]
            metrics = gateway.client.get("/metrics").text
            assert "tandem_groups_refused 1.0" in metrics
            assert "tandem_delivery_failures_total 0.0" in metrics
            assert "tandem_sessions_undelivered 0.0" in metrics


def test_a_group_that_nobody_takes_holds_up_no_other(renderer: Renderer, tmp_path: Path) -> None:
    """One hangs, one fails and one cannot be written down; the next is delivered all the same."""
    trials: list[str] = []

    async def deliver(group: Any) -> None:
        kind = group.rows[0]["task_id"]
        trials.append(kind)
        if kind == "hangs":
            await asyncio.sleep(600)
        if kind == "fails":
            raise OSError("no")
        if kind == "huge":
            raise OverflowError("integer out of range")
        await to_files(tmp_path / "trajectories")(group)

    with gateway_serving(Says(renderer, "x"), renderer, tmp_path, deliver=deliver) as gateway:
        for kind in ("hangs", "fails", "huge", "good"):
            session = gateway.open(task_id=kind)
            gateway.chat(HI, session)
            gateway.reward(session)
        assert [row["task_id"] for row in gateway.delivered(session)] == ["good"]
        wait_until(lambda: trials.count("fails") == 2)  # again, after a pause
        (aside,) = gateway.client.get("/refused").json()["groups"]
        assert aside["reason"] == "OverflowError: integer out of range"
        assert {kind: trials.count(kind) for kind in ("hangs", "huge", "good")} == {"hangs": 1, "huge": 1, "good": 1}
    with gateway_serving(Says(renderer, "x"), renderer, tmp_path) as gateway:  # what was set aside stays there
        assert gateway.client.get("/refused").json()["count"] == 1
        wait_until(lambda: b"tandem_sessions_undelivered 0.0" in gateway.client.get("/metrics").content)


def test_a_model_directory_that_is_not_there_is_named_with_its_option(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--model = '.*/nope': there is no such directory"):
        serve_gateway(str(tmp_path / "nope"), Listen(tmp_path / "gateway"))


# --- over a remote engine


class Serves(Logged):
    """What an engine's server asks of an engine, beside completions."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def test_ids_are_those_that_the_engine_s_server_saw(make_engine: Any, renderer: Renderer, tmp_path: Path) -> None:
    served_engine = Serves(make_engine())
    (tmp_path / "engine").mkdir()
    with engine_serving(served_engine, renderer, tmp_path / "engine") as engine:
        renderer.tokenizer.save_pretrained(tmp_path / "tokenizer")
        token_file = tmp_path / "engine" / "token"
        alone, name = followed(engine.url, token_file, str(tmp_path / "tokenizer"), thinking=False)
        assert (name, alone.context, alone.num_ids) == ("test/tiny", 256, len(renderer.tokenizer))
        with gateway_serving(alone.engine, alone.renderer, tmp_path / "gateway") as gateway:
            session, messages = gateway.open(), list(HI)
            for seed in range(3):
                messages += [gateway.say(messages, session, seed=seed, max_tokens=20), *HI]
            chunks = gateway.post(
                f"/sessions/{session}/v1/chat/completions",
                {"model": "test/tiny", "messages": messages, "max_tokens": 5, "stream": True},
            )
            assert chunks.text.endswith("data: [DONE]\n\n")
            gateway.engine.log[:] = served_engine.log  # the engine's own
            assert {version for _, each in served_engine.log for version in each.versions} == {7}
            assert gateway.check(session) == [["0-1-2-3"]]
            model = gateway.client.get("/v1/models").json()["data"][0]
            assert model["weight_version"] == 7


def test_an_engine_that_is_gone_is_a_503_and_leaves_no_turn(renderer: Renderer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("nothing")
    follower = ReadOnlyClient("http://127.0.0.1:9", tmp_path / "token", patience_s=0.1)
    with pytest.raises(EngineLost, match="none answers"):
        follower.tell("/limits")
    with pytest.raises(EngineLost, match="none answers"):
        asyncio.run(follower.generate([1], Sampling()))
    (tmp_path / "gateway").mkdir()
    follower = ReadOnlyClient("http://127.0.0.1:9", tmp_path / "token", patience_s=0.1)
    with gateway_serving(follower, renderer, tmp_path / "gateway") as gateway:
        session = gateway.open()
        body = {"model": "test/tiny", "messages": HI}
        answer = gateway.post(f"/sessions/{session}/v1/chat/completions", body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine")
        assert gateway.shown(session)["turns"] == []


# --- the command


def test_what_the_command_answered_survives_kill_9(make_engine: Any, renderer: Renderer, tmp_path: Path) -> None:
    """Sessions, turns and rewards are there in the next process."""
    from tandem.model.presets import make_model

    make_model("tiny", renderer.tokenizer, seed=0).save_pretrained(tmp_path / "model")
    renderer.tokenizer.save_pretrained(tmp_path / "model")
    data_dir, ready_file = tmp_path / "gateway", tmp_path / "ready.json"
    command = [sys.executable, "-m", "tandem", "gateway", "serve", "--model", str(tmp_path / "model"), "--port", "0",
               "--data-dir", str(data_dir), "--ready-file", str(ready_file)]  # fmt: skip
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: ready_file.exists() or process.poll() is not None, seconds=90)
        ready = json.loads(ready_file.read_text())
        gateway = Gateway(ready["url"], Path(ready["token_file"]).read_text(), Logged(None), renderer, data_dir)
        with gateway.client:
            session, rewarded = gateway.open(task_id="kept"), gateway.open()
            answer = gateway.chat(HI, session, model="model", max_tokens=10)["choices"][0]
            gateway.chat(HI, rewarded, model="model", max_tokens=10)
            turns = gateway.shown(session)["turns"]
            gateway.reward(rewarded, 0.5)
    finally:
        process.kill()
        process.wait(timeout=15)
    with gateway_serving(make_engine(), renderer, data_dir) as gateway:
        assert gateway.delivered(rewarded)[0]["reward"] == 0.5
        assert gateway.shown(session)["turns"] == turns
        after = gateway.chat([*HI, answer["message"], *HI], session, max_tokens=10, return_token_ids=True)
        turns = gateway.shown(session)["turns"]
        assert [turn["parent"] for turn in turns] == [None, answer["turn_id"]]
        assert after["prompt_token_ids"] == turns[0]["context"] + turns[0]["ids"] + turns[1]["context"]
