"""The real servers that providers are tried on. Each is started once a session on free ports, and ended by its pid."""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tandem.protocols import Provider


@dataclass
class Place:
    """A target, as the sentences see it. `provider` makes a new object: as after a restart of the control plane."""

    kind: str
    provider: Callable[[], Provider]
    directory: Path
    """Where jobs have their directories."""
    silent: Callable[[], Provider]
    """A provider of the same kind whose server does not answer."""
    restart: Callable[[], None] | None = None
    """Kills the server with SIGKILL, and starts it again."""
    settle_s: float = 10.0
    """How long a state may take to be seen."""
    can: frozenset[str] = field(default_factory=frozenset)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "the server did not come"
        time.sleep(0.05)


def answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


class Sshd:
    """OpenSSH's server on loopback, with keys of its own."""

    def __init__(self, root: Path) -> None:
        self.root, self.port = root, free_port()
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", root / name], check=True)
        shutil.copy(root / "user.pub", root / "authorized")
        host_key = " ".join((root / "host.pub").read_text().split()[:2])
        (root / "known").write_text(f"[127.0.0.1]:{self.port} {host_key}\n")
        (root / "config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {root}/host\nPidFile {root}/pid\nUsePAM no\n"
            f"AuthorizedKeysFile {root}/authorized\nStrictModes no\nPasswordAuthentication no\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        self.start()

    @property
    def login(self) -> dict[str, object]:
        """The settings that reach it."""
        where = {"host": f"{getpass.getuser()}@127.0.0.1", "port": self.port}
        return {**where, "key": str(self.root / "user"), "known_hosts": str(self.root / "known")}

    def start(self) -> None:
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen([sshd(), "-D", "-e", "-f", str(self.root / "config")], stderr=log)
        until(lambda: answers(self.port))

    def kill(self) -> None:
        """End it and every connection that it has open."""
        sessions = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=False
        ).stdout.split()
        self.process.kill()
        self.process.wait()
        subprocess.run(["kill", "-KILL", *sessions], check=False, stderr=subprocess.DEVNULL)

    def restart(self) -> None:
        self.kill()
        self.start()


def sshd() -> str:
    """The path of the server, which wants to be called by it; empty where it is not installed."""
    return shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin") or ""
