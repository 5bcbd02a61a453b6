"""`tandem sync bench`: figures are those of the proofs, what is not proven is not called so, memory is counted."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.errors import SpecError, SyncError
from tandem.obs.sync_bench_report import Bench, BenchRow, bench_json, bench_png, bench_text
from tandem.obs.sync_report import AT_THE_TRAINER, ONE_AFTER_THE_OTHER, PHASES
from tandem.ops.memory_meter import ProcessMemory, copy_bytes_per_s
from tandem.recipes import sync_bench
from tandem.recipes.sync_bench import BRIDGES, bench_sync
from tandem.types import Proof

TANDEM = Path(sys.executable).with_name("tandem")
SECONDS = {"gather": 0.002, "move": 0.004, "wait": 0.006, "apply": 0.001, "canary": 0.010, "total": 0.020}


def proofs(**other: Any) -> list[Proof]:
    base = Proof(1, "disk", "digest", 48, 1_000_000, SECONDS, canary_tokens=2, logprob_gap=1e-7, gap_limit=1e-4)
    return [replace(base, **{"version": version, "digest": str(version), **other}) for version in (1, 2, 3)]


def summed_up(found: list[Proof]) -> BenchRow:
    return sync_bench.summed_up(BenchRow("disk", "server"), found, 2.0**20, 1e9)


def test_figures_are_of_the_median_round_and_add_up():
    found = proofs()
    found[1] = replace(found[1], seconds={**SECONDS, "total": 0.5})
    found[2] = replace(found[2], seconds={**SECONDS, "apply": 0.0, "total": 0.019})
    row = summed_up(found)
    assert (row.verified, row.how, row.rounds, row.bytes, row.extra_mib) == (True, "digest", 3, 1_000_000, 1.0)
    assert row.ms == pytest.approx(20)
    assert row.phases == pytest.approx({"gather": 2, "move": 4, "wait": 6, "apply": 1, "canary": 10})
    assert row.rest_ms == pytest.approx(20 - 6 - 1 - 10)
    assert row.gb_s == pytest.approx(1e6 / 0.010 / 1e9)
    assert row.link_share == pytest.approx(row.gb_s)


@pytest.mark.parametrize(
    "fault",
    [
        {"digest": "the same"},
        {"logprob_gap": 1.0},
        {"logprob_gap": float("nan")},
        {"canary_tokens": 0},
        {"verified": "none"},
    ],
    ids=str,
)
def test_a_row_without_sound_proofs_is_not_verified(fault: dict[str, Any]):
    assert not summed_up(proofs(**fault)).verified


def test_one_memory_has_one_digest_in_every_round():
    assert summed_up(proofs(verified="identity", digest="the same", bytes_moved=0)).gb_s is None
    assert summed_up(proofs(verified="identity", digest="the same")).verified


MADE_UP = Bench(
    "cpu",
    "tiny",
    1_084_032,
    "one copy",
    6.5,
    (
        summed_up(proofs()),
        replace(summed_up(proofs()), bridge="restart", ms=9000.0, phases={"apply": 9000.0, "canary": 9.0}),
        BenchRow("broadcast", "vllm", skipped="there is one GPU"),
        BenchRow("shared", "server", error="SyncError: of another meeting"),
    ),
)


def test_a_row_that_was_not_had_says_why_and_one_that_failed_fails_the_bench():
    assert MADE_UP.failed
    assert not replace(MADE_UP, rows=MADE_UP.rows[:3]).failed
    text = bench_text(MADE_UP)
    assert "broadcast: skipped: there is one GPU" in text
    assert "shared: FAILED: SyncError: of another meeting" in text
    told = bench_json(MADE_UP)
    assert told["rows"][2] | {"skipped": "there is one GPU", "verified": False} == told["rows"][2]
    assert "error" not in told["rows"][2]
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_the_picture_is_one_whatever_rows_there_are():
    for rows in (MADE_UP.rows, MADE_UP.rows[:1], ()):
        assert bench_png(replace(MADE_UP, rows=rows)).startswith(b"\x89PNG")


def test_unknown_shapes_and_bridges_are_refused_before_anything_is_made():
    with pytest.raises(SpecError, match="--shape = 'huge': there are tiny"):
        bench_sync("huge")
    with pytest.raises(SpecError, match="--bridge = 'pigeon': there are inproc"):
        bench_sync(bridges=["pigeon"])
    with pytest.raises(SpecError, match=r"engine\.start_deadline = 9: unknown here; did you mean 'start_deadline_s'"):
        bench_sync(device="cpu", options={"start_deadline": 9})


def test_the_engine_takes_what_a_spec_would_say_of_it(tmp_path: Path):
    options = {"python": "/opt/vllm/bin/python", "start_deadline_s": 900.0}
    spec = sync_bench.bench_spec("disk", "tiny", "cpu", "vllm", tmp_path, options)
    assert (spec.engine.python, spec.engine.start_deadline_s) == ("/opt/vllm/bin/python", 900.0)
    assert sync_bench.bench_spec("inproc", "tiny", "cpu", "vllm", tmp_path, options).engine.kind == "hf"


@pytest.mark.parametrize("name", BRIDGES)
def test_every_bridge_has_a_spec_that_is_accepted(tmp_path: Path, name: str):
    spec = sync_bench.bench_spec(name, "tiny", "cpu", "server", tmp_path)
    assert spec.sync.bridge == name
    assert spec.sync.retries == 0


# --- the real thing


@pytest.mark.usefixtures("one_thread")
def test_weights_that_did_not_move_are_not_called_proven(monkeypatch: pytest.MonkeyPatch):
    """Planted: every round sends the same bytes under a new version. Both ends agree, and still nothing was shown."""

    def only_count(model: Any, trainer: Any) -> None:
        trainer.version += 1

    monkeypatch.setattr(sync_bench, "move_weights", only_count)
    bench = bench_sync(bridges=["disk"], device="cpu", rounds=2)
    assert not bench.rows[0].verified
    assert bench.failed


def test_a_way_that_breaks_is_a_row_with_its_error(monkeypatch: pytest.MonkeyPatch, one_thread: None):
    def broken(*_: Any, **options: Any) -> Any:
        raise SyncError("disk: no space left")

    monkeypatch.setattr("tandem.build.run_engines.join", broken)
    bench = bench_sync(bridges=["inproc"], device="cpu", rounds=1)
    assert bench.rows[0].error == "SyncError: disk: no space left"
    assert bench.failed


def test_the_command_prints_json_alone_and_every_row_is_verified(tmp_path: Path):
    command = [TANDEM, "sync", "bench", "--device", "cpu", "--rounds", "2", "--json", "--png", tmp_path / "b.png"]
    command += ["--bridge", "inproc", "--bridge", "adapter_broadcast", "--bridge", "broadcast"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["device"], told["shape"]) == ("cpu", "tiny")
    assert told["link_gb_s"] > 0
    assert [(row["bridge"], row["verified"], row["rounds"]) for row in told["rows"]] == [
        ("inproc", True, 2),
        ("adapter_broadcast", True, 2),
        ("broadcast", True, 2),
    ]
    assert all(row["ms"] > 0 for row in told["rows"])
    assert [row["bytes"] > 0 for row in told["rows"]] == [False, True, True]
    for row in told["rows"]:
        in_turn = [row["phases"].get(phase, 0.0) for phase in ONE_AFTER_THE_OTHER]
        assert sum(in_turn) + row["rest_ms"] == pytest.approx(row["ms"])
        assert 0 < row["rest_ms"] < row["ms"]  # nothing is counted twice
        assert row["phases"].keys() <= set(PHASES)
    assert all(set(AT_THE_TRAINER) <= row["phases"].keys() for row in told["rows"][1:])
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


# --- memory and links

CHILD = """
import sys
print("there", flush=True)
sys.stdin.readline()
held = bytearray(64 * 2**20)
del held
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's peaks")
def test_memory_that_was_taken_and_given_back_is_counted_in_this_process_and_in_its_children():
    with _child(CHILD) as child, _child(CHILD) as other:
        quiet = ProcessMemory()
        assert quiet.extra_bytes() is not None
        assert (quiet.extra_bytes() or 0) < 8 * 2**20
        memory = ProcessMemory()
        with mmap.mmap(-1, 32 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
            for page in range(0, len(held), mmap.PAGESIZE):  # malloc would give what earlier tests have left
                held[page] = 1
        _end(other)  # what it had is nobody's gain
        ours = memory.extra_bytes() or 0
        assert 30 * 2**20 < ours < 50 * 2**20
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
        assert 92 * 2**20 < (memory.extra_bytes() or 0) < 130 * 2**20
        _end(child)


@contextmanager
def _child(code: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        try:
            assert it.stdout is not None
            assert it.stdout.readline() == "there\n"
            yield it
        finally:
            it.kill()


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait(timeout=10)


def test_a_link_is_as_fast_as_a_copy(one_thread: None):
    source = torch.ones(2**24)
    target = torch.empty_like(source)
    target.copy_(source)
    started = time.perf_counter()
    target.copy_(source)
    one = 2**26 / (time.perf_counter() - started)
    assert one / 5 < copy_bytes_per_s("cpu") < one * 10
