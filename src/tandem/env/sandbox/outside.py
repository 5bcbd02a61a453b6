"""Make the bubblewrap command in which an environment's fork server runs, and say what it may see.

A sandbox has no network, no processes but its own, and no file but those listed here. What is listed is read-only:
system libraries, the interpreter, installed packages, Tandem, and the files that the environment itself is made of.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.env import resource_limits
from tandem.env.load import ADAPTERS
from tandem.errors import SpecError
from tandem.spec.environment import files_in

TMP = "/tmp"
_SHARE_OF_MEMORY = 8
_MOST_TMP_BYTES = 2**30
_USER = "1000"  # inside; outside it is the user who started the run
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "alternatives", "mime.types")
_CERTIFICATES = ("ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/ca-trust")  # and not the private keys beside
_NETWORK_SETTINGS = ("resolv.conf", "hosts", "nsswitch.conf", "services", "protocols", "gai.conf", *_CERTIFICATES)
_OF_A_PREFIX = ("bin", "lib", "lib32", "lib64", "libexec", "include", "share", "ssl", "pyvenv.cfg")
"""Of an interpreter's directory, which may be a project's directory, too, with its runs in it."""
_READ_ONLY_PROC = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "mtrr")
_HIDDEN_PROC = ("kcore", "kmsg", "keys", "kallsyms", "sched_debug", "timer_list", "kpagecount", "kpageflags")
"""Of /proc. If root starts the run, the kernel lets a process without any capability write and read these, too."""
_PROGRAM = "bwrap"
_TANDEM = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Sandbox:
    """What an environment's sandbox opens besides what it always has."""

    network: bool = False
    read: Sequence[str] = ()
    write: Sequence[str] = ()
    for_each_episode: bool = True
    """Whether a worker plays one episode only."""

    @property
    def text(self) -> str:
        """What is open, and who limits processes, in a sentence."""
        kernel = os.getuid() != 0 and resource_limits.counts_by_namespace()
        counted = (
            "the kernel" if kernel else "the fork server, since the kernel does not limit root, or before Linux 5.14"
        )
        return (
            f"network: {'that of this machine' if self.network else 'none'}; read: {_listed(self.read)}; "
            f"write: {_listed(self.write)}; one for each {'episode' if self.for_each_episode else 'worker'}; "
            f"processes are counted by {counted}, and their memory together by the fork server; no cgroup is used"
        )


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths) if paths else "nothing more"


def tmp_bytes(memory_bytes: int) -> int:
    """Return the size of /tmp, and of /dev/shm, for a worker that may have so much memory."""
    return min(_MOST_TMP_BYTES, memory_bytes // _SHARE_OF_MEMORY)


def command(
    sandbox: Sandbox, name: str, params: Mapping[str, Any], memory_bytes: int, program: Sequence[str]
) -> list[str]:
    """Return the command that runs `program` in bubblewrap. SpecError if there is none, or if a path is missing."""
    found = shutil.which(_PROGRAM)
    if found is None:
        raise SpecError(
            "environment.sandbox = 'bwrap': bubblewrap is not installed here; install the system's package "
            "'bubblewrap' (`make install-system` does on Debian), or set environment.sandbox = 'off'"
        )
    size = str(tmp_bytes(memory_bytes))
    here = os.getcwd()
    return [
        found, "--unshare-all", "--unshare-user", "--uid", _USER, "--gid", _USER, "--cap-drop", "ALL",
        "--die-with-parent", "--new-session", "--hostname", "sandbox", *(["--share-net"] if sandbox.network else []),
        *_system(sandbox.network),
        "--proc", "/proc", *_proc(),
        "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm", "--size", size, "--tmpfs", TMP,
        "--dir", here,
        *_bind("--ro-bind", sorted(_code() | own_files(name, params))),
        *_bind("--ro-bind", _there("read", sandbox.read)),
        *_bind("--bind", _there("write", sandbox.write)),
        "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", here,
        "--setenv", "HOME", TMP, "--setenv", "TMPDIR", TMP, "--", *program,
    ]  # fmt: skip


def in_tmp(sandbox: Sandbox, name: str, params: Mapping[str, Any]) -> list[str]:
    """Return the paths that the sandbox has in /tmp or /dev/shm: each worker's own ones must show them, too."""
    opened = [*sorted(_code() | own_files(name, params)), *sandbox.read, *sandbox.write]
    return [path for path in opened if path.startswith((f"{TMP}/", "/dev/shm/"))]


def refusal(said: str) -> SpecError | None:
    """Return why bubblewrap could not start, from what it printed; None if it did not complain."""
    for line in said.splitlines():
        if line.startswith("bwrap: "):
            return cannot(line.removeprefix("bwrap: "))
    return None


def cannot(why: str) -> SpecError:
    return SpecError(
        f"environment.sandbox = 'bwrap': this machine cannot make a sandbox ({why}); most often user namespaces are "
        "switched off, as in many containers; use a machine that has them, or set environment.sandbox = 'off'"
    )


def own_files(name: str, params: Mapping[str, Any]) -> set[str]:
    """Return what the environment is made of: its file, its module, and the files that `prompts` names."""
    found = {os.path.abspath(path) for path in files_in(name, params) if os.path.exists(path)}
    place, _, _ = name.rpartition(":")
    if place and not place.endswith(".py") and name.partition(":")[0] not in ADAPTERS:
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(place.partition(".")[0])  # of a top-level name: nothing is imported
            if spec is not None:
                origin = [spec.origin] if spec.has_location and spec.origin else []
                found |= set(map(os.path.abspath, spec.submodule_search_locations or origin))
    return found


def _system(network: bool) -> list[str]:
    """Return the options for system libraries, and for the few settings that programs need."""
    options: list[str] = []
    for path in _SYSTEM:
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            options += ["--ro-bind", path, path]
    for name in (*_SETTINGS, *(_NETWORK_SETTINGS if network else ())):
        path = f"/etc/{name}"
        if os.path.exists(path):
            options += ["--ro-bind", os.path.realpath(path), path]
    return options


def _proc() -> list[str]:
    options: list[str] = []
    if os.getuid() != 0:
        return options  # the kernel's permissions keep other users out, and each worker can have a /proc of its own
    for name in _READ_ONLY_PROC:
        path = f"/proc/{name}"
        if os.path.exists(path):
            options += ["--ro-bind", path, path]
    for name in _HIDDEN_PROC:
        path = f"/proc/{name}"
        if os.path.isfile(path):
            options += ["--ro-bind", "/dev/null", path]
    return options


def _code() -> set[str]:
    """Return the interpreter, the directories of installed packages, and Tandem's own package."""
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    prefixes |= set(map(os.path.realpath, prefixes))
    parts = [os.path.join(prefix, part) for prefix in prefixes for part in _OF_A_PREFIX]
    places = [*parts, *packages, str(_TANDEM)]
    found = {os.path.abspath(path) for path in places if os.path.exists(path)}
    return {path for path in found if not path.startswith(("/usr/", "/bin", "/lib"))}


def _bind(option: str, paths: Sequence[str]) -> list[str]:
    return [word for path in paths for word in (option, path, path)]


def _there(which: str, paths: Sequence[str]) -> list[str]:
    for path in paths:
        if not os.path.exists(path):
            raise SpecError(f"environment.sandbox_{which} = '{path}': does not exist; create it, or leave it out")
    return [os.path.abspath(path) for path in paths]
