"""Test helper: `tandem rollouts serve` as a process that tests kill and restart."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollouts_served import RolloutClient
from served import wait_until


@contextmanager
def rollouts_process(data_dir: Path, *options: str, ready: Path | None = None) -> Iterator[RolloutClient]:
    """Killed at the end. `ready`: where it says that it listens; by default it is left to it."""
    command = [sys.executable, "-m", "tandem", "rollouts", "serve", "--data-dir", str(data_dir), *options]
    ready_file = ready or data_dir / "ready.json"
    ready_file.unlink(missing_ok=True)
    process = subprocess.Popen(
        [*command, *(["--ready-file", str(ready)] if ready else [])],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: ready_file.exists() or process.poll() is not None, 60)
        assert ready_file.exists(), process.communicate()
        said = json.loads(ready_file.read_text())
        client = RolloutClient(said["url"], Path(said["token_file"]).read_text())
        with client.http:
            yield client
    finally:
        process.kill()
        process.communicate()
