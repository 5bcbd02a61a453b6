"""The artifact store against moto's S3 server: `make test-s3` gives it an environment."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.runs.artifacts import ArtifactStore

pytest.importorskip("moto.server", reason="moto has an environment of its own: make test-s3")
pytestmark = pytest.mark.filterwarnings("ignore")  # moto's own


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import boto3
    from moto.server import ThreadedMotoServer

    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
    yield url
    server.stop()


def test_an_artifact_of_many_blocks_comes_back(tmp_path: Path, endpoint: str):
    source = tmp_path / "export"
    (source / "deep").mkdir(parents=True)
    sizes = {"empty": 0, "small.json": 100, "deep/large.safetensors": 20 * 2**20 + 1}
    for name, size in sizes.items():
        (source / name).write_bytes(random.Random(name).randbytes(size))
    store = ArtifactStore("s3://bucket/runs", endpoint=endpoint)
    artifact = store.push("run.export", source)
    assert {entry.path: entry.size_bytes for entry in artifact.entries} == sizes
    assert store.push("run.export", source) == artifact
    assert store.names() == ["run.export"]
    back = store.fetch("run.export", tmp_path / "back")
    assert all((back / name).read_bytes() == (source / name).read_bytes() for name in sizes)
    (source / "small.json").write_bytes(b"{}")
    assert store.push("run.export", source).number == 2
