"""What every provider promises: one suite, run over each by test_local.py and test_servers.py."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from places import Place

from tandem.errors import MaybeLaunched, ProviderError, ProviderRefused, ProviderSilent
from tandem.job_types import Handle, Job, Need, Sight
from tandem.protocols import Provider

_names = itertools.count()
NEED = Need(cpus=0)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def job(*argv: str, **more: Any) -> Job:
    return Job(f"tandem-t{os.getpid()}-{next(_names)}", argv, **{"need": NEED, **more})


def sh(text: str, **more: Any) -> Job:
    return job("sh", "-c", text, **more)


def begun(place: Place, wanted: Job) -> Handle:
    return run(place.provider().launch(wanted))


def seen(place: Place, handle: Handle) -> Sight:
    return run(place.provider().look([handle]))[0]


def until(place: Place, handle: Handle, *states: str) -> Sight:
    deadline = time.monotonic() + place.settle_s
    while (sight := seen(place, handle)).state not in states:
        assert time.monotonic() < deadline, f"still {sight}, not {states}"
        time.sleep(0.1)
    return sight


def text_of(place: Place, handle: Handle, path: str) -> str:
    if place.console_only and path != "console":
        file = job_directory(place, handle) / path
        return file.read_text() if file.exists() else ""
    return run(place.provider().read(handle, path, 0, 1_000_000)).decode()


def processes_with(word: str) -> list[str]:
    """The command lines on this machine that have this word, ours left out."""
    found = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if word in line and str(os.getpid()) != line.split()[0]]


def test_a_job_runs_and_ends_with_its_code(place: Place) -> None:
    handle = begun(place, sh("exit 7"))
    assert until(place, handle, "ended").code == 7


def test_a_job_that_succeeds_ends_with_0(place: Place) -> None:
    assert until(place, begun(place, job("true")), "ended").code == 0


def test_a_program_that_is_not_there_ends_with_127(place: Place) -> None:
    assert until(place, begun(place, job("no-such-program")), "ended").code == 127


def test_a_job_that_a_signal_killed_ends_with_128_and_the_signal(place: Place) -> None:
    assert until(place, begun(place, sh("kill -9 $$")), "ended").code == 137


def test_a_job_that_runs_is_seen_running(place: Place) -> None:
    handle = begun(place, job("sleep", "60"))
    assert until(place, handle, "running").code is None
    run(place.provider().end(handle, 0))


def test_a_second_launch_of_a_running_job_starts_nothing(place: Place) -> None:
    wanted = sh("echo began >> starts; sleep 1")
    handles = [begun(place, wanted), begun(place, wanted)]
    assert handles[0] == handles[1]
    until(place, handles[0], "ended")
    assert text_of(place, handles[0], "starts") == "began\n"


def test_a_launch_after_the_end_starts_nothing(place: Place) -> None:
    wanted = sh("echo began >> starts; exit 3")
    handle = begun(place, wanted)
    until(place, handle, "ended")
    assert begun(place, wanted) == handle
    time.sleep(0.5)
    assert until(place, handle, "ended").code == 3
    assert text_of(place, handle, "starts") == "began\n"


def test_twenty_launches_of_one_name_at_once_are_one_start(place: Place) -> None:
    wanted = sh("echo began >> starts; sleep 1")

    async def crowd() -> list[Handle]:
        providers = [place.provider() for _ in range(5)]
        return await asyncio.gather(*(providers[n % 5].launch(wanted) for n in range(20)))

    handles = run(crowd())
    assert len(set(handles)) == 1
    until(place, handles[0], "ended")
    assert text_of(place, handles[0], "starts") == "began\n"


def test_twenty_jobs_launched_at_once_all_run(place: Place) -> None:
    wanted = [sh(f"exit {n}") for n in range(20)]

    async def crowd(provider: Provider) -> list[Handle]:
        return list(await asyncio.gather(*(provider.launch(each) for each in wanted)))

    handles = run(crowd(place.provider()))
    assert [
        until(replace(place, settle_s=max(60.0, place.settle_s)), handle, "ended").code for handle in handles
    ] == list(range(20))


def test_find_knows_a_job_whose_launch_was_answered_to_a_process_that_died(place: Place) -> None:
    wanted = job("sleep", "60")
    begun(place, wanted)
    (found,) = run(place.provider().find(wanted.name))
    assert until(place, found, "running")
    run(place.provider().end(found, 0))


def test_find_tells_jobs_apart_by_prefix(place: Place) -> None:
    first, second = job("true"), job("true")
    mine = begun(place, replace(first, name=f"{first.name}-a"))
    begun(place, second)
    assert run(place.provider().find(f"{first.name}-")) == [mine]


def test_find_of_an_unknown_prefix_is_empty(place: Place) -> None:
    assert run(place.provider().find("never-seen-")) == []


def test_find_has_jobs_that_ended(place: Place) -> None:
    handle = begun(place, job("true"))
    until(place, handle, "ended")
    assert run(place.provider().find(handle.name)) == [handle]


def test_a_job_that_never_was_is_gone(place: Place) -> None:
    sight = seen(place, Handle("never-seen-1"))
    assert (sight.state, sight.code) == ("gone", None)
    assert sight.why


def test_look_answers_for_many_in_their_order(place: Place) -> None:
    handles = [begun(place, sh(f"exit {n}")) for n in range(3)]
    for handle in handles:
        until(place, handle, "ended")
    asked = [handles[2], Handle("never-seen-2"), handles[0], handles[1]]
    sights = run(place.provider().look(asked))
    assert [sight.handle for sight in sights] == asked
    assert [(sight.state, sight.code) for sight in sights] == [("ended", 2), ("gone", None), ("ended", 0), ("ended", 1)]


def test_look_at_nothing_is_nothing(place: Place) -> None:
    assert run(place.provider().look([])) == []


def test_a_handle_survives_as_plain_text(place: Place) -> None:
    handle = begun(place, job("true"))
    assert until(place, Handle(name=str(handle.name), key=str(handle.key)), "ended").code == 0


def test_end_sends_sigterm_and_the_job_may_end_in_its_own_way(place: Place) -> None:
    handle = begun(place, sh("trap 'echo saved > saved; exit 5' TERM; echo ready; while :; do sleep 0.1; done"))
    wait_for_text(place, handle, "ready")
    run(place.provider().end(handle, 20))
    assert until(place, handle, "ended").code == 5
    assert text_of(place, handle, "saved") == "saved\n"


def test_end_kills_what_ignores_sigterm_after_the_grace(place: Place) -> None:
    handle = begun(place, sh("trap '' TERM; echo ready; while :; do sleep 0.1; done"))
    wait_for_text(place, handle, "ready")
    before = time.monotonic()
    run(place.provider().end(handle, 1))
    assert time.monotonic() - before < place.settle_s
    assert until(place, handle, "ended", "gone").code in (137, None)


def test_end_leaves_no_process_behind_even_in_a_session_of_its_own(place: Place) -> None:
    word = f"31{os.getpid()}{next(_names)}"
    handle = begun(
        place, sh(f"(setsid sleep {word} &); sleep {word} & echo ready; trap '' TERM; while :; do sleep 0.1; done")
    )
    wait_for_text(place, handle, "ready")
    assert len(processes_with(f"sleep {word}")) >= 2
    run(place.provider().end(handle, 0.5))
    until(place, handle, "ended", "gone")
    deadline = time.monotonic() + place.settle_s
    while [line for line in processes_with(f"sleep {word}") if "sh -c" not in line]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_job_whose_first_process_was_killed_runs_until_its_others_have_ended(place: Place) -> None:
    reads_files(place)
    goes_on = "echo ready; while [ ! -e over ]; do sleep 0.1; done"
    handle = begun(place, sh(f"(setsid sh -c '{goes_on}' &); while [ ! -s console ]; do sleep 0.1; done; kill -9 $$"))
    wait_for_text(place, handle, "ready")
    until_over = time.monotonic() + 1.5
    while time.monotonic() < until_over:
        assert seen(place, handle).state == "running"
        time.sleep(0.1)
    (job_directory(place, handle) / "over").touch()
    assert until(place, handle, "ended").code == 137


def test_end_again_is_harmless(place: Place) -> None:
    handle = begun(place, sh("exit 4"))
    until(place, handle, "ended")
    for _ in range(3):
        run(place.provider().end(handle, 5))
    assert seen(place, handle).code == 4


def test_end_of_a_job_that_never_was_is_harmless(place: Place) -> None:
    run(place.provider().end(Handle("never-seen-3"), 1))


def test_end_at_once_from_two_sides_is_harmless(place: Place) -> None:
    handle = begun(place, sh("trap 'sleep 0.5; exit 6' TERM; echo ready; while :; do sleep 0.1; done"))
    wait_for_text(place, handle, "ready")

    async def both() -> None:
        await asyncio.gather(place.provider().end(handle, 10), place.provider().end(handle, 10))

    run(both())
    assert until(place, handle, "ended").code == 6


def test_a_launch_removes_directories_of_jobs_that_are_long_over_and_of_no_others(place: Place) -> None:
    old, fresh, alive = begun(place, job("true")), begun(place, job("true")), begun(place, job("sleep", "60"))
    for handle in (old, fresh):
        until(place, handle, "ended")
    until(place, alive, "running")
    then = time.time() - 32 * 86400
    for handle in (old, alive):
        os.utime(job_directory(place, handle) / ".job", (then, then))
    until(place, begun(place, job("true")), "ended")
    assert [job_directory(place, handle).exists() for handle in (old, fresh, alive)] == [False, True, True]
    run(place.provider().end(alive, 0))


def reads_files(place: Place) -> None:
    if place.console_only:
        pytest.skip("this provider reads what a job prints, and no other file")


def test_a_file_is_read_by_offset(place: Place) -> None:
    reads_files(place)
    handle = begun(place, sh("printf 0123456789 > data"))
    until(place, handle, "ended")

    async def parts() -> list[bytes]:
        provider = place.provider()
        return [await provider.read(handle, "data", *where) for where in ((0, 4), (4, 3), (7, 100), (10, 5), (99, 5))]

    assert run(parts()) == [b"0123", b"456", b"789", b"", b""]


def test_bytes_of_every_value_are_read_as_they_are(place: Place) -> None:
    reads_files(place)
    code = "import sys; open('bytes', 'wb').write(bytes(range(256)) * 300)"
    handle = begun(place, job(sys.executable, "-c", code))
    until(place, handle, "ended")
    assert run(place.provider().read(handle, "bytes", 0, 10**6)) == bytes(range(256)) * 300


def test_a_file_that_is_not_there_yet_is_empty(place: Place) -> None:
    reads_files(place)
    handle = begun(place, job("true"))
    until(place, handle, "ended")
    assert run(place.provider().read(handle, "metrics.jsonl", 0, 10)) == b""


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", "a\0b"])
def test_a_path_out_of_the_job_s_directory_is_refused(place: Place, path: str) -> None:
    with pytest.raises(ProviderRefused, match="path ="):
        run(place.provider().read(Handle("never-seen-4"), path, 0, 10))


def test_what_a_job_prints_is_its_console(place: Place) -> None:
    handle = begun(place, sh("echo out; echo err >&2"))
    until(place, handle, "ended")
    printed = sorted(text_of(place, handle, "console").splitlines())
    assert [line for line in printed if not place.console_only or line in ("err", "out")] == ["err", "out"]


ODD = [
    "plain",
    "two words",
    "it's",
    '"quoted"',
    "$HOME `id` \\n",
    "two\nlines\n",
    "",
    "-n",
    "*",
    "ü→",
    "a;b|c&d",
    "x\ty",
]


def test_arguments_arrive_byte_for_byte(place: Place) -> None:
    code = "import json, sys; json.dump(sys.argv[1:], open('argv', 'w'))"
    handle = begun(place, job(sys.executable, "-c", code, *ODD))
    until(place, handle, "ended")
    import json

    assert json.loads(text_of(place, handle, "argv")) == ODD


def test_environments_arrive_byte_for_byte(place: Place) -> None:
    code = "import json, os; json.dump({k: v for k, v in os.environ.items() if k.startswith('ODD_')}, open('env', 'w'))"
    env = {f"ODD_{n}": value for n, value in enumerate(ODD)}
    handle = begun(place, job(sys.executable, "-c", code, env=env))
    until(place, handle, "ended")
    import json

    assert json.loads(text_of(place, handle, "env")) == env


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a b", "a\nb", "-a", "a'b", "$a", "a" * 101, ".."])
def test_a_name_that_a_path_or_shell_would_read_is_refused(place: Place, name: str) -> None:
    with pytest.raises(ProviderRefused, match=r"job\.name ="):
        run(place.provider().launch(Job(name, ("true",))))


@pytest.mark.parametrize("wanted", [Job("a", ()), Job("a", ("a\0b",)), Job("a", ("x",), env={"A B": ""})])
def test_a_job_that_cannot_be_carried_out_as_written_is_refused(place: Place, wanted: Job) -> None:
    with pytest.raises(ProviderRefused, match=r"job\."):
        run(place.provider().launch(wanted))


def test_a_secret_is_in_no_argv_and_in_no_file_of_a_running_job(place: Place) -> None:
    secret = f"canary{os.getpid()}x{next(_names)}"
    found: list[str] = []

    async def watched() -> Handle:
        launching = asyncio.ensure_future(place.provider().launch(sh('test "$KEY" && sleep 30', env={"KEY": secret})))
        while not launching.done():
            found.extend(processes_with(secret))
            await asyncio.sleep(0.005)
        return launching.result()

    handle = run(watched())
    until(place, handle, "running")
    time.sleep(0.5)
    found += processes_with(secret)
    assert found == []
    files = [path for path in place.directory.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert files == []
    run(place.provider().end(handle, 0))


def test_offers_say_what_there_is_and_start_nothing(place: Place) -> None:
    offers = run(place.provider().offers(NEED))
    assert offers
    assert all(offer.name and offer.cpus >= 1 for offer in offers)
    assert any(offer.fits for offer in offers)


def test_a_need_that_can_never_be_met_says_why_not(place: Place) -> None:
    offers = run(place.provider().offers(Need(cpus=0, gpus=999)))
    assert [offer.fits for offer in offers] == [False] * len(offers)
    assert all(offer.why_not for offer in offers)


def test_a_launch_that_can_never_be_met_is_refused_with_the_reason(place: Place) -> None:
    wanted = job("true", need=Need(cpus=0, gpus=999))
    with pytest.raises(ProviderRefused, match="GPU"):
        run(place.provider().launch(wanted))
    assert run(place.provider().find(wanted.name)) == []


def test_a_silent_host_is_unknown_and_never_gone(place: Place) -> None:
    (sight,) = run(place.silent().look([Handle("tandem-x-1")]))
    assert (sight.state, sight.code) == ("unknown", None)
    assert sight.why


def test_a_launch_without_an_answer_may_have_begun(place: Place) -> None:
    with pytest.raises(MaybeLaunched):
        run(place.silent().launch(job("true")))


def test_a_silent_host_is_no_empty_list(place: Place) -> None:
    for call in (lambda p: p.find("tandem-"), lambda p: p.offers(NEED), lambda p: p.end(Handle("tandem-x-1"), 0)):
        with pytest.raises(ProviderSilent):
            run(call(place.silent()))
    with pytest.raises(ProviderError):
        run(place.silent().read(Handle("tandem-x-1"), "console", 0, 10))


def test_a_job_lives_on_when_the_server_is_killed_and_started_again(place: Place) -> None:
    if place.restart is None:
        pytest.skip("no server to kill")
    handle = begun(place, sh("echo began >> starts; sleep 2; exit 9"))
    until(place, handle, "running")
    place.restart()
    sight = until(replace(place, settle_s=60), handle, "ended", "gone")
    assert "restart" in place.can or sight.code == 9
    assert text_of(place, handle, "starts") == "began\n"


def wait_for_text(place: Place, handle: Handle, text: str) -> None:
    deadline = time.monotonic() + place.settle_s
    while text not in text_of(place, handle, "console"):
        assert time.monotonic() < deadline, text_of(place, handle, "console")
        time.sleep(0.1)


def job_directory(place: Place, handle: Handle) -> Path:
    return place.directory / handle.name
