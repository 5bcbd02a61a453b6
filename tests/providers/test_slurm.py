"""The suite over Slurm's own daemons, and what a cluster alone promises."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from places import Place, Slurm, free_port, slurm
from sentences import *  # noqa: F403
from sentences import NEED, begun, job, processes_with, run, seen, sh, text_of, until

from tandem.errors import MaybeLaunched, ProviderRefused, ProviderSilent
from tandem.job_types import Handle, Job, Need
from tandem.protocols import Provider
from tandem.providers.slurm import SlurmProvider, SlurmSettings

pytestmark = pytest.mark.skipif(not slurm(), reason="no Slurm here, or not root: make install-system")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    found = Slurm()
    yield found
    found.kill()


@pytest.fixture(scope="module")
def place(cluster: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return place_on(cluster, tmp_path_factory.mktemp("jobs"))


def place_on(cluster: Slurm, root: Path) -> Place:
    settings = SlurmSettings(directory=str(root), conf=str(cluster.conf))

    def silent() -> Provider:
        return SlurmProvider(settings.model_copy(update={"timeout_s": 1e-6}))

    return Place("slurm", lambda: SlurmProvider(settings), root, silent, settle_s=30)


def with_settings(place: Place, **more: object) -> SlurmProvider:
    provider = place.provider()
    assert isinstance(provider, SlurmProvider)
    return SlurmProvider(provider.settings.model_copy(update=more))


def test_while_the_controller_is_silent_nothing_is_concluded(cluster: Slurm, place: Place) -> None:
    conf = cluster.root / "silent.conf"
    lines = [line for line in cluster.conf.read_text().splitlines() if not line.startswith("SlurmctldPort")]
    conf.write_text("\n".join([*lines, f"SlurmctldPort={free_port()}", "MessageTimeout=1", ""]))
    silent = with_settings(place, conf=str(conf))
    handle = begun(place, job("true"))
    until(place, handle, "ended")
    assert [sight.state for sight in run(silent.look([handle, Handle("never-seen-9")]))] == ["unknown", "unknown"]
    for call in (silent.find(""), silent.offers(NEED), silent.end(handle, 0)):
        with pytest.raises(ProviderSilent, match="contact"):
            run(call)
    wanted = job("true")
    with pytest.raises(MaybeLaunched, match="contact"):
        run(silent.launch(wanted))
    assert until(place, begun(place, wanted), "ended").code == 0


def test_a_second_execution_of_a_job_ends_and_touches_nothing(place: Place) -> None:
    handle = begun(place, sh("echo began >> starts; sleep 60"))
    until(place, handle, "running")
    wait_for(lambda: text_of(place, handle, "starts") == "began\n")
    again = subprocess.run(["sh", ".job/batch"], cwd=place.directory / handle.name, capture_output=True, check=False)
    assert again.returncode == 75
    assert b"has begun before" in again.stderr
    assert text_of(place, handle, "starts") == "began\n"
    assert seen(place, handle).state == "running"
    run(place.provider().end(handle, 0))


def test_a_job_waits_in_the_queue_and_leaves_it_when_it_is_ended(place: Place) -> None:
    (offer,) = run(place.provider().offers(NEED))
    whole = Need(cpus=offer.cpus)
    handles = [begun(place, sh("echo began >> starts; sleep 60", need=whole)) for _ in range(3)]
    until(place, handles[0], "running")
    until(place, handles[1], "running")
    sight = until(place, handles[2], "waiting")
    assert "PENDING" in sight.why
    (offer,) = run(place.provider().offers(whole))
    assert (offer.fits, offer.now, offer.why_not) == (True, False, "0 of its 2 nodes are idle; it waits in the queue")
    run(place.provider().end(handles[2], 60))
    assert until(place, handles[2], "gone").why.startswith("Slurm: CANCELLED")
    assert text_of(place, handles[2], "starts") == ""
    assert begun(place, Job(handles[2].name, ("true",))) == handles[2]  # a name starts once
    assert seen(place, handles[2]).state == "gone"
    for handle in handles[:2]:
        run(place.provider().end(handle, 0))


def test_a_job_gets_the_gpus_that_it_asks_for(place: Place, cluster: Slurm) -> None:
    handle = begun(place, job("true", need=Need(cpus=0, gpus=3, gpu="H100")))
    assert until(place, handle, "ended").code == 0
    told = cluster.tell("squeue", "--states=all", "--noheader", f"--name={handle.name}", "--format=%b")
    assert told.strip() == "gres:gpu:h100:3"
    with pytest.raises(ProviderRefused, match="its GPUs are 'h100'"):
        begun(place, job("true", need=Need(gpus=1, gpu="B200")))
    with pytest.raises(ProviderRefused, match="gpu_memory_gib"):
        begun(place, job("true", need=Need(gpus=1, gpu_memory_gib=40)))
    known = with_settings(place, gpu_memory_gib=80.0)
    assert run(known.offers(Need(gpus=1, gpu_memory_gib=40)))[0].fits


def test_a_job_of_two_hosts_runs_once_on_each_and_ends_on_both(place: Place) -> None:
    word = f"32{os.getpid()}"
    two = Need(cpus=0, hosts=2)
    told = "echo $TANDEM_HOST $SLURM_NODEID $TANDEM_HOSTS $TANDEM_FIRST_HOST"
    handle = begun(place, sh(f"{told}; trap 'exit 6' TERM; sleep {word} & wait", need=two))
    wait_for(lambda: sorted(text_of(place, handle, "console").splitlines()) == ["0 0 2 127.0.0.1", "1 1 2 127.0.0.1"])
    run(place.provider().end(handle, 20))
    assert until(place, handle, "ended").code == 6
    wait_for(lambda: not processes_with(f"sleep {word}"))
    (offer,) = run(place.provider().offers(Need(hosts=3)))
    assert (offer.fits, offer.why_not) == (False, "it has 2 nodes")


def test_completed_without_an_exit_code_is_unknown_until_slurm_forgets_it(place: Place, cluster: Slurm) -> None:
    handle = begun(place, job("true"))
    until(place, handle, "ended")
    wait_for(lambda: "COMPLETED" in cluster.tell("squeue", "--states=all", f"--name={handle.name}", "--format=%T"))
    (place.directory / handle.name / ".job/rc").unlink()
    assert seen(place, handle).state == "unknown"


def test_what_sbatch_refuses_is_refused_in_its_words_and_leaves_nothing(place: Place) -> None:
    wanted = job("true")
    with pytest.raises(ProviderRefused, match="invalid partition"):
        run(with_settings(place, sbatch=("--partition=nope",)).launch(wanted))
    assert run(place.provider().find(wanted.name)) == []
    assert until(place, begun(place, wanted), "ended").code == 0


def test_no_job_runs_twice_when_the_controller_is_killed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What it had not saved it forgets, or starts again, or gives its number to another job. The exit code is on the
    disk all the same."""
    cluster = Slurm()
    try:
        place = place_on(cluster, tmp_path_factory.mktemp("jobs"))
        handles = [begun(place, sh("echo began >> starts; sleep 3; exit 9")) for _ in range(4)]
        for handle in handles[:2]:
            until(place, handle, "running")
        cluster.restart()
        time.sleep(4)
        sights = [until(place, handle, "ended", "gone") for handle in handles]
        assert {sight.code for sight in sights} <= {9, None}
        assert {text_of(place, handle, "starts") for handle in handles} <= {"began\n", ""}
    finally:
        cluster.kill()


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)
