"""What is known of vLLM's scheduler without a vLLM. What it does: tests/vllm/test_scheduled_in_bulk.py."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.engine.vllm.options import VllmOptions
from tandem.engine.vllm.process import VllmProcess
from tandem.engine.vllm.tested_versions import PASSED
from tandem.ops.vllm_token_protocol import SCHEDULER_TOLD
from tandem.vllm_worker.bulk_scheduling import COMPARED, going_on
from tandem.vllm_worker.token_recorder import Unfit


def test_one_that_was_not_compared_is_left_as_it_is():
    with pytest.raises(Unfit, match=r"the scheduler of vLLM 0\.99\.0 was not compared"):
        going_on(object, "0.99.0+cu130")


def test_all_versions_that_tandem_knows_were_compared():
    assert set(PASSED) == set(COMPARED)


def test_what_it_says_of_itself_is_read_where_it_was_told_to_write(tmp_path: Path):
    process = object.__new__(VllmProcess)
    process.options = VllmOptions("model", "python")
    process._folder = SimpleNamespace(name=str(tmp_path))
    told = Path(process.environment(tmp_path)[SCHEDULER_TOLD])
    assert process.why_not_in_bulk == "vLLM was told to take another scheduler"
    told.write_text(json.dumps({"why_not": "a step samples several tokens"}))
    assert process.why_not_in_bulk == "a step samples several tokens"
