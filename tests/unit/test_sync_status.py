"""`tandem sync status`: what a run's map and last proofs say, and what an engine's server says of itself."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.engine.vllm.engine import VllmEngine
from tandem.engine.vllm.options import VllmOptions
from tandem.errors import EngineError, RunError, SpecError
from tandem.io.atomic_write import write_json
from tandem.io.jsonl import JsonlWriter
from tandem.obs.sync_report import status_text
from tandem.obs.sync_status import sync_status
from tandem.vllm_worker.served_memory import TensorLayout, TensorPiece
from tandem.vllm_worker.worker import EngineWorker

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


class Workers:
    """Stands where `vllm serve` is talked to: two real workers of it, over a model that this test lays out."""

    options = VllmOptions("model", "python", tensor_parallel=2)
    why_not_found_again = why_not_in_bulk = ""

    def __init__(self, layouts: list[TensorLayout], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tandem.vllm_worker.worker.layout_of", lambda model: layouts[model])
        source = SimpleNamespace(carries="full")
        monkeypatch.setattr("tandem.vllm_worker.worker.open_source", lambda link, device: source)
        monkeypatch.setattr("tandem.vllm_worker.worker._vllm_version", lambda: "0")
        parallel = SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=2)
        self._workers = [
            EngineWorker(
                SimpleNamespace(
                    vllm_config=SimpleNamespace(parallel_config=parallel),
                    get_model=lambda rank=rank: rank,
                    rank=rank,
                    device=torch.device("cpu"),
                    model_runner=SimpleNamespace(),
                )
            )
            for rank in range(2)
        ]

    async def post(self, path: str, body: Any, *, deadline_s: float) -> Any:
        name = body["method"].removeprefix("tandem_")
        if name == "keep":  # by no worker without a vLLM around it
            return {"results": [{"why_not": "no vLLM is here"}] * len(self._workers)}
        return json.loads(json.dumps({"results": [getattr(each, name)(*body["args"]) for each in self._workers]}))


def half(rank: int) -> TensorLayout:
    """Of four tensors: q and k are fused, o is sharded by columns, norm is whole in both workers."""

    def piece(
        name: str, param: str, view: torch.Tensor, row: int, col: int, full: tuple[int, ...]
    ) -> list[TensorPiece]:
        return [TensorPiece(name, param, view, row, col, full)]

    qkv, o, norm = torch.zeros(4, 4), torch.zeros(4, 2), torch.zeros(4)
    pieces = {
        "q": piece("q", "qkv", qkv[:2], 2 * rank, 0, (4, 4)),
        "k": piece("k", "qkv", qkv[2:], 2 * rank, 0, (4, 4)),
        "o": piece("o", "o", o, 0, 2 * rank, (4, 4)),
        "norm": piece("norm", "norm", norm, 0, 0, (4,)),
    }
    return TensorLayout(pieces, {}, (), {})


def test_what_vllms_workers_tell_is_shown_where_it_fuses_and_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = VllmEngine(
        Workers([half(0), half(1)], monkeypatch),  # pyright: ignore[reportArgumentType]
        end_ids=frozenset(),
        num_ids=0,
    )
    heard: list[Any] = []
    source = SimpleNamespace(link={"mode": "broadcast", "carries": "full"}, carries="full", attached=heard.append)
    asyncio.run(engine.attach(source))  # pyright: ignore[reportArgumentType]
    told = of_run(make_run(tmp_path / "run", engines=heard))
    shown = told["engines"][0]
    assert (shown["mapped"], shown["workers"], len(shown["places"])) == (4, 2, 8)
    assert shown["fused"] == {"qkv": ["q", "k"]}
    assert shown["sharded"] == {"q": 2, "k": 2, "o": 2}
    text = status_text(told)
    assert "  fused: 2 tensors in 1 parameters, as qkv from q, k\n" in text
    assert "  sharded: 3 tensors, as q in 2 pieces\n" in text
    assert "40% of the 10 sent mapped" in text


def test_a_tensor_that_is_in_no_place_is_not_mapped_unless_the_engine_derives_it(tmp_path: Path):
    places = [[name, name, 0, 4, 0, 4] for name in list(LAYOUT)[:8]]
    engines = [{"boot_id": "boot-1", "layout": LAYOUT, "places": places, "derived": list(LAYOUT)[8:9]}]
    told = of_run(make_run(tmp_path / "run", engines=engines))
    assert told["coverage"] == 0.9
    assert (told["engines"][0]["fused"], told["engines"][0]["sharded"]) == ({}, {})


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


def test_it_tells_how_logprobs_leave_an_engine(tmp_path: Path):
    sampled = {"requested": "kept", "engaged": False, "why_not": "other steps"}
    engines = [{"boot_id": "boot-1", "layout": LAYOUT, "sampled": sampled}]
    told = status_text(of_run(make_run(tmp_path / "run", engines=engines)))
    assert "logprobs of rollouts = kept: not engaged, other steps" in told


def test_it_tells_what_an_engine_chose_that_was_left_to_it(tmp_path: Path):
    chosen = {"requested": "auto", "engaged": True, "why_not": "", "note": "finish, for it sleeps"}
    engines = [{"boot_id": "boot-1", "layout": LAYOUT, "on_update": chosen}]
    told = status_text(of_run(make_run(tmp_path / "run", engines=engines)))
    assert "requests under way = auto: engaged, finish, for it sleeps" in told


def test_a_map_of_another_engine_than_the_last_proof_is_said_to_be_one(tmp_path: Path):
    engines = [{"boot_id": "boot-2", "workers": 1, "layout": LAYOUT}]
    told = of_run(make_run(tmp_path / "run", engines=engines))
    assert not told["map_is_of_the_last_proof"]
    assert "sync-map.json has other engines than the last proof" in status_text(told)


def test_a_run_without_engines_says_so(tmp_path: Path):
    told = of_run(make_run(tmp_path / "run", versions=0))
    assert (told["version"], told["coverage"], told["proofs"]) == (None, None, [])
    assert "no version is served yet" in status_text(told)
    assert "no sync-map.json" in status_text(told)


def test_what_is_not_a_run_is_refused(tmp_path: Path):
    with pytest.raises(RunError, match="is not a run directory"):
        sync_status(str(tmp_path))


# --- damage


DAMAGED: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "sync-map.json is not valid JSON"),
    "no object": ("[1]", "sync-map.json is not an object: [1]"),
    "engines 5": ('{"engines": 5}', "engines = 5 is not of type list"),
    "no engine": ('{"engines": ["x"]}', "'x' is not an engine"),
    "layout 5": ('{"engines": [{"boot_id": "b", "layout": 5}]}', "layout = 5 is not of type object"),
    "places 5": ('{"engines": [{"boot_id": "b", "places": 5}]}', "places = 5 is not of type list"),
    "a place 5": ('{"engines": [{"boot_id": "b", "places": [5]}]}', "1 of 1 places are not valid"),
    "sleep": ('{"engines": [{"boot_id": "b", "sleep": {"requested": "free"}}]}', "sleep lacks engaged"),
    "sampled": ('{"engines": [{"boot_id": "b", "sampled": {"engaged": true}}]}', "sampled lacks requested"),
    "transport 5": ('{"transport": 5}', "transport = 5 is not of type object"),
    "transport": ('{"transport": {"engaged": "gloo"}}', "transport lacks requested"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_map_is_said_to_be_one_and_the_rest_is_shown(tmp_path: Path, name: str):
    written, what = DAMAGED[name]
    directory = make_run(tmp_path / "run")
    (directory / "sync-map.json").write_text(written)
    told = of_run(directory)
    assert len(told["damage"]) == 1
    assert what in told["damage"][0]
    assert (told["version"], len(told["proofs"])) == (3, 4)
    text = status_text(told)
    assert f"damaged: {told['damage'][0]}\n" in text
    assert "broadcast" in text.splitlines()[-1]


def test_rows_of_the_ledger_that_cannot_be_read_are_counted(tmp_path: Path):
    directory = make_run(tmp_path / "run")
    lines = (directory / "sync.jsonl").read_text().splitlines()
    lines[1], lines[2] = lines[1].replace('"digest": "00ff"', '"digest": [1]'), "{"
    (directory / "sync.jsonl").write_text("\n".join(lines) + "\n")
    told = of_run(directory)
    assert (told["unreadable_proofs"], [proof["version"] for proof in told["proofs"]]) == (2, [0, 3])
    assert "damaged: sync.jsonl: 2 rows cannot be read; `tandem sync audit` says which\n" in status_text(told)
    assert "no sync-map.json: no engine has been attached" in status_text(told)


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
    with pytest.raises(EngineError, match="refuses the token"):
        sync_status(server)
    with pytest.raises(EngineError, match="answers 404"):
        sync_status(f"{server}/elsewhere", token_file=token_file)
    with pytest.raises(EngineError, match="no engine answers"):
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
