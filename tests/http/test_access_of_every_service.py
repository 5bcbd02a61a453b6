"""Every route of every service, called by a stranger. The routes that are open without a token are listed here."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_served import FakeEngine
from fastapi import FastAPI
from served import ScriptedEngine

import tandem.serve
from tandem.online.job_store import JobStore
from tandem.online.orchestrator import Orchestrator
from tandem.online.ordinary_prompts import OrdinaryPrompts
from tandem.online.sample_replay import ReplayMemory
from tandem.online.trainer_supervisor import TrainerProcess
from tandem.recipes.gateway import to_files
from tandem.recipes.rollout_service import with_atropos
from tandem.rollout.atropos.service import Atropos
from tandem.rollout.queue.queue import RolloutQueue
from tandem.rollout.sessions.store import SessionStore
from tandem.serve.engine.service import engine_service
from tandem.serve.gateway import gateway_service
from tandem.serve.http.run import Listen
from tandem.serve.http.service import Service, create_app
from tandem.serve.online.keys import KeyRing, Keys
from tandem.serve.online.past_versions import PastVersions
from tandem.serve.online.service import online_service
from tandem.serve.openai.service import openai_service
from tandem.serve.rollouts.service import rollouts_service
from tandem.spec.online import parse_online_spec
from tandem.text.renderer import Renderer
from tandem.vllm_worker.weight_sources import open_source

TOKEN, URL = "the-token", "http://127.0.0.1:8000"
ATROPOS = {
    "/", "/batch", "/disconnect-env", "/info", "/latest_example", "/register", "/register-env", "/reset_data",
    "/scored_data", "/scored_data_list", "/status", "/status-env", "/wandb_info",
}  # fmt: skip
OPEN = {
    "tandem serve": {"/health"},
    "tandem engine serve": {"/health"},
    "tandem gateway serve": {"/health"},
    "tandem online serve": {"/health", "/"},
    "tandem rollouts serve": {"/health", "/"},
    "with Atropos": {"/health", "/"},
    "with Atropos and no token": {"/health", *ATROPOS},
}
"""`/` is a page that asks for the token. The last one is what `--insecure-no-auth` asks for, on loopback only."""


def online(home: Path, renderer: Renderer, model: dict[str, Any]) -> Service:
    spec, engine, store = parse_online_spec({"model": {"preset": "tiny"}}), FakeEngine(), JobStore(home / "jobs")
    memory = ReplayMemory(spec.replay, spec.seed, store, spec.train.batch_size)
    trainer = lambda: TrainerProcess(["true"], home / "log", {})  # noqa: E731 - never started
    ordinary = OrdinaryPrompts(
        spec.ordinary, renderer, ["Hello!"] * 4, home / "ordinary.json", gate=1, context=model["context"]
    )
    conductor = Orchestrator(spec, store, engine, open_source, trainer, home / "versions", memory, ordinary)
    past: Any = None  # of an engine that nobody asks
    return online_service(conductor, renderer, SessionStore(home / "sessions"), PastVersions(past), **model)


@pytest.fixture(scope="module")
def services(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, FastAPI]]:
    home = tmp_path_factory.mktemp("doors")
    model = {"model_id": "m", "context": 64, "num_ids": 300}
    engine, listen = ScriptedEngine(renderer), Listen(home / "queue")
    with ExitStack() as stack:
        queue, sessions = RolloutQueue(home / "queue"), SessionStore(home / "gateway")
        stack.callback(lambda: asyncio.run(queue.close()))
        stack.callback(sessions.close)
        rollouts, atropos = rollouts_service(queue), Atropos(queue, listen.data_dir)
        made = {
            "tandem serve": openai_service(engine, renderer, **model),
            "tandem engine serve": engine_service(FakeEngine(), open_source, renderer=renderer, **model),
            "tandem gateway serve": gateway_service(engine, renderer, sessions, to_files(home), **model),
            "tandem online serve": online(home / "online", renderer, model),
            "tandem rollouts serve": rollouts,
            "with Atropos": with_atropos(rollouts, atropos, open_to_all=False),
            "with Atropos and no token": with_atropos(rollouts, atropos, open_to_all=True),
        }
        apps = {name: create_app(each, token=TOKEN, hosts=listen.hosts) for name, each in made.items()}
        apps["tandem online serve"].add_middleware(KeyRing, keys=Keys.of(home, TOKEN))
        yield apps
        asyncio.run(end(made["tandem online serve"]))


async def end(service: Service) -> None:
    assert service.close is not None
    await service.close()


def routes(app: FastAPI) -> list[tuple[str, str]]:
    """Method and path, with something in place of each parameter."""
    found = [(method, re.sub(r"{\w+}", "1", each.path)) for each in leaves(app.routes) for method in each.methods]
    return sorted({*found, ("GET", "/nowhere"), ("POST", "/")})


def leaves(found: Iterable[Any]) -> Iterator[Any]:
    """FastAPI keeps a router that was included as one route, whose parts know their whole path."""
    for route in found:
        if hasattr(route, "effective_candidates"):
            yield from leaves(route.effective_candidates())
        else:
            yield getattr(route, "starlette_route", None) or route


def ask(app: FastAPI, requests: list[tuple[str, str, dict[str, str]]]) -> list[int]:
    """The status of each answer; 0 for one without an end, which a stream that lets a stranger in is."""

    async def status(client: httpx.AsyncClient, method: str, path: str, headers: dict[str, str]) -> int:
        try:
            async with asyncio.timeout(3):
                return (await client.request(method, f"{URL}{path}", headers=headers)).status_code
        except TimeoutError:
            return 0

    async def all_of_them() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            return [await status(client, *each) for each in requests]

    return asyncio.run(all_of_them())


KNOWN = {"Authorization": f"Bearer {TOKEN}"}
STRANGERS = [
    {}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}, {"Authorization": TOKEN},
    {"Authorization": f"Basic {TOKEN}"}, {"Cookie": f"token={TOKEN}"}, {"X-Api-Key": TOKEN},
]  # fmt: skip
ELSEWHERE = [
    ({"Host": "evil.example"}, 421), ({"Host": "127.0.0.1.evil.example:8000"}, 421), ({"Host": ""}, 421),
    ({"Origin": "https://evil.example"}, 403), ({"Origin": "null"}, 403), ({"Sec-Fetch-Site": "cross-site"}, 403),
]  # fmt: skip


@pytest.mark.parametrize("name", OPEN)
def test_no_route_lets_a_stranger_in_but_those_that_are_listed(services: dict[str, FastAPI], name: str) -> None:
    app, closed, missed = services[name], [], []
    for method, path in routes(app):
        paths = [path, f"{path}?token={TOKEN}"]
        answers = ask(app, [(method, each, headers) for each in paths for headers in STRANGERS])
        if path in OPEN[name]:
            missed += [(method, path)] if 401 in answers else []
        else:
            closed += [(method, path)] if set(answers) != {401} else []
    assert (closed, missed) == ([], [])


@pytest.mark.parametrize("name", OPEN)
def test_no_route_answers_another_host_or_a_page_of_another_origin(services: dict[str, FastAPI], name: str) -> None:
    app = services[name]
    asked = [(method, path, KNOWN | headers, status) for method, path in routes(app) for headers, status in ELSEWHERE]
    answers = ask(app, [each[:3] for each in asked])
    assert [each for each, answer in zip(asked, answers, strict=True) if answer != each[3]] == []


@pytest.mark.parametrize("name", OPEN)
def test_another_spelling_of_an_open_path_opens_nothing(services: dict[str, FastAPI], name: str) -> None:
    spellings = ("//health", "/health/", "/health/x", "/Health", "/health%2f", "/health;x")
    assert set(ask(services[name], [("GET", each, {}) for each in spellings])) == {401}


def test_every_service_is_here(services: dict[str, FastAPI]) -> None:
    source = "".join(path.read_text() for path in Path(tandem.serve.__path__[0]).rglob("*.py"))
    names = set(re.findall(r'Service\(\s*"(tandem [\w ]+)"', source))
    assert names == {name for name in OPEN if name.startswith("tandem ")}
    assert names == {app.title for app in services.values()}
    for app in services.values():
        assert len(routes(app)) > 6
