"""Wheels that nobody should accept, each wrong in one way, and what is said of it."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
from collections.abc import Callable

from wheels import digest, wheel

from tandem.io.wheel_file import ENTRIES, UNPACKED_BYTES, WHEEL_BYTES

Made = tuple[str, bytes]
INFO = "default_shout-1.0.dist-info"


def named(file: str) -> Made:
    return file, wheel()[1]


def holding(name: str, data: bytes = b"x") -> Made:
    """With one file more, which RECORD lists rightly."""
    return wheel(more={name: data})


def without(name: str) -> Made:
    return wheel(change=lambda files: files.pop(f"{INFO}/{name}"))


def changed_after(name: str, data: bytes) -> Made:
    return wheel(after=lambda files: files.update({name: data}))


def record(change: Callable[[str], str]) -> Made:
    def after(files: dict[str, bytes]) -> None:
        files[f"{INFO}/RECORD"] = change(files[f"{INFO}/RECORD"].decode()).encode()

    return wheel(after=after)


def metadata(text: str) -> Made:
    return wheel(metadata=text)


def entry(text: str) -> Made:
    return wheel(entry=text)


def archived(change: Callable[[zipfile.ZipInfo], None], data: bytes = b"/etc/passwd") -> Made:
    """With one file whose directory entry was changed."""
    file, content = wheel(more={"extra.py": data})
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(written, "w") as archive:
        for each in source.infolist():
            info = zipfile.ZipInfo(each.filename, each.date_time)
            info.compress_type = zipfile.ZIP_DEFLATED
            if each.filename == "extra.py":
                change(info)
            archive.writestr(info, source.read(each))
    return file, written.getvalue()


def _link(info: zipfile.ZipInfo) -> None:
    info.external_attr = (stat.S_IFLNK | 0o777) << 16


def _device(info: zipfile.ZipInfo) -> None:
    info.external_attr = (stat.S_IFCHR | 0o666) << 16


def _bzip(info: zipfile.ZipInfo) -> None:
    info.compress_type = zipfile.ZIP_BZIP2


def twice() -> Made:
    file, content = wheel()
    written = io.BytesIO(content)
    with zipfile.ZipFile(written, "a") as archive:
        archive.writestr("SHOUT_ENV.py", "trap = True")
    return file, written.getvalue()


def lying_size() -> Made:
    """A bomb whose directory says that it is small."""
    data = b"0" * (UNPACKED_BYTES + 1)
    file, content = wheel(more={"bomb.py": data})
    real, small = struct.pack("<I", len(data)), struct.pack("<I", 10)
    return file, content.replace(real, small)


def encrypted() -> Made:
    file, content = wheel()
    at = content.index(b"PK\x01\x02")
    return file, content[: at + 8] + b"\x01\x00" + content[at + 10 :]


def wrong_local_name() -> Made:
    """Whose local header and directory name another file."""
    file, content = wheel()
    return file, content.replace(b"shout_env.py", b"trout_env.py", 1)


def unlisted_code() -> Made:
    return wheel(after=lambda files: files.update({"hidden.py": b"trap = True"}))


WRONG: dict[str, tuple[Callable[[], Made], str]] = {
    # what it is
    "no zip": (lambda: (wheel()[0], b"no zip file at all" * 9), "does not begin as a zip file"),
    "empty": (lambda: (wheel()[0], b""), "does not begin as a zip file"),
    "cut off": (lambda: (wheel()[0], wheel()[1][:-40]), "bytes after its directory|no zip file"),
    "a prefix before the zip": (lambda: (wheel()[0], b"#!/bin/sh\n" + wheel()[1]), "does not begin as a zip file"),
    "bytes after the zip": (lambda: (wheel()[0], wheel()[1] + b"more"), "bytes after its directory|no zip file"),
    "one bit of code flipped": (lambda: (wheel()[0], _flipped(wheel()[1])), "no zip file that can be read|was changed"),
    "two names for a file": (wrong_local_name, "no zip file that can be read"),
    "encrypted": (encrypted, "encrypted"),
    # its size
    "too large": (lambda: (wheel()[0], b"PK\x03\x04" + b"0" * WHEEL_BYTES), "are the most"),
    "a bomb": (lambda: holding("bomb.py", b"0" * (UNPACKED_BYTES + 1)), "unpacks to more than"),
    "a bomb that lies": (lying_size, "unpacks to more than|no zip file that can be read|was changed"),
    "many files": (lambda: wheel(more={f"f{n}.py": b"" for n in range(ENTRIES)}), "files, and"),
    "large metadata": (lambda: holding(f"{INFO}/large.txt", b"0" * (2**20 + 1)), "is larger than"),
    # where it leads
    "up": (lambda: holding("../up.py"), "leads out of its directory"),
    "up inside": (lambda: holding("a/../../up.py"), "leads out of its directory"),
    "absolute": (lambda: holding("/etc/cron.d/x.py"), "leads out of its directory"),
    "here": (lambda: holding("./x.py"), "leads out of its directory"),
    "double slash": (lambda: holding("a//x.py"), "leads out of its directory"),
    "backslash": (lambda: holding("..\\up.py"), "a name that is none"),
    "a drive": (lambda: holding("C:x.py"), "a name that is none"),
    "a control character": (lambda: holding("a\x1b[2J.py"), "a name that is none"),
    "a bidirectional mark": (lambda: holding("a\u202eyp.py"), "a name that is none"),
    "a long name": (lambda: holding("a" * 301 + ".py"), "a name that is none"),
    "a link": (lambda: archived(_link), "a link, a device"),
    "a device": (lambda: archived(_device), "a link, a device"),
    "an unusual packing": (lambda: archived(_bzip), "packs a file in an unusual way"),
    "two files but for capitals": (twice, "two files of one name"),
    # what is in it
    "a start-up hook": (lambda: holding("hook.pth", b"import os"), "is no source"),
    "a binary": (lambda: holding("fast.so"), "is no source"),
    "byte code": (lambda: holding("__pycache__/shout_env.cpython-311.pyc"), "is no source"),
    "scripts": (lambda: holding("default_shout-1.0.data/scripts/run", b"#!python"), "a directory .data"),
    "a module of Python": (lambda: holding("json/__init__.py"), "one of Python's or of Tandem's"),
    "a module of Tandem": (lambda: holding("tandem/types.py"), "one of Python's or of Tandem's"),
    "sitecustomize": (lambda: holding("sitecustomize.py"), "one of Python's or of Tandem's"),
    "a second dist-info": (lambda: holding("torch-9.0.dist-info/METADATA"), "2 directories .dist-info"),
    # RECORD
    "code changed after RECORD": (lambda: changed_after("shout_env.py", b"trap = True"), "it was changed"),
    "entry points changed after RECORD": (
        lambda: changed_after(f"{INFO}/entry_points.txt", b"[tandem.environments]\na = b:C"), "it was changed",
    ),
    "code that RECORD does not list": (unlisted_code, "RECORD does not list"),
    "RECORD without a hash": (lambda: record(_no_hash), "it was changed"),
    "RECORD with md5": (lambda: record(lambda text: text.replace("sha256=", "md5=")), "it was changed"),
    "RECORD lists what is not there": (lambda: record(_gone), "twice, or"),
    "RECORD lists a file twice": (lambda: record(lambda text: text + text.splitlines()[0]), "twice, or without"),
    "RECORD with a line that is none": (lambda: record(lambda text: text + "a,b\n"), "a line that is none"),
    "no RECORD": (lambda: wheel(after=lambda files: files.pop(f"{INFO}/RECORD")), "has no RECORD"),
    "no METADATA": (lambda: without("METADATA"), "has no METADATA"),
    "no WHEEL": (lambda: without("WHEEL"), "has no WHEEL"),
    # names that do not agree
    "another name in METADATA": (
        lambda: metadata("Name: default-other\nVersion: 1.0\nRequires-Python: >=3.11\n"), "its METADATA is of",
    ),
    "another version in METADATA": (
        lambda: metadata("Name: default-shout\nVersion: 1.1\nRequires-Python: >=3.11\n"), "its METADATA is of",
    ),
    "two names in METADATA": (
        lambda: metadata("Name: default-shout\nName: torch\nVersion: 1.0\nRequires-Python: >=3.11\n"), "more than once",
    ),
    "no Requires-Python": (lambda: metadata("Name: default-shout\nVersion: 1.0\n"), "names no Requires-Python"),
    "another name as a file": (lambda: named("default_other-1.0-py3-none-any.whl"), "is not of what its file"),
    "another version as a file": (lambda: named("default_shout-1.1-py3-none-any.whl"), "is not of what its file"),
    "a platform": (lambda: named("default_shout-1.0-cp311-cp311-linux_x86_64.whl"), "its name must be"),
    "a local version": (lambda: named("default_shout-1.0+evil-py3-none-any.whl"), "its name must be"),
    "a name with a path": (lambda: named("../default_shout-1.0-py3-none-any.whl"), "its name must be"),
    # entry points
    "no entry point": (lambda: entry("[console_scripts]\nx = shout_env:main\n"), "names no environment"),
    "an entry point outside": (lambda: entry("[tandem.environments]\nx = os:system\n"), "which is not in it"),
    "an entry point that is none": (lambda: entry("[tandem.environments]\nx = shout_env\n"), "must be NAME"),
    "an entry point with code": (lambda: entry("[tandem.environments]\nx = shout_env:a();b\n"), "must be NAME"),
    "entry points that are none": (lambda: entry("not an ini file"), "cannot be read"),
}  # fmt: skip
"""What it is: how to make it, and what is said of it."""


def _flipped(content: bytes) -> bytes:
    at = content.index(b"shout_env.py") + 40
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def _gone(text: str) -> str:
    return f"gone.py,sha256={digest(b'')},0\n{text}"


def _no_hash(text: str) -> str:
    return "\n".join(f"{line.split(',')[0]},," for line in text.splitlines())
