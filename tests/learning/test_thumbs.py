"""Every file of docs/thumbs.md is written and every command run: served, rated, trained, served better."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import tandem
from tandem.build import built_model, training
from tandem.cli.main import app
from tandem.io.chat_feedback import ChatStore, feedback_rows, write_rows
from tandem.spec.model import PresetModel
from tandem.spec.precision import Float32Precision

pytestmark = pytest.mark.usefixtures("one_thread", "forked_programs")

PAGE = (Path(__file__).parents[2] / "docs" / "thumbs.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


def words(command: str) -> list[str]:
    """The command, on a model made from scratch, with this Python."""
    first, *rest = shlex.split(command.replace(HUB, "base"))
    return [sys.executable, *(["-m", "tandem"] if first == "tandem" else []), *rest]


def run(command: str, home: Path) -> str:
    """Run a command of `tandem` in this process, which has its imports done, and a program in its own."""
    python, *rest = words(command)
    if rest[:2] == ["-m", "tandem"]:
        with chdir(home):
            done = CliRunner().invoke(app, rest[2:])
        assert done.exit_code == 0, done.output
        return done.stdout
    ended = subprocess.run([python, *rest], cwd=home, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@contextmanager
def served(command: str, home: Path) -> Iterator[None]:
    (home / "desk.json").unlink(missing_ok=True)
    process = subprocess.Popen([*words(command), "--port", "0"], cwd=home)
    try:
        until = time.monotonic() + 120
        while not (home / "desk.json").exists():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def asked(home: Path, question: str) -> str:
    ready = json.loads((home / "desk.json").read_text())
    headers = {"Authorization": f"Bearer {Path(ready['token_file']).read_text()}"}
    with httpx.Client(base_url=ready["url"], headers=headers, timeout=60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body: dict[str, Any] = {
            "model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0,
        }  # fmt: skip
        return client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


def test_the_page_goes_all_the_way_to_a_better_model_that_is_served(tmp_path: Path):
    made = built_model.model(PresetModel(preset="tiny"), Float32Precision(), 0, built_model.pick_device("cpu"))
    training.export(made, tmp_path / "base")
    for name, text in FILES.items():
        scratch = text.replace(f'path = "{HUB}", lora = {{ rank = 16 }}', 'path = "base"').replace("2e-4", "2e-3")
        (tmp_path / name).write_text(scratch.replace("lr = 5e-6", "lr = 3e-4"))
    serve, users, sft, train, pairs, train_pairs, serve_better = COMMANDS
    with served(serve, tmp_path):
        before = asked(tmp_path, "Ada asks about the lamp")
        run(users, tmp_path)
        said = run(sft, tmp_path)
    assert before != "Hello Ada, gladly."
    assert said == "49 chats, 48 rated, 48 with a better answer\n48 rows as sft in better.jsonl\n"
    run(train, tmp_path)
    assert json.loads((tmp_path / "runs/better/status.json").read_text())["verdict"] == "improved"
    with served(serve_better, tmp_path):
        answers = [
            asked(tmp_path, f"{name} asks about the {thing}") for name, thing in (("Ada", "lamp"), ("Gus", "map"))
        ]
        run(users, tmp_path)
        assert run(pairs, tmp_path).startswith("99 chats, 96 rated"), "those of before, too"
    assert all(answer.startswith("Hello ") and answer.endswith(", gladly.") for answer in answers), answers
    run(train_pairs, tmp_path)
    assert json.loads((tmp_path / "runs/pairs/status.json").read_text())["verdict"] == "improved"


def test_thumbs_alone_are_trained_on_by_kto(tmp_path: Path):
    async def fill() -> None:
        store = ChatStore(tmp_path)
        for number in range(40):
            answer = {"role": "assistant", "content": "yes" if number % 2 else "no"}
            await store.keep(str(number), [{"role": "user", "content": f"question {number}"}], [answer], 0)
            await store.rate(str(number), 0, float(number % 2), "")
        store.close()

    asyncio.run(fill())
    write_rows(feedback_rows(tmp_path, "labels"), tmp_path / "labels.jsonl")
    spec = {
        "recipe": "preference", "model": {"preset": "tiny"}, "algorithm": {"kind": "kto"},
        "data": {"path": str(tmp_path / "labels.jsonl"), "eval_share": 0.25},
        "train": {"steps": 6, "batch_size": 16, "lr": 3e-4},
    }  # fmt: skip
    ended = tandem.run(spec, tmp_path / "run").status
    assert (ended["state"], ended["verdict"]) == ("succeeded", "improved")
