"""The other ranks of a trainer on this host: started by rank 0, and gone when rank 0 is gone.

They are told where to meet by the variables that torchrun uses, too.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from tandem.io.child_process import Child

_LOOPBACK = "127.0.0.1"


def given_by_launcher() -> tuple[int, int] | None:
    """Return rank and number of ranks where a launcher (torchrun) started this process as one of several; else None."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ or "MASTER_ADDR" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class RankProcesses:
    """Ranks 1 to `ranks` - 1. `listening` is where they meet; rank 0 makes its store of it."""

    def __init__(self, ranks: int, directory: Path) -> None:
        self.listening = socket.create_server((_LOOPBACK, 0))
        self.host, self.port = self.listening.getsockname()[:2]
        self._children: dict[int, Child] = {}
        for rank in range(1, ranks):
            self._children[rank] = Child(
                [sys.executable, "-m", "tandem.recipes.follower", str(directory)],
                ready_file=directory / "ranks" / f"{rank}.ready",
                log=directory / "ranks" / f"{rank}.txt",
                environment={
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": self.host, "MASTER_PORT": str(self.port),
                    **loopback_only(),
                },
                name=f"rank {rank}",
            )  # fmt: skip

    def ended(self) -> Mapping[int, str]:
        """Return how those ended that have ended."""
        return {rank: child.epitaph() for rank, child in self._children.items() if child.exit_code is not None}

    def kill(self) -> None:
        for child in self._children.values():
            child.stop(grace_s=0.0)

    def close(self, grace_s: float = 10.0) -> None:
        """Wait for all to end by themselves, at most `grace_s` together; then end them."""
        for child in self._children.values():
            child.ended_within(grace_s)
        self.kill()
        self.listening.close()


def loopback_only() -> Mapping[str, str]:
    """The interface that gloo uses among processes of one host: its own choice follows the host's name, which need not
    lead to this host."""
    name = "lo0" if sys.platform == "darwin" else "lo"
    return {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": name}
