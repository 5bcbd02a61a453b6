"""Machines of clouds and of Kubernetes, one for each job, started by a SkyPilot API server.

control plane -> client -> SkyPilot: a machine, named as the job, which runs skypilot.sh and waits
                 client -> machine, over SSH: the text of machine.sh that begins the job, with its secrets
control plane -> machine, over SSH: look, SIGTERM, files

The client is skypilot_client.py, run by the Python of SkyPilot's own environment.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tandem.errors import MaybeLaunched, ProviderRefused, ProviderSilent
from tandem.job_types import Handle, Job, Need, Offer, Sight
from tandem.providers.line_process import LineProcess
from tandem.providers.scripted import ScriptedProvider
from tandem.providers.settings import TargetSettings, check_job, checked_name, checked_path
from tandem.providers.shell import Shell, exports, only_from_here, read_text, written
from tandem.providers.skypilot_offers import offered

_DOWN_S = 600.0

# Takes a job to the machine, on stdin.
_HAND_IN = """cd {root} || exit 1
[ ! -e {name}/.job/pid ] || exit 0
[ -p .{name}.in ] && timeout 60 flock .{name}.lock sh -c 'cat > .{name}.in' || exit 1
for n in 1 2 3 4 5 6 7 8 9 10; do [ ! -e {name}/.job/pid ] || exit 0; sleep 0.5; done; exit 1"""


class SkyPilotSettings(TargetSettings):
    """What a SkyPilot API server may start machines on. Each job has a machine, which is given back after it."""

    kind: Literal["skypilot"] = "skypilot"
    python: str = Field(min_length=1)
    """The Python that has SkyPilot: of a virtual environment of its own."""
    server: str = Field(default="http://127.0.0.1:46580", pattern=r"^https?://[^\s]+[^\s/]$")
    """The API server."""
    token_file: str = ""
    """File of a service account's token, where the server wants one."""
    infra: tuple[str, ...] = Field(default=(), strict=False)
    """What to use of what SkyPilot may use: "aws", "aws/us-east-1", "kubernetes"; empty: all of it."""
    setup: str = ""
    """Shell lines that SkyPilot runs on a new machine before the job, such as "uv pip install tandem-rl"."""
    idle_minutes: int = Field(default=10, ge=1)
    """Minutes after a job's end until the machine removes itself, whatever has become of Tandem."""
    directory: str = Field(default="~/tandem-jobs", min_length=1)
    """Where jobs have their directories on the machines."""
    state: str = Field(default="~/.cache/tandem/skypilot", min_length=1)
    """The home directory of SkyPilot's client: its keys, and how OpenSSH reaches the machines."""
    timeout_s: float = Field(default=90.0, gt=0)
    """Seconds to wait for an answer; the first one takes as long as SkyPilot's import."""


class SkyPilotProvider:
    """Has a machine started for each job."""

    def __init__(self, settings: SkyPilotSettings) -> None:
        self.settings = settings
        self._state = Path(settings.state).expanduser()
        self._env = only_from_here(()) | {"HOME": str(self._state), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        self._env["SKYPILOT_API_SERVER_ENDPOINT"] = settings.server

    async def offers(self, need: Need) -> list[Offer]:
        """Return the cheapest offer of each cloud for each number of each GPU; without GPUs one for each cloud."""
        told = await self._ask("offers", gpus=need.gpus > 0)
        offers = [offer for offer, _ in offered(need, told, self.settings.infra, self.settings.usd_per_hour)]
        return [offer for offer in offers if offer.fits] or offers

    async def launch(self, job: Job) -> Handle:
        """Have a machine started for the job and the job begun there, unless it has begun."""
        check_job(job, "skypilot")
        try:
            told = await self._ask("offers", gpus=job.need.gpus > 0)
            offers = offered(job.need, told, self.settings.infra, self.settings.usd_per_hour)
            asked = [each for each in offers if job.offer in ("", each[0].name)]
            fitting = [resources for offer, resources in asked if offer.fits]
            if not fitting:
                why = "; ".join(f"{offer.name}: {offer.why_not}" for offer, _ in asked[:5])
                raise ProviderRefused(f"SkyPilot has nothing that meets the need: {why or 'no such offer or no GPU'}")
            days = self.settings.keep_days or 365
            await self._ask("launch", name=job.name, task=self.task(job, fitting[0]), days=days, **self.handed(job))
        except ProviderSilent as error:
            raise MaybeLaunched(f"{job.name}: {error}") from error
        return Handle(job.name)

    async def find(self, prefix: str) -> list[Handle]:
        """Return the jobs that have a machine, or whose launch SkyPilot still remembers: for a day, unless it is told
        otherwise."""
        checked_name(prefix, prefix=True)
        facts = await self._ask("facts")
        names = {*facts["machines"], *facts["launch"]}
        return [Handle(name) for name in sorted(names) if name.startswith(prefix)]

    async def look(self, handles: Sequence[Handle]) -> list[Sight]:
        """Return a sight of each: SkyPilot's word for the machine, and if there is one its own word for the job."""
        if not handles:
            return []
        try:
            facts = await self._ask("facts")
        except (ProviderSilent, ProviderRefused) as error:
            return [Sight(handle, "unknown", why=str(error)) for handle in handles]
        return list(await asyncio.gather(*(self._sight(handle, facts) for handle in handles)))

    async def end(self, handle: Handle, grace_s: float) -> None:
        """End the job as on any machine, and then the machine: what the job left on it is lost."""
        name = checked_name(handle.name)
        facts = await self._ask("facts")
        if facts["machines"].get(name, [""])[0] == "UP" and facts["launch"].get(name, [""])[0] != "live":
            with suppress(ProviderSilent):  # its machine goes in any case
                await (await self._machine(name)).end(handle, grace_s)
        until = time.monotonic() + _DOWN_S
        while name in facts["machines"] or facts["launch"].get(name, [""])[0] == "live":
            await self._ask("down", name=name)
            if time.monotonic() > until:
                raise ProviderSilent(f"{name}: SkyPilot has not removed the machine within {_DOWN_S:g} s")
            await asyncio.sleep(2)
            facts = await self._ask("facts")
        for file in (self._entry(name), self._key(name)):
            file.unlink(missing_ok=True)

    async def read(self, handle: Handle, path: str, offset: int, limit: int) -> bytes:
        """Return bytes of a file in the job's directory, as long as its machine is there."""
        name, path = checked_name(handle.name), checked_path(path)
        facts = await self._ask("facts")
        if facts["machines"].get(name, [""])[0] != "UP":
            if facts["launch"].get(name, [""])[0] == "live":
                return b""
            raise ProviderRefused(f"{name}: its machine is gone, and its files with it")
        return await (await self._machine(name)).read(handle, path, offset, limit)

    # --- what SkyPilot is told and tells

    def task(self, job: Job, resources: dict[str, Any]) -> dict[str, Any]:
        """Return SkyPilot's task: a machine that waits for the job. Nothing of the job but its name is in it."""
        seconds = math.ceil(job.need.seconds + job.grace_s) if job.need.seconds else 0
        root, waits, idle = self.settings.directory, read_text("skypilot.sh"), str(self.settings.idle_minutes * 60)
        text = written("machine.sh", root, "wait_for_job", job.name, str(seconds), idle, prelude=waits)
        autostop = {"idle_minutes": self.settings.idle_minutes, "down": True, "wait_for": "jobs"}
        return {
            "name": "tandem", "num_nodes": 1, "resources": resources | {"autostop": autostop},
            "run": f"exec sh -c {shlex.quote(text)} < /dev/null",
            **({"setup": self.settings.setup} if self.settings.setup else {}),
        }  # fmt: skip

    def handed(self, job: Job) -> dict[str, Any]:
        """Return the line that begins the job, and the command that takes it to the machine."""
        nothing_held = ("0", "0", "0", "0", "")  # the machine is this job's alone
        root, days = self.settings.directory, str(self.settings.keep_days)
        arguments = (days, job.name, *nothing_held, *job.argv)
        text = written("machine.sh", root, "launch", *arguments, prelude=exports(job.env))
        place = f'"$HOME"/{shlex.quote(root[2:])}' if root.startswith("~/") else shlex.quote(root)
        hand_in = _HAND_IN.format(root=place, name=job.name)
        line = f"\n:{base64.b64encode(text.encode()).decode()}:\n"
        return {"text": line, "command": [*self._ssh(job.name), f"exec sh -c {shlex.quote(hand_in)}"]}

    def _ssh(self, name: str) -> tuple[str, ...]:
        """Return the command line that reaches a machine as SkyPilot says it is reached."""
        sockets = Path("~/.cache/tandem/ssh").expanduser()
        sockets.mkdir(parents=True, exist_ok=True, mode=0o700)
        # by its name: all machines of a Kubernetes or Slurm have the address that OpenSSH's own %C is made of
        shared = sockets / hashlib.sha256(f"{self.settings.server} {name}".encode()).hexdigest()[:32]
        options = ("BatchMode=yes", "LogLevel=ERROR", "ControlMaster=auto", f"ControlPath={shared}")
        options += ("ControlPersist=60", f"ConnectTimeout={max(5, int(self.settings.timeout_s / 2))}")
        flags = [part for option in options for part in ("-o", option)]
        return ("ssh", "-F", str(self._entry(name)), "-i", str(self._key(name)), *flags, "-T", "--", name)

    def _entry(self, name: str) -> Path:
        return self._state / ".sky/generated/ssh" / name

    def _key(self, name: str) -> Path:
        return self._state / f".sky/generated/ssh-keys/{name}.key"

    async def _machine(self, name: str) -> ScriptedProvider:
        if not self._entry(name).exists():
            await self._ask("entry", name=name)
        env = self._env | self._token()
        shell = Shell(name, (*self._ssh(name), "exec sh -s"), env=env, timeout_s=self.settings.timeout_s)
        machine = ScriptedProvider(self.settings, self.settings.directory, shell, kind="skypilot")
        machine.script = "machine.sh"
        return machine

    async def _sight(self, handle: Handle, facts: dict[str, Any]) -> Sight:
        launch, request = facts["launch"].get(handle.name, ("", ""))
        machine, was_up = facts["machines"].get(handle.name, ("", False))
        if launch == "live":
            return Sight(handle, "waiting", why=f"SkyPilot starts its machine{f' ({machine})' if machine else ''}")
        try:
            if not machine:
                why = await self._ask("why", request=request) if launch in ("failed", "cancelled") else ""
                return Sight(handle, "gone", why=f"SkyPilot has no machine of this name{why and ': '}{why}")
            if machine == "STOPPED":
                return Sight(handle, "gone", why="its machine was stopped")
            if machine == "UP" or was_up:
                (sight,) = await (await self._machine(handle.name)).look([handle])
                if sight.state == "unknown" and not await self._ask("there", name=handle.name):
                    return Sight(handle, "gone", why="SkyPilot's cloud has no such machine any more")
                if sight.state != "gone" or "never started" not in sight.why:
                    return sight
                if launch not in ("failed", "cancelled"):
                    return Sight(handle, "waiting", why="its machine is there, and does not have it yet")
            # its launch has failed, and left a machine that costs money
            await self._ask("down", name=handle.name)
            return Sight(handle, "gone", why=f"its launch failed: {await self._ask('why', request=request)}")
        except (ProviderSilent, ProviderRefused) as error:
            return Sight(handle, "unknown", why=str(error))

    def _token(self) -> dict[str, str]:
        if not self.settings.token_file:
            return {}
        token = Path(self.settings.token_file).expanduser().read_text(encoding="utf-8").strip()
        return {"SKYPILOT_SERVICE_ACCOUNT_TOKEN": token}

    async def _ask(self, call: str, **arguments: Any) -> Any:
        self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
        command = (self.settings.python, "-c", read_text("skypilot_client.py"), self.settings.server)
        client = _client(command, tuple(sorted((self._env | self._token()).items())))
        answer = await asyncio.to_thread(client.ask, call, self.settings.timeout_s, arguments)
        if "refused" in answer:
            raise ProviderRefused(f"SkyPilot: {answer['refused']}")
        if "silent" in answer:
            raise ProviderSilent(f"SkyPilot: {answer['silent']}")
        return answer["ok"]


@cache
def _client(command: tuple[str, ...], env: tuple[tuple[str, str], ...]) -> LineProcess:
    """Return the one client of all targets that ask the same server: SkyPilot's import takes seconds."""
    return LineProcess(command, dict(env))
