"""The audit log: every write is in it once, and what is done to its rows is found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from plane import SECRET, SPEC, TOKEN, Served, piece, served
from sqlalchemy.orm import Session
from typer.testing import CliRunner
from wheels import push_body, wheel

from tandem.cli.main import app
from tandem.control import maintenance
from tandem.control.audit import HEAD_FILE, AuditLog, leave_note
from tandem.control.store import FILE, Store
from tandem.control.tables import AuditRow
from tandem.control.tokens import SECRET_FILE
from tandem.shapes.agent import weights_of


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Served]:
    made = served(tmp_path)
    yield made
    made.plane.store.close()


def rows(plane: Served, key: str = TOKEN) -> list[dict[str, Any]]:
    return plane.ask("GET", "/api/audit", key).json()["items"]


def test_every_write_is_in_the_log_once(plane: Served):
    document = plane.ask("GET", "/openapi.json", "").json()
    plane.made("/api/secrets", {"name": "A", "value": "canary-value"})
    secret, key = plane.ask("GET", "/api/secrets").json()["items"][0]["id"], plane.made(
        "/api/keys", {"name": "k", "scopes": ["keys"]}
    )["id"]  # fmt: skip
    run, done = plane.submit(), plane.submit(name="done")
    attempt, token = plane.open_attempt(run)
    plane.open_attempt(done)
    plane.close_attempt(done, "failed")
    deployed = plane.made("/api/deployments", {"name": "d0", "run": done, "step": 1})["id"]
    for each in plane.replica_runs():
        plane.plane.replicas.seen(each, "", "http://127.0.0.1:1", plane.now[0], {weights_of("d0@1", done, 1): ""})
    of_attempt = [
        ("/api/attempts/{id}/claim", {"instance": "i", "host": "box7"}),
        ("/api/attempts/{id}/append", {"instance": "i", "pieces": [piece("log.txt", 1, 0, b"x")]}),
        ("/api/attempts/{id}/end", {"instance": "i", "state": "succeeded"}),
    ]
    of_keys = [
        ("/api/runs", {"spec_toml": SPEC, "target": "box"}), ("/api/runs/{id}/cancel", {}),
        ("/api/runs/{id}/resume", {}), ("/api/orgs", {"name": "o"}), ("/api/projects", {"name": "p"}),
        ("/api/keys", {"name": "k", "scopes": ["keys"]}), ("/api/keys/{id}/revoke", {}),
        ("/api/secrets", {"name": "B", "value": "canary-value"}), ("/api/secrets/{id}/delete", {}),
        ("/api/deployments", {"name": "d", "run": run, "step": 1}), ("/api/deployments/{id}/promote", {"revision": 1}),
        ("/api/deployments/{id}/rollback", {}), ("/api/deployments/{id}/undeploy", {}),
        ("/api/packages", push_body(wheel())), ("/api/packages/{id}/yank", {"version": "1.0"}),
    ]  # fmt: skip
    ids = {"/api/runs/{id}/cancel": run, "/api/runs/{id}/resume": done, "/api/keys/{id}/revoke": key,
           "/api/secrets/{id}/delete": secret, "/api/packages/{id}/yank": "default-shout",
           **{f"/api/deployments/{{id}}/{verb}": "d0" for verb in ("promote", "rollback", "undeploy")}}  # fmt: skip
    # Plans and OpenAI's routes write nothing; a sign-in is in test_openid.py.
    assert {path for path, _ in (*of_attempt, *of_keys)} == {
        path for path, each in document["paths"].items() if "post" in each
    } - {
        "/api/plans", "/api/login", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings",
        "/v1/feedback",
    }  # fmt: skip
    for path, body in (*of_attempt, *of_keys):
        before = len(rows(plane))
        filled, caller = path.replace("{id}", ids.get(path, attempt)), token if "attempts" in path else TOKEN
        for _ in range(2):  # the second time it is answered, and nothing is done
            told = plane.ask("POST", filled, caller, body, Idempotency_Key=path.replace("{", "").replace("}", ""))
            assert told.status_code < 300 or path == "/api/keys", told.text
        new = rows(plane)[before:]
        if path.endswith("/append"):  # a sign of life, each second
            assert new == []
            continue
        assert [(each["action"], each["actor"]) for each in new] == [
            (f"POST {path}", attempt if "attempts" in path else "operator")
        ]
        named = {"d0": deployed}.get(part := filled.split("/")[3] if "{id}" in path else "", part)
        assert new[0]["item"] in (named or new[0]["item"], attempt)
    assert "canary-value" not in json.dumps(rows(plane))
    assert next(each for each in rows(plane) if each["action"].endswith("/claim"))["told"]["host"] == "box7"


def test_what_was_refused_is_not_in_the_log(plane: Served):
    before = len(rows(plane))
    reader = plane.key("runs:read")
    assert plane.ask("POST", "/api/runs", reader, {"spec_toml": SPEC, "target": "box"}).status_code == 403
    assert plane.ask("POST", "/api/projects", body={"name": "-"}).status_code == 422
    assert plane.ask("POST", "/api/runs/run_x/cancel", body={}).status_code == 404
    assert [each["action"] for each in rows(plane)[before:]] == ["POST /api/keys"]


def test_an_org_sees_its_own_rows_and_the_operator_those_of_the_server(plane: Served, tmp_path: Path):
    org = plane.made("/api/orgs", {"name": "other"})["id"]
    theirs = plane.key("admin", "runs:write", org=org)
    plane.submit(theirs)
    leave_note(tmp_path / "data", "control backup", to="there")
    asyncio.run(plane.plane.audit.keep(plane.plane.store))
    asyncio.run(plane.plane.audit.keep(plane.plane.store))
    assert [each["action"] for each in rows(plane, theirs)] == ["POST /api/runs"]
    seen = [(each["action"], each["told"].get("to")) for each in rows(plane)]
    assert seen == [("POST /api/orgs", None), ("POST /api/keys", None), ("control backup", "there")]
    assert rows(plane)[-1]["actor"].startswith("user ")
    page = plane.ask("GET", "/api/audit?limit=2").json()
    assert (len(page["items"]), page["next"]) == (2, "2")
    assert plane.ask("GET", "/api/audit?after=2").json()["items"][0]["action"] == "control backup"
    assert plane.ask("GET", "/api/audit", plane.key("admin", project="default")).status_code == 403


# --- what is done to the rows


def written(data: Path, database: str, count: int = 6, actor: str = "a") -> Store:
    """A log of some rows, whose newest was written down."""
    store, log = Store(data, database), AuditLog(SECRET, data)
    (data / SECRET_FILE).write_bytes(SECRET)
    for number in range(count):

        def add(session: Session, number: int = number) -> None:
            log.add(session, number, org="o", actor=actor, action="did", item=f"{number}", told={"cost": number / 3})

        asyncio.run(store.write(add))
    asyncio.run(log.keep(store))
    return store


def changed(session: Session, sql: str) -> None:
    """Change rows as one does who may write the database: the triggers are no obstacle."""
    if session.get_bind().dialect.name == "sqlite":
        session.execute(sa.text("drop trigger if exists audit_no_update"))
        session.execute(sa.text("drop trigger if exists audit_no_delete"))
    else:
        session.execute(sa.text("drop trigger if exists audit_append_only on audit"))
    for each in sql.split(";"):
        session.execute(sa.text(each))


TAMPERING = {
    "a row is changed": ("update audit set actor = 'b' where n = 3", "row 3 is not as it was written"),
    "what a row tells is changed": ("update audit set told = '{}' where n = 6", "row 6 is not as it was written"),
    "a row in the middle is deleted": ("delete from audit where n = 3", "row 3 is missing"),
    "the first row is deleted": ("delete from audit where n = 1", "row 1 is missing"),
    "the rows at the end are deleted": ("delete from audit where n > 4", "rows 5 to 6 are missing"),
    "all rows are deleted": ("delete from audit", "rows 1 to 6 are missing"),
    "a row is deleted and the others are numbered again": (
        "delete from audit where n = 3; update audit set n = n - 1 where n = 4; update audit set n = n - 1 where n = 5;"
        "update audit set n = n - 1 where n = 6", "row 3 is not as it was written",
    ),
    "two rows change places": (
        "update audit set n = 99 where n = 3; update audit set n = 3 where n = 4; update audit set n = 4 where n = 99",
        "row 3 is not as it was written, or not in its place",
    ),
    "a row is copied to the end": (
        "insert into audit select 7, at, org, actor, action, item, told, mac from audit where n = 6",
        "row 7 is not as it was written",
    ),
}  # fmt: skip


def test_what_was_done_to_the_rows_is_found(tmp_path: Path, database: str):
    store, log, found = written(tmp_path, database), AuditLog(SECRET, tmp_path), dict[str, str]()
    for name, (sql, _) in TAMPERING.items():
        with store.engine.connect() as connection, Session(connection) as session:
            assert log.verify(session).problem == ""
            changed(session, sql)
            found[name] = log.verify(session).problem
            connection.rollback()
    assert {name: said for name, said in found.items() if TAMPERING[name][1] not in said} == {}
    store.close()


def test_the_command_and_the_doctor_look_at_the_log(tmp_path: Path, database: str):
    store = written(tmp_path, database)
    assert maintenance.verify(tmp_path, database) == maintenance.Verified(6, "")
    sql, problem = TAMPERING["a row is changed"]
    asyncio.run(store.write(lambda session: changed(session, sql)))
    store.close()
    words = ["control", "audit", "--verify", "--data-dir", str(tmp_path), "--database", database]
    told = CliRunner().invoke(app, words)
    assert (told.exit_code, problem in told.stdout) == (1, True)
    said = {check.what: check for check in maintenance.doctor(tmp_path, database)}
    assert (said["audit log"].ok, problem in said["audit log"].says) == (False, True)


def test_a_row_of_another_history_of_the_same_server_is_found(tmp_path: Path):
    """As after a restored backup: each row is one that the server wrote, but not after the row before."""
    one, other = written(tmp_path / "one", ""), written(tmp_path / "other", "", actor="b")
    row = asyncio.run(other.read(lambda session: session.get_one(AuditRow, 3)))
    change = f"update audit set actor = 'b', mac = '{row.mac}' where n = 3"
    asyncio.run(one.write(lambda session: changed(session, change)))
    assert "row 3 is not as it was written" in maintenance.verify(tmp_path / "one", "").problem
    one.close()
    other.close()


def test_the_database_refuses_to_change_a_row(tmp_path: Path, database: str):
    store = written(tmp_path, database)
    for sql in ("update audit set actor = 'b' where n = 1", "delete from audit where n = 1"):
        with pytest.raises(sa.exc.DBAPIError, match="append-only"), store.engine.begin() as connection:
            connection.execute(sa.text(sql))
    store.close()
    assert maintenance.verify(tmp_path, database) == maintenance.Verified(6, "")


def test_a_log_that_went_on_after_its_newest_row_was_written_down_is_right(tmp_path: Path):
    store = written(tmp_path, "")
    head = (tmp_path / HEAD_FILE).read_bytes()
    log = AuditLog(SECRET, tmp_path)
    asyncio.run(store.write(lambda s: log.add(s, 9, org="o", actor="a", action="did", item="x", told={})))
    assert maintenance.verify(tmp_path, "") == maintenance.Verified(7, "")
    asyncio.run(log.keep(store))
    assert (tmp_path / HEAD_FILE).read_bytes() != head
    store.close()
    (tmp_path / HEAD_FILE).unlink()
    assert "is missing from the data directory" in maintenance.verify(tmp_path, "").problem
    (tmp_path / SECRET_FILE).write_bytes(b"another secret")
    assert "row 1 is not as it was written" in maintenance.verify(tmp_path, "").problem


def test_a_backup_and_its_restore_are_in_the_log_and_the_log_goes_on(tmp_path: Path):
    store = written(tmp_path / "data", "")
    store.close()
    maintenance.backup(tmp_path / "data", tmp_path / "copy", mirrors=False)
    maintenance.restore(tmp_path / "copy", tmp_path / "again")
    store, log = Store(tmp_path / "again"), AuditLog(SECRET, tmp_path / "again")
    asyncio.run(log.keep(store))
    actions: Callable[[Session], list[str]] = lambda s: list(  # noqa: E731
        s.scalars(sa.text("select action from audit order by n"))
    )
    assert asyncio.run(store.read(actions))[6:] == ["control restore"]
    store.close()
    assert maintenance.verify(tmp_path / "again", "") == maintenance.Verified(7, "")
    assert len(list((tmp_path / "data" / "audit-notes").iterdir())) == 1  # of the backup, until its server takes it
    assert (tmp_path / "again" / FILE).exists()
