"""TensorBoard's event files, in tensorboard/ of the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class Tensorboard:
    def __init__(self, directory: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(Path(directory) / "tensorboard"))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
