"""What a process held at most: its own, whoever started it; and whether a run says that what is free is given back."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from tandem.build import built_model, training
from tandem.ops import release_host_memory
from tandem.spec.load import parse_spec
from tandem.train import memory_accounting

_CHILD = "from tandem.ops import release_host_memory; print(release_host_memory.peak_bytes())"


def test_a_process_that_a_large_one_starts_is_not_counted_as_large():
    large = bytearray(2**29)
    large[::4096] = b"1" * len(range(0, len(large), 4096))
    assert release_host_memory.peak_bytes() > 2**29
    told = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, check=True)
    assert 2**20 < int(told.stdout) < 2**29


def test_what_is_given_back_still_counts():
    held = "large = bytearray(2**27); large[::4096] = b'1' * 2**15; del large; "
    told = subprocess.run([sys.executable, "-c", held + _CHILD], capture_output=True, text=True, check=True)
    assert 2**27 < int(told.stdout) < 2**29


@pytest.mark.parametrize(
    ("libc", "worth_bytes", "told"),
    [("glibc", 0, [(True, "")]), ("", 0, [(False, "only glibc supports it")]), ("", 2**30, [])],
    ids=["had", "not had", "not asked for"],
)
def test_a_run_says_whether_free_memory_is_given_back(
    monkeypatch: pytest.MonkeyPatch, libc: str, worth_bytes: int, told: list[tuple[bool, str]]
):
    monkeypatch.setattr(release_host_memory.platform, "libc_ver", lambda: (libc, ""))
    monkeypatch.setattr(memory_accounting, "GIVEN_BACK_BYTES", worth_bytes)
    data = {"kind": "file", "path": "a.jsonl"}
    spec: Any = parse_spec(
        {"recipe": "sft", "model": {"preset": "tiny"}, "data": data, "train": {"steps": 1, "lr": 1e-3}}
    )
    model = built_model.model(spec.model, spec.precision, 0, torch.device("cpu"))
    trainer = training.trainer(spec.train, model, training.sft_algorithm(), 0, 0)
    options: list[tuple[str, Any, bool, str]] = []
    training.show_life(trainer, lambda: None, lambda *option: options.append(option))
    assert options == [("free memory given back", "auto", *each) for each in told]


def test_a_run_says_once_that_its_gpu_is_full_in_step_after_step(caplog: pytest.LogCaptureFixture):
    counts = iter([2, 2, 3, 5, 6])
    full = memory_accounting.FullGpu(lambda: next(counts))
    assert [full.since_last() for _ in range(5)] == [2, 0, 1, 2, 1]
    assert [record.getMessage()[:97] for record in caplog.records] == [
        "the GPU is so full that torch gave memory back to the driver in 3 steps, in this one 2 times: ste"
    ]
