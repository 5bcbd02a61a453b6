"""vLLM's scheduler as Tandem has it run, step by step against vLLM's own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from vllm_cpu import PYTHON, small_model

HERE = Path(__file__).parent


SETTINGS, STEPS = 60, 250


def test_every_step_is_what_it_was_and_all_that_is_left_after_it(tmp_path: Path):
    """With steps ahead or without, shared prefixes, adapters, priorities, preemption, aborts, pauses, resets, stops,
    and some that are urgent."""
    small_model().save_pretrained(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")}
    command = [str(PYTHON), str(HERE / "scheduled_in_bulk_script.py"), str(tmp_path), str(SETTINGS), str(STEPS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["differ"] == []
    assert told["preempted"] > 1000
    assert told["length"] > 2000
    assert told["stop"] > 500
    assert told["went on"] > told["scheduled"] / 8  # of both; and of four that run, one is always looked at
    assert told["went on beside others"] > 2000
    assert told["urgent"] > 300
    assert told["overtaken"] == 0
    assert told["stood"] < 8  # steps, where there is room: for those whose prompts are being computed
