"""The agent on another host than the first of its job: has the run's ranks there for as long as rank 0 wants them.

consumes: what the first host writes (runs/job_hosts.py)   waits for: half a second, or the job's end
produces: processes of ranks, and how they ended

It asks the control plane for the secrets alone, as the execution that the first host's agent is. Signals do not end it:
rank 0 decides when the ranks end, and may be saving a checkpoint with them.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from tandem.agent.execution import instance_of
from tandem.agent.link import Link
from tandem.agent.trainer import has_ended, only_agent
from tandem.errors import Fenced
from tandem.runs.job_hosts import JobHosts, Meeting
from tandem.runs.rank_processes import HostRanks
from tandem.shapes.agent import FENCED, ClaimBody, Claimed

_log = logging.getLogger(__name__)
_EVERY_S = 0.5


@dataclass
class OtherHost:
    link: Link
    hosts: JobHosts
    _meeting: Meeting | None = None
    """The last one for which ranks were started here."""
    _ranks: HostRanks | None = None
    _said: Set[int] = frozenset()
    """Of which ranks it was said that they have ended."""
    _secrets: Mapping[str, str] | None = None

    def run(self) -> int:
        """Return the exit code: 0 once the first host's agent has ended, `FENCED` if the attempt is closed."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # unlike SIG_IGN, a handler is not inherited
        with only_agent(self.hosts.directory, f"agent-{self.hosts.host}"):
            met = self.hosts.last_meeting()
            self.hosts.say_here(met)
            try:
                while not self.hosts.is_over:
                    self._look(met)
                    time.sleep(_EVERY_S)
                return 0
            except Fenced as error:
                _log.error("%s", error)
                return FENCED
            finally:
                if self._ranks is not None:
                    self._ranks.kill()

    def _look(self, met: str) -> None:
        """`met`: the meeting for which an agent before this one started ranks, which were killed with it."""
        meeting = self.hosts.meeting()
        if meeting is None or has_ended(self.hosts.directory):
            if self._ranks is not None:
                self._ranks.close()
                self._ranks = None
        elif self._meeting is None or self._meeting.id != meeting.id:
            if meeting.id == met:
                killed = "its host's agent was killed"
                self.hosts.say_ended(meeting, dict.fromkeys(self._numbers(meeting), killed))
                self._meeting = meeting
            else:
                self._begin(meeting)
        elif self._ranks is not None and (ended := self._ranks.ended()) and ended.keys() != self._said:
            self.hosts.say_ended(meeting, ended)
            self._said = ended.keys()

    def _begin(self, meeting: Meeting) -> None:
        if self._ranks is not None:
            self._ranks.kill()
            self._ranks = None
        self._secrets = self._asked_for() if self._secrets is None else self._secrets
        if self._secrets is None:
            return
        self.hosts.say_here(meeting.id)
        numbers = self._numbers(meeting)
        _log.info("host %d of %d: starts ranks %d to %d", self.hosts.host, self.hosts.count, numbers[0], numbers[-1])
        self._ranks = HostRanks(
            numbers, meeting.ranks, len(numbers), Path(meeting.run_dir), (self.hosts.first, meeting.port),
            environment=self._secrets,
        )  # fmt: skip
        self._meeting, self._said = meeting, frozenset()

    def _numbers(self, meeting: Meeting) -> range:
        on_host = meeting.ranks // self.hosts.count
        return range(self.hosts.host * on_host, (self.hosts.host + 1) * on_host)

    def _asked_for(self) -> Mapping[str, str] | None:
        """Return the run's secrets; None if the control plane does not answer."""
        body = ClaimBody(instance=instance_of(self.hosts.directory), host=platform.node()[:200], pid=os.getpid())
        claimed = self.link.ask("claim", body, Claimed)
        return None if claimed is None else claimed.secrets
