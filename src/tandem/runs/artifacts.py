"""ArtifactStore: copies of a run's files that outlive its machine, on a disk or in an object store.

    <url>/<name>/parts/<attempt>/<path>              the bytes, under keys that no other attempt writes
    <url>/<name>/manifests/<number>-<attempt>.json   the artifact's list of parts; written last, never overwritten

Readers use only what a manifest lists, and a manifest only if its own digest matches. So an upload that is cut off at
any byte has no effect: no part of a new artifact is visible, and an old one stays complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from tandem.errors import ArtifactError
from tandem.io import atomic_write
from tandem.io.bounded_json import parsed
from tandem.runs.storage_retry import Limits, tried

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SEGMENT = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._=+-]{1,200}")
_MANIFEST = re.compile(r"(\d{6})-([0-9a-f]{16})\.json")
_BLOCK = 8 * 2**20
_MOST_MANIFEST_BYTES = 32 * 2**20
_FORMAT = "tandem-artifact-1"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ArtifactEntry:
    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Artifact:
    """The contents of a manifest."""

    name: str
    number: int
    attempt: str
    entries: tuple[ArtifactEntry, ...]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)


class FileChanged(ArtifactError):
    """A file changed while it was uploaded: uploading it again would not help."""


class _Torn(OSError):
    """The bytes read back differ from the bytes written; the write is retried."""


class ArtifactStore:
    """Stores and reads artifacts; safe for several threads and machines. Calls end soon after `limits.timeout_s`."""

    def __init__(self, url: str, *, endpoint: str = "", limits: Limits | None = None) -> None:
        self.url, self.limits = url.rstrip("/"), limits or Limits()
        self._fs, self._root, self._is_local = _file_system(self.url, endpoint)

    # --- writing

    def push(self, name: str, source: Path, *, only: Sequence[str] = ()) -> Artifact:
        """Upload a file or a directory (with `only`, some of its members), verify the upload, and publish it. The files
        must not change meanwhile. The same content is not uploaded twice."""
        check_name(name)
        deadline = time.monotonic() + self.limits.timeout_s
        files = _files(source, only)
        entries = tuple(_entry(path, file) for path, file in sorted(files.items()))
        there = tried(lambda: self._newest(name), self.limits, deadline, f"{name}: looking for it")
        if there is not None and there.entries == entries:
            return there
        attempt = secrets.token_hex(8)
        artifact = Artifact(name, (there.number if there else 0) + 1, attempt, entries)
        try:
            self._upload_all(artifact, files, deadline)
        except BaseException:
            self._forget(artifact)
            raise
        # From here on nothing is deleted: even if the reply is lost, the manifest may be visible, and its parts exist.
        tried(lambda: self._publish(artifact), self.limits, deadline, f"{name}: its manifest")
        return artifact

    def _upload_all(self, artifact: Artifact, files: Mapping[str, Path], deadline: float) -> None:
        stop = threading.Event()

        def one(entry: ArtifactEntry) -> None:
            key = self._part(artifact, entry)
            what = f"{artifact.name}: {entry.path}"
            tried(lambda: self._upload(key, files[entry.path], entry, deadline), self.limits, deadline, what, stop)

        with ThreadPoolExecutor(self.limits.uploads_at_once(2 * _BLOCK), "artifact") as pool:
            uploads = [pool.submit(one, entry) for entry in artifact.entries]
            try:
                for upload in as_completed(uploads):
                    upload.result()
            except BaseException:
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _upload(self, key: str, source: Path, entry: ArtifactEntry, deadline: float) -> None:
        written = hashlib.sha256()
        if self._is_local:
            self._make_local(key)
        with source.open("rb") as local, self._fs.open(key, "wb", block_size=_BLOCK) as remote:
            for block in _blocks(local, deadline):
                written.update(block)
                remote.write(block)
            if self._is_local:
                remote.flush()
                os.fsync(remote.fileno())
                atomic_write.sync(Path(key).parent)
        if written.hexdigest() != entry.sha256:
            raise FileChanged(f"{source}: changed while it was uploaded; upload it once it no longer changes")
        found = self._digest(key, deadline)
        if found != (entry.size_bytes, entry.sha256):
            raise _Torn(f"{entry.path}: {found[0]} of {entry.size_bytes} bytes were stored, or other bytes")

    def _digest(self, key: str, deadline: float) -> tuple[int, str]:
        size, digest = 0, hashlib.sha256()
        with self._fs.open(key, "rb", block_size=_BLOCK, cache_type="none") as remote:
            for block in _blocks(remote, deadline):
                size += len(block)
                digest.update(block)
        return size, digest.hexdigest()

    def _publish(self, artifact: Artifact) -> None:
        key = self._manifest(artifact)
        content = _to_manifest(artifact)
        if self._is_local:
            self._make_local(key)
            atomic_write.write_bytes(Path(key), content)
        else:
            with self._fs.open(key, "wb") as remote:
                remote.write(content)
        with self._fs.open(key, "rb", cache_type="none") as remote:
            if remote.read() != content:
                raise _Torn(f"{artifact.name}: its manifest was cut short")

    def _make_local(self, key: str) -> None:
        """Make the parent directories of a file. Only this user may enter a new store; an existing one keeps its
        mode."""
        atomic_write.make_directory(Path(self._root), mode=atomic_write.PRIVATE)
        atomic_write.make_directory(Path(key).parent)

    def _forget(self, artifact: Artifact) -> None:
        """Delete an upload's parts if possible; parts that stay are listed nowhere."""
        try:
            self._fs.rm(f"{self._root}/{artifact.name}/parts/{artifact.attempt}", recursive=True)
        except Exception:  # noqa: BLE001 - others' file systems raise what they like, and the upload's own error counts
            return

    # --- reading

    def names(self) -> list[str]:
        """Return the names of all complete artifacts."""
        deadline = time.monotonic() + self.limits.timeout_s
        found = tried(lambda: self._list(self._root), self.limits, deadline, f"{self.url}: listing it")
        return [name for name in found if NAME.fullmatch(name) and self._found(name, deadline)]

    def find(self, name: str) -> Artifact:
        """Return the newest complete artifact of this name."""
        deadline = time.monotonic() + self.limits.timeout_s
        artifact = self._found(check_name(name), deadline)
        if artifact is None:
            raise ArtifactError(f"{self.url}: there is no artifact '{name}'; `tandem artifacts list` prints the names")
        return artifact

    def fetch(self, name: str, directory: Path) -> Path:
        """Download an artifact and verify it. The directory appears complete or not at all."""
        if directory.exists():
            raise ArtifactError(f"{directory}: exists already; name a new directory")
        artifact = self.find(name)
        deadline = time.monotonic() + self.limits.timeout_s
        directory.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write.directory(directory) as place:
            for entry in artifact.entries:
                file = place.joinpath(*entry.path.split("/"))
                file.parent.mkdir(parents=True, exist_ok=True)

                def download(entry: ArtifactEntry = entry, file: Path = file) -> None:
                    self._download(artifact, entry, file, deadline)

                tried(download, self.limits, deadline, f"{name}: {entry.path}")
        return directory

    def _download(self, artifact: Artifact, entry: ArtifactEntry, file: Path, deadline: float) -> None:
        size, digest = 0, hashlib.sha256()
        key = self._part(artifact, entry)
        with self._fs.open(key, "rb", block_size=_BLOCK, cache_type="none") as remote, file.open("wb") as local:
            for block in _blocks(remote, deadline):
                size += len(block)
                digest.update(block)
                local.write(block)
        if (size, digest.hexdigest()) != (entry.size_bytes, entry.sha256):
            raise _Torn(f"{entry.path}: differs from its manifest")

    def _found(self, name: str, deadline: float) -> Artifact | None:
        return tried(lambda: self._newest(name), self.limits, deadline, f"{name}: looking for it")

    def _newest(self, name: str) -> Artifact | None:
        place = f"{self._root}/{name}/manifests"
        for file in sorted(filter(_MANIFEST.fullmatch, self._list(place)), reverse=True):
            with self._fs.open(f"{place}/{file}", "rb", cache_type="none") as remote:
                artifact = _from_manifest(remote.read(_MOST_MANIFEST_BYTES), name, file)
            if artifact is not None:
                return artifact
        return None

    def _list(self, place: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found: list[Any] = self._fs.ls(place, detail=False)
        except FileNotFoundError:
            return []
        return [str(key).rstrip("/").rsplit("/", 1)[-1] for key in found]

    def _part(self, artifact: Artifact, entry: ArtifactEntry) -> str:
        return f"{self._root}/{artifact.name}/parts/{artifact.attempt}/{entry.path}"

    def _manifest(self, artifact: Artifact) -> str:
        return f"{self._root}/{artifact.name}/manifests/{artifact.number:06d}-{artifact.attempt}.json"


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ArtifactError(f"artifact name {name!r}: write up to 128 letters, digits, '.', '_' and '-'")
    return name


def _file_system(url: str, endpoint: str) -> tuple[Any, str, bool]:
    """Return the file system, the store's root in it, and whether that is a directory of this machine."""
    fsspec: Any = import_module("fsspec")
    protocol, separator, rest = url.partition("://")
    if not separator or protocol == "file":
        root = os.path.abspath(rest if separator else url)
        return fsspec.filesystem("file", auto_mkdir=True, skip_instance_cache=True), root, True
    options: dict[str, Any] = {"endpoint" if protocol == "hf" else "endpoint_url": endpoint} if endpoint else {}
    if (
        protocol == "s3"
    ):  # only `tried` retries: a second layer would multiply the attempts and hide the server's Retry-After
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}, "connect_timeout": 20, "read_timeout": 60}
    try:
        fs = fsspec.filesystem(protocol, skip_instance_cache=True, use_listings_cache=False, **options)
    except ImportError as error:
        extra = {"s3": "s3", "gs": "gcs", "gcs": "gcs"}.get(protocol)
        way_out = f"pip install 'tandem-rl[{extra}]'" if extra else str(error)
        raise ArtifactError(f"{url}: no installed package reads {protocol}://; {way_out}") from error
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{url}: {error}") from error
    fs.retries = 1
    return fs, rest.rstrip("/"), False


def _files(source: Path, only: Sequence[str]) -> dict[str, Path]:
    """Return the files by their path in the artifact. Links are refused, because they may point anywhere."""
    if source.is_file() and not source.is_symlink():
        found = {source.name: source}
    elif source.is_dir():
        roots = [source / name for name in only] if only else [source]
        members = [file for root in roots for file in ([root] if not root.is_dir() else sorted(root.rglob("*")))]
        found = {file.relative_to(source).as_posix(): file for file in members if file.is_symlink() or file.is_file()}
    else:
        raise ArtifactError(f"{source}: is neither a file nor a directory")
    for path, file in found.items():
        _check_path(path)
        if file.is_symlink():
            raise ArtifactError(f"{file}: is a link; an artifact holds only files")
    if not found:
        raise ArtifactError(f"{source}: holds no file to upload")
    return found


def _check_path(path: str) -> str:
    if not all(_SEGMENT.fullmatch(segment) for segment in path.split("/")) or len(path) > 1000:
        raise ArtifactError(
            f"{path!r}: is not a valid path in an artifact; use letters, digits and . _ = + - between slashes"
        )
    return path


def _entry(path: str, file: Path) -> ArtifactEntry:
    with file.open("rb") as content:
        return ArtifactEntry(path, file.stat().st_size, hashlib.file_digest(content, "sha256").hexdigest())


def _blocks(file: Any, deadline: float) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        if time.monotonic() > deadline:
            raise ArtifactError("the time for uploads is over (artifacts.timeout_s)")
        yield block


def _to_manifest(artifact: Artifact) -> bytes:
    content = {"format": _FORMAT, "made_at": datetime.now(UTC).isoformat(timespec="seconds"), **asdict(artifact)}
    return json.dumps({**content, "sha256": _digest_of(content)}, indent=1).encode("utf-8")


def _from_manifest(raw: bytes, name: str, file: str) -> Artifact | None:
    """Return the artifact of a manifest; None if the bytes are cut short, damaged or not a manifest of this format."""
    try:
        content: dict[str, Any] = parsed(raw)
        told = content.pop("sha256")
        if told != _digest_of(content) or content["format"] != _FORMAT:
            return None
        entries = tuple(
            ArtifactEntry(_check_path(each["path"]), each["size_bytes"], each["sha256"]) for each in content["entries"]
        )
        artifact = Artifact(content["name"], content["number"], content["attempt"], entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ArtifactError):
        return None
    fits = artifact.name == name and file == f"{artifact.number:06d}-{artifact.attempt}.json"
    return artifact if fits else None


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode("utf-8")).hexdigest()


def list_artifacts(url: str | Path, *, endpoint: str = "") -> list[Artifact]:
    """Return the newest complete artifact of each name."""
    store = ArtifactStore(str(url), endpoint=endpoint)
    return [store.find(name) for name in store.names()]


def fetch_artifact(url: str | Path, name: str, directory: str | Path, *, endpoint: str = "") -> Path:
    """Download an artifact into a new directory and verify it."""
    return ArtifactStore(str(url), endpoint=endpoint).fetch(name, Path(directory))
