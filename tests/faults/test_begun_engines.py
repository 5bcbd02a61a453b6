"""Engine processes that a run begins before its trainer has loaded the model."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from test_child_process import wait_until
from test_engine_process import Source, closing, play, real

import tandem
from leashed import programs_below
from letters_environment import LETTERS
from tandem.build import built_model, run_engines
from tandem.engine.server.child_process import Owned, OwnedProcess
from tandem.engine.server.engine import ServerEngine
from tandem.io.jsonl import read_jsonl
from tandem.model.presets import make_model
from tandem.spec.load import parse_spec
from tandem.text.tokenizer import byte_tokenizer

OPTION = "engine begins beside the trainer"
SAME_GPU = "it only imports meanwhile: the trainer is on its GPU"
FIRST_WEIGHTS = "it only imports meanwhile: the run writes the model for it"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, tokenizer = tmp_path_factory.mktemp("model"), byte_tokenizer()
    make_model("tiny", tokenizer, seed=0).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def started_one(before: set[int]) -> int:
    until = time.monotonic() + 20
    while len(found := programs_below() - before) != 1:
        assert time.monotonic() < until, found
        time.sleep(0.02)
    return found.pop()


def process_of(model: Path, directory: Path) -> OwnedProcess:
    def command(*which: Any) -> list[str]:
        return [*real(*which), "--allow-dir", str(directory)]

    return OwnedProcess(Owned(command, str(model), directory, start_deadline_s=60))


def spec_of(model: dict[str, Any], **tables: Any) -> Any:
    return parse_spec(
        {
            "recipe": "rl", "name": "begun", "device": "cpu", "model": model, "environment": {"name": "sort"},
            "engine": {"kind": "server", "max_context": 96}, "sync": {"bridge": "broadcast"},
            "train": {"steps": 1, "lr": 1e-3, "groups_per_step": 2, "group_size": 2, "max_tokens": 8},
            "eval": {"tasks": 2}, **tables,
        }
    )  # fmt: skip


@pytest.mark.parametrize("loads", [True, False])
def test_it_is_the_one_that_serves(loads: bool, model: Path, tmp_path: Path) -> None:
    before = programs_below()

    async def work() -> None:
        process = process_of(model, tmp_path)
        process.begin(loads=loads)
        program = started_one(before)
        log, ready = tmp_path / "log.txt", tmp_path / "ready.json"
        if loads:
            wait_until(ready.exists, 60)
        else:
            wait_until(lambda: "ready to load the model" in log.read_text(), 60)
            assert not ready.exists()
        async with closing(ServerEngine(process, deadline_s=60)) as engine:
            await engine.attach(Source(tmp_path))
            assert json.loads(ready.read_text())["pid"] == program == started_one(before)

    play(work)
    assert programs_below() == before


def test_one_that_died_meanwhile_is_replaced(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = programs_below()

    async def work() -> None:
        process = process_of(model, tmp_path)
        process.begin(loads=False)
        program = started_one(before)
        os.kill(program, signal.SIGKILL)
        async with closing(ServerEngine(process, deadline_s=60)) as engine:
            await engine.attach(Source(tmp_path))
            assert started_one(before) != program

    play(work)
    assert programs_below() == before
    assert "started early failed; starting another" in caplog.text


@pytest.mark.parametrize("preset", [False, True])
def test_a_run_begins_its_engines_and_ends_those_that_nobody_took(preset: bool, model: Path, tmp_path: Path) -> None:
    before = programs_below()
    spec = spec_of({"preset": "tiny"} if preset else {"path": str(model)})

    def fail() -> None:
        with run_engines.begun(spec, tmp_path / "engines") as begun:
            assert begun.why_imports_only == (FIRST_WEIGHTS if preset else "")
            started_one(before)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert programs_below() == before


@pytest.mark.parametrize(("gpus", "why_imports_only"), [((0, 1), SAME_GPU), ((1, 2), "")])
def test_on_the_trainers_gpu_it_only_imports(
    gpus: tuple[int, ...], why_imports_only: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    asked = list[bool]()
    monkeypatch.setattr(built_model, "pick_device", lambda wanted: torch.device("cuda"))
    monkeypatch.setattr(OwnedProcess, "begin", lambda self, *, loads: asked.append(loads))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    spec = spec_of({"path": str(model)}, engine={"kind": "vllm", "tensor_parallel": 2, "gpus": list(gpus)})
    with run_engines.begun(spec, tmp_path) as begun:
        assert (begun.why_imports_only, asked) == (why_imports_only, [not why_imports_only])


@pytest.mark.parametrize("preset", [False, True])
def test_a_whole_run_says_so_and_starts_one_process(
    preset: bool, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    letters = tmp_path / "letters.py"
    letters.write_text(LETTERS)
    spec = spec_of({"preset": "tiny"} if preset else {"path": str(model)}, environment={"name": str(letters)})
    run = tandem.run(spec, root=tmp_path)
    events = read_jsonl(run.directory / "events.jsonl")
    (note,) = (each["note"] for each in events if each.get("option") == OPTION)
    assert note == (FIRST_WEIGHTS if preset else "")
    log = (run.directory / "engines" / "engine-0" / "log.txt").read_text()
    assert log.count("ready to load the model") == int(preset)
    assert "started early failed" not in caplog.text
