"""What the settings of every target have in common, and the checks of what a job says."""

from __future__ import annotations

import re

from pydantic import Field

from tandem.errors import ProviderRefused
from tandem.job_types import Job
from tandem.spec.base import Spec

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class TargetSettings(Spec):
    """A target: a provider, and where it places command lines."""

    tandem: str = Field(default="tandem", min_length=1)
    """The command that starts Tandem there: a name on the PATH, or the path of a virtual environment's `bin/tandem`."""
    usd_per_hour: float = Field(default=0.0, ge=0)
    """What an hour of one host costs you; 0 for a machine of your own."""
    keep_days: int = Field(default=30, ge=0)
    """Days after which a launch removes the directories of jobs that are over, 20 at most at a time; 0: never. Run
    directories are not in them, and stay."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Seconds to wait for an answer. A host that takes longer is silent: nothing is concluded about its jobs."""


def checked_name(name: str, *, prefix: bool = False) -> str:
    """Return the name of a job. ProviderRefused if a path, an option or a shell could read more into it."""
    if _NAME.fullmatch(name) or (prefix and not name):
        return name
    raise ProviderRefused(
        f"job.name = {name!r}: must be letters, digits, '-', '_' and '.', at most 100, a letter or digit first"
    )


def check_job(job: Job, kind: str, *, hosts: bool = False) -> None:
    """Refuse a job that no launch could carry out as it is written."""
    checked_name(job.name)
    if not job.argv or any("\0" in each for each in job.argv):
        raise ProviderRefused(f"job.argv = {job.argv!r}: must be a program and its arguments, without NUL")
    for name, value in job.env.items():  # the value may be a secret: it is in no error
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise ProviderRefused(f"job.env: {name!r} is no name of a variable, or its value has a NUL")
    if job.need.hosts > 1 and not hosts:
        raise ProviderRefused(f"need.hosts = {job.need.hosts}: a target of kind '{kind}' is one host; write 1")


def checked_path(path: str) -> str:
    """Return a path inside a job's directory; ProviderRefused if it leads out of it."""
    if not path or path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise ProviderRefused(f"path = {path!r}: must be a file inside the job's directory, without '..'")
    return path
