"""vLLM's scheduler with its cache manager answered early, step by step against one that asks about every slot."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from vllm_cpu import PYTHON, small_model

HERE = Path(__file__).parent


def test_every_step_is_what_it_was_with_preemption_prefixes_aborts_and_steps_ahead(tmp_path: Path):
    small_model().save_pretrained(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")}
    command = [str(PYTHON), str(HERE / "next_slots_script.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["differ"] == []
    assert told["preempted"] > 20
    assert told["ended"] > 200
    assert told["asked"]["early"] < told["asked"]["theirs"] / 2
