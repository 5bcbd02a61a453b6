"""Names of models that need one more word: pinned ids, adapters in a model's place, models behind terms."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

import tandem
from stopwatch import Stopwatch
from tandem.errors import SpecError
from tandem.io.model_path_check import refuse_no_model
from tandem.spec.model import PathModel


def sft(path: str) -> dict[str, object]:
    data = {"kind": "file", "path": "rows.jsonl"}
    return {"recipe": "sft", "model": {"path": path}, "data": data, "train": {"steps": 1, "lr": 1e-4}}


def test_a_pinned_id_is_an_id_and_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pinned = PathModel.model_validate({"path": "org/name@v1.0"})
    assert (pinned.path, pinned.revision) == ("org/name", "v1.0")
    assert PathModel.model_validate({"path": "org/name@v1.0", "revision": "v1.0"}) == pinned
    with pytest.raises(ValueError, match=r"path = 'org/name@v1.0' and revision = 'main' differ; write one of them"):
        PathModel.model_validate({"path": "org/name@v1.0", "revision": "main"})
    (tmp_path / "org" / "name@v1.0").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    there = PathModel.model_validate({"path": "org/name@v1.0"})
    assert (there.path, there.revision) == ("org/name@v1.0", "main")


def test_a_pinned_id_without_a_network_is_refused_at_once_and_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with (
        Stopwatch() as watch,
        pytest.raises(SpecError, match=r"^model.path = 'org/name': .*hub does not answer: [^\n]*$"),
    ):
        tandem.run(sft("org/name@v1.0"), tmp_path / "run")
    assert watch.seconds < 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("base", ["org/base", ""])
def test_an_adapter_in_a_models_place_names_its_base(base: str, tmp_path: Path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base or None}))
    way = f"an adapter of '{base}'; set model.path = '{base}', and" if base else "set model.path to the model that it"
    with pytest.raises(SpecError, match=f"^model.path = '{adapter}': is .*{way}.* model.warm_start = '{adapter}'$"):
        tandem.run(sft(str(adapter)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch, online: None) -> Iterator[list[str]]:
    """A hub that describes a model, and gives no one its files; what it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = json.dumps({"id": "org/name", "gated": "manual", "siblings": []}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(403)
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        url = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", url, raising=False)
        yield asked
        server.shutdown()


def test_a_gated_model_is_refused_before_the_run_with_the_way_in(gated: list[str]):
    with pytest.raises(SpecError, match=r"gives it to those who accepted its terms; accept them .* `hf auth login`"):
        refuse_no_model("org/name", "v1")
    assert [path.partition("?")[0] for path in gated] == [
        "/api/models/org/name/revision/v1", "/org/name/resolve/v1/config.json",
    ]  # fmt: skip
