"""What a spec can name as a model and is none: refused in one sentence, before anything heavy or slow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

import tandem
from stopwatch import Stopwatch
from tandem.errors import DataError, RunError, SpecError
from tandem.io.model_path_check import refuse_no_model


def gguf(place: Path) -> Path:
    (place / "m.gguf").write_bytes(b"GGUF\x03\x00")
    return place / "m.gguf"


def renamed_gguf(place: Path) -> Path:
    return gguf(place).rename(place / "weights")


def beside(place: Path, *names: str) -> Path:
    for name in names:
        (place / name).write_text("{}")
    return place


REFUSED: dict[str, tuple[Callable[[Path], str | Path], str]] = {
    "nothing": (lambda place: place / "nowhere", "no such directory"),
    "relative": (lambda place: "./nowhere", "no such directory"),
    "three parts": (lambda place: "a/b/c", "it is no hub id"),
    "a GGUF file": (gguf, "its GGUF header is damaged"),
    "a GGUF file of another name": (renamed_gguf, "its GGUF header is damaged"),
    "a directory with a GGUF file": (lambda place: gguf(place).parent, "its GGUF header is damaged"),
    "no GGUF file": (lambda place: beside(place, "m.gguf") / "m.gguf", "is no GGUF file, though its name says so"),
    "a file": (lambda place: beside(place, "config.json") / "config.json", "is a file; name the directory"),
    "an empty directory": (lambda place: place, "has no config.json"),
    "a run": (lambda place: beside(place, "status.json", "spec.toml"), "is a run directory; name its export/"),
    "a pickle": (
        lambda place: beside(place, "config.json", "pytorch_model.bin"),
        "weights are a pickle (pytorch_model",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_model_is_named_for_what_it_is(what: str, tmp_path: Path):
    make, why = REFUSED[what]
    source = make(tmp_path)
    with pytest.raises(SpecError) as caught:
        refuse_no_model(str(source), field="model.warm_start")
    said = str(caught.value)
    assert said.startswith(f"model.warm_start = '{source}': ")
    assert why in said
    assert "\n" not in said


def test_models_adapters_and_tokenizers_pass(tmp_path: Path):
    for name, files in {
        "model": ("config.json", "model.safetensors", "training_args.bin"),
        "adapter": ("adapter_config.json", "adapter_model.safetensors"),
    }.items():
        (tmp_path / name).mkdir()
        refuse_no_model(str(beside(tmp_path / name, *files)))
    (tmp_path / "tokenizer").mkdir()
    refuse_no_model(str(beside(tmp_path / "tokenizer", "tokenizer_config.json", "tokenizer.json")), weights=False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, online: None) -> Iterator[list[str]]:
    """A hub that knows no model; the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(401)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield asked
        server.shutdown()


def test_the_hub_is_asked_once_and_what_it_does_not_know_is_said(hub: list[str]):
    with pytest.raises(SpecError, match=r"model.path = 'nobody/nothing': .*no such model on the hub; a private one"):
        refuse_no_model("nobody/nothing")
    assert [path for path in hub if path.startswith("/api/models/")] == ["/api/models/nobody/nothing/revision/main"]


def test_without_a_network_a_hub_id_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with Stopwatch() as watch, pytest.raises(SpecError, match="the hub does not answer: "):
        refuse_no_model("nobody/nothing")
    assert watch.seconds < 5
    with pytest.raises(SpecError, match=r"the hub does not answer: .* \(asked for revision 'v2'\)"):
        refuse_no_model("nobody/nothing", "v2")


SPEC = {
    "recipe": "sft",
    "model": {"preset": "tiny"},
    "data": {"kind": "file", "path": "nowhere.jsonl"},
    "train": {"steps": 1, "lr": 1e-4},
}


def test_a_run_that_is_refused_leaves_no_directory(tmp_path: Path):
    with pytest.raises(SpecError, match=r"model\.path = '/nowhere'"):
        tandem.run({**SPEC, "model": {"path": "/nowhere"}}, tmp_path / "run")
    with pytest.raises(SpecError, match=r"model\.warm_start = '/nowhere'"):
        tandem.run({**SPEC, "model": {"preset": "tiny", "warm_start": "/nowhere"}}, tmp_path / "run")
    with pytest.raises(DataError, match=r"data\.path = "):
        tandem.run(SPEC, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_what_serves_says_which_argument_names_no_model(tmp_path: Path):
    with pytest.raises(SpecError, match="model = '/nowhere': there is no such directory"):
        tandem.serve_model("/nowhere", tandem.Listen(tmp_path))
    with pytest.raises(SpecError, match="--model = '/nowhere': there is no such directory"):
        tandem.serve_gateway("/nowhere", tandem.Listen(tmp_path))
    (tmp_path / "status.json").mkdir()
    (tmp_path / "export").mkdir()
    with pytest.raises(RunError, match=r"status\.json: cannot be read"):
        tandem.serve_model(tmp_path, tandem.Listen(tmp_path))
