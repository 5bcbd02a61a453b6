"""restart, the trainer's end: a whole checkpoint each version; the engine's process starts again from it."""

from __future__ import annotations

from tandem.bridge.files.checkpoint import CheckpointBridge


class RestartBridge(CheckpointBridge):
    mode = "restart"
