"""Code with tests: the model writes the body of a function, and hidden tests call it in a Python of its own.

The model's code is run. Play it in a sandbox only, as run.toml says: `sandbox = "bwrap"` gives each episode one.
"""

from __future__ import annotations

import asyncio
import json
import operator
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
INPUTS = (-7, 0, 1, 4, 30)
HELD_OUT = 60  # of 324 pairs of steps
MOST_BYTES = 10_000
# The answers of the tests stay with the parent: the child knows the inputs, and what it prints is only compared.
CHILD = f"""
import resource, sys
for kind, most in ((resource.RLIMIT_CPU, 2), (resource.RLIMIT_AS, 2**29), (resource.RLIMIT_FSIZE, 0)):
    resource.setrlimit(kind, (most, most))
scope = {{}}
exec("def f(" + sys.argv[1] + "):\\n" + "".join("    " + line + "\\n" for line in sys.stdin.read().splitlines()), scope)
print([scope["f"](x) for x in {INPUTS}])
"""


@dataclass(frozen=True)
class Coding:
    """`f(k): first +4, then *3` is answered by `return (k+4)*3`. The same steps are in one split only."""

    demo_right: float = 0.4
    """Share of demonstrations with brackets; the others leave them out, which is wrong where `*` comes last."""
    prompt: str = "{problem}"
    """For a chat model: `Write the body of a Python function, and nothing else. {problem}.`"""
    timeout_s: float = 5.0
    """Seconds for all tests of an answer."""

    def tasks(self, split: str) -> Sequence[Task]:
        rng, numbers = random.Random(0), range(1, 10)
        steps = list(product("+-", numbers, "+*", numbers))
        rng.shuffle(steps)
        asked = list(product(steps[:HELD_OUT] if split == "eval" else steps[HELD_OUT:], "abnxy"))
        rng.shuffle(asked)
        return [self._task(x, *each) for each, x in asked]

    def _task(self, x: str, first: str, a: int, second: str, b: int) -> Task:
        problem = f"f({x}): first {first}{a}, then {second}{b}"
        payload = {"x": x, "steps": [[first, a], [second, b]]}
        return Task(problem, ({"role": "user", "content": self.prompt.replace("{problem}", problem)},), payload)

    async def run(self, task: Task, chat: Chat) -> Outcome:
        (first, a), (second, b) = task.payload["steps"]
        wanted = [OPERATIONS[second](OPERATIONS[first](x, a), b) for x in INPUTS]
        text = (await chat.reply()).text.strip()
        results = await asyncio.to_thread(results_of, task.payload["x"], text, self.timeout_s)
        passed = results == wanted
        return Outcome(float(passed), {"correct": float(passed), "ran": float(results is not None)})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        (first, a), (second, b) = task.payload["steps"]
        inner = f"{task.payload['x']}{first}{a}"
        shown = f"({inner}){second}{b}" if rng.random() < self.demo_right else f"{inner}{second}{b}"
        return [{"role": "assistant", "content": f"return {shown}"}]


def results_of(x: str, body: str, timeout_s: float) -> object:
    """What the function returned for each input; None if it raised, printed something else, or took too long."""
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", CHILD, x],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    told, deadline = b"", time.monotonic() + timeout_s
    try:
        child.stdin.write(body[:MOST_BYTES].encode("utf-8", "replace"))
        child.stdin.close()
        while len(told) < MOST_BYTES and select.select([child.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
            if not (piece := os.read(child.stdout.fileno(), MOST_BYTES)):
                return json.loads(told)  # Python and JSON write a list of numbers alike
            told += piece
    except (ValueError, RecursionError, OSError):
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # what the code started and left, too
        child.wait()
        child.stdout.close()
    return None
