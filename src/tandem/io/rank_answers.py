"""What each rank did of a task that all ranks do together: its result as JSON, or what failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tandem.errors import CheckpointError, SyncError


def tried(work: Callable[[], Any]) -> dict[str, Any]:
    """Return the result, or why there is none: a full disk, a directory that this host does not see."""
    try:
        return {"value": work()}
    except SyncError as error:
        return {"error": str(error)}
    except (OSError, CheckpointError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def what_failed(answers: Sequence[dict[str, Any]]) -> str:
    """Return what failed on which ranks; empty if nothing did. `answers`: in the order of ranks."""
    return "; ".join(f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer)
