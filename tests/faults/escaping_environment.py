"""An environment whose episodes try to get out of their sandbox; tests load it by its file.

Each method is one attempt. It returns what it got hold of, or nothing; an OSError means that it was refused. Bombs are
small, so that they would harm no machine even without a sandbox.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.types import Outcome, Task

SAID = "seven"
_SYSTEM_CALLS = {
    "x86_64": {"keyctl": 250, "bpf": 321, "memfd_create": 319, "io_uring_setup": 425, "shmget": 29, "clone": 56},
    "aarch64": {"keyctl": 219, "bpf": 280, "memfd_create": 279, "io_uring_setup": 425, "shmget": 194, "clone": 220},
}
_NEWUSER, _NEWNS, _BIND, _REMOUNT = 0x10000000, 0x20000, 4096, 32
_NEIGHBOUR_PORT, _NEIGHBOUR_NAME = 8765, "\0tandem-test-neighbour"
_libc = ctypes.CDLL(None, use_errno=True)
_MOST_PROCESSES, _HELD_BYTES, _HOLDERS, _FILLED_BYTES = 600, 300 * 2**20, 6, 100 * 2**20


def system_call(name: str, *arguments: Any) -> int:
    number = _SYSTEM_CALLS[platform.machine()][name]
    found = _libc.syscall(number, *(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments))
    if found == -1:
        raise OSError(ctypes.get_errno(), name)
    return found


def must(found: int, what: str) -> str:
    if found != 0:
        raise OSError(ctypes.get_errno(), what)
    return what


@dataclass(frozen=True)
class Escaping:
    kind: str = ""
    at: dict[str, Any] = field(default_factory=dict[str, Any])
    """Where the test has put things: secret, shared, own, host_pid, tcp, udp, abstract, path_socket."""

    def tasks(self, split: str) -> list[Task]:
        opening = ({"role": "user", "content": "?"},)
        return [Task(f"{split}-{kind}", opening, {"kind": kind}) for kind in ("attempt", "neighbour")]

    async def run(self, task: Task, chat: Any) -> Outcome:
        if task.payload["kind"] == "neighbour":
            return await self.neighbour(chat)
        await chat.reply()
        try:
            got = await asyncio.to_thread(getattr(self, self.kind))
        except OSError as error:
            chat.say(f"refused: {error}")
            return Outcome(0.0, {"out": 0.0})
        chat.say(f"got: {got}")
        return Outcome(float(bool(got)), {"out": float(bool(got))})

    async def neighbour(self, chat: Any) -> Outcome:
        """Keep things for the length of another episode, and say whether they are as they were."""
        kept = {Path("/tmp/planted"): "mine", Path("/dev/shm/planted"): "mine"}
        for path, text in kept.items():
            assert not path.exists(), f"another episode has left {path}"
            path.write_text(text)
        child = subprocess.Popen(["sleep", "1000"], env={"KEY": "s3cret"})
        with socket.create_server(("127.0.0.1", _NEIGHBOUR_PORT)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
            abstract.bind(_NEIGHBOUR_NAME)
            abstract.listen()
            reply = await chat.reply()  # the attempt is made meanwhile
            for each in (tcp, abstract):
                each.settimeout(0)
                with suppress(BlockingIOError):
                    each.accept()
                    raise AssertionError("another episode has connected")
        well = child.poll() is None and all(path.read_text() == text for path, text in kept.items())
        child.kill()
        child.wait()
        return Outcome(float(well and reply.text == SAID), {"well": float(well)})

    # --- files

    def reads_a_file_of_the_user(self) -> str:
        return Path(self.at["secret"]).read_text()

    def reads_beside_its_own_file(self) -> list[str]:
        own = Path(self.at["own"])
        return [name for name in os.listdir(own.parent) if name not in (own.name, "shared", "run")]

    def reads_the_home_directory(self) -> list[str]:
        names = set(os.listdir(self.at["home"]))
        return sorted(names & {".bashrc", ".ssh", ".profile", ".bash_history", ".cache", ".netrc", ".config"})

    def reads_accounts(self) -> str:
        return Path("/etc/passwd").read_text() or Path("/etc/shadow").read_text()

    def reads_by_a_symlink(self) -> str:
        Path("/tmp/link").symlink_to(self.at["secret"])
        return Path("/tmp/link").read_text()

    def reads_by_a_symlink_in_what_is_shared(self) -> str:
        link = Path(self.at["shared"], "link")
        link.symlink_to(self.at["secret"])
        return link.read_text()

    def reads_by_dots(self) -> str:
        return Path(self.at["shared"], "..", "run", "token").read_text()

    def links_its_own_file_elsewhere(self) -> str:
        os.link(self.at["own"], Path(self.at["shared"], "hard"))
        return "linked"

    def reads_by_the_root_of_other_processes(self) -> str:
        for pid in self._pids():
            for way in ("root", "cwd"):
                with suppress(OSError):
                    return Path(f"/proc/{pid}/{way}{self.at['secret']}").read_text()
        return ""

    def reads_by_open_files(self) -> list[str]:
        got: list[str] = []
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if stat.S_ISDIR(os.fstat(int(name)).st_mode):
                    os.close(os.open("../../../../" + self.at["secret"], os.O_RDONLY, dir_fd=int(name)))
                    got.append(name)
        return got

    def changes_its_own_file(self) -> str:
        os.chmod(self.at["own"], 0o777)
        Path(self.at["own"]).write_text("")
        return "written"

    def changes_installed_packages(self) -> list[str]:
        got: list[str] = []
        for place in {sys.prefix, sys.base_prefix, "/usr", "/etc", "/", os.path.dirname(os.__file__)}:
            with suppress(OSError):
                Path(place, "escaped").write_text("")
                os.unlink(Path(place, "escaped"))
                got.append(place)
        return got

    def leaves_something_for_the_next_episode(self) -> str:
        mark = "left" if hasattr(sys, "left") or os.path.exists("/tmp/left") else ""
        sys.left = True  # type: ignore[attr-defined]
        Path("/tmp/left").touch()
        return mark

    # --- mounts, namespaces, devices, the kernel

    def mounts(self) -> str:
        return must(_libc.mount(b"tmpfs", b"/usr", b"tmpfs", 0, None), "mounted")

    def makes_the_interpreter_writable(self) -> str:
        return must(_libc.mount(None, b"/usr", None, ctypes.c_ulong(_REMOUNT | _BIND), None), "remounted")

    def unmounts(self) -> str:
        return must(_libc.umount2(b"/usr", 2), "unmounted")

    def makes_a_user_namespace(self) -> str:
        return must(_libc.unshare(_NEWUSER | _NEWNS), "made")

    def makes_a_user_namespace_by_clone(self) -> str:
        pid = system_call("clone", _NEWUSER | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return "made"

    def changes_its_root(self) -> str:
        os.chroot("/tmp")
        return "changed"

    def becomes_root(self) -> str:
        with suppress(OSError):
            os.setuid(0)
            return "root"
        for program in ("/usr/bin/su", "/usr/bin/passwd", "/usr/bin/mount"):
            if os.path.exists(program):
                done = subprocess.run([program, "--version"], check=False, capture_output=True)
                assert done.returncode is not None
        status = Path("/proc/self/status").read_text()
        held = [line for line in status.splitlines() if line.startswith(("CapPrm", "CapEff")) and int(line[7:], 16)]
        return ", ".join(held) + ("" if "NoNewPrivs:\t1" in status else "new privileges")

    def opens_devices(self) -> list[str]:
        got: list[str] = []
        fine = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm", "core", "fd", "console"}
        got += sorted(set(os.listdir("/dev")) - fine - {"stdin", "stdout", "stderr"})
        for major, minor in ((1, 1), (8, 0), (254, 0)):
            with suppress(OSError):
                os.mknod("/tmp/device", 0o666 | stat.S_IFBLK, os.makedev(major, minor))
                got.append(f"made {major}:{minor}")
        return got

    def changes_the_kernel(self) -> list[str]:
        """Only what it reads is written again."""
        got: list[str] = []
        for name in ("kernel/core_pattern", "vm/overcommit_memory", "kernel/hostname", "vm/drop_caches"):
            path = Path("/proc/sys", name)
            with suppress(OSError):
                os.close(os.open(path, os.O_WRONLY))
                got.append(name)
        with suppress(OSError):
            os.close(os.open("/proc/sysrq-trigger", os.O_WRONLY))
            got.append("sysrq")
        return got

    def reads_the_kernel(self) -> list[str]:
        got: list[str] = []
        for name in ("kcore", "kmsg", "kpageflags", "keys"):
            with suppress(OSError), open(f"/proc/{name}", "rb", buffering=0) as file:
                os.set_blocking(file.fileno(), False)
                if file.read(8):
                    got.append(name)
        return got

    def reads_keys_of_the_kernel(self) -> str:
        return f"keyring {system_call('keyctl', 0, -3, 0)}"

    def loads_a_program_into_the_kernel(self) -> str:
        return f"bpf {system_call('bpf', 0, ctypes.create_string_buffer(64), 64)}"

    def goes_round_the_filter(self) -> str:
        return f"ring {system_call('io_uring_setup', 4, ctypes.create_string_buffer(256))}"

    # --- the network

    def connects_to_this_machine(self) -> str:
        with socket.create_connection(("127.0.0.1", self.at["tcp"]), timeout=5):
            return "connected"

    def connects_to_an_abstract_socket(self) -> str:
        with socket.socket(socket.AF_UNIX) as made:
            made.connect("\0" + self.at["abstract"])
            return "connected"

    def connects_to_a_socket_file(self) -> str:
        with socket.socket(socket.AF_UNIX) as made:
            made.connect(self.at["path_socket"])
            return "connected"

    def sends_outside(self) -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            made.sendto(b"?", ("192.0.2.1", 9))  # an address of examples
            return "sent"

    def listens_to_the_network(self) -> list[str]:
        with suppress(OSError):
            socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
            return ["raw"]
        return [name for _, name in socket.if_nameindex() if name != "lo"]

    # --- other processes

    def signals_everything(self) -> str:
        os.kill(-1, signal.SIGKILL)
        return ""

    def signals_low_numbers(self) -> str:
        for pid in range(1, 400):
            if pid != os.getpid():
                with suppress(OSError):
                    os.kill(pid, signal.SIGTERM)
        return ""

    def signals_a_process_outside(self) -> str:
        if self.at["host_pid"] == os.getpid():
            return ""
        os.kill(self.at["host_pid"], signal.SIGKILL)
        return "sent"

    def signals_a_process_by_its_directory(self) -> list[int]:
        got: list[int] = []
        for pid in self._pids():
            with suppress(OSError):
                fd = os.open(f"/proc/{pid}", os.O_DIRECTORY)
                signal.pidfd_send_signal(fd, signal.SIGTERM)
                got.append(pid)
        return got

    def stops_what_is_above_it(self) -> str:
        for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM):
            with suppress(OSError):
                os.kill(os.getppid(), number)
        return ""

    def reads_other_processes(self) -> list[str]:
        got: list[str] = []
        for pid in self._pids():
            for name in ("environ", "mem", "fd", "root", "cwd", "maps"):
                with suppress(OSError):
                    path = f"/proc/{pid}/{name}"
                    if name == "fd":
                        os.close(os.open(f"{path}/0", os.O_RDONLY))
                    elif name in ("root", "cwd"):
                        os.listdir(path)
                    elif not os.read(os.open(path, os.O_RDWR if name == "mem" else os.O_RDONLY), 8) and name != "mem":
                        continue
                    got.append(path)
        return got

    def traces_other_processes(self) -> list[int]:
        attach, detach = 16, 17
        got: list[int] = []
        for pid in {*range(1, 200)} - {os.getpid()}:
            if _libc.ptrace(attach, pid, None, None) == 0:
                _libc.ptrace(detach, pid, None, None)
                got.append(pid)
        return got

    def reads_what_a_neighbour_keeps(self) -> list[str]:
        return [path for path in ("/tmp/planted", "/dev/shm/planted") if os.path.exists(path)]

    def connects_to_a_neighbour(self) -> str:
        with suppress(OSError), socket.create_connection(("127.0.0.1", _NEIGHBOUR_PORT), timeout=5):
            return "connected"
        with socket.socket(socket.AF_UNIX) as made:
            made.connect(_NEIGHBOUR_NAME)
            return "connected"

    def shares_memory(self) -> str:
        return f"memory {system_call('shmget', 0x7A11, 4096, 0o1666)}"

    def reads_variables(self) -> str:
        texts = [repr(dict(os.environ))]
        for pid in self._pids():
            with suppress(OSError):
                texts.append(Path(f"/proc/{pid}/environ").read_text())
        return "found" if any("s3cret" in text for text in texts) else ""

    # --- limits

    def raises_its_limits(self) -> list[str]:
        got: list[str] = []
        for name in ("RLIMIT_AS", "RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_CORE"):
            limit = getattr(resource, name)
            soft, hard = resource.getrlimit(limit)
            assert hard != resource.RLIM_INFINITY, name
            with suppress(OSError, ValueError):
                resource.setrlimit(limit, (soft, hard + 2**20))
                got.append(name)
        return got

    def takes_priority(self) -> list[str]:
        got: list[str] = []
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            got.append("realtime")
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -5)
            got.append("nice")
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("-1000")
            got.append("oom")
        return got

    def fills_its_tmp(self) -> str:
        """The test gives it 64 MiB."""
        return self._fills("/tmp/fill")

    def fills_shared_memory(self) -> str:
        return self._fills("/dev/shm/fill")

    def fills_the_root(self) -> str:
        return self._fills("/fill") or self._fills("/dev/fill") or self._fills("/var/fill")

    def hides_memory_in_a_file(self) -> str:
        return f"file {system_call('memfd_create', b'hidden', 0)}"

    def types_into_the_terminal(self) -> str:
        fd = os.open("/dev/tty", os.O_RDWR)
        import fcntl

        fcntl.ioctl(fd, 0x5412, b"x")
        return "typed"

    # --- ends badly: what is left of it is what the test looks at

    def takes_memory(self) -> str:
        with suppress(MemoryError):
            return f"{len(bytearray(8 * 2**30))} bytes"
        return ""

    def takes_memory_in_many_processes(self) -> str:
        for _ in range(_HOLDERS):
            if os.fork() == 0:
                held = bytearray(_HELD_BYTES)
                held[::4096] = b"x" * len(held[::4096])
                time.sleep(60)
                os._exit(0)
        time.sleep(60)
        return "all of it"

    def forks(self) -> str:
        return self._forks(detach=False)

    def forks_away(self) -> str:
        return self._forks(detach=True)

    def hangs(self) -> str:
        signal.pthread_sigmask(signal.SIG_BLOCK, set(range(1, 65)) - {signal.SIGKILL, signal.SIGSTOP})
        ctypes.PyDLL(None).sleep(60)
        return "all the time"

    def goes_on_after_its_end(self) -> str:
        """A detached process writes to what is shared, as long as it lives."""
        if os.fork() == 0:
            os.setsid()
            ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # it asks to outlive its parent
            if os.fork() == 0:
                until = time.monotonic() + 60
                while time.monotonic() < until:
                    Path(self.at["shared"], "alive").write_text(str(time.time()))
                    time.sleep(0.01)
            os._exit(0)
        while not Path(self.at["shared"], "alive").exists():
            time.sleep(0.01)
        return ""

    def _forks(self, *, detach: bool) -> str:
        made = 0
        for _ in range(_MOST_PROCESSES):
            try:
                if os.fork() == 0:
                    if detach:
                        os.setsid()
                        if os.fork():
                            os._exit(0)
                    time.sleep(60)
                    os._exit(0)
                made += 1
            except OSError:
                break
        if made > 256:
            time.sleep(30)  # the fork server counts meanwhile, where the kernel does not
        return f"{made} processes" if made >= _MOST_PROCESSES else ""

    def _fills(self, path: str) -> str:
        done = 0
        with suppress(OSError), open(path, "wb", buffering=0) as file:
            while done < _FILLED_BYTES:
                done += file.write(b"x" * 2**20)
        with suppress(OSError):
            os.unlink(path)
        return f"{done} bytes" if done >= _FILLED_BYTES else ""

    def _pids(self) -> list[int]:
        """Every process that it sees, but for itself and the first one of its own namespaces."""
        status = Path("/proc/self/status").read_text().splitlines()
        own = {int(line.split()[1]) for line in status if line.startswith(("Pid:", "PPid:"))}
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in own]
