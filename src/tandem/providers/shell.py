"""Run texts with `sh`, on this machine or over OpenSSH.

The text goes in on stdin, so no secret is in the arguments of a process. A text that was cut on its way does nothing,
because only its last line calls a function.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

from pydantic import Field

from tandem.errors import ProviderSilent
from tandem.spec.base import Spec

_AT_ONCE = 6
"""Commands under way at one time: sshd lets a connection have 10 sessions, and refuses crowds of new connections."""


class SshSettings(Spec):
    """How to reach a machine over OpenSSH. Your `~/.ssh/config` counts, too: jump hosts, users, ports, keys."""

    host: str = Field(pattern=r"^[^-\s][^\s]*$")
    """The machine, as in `ssh HOST`."""
    port: int = Field(default=0, ge=0, le=65535)
    """TCP port; 0: as OpenSSH is configured."""
    key: str = ""
    """File of the private key; empty: as OpenSSH is configured. A passphrase must be in an agent: nothing is asked."""
    known_hosts: str = ""
    """File of the host keys that are trusted; empty: as OpenSSH is configured. A host without an entry is refused."""

    def command(self, timeout_s: float) -> tuple[str, ...]:
        """Return the command line that runs a shell there, over one connection that all calls share."""
        sockets = Path("~/.cache/tandem/ssh").expanduser()
        sockets.mkdir(parents=True, exist_ok=True, mode=0o700)
        options = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "yes",
            "ConnectTimeout": str(max(1, int(timeout_s / 2))),
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "3",
            "ControlMaster": "auto",
            "ControlPath": f"{sockets}/%C",
            "ControlPersist": "60",
        }
        if self.known_hosts:
            options["UserKnownHostsFile"] = str(Path(self.known_hosts).expanduser())
        if self.key:
            options |= {"IdentityFile": str(Path(self.key).expanduser()), "IdentitiesOnly": "yes"}
        flags = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
        port = ["-p", str(self.port)] if self.port else []
        return ("ssh", *flags, *port, "-T", "--", self.host, "exec sh -s")


@dataclass(frozen=True)
class Printed:
    """What a text printed, and its exit code."""

    code: int
    out: bytes
    error: str

    @property
    def lines(self) -> list[list[str]]:
        """The lines, each split at tabs."""
        return [line.split("\t") for line in self.out.decode("utf-8", "replace").splitlines()]


@dataclass
class Shell:
    """A machine that runs texts."""

    where: str
    """For errors."""
    command: Sequence[str] = ("sh", "-s")
    env: Mapping[str, str] | None = None
    """The whole environment of the command; None: that of this process."""
    timeout_s: float = 30.0
    _free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))

    async def run(self, script: str, root: str, function: str, *arguments: str, prelude: str = "") -> Printed:
        """Call a function of `script`, a file beside this one, which common.sh precedes. ProviderSilent if there is no
        answer."""
        text = written(script, root, function, *arguments, prelude=prelude)
        async with self._free:
            answer = await self._answer(text.encode())
        if answer.code == 255 and self.command[0] == "ssh":
            raise ProviderSilent(f"{self.where}: {answer.error or 'ssh failed'}")
        return answer

    async def _answer(self, text: bytes) -> Printed:
        # stderr is a file: the shared connection's process keeps it open for a minute, which would hold up a pipe.
        with tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=self.env,
            )
            try:
                async with asyncio.timeout(self.timeout_s):
                    out, _ = await process.communicate(text)
            except TimeoutError:
                raise ProviderSilent(f"{self.where}: no answer within {self.timeout_s:g} s") from None
            finally:
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()
            errors.seek(0)
            last = errors.read().decode("utf-8", "replace").strip().splitlines()
        return Printed(process.returncode or 0, out, "; ".join(last[-3:]))


def written(script: str, root: str, function: str, *arguments: str, prelude: str = "") -> str:
    """Return the text that calls a function of `script`."""
    call = " ".join(["main", shlex.quote(root), function, *map(shlex.quote, arguments)])
    return "\n".join([read_text("common.sh"), read_text(script), prelude, call, ""])


@cache
def read_text(name: str) -> str:
    """Return a file of this folder."""
    return files("tandem.providers").joinpath(name).read_text(encoding="utf-8")


def exports(env: Mapping[str, str]) -> str:
    """Return shell lines that export these variables."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in env.items())


def only_from_here(names: Sequence[str]) -> dict[str, str]:
    """Return an environment with the usual variables of a login, and those of `names`, from this process's own."""
    usual = ("HOME", "PATH", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR")
    return {name: os.environ[name] for name in (*usual, *names) if name in os.environ}
