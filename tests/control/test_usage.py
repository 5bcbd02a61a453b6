"""Usage: each attempt's seconds, once, whatever is sent twice or arrives late."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from test_transitions import LEASE_MS, Rig

from tandem.control import transitions
from tandem.control.decide import Ending
from tandem.control.maintenance import uncounted
from tandem.control.store import Store
from tandem.control.tables import Usage
from tandem.errors import Conflict, Fenced


def twice(rig: Rig, change: Any, **named: Any) -> None:
    """Do a change, and send it again, as after a lost answer."""
    for _ in range(2):
        with suppress(Conflict, Fenced):
            rig.do(change, **named)


def test_the_sum_of_usage_is_the_sum_of_the_attempts_seconds_after_replays(store: Store):
    rig, chance, expected = Rig(store), random.Random(7), 0
    for _ in range(30):
        attempt = rig.open()
        rig.now += chance.randrange(5_000)
        if chance.random() < 0.15:  # it is never claimed
            rig.close()
            continue
        twice(rig, transitions.claim, attempt_id=attempt.id, instance="me")
        began = lease = rig.now
        for tick in range(chance.randrange(4)):
            rig.now += chance.randrange(LEASE_MS)
            twice(rig, transitions.renew, attempt_id=attempt.id, instance="me", ticks=tick, limit_ms=9)
            lease = rig.now
        rig.now += chance.randrange(3 * LEASE_MS)
        if chance.random() < 0.6:
            expected += rig.now - began
            twice(rig, transitions.end, attempt_id=attempt.id, instance="me", ending=Ending("failed", "x", True))
            rig.now += chance.randrange(5_000)
            twice(rig, transitions.end, attempt_id=attempt.id, instance="me", ending=Ending("succeeded"))
        else:
            expected += min(rig.now, lease + LEASE_MS) - began
        run, newest = rig.live()
        twice(rig, transitions.close, run=run, attempt=newest, state="waiting", why="again", wait_ms=1)
    rows = asyncio.run(store.read(lambda session: session.scalars(sa.select(Usage)).all()))
    assert sum(row.ended - row.began for row in rows) == expected
    assert len({row.key for row in rows}) == len(rows) > 20
    with store.engine.connect() as connection:
        assert uncounted(connection) == ""
    for sql, said in (
        (
            "update usage set ended = ended + 1 where key = (select min(key) from usage)",
            "is not counted with its seconds",
        ),
        ("delete from usage where key = (select min(key) from usage)", "is not counted with its seconds"),
        (
            f"insert into usage select 'x', org, run, kind, began, ended, usd from usage where key = '{rows[0].key}'",
            "rows for",
        ),
    ):
        with store.engine.connect() as connection:
            connection.execute(sa.text(sql))
            assert said in uncounted(connection)
            connection.rollback()


def test_an_export_has_each_attempt_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from test_client import Running
    from typer.testing import CliRunner

    from tandem.cli.main import app

    running = Running(tmp_path)
    try:
        monkeypatch.setenv("TANDEM_CONTROL", running.server.url)
        monkeypatch.setenv("TANDEM_CONTROL_KEY", "operators-token")
        for number in range(3):
            run = running.plane.submit(name=f"run {number}")
            attempt, token = running.plane.open_attempt(run)
            running.plane.made(f"/api/attempts/{attempt}/claim", {"instance": "i"}, token)
            running.plane.now[0] += 1_500
            running.plane.close_attempt(run, "failed")
        told = CliRunner().invoke(app, ["control", "usage", "--csv"])
        rows = list(csv.DictReader(io.StringIO(told.stdout)))
        assert [(row["project"], row["seconds"], row["usd"]) for row in rows] == [("default", "1.500", "0.000833")] * 3
        assert {row["run_name"] for row in rows} == {"run 0", "run 1", "run 2"}
        assert sorted(row["began"] for row in rows)[0] == "1970-01-01T00:16:40.000Z"
        told = CliRunner().invoke(app, ["control", "usage", "--json", "--since", "1970-01-01T00:16:43"])
        assert sorted(each["ended"] for each in json.loads(told.stdout)) == [1_003_000, 1_004_500]
        assert "3 attempts, 4.500 s, 0.00 USD" in CliRunner().invoke(app, ["control", "usage"]).stdout
        wrong = CliRunner().invoke(app, ["control", "usage", "--until", "yesterday"])
        assert (wrong.exit_code, "yesterday" in wrong.output) == (2, True)
    finally:
        running.server.should_exit = True
        running.thread.join()
