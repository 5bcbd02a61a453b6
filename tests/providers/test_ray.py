"""The suite over a real Ray cluster of one node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from places import Place, Ray, free_port, ray
from sentences import *  # noqa: F403
from sentences import begun, job, run, sh, until

from tandem.errors import ProviderRefused
from tandem.job_types import Handle, Need
from tandem.protocols import Provider
from tandem.providers.ray import RayProvider, RaySettings

pytestmark = pytest.mark.skipif(not ray(), reason="no `ray` on the PATH: pip install 'ray[default]'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Ray]:
    found = Ray()
    yield found
    found.kill()


@pytest.fixture(scope="module")
def place(cluster: Ray, tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("jobs")
    settings = RaySettings(url=cluster.url, directory=str(root), stop_s=2)

    def silent() -> Provider:
        return RayProvider(settings.model_copy(update={"url": f"http://127.0.0.1:{free_port()}"}))

    return Place("ray", lambda: RayProvider(settings), root, silent, settle_s=180, console_only=True)


def test_gpus_are_given_out_and_the_next_job_waits(place: Place) -> None:
    need = Need(cpus=0, gpus=3)
    first = begun(place, sh("sleep 60", need=need))
    until(place, first, "running")
    second = begun(place, job("true", need=need))
    assert until(place, second, "waiting")
    run(place.provider().end(first, 0))
    assert until(place, second, "ended").code == 0


def test_a_file_that_ray_does_not_show_is_refused(place: Place) -> None:
    with pytest.raises(ProviderRefused, match="no other file"):
        run(place.provider().read(Handle("a"), "metrics.jsonl", 0, 10))


def test_a_token_is_sent_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("secret\n")
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization", ""))
        return httpx.Response(200, json=[])

    real = httpx.AsyncClient
    monkeypatch.setattr(httpx, "AsyncClient", lambda **more: real(transport=httpx.MockTransport(answer), **more))
    assert run(RayProvider(RaySettings(url="http://head:8265", token_file=str(tmp_path / "token"))).find("")) == []
    assert seen == ["Bearer secret"]
