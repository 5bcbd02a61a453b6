"""Secrets: sealed in the database, handed over by a claim, and in no other answer, log or file."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from plane import SPEC, TOKEN, Served, served
from pydantic import ValidationError

from tandem.agent.link import Link
from tandem.control import vault
from tandem.control.sealing import MASTER_FILE, MASTER_VARIABLE, MasterKeys, read_master_keys
from tandem.control.tables import Secret
from tandem.errors import SpecError, StoreError
from tandem.shapes.agent import ClaimBody, Claimed
from tandem.shapes.runs import SecretBody

CANARY = "canary-5f1c9e7a-value"
OLD, NEW = b"o" * 32, b"n" * 32


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Served]:
    made = served(tmp_path)
    yield made
    made.plane.store.close()


def put(plane: Served, name: str = "HF_TOKEN", value: str = CANARY, key: str = TOKEN, **more: Any) -> str:
    return plane.made("/api/secrets", {"name": name, "value": value, **more}, key)["id"]


def claimed(plane: Served, run: str) -> dict[str, str]:
    attempt, token = plane.open_attempt(run)
    return plane.made(f"/api/attempts/{attempt}/claim", {"instance": "i"}, token)["secrets"]


def test_sealed_bytes_open_for_their_owner_and_key_only():
    keys, others = MasterKeys([OLD]), MasterKeys([NEW])
    sealed = keys.seal("a value", "org\n\nNAME")
    assert keys.open(sealed, "org\n\nNAME") == "a value"
    assert b"a value" not in sealed.content + sealed.wrapped
    assert keys.seal("a value", "org\n\nNAME").content != sealed.content
    with pytest.raises(StoreError, match="was changed outside the control plane"):
        keys.open(sealed, "another org\n\nNAME")
    with pytest.raises(StoreError, match="which this server has not"):
        others.open(sealed, "org\n\nNAME")
    again = MasterKeys([NEW, OLD]).wrap_again(sealed, "org\n\nNAME")
    assert (again.content, again.master) == (sealed.content, others.first)
    assert others.open(again, "org\n\nNAME") == "a value"


def test_the_master_keys_are_of_the_named_file_the_variable_or_the_data_directory(tmp_path: Path):
    own = read_master_keys(tmp_path / "data", env={})
    file = tmp_path / "data" / MASTER_FILE
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_master_keys(tmp_path / "data", env={}).first == own.first
    env = {MASTER_VARIABLE: NEW.hex()}
    assert read_master_keys(tmp_path / "data", env=env).first == MasterKeys([NEW]).first
    assert env == {}  # no child process gets it
    (tmp_path / "named").write_text(f"{NEW.hex()}\n{OLD.hex()}\n")
    named = read_master_keys(tmp_path / "data", tmp_path / "named", {MASTER_VARIABLE: OLD.hex()})
    assert named.first == MasterKeys([NEW]).first
    assert MasterKeys([OLD]).first in named
    (tmp_path / "named").write_text("canary\n")
    with pytest.raises(SpecError, match="64 hexadecimal digits") as refused:
        read_master_keys(tmp_path, tmp_path / "named", {})
    assert "canary" not in str(refused.value)
    with pytest.raises(SpecError, match="cannot be read: FileNotFoundError"):
        read_master_keys(tmp_path, tmp_path / "none", {})


def test_a_claim_hands_over_the_secrets_that_the_run_names(plane: Served):
    put(plane)
    put(plane, "OTHER", "not asked for")
    run = plane.submit(secrets=["HF_TOKEN"])
    put(plane, value="newer")  # the next attempt gets it
    assert claimed(plane, run) == {"HF_TOKEN": "newer"}
    assert claimed(plane, plane.submit()) == {}


def test_a_value_is_in_no_answer_and_in_no_page_of_the_database(
    plane: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    body = f'{{"name": "HF_TOKEN", "value": "{CANARY}"}}'.encode()
    first = plane.ask("POST", "/api/secrets", body=body, Idempotency_Key="one")
    again = plane.ask("POST", "/api/secrets", body=body, Idempotency_Key="one")
    other = plane.ask("POST", "/api/secrets", body=body.replace(b"canary", b"second"), Idempotency_Key="one")
    wrong = plane.ask("POST", "/api/secrets", body=body.replace(b"HF_TOKEN", b"PATH"))
    extra = plane.ask("POST", "/api/secrets", body={"name": "A", "value": CANARY + "\0"})
    assert [each.status_code for each in (first, again, other, wrong, extra)] == [201, 201, 409, 422, 422]
    assert first.json() == again.json()
    run = plane.submit(secrets=["HF_TOKEN"])
    assert claimed(plane, run) == {"HF_TOKEN": CANARY}
    paths = [f"/api/runs/{run}", "/api/runs", f"/api/runs/{run}/events", f"/api/runs/{run}/attempts", "/api/secrets"]
    told = [plane.ask("GET", path) for path in paths]
    assert all(each.status_code == 200 for each in told)
    answers = "".join(each.text for each in (first, again, other, wrong, extra, *told))
    assert CANARY not in answers + caplog.text
    digest = hashlib.sha256(b"POST /api/secrets\n" + body)  # a guess at a value could be checked with it
    hidden = [CANARY.encode(), base64.b64encode(CANARY.encode())[:-4], digest.digest(), digest.hexdigest().encode()]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"control.sqlite3", "control.sqlite3-wal"} <= {path.name for path in files}
    assert [path for path in files for each in hidden if each in path.read_bytes()] == []


def test_a_projects_secret_is_for_its_runs_and_comes_before_the_orgs(plane: Served):
    plane.made("/api/projects", {"name": "p"})
    put(plane, "BOTH", "the org's")
    put(plane, "BOTH", "the project's", project="p")
    put(plane, "ONE", "only the project's", project="p")
    assert claimed(plane, plane.submit(secrets=["BOTH"])) == {"BOTH": "the org's"}
    inside = plane.submit(secrets=["BOTH", "ONE"], project="p")
    assert claimed(plane, inside) == {"BOTH": "the project's", "ONE": "only the project's"}
    outside = plane.ask("POST", "/api/runs", body={"spec_toml": SPEC, "target": "box", "secrets": ["ONE"]})
    assert outside.status_code == 409
    of_project = plane.key("secrets", "runs:write", project="p")
    assert plane.ask("POST", "/api/secrets", of_project, {"name": "MINE", "value": "v"}).status_code == 403
    put(plane, "MINE", key=of_project, project="p")
    seen = plane.ask("GET", "/api/secrets", of_project).json()["items"]
    assert [each["name"] for each in seen] == ["BOTH", "MINE", "ONE"]
    orgs = next(each["id"] for each in plane.ask("GET", "/api/secrets").json()["items"] if not each["project"])
    assert plane.ask("POST", f"/api/secrets/{orgs}/delete", of_project, {}).status_code == 404


def test_a_run_cannot_name_a_secret_that_is_not_there(plane: Served):
    body = {"spec_toml": SPEC, "target": "box", "secrets": ["HF_TOKEN"]}
    answer = plane.ask("POST", "/api/runs", body=body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (409, "secrets")
    assert "tandem control secret set HF_TOKEN" in answer.text
    secret = put(plane)
    run = plane.submit(secrets=["HF_TOKEN"])
    kept = plane.ask("POST", f"/api/secrets/{secret}/delete", body={})
    assert (kept.status_code, run in kept.text) == (409, True)
    plane.open_attempt(run)
    plane.close_attempt(run, "failed")
    assert plane.ask("POST", f"/api/secrets/{secret}/delete", body={}).status_code == 200
    assert plane.ask("POST", f"/api/runs/{run}/resume", body={}).status_code == 409
    put(plane)
    assert plane.ask("POST", f"/api/runs/{run}/resume", body={}).status_code == 202


def test_a_new_master_key_seals_every_secret_and_a_missing_one_is_refused(plane: Served):
    store = plane.plane.store
    put(plane)
    old = plane.plane.keys
    both = MasterKeys([NEW, *old._keys.values()])
    assert asyncio.run(store.write(lambda session: vault.wrap_all_again(session, both))) == 1
    assert asyncio.run(store.write(lambda session: vault.wrap_all_again(session, both))) == 0
    with pytest.raises(SpecError, match="start with the file that has its line"):
        asyncio.run(store.write(lambda session: vault.wrap_all_again(session, old)))

    def opened(session: Any) -> str:
        row = session.scalars(sa.select(Secret)).one()
        return MasterKeys([NEW]).open(vault.sealed_of(row), vault.owner_of(row))

    assert asyncio.run(store.read(opened)) == CANARY


def test_no_error_text_quotes_a_value(caplog: pytest.LogCaptureFixture):
    import httpx

    with pytest.raises(ValidationError) as refused:
        SecretBody(name="A", value=f"{CANARY}\0")
    body = SecretBody(name="A", value=CANARY)
    content = b'{"attempt": 7, "secrets": {"A": "' + CANARY.encode() + b'"}}'  # not what an agent understands
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=content))
    assert Link("http://there", "t", transport=transport).ask("claim", ClaimBody(instance="i"), Claimed) is None
    claimed = Claimed(attempt="a", run="r", n=1, name="n", spec_toml="", lease_s=1, secrets={"A": CANARY})
    assert "an answer that is none" in caplog.text
    assert CANARY not in f"{refused.value} {body!r} {claimed!r} {caplog.text}"
