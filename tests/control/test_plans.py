"""POST /api/plans: what a spec needs on a target, planned in a process of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from plane import SPEC, TOKEN, Served, served
from test_client import SPEC_TABLES, Running

from tandem.client import AsyncTandem
from tandem.errors import ControlInvalid, ControlNotAllowed
from tandem.recipes.plan_offers import ChildPlanner, plan_offers
from tandem.serve.http.refusals import RequestRefused
from tandem.shapes.plans import PlanBody
from tandem.shapes.runs import OfferInfo, TargetInfo

BODY = {"spec_toml": SPEC, "target": "box"}
OFFERS = [
    OfferInfo(name="cpu", cpus=8, usd_per_hour=2.0), OfferInfo(name="dear", cpus=8, usd_per_hour=4.0),
    OfferInfo(name="odd", gpus=1, gpu="abacus", usd_per_hour=9.0),
]  # fmt: skip
BOX = TargetInfo(name="box", kind="ssh", offers=OFFERS)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return served(tmp_path_factory.mktemp("plans"))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    made = Running(tmp_path_factory.mktemp("plans"))
    yield made
    made.server.should_exit = True
    made.thread.join()


def test_each_offer_has_its_estimate_and_the_cost_lies_between_the_cheapest_and_the_dearest():
    found = plan_offers(PlanBody.model_validate(BODY), BOX)
    cheap, dear, odd = found.estimates
    assert cheap.fits
    assert cheap.memory_gib > 0
    assert cheap.cost_usd == pytest.approx(cheap.seconds / 3600 * 2)
    assert dear.cost_usd == pytest.approx(2 * cheap.cost_usd)
    assert odd.why_not.endswith("not 'abacus'")
    assert (found.cost_low_usd, found.cost_high_usd) == (cheap.cost_usd, dear.cost_usd)
    assert found.best == cheap
    assert cheap.text.startswith("cpu: ")


@pytest.mark.slow
def test_a_child_process_plans_the_same():
    body = PlanBody.model_validate(BODY)
    there = asyncio.run(ChildPlanner()(body, BOX))
    assert there.model_dump(exclude={"estimates"}) == plan_offers(body, BOX).model_dump(exclude={"estimates"})
    assert [each.memory_gib for each in there.estimates] == [
        each.memory_gib for each in plan_offers(body, BOX).estimates
    ]


def test_a_child_that_is_not_done_in_time_is_ended():
    with pytest.raises(RequestRefused, match=r"was not made within 0\.01 s"):
        asyncio.run(ChildPlanner(deadline_s=0.01)(PlanBody.model_validate(BODY), BOX))


def test_both_clients_plan(running: Running):
    with running.client() as tandem:
        found = tandem.plan(SPEC_TABLES, target="box", prompt_tokens=100)
        assert found != tandem.plan(SPEC_TABLES, target="box", prompt_tokens=50)

    async def waited() -> object:
        async with AsyncTandem(running.server.url, TOKEN) as server:
            return await server.plan(SPEC_TABLES, target="box", prompt_tokens=100)

    assert found.best is not None
    assert found.best.fits
    assert asyncio.run(waited()) == found


@pytest.mark.parametrize(
    ("change", "field", "told"),
    [
        ({"target": "nowhere"}, "target", "this server has box, free"),
        ({"spec_toml": "x ="}, "spec_toml", "is not TOML"),
        ({"spec_toml": SPEC.replace("steps = 1", "steps = -1")}, "", "train.steps"),
        ({"prompt_tokens": 0}, "prompt_tokens", "prompt_tokens"),
        ({"more": 1}, "more", "more"),
    ],
)
def test_a_wrong_plan_is_refused_as_a_wrong_run_is(plane: Served, change: dict[str, object], field: str, told: str):
    refused = plane.ask("POST", "/api/plans", body={**BODY, **change})
    assert refused.status_code == 422
    error = refused.json()["error"]
    assert told in error["message"]
    assert not field or error["field"] == field
    if change.keys() <= {"target", "spec_toml"}:
        assert plane.ask("POST", "/api/runs", body={**BODY, **change}).json() == refused.json()


def test_a_key_that_may_not_submit_may_not_plan(plane: Served):
    assert plane.ask("POST", "/api/plans", plane.key("runs:read"), BODY).status_code == 403


def test_the_document_has_the_route(plane: Served):
    operation = plane.ask("GET", "/openapi.json").json()["paths"]["/api/plans"]["post"]
    assert operation["security"] == [{"token": ["runs:write"]}]
    assert operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/PlanInfo")


def test_a_plan_runs_no_code_that_the_spec_names(plane: Served, tmp_path: Path):
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    code = f"{tmp_path}/mine.py"
    spec = {**SPEC_TABLES, "environment": {"name": f"{code}:Task"}, "algorithm": {"name": f"{code}:loss"}}
    assert plane.ask("POST", "/api/plans", body={**BODY, "spec_toml": tomli_w.dumps(spec)}).status_code == 200
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_control_server_starts_without_torch():
    code = (
        "import sys; import tandem.recipes.plan_offers, tandem.assistant.desk; "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(told.replace("'", '"')) == []


def test_errors_are_typed_in_the_client(running: Running):
    with running.client() as tandem, pytest.raises(ControlInvalid, match="this server has box"):
        tandem.plan(SPEC_TABLES, target="nowhere")
    with running.client(running.plane.key("runs:read")) as tandem, pytest.raises(ControlNotAllowed):
        tandem.plan(SPEC_TABLES, target="box")
