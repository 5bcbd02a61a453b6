"""The real servers that providers are tried on. Each is started once a session on free ports, and ended by its pid."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import sqlalchemy as sa

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
    console_only: bool = False
    """Whether the provider reads what a job prints, with lines of others, and no other file."""


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

    def __init__(self, root: Path, *, within: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        """`within`: the command that it runs below. `env`: what its sessions have beside the usual variables."""
        self.root, self.port, self.within = root, free_port(), within
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", root / name], check=True)
        shutil.copy(root / "user.pub", root / "authorized")
        host_key = " ".join((root / "host.pub").read_text().split()[:2])
        (root / "known").write_text(f"[127.0.0.1]:{self.port} {host_key}\n")
        (root / "config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {root}/host\nPidFile {root}/pid\nUsePAM no\n"
            f"AuthorizedKeysFile {root}/authorized\nStrictModes no\nPasswordAuthentication no\n"
            + (f"SetEnv {' '.join(f'{name}={value}' for name, value in env.items())}\n" if env else "")
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        self.start()

    @property
    def login(self) -> dict[str, object]:
        """The settings that reach it."""
        where = {"host": f"{getpass.getuser()}@127.0.0.1", "port": self.port}
        return {**where, "key": str(self.root / "user"), "known_hosts": str(self.root / "known")}

    def start(self) -> subprocess.Popen[bytes]:
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.within, sshd(), "-D", "-e", "-f", str(self.root / "config")], stderr=log
            )
        until(lambda: answers(self.port))
        return self.process

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


class Slurm:
    """Slurm's own daemons on loopback: munged, slurmctld, and slurmd for two nodes, with GPUs that are none."""

    def __init__(self, *, within: Sequence[str] = ()) -> None:
        """`within`: the command that its nodes run below."""
        self.within = within
        self.root = root = Path(tempfile.mkdtemp(prefix="slurm-"))  # munged wants a path that all may enter
        self.conf = root / "slurm.conf"
        host, ports = socket.gethostname().split(".")[0], [free_port() for _ in range(3)]
        root.chmod(0o755)
        for name in ("state", "munge"):
            (root / name).mkdir()
        (root / "munge/key").write_bytes(os.urandom(128))
        (root / "munge/key").chmod(0o400)
        for number in range(4):
            (root / f"gpu{number}").touch()
        (root / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu Type=h100 File={root}/gpu[0-3]\n")
        self.conf.write_text(
            f"ClusterName=tried\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={ports[0]}\nAuthType=auth/munge\n"
            f"AuthInfo=socket={root}/munge/socket\nSlurmUser=root\nSlurmdUser=root\nStateSaveLocation={root}/state\n"
            f"SlurmdSpoolDir={root}/spool-%n\nSlurmctldPidFile={root}/ctld.pid\nSlurmdPidFile={root}/%n.pid\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\nMailProg=/bin/true\n"
            "AccountingStorageType=accounting_storage/none\nJobCompType=jobcomp/none\nGresTypes=gpu\n"
            "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nSchedulerType=sched/backfill\n"
            "SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1\nReturnToService=2\nKillWait=2\n"
            "SlurmdParameters=config_overrides\n"
            + "".join(
                f"NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[n]} CPUs=20 RealMemory=16000 "
                "Gres=gpu:h100:4\n"
                for n in (1, 2)
            )
            + "PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP\n"
        )
        munge = [f"--{name}={root}/munge/{file}" for name, file in MUNGE.items()]
        self.processes = [self._started("munged", "--foreground", *munge)]
        try:
            until((root / "munge/socket").exists)
            self.processes += [self.start_node(n) for n in (1, 2)]
            self.controller = self.start_controller()
            until(lambda: self.tell("sinfo", "--noheader", "--format=%T").split() == ["idle"], 30)
        except BaseException:
            self.kill()
            raise

    def restart(self) -> None:
        """Kill the controller, and start it again."""
        self.controller.kill()
        self.controller.wait()
        self.controller = self.start_controller()
        until(lambda: "is UP" in self.tell("scontrol", "ping"), 30)

    def start_node(self, number: int) -> subprocess.Popen[bytes]:
        return self._started("slurmd", "-D", "-N", f"n{number}", within=self.within)

    def start_controller(self) -> subprocess.Popen[bytes]:
        return self._started("slurmctld", "-D")

    def kill(self) -> None:
        self.tell("scancel", "--user=root", "--signal=KILL", "--full")
        for process in (getattr(self, "controller", None), *reversed(self.processes)):
            if process is not None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                process.kill()
                process.wait()
        mark = f"SLURM_CONF={self.conf}".encode()  # processes of jobs that a killed controller has forgotten
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in environ.read_bytes().split(b"\0"):
                    os.kill(int(environ.parent.name), signal.SIGKILL)
        shutil.rmtree(self.root, ignore_errors=True)

    def _started(self, program: str, *options: str, within: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        env = {**os.environ, "SLURM_CONF": str(self.conf)}
        with (self.root / "log").open("ab") as log:
            command = [*within, slurm(program), *options]
            return subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)

    def tell(self, *command: str) -> str:
        env = {**os.environ, "SLURM_CONF": str(self.conf)}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout


MUNGE = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


def slurm(program: str = "slurmctld") -> str:
    """The path of one of Slurm's daemons; empty where it is not installed, or cannot be started by this user."""
    found = shutil.which(program, path="/usr/sbin:/usr/local/sbin:/usr/bin")
    return found or "" if os.getuid() == 0 and shutil.which("munged", path="/usr/sbin:/usr/bin") else ""


class Postgres:
    """PostgreSQL's server on loopback, with data of its own."""

    def __init__(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="tandem-postgres-"))  # pytest's own directories are closed to others
        self._data, self._user = (
            self.place / "data",
            "postgres" if os.geteuid() == 0 else None,
        )  # it refuses to run as root
        self._data.mkdir()
        if self._user:
            self.place.chmod(0o755)
            shutil.chown(self._data, self._user)
        self._binaries = postgres().parent
        make = [self._binaries / "initdb", "-A", "trust", "-U", "postgres", "--no-sync", "-D", self._data]
        subprocess.run(make, user=self._user, cwd="/", check=True, capture_output=True)
        self._port = free_port()
        self.url = f"postgresql+psycopg://postgres@127.0.0.1:{self._port}/postgres"
        self.process = self.start()
        until(self._answers, 60)

    def start(self) -> subprocess.Popen[bytes]:
        settings = ["listen_addresses=127.0.0.1", "fsync=off"]  # no test takes its power away
        options = ["-D", self._data, "-p", str(self._port), "-k", self._data, *(f"-c{each}" for each in settings)]
        with (self.place / "log").open("ab") as log:
            return subprocess.Popen(
                [self._binaries / "postgres", *options], user=self._user, cwd="/", stdout=log, stderr=log
            )

    def close(self) -> None:
        self.process.send_signal(signal.SIGQUIT)  # it ends at once: it waits for no client, and writes nothing more
        self.process.wait(timeout=30)
        shutil.rmtree(self.place)

    def _answers(self) -> bool:
        engine = sa.create_engine(self.url, isolation_level="AUTOCOMMIT")
        try:
            engine.connect().close()
        except sa.exc.OperationalError:
            return False
        finally:
            engine.dispose()
        return True


def postgres() -> Path:
    """The server's path, which does not exist where it is not installed."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return (places[0] if places else Path("/nowhere")) / "postgres"


class Ray:
    """A Ray cluster of one node on this machine, by the `ray` command on the PATH."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ray-"))  # its sockets' paths must be short
        ports = [free_port() for _ in range(2)]
        self.url = f"http://127.0.0.1:{ports[1]}"
        self._mark = f"TANDEM_TRIED_RAY={self.root}"
        where = [f"--port={ports[0]}", f"--dashboard-port={ports[1]}", "--dashboard-host=127.0.0.1"]
        size = ["--num-cpus=20", "--num-gpus=4", "--object-store-memory=80000000", f"--temp-dir={self.root}/ray"]
        env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "TANDEM_TRIED_RAY": str(self.root)}
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [ray(), "start", "--head", "--block", "--node-ip-address=127.0.0.1", *where, *size], env=env,
                stdout=log, stderr=log,
            )  # fmt: skip
        try:
            until(self._answers, 60)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for _ in range(3):
            for environ in Path("/proc").glob("[0-9]*/environ"):
                with suppress(OSError):
                    if self._mark.encode() in environ.read_bytes().split(b"\0"):
                        os.kill(int(environ.parent.name), signal.SIGKILL)
            time.sleep(0.1)
        shutil.rmtree(self.root, ignore_errors=True)

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self.root / "log").read_text()
        with suppress(httpx.TransportError):
            told = httpx.get(f"{self.url}/nodes?view=summary", timeout=5, trust_env=False)
            return told.status_code == 200 and any(
                (node.get("raylet") or {}).get("state") == "ALIVE" for node in told.json()["data"]["summary"]
            )
        return False


def ray() -> str:
    """The path of the command; empty where it is not installed."""
    return shutil.which("ray") or ""
