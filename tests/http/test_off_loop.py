"""Work beside the event loop: its results, what ends it, and what it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
from served import wait_until

from tandem.serve.http import off_loop as beside
from tandem.serve.http.off_loop import OffLoop
from tandem.serve.http.refusals import RequestRefused


class Large:
    pass


def loop_for_ever() -> None:
    while True:
        with suppress(Exception):  # as foreign code does
            sum(range(100))


def test_what_it_returns_and_raises_comes_back_and_nothing_of_it_stays() -> None:
    async def scenario() -> None:
        aside = OffLoop()
        large = Large()
        gone = weakref.ref(large)

        def fails(large: Large) -> None:
            raise ValueError("no")

        assert await aside(lambda one, two: one + two, 1, 2) == 3
        gc.disable()
        try:
            with pytest.raises(ValueError, match="no"):
                await aside(fails, large)
            del large
            await asyncio.sleep(0.05)
            assert gone() is None, "held by a ring of references, until the collector comes by"
        finally:
            gc.enable()

    asyncio.run(scenario())


def test_what_loops_is_ended_at_its_deadline_and_others_have_its_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "DEADLINE_S", 5.0)  # for a seat, too

    async def scenario() -> None:
        aside = OffLoop(at_a_time=1)
        with pytest.raises(RequestRefused, match=r"0\.2 s"):
            await aside(loop_for_ever, deadline_s=0.2)
        assert await aside(lambda: "next") == "next"
        cancelled = asyncio.create_task(aside(loop_for_ever))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        assert await aside(lambda: "next") == "next"

    asyncio.run(scenario())
    wait_until(lambda: not any(thread.name == "aside" for thread in threading.enumerate()))


def test_where_all_seats_are_taken_a_request_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "DEADLINE_S", 0.1)
    go = threading.Event()

    async def scenario() -> None:
        aside = OffLoop(at_a_time=1)
        first = asyncio.create_task(aside(go.wait, 5.0, deadline_s=5.0))
        await asyncio.sleep(0.05)
        with pytest.raises(RequestRefused) as refused:
            await aside(lambda: None)
        assert refused.value.status == 429
        go.set()
        assert await first

    asyncio.run(scenario())


def test_no_more_at_a_time_than_there_are_seats() -> None:
    running, most = [0], [0]

    def work() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.02)
        running[0] -= 1

    async def scenario() -> None:
        aside = OffLoop(at_a_time=2)
        await asyncio.gather(*(aside(work) for _ in range(8)))

    asyncio.run(scenario())
    assert most == [2]


STUCK = """
import sys, time
from pathlib import Path
from fastapi import APIRouter
from tandem.serve.http import run
from tandem.serve.http.service import Service, create_app

run._END_S = 1.0
router = APIRouter()

async def stuck() -> None:
    print("stuck", flush=True)
    while True:
        time.sleep(60)

router.add_api_route("/stuck", stuck, methods=["GET"])
app = create_app(Service("s", router, open_paths=frozenset({"/stuck"})), token="t", hosts=None)
run.serve_forever(app, run.Listen(Path(sys.argv[1])), tell=lambda text: print(text.split()[3], flush=True))
"""


def test_sigterm_ends_a_service_whose_event_loop_hangs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STUCK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            asks = [sys.executable, "-c", f"import urllib.request as u; u.urlopen('{url}/stuck', timeout=60)"]
            with subprocess.Popen(asks, stderr=subprocess.DEVNULL) as asking:
                assert process.stdout.readline() == "stuck\n"
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=20) == 1
                asking.kill()
            assert process.stderr is not None
            assert "in stuck" in process.stderr.read(), "where it stood is told"
        finally:
            process.kill()
