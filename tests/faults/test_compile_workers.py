"""SIGTERM to all processes of a run while it compiles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

COMPILES = """
import os, signal, sys
from contextlib import nullcontext
from tandem.model.forward import without_sigterm
from torch._inductor.async_compile import AsyncCompile

signal.signal(signal.SIGTERM, lambda *_: None)  # a run saves, and ends after its step
with without_sigterm() if sys.argv[1] == "held" else nullcontext():
    AsyncCompile.process_pool().submit(os.getpid).result(60)
print("ready", flush=True)
sys.stdin.readline()
print("worker", AsyncCompile.process_pool().submit(os.getpid).result(8), flush=True)
"""


@pytest.mark.parametrize("held", [True, False])
def test_compiler_outlives_a_sigterm_that_goes_to_all_processes(held):
    run = subprocess.Popen(
        [sys.executable, "-c", COMPILES, "held" if held else "as torch starts it"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"},
    )  # fmt: skip
    try:
        assert run.stdout.readline() == "ready\n", run.stderr.read()
        os.killpg(run.pid, signal.SIGTERM)
        out, err = run.communicate("go on\n", timeout=60)
    finally:
        run.kill()
    assert ("worker" in out) == held, (out, err)
