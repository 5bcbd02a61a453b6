"""Upload a run's files to its artifact store, on a separate thread. A failed upload is reported; it fails no run."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tandem.errors import ArtifactError, TandemError
from tandem.io import atomic_write
from tandem.io.jsonl import append_jsonl, read_jsonl
from tandem.obs.run_history import read_status
from tandem.runs.artifacts import ArtifactStore
from tandem.runs.storage_retry import Limits
from tandem.spec.artifacts import ArtifactsSpec
from tandem.spec.toml import read_toml

_log = logging.getLogger(__name__)
_RESULTS = (
    "spec.toml",
    "rollouts.json",
    "status.json",
    "plan.json",
    "events.jsonl",
    "metrics.jsonl",
    "sync.jsonl",
    "samples.jsonl",
    "evals",
    "report.html",
    "curves.png",
    "log.txt",
)


@dataclass(frozen=True, slots=True)
class Upload:
    """How one upload ended."""

    name: str
    state: Literal["published", "failed"]
    seconds: float
    size_bytes: int = 0
    revision: int = 0
    """Number of the artifact's manifest: 1, unless other content was published under this name before."""
    error: str = ""


class Uploads:
    """Uploads one artifact after the other, on a daemon thread."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._asked: queue.Queue[tuple[str, Path, Sequence[str]] | None] = queue.Queue()
        self._done: list[Upload] = []
        self._pending: list[str] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        self._thread.start()

    def begin(self, name: str, source: Path, *, only: Sequence[str] = ()) -> None:
        """Queue an upload and return at once. `source`: a file or directory that no longer changes."""
        with self._lock:
            self._pending.append(name)
        self._asked.put((name, source, only))

    def ended(self) -> list[Upload]:
        """Return the uploads that ended since the last call."""
        with self._lock:
            done, self._done = self._done, []
            return done

    def finish(self, timeout_s: float) -> list[Upload]:
        """Wait; return the uploads that `ended` has not returned. Late ones count as failed. No upload may begin
        later."""
        self._asked.put(None)
        self._thread.join(timeout_s)
        with self._lock:
            late = [Upload(name, "failed", timeout_s, error="not done in time") for name in self._pending]
            return [*self._done, *late]

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            done = _upload(self._store, *asked)
            with self._lock:
                self._pending.remove(done.name)
                self._done.append(done)


class CheckpointUploads:
    """Uploads checkpoints during a run, one at a time. A newer checkpoint replaces one that waits for its upload."""

    def __init__(self, run_dir: Path, spec: ArtifactsSpec) -> None:
        self._run_dir, self._timeout_s = run_dir.absolute(), spec.timeout_s
        self._uploads = Uploads(
            ArtifactStore(spec.url, endpoint=spec.endpoint, limits=Limits(timeout_s=spec.timeout_s))
        )
        self._under_way = self._next = -1

    def saved(self, version: int) -> None:
        """Queue a checkpoint. All methods must be called on the run's thread."""
        self._next = version
        self._go_on()

    def held(self) -> set[int]:
        """Return the versions whose directories must not be removed yet."""
        return {self._under_way, self._next} - {-1}

    def ended(self) -> list[Upload]:
        done = self._uploads.ended()
        if done:
            self._under_way = -1
            self._go_on()
        return done

    def finish(self, timeout_s: float) -> list[Upload]:
        """Start no further upload; `tandem artifacts push` uploads what is missing."""
        return self._uploads.finish(min(timeout_s, self._timeout_s))

    def _go_on(self) -> None:
        if self._under_way < 0 <= self._next:
            self._under_way, self._next = self._next, -1
            path = self._run_dir / "checkpoints" / f"step-{self._under_way}"
            self._uploads.begin(f"{self._run_dir.name}.{path.name}", path)


def push_artifacts(
    run_dir: str | Path, spec: ArtifactsSpec | None = None, *, url: str = "", timeout_s: float = math.inf
) -> list[Upload]:
    """Upload what the run's `[artifacts]` table names and the store lacks. If the run has ended, write the results to
    events.jsonl and status.json. `url` replaces the spec's; `timeout_s` can only shorten the spec's timeout."""
    run_dir = Path(run_dir)
    status = read_status(run_dir)
    spec = spec or _spec_of(run_dir, url)
    timeout_s = min(timeout_s, spec.timeout_s)
    limits = Limits(timeout_s=timeout_s)
    run_dir = run_dir.absolute()
    try:
        uploads = Uploads(ArtifactStore(url or spec.url, endpoint=spec.endpoint, limits=limits))
    except TandemError as error:
        done = [Upload(name, "failed", 0.0, error=str(error)) for name, _, _ in _parts(run_dir, spec)]
    else:
        for name, source, only in _parts(run_dir, spec):
            uploads.begin(name, source, only=only)
        done = uploads.finish(timeout_s)
    if status.get("state") not in ("queued", "running"):  # another process writes its files
        _report(run_dir, url or spec.url, done, dict(status))
    return done


def _spec_of(run_dir: Path, url: str) -> ArtifactsSpec:
    raw = read_toml(run_dir / "spec.toml")
    table = raw.get("artifacts") or ({"url": url} if url else None)
    if table is None:
        raise ArtifactError(f"{run_dir}: its spec has no [artifacts]; name a store with --url")
    return ArtifactsSpec.model_validate(table)


def _parts(run_dir: Path, spec: ArtifactsSpec) -> list[tuple[str, Path, Sequence[str]]]:
    """Return name, directory and members of each artifact. Results are last, when the other uploads are done."""
    found: list[tuple[str, Path, Sequence[str]]] = []
    if "checkpoints" in spec.what:
        steps = sorted((run_dir / "checkpoints").glob("step-*"))
        found += [(f"{run_dir.name}.{step.name}", step, ()) for step in steps if (step / "MANIFEST.json").exists()]
    if "export" in spec.what and (run_dir / "export").exists():
        found.append((f"{run_dir.name}.export", run_dir / "export", ()))
    if "results" in spec.what:
        there = [name for name in _RESULTS if (run_dir / name).exists()]
        found.append((f"{run_dir.name}.results", run_dir, there))
    return found


def _upload(store: ArtifactStore, name: str, source: Path, only: Sequence[str]) -> Upload:
    began = time.monotonic()
    try:
        artifact = store.push(name, source, only=only)
    except Exception as error:  # noqa: BLE001 - whatever it is, the run that made these bytes has not failed by it
        told = str(error) if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
        _log.warning("upload of %s failed: %s", name, told)
        return Upload(name, "failed", round(time.monotonic() - began, 3), error=told)
    seconds = round(time.monotonic() - began, 3)
    return Upload(name, "published", seconds, artifact.size_bytes, artifact.number)


def _report(run_dir: Path, url: str, done: Sequence[Upload], status: dict[str, Any]) -> None:
    events = run_dir / "events.jsonl"
    number = max((int(row.get("number", 0)) for row in read_jsonl(events)), default=0)
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    for offset, upload in enumerate(done, start=1):
        append_jsonl(events, {"number": number + offset, "at": at, "stage": "upload", **asdict(upload)})
    failed = [upload.name for upload in done if upload.state == "failed"]
    told = {"url": url, "state": "failed" if failed else "published", "uploads": [asdict(upload) for upload in done]}
    atomic_write.write_json(run_dir / "status.json", {**status, "artifacts": told})
