"""Deployable copies, their cards, and the hub: a stand-in server that takes what the real client sends."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from tandem.errors import ArtifactError, CheckpointDamaged, RunError
from tandem.io.atomic_write import write_json
from tandem.recipes.export import export_run, push_folder
from tandem.runs.checkpoints import Checkpoints

STATUS = {
    "state": "succeeded",
    "verdict": "improved",
    "recipe": "rl",
    "name": "sums",
    "steps_done": 30,
    "steps_total": 30,
    "eval": {"before_rl": 0.1, "after": 0.9, "interval": [0.7, 0.88], "confidence": 0.95, "tasks": 64},
}


GROUPS = "groups_per_step = 2\ngroup_size = 2\n"


def made_run(directory: Path, *, adapter: bool, model: str = 'path = "org/base"') -> Path:
    (directory / "export").mkdir(parents=True)
    write_json(directory / "status.json", STATUS)
    lora = "\n[model.lora]\nrank = 8\n" if adapter else ""
    head = f'recipe = "rl"\n[model]\n{model}\n{lora}[environment]\nname = "{directory}/sums.py:Sums"\n'
    (directory / "spec.toml").write_text(head + "[train]\nsteps = 30\nlr = 0.001\n" + GROUPS)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (directory / "export" / name).write_text(name)
    if adapter:
        (directory / "export" / "adapter").mkdir()
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            (directory / "export" / "adapter" / name).write_text('{"r": 8, "base_model_name_or_path": "/home/me/base"}')
    return directory


def names(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_a_run_with_an_adapter_gives_the_adapter_or_the_merged_model(tmp_path: Path):
    run = made_run(tmp_path / "run", adapter=True)
    adapter = export_run(run)
    assert names(adapter) == {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"}
    merged = export_run(run, merge=True)
    assert names(merged) == {"model.safetensors", "config.json", "tokenizer.json", "README.md"}
    assert adapter != merged
    assert export_run(run) == adapter  # its own copy is made anew
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(RunError, match="is not empty and is no earlier export"):
        export_run(run, directory=tmp_path / "other")
    assert names(tmp_path / "other") == {"thesis.tex"}


def test_an_adapter_on_a_base_that_nobody_has_must_be_merged(tmp_path: Path):
    run = made_run(tmp_path / "run", adapter=True, model='preset = "tiny"')
    with pytest.raises(RunError, match="--merge"):
        export_run(run)
    assert "model.safetensors" in names(export_run(run, merge=True))


def test_a_run_that_did_not_end_well_has_steps_or_nothing(tmp_path: Path):
    run = made_run(tmp_path / "run", adapter=True)
    shutil.rmtree(run / "export")
    with pytest.raises(RunError, match=r"no export/.*no step was saved"):
        export_run(run)

    def fill(step: int, directory: Path) -> None:
        (directory / "deploy").mkdir()
        (directory / "deploy" / "adapter_model.safetensors").write_text(f"after {step}")
        (directory / "deploy" / "adapter_config.json").write_text("{}")

    for step in (3, 6):
        Checkpoints(run).write(step, partial(fill, step), {"stage": "rl"})
    with pytest.raises(RunError, match="saved steps for --step: 3, 6"):
        export_run(run)
    with pytest.raises(RunError, match="has no checkpoint of step 4; saved steps for --step: 3, 6"):
        export_run(run, step=4)
    copy = export_run(run, step=3)
    assert copy.name == "deploy-step-3"
    assert (copy / "adapter_model.safetensors").read_text() == "after 3"
    card = (copy / "README.md").read_text()
    assert "The model after optimizer step 3." in card
    assert "Improved" not in card  # that was the run's end
    assert "90.0 %" not in card
    (run / "checkpoints" / "step-6" / "deploy" / "adapter_model.safetensors").write_text("other")
    with pytest.raises(CheckpointDamaged):
        export_run(run, step=6)


def test_the_card_tells_the_run_s_facts_and_no_path_of_this_machine(tmp_path: Path):
    run = made_run(tmp_path / "run", adapter=True)
    card = (export_run(run) / "README.md").read_text()
    assert 'base_model: "org/base"' in card
    assert "library_name: peft" in card
    assert "Improved: held-out accuracy rose from 10.0 % before RL to 90.0 % after it." in card
    assert "- optimizer steps: 30" in card
    assert str(tmp_path) not in card
    whole = (export_run(run, merge=True) / "README.md").read_text()
    assert "library_name: transformers" in whole


# --- the hub


class Hub(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refuse, self.status = 0, 429
        self.commits: list[dict[str, bytes]] = []
        self.created: list[dict[str, Any]] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(200, {"id": "me/sums", "sha": "0" * 40, "siblings": [], "private": True})

    def do_POST(self) -> None:
        chunks = []
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
        else:
            chunks.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        body = b"".join(chunks)
        if self.path.endswith("/repos/create"):
            self.server.created.append(json.loads(body))
            self.answer(200, {"url": "https://huggingface.co/me/sums", "name": "me/sums", "id": "me/sums"})
        elif "/preupload/" in self.path:
            regular = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": file["path"], **regular} for file in json.loads(body)["files"]]
            self.answer(200, {"files": files})
        elif "/commit/" in self.path:
            if self.server.refuse:
                self.server.refuse -= 1
                self.answer(self.server.status, {"error": "no"}, retry_after="0")
                return
            rows = [json.loads(line)["value"] for line in body.splitlines() if b'"file"' in line]
            self.server.commits.append({row["path"]: base64.b64decode(row["content"]) for row in rows})
            self.answer(
                200, {"commitUrl": "https://huggingface.co/me/sums/commit/1", "commitOid": "1" * 40, "success": True}
            )
        else:
            self.answer(200, {})

    def answer(self, status: int, content: Any, retry_after: str = "") -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if retry_after:
            self.send_header("Retry-After", retry_after)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, online: None) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_push_is_one_private_commit(tmp_path: Path, hub: Hub):
    run = made_run(tmp_path / "run", adapter=True)
    hub.refuse = 1
    target = export_run(run, push="me/sums", endpoint=f"http://127.0.0.1:{hub.server_address[1]}")
    (commit,) = hub.commits
    assert commit == {name: (target / name).read_bytes() for name in names(target)}
    assert hub.created[0].get("private") is True or hub.created[0].get("visibility") == "private"


def test_repositories_have_names_of_repositories(tmp_path: Path):
    run = made_run(tmp_path / "run", adapter=False)
    for name in ("../x", "a/b/c", "me/", "http://x/y"):
        with pytest.raises(ArtifactError, match="user/name"):
            export_run(run, push=name)
    assert not (run / "deploy").exists()


def test_a_push_that_is_forbidden_by_the_environment_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ArtifactError, match=r"creating it: OfflineModeIsEnabled: .*HF_HUB_OFFLINE` environment variable.$"
    ):
        push_folder(tmp_path, "me/sums")


def test_a_hub_that_refuses_is_an_error_and_the_copy_is_there(tmp_path: Path, hub: Hub):
    hub.refuse, hub.status = 100, 403
    run = made_run(tmp_path / "run", adapter=False)
    target = export_run(run)
    with pytest.raises(ArtifactError, match="uploading"):
        push_folder(target, "me/sums", endpoint=f"http://127.0.0.1:{hub.server_address[1]}")
    assert names(target)
    assert hub.commits == []


@pytest.mark.parametrize(
    ("place", "config", "base", "written"),
    [
        ("base", {"_name_or_path": "org/named"}, "", "org/named"),
        ("base", {"_name_or_path": "org/named"}, "org/told", "org/told"),
        ("models--org--cached/snapshots/0a1b", {}, "", "org/cached"),
        ("base", {"_name_or_path": "/somewhere/else"}, "", "/home/me/base"),
        ("base", {}, "", "/home/me/base"),
    ],
)
def test_an_adapter_names_its_base_by_its_id(
    tmp_path: Path, place: str, config: dict[str, str], base: str, written: str
):
    local = tmp_path / place
    local.mkdir(parents=True)
    write_json(local / "config.json", config)
    run = made_run(tmp_path / "run", adapter=True, model=f'path = "{local}"')
    copy = export_run(run, base=base)
    found = json.loads((copy / "adapter_config.json").read_text())
    assert found == {"r": 8, "base_model_name_or_path": written}
    assert ("base_model: " in (copy / "README.md").read_text()) == written.startswith("org/")
    if written.startswith("/"):
        with pytest.raises(ArtifactError, match="add --base user/name"):
            export_run(run, push="me/mine")
    with pytest.raises(ArtifactError, match=r"--base a/b/c: write the id"):
        export_run(run, base="a/b/c")
