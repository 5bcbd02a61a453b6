"""`tandem sync status`: what a run's map and last proofs say, and what an engine's server says of itself."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import EngineError, RunError, SpecError
from tandem.io.atomic import write_json
from tandem.io.jsonl import JsonlWriter
from tandem.obs.sync_status import sync_status
from tandem.obs.sync_text import status_text

TANDEM = Path(sys.executable).with_name("tandem")
LAYOUT = {f"model.layers.{number}.weight": ["float32", [4, 4]] for number in range(10)}
TRANSPORT = {"requested": "auto", "engaged": "gloo", "why": "an engine is on cpu, and NCCL joins GPUs"}
ENGINE = {
    "boot_id": "boot-1",
    "version": 7,
    "state": "serving",
    "why": "",
    "lease_left_s": None,
    "attachment": 1,
    "workers": 1,
    "cache_epoch": 3,
    "running": 0,
    "mapping": {"mode": "broadcast", "carries": "full", "tensors": 10},
}


def make_run(directory: Path, *, engines: list[dict[str, Any]] | None = None, versions: int = 4) -> Path:
    directory.mkdir()
    write_json(directory / "status.json", {"state": "running"})
    if engines is not None:
        write_json(directory / "sync-map.json", {"mode": "broadcast", "engines": engines, "transport": TRANSPORT})
    with JsonlWriter(directory / "sync.jsonl") as writer:
        for version in range(versions):
            writer.write(
                {
                    "version": version,
                    "mode": "broadcast",
                    "verified": "digest",
                    "tensors": 10,
                    "bytes_moved": 640,
                    "seconds": {"move": 0.002, "total": 0.004},
                    "digest": "00ff",
                    "engines": ["boot-1"],
                    "cache_epoch": version + 1,
                    "logprob_gap": float("nan") if version == 3 else 1e-7,
                    "gap_limit": 1e-4,
                    "canary_tokens": 4,
                    "attempts": 1,
                }
            )
    return directory


def of_run(directory: Path, **options: Any) -> dict[str, Any]:
    told = sync_status(str(directory), **options)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    return told


def test_a_run_tells_its_version_its_coverage_and_its_last_proofs(tmp_path: Path):
    engines = [{"boot_id": "boot-1", "workers": 2, "layout": LAYOUT}]
    told = of_run(make_run(tmp_path / "run", engines=engines), last=2)
    assert (told["state"], told["mode"], told["version"], told["coverage"]) == ("running", "broadcast", 3, 1.0)
    assert [proof["version"] for proof in told["proofs"]] == [2, 3]
    assert told["map_is_of_the_last_proof"]
    assert told["engines"][0]["layout"] == LAYOUT
    assert told["transport"] == TRANSPORT
    text = status_text(told)
    assert text.startswith(f"{tmp_path / 'run'}: running; version 3 was served last, by broadcast.\n")
    assert "engine boot-1: 2 workers, 10 tensors in its layout, 100% of the 10 sent mapped" in text
    assert "sync.backend = auto: gloo, an engine is on cpu, and NCCL joins GPUs\n" in text


def test_where_an_engine_fuses_tensors_the_pieces_count_and_not_its_layout(tmp_path: Path):
    pieces = {name: {"in": "fused"} for name in list(LAYOUT)[:9]}
    engines = [
        {"boot_id": "boot-1", "workers": 1, "layout": {"fused": ["float32", [40, 4]]}, "pieces": pieces},
        {"boot_id": "boot-2", "workers": 1, "layout": LAYOUT},
    ]
    told = of_run(make_run(tmp_path / "run", engines=engines))
    assert [engine["coverage"] for engine in told["engines"]] == [0.9, 1.0]
    assert told["coverage"] == 0.9
    assert "90% of the 10 sent mapped" in status_text(told)


def test_of_an_engine_that_takes_adapters_the_base_is_what_must_be_mapped(tmp_path: Path):
    base = dict.fromkeys(LAYOUT, "00ff")
    engines = [{"boot_id": "boot-1", "workers": 1, "layout": dict(list(LAYOUT.items())[:5]), "base": base}]
    told = of_run(make_run(tmp_path / "run", engines=engines))
    assert told["coverage"] == 0.5
    assert "50% of the 10 of the base mapped" in status_text(told)


def test_it_tells_whether_an_engine_lends_its_memory(tmp_path: Path):
    sleep = {"requested": "free", "engaged": False, "why_not": "no sleep mode here"}
    engines = [{"boot_id": "boot-1", "layout": LAYOUT, "sleep": sleep}]
    told = of_run(make_run(tmp_path / "run", engines=engines))
    assert told["engines"][0]["sleep"] == sleep
    assert "sleep = free: not engaged, no sleep mode here" in status_text(told)
    sleep["engaged"] = True
    assert "sleep = free: engaged" in status_text(of_run(make_run(tmp_path / "other", engines=engines)))


def test_a_map_of_another_engine_than_the_last_proof_is_said_to_be_one(tmp_path: Path):
    engines = [{"boot_id": "boot-2", "workers": 1, "layout": LAYOUT}]
    told = of_run(make_run(tmp_path / "run", engines=engines))
    assert not told["map_is_of_the_last_proof"]
    assert "the map is of other engines than the last proof" in status_text(told)


def test_a_run_without_engines_says_so(tmp_path: Path):
    told = of_run(make_run(tmp_path / "run", versions=0))
    assert (told["version"], told["coverage"], told["proofs"]) == (None, None, [])
    assert "no version is served yet" in status_text(told)
    assert "no map" in status_text(told)


def test_what_is_not_a_run_is_refused(tmp_path: Path):
    with pytest.raises(RunError, match="is not a run directory"):
        sync_status(str(tmp_path))
    directory = make_run(tmp_path / "run")
    (directory / "sync-map.json").write_text("{")
    with pytest.raises(RunError, match=r"sync-map\.json is not JSON"):
        sync_status(str(directory))


# --- a server


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        right = self.headers.get("Authorization") == "Bearer secret"
        known = self.path == "/engine/status"
        body = json.dumps(ENGINE if right else {"error": {"message": "no"}}).encode()
        self.send_response(404 if not known else 200 if right else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    made = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("secret\n")
    return path


def test_an_engine_is_asked_with_its_token(server: str, token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody's: the token goes to the engine alone
    told = sync_status(f"{server}/", token_file=token_file)
    assert told == {"kind": "engine", "url": server, **ENGINE}
    text = status_text(told)
    assert text.startswith(f"{server}: serving, serves version 7\n")
    assert "cache epoch      3" in text
    assert "mapping tensors  10" in text
    assert "why" not in text


def test_a_wrong_token_a_wrong_server_and_none_are_told_apart(server: str, token_file: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="that is not its token"):
        sync_status(server)
    with pytest.raises(EngineError, match="answers 404"):
        sync_status(f"{server}/elsewhere", token_file=token_file)
    with pytest.raises(EngineError, match="no engine answers there"):
        sync_status("http://127.0.0.1:9", token_file=token_file)
    with pytest.raises(SpecError, match="cannot be read"):
        sync_status(server, token_file=tmp_path / "none")
    with pytest.raises(SpecError, match="is for an engine's URL"):
        sync_status(str(tmp_path), token_file=token_file)


def test_the_command_prints_the_same_json(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", engines=[{"boot_id": "boot-1", "workers": 1, "layout": LAYOUT}])
    command = [TANDEM, "sync", "status", directory, "--json", "--last", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == sync_status(str(directory), last=1)
