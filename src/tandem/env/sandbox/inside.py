"""Inside an environment's sandbox: namespaces for each worker, and a filter for system calls.

A worker in the sandbox is three processes, each forked by the one before:

1. the one that the fork server knows makes the namespaces, waits, and ends as the next one ends;
2. the first process of the namespaces collects orphans; when it ends, the kernel kills all that is left in them;
3. the worker itself, which plays episodes. It has no capability and cannot make further namespaces.

So a worker sees no process of another one, cannot signal it, and shares no /tmp, shared memory, queue or loopback with
it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import signal
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_SET_FLAGS, _IS_UP = 0x8914, 0x1  # of a network interface
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC = 2, 4, 8, 4096, 16384
_PR_SET_DUMPABLE, _PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITIES_V3 = 0x20080522
_MOST_FILES = 65536

# The filter: a program of the kernel's classic BPF, four numbers an instruction.
_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _FAIL_WITH = 0x7FFF0000, 0x00050000
_X32 = 0x40000000
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE, _CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
_DENIED = {
    "x86_64": (248, 249, 250, 29, 68, 319, 321, 298, 323, 246, 320, 308),
    "aarch64": (217, 218, 219, 194, 186, 279, 280, 241, 282, 104, 294, 268),
}
"""In this order: add_key, request_key, keyctl (keys belong to no namespace); shmget, msgget, memfd_create (memory that
no limit of a process counts); bpf, perf_event_open, userfaultfd, kexec_load, kexec_file_load, setns."""
_DENIED_ANYWHERE = (425, 447)
"""io_uring_setup (it bypasses this filter), memfd_secret."""
_DENIED_TO_WORKERS = {"x86_64": (165, 166, 155, 272), "aarch64": (40, 39, 41, 97)}
"""mount, umount2, pivot_root, unshare."""
_MOUNTS_ANYWHERE = (428, 429, 430, 431, 432, 433, 442)
"""open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr."""


def filter_calls(*, worker: bool) -> None:
    """Take system calls away from this process and its children. `worker`: also those that make namespaces."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"the filter of system calls does not know the processor '{machine}'")
    denied = [*_DENIED[machine], *_DENIED_ANYWHERE]
    if worker:
        denied += [*_DENIED_TO_WORKERS[machine], *_MOUNTS_ANYWHERE]
    program = _program(machine, denied, _CLONE[machine] if worker else None)
    packed = b"".join(struct.pack("HBBI", *each) for each in program)
    code = ctypes.create_string_buffer(packed)
    whole = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(whole), 0, 0)


def _program(machine: str, denied: Sequence[int], clone: int | None) -> list[tuple[int, int, int, int]]:
    refuse, unknown = (_RETURN, 0, 0, _FAIL_WITH | errno.EPERM), (_RETURN, 0, 0, _FAIL_WITH | errno.ENOSYS)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        unknown,  # another calling convention has other numbers
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _X32),
        unknown,
    ]
    for number in denied:
        program += [(_EQUAL, 0, 1, number), refuse]
    if clone is not None:
        program += [(_EQUAL, 0, 1, _CLONE3), unknown]  # its flags cannot be read here; the C library then uses clone
        program += [(_EQUAL, 0, 3, clone), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT), (_HAS_BIT, 0, 1, _NEWUSER), refuse]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def become_worker(tmp_bytes: int, keep: Sequence[str], network: bool) -> None:
    """Return in a grandchild of this process, which has namespaces of its own.

    `keep`: paths in /tmp and /dev/shm that it sees, besides what it puts there itself. `network`: it shares that of
    the sandbox, and has none of its own. This process never returns: it ends as the grandchild ends. Call it in a
    process with one thread."""
    _make_namespaces(own_network=not network)
    _mount_own(tmp_bytes, keep)
    files = [int(name) for name in os.listdir("/proc/self/fd")]  # now: the next process hides this one's in /proc
    if first := os.fork():
        _close(files)
        _end_like(first)
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)  # the worker must not write into this process
    with suppress(OSError):  # refused where parts of /proc are covered; private files of others are closed even then
        _call("mount", b"proc", b"/proc", b"proc", _NOSUID | _NODEV | _NOEXEC, None)
    if worker := os.fork():
        _close(files)
        _collect_until(worker)
    _call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)
    _drop_capabilities()
    filter_calls(worker=True)


def why_not(tmp_bytes: int, keep: Sequence[str], network: bool) -> str:
    """Return why workers cannot have namespaces here; empty if they can. It forks, tries, and waits."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            become_worker(tmp_bytes, keep, network)
        except OSError as error:
            os.write(writing, str(error).encode()[:500])
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        why = said.read().decode("utf-8", "replace")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return why or (f"a worker's namespaces ended with exit code {code}" if code else "")


def _make_namespaces(*, own_network: bool) -> None:
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEWUSER | _NEWNS | _NEWPID | _NEWIPC | (_NEWNET if own_network else 0))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    if own_network:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            fcntl.ioctl(made, _SET_FLAGS, struct.pack("16sH14x", b"lo", _IS_UP))


def _mount_own(tmp_bytes: int, keep: Sequence[str]) -> None:
    """Mount an empty /tmp and /dev/shm. The paths of `keep` are bound again, as they were: read-only ones stay so."""
    opened = {path: os.open(path, os.O_PATH) for path in keep if os.path.exists(path)}
    here = os.getcwd()
    for place in (b"/tmp", b"/dev/shm"):
        options = f"size={tmp_bytes},nr_inodes={_MOST_FILES},mode=1777".encode()
        _call("mount", b"tmpfs", place, b"tmpfs", _NOSUID | _NODEV, options)
    for path, fd in opened.items():
        source = f"/proc/self/fd/{fd}"
        if os.path.isdir(source):
            os.makedirs(path, exist_ok=True)
        elif not os.path.exists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Path(path).touch()
        _call("mount", source.encode(), path.encode(), None, _BIND | _REC, None)
        os.close(fd)
    os.makedirs(here, exist_ok=True)
    os.chdir(here)


def _end_like(pid: int) -> None:
    """Wait for a child, and end as it did: it says a signal as 128 and the signal's number."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError, ValueError):  # it was no signal
        if code > 128:
            signal.signal(code - 128, signal.SIG_DFL)
            os.kill(os.getpid(), code - 128)
    os._exit(code if code >= 0 else 70)


def _collect_until(worker: int) -> None:
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == worker:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _close(files: Sequence[int]) -> None:
    """Close files that the worker has, too: what reads from it must see when the worker has closed them."""
    for number in files:
        with suppress(OSError):
            os.close(number)


def _drop_capabilities() -> None:
    header = ctypes.create_string_buffer(struct.pack("II", _CAPABILITIES_V3, 0))
    _call("capset", header, ctypes.create_string_buffer(24))


def _call(name: str, *arguments: object) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*(ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
