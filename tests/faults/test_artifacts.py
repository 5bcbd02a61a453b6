"""An artifact is seen whole or not at all, whatever becomes of the connection; and no run fails by an upload."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from hub_store import hub_serving
from object_server import ObjectServer, served

from stopwatch import Stopwatch
from tandem.errors import ArtifactError
from tandem.io.atomic_write import write_json
from tandem.runs.artifacts import ArtifactStore, check_name
from tandem.runs.storage_retry import Limits, retry_after
from tandem.runs.uploads import Uploads, push_artifacts
from tandem.spec.artifacts import ArtifactsSpec

QUICK = Limits(backoff_s=0.01, timeout_s=30)


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with served(ObjectServer()) as server:
        yield server


def s3(server: ObjectServer, limits: Limits = QUICK) -> ArtifactStore:
    return ArtifactStore("s3://bucket/runs", endpoint=server.url, limits=limits)


def made(directory: Path, seed: int = 0, files: tuple[str, ...] = ("config.json", "deep/model.safetensors")) -> Path:
    for name in files:
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(random.Random(f"{seed}{name}").randbytes(3000))
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize("kind", ["directory", "s3"])
def test_what_is_pushed_comes_back_and_the_same_again_is_not_uploaded(tmp_path: Path, server: ObjectServer, kind: str):
    store = s3(server) if kind == "s3" else ArtifactStore(str(tmp_path / "store"), limits=QUICK)
    source = made(tmp_path / "a")
    first = store.push("run.export", source)
    assert content(store.fetch("run.export", tmp_path / "back")) == content(source)
    assert store.push("run.export", source) == first
    made(source, seed=1)
    assert store.push("run.export", source).number == 2
    assert content(store.fetch("run.export", tmp_path / "newer")) == content(source)
    assert store.names() == ["run.export"]
    with pytest.raises(ArtifactError, match="no artifact 'other'"):
        store.find("other")


def test_interrupted_uploads_leave_nothing_in_part(tmp_path: Path):
    """Every visible artifact is whole at every moment; what was not published is not seen."""
    trials = int(os.environ.get("TANDEM_TEST_UPLOADS", "12"))
    published, failed, wrong, end = set[str](), 0, list[str](), threading.Event()
    with served(ObjectServer(seed=7, share=0.2)) as server:
        reading = ArtifactStore("s3://bucket/runs", endpoint=server.url, limits=QUICK)

        def read() -> None:
            for number in count():
                name = f"run-{trial}"  # the one under way
                try:
                    back = reading.fetch(name, tmp_path / "reads" / str(number))
                    if content(back) != content(tmp_path / "sources" / name):
                        wrong.append(name)
                except ArtifactError as error:
                    if "there is no artifact" not in str(error):
                        wrong.append(str(error))
                if end.wait(0.2):
                    return

        trial = 0
        reader = threading.Thread(target=read)
        reader.start()
        for trial in range(trials):
            name = f"run-{trial}"
            source = made(tmp_path / "sources" / name, seed=trial)
            try:
                s3(server, Limits(backoff_s=0.01, timeout_s=30, tries=1 + trial % 3)).push(name, source)
                published.add(name)
            except ArtifactError:
                failed += 1
        end.set()
        reader.join()
        server.share = 0.0
        seen = set(s3(server).names())
        for name in seen:
            back = s3(server).fetch(name, tmp_path / "final" / name)
            assert content(back) == content(tmp_path / "sources" / name)
    assert wrong == []
    assert published <= seen  # and of the others only those whose last answer was lost
    assert len(seen - published) < failed
    assert failed
    assert published
    assert sum(server.done.values()) >= trials


def test_a_manifest_that_was_cut_short_hides_itself_and_not_the_one_before(tmp_path: Path, server: ObjectServer):
    store, source = s3(server), made(tmp_path / "a")
    first = store.push("run", source)
    store.push("run", made(source, seed=1))
    (newest,) = [key for key in server.objects if "manifests/000002" in key]
    whole = server.objects[newest]
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        server.objects[newest] = whole[:size]
        assert store.find("run") == first
    server.objects[newest] = whole.replace(b'"size_bytes": 3000', b'"size_bytes": 3001')
    assert store.find("run") == first


def test_a_damaged_part_is_refused_when_it_is_fetched(tmp_path: Path, server: ObjectServer):
    store = s3(server, Limits(tries=2, backoff_s=0.01))
    store.push("run", made(tmp_path / "a"))
    (part,) = [key for key in server.objects if key.endswith("config.json")]
    server.objects[part] = b"x" + server.objects[part][1:]
    with pytest.raises(ArtifactError, match="differs from its manifest"):
        store.fetch("run", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_the_server_s_retry_after_is_waited_for(tmp_path: Path):
    with served(ObjectServer(share=1.0, faults=("429",))) as server:
        with Stopwatch() as watch, pytest.raises(ArtifactError, match="tried 3 times"):
            s3(server, Limits(tries=3, backoff_s=20)).push("run", made(tmp_path / "a"))
    assert watch.seconds < 5  # our own backoff would have been a minute
    caused = OSError()
    caused.__cause__ = error = OSError()
    error.response = {"ResponseMetadata": {"HTTPHeaders": {"Retry-After": "7"}}}  # type: ignore[attr-defined]
    assert retry_after(caused) == 7.0
    assert retry_after(OSError()) is None


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a\0", "a" * 129, "%2e%2e", "a b", "/etc", "a\\b"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str):
    with pytest.raises(ArtifactError):
        check_name(name)
    with pytest.raises(ArtifactError):
        ArtifactStore(str(tmp_path / "s")).push(name, made(tmp_path / "a"))


@pytest.mark.parametrize("path", ["../out", "/etc/x", "a/../../b", "a//b", "%2e%2e/x", "a\\..\\b", "a\0b", "./x"])
def test_a_manifest_with_a_path_that_leads_elsewhere_is_no_manifest(tmp_path: Path, path: str):
    from dataclasses import replace

    from tandem.runs.artifacts import _to_manifest

    store = ArtifactStore(str(tmp_path / "store"), limits=QUICK)
    artifact = store.push("run", made(tmp_path / "a"))
    (file,) = (tmp_path / "store" / "run" / "manifests").iterdir()
    hostile = replace(artifact, entries=(replace(artifact.entries[0], path=path),))
    file.write_bytes(_to_manifest(hostile))
    assert store.names() == []


def test_links_are_not_followed(tmp_path: Path):
    source = made(tmp_path / "a")
    (source / "link").symlink_to("/etc/hostname")
    with pytest.raises(ArtifactError, match="is a link"):
        ArtifactStore(str(tmp_path / "store")).push("run", source)


# --- runs


def run_dir(directory: Path) -> Path:
    made(directory / "export")
    write_json(directory / "status.json", {"state": "succeeded", "verdict": "improved"})
    (directory / "spec.toml").write_text("recipe = 'sft'\n")
    (directory / "events.jsonl").write_text('{"number": 4, "stage": "done"}\n')
    return directory


def test_a_finished_run_is_not_failed_by_a_store_that_breaks_and_can_be_pushed_again(tmp_path: Path):
    run = run_dir(tmp_path / "run")
    with served(ObjectServer(share=1.0)) as server:
        spec = ArtifactsSpec(url="s3://bucket/runs", endpoint=server.url, timeout_s=1.0)
        assert {upload.state for upload in push_artifacts(run, spec)} == {"failed"}
        status = json.loads((run / "status.json").read_text())
        assert (status["state"], status["verdict"], status["artifacts"]["state"]) == ("succeeded", "improved", "failed")
        server.share, spec = 0.0, spec.model_copy(update={"timeout_s": 60.0})
        assert [upload.name for upload in push_artifacts(run, spec)] == ["run.export", "run.results"]
        assert s3(server).names() == ["run.export", "run.results"]
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["artifacts"]["state"]) == ("succeeded", "published")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["number"] for event in events] == [4, 5, 6, 7, 8]
    assert [event["state"] for event in events[1:]] == ["failed", "failed", "published", "published"]


def test_what_is_pushed_of_a_run_that_goes_on_changes_nothing_in_it(tmp_path: Path):
    run = run_dir(tmp_path / "run")
    write_json(run / "status.json", {"state": "running"})
    before = content(run)
    assert {upload.state for upload in push_artifacts(run, ArtifactsSpec(url=str(tmp_path / "store")))} == {"published"}
    assert content(run) == before


def test_a_store_that_cannot_be_opened_is_reported_too(tmp_path: Path):
    run = run_dir(tmp_path / "run")
    (upload, _) = push_artifacts(run, ArtifactsSpec(url="nosuch://bucket"))
    assert upload.state == "failed"
    assert "nosuch" in upload.error
    with pytest.raises(ArtifactError, match="--url"):
        push_artifacts(run)


def test_begin_returns_at_once_and_finish_does_not_wait_for_ever(tmp_path: Path):
    with served(ObjectServer(share=1.0, faults=("500",))) as server:
        uploads = Uploads(s3(server, Limits(backoff_s=30, timeout_s=120)))
        with Stopwatch() as watch:
            uploads.begin("run.step-1", made(tmp_path / "a"))
            (upload,) = uploads.finish(0.3)
        assert watch.seconds < 2
    assert (upload.state, upload.error) == ("failed", "not done in time")


def test_a_full_disk_damages_no_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The real thing is a small tmpfs, where one may be mounted; here the file system says so at the second file."""
    store = ArtifactStore(str(tmp_path / "store"), limits=Limits(tries=2, backoff_s=0.01))
    first = store.push("run", made(tmp_path / "a"))
    opened = LocalFileSystem.open

    def full(fs: LocalFileSystem, key: str, mode: str, **options: object) -> object:
        if mode == "wb" and key.endswith("model.safetensors"):
            raise OSError(28, "No space left on device")
        return opened(fs, key, mode, **options)

    monkeypatch.setattr(LocalFileSystem, "open", full)
    with pytest.raises(ArtifactError, match="No space left"):
        store.push("run", made(tmp_path / "a", seed=1))
    monkeypatch.undo()
    assert store.find("run") == first
    assert len(list((tmp_path / "store" / "run" / "parts").iterdir())) == 1  # room was given back


def test_a_repository_of_the_hub_is_a_store_too(online: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with hub_serving("me/runs") as hub:
        store = ArtifactStore("hf://me/runs/tandem", endpoint=hub.url, limits=QUICK)
        source = made(tmp_path / "a")
        hub.refuse = 1
        first = store.push("run.export", source)
        assert content(store.fetch("run.export", tmp_path / "back")) == content(source)
        assert store.push("run.export", source) == first
        assert store.names() == ["run.export"]
        assert all(name.startswith("tandem/run.export/") for name in hub.files)
        assert hub.commits == 3  # two files and their manifest
        with pytest.raises(ArtifactError, match="no artifact 'other'"):
            store.find("other")
