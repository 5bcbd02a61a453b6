"""What a SkyPilot target promises: over SkyPilot's own API server, and machines that it really starts, on Slurm.

Each machine takes a minute or two to start, so of the suite those sentences are here that need no machine, and the ones
about a job's whole life. No cloud and no Kubernetes was ever tried. `make test-skypilot`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import skypilot_place
from places import Place
from sentences import (  # noqa: F401 - collected here
    NEED,
    begun,
    job,
    run,
    seen,
    sh,
    test_a_job_that_cannot_be_carried_out_as_written_is_refused,
    test_a_job_that_never_was_is_gone,
    test_a_launch_that_can_never_be_met_is_refused_with_the_reason,
    test_a_launch_without_an_answer_may_have_begun,
    test_a_name_that_a_path_or_shell_would_read_is_refused,
    test_a_need_that_can_never_be_met_says_why_not,
    test_a_path_out_of_the_job_s_directory_is_refused,
    test_a_secret_is_in_no_argv_and_in_no_file_of_a_running_job,
    test_a_silent_host_is_no_empty_list,
    test_a_silent_host_is_unknown_and_never_gone,
    test_arguments_arrive_byte_for_byte,
    test_end_of_a_job_that_never_was_is_harmless,
    test_environments_arrive_byte_for_byte,
    test_find_of_an_unknown_prefix_is_empty,
    test_look_at_nothing_is_nothing,
    test_offers_say_what_there_is_and_start_nothing,
    test_twenty_launches_of_one_name_at_once_are_one_start,
    text_of,
    until,
    wait_for_text,
)
from skypilot_place import SkyPilot

from tandem.errors import ProviderRefused
from tandem.providers.skypilot import SkyPilotProvider

_MISSING = skypilot_place.missing()
pytestmark = [pytest.mark.skipif(bool(_MISSING), reason=_MISSING), pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def sky() -> Iterator[SkyPilot]:
    found = SkyPilot()
    yield found
    found.kill()


@pytest.fixture(scope="module")
def place(sky: SkyPilot) -> Place:
    return sky.place


def test_a_job_s_whole_life(place: Place, sky: SkyPilot, tmp_path: Path) -> None:
    trap = f"trap 'echo saved > {tmp_path}/saved; exit 5' TERM"
    wanted = sh(f"{trap}; echo began >> starts; echo ready; while :; do sleep 0.1; done")
    handle = begun(place, wanted)
    assert begun(place, wanted) == handle
    assert run(place.provider().find(handle.name)) == [handle]
    assert seen(place, handle).state == "waiting"
    until(place, handle, "running")
    wait_for_text(place, handle, "ready")
    assert begun(place, wanted) == handle
    time.sleep(5)
    assert text_of(place, handle, "starts") == "began\n"
    assert text_of(place, handle, "never-written") == ""
    (machine,) = [name for name in sky.machines() if name.startswith(handle.name)]
    run(place.provider().end(handle, 20))
    assert (tmp_path / "saved").read_text() == "saved\n"
    assert machine not in sky.machines()
    assert seen(place, handle).state == "gone"
    with pytest.raises(ProviderRefused, match="its machine is gone"):
        run(place.provider().read(handle, "console", 0, 10))
    assert begun(place, wanted) == handle  # a name starts once, also after its machine was removed
    time.sleep(5)
    assert machine not in sky.machines()
    run(place.provider().end(handle, 0))


def test_a_job_that_ends_tells_its_code_and_its_machine_removes_itself(place: Place, sky: SkyPilot) -> None:
    provider = place.provider()
    assert isinstance(provider, SkyPilotProvider)
    settings = provider.settings.model_copy(update={"idle_minutes": 1})
    handle = run(SkyPilotProvider(settings).launch(sh("exit 7")))
    assert until(place, handle, "ended").code == 7
    assert run(place.provider().find(handle.name)) == [handle]
    deadline = time.monotonic() + 300
    while [name for name in sky.machines() if name.startswith(handle.name)]:
        assert time.monotonic() < deadline
        time.sleep(2)
    assert until(place, handle, "gone").code is None


def test_a_launch_that_is_ended_while_its_machine_starts_leaves_none(place: Place, sky: SkyPilot) -> None:
    handle = begun(place, job("true", need=NEED))
    deadline = time.monotonic() + 300
    while not [name for name in sky.machines() if name.startswith(handle.name)]:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    run(place.provider().end(handle, 0))
    assert [name for name in sky.machines() if name.startswith(handle.name)] == []
    assert seen(place, handle).state == "gone"
