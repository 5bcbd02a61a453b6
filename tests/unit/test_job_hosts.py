"""What the hosts of one job tell each other, in the job's directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tandem.agent.other_host import OtherHost
from tandem.errors import SpecError
from tandem.runs.job_hosts import JobHosts, check_count, job_hosts


@pytest.fixture
def hosts(tmp_path: Path) -> list[JobHosts]:
    return [JobHosts(number, 3, "10.0.0.1", tmp_path) for number in range(3)]


def test_a_job_of_one_host_names_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert job_hosts() is None
    told = {"TANDEM_HOST": "1", "TANDEM_HOSTS": "2", "TANDEM_FIRST_HOST": "10.0.0.1", "TANDEM_JOB": str(tmp_path)}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert job_hosts() == JobHosts(1, 2, "10.0.0.1", tmp_path)
    check_count(job_hosts(), 2)
    with pytest.raises(SpecError, match=r"parallel\.hosts = 0: the job has 2 hosts"):
        check_count(job_hosts(), 0)


def test_rank_0_hears_of_the_ranks_of_its_own_crew_alone(hosts: list[JobHosts], tmp_path: Path) -> None:
    first, second, third = hosts
    assert first.missing() == [1, 2]
    third.say_here("")
    assert first.missing() == [1]
    earlier = first.call(4000, 6, tmp_path / "run")
    second.say_ended(earlier, {2: "signal 9"})
    third.say_ended(earlier, {5: "signal 9"})
    assert first.ended(earlier) == {2: "signal 9", 5: "signal 9"}
    later = first.call(4001, 6, tmp_path / "run")
    assert third.meeting() == later
    assert first.ended(later) == {}
    first.let_go()
    assert third.meeting() is None


def test_an_agent_that_was_killed_with_its_ranks_says_so_and_starts_none(hosts: list[JobHosts], tmp_path: Path) -> None:
    first, _, third = hosts
    meeting = first.call(4000, 6, tmp_path / "run")
    third.say_here(meeting.id)
    agent = OtherHost(cast("Any", None), third)  # it asks the control plane for nothing
    agent._look(third.last_meeting())
    assert first.ended(meeting) == dict.fromkeys((4, 5), "its host's agent was killed")
