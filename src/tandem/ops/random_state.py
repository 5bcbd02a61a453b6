"""Capture and restore the global random number generators of Python, numpy and torch. Tandem's own generators are
seeded for each use; environments and libraries use the global ones."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """Return the state of all generators as JSON."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": _hex(torch.get_rng_state())}
    if torch.cuda.is_initialized():
        found["cuda"] = [_hex(state) for state in torch.cuda.get_rng_state_all()]
    if "numpy" in sys.modules:
        import numpy as np

        name, keys, *rest = np.random.get_state(legacy=True)
        found["numpy"] = [name, np.asarray(keys).tolist(), *rest]
    return found


def restore(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(_tensor(state["torch"]))
    if len(state.get("cuda", ())) == torch.cuda.device_count() > 0:
        torch.cuda.set_rng_state_all([_tensor(each) for each in state["cuda"]])
    if "numpy" in state:
        import numpy as np

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def _hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
