"""A vLLM process that imports before it knows which model it will serve."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_cpu import PYTHON, small_model

from leashed import program_of
from tandem.engine.vllm.options import VllmOptions
from tandem.engine.vllm.process import VllmProcess
from tandem.errors import EngineError

OPTIONS = VllmOptions(
    "", str(PYTHON), dtype="float32", device="cpu", max_running=2, eager=True, further=["--skip-tokenizer-init"],
    environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
)  # fmt: skip


@pytest.fixture
def process(tmp_path: Path) -> Iterator[VllmProcess]:
    process = VllmProcess(OPTIONS, tmp_path, waits=True)
    yield process
    asyncio.run(process.close())


def test_it_goes_on_with_what_it_is_told(process: VllmProcess, tmp_path: Path):
    small_model().save_pretrained(tmp_path)
    program = program_of(process._child)
    process.serve(replace(OPTIONS, model=str(tmp_path), max_context=64))
    process.wait_ready(300)
    assert program_of(process._child) == program
    log = (tmp_path / "vllm.log").read_text()
    assert "found in sys.modules" not in log
    assert "ahead:" not in log, "everything that is to be imported ahead is there"
    name = Path(process._name.path) if process._name else tmp_path
    assert name.resolve() == tmp_path.resolve() != name, "vLLM knows it by its form"
    assert f"'model': '{name}'" in log


def test_one_that_died_while_it_waited_says_so(process: VllmProcess, tmp_path: Path):
    os.kill(program_of(process._child), signal.SIGKILL)
    process.serve(replace(OPTIONS, model=str(tmp_path)))
    with pytest.raises(EngineError, match=r"vLLM ended while it started.*signal 9"):
        process.wait_ready(60)
