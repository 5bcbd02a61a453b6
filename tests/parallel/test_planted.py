"""Wrong weights on one rank are found by name before a version leaves the trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.train.crew import abort_all

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("planted.py")), str(tmp_path_factory.mktemp("planted"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("what", "tensor"),
    [
        ("an adapter that differs", ".lora_B."),
        ("a rotary table that differs", "rotary_emb"),
        ("a rank that is a version behind", "version"),
        ("rows of a host that differ", "model.layers.0."),
        ("saved: rows of a host that differ", "model.layers.0."),
        ("saved: optimizer state of a host that differs", "|"),
    ],
)
def test_ranks_that_differ_are_named(found, what, tensor):
    assert found[what].startswith("RanksDiverged: '")
    assert tensor in found[what]
    assert "differs on rank 1 from rank 0: all of them must hold the same" in found[what]


def test_ranks_whose_optimizer_state_is_equal_save(found):
    assert found["saved after all"] == "saved"


def test_a_loss_aborts_every_group_in_which_a_rank_may_wait(found):
    assert found["groups that no loss aborts"] == []


def test_an_abort_that_waits_does_not_hold_up_the_others():
    class Group:
        def __init__(self, work: Callable[[], object]) -> None:
            self.abort = work

        def _get_backend(self, device: torch.device) -> Any:
            return self

    last = threading.Event()
    blocked = Group(threading.Event().wait)
    abort_all([blocked, Group(lambda: 1 // 0), Group(last.set)], torch.device("cpu"))
    assert last.wait(10)


def test_gradients_of_adapters_keep_no_parts_of_other_ranks(found):
    assert set(found["whole gradients keep no more than their bytes"]) == {True}


def test_rows_that_every_host_holds_are_counted_and_written_once(found):
    assert found["digests of one host are those of whole tensors"]


def test_digests_of_rows_add_up_to_those_of_whole_tensors(found):
    assert found["digests of rows are those of whole tensors"]


def test_swapped_rows_change_the_digest(found):
    assert found["swapped rows"], "a rank that holds another's rows would go unnoticed"
    assert found["rows are back"]


def test_what_ranks_train_in_the_memory_of_workers_is_what_these_serve(found):
    assert found["in the engine: the values moved with them"]
    assert found["in the engine: published"] == ["proven 0"] * 3
    assert found["in the engine: what is served"]
    assert found["in the engine: the digests of one rank"]


def test_a_checkpoint_is_loaded_into_the_memory_of_workers(found):
    assert found["in the engine: loaded"]
    assert found["in the engine: published after that"] == "proven 0"
    assert found["in the engine: computed with what is there"]


def test_pieces_that_are_not_what_is_trained_are_named(found):
    """Planted in the memory of workers: swapped, elsewhere, older, or different on the ranks that all hold it."""
    assert found["swapped workers"].startswith("SyncError: shared: of 'model.embed_tokens.weight' rank 0 trains rows")
    elsewhere = found["weights that are elsewhere again"]
    assert elsewhere.startswith("SyncError: rank 1 on host ")
    assert "1 of the trainer's tensors are not in the engine's memory, as 'model.layers.1.mlp.down_proj" in elsewhere
    assert found["a norm that differs"].startswith("RanksDiverged: 'model.layers.0.input_layernorm.weight' differs on")
    assert found["a worker that serves an older piece"] == "differs: ['model.layers.1.mlp.up_proj.weight']"


def test_loaded_rows_are_what_is_computed_with(found):
    """Planted by FSDP2 itself: what was gathered for a score is kept, and would be stale after a load."""
    assert found["scores"] == {"moved": True, "back": True, "version": 1}
