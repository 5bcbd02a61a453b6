"""Score answers by math-verify in a child process: `python -m tandem.env.adapters.math_score`.

math-verify enforces its timeouts by an alarm signal, which reaches only the main thread, where episodes already use the
alarm for their deadlines. Also, a model's text can fill the memory or block a C function for ever. Then only the child
process is lost, and the answer counts as wrong.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tandem.errors import EnvironmentFailed, SpecError

MAX_CHARS = 8_000
"""Characters of a reply that are read: its end, where the answer is."""
_MEMORY_BYTES = 4 * 2**30
_START_S = 120.0


@dataclass(frozen=True, slots=True)
class MathScore:
    correct: bool
    read: bool = True
    """Whether the reply contains an answer."""
    scored: bool = True
    """False if scoring took too long or ended the scorer process."""


class MathScorer:
    """Owns the scorer process: started at the first question, restarted after one that ended it."""

    def __init__(self, timeout_s: int = 3) -> None:
        """`timeout_s`: for each step (reading, comparing)."""
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, "math-score")  # not asyncio's threads: slow answers would block other work
        self.process: subprocess.Popen[str] | None = None
        self._end: Callable[[], object] = _nothing

    async def score(self, gold: str, reply: str) -> MathScore:
        """Score a reply. `gold` and `reply` are LaTeX in $ or \\boxed, or plain expressions."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._score, gold, reply[-MAX_CHARS:])

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _score(self, gold: str, reply: str) -> MathScore:
        process = self.process
        if process is None or process.poll() is not None:
            process = self.process = self._start()
        question = {"gold": gold, "reply": reply, "timeout_s": self._timeout_s}
        # Reading (twice) and comparing each have a timeout; this deadline is for code that an alarm cannot end.
        answer = _asked(process, json.dumps(question) + "\n", 4.0 * self._timeout_s)
        if answer is None:
            self._end()
            return MathScore(correct=False, scored=False)
        return MathScore(**answer)

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", __name__]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._end = weakref.finalize(self, _end, process)
        if _asked(process, "", _START_S) is None:
            self._end()
            raise EnvironmentFailed(f"math-verify: its process did not start: {' '.join(command)}")
        return process


def needs_math_verify(name: str) -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise SpecError(f"environment.name = '{name}': needs math-verify; pip install 'tandem-rl[math]'")


def _nothing() -> None:
    """Do nothing: no process has been started."""


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def _asked(process: subprocess.Popen[str], line: str, deadline_s: float) -> dict[str, Any] | None:
    """Send a line and return the answer; None if the process died or had to be killed."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(deadline_s, process.kill)
    timer.daemon = True
    timer.start()
    try:
        process.stdin.write(line)
        process.stdin.flush()
        answer = process.stdout.readline()
        return json.loads(answer) if answer.endswith("\n") else None
    except OSError:
        return None
    finally:
        timer.cancel()


def main() -> None:
    library: Any = importlib.import_module("math_verify")
    parse, verify = library.parse, library.verify
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    told, sys.stdout = sys.stdout, sys.stderr  # libraries may print; keep that out of the answers
    print("{}", file=told, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        timeout_s = asked["timeout_s"]
        gold = parse(asked["gold"], parsing_timeout=timeout_s)
        found = parse(asked["reply"], parsing_timeout=timeout_s)
        correct = bool(gold and found) and verify(gold, found, timeout_seconds=timeout_s)
        print(json.dumps({"correct": bool(correct), "read": bool(found)}), file=told, flush=True)


if __name__ == "__main__":
    main()
