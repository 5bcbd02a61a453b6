"""Open a wheel that another person made, without trusting it: nothing is unpacked, and no code of it runs.

A wheel is refused if it is no plain zip file, if it would unpack to too much, if a name in it leads out of the
directory that it is unpacked in, if its RECORD does not list each file with its hash, or if its names, versions and
entry points do not agree. What is read is bounded: a small file cannot take much memory or time.
"""

from __future__ import annotations

import base64
import configparser
import csv
import email.parser
import email.policy
import hashlib
import io
import re
import stat
import sys
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.errors import SpecError
from tandem.spec.package_names import normalized, version_key

WHEEL_BYTES = 8 * 2**20
"""The largest wheel."""
UNPACKED_BYTES, ENTRIES = 64 * 2**20, 2000
GROUP = "tandem.environments"
"""The group of entry points that name environments."""
_SMALL_BYTES = 2**20
_CHUNK_BYTES = 2**18
_FILE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._]*)-([0-9][A-Za-z0-9.]*)-(py3|py2\.py3|py3[0-9]+)-none-any\.whl")
_PLACE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_ENTRY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_SIGNATURES = ("RECORD.jws", "RECORD.p7s")
_OURS = frozenset({"tandem", "sitecustomize", "usercustomize", *sys.stdlib_module_names})


@dataclass(frozen=True, slots=True)
class WheelContent:
    """What a wheel says of itself, checked against what is in it."""

    file: str
    distribution: str
    version: str
    sha256: str
    size: int
    metadata: bytes
    """METADATA, as it is."""
    requires_python: str
    requires: tuple[str, ...]
    summary: str
    environments: Mapping[str, str]
    """Its entry points `tandem.environments`: name and `module:Class`."""
    files: Mapping[str, str]
    """The SHA-256 of each file that is installed: of all outside of its .dist-info."""

    @property
    def metadata_sha256(self) -> str:
        return hashlib.sha256(self.metadata).hexdigest()


def open_wheel(file: str, content: bytes) -> WheelContent:
    """Check a wheel; SpecError says what is wrong with it."""
    try:
        return _checked(file, content)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, NotImplementedError, EOFError, RuntimeError) as error:
        raise _wrong(file, f"is no zip file that can be read: {error}") from None
    except (OSError, ValueError, IndexError, KeyError, csv.Error, configparser.Error) as error:
        if isinstance(error, SpecError):
            raise
        raise _wrong(file, f"cannot be read: {type(error).__name__}") from None


def names_in(file: str) -> tuple[str, str]:
    """Return distribution and version of a wheel's file name. SpecError if it is not one of a pure Python wheel."""
    found = _FILE.fullmatch(file)
    if found is None or len(file) > 200:
        raise _wrong(file[:200], "its name must be NAME-VERSION-py3-none-any.whl: a wheel of Python files alone")
    version_key(found[2])
    return normalized(found[1]), found[2]


def file_digest(data: bytes) -> str:
    """Return the SHA-256 of a file as RECORD has it."""
    return _written(hashlib.sha256(data).digest())


def _written(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _checked(file: str, content: bytes) -> WheelContent:
    distribution, version = names_in(file)
    if len(content) > WHEEL_BYTES:
        raise _wrong(file, f"has {len(content):,} bytes, and {WHEEL_BYTES:,} are the most")
    if not content.startswith(b"PK\x03\x04"):
        raise _wrong(file, "does not begin as a zip file")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if archive.comment or content[-22:-18] != b"PK\x05\x06":
            raise _wrong(file, "has bytes after its directory")
        entries = _entries(file, archive)
        info = _info_directory(file, entries, distribution, version)
        hashes, small = _read_all(file, archive, entries, info)
    _check_record(file, hashes, small[f"{info}/RECORD"], f"{info}/RECORD")
    _check_tags(file, small.get(f"{info}/WHEEL", b""))
    metadata = small.get(f"{info}/METADATA", b"")
    told = email.parser.BytesParser(policy=email.policy.compat32).parsebytes(metadata, headersonly=True)
    named, version_told = str(told["Name"] or ""), str(told["Version"] or "")
    if normalized(named) != distribution or version_told != version:
        raise _wrong(file, f"its METADATA is of '{named:.60}' {version_told:.60}, not of what its file name says")
    for field in ("Name", "Version", "Requires-Python"):
        if len(told.get_all(field) or []) > 1:
            raise _wrong(file, f"its METADATA has {field} more than once")
    requires_python = str(told["Requires-Python"] or "")
    if not re.fullmatch(r"[0-9.,<>=!~* ]{1,100}", requires_python):
        raise _wrong(file, 'its METADATA names no Requires-Python; write requires-python = ">=3.11" in pyproject.toml')
    environments = _environments(file, small.get(f"{info}/entry_points.txt", b""), entries)
    return WheelContent(
        file, distribution, version, hashlib.sha256(content).hexdigest(), len(content), metadata, requires_python,
        tuple(str(each) for each in told.get_all("Requires-Dist") or ()), _line(str(told["Summary"] or "")),
        environments, {name: found[0] for name, found in hashes.items() if not name.startswith(f"{info}/")},
    )  # fmt: skip


def _entries(file: str, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the files by name. Each is refused that would be written outside, twice, or as something else."""
    listed = archive.infolist()
    if len(listed) > ENTRIES:
        raise _wrong(file, f"has {len(listed):,} files, and {ENTRIES:,} are the most")
    if sum(each.file_size for each in listed) > UNPACKED_BYTES:
        raise _wrong(file, f"unpacks to more than {UNPACKED_BYTES:,} bytes")
    found, seen = dict[str, zipfile.ZipInfo](), set[str]()
    for each in listed:
        name, kind = each.orig_filename, stat.S_IFMT(each.external_attr >> 16)
        parts = name.rstrip("/").split("/")
        if not name.isprintable() or "\\" in name or ":" in name or name != each.filename or len(name) > 300:
            raise _wrong(file, f"has a file with a name that is none: {name[:60]!r}")
        if any(part in ("", ".", "..") for part in parts):
            raise _wrong(file, f"has a file that leads out of its directory: {name[:60]!r}")
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR) or each.flag_bits & 0x1:
            raise _wrong(file, f"has a link, a device or an encrypted file: {name[:60]!r}")
        if each.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _wrong(file, f"packs a file in an unusual way: {name[:60]!r}")
        if name.lower() in seen:
            raise _wrong(file, f"has two files of one name: {name[:60]!r}")
        if name.endswith((".pth", ".so", ".pyd", ".dll", ".pyc")):
            raise _wrong(file, f"has a file that is no source: {name[:60]!r}; a wheel of Python files has none")
        seen.add(name.lower())
        if not name.endswith("/"):
            found[name] = each
    return found


def _info_directory(file: str, entries: Mapping[str, zipfile.ZipInfo], distribution: str, version: str) -> str:
    tops = {name.partition("/")[0] for name in entries}
    found = [top for top in tops if top.endswith(".dist-info")]
    if len(found) != 1:
        raise _wrong(file, f"has {len(found)} directories .dist-info, and must have one")
    if any(top.endswith(".data") for top in tops):
        raise _wrong(file, "has a directory .data: scripts and files outside of its package are not installed")
    named, _, its_version = found[0].removesuffix(".dist-info").rpartition("-")
    if normalized(named) != distribution or its_version != version:
        raise _wrong(file, f"its directory {found[0][:80]} is not of what its file name says")
    missing = [each for each in ("RECORD", "METADATA", "WHEEL") if f"{found[0]}/{each}" not in entries]
    if missing:
        raise _wrong(file, f"has no {missing[0]}")
    for top in sorted(tops - set(found)):
        if top.removesuffix(".py") in _OURS:
            raise _wrong(file, f"has a module '{top.removesuffix('.py')}', which is one of Python's or of Tandem's")
    return found[0]


def _read_all(
    file: str, archive: zipfile.ZipFile, entries: Mapping[str, zipfile.ZipInfo], info: str
) -> tuple[dict[str, tuple[str, int]], dict[str, bytes]]:
    """Return hash and size of each file, and the content of the small ones in `info`."""
    hashes, small, left = dict[str, tuple[str, int]](), dict[str, bytes](), UNPACKED_BYTES
    for name, entry in entries.items():
        digest, size, kept = hashlib.sha256(), 0, list[bytes]()
        with archive.open(entry) as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                size += len(chunk)
                left -= len(chunk)
                if left < 0:  # whatever its directory says
                    raise _wrong(file, f"unpacks to more than {UNPACKED_BYTES:,} bytes")
                digest.update(chunk)
                if name.startswith(f"{info}/") and size <= _SMALL_BYTES:
                    kept.append(chunk)
        if name.startswith(f"{info}/"):
            if size > _SMALL_BYTES:
                raise _wrong(file, f"{name[:60]} is larger than {_SMALL_BYTES:,} bytes")
            small[name] = b"".join(kept)
        hashes[name] = (_written(digest.digest()), size)
    return hashes, small


def _check_record(file: str, hashes: Mapping[str, tuple[str, int]], record: bytes, own: str) -> None:
    """Compare RECORD with what is there: each file once, with its SHA-256 and its size."""
    listed = set[str]()
    for row in csv.reader(record.decode("utf-8").splitlines()):
        if len(row) != 3:
            raise _wrong(file, "has a RECORD with a line that is none")
        name, told, size = row
        if name in listed or name not in hashes:
            raise _wrong(file, f"its RECORD lists {name[:60]!r} twice, or without there being such a file")
        listed.add(name)
        if name == own or name.rpartition("/")[2] in _SIGNATURES:
            continue
        if (told, size) != (f"sha256={hashes[name][0]}", str(hashes[name][1])):
            raise _wrong(file, f"{name[:60]!r} has not the hash that its RECORD says: it was changed")
    unlisted = sorted(set(hashes) - listed - {own})
    if unlisted:
        raise _wrong(file, f"its RECORD does not list {unlisted[0][:60]!r}")


def _check_tags(file: str, wheel: bytes) -> None:
    told = email.parser.BytesParser(policy=email.policy.compat32).parsebytes(wheel, headersonly=True)
    if not str(told["Wheel-Version"] or "").startswith("1.") or str(told["Root-Is-Purelib"] or "").lower() != "true":
        raise _wrong(file, "its WHEEL file is not one of a wheel of Python files alone")


def _environments(file: str, text: bytes, entries: Mapping[str, zipfile.ZipInfo]) -> dict[str, str]:
    parser = configparser.ConfigParser(delimiters=("=",), comment_prefixes=("#",), interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment]  # names keep their capitals
    parser.read_string(text.decode("utf-8"))
    found = dict(parser.items(GROUP)) if parser.has_section(GROUP) else {}
    if not found:
        raise _wrong(
            file, f"names no environment; write [project.entry-points.\"{GROUP}\"] in pyproject.toml, with a line "
            "shout = \"shout_env:Shout\"",
        )  # fmt: skip
    for name, place in found.items():
        if not _ENTRY_NAME.fullmatch(name) or not _PLACE.fullmatch(place):
            raise _wrong(file, f'its entry point {name[:60]!r} must be NAME = "module:Class"')
        path = place.partition(":")[0].replace(".", "/")
        if not {f"{path}.py", f"{path}/__init__.py"} & entries.keys():
            raise _wrong(file, f"its entry point {name[:60]!r} names the module {place[:60]!r}, which is not in it")
    return found


def _line(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)[:300].strip()


def _wrong(file: str, text: str) -> SpecError:
    return SpecError(f"{file}: {text}")
