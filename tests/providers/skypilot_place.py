"""SkyPilot's own API server. What it starts machines on are Slurm's own daemons, behind a real sshd: no cloud.

The nodes see another home directory, since SkyPilot writes into that of the login, and other names of hosts. SkyPilot's
installer of uv comes from the network; the nodes' curl hands out the uv beside SkyPilot in its place.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import httpx
from places import Place, Slurm, Sshd, free_port, slurm, sshd, until

from tandem.providers.skypilot import SkyPilotProvider, SkyPilotSettings

PYTHON = os.environ.get("TANDEM_SKYPILOT_PYTHON", "")
TOOLS = ("bwrap", "rsync", "socat")


def missing() -> str:
    """What the server, or what it wants for Slurm, does not find here; empty if nothing is missing."""
    if not PYTHON:
        return "TANDEM_SKYPILOT_PYTHON names no Python that has skypilot and uv"
    if not slurm() or not sshd():
        return "no Slurm or no sshd here, or not root: make install-system"
    lost = [tool for tool in TOOLS if not shutil.which(tool)]
    if lost:
        return f"{' and '.join(lost)} are not installed"
    return "" if _python310() else "uv beside TANDEM_SKYPILOT_PYTHON finds no Python 3.10, which SkyPilot's nodes want"


def _python310() -> str:
    """The directory of a Python 3.10."""
    found = subprocess.run(
        [_uv(), "python", "find", "--system", "3.10"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return str(Path(found).resolve().parent.parent) if found else ""


def _uv() -> str:
    return str(Path(PYTHON).parent / "uv")


class SkyPilot:
    """The server, on a free port and with a home directory of its own."""

    def __init__(self) -> None:
        self.root = root = Path(tempfile.mkdtemp(prefix="sky-"))
        root.chmod(0o755)
        for name in ("node", "home/.slurm", "sshd", "state"):
            (root / name).mkdir(parents=True)
        python, names = _python310(), f"127.0.0.1 localhost n1 n2 {os.uname().nodename}\n"
        (root / "hosts").write_text(names)
        cache = os.environ.get("UV_CACHE_DIR", f"{root}/cache")  # linked, not copied: 350 MB for each machine
        env = f"PATH={python}/bin:$PATH UV_CACHE_DIR={cache} UV_LINK_MODE=hardlink"
        if "SSL_CERT_FILE" in os.environ:
            env += f" SSL_CERT_FILE={os.environ['SSL_CERT_FILE']}"
        self._script("uv", f'{env} exec {_uv()} "$@"')
        self._script("curl", f"""echo 'mkdir -p "$UV_INSTALL_DIR" && cp {root}/uv "$UV_INSTALL_DIR"'""")
        within = ["bwrap", "--dev-bind", "/", "/", "--bind", str(root / "node"), str(Path.home())]
        for file, place in ((python, python), (root / "curl", shutil.which("curl")), (root / "hosts", "/etc/hosts")):
            within += ["--ro-bind", str(file), str(place)]
        within += ["--cap-add", "ALL"]
        self.slurm = Slurm(within=within)
        self._own: list[Sshd | subprocess.Popen[bytes]] = []
        try:
            self.sshd = Sshd(root / "sshd", within=within, env={"SLURM_CONF": str(self.slurm.conf)})
            (root / "home/.slurm/config").write_text(
                f"Host tried\n  HostName 127.0.0.1\n  Port {self.sshd.port}\n  User root\n"
                f"  IdentityFile {root}/sshd/user\n  IdentitiesOnly yes\n"
            )
            port = free_port()
            self.url = f"http://127.0.0.1:{port}"
            self._command = [PYTHON, "-m", "sky.server.server", "--host", "127.0.0.1", "--port", str(port)]
            self.start()
        except BaseException:
            self.kill()
            raise

    def start(self) -> None:
        env = {**os.environ, "HOME": str(self.root / "home"), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        with (self.root / "log").open("ab") as log:
            self.server = subprocess.Popen(self._command, env=env, stdout=log, stderr=log, start_new_session=True)
        until(self._answers, 120)
        env |= {"HOME": str(self.root / "state"), "SKYPILOT_API_SERVER_ENDPOINT": self.url}
        subprocess.run([Path(PYTHON).parent / "sky", "check", "slurm"], env=env, capture_output=True, check=True)

    def kill(self) -> None:
        for home in ("home", "state"):  # the server and its many children, and clients that wait for machines
            self._kill_all(f"HOME={self.root}/{home}".encode())
        if hasattr(self, "server"):  # its workers hide their environment behind a title
            subprocess.run(["pkill", "-KILL", "--session", str(self.server.pid)], check=False)
            self.server.wait()
        if hasattr(self, "sshd"):
            self.sshd.kill()
        self.slurm.kill()
        for left in Path(tempfile.gettempdir()).glob(f"tandem-t{os.getpid()}-*"):
            shutil.rmtree(left, ignore_errors=True)
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def place(self) -> Place:
        settings = SkyPilotSettings(
            python=PYTHON, server=self.url, state=str(self.root / "state"), timeout_s=300, infra=("slurm",)
        )
        dead = settings.model_copy(update={"server": f"http://127.0.0.1:{free_port()}"})
        directory = self.root / "node"
        return Place(
            "skypilot", lambda: SkyPilotProvider(settings), directory, lambda: SkyPilotProvider(dead), settle_s=900
        )

    def machines(self) -> list[str]:
        """The names of Slurm's jobs, which are SkyPilot's machines."""
        return self.slurm.tell("squeue", "--noheader", "--format=%j").split()

    def _kill_all(self, mark: bytes) -> None:
        for _ in range(3):
            for environ in Path("/proc").glob("[0-9]*/environ"):
                with suppress(OSError):
                    if mark in environ.read_bytes().split(b"\0"):
                        os.kill(int(environ.parent.name), signal.SIGKILL)
            time.sleep(0.1)

    def _script(self, name: str, line: str) -> None:
        (self.root / name).write_text(f"#!/bin/sh\n{line}\n")
        (self.root / name).chmod(0o755)

    def _answers(self) -> bool:
        assert self.server.poll() is None, (self.root / "log").read_text()[-2000:]
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/api/health", timeout=5, trust_env=False).status_code == 200
        return False
