"""disk, the engine's end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tandem.bridge.files.reader import FilesSource


def open(link: Mapping[str, Any], device: torch.device | None = None) -> FilesSource:
    return FilesSource(link, "disk", carries="full", device=device)
