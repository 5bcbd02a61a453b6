"""The suite over this machine, and what a machine alone promises."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
from places import Place
from sentences import *  # noqa: F403
from sentences import begun, run, seen, sh, text_of, until, wait_for_text

from tandem.errors import ProviderRefused
from tandem.io.process_identity import identity
from tandem.job_types import Handle, Job, Need
from tandem.protocols import Provider
from tandem.providers.machine import LocalSettings, MachineProvider


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("local")
    return local_place(root)


def local_place(root: Path) -> Place:
    def silent() -> Provider:
        """A file where the directory should be, and no time to say so."""
        return MachineProvider(LocalSettings(directory=str(root), timeout_s=1e-6))

    return Place("local", lambda: MachineProvider(LocalSettings(directory=str(root))), root, silent)


NVIDIA_SMI = """#!/bin/sh
echo '0, 81559, 4, NVIDIA H100 80GB HBM3'
echo '1, 81559, 4, NVIDIA H100 80GB HBM3'
echo '2, 24564, 20000, NVIDIA GeForce RTX 4090'
"""


@pytest.fixture
def gpu_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A machine whose nvidia-smi tells of three GPUs, one of which another program uses."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return local_place(tmp_path / "jobs")


def test_jobs_get_gpus_of_their_own_and_the_next_is_refused_until_one_ends(gpu_place: Place) -> None:
    one = Need(cpus=0, gpus=1, gpu="h100", gpu_memory_gib=70)
    text = 'echo "gpu=$CUDA_VISIBLE_DEVICES."; sleep 60'
    handles = [begun(gpu_place, sh(text, need=one)) for _ in range(2)]
    for handle in handles:
        wait_for_text(gpu_place, handle, "gpu=")
    assert sorted(text_of(gpu_place, handle, "console") for handle in handles) == ["gpu=0.\n", "gpu=1.\n"]
    (offer,) = run(gpu_place.provider().offers(one))
    assert (offer.fits, offer.now) == (True, False)
    with pytest.raises(ProviderRefused, match="of 2 such GPUs, jobs hold 2"):
        begun(gpu_place, sh("true", need=one))
    run(gpu_place.provider().end(handles[0], 0))
    third = begun(gpu_place, sh(text, need=one))
    until(gpu_place, third, "running")
    for handle in (third, handles[1]):
        run(gpu_place.provider().end(handle, 0))


def test_twenty_jobs_that_want_two_gpus_at_once_get_two(gpu_place: Place) -> None:
    wanted = [sh("sleep 60", need=Need(cpus=0, gpus=1, gpu="h100")) for _ in range(20)]

    async def crowd() -> list[object]:
        provider = gpu_place.provider()
        return list(await asyncio.gather(*(provider.launch(each) for each in wanted), return_exceptions=True))

    answers = run(crowd())
    handles = [each for each in answers if isinstance(each, Handle)]
    assert len(handles) == 2
    assert all(isinstance(each, Handle | ProviderRefused) for each in answers)
    for handle in handles:
        run(gpu_place.provider().end(handle, 0))


def test_a_gpu_that_another_program_uses_is_not_given(gpu_place: Place) -> None:
    (offer,) = run(gpu_place.provider().offers(Need(gpus=1, gpu="4090")))
    assert (offer.fits, offer.now) == (True, False)
    assert offer.why_not == "of 1 such GPUs, jobs hold 0, other programs use 1"


def test_jobs_share_the_cpus_that_there_are(place: Place) -> None:
    (offer,) = run(place.provider().offers(Need()))
    handle = begun(place, sh("sleep 60", need=Need(cpus=offer.cpus)))
    with pytest.raises(ProviderRefused, match="CPUs"):
        begun(place, sh("true", need=Need(cpus=1)))
    run(place.provider().end(handle, 0))
    assert until(place, begun(place, sh("true", need=Need(cpus=1))), "ended").code == 0


def test_a_variable_of_this_process_stays_here_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")
    monkeypatch.setenv("HF_HOME", "/models")
    provider = MachineProvider(LocalSettings(directory=str(tmp_path), pass_env=("HF_HOME",)))
    handle = run(provider.launch(sh("env")))
    there = replace(local_place(tmp_path), settle_s=10)
    until(there, handle, "ended")
    printed = text_of(there, handle, "console").splitlines()
    assert "HF_HOME=/models" in printed
    assert not [line for line in printed if "hunter2" in line]


def test_a_job_of_a_machine_that_was_restarted_is_gone(place: Place) -> None:
    handle = begun(place, sh("sleep 60"))
    until(place, handle, "running")
    written = place.directory / handle.name / ".job/pid"
    parent = written.read_text().split()[3]
    run(place.provider().end(handle, 0))
    (written.parent / "rc").unlink(missing_ok=True)
    pid, start = identity().split(":")  # a process that lives, and would be the job but for the restart
    written.write_text(f"{pid} {start} another-boot {parent}\n")
    sight = seen(place, handle)
    assert (sight.state, sight.why) == ("gone", "the machine was restarted")


def test_a_pid_that_another_process_has_by_now_is_not_the_job(place: Place) -> None:
    handle = begun(place, sh("exit 1"))
    until(place, handle, "ended")
    written = place.directory / handle.name / ".job/pid"
    _, start, boot, parent = written.read_text().split()
    (written.parent / "rc").unlink()
    written.write_text(f"{os.getpid()} {start} {boot} {parent}\n")
    assert seen(place, handle).state == "gone"
    run(place.provider().end(handle, 0))  # and we live


def test_a_launch_that_is_killed_at_any_instant_leaves_one_start_or_none(tmp_path: Path) -> None:
    place = local_place(tmp_path)
    wanted = [sh("echo began >> starts; sleep 0.2") for _ in range(25)]

    async def cut(provider: Provider, each: Job, after_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(provider.launch(each), after_s)

    async def all_cut() -> None:
        for number, each in enumerate(wanted):
            await cut(place.provider(), each, 0.0007 * number)

    run(all_cut())
    for each in wanted:
        handle = begun(place, each)
        assert until(place, handle, "ended").code == 0
        assert text_of(place, handle, "starts") == "began\n"
