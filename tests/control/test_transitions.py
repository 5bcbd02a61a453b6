"""Claims, fences, ends and requests: each is one change, and one writer wins."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tandem.control import transitions
from tandem.control.decide import LEASE_MS, AttemptView, Ending, RunView
from tandem.control.maintenance import uncounted
from tandem.control.store import Store
from tandem.control.tables import Attempt, Event, Run, Usage
from tandem.errors import Conflict, Fenced, NotKnown


class Rig:
    """One run of one org, and its newest attempt, at a time that stands still unless a test says."""

    def __init__(self, store: Store) -> None:
        self.store, self.now = store, 1_000_000
        self.org = self.do(transitions.make_org, name="one")
        self.run = self.submit()

    def do(self, change: Any, **named: Any) -> Any:
        return asyncio.run(self.store.write(partial(change, now=self.now, **named)))

    def submit(self, **more: Any) -> str:
        asked = transitions.Submitted(self.org, "quick", "recipe = 'rl'", "box", usd_per_hour=3.6, **more)
        return self.do(transitions.submit, asked=asked)

    def open(self) -> AttemptView:
        run, _ = self.live()
        self.do(transitions.open_attempt, run=run, n=run.attempt_n + 1, prefix="tandem-x-")
        return self.attempt()

    def live(self) -> tuple[RunView, AttemptView | None]:
        ((run, attempt),) = asyncio.run(self.store.read(transitions.live))
        return run, attempt

    def attempt(self) -> AttemptView:
        _, attempt = self.live()
        assert attempt is not None
        return attempt

    def claim(self, instance: str = "me") -> None:
        self.do(transitions.claim, attempt_id=self.attempt().id, instance=instance)

    def close(self, state: str = "waiting", attempt: AttemptView | None = None) -> None:
        run, newest = self.live()
        self.do(transitions.close, run=run, attempt=attempt or newest, state=state, why="because", wait_ms=5)

    def row(self, table: Any) -> Any:
        return asyncio.run(self.store.read(lambda session: session.scalars(sa.select(table)).one()))


@pytest.fixture
def rig(store: Store) -> Rig:
    return Rig(store)


def test_of_twenty_claims_at_once_one_wins(rig: Rig):
    attempt = rig.open()

    async def all_claim() -> list[object]:
        claims = [partial(transitions.claim, attempt_id=attempt.id, instance=f"{n}", now=rig.now) for n in range(20)]
        return await asyncio.gather(*map(rig.store.write, claims), return_exceptions=True)

    done = asyncio.run(all_claim())
    assert done.count(True) == 1
    assert sum(isinstance(each, Conflict) for each in done) == 19
    assert rig.row(Attempt).claimed_by == str(done.index(True))


def test_the_same_execution_may_ask_again(rig: Rig):
    rig.open()
    rig.claim()
    rig.now += 5
    rig.claim()
    assert rig.attempt().claimed_at == 1_000_000
    assert (
        asyncio.run(rig.store.read(lambda s: s.scalar(sa.select(sa.func.count()).where(Event.kind == "attempt")))) == 1
    )


def test_a_late_claim_of_a_closed_attempt_is_refused(rig: Rig):
    attempt = rig.open()
    rig.close()
    with pytest.raises(Conflict, match="was closed; end here, and write nothing"):
        rig.do(transitions.claim, attempt_id=attempt.id, instance="late")


def test_an_attempt_that_was_claimed_meanwhile_is_not_closed(rig: Rig):
    as_read = rig.open()
    rig.claim()
    with pytest.raises(Conflict, match="has changed since it was read"):
        rig.close(attempt=as_read)
    assert (rig.row(Run).state, rig.row(Attempt).state) == ("starting", "claimed")


def test_an_attempt_whose_lease_was_renewed_meanwhile_is_not_closed(rig: Rig):
    rig.open()
    rig.claim()
    as_read = rig.attempt()
    rig.now += 1000
    rig.do(transitions.renew, attempt_id=as_read.id, instance="me", ticks=1, limit_ms=10)
    with pytest.raises(Conflict):
        rig.close(attempt=as_read)
    as_read = rig.attempt()
    rig.do(transitions.end, attempt_id=as_read.id, instance="me", ending=Ending("succeeded"))
    with pytest.raises(Conflict):
        rig.close(attempt=as_read)
    assert rig.row(Run).state == "starting"


def test_an_execution_whose_attempt_was_closed_is_fenced(rig: Rig):
    attempt = rig.open()
    rig.claim()
    rig.close()
    with pytest.raises(Fenced):
        rig.do(transitions.renew, attempt_id=attempt.id, instance="me", ticks=1, limit_ms=10)
    with pytest.raises(Fenced):
        rig.do(transitions.end, attempt_id=attempt.id, instance="me", ending=Ending("succeeded"))


def test_the_first_word_about_an_end_counts(rig: Rig):
    attempt = rig.open()
    rig.claim()
    for state in ("failed", "succeeded"):
        rig.do(transitions.end, attempt_id=attempt.id, instance="me", ending=Ending(state, "first"))
    assert rig.attempt().end == Ending("failed", "first")


def test_only_a_tick_counts_as_progress(rig: Rig):
    attempt = rig.open()
    rig.claim()
    moved: list[int] = []
    for ticks in (5, 5, 6):
        rig.now += 1000
        rig.do(transitions.renew, attempt_id=attempt.id, instance="me", ticks=ticks, limit_ms=10)
        moved.append(rig.attempt().moved_at - 1_000_000)
        assert rig.attempt().lease_until == rig.now + LEASE_MS
    assert moved == [1000, 1000, 3000]


def test_a_lease_is_told_what_the_owner_wants(rig: Rig):
    attempt = rig.open()
    rig.claim()
    told = [rig.do(transitions.renew, attempt_id=attempt.id, instance="me", ticks=1, limit_ms=10)]
    for want in ("stop", "cancel", "stop"):  # a cancel cannot be taken back to a stop
        rig.do(transitions.ask_to_end, org=rig.org, run_id=rig.run, want=want)
        told.append(rig.do(transitions.renew, attempt_id=attempt.id, instance="me", ticks=1, limit_ms=10))
    assert told == ["run", "stop", "cancel", "cancel"]


def test_a_claimed_attempt_is_counted_once_until_its_end_or_its_lease(rig: Rig):
    attempt = rig.open()
    rig.claim()
    rig.now += 1000
    rig.do(transitions.end, attempt_id=attempt.id, instance="me", ending=Ending("succeeded"))
    rig.now += 5000
    rig.close("succeeded")
    used = rig.row(Usage)
    assert (used.key, used.ended - used.began) == (f"{attempt.id}:compute", 1000)
    assert used.usd == pytest.approx(3.6 / 3600)


def test_a_lost_attempt_is_counted_until_its_lease_ran_out(rig: Rig):
    rig.open()
    rig.claim()
    rig.now += 10 * LEASE_MS
    rig.close()
    assert rig.row(Usage).ended - rig.row(Usage).began == LEASE_MS


@pytest.fixture
def limited(rig: Rig) -> Rig:
    """Its run may cost what 100 s do; a run before has cost as much as 1000 s."""
    attempt = rig.open()
    rig.claim()
    rig.now += 1_000_000
    rig.do(transitions.end, attempt_id=attempt.id, instance="me", ending=Ending("succeeded"))
    rig.close("succeeded")
    rig.submit(max_cost_usd=0.1)
    rig.open()
    rig.claim()
    return rig


def test_the_costs_of_another_run_are_not_this_ones(limited: Rig):
    attempt = limited.attempt()
    renew = partial(limited.do, transitions.renew, attempt_id=attempt.id, instance="me", ticks=1, limit_ms=10)
    assert renew() == "run"
    limited.now += 79_000
    assert renew() == "stop"
    limited.now += 10_000
    assert renew() == "cancel"


def test_a_claim_says_what_the_costs_demand_from_now_on(limited: Rig):
    limited.now += 1_000  # a claim whose answer was lost

    def limits(session: Session) -> Any:
        run, attempt = session.scalars(sa.select(Run).where(Run.max_cost_usd > 0)).one(), limited.attempt()
        return transitions.limits_of(session, run, session.get_one(Attempt, attempt.id), limited.now)

    assert asyncio.run(limited.store.read(limits)).model_dump() == {"stop_s": 77.0, "cancel_s": 87.0, "spent_s": 99.0}


def test_a_silent_agent_keeps_to_its_limit_and_is_counted_until_then(limited: Rig):
    attempt = limited.attempt()
    limited.now += 60_000
    limited.do(transitions.renew, attempt_id=attempt.id, instance="me", ticks=1, limit_ms=10)
    limited.now += 10 * LEASE_MS
    limited.close("stopped")
    newest = limited.do(lambda session, now: session.scalars(sa.select(Usage).order_by(Usage.ended.desc())).first())
    assert newest.ended - newest.began == 100_000
    with limited.store.engine.connect() as connection:
        assert uncounted(connection) == ""


def test_a_run_that_its_costs_have_ended_is_resumed_when_it_may_cost_more(limited: Rig):
    attempt = limited.attempt()
    run = limited.live()[0].id
    limited.now += 90_000
    limited.do(transitions.end, attempt_id=attempt.id, instance="me", ending=Ending("stopped"))
    limited.close("stopped")
    with pytest.raises(Conflict, match=r"max_cost_usd = 0.1: run '.*' has cost 0.09 USD, and the rest"):
        limited.do(transitions.resume, org=limited.org, run_id=run)
    limited.do(transitions.resume, org=limited.org, run_id=run, max_cost_usd=0.2)
    limited.open()
    limited.claim()
    assert (limited.live()[0].max_cost_usd, round(limited.live()[0].spent_usd, 9)) == (0.2, 0.09)
    limited.now += 80_000
    renew = partial(limited.do, transitions.renew, attempt_id=limited.attempt().id, instance="me", limit_ms=10)
    assert renew(ticks=1) == "run"
    limited.now += 25_000
    assert renew(ticks=2) == "cancel"


def test_an_attempt_that_was_never_claimed_costs_nothing(rig: Rig):
    rig.open()
    rig.close()
    assert asyncio.run(rig.store.read(lambda session: session.scalars(sa.select(Usage)).all())) == []


def test_a_failed_run_is_resumed_with_a_further_attempt_and_fresh_retries(rig: Rig):
    rig.open()
    rig.close()
    rig.open()
    rig.close("failed")
    rig.do(transitions.resume, org=rig.org, run_id=rig.run)
    run, _ = rig.live()
    assert (run.state, run.want, run.retries_left, run.attempt_n) == ("queued", "run", 3, 2)
    assert rig.open().n == 3


def test_what_cannot_be_resumed_says_so(rig: Rig):
    with pytest.raises(Conflict, match="is queued; only one that stopped, failed or was cancelled can be resumed"):
        rig.do(transitions.resume, org=rig.org, run_id=rig.run)


def test_an_ended_run_is_not_cancelled(rig: Rig):
    rig.open()
    rig.close("succeeded")
    rig.do(transitions.ask_to_end, org=rig.org, run_id=rig.run, want="cancel")
    assert (rig.row(Run).want, rig.row(Run).state) == ("run", "succeeded")


def test_another_orgs_run_does_not_exist(rig: Rig):
    other = rig.do(transitions.make_org, name="two")
    for change, more in ((transitions.ask_to_end, {"want": "cancel"}), (transitions.resume, {})):
        with pytest.raises(NotKnown, match="there is no run"):
            rig.do(change, org=other, run_id=rig.run, **more)


def test_a_writer_that_read_an_earlier_row_writes_nothing(rig: Rig):
    run, _ = rig.live()
    rig.do(transitions.ask_to_end, org=rig.org, run_id=rig.run, want="cancel")
    with pytest.raises(Conflict):
        rig.do(transitions.open_attempt, run=run, n=1, prefix="tandem-x-")
    assert rig.live()[1] is None


def test_a_job_is_noted_only_while_its_attempt_is_not_closed(rig: Rig):
    from tandem.job_types import Handle

    attempt = rig.open()
    asyncio.run(rig.store.write(partial(transitions.note_handle, attempt=attempt, handle=Handle("n", "7"))))
    assert rig.attempt().handle == Handle("n", "7")
    rig.close()
    asyncio.run(rig.store.write(partial(transitions.note_handle, attempt=attempt, handle=Handle("n", "8"))))
    assert rig.row(Attempt).handle == {"name": "n", "key": "7"}


def test_events_are_numbered_without_gaps(rig: Rig):
    rig.open()
    rig.claim()
    rig.close("failed")

    def told(session: Session) -> list[tuple[int, str, Any]]:
        return [(row.n, row.kind, row.body.get("state")) for row in session.scalars(sa.select(Event).order_by(Event.n))]

    assert asyncio.run(rig.store.read(told)) == [
        (1, "state", "queued"), (2, "state", "starting"), (3, "attempt", "claimed"), (4, "state", "failed"),
    ]  # fmt: skip


def test_views_say_what_the_rows_say(rig: Rig):
    rig.open()
    run, attempt = rig.live()
    assert attempt is not None
    assert replace(run, rev=0) == RunView(
        rig.run, "starting", "run", attempt_n=1, wanted_at=1_000_000, spec_toml="recipe = 'rl'", usd_per_hour=3.6
    )
    assert (attempt.name, attempt.state, attempt.target) == (f"tandem-x-{rig.run}-1", "open", "box")
