"""Find in vLLM's log why it ended. Its answers and the log's last lines name the process that noticed it."""

from __future__ import annotations

import re

_PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:ERROR \S+ \S+ \[[^\]]*\] ?)?")
_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception)(?:: .+)?$")
_NOTICED = ("EngineDeadError", "initialization failed", "Worker failed with error", "CancelledError")
"""In lines of processes that noticed that another one had failed."""
_NOT_INSPECTED, _REFUSED = "failed to be inspected", "validation error for"
"""vLLM imports a model's class in a process of its own; that failed, and then it refuses the configuration."""


def first_cause(log: str) -> str:
    """Return the last error in the log that is a cause; empty if there is none."""
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines()]
    errors = [line for line in lines if _ERROR.match(line) and not any(mark in line for mark in _NOTICED)]
    if _NOT_INSPECTED in log:
        errors = [line for line in errors if _REFUSED not in line] or errors
    return errors[-1][:500] if errors else ""
