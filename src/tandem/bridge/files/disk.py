"""disk, the trainer's end: a whole checkpoint each version; the engine reads it in place."""

from __future__ import annotations

from tandem.bridge.files.checkpoint import CheckpointBridge


class DiskBridge(CheckpointBridge):
    mode = "disk"
